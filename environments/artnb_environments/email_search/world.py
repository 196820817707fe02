"""What stands in a mailbox, and which facts are in it? Both are made from one seed, so answers are known.

A world has a cast, projects and eleven inboxes; each inbox is made when first needed. A fact is one question
of a thread ("what do the vests on Falcon cost?") with every value the thread gave it, each from one mail.
Around it stand what makes it hard to find: values that were superseded, replies that quote an old value after
the new one, threads on the same item elsewhere and on other items in the same place, digests and newsletters
with the same nouns, and mails that try to give the agent orders.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache

from artnb_environments.email_search.words import (
    CHATTER,
    FIRST_NAMES,
    FORMER,
    INJECTION,
    KINDS,
    LAST_NAMES,
    PLACES,
    PROJECTS,
    SMALL_TALK,
)

INBOXES = 11
WORLDS = {"train": (0, 1, 2, 3), "validation": (100,), "test": (1000,)}
"""Seeds of the worlds of each split: no person, project or mail of one is in another's."""
START = datetime(2025, 1, 6, 8)
DAYS = 330
DISTRACTORS = 0.95
GENERATOR_VERSION = 1


@dataclass(frozen=True)
class Person:
    name: str
    address: str


@dataclass(frozen=True)
class Mail:
    """One message; ``date`` is ``YYYY-MM-DD HH:MM:SS``."""

    id: str
    inbox: str
    date: str
    subject: str
    from_address: str
    to: tuple[str, ...]
    cc: tuple[str, ...]
    body: str


@dataclass(frozen=True)
class Value:
    """What one mail says: from ``date`` on it is true, until the fact's next value."""

    text: str
    date: str
    source: str


@dataclass
class Fact:
    kind: str
    item: tuple[str, str, str]
    project: str
    person: Person
    """Who states the values."""
    asked: str
    """When the thread began."""
    values: list[Value] = field(default_factory=list)
    """Oldest first. None at all: it was asked, and nobody ever said."""

    @property
    def type(self) -> str:
        return KINDS[self.kind].type

    @property
    def last_date(self) -> str:
        return self.values[-1].date if self.values else self.asked


@dataclass(frozen=True)
class Inbox:
    owner: Person
    cast: tuple[Person, ...]
    mails: tuple[Mail, ...]
    """Oldest first."""
    facts: tuple[Fact, ...]


@lru_cache(maxsize=16)
def cast_of(split: str, world: int) -> tuple[Person, ...]:
    """The people of a world; no two share a last name, and the first eleven own an inbox."""
    draw = random.Random(f"cast/{split}/{world}")
    last = draw.sample(LAST_NAMES[split], len(LAST_NAMES[split]))
    first = draw.sample(FIRST_NAMES[split], len(last))
    return tuple(Person(f"{f} {n}", f"{f}.{n}@example.com".lower()) for f, n in zip(first, last, strict=True))


@lru_cache(maxsize=80)
def make_inbox(
    split: str, world: int, number: int, messages: int = 1000, distractors: float = DISTRACTORS
) -> Inbox:
    """One inbox of ``messages`` mails. The same arguments always give the same mails.

    ``distractors``: how often a reply to what was asked or said names a value of a former year.
    """
    return _Writer(split, world, number, messages, distractors).inbox()


def make_world(split: str, world: int, messages: int = 1000) -> list[Inbox]:
    """All inboxes of a world: 11,000 mails by default."""
    return [make_inbox(split, world, number, messages) for number in range(INBOXES)]


@dataclass
class _Draft:
    """A mail before its inbox has an order and ids."""

    when: datetime
    subject: str
    sender: str
    to: tuple[str, ...]
    cc: tuple[str, ...]
    body: str


class _Writer:
    """Writes one inbox."""

    def __init__(self, split: str, world: int, number: int, messages: int, distractors: float) -> None:
        self.draw = random.Random(f"{GENERATOR_VERSION}/{split}/{world}/{number}/{messages}/{distractors}")
        self.distractors = distractors
        self.cast = cast_of(split, world)
        self.owner = self.cast[number]
        self.others = [person for person in self.cast if person is not self.owner]
        self.projects = PROJECTS[split]
        self.number = number
        self.messages = messages
        self.drafts: list[_Draft] = []
        self.pending: list[tuple[Fact, list[tuple[str, _Draft]]]] = []
        self.taken: set[tuple[str, ...]] = set()

    def inbox(self) -> Inbox:
        wanted = max(4, self.messages * 9 // 100)
        while len(self.pending) < wanted and len(self.drafts) < self.messages * 0.75:
            self._thread()
        while len(self.drafts) < self.messages:
            self._noise()
        return self._number()

    # ---- threads --------------------------------------------------------------------------------

    def _thread(self) -> None:
        fact = self._new_fact()
        if fact is None:
            return
        kind = KINDS[fact.kind]
        when = START + timedelta(minutes=self.draw.randrange(DAYS * 24 * 60))
        fact.asked = str(when)
        subject = self.draw.choice(
            ("{p}", "{p}: open point", "{p}, as discussed", "{p}: {i}", "Question on {p}")
        )
        subject = subject.format(p=fact.project, i=fact.item[0])
        opening = kind.opening.format(item=fact.item[0])
        panel = tuple(p.address for p in self.draw.sample(self.others, 3) if p is not fact.person)
        self._write(when, subject, self.owner.address, (fact.person.address,), panel, opening)
        stated: list[tuple[str, _Draft]] = []
        if self.draw.random() >= 0.12:
            stated = self._values(fact, when, f"Re: {subject}")
        quotes = [opening, *(draft.body for _, draft in stated)]
        for index, asked_or_told in enumerate([when, *(draft.when for _, draft in stated)]):
            self._chatter(fact, asked_or_told, f"Re: {subject}", quotes[max(0, index - 1)])
        self.pending.append((fact, stated))

    def _new_fact(self) -> Fact | None:
        """A fact that no other of this inbox can be mistaken for; None where the draw gave one that can.

        Half of them share item or place with an earlier one, not both.
        """
        kind = self.draw.choice(list(KINDS))
        item, project = self.draw.choice(KINDS[kind].items), self.draw.choice(self.projects)
        person = self.draw.choice(self.others)
        if self.pending and self.draw.random() < 0.5:
            sibling = self.draw.choice(self.pending)[0]
            kind = sibling.kind
            if self.draw.random() < 0.5:
                project, person = sibling.project, sibling.person
                item = self.draw.choice(KINDS[kind].items)
            else:
                item = sibling.item
        keys = {(kind, item[0], project), (kind, item[0], person.name)}
        if keys & self.taken:
            return None
        self.taken |= keys
        return Fact(kind, item, project, person, "")

    def _values(self, fact: Fact, when: datetime, subject: str) -> list[tuple[str, _Draft]]:
        """The mails that state a value, with it: the first, and up to two that supersede it."""
        kind = KINDS[fact.kind]
        count = 1 if not kind.revises else self.draw.choice((1, 2, 2, 3))
        stated: list[tuple[str, _Draft]] = []
        for number in range(count):
            when += timedelta(minutes=self.draw.randrange(40, 12 * 24 * 60))
            value = fact.person.name
            while fact.kind != "approval":
                value = self._value(kind.type, when)
                if value != fact.person.name and value not in {text for text, _ in stated}:
                    break
            template = kind.revises if number else self.draw.choice(kind.states)
            body = template.format(item=fact.item[0], value=value)
            stated.append(
                (value, self._write(when, subject, fact.person.address, (self.owner.address,), (), body))
            )
        return stated

    def _value(self, kind: str, when: datetime) -> str:
        if kind == "money":
            return f"${self.draw.randrange(400, 9900, 10):,}"
        if kind == "date":
            day = when + timedelta(days=self.draw.randrange(15, 120))
            return f"{day.day} {day:%B} {day.year}"
        if kind == "code":
            letters = self.draw.choice("KLMNPRTX") + self.draw.choice("ABCDEFGH")
            return f"{letters}-{self.draw.randrange(1000, 9999)}"
        if kind == "int":
            return str(self.draw.randrange(11, 180))
        if kind == "place":
            return self.draw.choice(PLACES)
        return self.draw.choice(self.others).name

    def _chatter(self, fact: Fact, when: datetime, subject: str, quoted: str) -> None:
        """Replies within a day: they quote what is no longer so, or what was asked, or tell what once was."""
        kind = KINDS[fact.kind]
        for number in range(self.draw.choice((1, 1, 2))):
            when += timedelta(minutes=self.draw.randrange(5, 10 * 60))
            sender = self.draw.choice([person for person in self.others if person is not fact.person])
            body = f"{self.draw.choice(CHATTER)}\n\n> {quoted}"
            if number == 0 and self.draw.random() < self.distractors:
                former = self._value(kind.type, when)
                told = self.draw.choice(FORMER).format(item=fact.item[0], value=former)
                body = f"{told}\n\n> {quoted}"
            self._write(when, subject, sender.address, (self.owner.address,), (fact.person.address,), body)

    # ---- noise ----------------------------------------------------------------------------------

    def _noise(self) -> None:
        when = START + timedelta(minutes=self.draw.randrange((DAYS + 60) * 24 * 60))
        project, person = self.draw.choice(self.projects), self.draw.choice(self.others)
        kind = KINDS[self.draw.choice(list(KINDS))]
        item = self.draw.choice(kind.items)[0]
        sort = self.draw.random()
        sender, to = person.address, (self.owner.address,)
        if sort < 0.02:
            subject = f"{project}: urgent"
            body = INJECTION.format(project=project, item=item, value=self._value(kind.type, when))
        elif sort < 0.20:
            sender, subject = "digest@example.com", "Weekly digest"
            body = "Open points\n" + "\n".join(self._digest_line(when) for _ in range(6))
        elif sort < 0.35:
            sender, subject = "news@example.com", f"Company news: {project}"
            body = f"{project} is making progress, writes {person.name}. More in the next issue."
        else:
            subject = self.draw.choice(
                (project, f"{project}, as discussed", "Short question", f"Re: {project}")
            )
            text = self.draw.choice(SMALL_TALK)
            body = text.format(project=project, item=item, person=self.draw.choice(self.others).name)
            if self.draw.random() < 0.3:
                sender, to = self.owner.address, (person.address,)
        self._write(when, subject, sender, to, (), body)

    def _digest_line(self, when: datetime) -> str:
        """A line on a thread, with a value of the right type and of nothing: a former year's."""
        if self.pending and self.draw.random() < 0.7:
            fact = self.draw.choice(self.pending)[0]
            kind, item, project, person = KINDS[fact.kind], fact.item[0], fact.project, fact.person
        else:
            kind = KINDS[self.draw.choice(list(KINDS))]
            item, project = self.draw.choice(kind.items)[0], self.draw.choice(self.projects)
            person = self.draw.choice(self.others)
        former = self._value(kind.type, when)
        return f"- {project}, {item} ({person.name.split()[1]}): last year {former}"

    # ---- order ----------------------------------------------------------------------------------

    def _write(
        self, when: datetime, subject: str, sender: str, to: tuple[str, ...], cc: tuple[str, ...], body: str
    ) -> _Draft:
        draft = _Draft(when, subject, sender, to, cc, body)
        self.drafts.append(draft)
        return draft

    def _number(self) -> Inbox:
        """Sort by date and give ids, which say nothing about the order and are unique in the world."""
        drafts = sorted(self.drafts, key=lambda draft: draft.when)
        numbers = self.draw.sample(range(10_000 + self.number, 100_000, INBOXES), len(drafts))
        ids = {id(draft): f"m{number}" for draft, number in zip(drafts, numbers, strict=True)}
        for fact, stated in self.pending:
            fact.values = [Value(text, str(draft.when), ids[id(draft)]) for text, draft in stated]
        mails = tuple(
            Mail(ids[id(d)], self.owner.address, str(d.when), d.subject, d.sender, d.to, d.cc, d.body)
            for d in drafts
        )
        return Inbox(self.owner, self.cast, mails, tuple(fact for fact, _ in self.pending))
