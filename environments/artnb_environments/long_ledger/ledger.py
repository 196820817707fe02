"""What happens in a ledger? Balances at the start, entries in parts, and the balances after each part."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
KINDS = ("set", "add", "subtract", "swap")
_WEIGHTS = {"all": (7, 3, 2, 2), "set": (1, 0, 0, 0)}

Balances = dict[str, int]


@dataclass(frozen=True)
class Entry:
    """One line: ``value`` is an amount, or for ``swap`` the other account's name."""

    kind: str
    account: str
    value: int | str

    def __str__(self) -> str:
        return {
            "set": f"set {self.account} to {self.value}",
            "add": f"add {self.value} to {self.account}",
            "subtract": f"subtract {self.value} from {self.account}",
            "swap": f"swap {self.account} and {self.value}",
        }[self.kind]


def book(balances: Mapping[str, int], entries: Iterable[Entry]) -> Balances:
    """The balances after some entries.

    >>> book({"A": 10, "B": 20}, [Entry("add", "A", 5), Entry("swap", "A", "B"), Entry("subtract", "A", 1)])
    {'A': 19, 'B': 15}

    An account without a balance stays without one until it is set, or swapped with one that has.
    """
    now = dict(balances)
    for entry in entries:
        account, value = entry.account, entry.value
        if entry.kind == "set":
            now[account] = int(value)
        elif entry.kind == "swap":
            other = str(value)
            held = {name: now.pop(name) for name in (account, other) if name in now}
            now |= {other if name == account else account: amount for name, amount in held.items()}
        elif account in now:
            now[account] += int(value) if entry.kind == "add" else -int(value)
    return {name: now[name] for name in sorted(now)}


@dataclass(frozen=True)
class Ledger:
    """A whole ledger, and which accounts are asked about when it ends."""

    opening: Mapping[str, int]
    parts: tuple[tuple[Entry, ...], ...]
    asked: tuple[str, ...]

    def after(self, parts: int) -> Balances:
        """The balances after so many parts."""
        return self._balances[parts]

    @cached_property
    def _balances(self) -> list[Balances]:
        """The opening, and the balances after each part."""
        return list(accumulate(self.parts, book, initial=dict(self.opening)))

    @property
    def truth(self) -> tuple[int, ...]:
        """The balances asked about, in the order of the question."""
        final = self.after(len(self.parts))
        return tuple(final[name] for name in self.asked)


def draw_ledger(seed: int, accounts: int, chunks: int, entries: int, kinds: str, asked: int) -> Ledger:
    """The ledger of a seed; no balance ever falls below 0."""
    draw = random.Random(seed)
    names = NAMES[:accounts]
    opening = {name: draw.randint(10, 99) for name in names}
    balances, parts = dict(opening), []
    for _ in range(chunks):
        part = []
        for _ in range(entries):
            part.append(_draw_entry(draw, names, balances, kinds))
            balances = book(balances, part[-1:])
        parts.append(tuple(part))
    return Ledger(opening, tuple(parts), tuple(draw.sample(names, asked)))


def _draw_entry(draw: random.Random, names: str, balances: Balances, kinds: str) -> Entry:
    (kind,) = draw.choices(KINDS, _WEIGHTS[kinds])
    account, other = draw.sample(names, 2)
    if kind == "set":
        return Entry(kind, account, draw.randint(10, 99))
    if kind == "swap":
        return Entry(kind, account, other)
    if kind == "subtract" and balances[account] > 0:
        return Entry(kind, account, draw.randint(1, min(20, balances[account])))
    return Entry("add", account, draw.randint(1, 20))


def notes_of(balances: Mapping[str, int]) -> str:
    """Exact notes: ``A 40, B 17``."""
    return ", ".join(f"{name} {amount}" for name, amount in balances.items())
