"""How does an agent work with an MCP server? It asks the tools for prices, and answers questions on them."""

from importlib.resources import files

from artnb_environments.finance_mcp.baselines import baselines
from artnb_environments.finance_mcp.episode import metrics
from artnb_environments.finance_mcp.rollout import dialogue, rollout
from artnb_environments.finance_mcp.variant import Variant, presets, scenarios

card = files(__name__).joinpath("README.md").read_text(encoding="utf-8")

__all__ = ["Variant", "baselines", "card", "dialogue", "metrics", "presets", "rollout", "scenarios"]
