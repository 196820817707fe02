"""Where does each mail belong? The user's rules say, and where two fit, they say which one wins."""

from importlib.resources import files

from artnb_environments.email_filing.baselines import baselines
from artnb_environments.email_filing.render import render
from artnb_environments.email_filing.rollout import dialogue, rollout
from artnb_environments.email_filing.tools import metrics
from artnb_environments.email_filing.variant import Variant, presets, scenarios

card = files(__name__).joinpath("README.md").read_text(encoding="utf-8")

__all__ = ["Variant", "baselines", "card", "dialogue", "metrics", "presets", "render", "rollout", "scenarios"]
