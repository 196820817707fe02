"""Which options has this environment, and how is a question drawn for a seed?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from artnb import ConfigurationError, Scenario
from artnb_environments import make_scenarios, require, require_one_of
from artnb_environments.finance_mcp.questions import TEMPLATES, draw_question, templates_of

MOST_EXAMPLES = 2


@dataclass(frozen=True)
class Variant:
    """The options of this environment."""

    style: str = "tools"
    """``tools``: tool calls of the API; ``text``: ``<call>get_stock_quote AAPL 2012-03-01</call>``."""
    examples: int = 0
    """Worked episodes in the prompt, 0 to 2."""
    template: str = "all"
    """Questions of one template only."""
    max_turns: int = 8
    """Replies of an episode."""
    invalid: str = "retry"
    """After a malformed call the agent reads why and goes on; or ``end``."""
    partial: float = 0.0
    """Reward for the right calls where the answer is not right, 0 to 0.5."""
    transport: str = "in_process"
    """The server is an object of this process; or ``stdio``: a process of its own."""
    page: int = 20_000
    """Characters of a result that are told at once; ``read_more`` gives the next."""
    max_tokens: int | None = None
    """Longest reply; None: 256 for tools, 48 for text."""

    def __post_init__(self) -> None:
        require_one_of("style", self.style, ("tools", "text"))
        require_one_of("template", self.template, ("all", *TEMPLATES))
        require_one_of("invalid", self.invalid, ("retry", "end"))
        require_one_of("transport", self.transport, ("in_process", "stdio"))
        require(0 <= self.examples <= MOST_EXAMPLES, f"examples must be 0 to 2, got {self.examples}")
        require(0 <= self.partial <= 0.5, f"partial must be 0 to 0.5, got {self.partial}")
        require(self.page >= 200, f"page must be 200 or more, got {self.page}")
        require(self.max_turns >= 1, f"max_turns must be 1 or more, got {self.max_turns}")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens must be 1 or more, or None")


presets: dict[str, dict[str, Any]] = {
    "small": {
        "style": "text",
        "examples": 2,
        "template": "close",
        "max_turns": 2,
        "invalid": "end",
        "partial": 0.5,
        "page": 1000,
    },
}


def scenarios(split: str, n: int, seed: int = 0, **variant: Any) -> list[Scenario]:
    """Questions about days of the split; the task holds the answer and the calls that find it."""
    chosen = Variant(**variant)
    if split in ("train", "validation") and chosen.template not in ("all", *templates_of(split)):
        raise ConfigurationError(f"questions of the template {chosen.template!r} are for the split test only")
    return make_scenarios(
        "finance_mcp", split, n, seed, chosen, lambda one: draw_question(split, one, chosen.template)
    )
