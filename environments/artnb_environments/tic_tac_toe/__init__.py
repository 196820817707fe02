"""How does a model learn a game of two? Tic-tac-toe against scripted opponents, or against itself."""

from importlib.resources import files

from artnb_environments.tic_tac_toe.baselines import baselines
from artnb_environments.tic_tac_toe.episode import Variant, metrics, presets, scenarios
from artnb_environments.tic_tac_toe.render import render
from artnb_environments.tic_tac_toe.rollout import dialogue, rollout
from artnb_environments.tic_tac_toe.self_play import rollout_self_play

card = files(__name__).joinpath("README.md").read_text(encoding="utf-8")

__all__ = [
    "Variant",
    "baselines",
    "card",
    "dialogue",
    "metrics",
    "presets",
    "render",
    "rollout",
    "rollout_self_play",
    "scenarios",
]
