"""Which options has this environment, and how is a question drawn for a seed?"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from artnb import ConfigurationError, Scenario
from artnb_environments import make_scenarios, require, require_one_of
from artnb_environments.email_search.baselines import level_of
from artnb_environments.email_search.questions import draw_question
from artnb_environments.email_search.world import DISTRACTORS, INBOXES, WORLDS, make_inbox

_TRIES = 400
MOST_EXAMPLES = 2


@dataclass(frozen=True)
class Variant:
    """The options of this environment."""

    style: str = "tools"
    """``tools``: tool calls of the API; ``text``: ``<call>search ...</call>``, for small models."""
    examples: int = 0
    """Worked episodes in the prompt, 0 to 2."""
    messages: int = 1000
    """Mails of an inbox, 20 to 5,000."""
    paraphrase: float = 0.7
    """How often a question uses words that no mail holds, 0 to 1."""
    distractors: float = DISTRACTORS
    """How often a reply in a thread names a value of a former year, 0 to 1."""
    level: int = 0
    """0: all questions; 1: those that the newest hit answers; 2: those that BM25 does; 3: the others."""
    max_turns: int = 10
    """Replies of an episode."""
    invalid: str = "end"
    """A reply that is no call ends the episode; or ``retry``: the agent reads why and has lost the turn."""
    ask_user: bool = False
    """A tool that asks the user back, at 0.05 a question."""
    max_tokens: int | None = None
    """Longest reply; None: 256 for tools, 48 for text."""

    def __post_init__(self) -> None:
        require_one_of("style", self.style, ("tools", "text"))
        require_one_of("invalid", self.invalid, ("end", "retry"))
        require_one_of("level", self.level, (0, 1, 2, 3))
        require(0 <= self.examples <= MOST_EXAMPLES, f"examples must be 0 to 2, got {self.examples}")
        require(20 <= self.messages <= 5000, f"messages must be 20 to 5,000, got {self.messages}")
        require(0 <= self.paraphrase <= 1, f"paraphrase must be 0 to 1, got {self.paraphrase}")
        require(0 <= self.distractors <= 1, f"distractors must be 0 to 1, got {self.distractors}")
        require(self.max_turns >= 1, f"max_turns must be 1 or more, got {self.max_turns}")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens must be 1 or more, or None")


presets: dict[str, dict[str, Any]] = {
    "small": {
        "style": "text",
        "examples": 2,
        "messages": 40,
        "paraphrase": 0.0,
        "distractors": 0.0,
        "level": 1,
        "max_turns": 4,
        "invalid": "retry",
    },
    "level1": {"level": 1, "messages": 200, "paraphrase": 0.3, "distractors": 0.3},
    "hard": {"level": 3},
}


def scenarios(split: str, n: int, seed: int = 0, **variant: Any) -> list[Scenario]:
    """Questions on inboxes of the split's worlds; the task holds the answer and its sources."""
    chosen = Variant(**variant)

    def start(question_seed: int) -> dict[str, Any]:
        draw = random.Random(question_seed)
        for _ in range(_TRIES):
            task = _draw_task(split, draw, chosen)
            level = level_of(Scenario("", split, question_seed, asdict(chosen) | task))
            if chosen.level in (0, level):
                return task | {"level_found": level}
        raise ConfigurationError(
            f"no question of level {chosen.level} in {_TRIES}: change messages or paraphrase"
        )

    return make_scenarios("email_search", split, n, seed, chosen, start)


def _draw_task(split: str, draw: random.Random, variant: Variant) -> dict[str, Any]:
    world, number = draw.choice(WORLDS[split]), draw.randrange(INBOXES)
    inbox = make_inbox(split, world, number, variant.messages, variant.distractors)
    asked = draw_question(inbox, split, draw, variant.paraphrase)
    return asked | {"world": world, "inbox": number, "level_found": 0}
