"""What is there to read? Reports in parts, each with one value that is asked for among many that are not."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from artnb import Scenario
from artnb_environments import make_scenarios, require, require_one_of

ITEMS = (
    *("harbour dues", "bridge repairs", "street lamps", "school roof", "water pumps", "fire engine"),
    *("market stalls", "library books", "snow ploughs", "bus shelters", "park benches", "town clock"),
)
TOWNS = (
    *("Arlen", "Borvik", "Castra", "Dunmore", "Elsby", "Farrow", "Gildan", "Hollis", "Irvine", "Jarrow"),
    *("Kestrel", "Lorne"),
)
_WHO = ("The council", "The committee", "The mayor", "A resident", "The treasurer", "The clerk")
_DID = ("spoke of", "asked about", "postponed", "praised", "doubted", "looked into", "wrote about")
_WHAT = (
    "the old mill",
    "the spring fair",
    "the new road",
    "the choir",
    "the drains",
    "the ferry",
    "the fence",
)
_WHEN = (
    "in the morning",
    "after a long debate",
    "without a vote",
    "once more",
    "at some length",
    "in passing",
)
_SENTENCE = 70
"""Characters that a part may fall short of its length: no sentence has more."""
OTHERS_A_PART = 2
"""Values of other items in each part."""

presets: dict[str, dict[str, Any]] = {
    "small": {"documents": 1, "parts": 2, "part_length": 240, "context_budget": 320},
}
"""For a small model: one report of two parts, each read by an agent of its own."""


@dataclass(frozen=True)
class Variant:
    """The options of this environment."""

    documents: int = 3
    """Reports, 1 to 12."""
    parts: int = 6
    """Parts of a report, 1 to 40; an agent reads one at a time."""
    part_length: int = 600
    """Characters of a part at most, from 200 on."""
    context_budget: int = 2400
    """Characters that one agent may be told and say beyond its opening; an agent that holds more is ended.
    A report must be longer than this."""
    token_budget: int = 60_000
    """Tokens that all agents together may read and write, over all requests; the episode ends beyond it."""
    max_depth: int = 3
    """Agents above one another, the root counted, 2 to 5."""
    max_agents: int = 16
    """Agents of an episode, the root counted."""
    max_turns: int = 12
    """Replies of one agent."""
    own_weight: float = 0.5
    """Weight of its own sub-score in a sub-agent's reward; the rest is the root's reward."""
    style: str = "tags"
    """``tags``: <call>read</call>; ``tools``: calls of the API."""
    examples: int = 2
    """Short worked examples of the agent's task in its prompt, 0 to 2."""
    invalid: str = "lost_turn"
    """A reply that is no call that can be made: a ``lost_turn``, with the reason told, or the ``end`` of
    this agent."""
    max_tokens: int | None = None
    """Longest reply; None: 64 for tags, 128 for tools."""

    def __post_init__(self) -> None:
        require(1 <= self.documents <= len(TOWNS), f"documents must be 1 to 12, got {self.documents}")
        require(1 <= self.parts <= 40, f"parts must be 1 to 40, got {self.parts}")
        require(self.part_length >= 200, f"part_length must be 200 or more, got {self.part_length}")
        shortest = self.parts * (self.part_length - _SENTENCE)
        require(
            self.part_length < self.context_budget < shortest,
            f"context_budget must hold one part and no whole report: {self.part_length} to {shortest}, "
            f"got {self.context_budget}",
        )
        require(self.token_budget >= 1, f"token_budget must be 1 or more, got {self.token_budget}")
        require(2 <= self.max_depth <= 5, f"max_depth must be 2 to 5, got {self.max_depth}")
        require(self.max_agents >= 2, f"max_agents must be 2 or more, got {self.max_agents}")
        require(self.max_turns >= 1, f"max_turns must be 1 or more, got {self.max_turns}")
        require(0 <= self.own_weight <= 1, f"own_weight must be 0 to 1, got {self.own_weight}")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens must be 1 or more, or None")
        require_one_of("examples", self.examples, (0, 1, 2))
        require_one_of("style", self.style, ("tags", "tools"))
        require_one_of("invalid", self.invalid, ("lost_turn", "end"))


def scenarios(split: str, n: int, seed: int = 0, **variant: Any) -> list[Scenario]:
    """Questions; the scenario's seed decides every report."""
    return make_scenarios("research_team", split, n, seed, Variant(**variant))


@dataclass(frozen=True)
class Document:
    """One town's report."""

    town: str
    parts: tuple[str, ...]
    place: int
    """The part, from 0, that tells the value asked for."""
    value: int


@dataclass(frozen=True)
class Library:
    """All reports, and the item that is asked about."""

    item: str
    documents: tuple[Document, ...]

    @property
    def truth(self) -> tuple[int, ...]:
        return tuple(document.value for document in self.documents)


def fact(item: str, value: int) -> str:
    return f"The {item} cost {value}."


def draw_library(seed: int, variant: Variant) -> Library:
    """The reports of a seed."""
    draw = random.Random(seed)
    item = draw.choice(ITEMS)
    towns = draw.sample(TOWNS, variant.documents)
    return Library(item, tuple(_draw_document(draw, town, item, variant) for town in towns))


def _draw_document(draw: random.Random, town: str, item: str, variant: Variant) -> Document:
    place, value = draw.randrange(variant.parts), draw.randint(10, 99)
    others = [one for one in ITEMS if one != item]
    parts = []
    for number in range(variant.parts):
        facts = [fact(one, draw.randint(10, 99)) for one in draw.sample(others, OTHERS_A_PART)]
        if number == place:
            facts.append(fact(item, value))
        parts.append(_draw_part(draw, facts, variant.part_length))
    return Document(town, tuple(parts), place, value)


def _draw_part(draw: random.Random, facts: list[str], length: int) -> str:
    """The facts in random places among sentences that say nothing, as long as ``length`` allows."""
    sentences = list(facts)
    while True:
        more = f"{draw.choice(_WHO)} {draw.choice(_DID)} {draw.choice(_WHAT)} {draw.choice(_WHEN)}."
        if len(" ".join([*sentences, more])) > length:
            break
        sentences.append(more)
    draw.shuffle(sentences)
    return " ".join(sentences)
