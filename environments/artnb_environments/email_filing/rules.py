"""Which folders has the user, and which mail goes where? Rules on topics, and some that win over them.

Mailboxes are those of email_search. A mail's topic is known because it states a fact of that kind; sender,
project and amount stand in it. So every mail has exactly one right folder.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from artnb_environments.email_search.world import INBOXES, WORLDS, Inbox, Mail, make_inbox

TOPICS: dict[str, tuple[str, dict[str, str]]] = {
    "quote": ("Purchasing", {"train": "prices", "validation": "offers", "test": "what something would cost"}),
    "order": ("Orders", {"train": "order numbers", "validation": "purchase codes", "test": "booked orders"}),
    "meeting": (
        "Rooms",
        {"train": "which room", "validation": "locations", "test": "where something is held"},
    ),
    "headcount": (
        "Guests",
        {"train": "how many come", "validation": "numbers of guests", "test": "attendance"},
    ),
    "deadline": (
        "Deadlines",
        {"train": "due dates", "validation": "deadlines", "test": "by when a thing is due"},
    ),
    "hire": (
        "Hiring",
        {"train": "who gets a post", "validation": "new colleagues", "test": "who was chosen"},
    ),
    "approval": (
        "Permissions",
        {"train": "a yes to a plan", "validation": "consents", "test": "permissions"},
    ),
}
"""Kind of fact -> folder, and what the rule calls it in each split."""
NEWS, DIGESTS, APPROVALS = "Newsletters", "Digests", "Approvals"
_SENDERS = {"news@example.com": NEWS, "digest@example.com": DIGESTS}
SPECIALS = ("amount", "project", "person")
_AMOUNTS = range(3000, 6500, 500)
_MONEY = re.compile(r"\$(\d[\d,]*)")


@dataclass(frozen=True)
class Special:
    """A rule that wins over topics and over the specials after it."""

    kind: str
    """amount, project or person."""
    value: str
    """The amount in dollars, the project, or the person's address."""
    folder: str
    name: str
    """What it applies to, in words."""

    def applies(self, mail: Mail) -> bool:
        if self.kind == "project":
            return self.value in mail.subject
        if self.kind == "person":
            return mail.from_address == self.value
        return any(amount > int(self.value) for amount in amounts_in(mail))


@dataclass(frozen=True)
class Rules:
    """A user's folders and rules."""

    split: str
    topics: tuple[str, ...]
    specials: tuple[Special, ...]
    """The strongest first."""
    has_senders: bool
    """Whether newsletters and digests have folders."""
    seed: int = 0

    @property
    def folders(self) -> list[str]:
        """All folders that a mail can belong to."""
        named = [TOPICS[topic][0] for topic in self.topics]
        return [*named, *([NEWS, DIGESTS] if self.has_senders else []), *(s.folder for s in self.specials)]

    @property
    def lines(self) -> list[str]:
        """The rules as the user writes them; the order of the later ones says nothing."""
        lines = [f"{_capital(TOPICS[topic][1][self.split])} → {TOPICS[topic][0]}" for topic in self.topics]
        if self.has_senders:
            lines += [f"From {a} → {folder}, whatever it is about" for a, folder in _SENDERS.items()]
        later = []
        for place, special in enumerate(self.specials):
            weaker = [other.name for other in self.specials[place + 1 :]]
            even_if = f", even if it is {' or '.join(weaker)}" if weaker else ""
            later.append(f"Anything {special.name} → {special.folder}, whatever the topic{even_if}")
        random.Random(self.seed).shuffle(later)
        return lines + later

    def special_of(self, mail: Mail) -> Special | None:
        """The strongest special rule that applies."""
        return next((special for special in self.specials if special.applies(mail)), None)

    def folder_of(self, mail: Mail, kind: str | None) -> str | None:
        """The right folder of a mail of this kind of fact; None where no rule fits."""
        if mail.from_address in _SENDERS:
            return _SENDERS[mail.from_address] if self.has_senders else None
        if (special := self.special_of(mail)) is not None:
            return special.folder
        return TOPICS[kind][0] if kind in self.topics else None


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def own_lines(mail: Mail) -> list[str]:
    """The lines of a mail that it does not quote."""
    return [line for line in mail.body.splitlines() if not line.startswith(">")]


def amounts_in(mail: Mail) -> list[int]:
    """Dollars that a mail names in lines of its own."""
    return [int(found.replace(",", "")) for found in _MONEY.findall("\n".join(own_lines(mail)))]


@lru_cache(maxsize=40)
def inbox_of(split: str, world: int, number: int) -> Inbox:
    return make_inbox(split, world, number, 500, 0.5)


@lru_cache(maxsize=40)
def kinds_of(split: str, world: int, number: int) -> dict[str, str]:
    """Mail id -> kind of the fact that the mail states."""
    inbox = inbox_of(split, world, number)
    return {value.source: fact.kind for fact in inbox.facts for value in fact.values}


def draw_rules(split: str, world: int, number: int, draw: random.Random, topics: int, specials: int) -> Rules:
    """Rules that fit an inbox: its projects and people, and an amount that some of its offers exceed."""
    inbox, kinds = inbox_of(split, world, number), kinds_of(split, world, number)
    stated = [mail for mail in inbox.mails if mail.id in kinds]
    chosen = tuple(TOPICS)[:2] if topics == 2 else tuple(draw.sample(list(TOPICS), topics))
    made = []
    for kind in draw.sample(SPECIALS, specials) if specials > 1 else SPECIALS[:specials]:
        if kind == "amount":
            limit = draw.choice(_AMOUNTS)
            made.append(Special(kind, str(limit), APPROVALS, f"above ${limit:,}"))
        elif kind == "project":
            project = draw.choice(sorted({fact.project for fact in inbox.facts}))
            made.append(Special(kind, project, project, f"on {project}"))
        else:
            address = draw.choice(sorted({mail.from_address for mail in stated}))
            person = next(p for p in inbox.cast if p.address == address)
            made.append(Special(kind, address, person.name.split()[1], f"from {person.name}"))
    return Rules(split, chosen, tuple(made), topics == len(TOPICS), draw.randrange(2**32))


FIXED = Rules(
    "train",
    ("quote", "order", "meeting"),
    (Special("amount", "5000", APPROVALS, "above $5,000"),),
    False,
)
"""The same rules in every scenario, for models that are too small to read others."""


def draw_mails(
    rules: Rules, split: str, draw: random.Random, place: tuple[int, int], mails: int, conflicts: float
) -> list[tuple[str, str]]:
    """Ids and right folders of mails to file, of which about a share of ``conflicts`` fits two rules."""
    inbox, kinds = inbox_of(split, *place), kinds_of(split, *place)
    filed = [(m, f) for m in inbox.mails if (f := _folder(rules, m, kinds)) is not None]
    clear = [(m.id, f) for m, f in filed if not is_conflict(rules, m, kinds.get(m.id))]
    torn = [(m, f) for m, f in filed if is_conflict(rules, m, kinds.get(m.id))]
    draw.shuffle(torn)
    few = sum(draw.random() < conflicts for _ in range(mails))
    # Mails that two of the stronger rules fit are few: the first is one of them where there is one.
    torn.sort(key=lambda one: fitting_specials(rules, one[0]) < 2)
    torn = torn[:1] + sorted(torn[1:], key=lambda one: one[0].id)
    torn[1:] = draw.sample(torn[1:], len(torn) - 1) if torn else []
    by_folder: dict[str, list[tuple[str, str]]] = {}
    for one in clear:
        by_folder.setdefault(one[1], []).append(one)
    found = [(mail.id, folder) for mail, folder in torn[:few]]
    while len(found) < mails and any(
        by_folder.values()
    ):  # the same share for every folder, not for every mail
        folder = draw.choice([folder for folder, left in by_folder.items() if left])
        found.append(by_folder[folder].pop(draw.randrange(len(by_folder[folder]))))
    draw.shuffle(found)
    return found


def _folder(rules: Rules, mail: Mail, kinds: dict[str, str]) -> str | None:
    is_known = mail.id in kinds or mail.from_address in _SENDERS
    return rules.folder_of(mail, kinds.get(mail.id)) if is_known else None


def is_conflict(rules: Rules, mail: Mail, kind: str | None) -> bool:
    """Whether two rules fit a mail of a person."""
    return fitting_specials(rules, mail) + (kind in rules.topics) > 1


def fitting_specials(rules: Rules, mail: Mail) -> int:
    """How many of the rules that win over topics fit; none fits newsletters and digests."""
    return 0 if mail.from_address in _SENDERS else sum(special.applies(mail) for special in rules.specials)


def places(split: str) -> Iterable[tuple[int, int]]:
    """Worlds and numbers of a split's inboxes."""
    return [(world, number) for world in WORLDS[split] for number in range(INBOXES)]
