"""Which options has this environment, and how are rules and mails drawn for a seed?"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from artnb import Scenario
from artnb_environments import make_scenarios, require, require_one_of
from artnb_environments.email_filing.rules import FIXED, SPECIALS, TOPICS, draw_mails, draw_rules, places

MOST_EXAMPLES = 4


@dataclass(frozen=True)
class Variant:
    """The options of this environment."""

    style: str = "tools"
    """``tools``: a mailbox with tools; ``word``: one mail, one reply, the folder's name alone."""
    examples: int = 0
    """Worked mails in the prompt, 0 to 4."""
    mails: int = 8
    """Mails to file, 1 to 40; always 1 in the word style."""
    topics: int = 7
    """Rules on topics, 2 to 7; with 7 newsletters and digests have folders, too."""
    specials: int = 3
    """Rules that win over topics and over each other, 0 to 3."""
    conflicts: float = 0.4
    """Share of mails that two rules fit, 0 to 1."""
    fixed_rules: bool = False
    """The same four folders and rules in every scenario, in place of ``topics`` and ``specials``."""
    max_turns: int | None = None
    """Replies of an episode; None: three a mail and eight."""
    invalid: str = "retry"
    """After a reply that is no call the agent reads why; ``end``: the episode is over."""
    max_tokens: int | None = None
    """Longest reply; None: 128 for tools, 8 for a word."""

    def __post_init__(self) -> None:
        require_one_of("style", self.style, ("tools", "word"))
        require_one_of("invalid", self.invalid, ("end", "retry"))
        require(0 <= self.examples <= MOST_EXAMPLES, f"examples must be 0 to 4, got {self.examples}")
        require(1 <= self.mails <= 40, f"mails must be 1 to 40, got {self.mails}")
        require(2 <= self.topics <= len(TOPICS), f"topics must be 2 to 7, got {self.topics}")
        require(0 <= self.specials <= len(SPECIALS), f"specials must be 0 to 3, got {self.specials}")
        require(0 <= self.conflicts <= 1, f"conflicts must be 0 to 1, got {self.conflicts}")
        require(self.max_turns is None or self.max_turns >= 1, "max_turns must be 1 or more, or None")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens must be 1 or more, or None")


presets: dict[str, dict[str, Any]] = {
    "small": {"style": "word", "examples": 4, "fixed_rules": True, "conflicts": 0.25},
    "word": {"style": "word"},
}


def scenarios(split: str, n: int, seed: int = 0, **variant: Any) -> list[Scenario]:
    """Mails of the split's inboxes, with rules of their own; the task holds each mail's right folder."""
    chosen = Variant(**variant)

    def start(scenario_seed: int) -> dict[str, Any]:
        draw = random.Random(scenario_seed)
        place = draw.choice(list(places(split)))
        rules = FIXED
        if not chosen.fixed_rules:
            rules = draw_rules(split, *place, draw, chosen.topics, chosen.specials)
        mails = 1 if chosen.style == "word" else chosen.mails
        filed = draw_mails(rules, split, draw, place, mails, chosen.conflicts)
        return {
            "world": place[0],
            "inbox": place[1],
            "ids": [mail for mail, _ in filed],
            "right": [folder for _, folder in filed],
            "rules_seed": rules.seed,
            "topic_kinds": list(rules.topics),
            "special_rules": [[s.kind, s.value, s.folder, s.name] for s in rules.specials],
        }

    return make_scenarios("email_filing", split, n, seed, chosen, start)
