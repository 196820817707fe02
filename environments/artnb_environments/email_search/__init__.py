"""How does an agent find one fact among a thousand mails? It searches, reads, and names its sources."""

from importlib.resources import files

from artnb_environments.email_search.baselines import baselines
from artnb_environments.email_search.render import render
from artnb_environments.email_search.rollout import demonstration, dialogue, rollout
from artnb_environments.email_search.tools import metrics
from artnb_environments.email_search.variant import Variant, presets, scenarios

card = files(__name__).joinpath("README.md").read_text(encoding="utf-8")

__all__ = [
    "Variant",
    "baselines",
    "card",
    "demonstration",
    "dialogue",
    "metrics",
    "presets",
    "render",
    "rollout",
    "scenarios",
]
