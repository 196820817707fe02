"""What is the smallest agent task? Call a tool, read its result, answer: two turns."""

from importlib.resources import files

from artnb_environments.tool_lookup.rollout import dialogue, rollout
from artnb_environments.tool_lookup.tools import Variant, baselines, metrics, scenarios

card = files(__name__).joinpath("README.md").read_text(encoding="utf-8")

__all__ = ["Variant", "baselines", "card", "dialogue", "metrics", "rollout", "scenarios"]
