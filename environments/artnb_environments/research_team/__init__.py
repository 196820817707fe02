"""How does a team of agents read more than one agent can hold? Agents call agents, each of small context."""

from importlib.resources import files

from artnb_environments.research_team.baselines import baselines, oracle_episode
from artnb_environments.research_team.documents import Variant, presets, scenarios
from artnb_environments.research_team.render import render
from artnb_environments.research_team.rollout import rollout, rollout_root
from artnb_environments.research_team.team import metrics

card = files(__name__).joinpath("README.md").read_text(encoding="utf-8")

__all__ = [
    "Variant",
    "baselines",
    "card",
    "metrics",
    "oracle_episode",
    "presets",
    "render",
    "rollout",
    "rollout_root",
    "scenarios",
]
