"""What is asked of a mailbox, and what is the right answer? Questions from facts, with sources and a day.

The day matters: mail from then on is not there yet, so an answer may be one that was superseded later.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from artnb_environments.email_search.words import KINDS
from artnb_environments.email_search.world import Fact, Inbox, Value

UNANSWERABLE, TWO_SOURCES = 0.1, 0.2
DONT_KNOW = "I don't know"


def draw_question(inbox: Inbox, split: str, draw: random.Random, paraphrase: float) -> dict[str, Any]:
    """One question as plain values: question, day, answer, answer_type, sources, parts (what each
    source says), hints.

    ``paraphrase``: how often an item goes by words that no mail holds.
    """
    sort = draw.random()
    if sort < UNANSWERABLE:
        asked = _unanswerable(inbox, split, draw, paraphrase)
    elif sort < UNANSWERABLE + TWO_SOURCES:
        asked = _two_sources(inbox, split, draw, paraphrase)
    else:
        asked = None
    return asked or _one_source(inbox, split, draw, paraphrase)


def _one_source(inbox: Inbox, split: str, draw: random.Random, paraphrase: float) -> dict[str, Any]:
    fact = draw.choice([fact for fact in inbox.facts if fact.values])
    index = draw.randrange(len(fact.values))
    value = fact.values[index]
    following = fact.values[index + 1].date if index + 1 < len(fact.values) else None
    day = _day(value.date, following, draw)
    if day is None:  # the next value came on the same day
        value, day = fact.values[-1], str(_day(fact.last_date, None, draw))
    words, where = _item(fact, split, draw, paraphrase), _where(fact, draw)
    template = draw.choice(KINDS[fact.kind].questions[split])
    return _question(template.format(item=words, where=where), day, value.text, [fact], [value])


def _unanswerable(inbox: Inbox, split: str, draw: random.Random, paraphrase: float) -> dict[str, Any] | None:
    """A thread that asked and was never told."""
    open_facts = [fact for fact in inbox.facts if not fact.values]
    if not open_facts:
        return None
    fact = draw.choice(open_facts)
    words = _item(fact, split, draw, paraphrase)
    # Approvals and hires ask for a person, whom the question must not name.
    text = draw.choice(KINDS[fact.kind].questions[split]).format(item=words, where=_where(fact, draw))
    return _question(text, str(_day(fact.asked, None, draw)), DONT_KNOW, [fact], [])


def _two_sources(inbox: Inbox, split: str, draw: random.Random, paraphrase: float) -> dict[str, Any] | None:
    """The sum of two amounts or of two counts, each in a mail of its own."""
    pairs = [
        (one, two)
        for one, two in _pairs(inbox.facts)
        if one.kind == two.kind and KINDS[one.kind].together and one.item != two.item
    ]
    if not pairs:
        return None
    facts = list(draw.choice(pairs))
    text = (KINDS[facts[0].kind].together or {})[split].format(
        item=_item(facts[0], split, draw, paraphrase),
        where=_where(facts[0], draw),
        item2=_item(facts[1], split, draw, paraphrase),
        where2=_where(facts[1], draw),
    )
    values = [fact.values[-1] for fact in facts]
    total = sum(int(value.text.strip("$").replace(",", "")) for value in values)
    answer = f"${total:,}" if facts[0].type == "money" else str(total)
    return _question(text, str(_day(max(v.date for v in values), None, draw)), answer, facts, values)


def _pairs(facts: tuple[Fact, ...]) -> Iterator[tuple[Fact, Fact]]:
    told = [fact for fact in facts if fact.values]
    return ((one, two) for index, one in enumerate(told) for two in told[index + 1 :])


def _question(text: str, day: str, answer: str, facts: list[Fact], values: list[Value]) -> dict[str, Any]:
    return {
        "question": text,
        "day": day,
        "answer": answer,
        "answer_type": facts[0].type,
        "sources": [value.source for value in values],
        "parts": [value.text for value in values],
        "hints": [hint for fact in facts for hint in _hints(fact)],
    }


def _hints(fact: Fact) -> list[str]:
    """What the user tells who is asked back, one at a time."""
    hints = [f'The mails call it "{fact.item[0]}".', f"It was for {fact.project}."]
    if fact.type != "person":
        hints.append(f"I think it was {fact.person.name} who wrote about it.")
    return [*hints, f"We began to talk about it around {fact.asked[:10]}."]


def _item(fact: Fact, split: str, draw: random.Random, paraphrase: float) -> str:
    if draw.random() >= paraphrase:
        return fact.item[0]
    return fact.item[1] if split == "train" else fact.item[2]


def _where(fact: Fact, draw: random.Random) -> str:
    """The place, or the person who wrote; either with the item and the kind names one fact."""
    if fact.type == "person" or draw.random() < 0.6:
        return f"for {fact.project}"
    return f"according to {fact.person.name}"


def _day(after: str, before: str | None, draw: random.Random) -> str | None:
    """A day 1 to 40 days after one moment and not after the day of another; None where there is none."""
    first = datetime.fromisoformat(after[:10]) + timedelta(days=1)
    room = 40 if before is None else (datetime.fromisoformat(before[:10]) - first).days
    return None if room < 0 else str(first + timedelta(days=draw.randint(0, min(room, 39))))[:10]
