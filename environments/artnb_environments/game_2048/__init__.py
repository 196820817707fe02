"""How does a small model learn to play 2048? One move a turn, on a board and to a tile of your choice."""

from importlib.resources import files

from artnb_environments.game_2048.baselines import baselines
from artnb_environments.game_2048.episode import Variant, metrics, presets, scenarios
from artnb_environments.game_2048.render import render
from artnb_environments.game_2048.rollout import dialogue, rollout

card = files(__name__).joinpath("README.md").read_text(encoding="utf-8")

__all__ = ["Variant", "baselines", "card", "dialogue", "metrics", "presets", "render", "rollout", "scenarios"]
