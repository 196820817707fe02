"""Which options has this environment, and how is a question drawn for a seed?"""

from __future__ import annotations

import hashlib
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from artnb import ConfigurationError, Scenario
from artnb_environments import make_scenarios, require, require_one_of, split_seeds
from artnb_environments.email_search.baselines import level_of
from artnb_environments.email_search.imported import read_questions
from artnb_environments.email_search.questions import draw_question
from artnb_environments.email_search.semantic import EMBEDDERS, SEARCHES
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
    search: str = "keywords"
    """``keywords``: all of them, newest first; ``semantic``: by meaning; ``both``: fused, best first."""
    embedder: str = "lsa"
    """Of the search by meaning: ``lsa``, learned from the inbox, or ``wordllama``, a package with vectors."""
    mailbox: str | None = None
    """A file of ``import_mailbox``; None for the generated mailboxes."""
    questions: str | None = None
    """The questions on an imported mailbox, a JSON object a line."""
    max_tokens: int | None = None
    """Longest reply; None: 256 for tools, 48 for text."""

    def __post_init__(self) -> None:
        require_one_of("style", self.style, ("tools", "text"))
        require_one_of("invalid", self.invalid, ("end", "retry"))
        require_one_of("level", self.level, (0, 1, 2, 3))
        require_one_of("search", self.search, SEARCHES)
        require_one_of("embedder", self.embedder, EMBEDDERS)
        is_both = (self.mailbox is None) == (self.questions is None)
        require(is_both, "mailbox and questions go together: pass both, or neither")
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
    if chosen.mailbox is not None:
        return _imported_scenarios(split, n, seed, chosen)

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


def _imported_scenarios(split: str, n: int, seed: int, chosen: Variant) -> list[Scenario]:
    """Questions of the file, in an order of the seed's; other levels than the one asked for are left out."""
    split_seeds(split, n, seed)  # refuses a split or a count that cannot be
    assert chosen.mailbox is not None and chosen.questions is not None
    asked = [task for task in read_questions(chosen.questions, chosen.mailbox) if task["split"] == split]
    random.Random(f"{split}/{seed}").shuffle(asked)
    found: list[Scenario] = []
    for task in asked:
        if len(found) == n:
            break
        options = asdict(chosen) | {
            name: value for name, value in task.items() if name not in ("id", "split")
        }
        number = int(hashlib.sha256(task["id"].encode()).hexdigest()[:10], 16)
        scenario = Scenario(
            f"email_search/{Path(chosen.mailbox).stem}/{split}/{task['id']}", split, number, options
        )
        level = level_of(scenario)
        if chosen.level in (0, level):
            found.append(replace(scenario, task=options | {"level_found": level}))
    require(len(found) == n, f"{chosen.questions} has {len(found)} such questions for {split}, not {n}")
    return found


def _draw_task(split: str, draw: random.Random, variant: Variant) -> dict[str, Any]:
    world, number = draw.choice(WORLDS[split]), draw.randrange(INBOXES)
    inbox = make_inbox(split, world, number, variant.messages, variant.distractors)
    asked = draw_question(inbox, split, draw, variant.paraphrase)
    return asked | {"world": world, "inbox": number, "level_found": 0}
