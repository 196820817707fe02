"""How does an agent remember more than it can see? A ledger in parts, of which only the notes stay."""

from importlib.resources import files

from artnb_environments.long_ledger.baselines import baselines
from artnb_environments.long_ledger.episode import Variant, metrics, presets, scenarios
from artnb_environments.long_ledger.render import render
from artnb_environments.long_ledger.rollout import dialogue, oracle_episode, rollout

card = files(__name__).joinpath("README.md").read_text(encoding="utf-8")

__all__ = [
    "Variant",
    "baselines",
    "card",
    "dialogue",
    "metrics",
    "oracle_episode",
    "presets",
    "render",
    "rollout",
    "scenarios",
]
