"""What is the smallest task of several turns? A hidden number, guesses, and the words higher and lower."""

from importlib.resources import files

from artnb_environments.guess_number.baselines import baselines
from artnb_environments.guess_number.game import Variant, metrics, presets, scenarios
from artnb_environments.guess_number.rollout import dialogue, rollout

card = files(__name__).joinpath("README.md").read_text(encoding="utf-8")

__all__ = ["Variant", "baselines", "card", "dialogue", "metrics", "presets", "rollout", "scenarios"]
