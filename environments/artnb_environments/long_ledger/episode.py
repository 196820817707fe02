"""What is an episode of the ledger? The options, part after part with notes between, the reward."""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from artnb import Scenario, Trajectory
from artnb_environments import make_scenarios, require, require_one_of, variant_of
from artnb_environments.long_ledger.ledger import NAMES, Ledger, draw_ledger
from artnb_environments.replies import STYLES, credit_turns

metrics = ("right", "all_right", "answered", "notes_right", "notes_length", "turns", "invalid")

presets: dict[str, dict[str, Any]] = {
    "small": {"accounts": 3, "chunks": 2, "entries": 2, "kinds": "set", "asked": 2, "credit": "notes"},
}
"""For a small model: three accounts, two parts of two entries, and a credit for the notes."""


@dataclass(frozen=True)
class Variant:
    """The options of this environment."""

    accounts: int = 12
    """Accounts of a ledger, 2 to 26."""
    chunks: int = 6
    """Parts that the ledger is told in, 2 to 50."""
    entries: int = 8
    """Entries of a part, 1 to 50."""
    kinds: str = "all"
    """``all``: set, add, subtract and swap; ``set`` alone."""
    asked: int = 3
    """Accounts that are asked about at the end, 1 to ``accounts``."""
    history: str = "compact"
    """``compact``: the agent sees one part and its own notes, and each part begins a conversation anew;
    ``full``: everything so far."""
    notes_limit: int = 240
    """Characters of the notes that stay; the rest is cut off."""
    style: str = "word"
    """``word``: the notes, or the numbers, and nothing else; ``tags``: inside <notes> and <answer>;
    ``tools``: calls of the API, write_notes(notes) and answer(balances)."""
    examples: int = 2
    """Worked ledgers in the prompt, 0 to 4."""
    invalid: str = "lost_turn"
    """A reply that is no notes, or no answer: a ``lost_turn`` (the notes stay as they were), the ``end``, or
    ``retry``: asked again, once a part."""
    credit: str = "none"
    """``notes``: a turn's credit is the share of the accounts whose balance its notes, or its answer, tell
    right; -1 for an invalid one."""
    max_tokens: int | None = None
    """Longest reply; None: 160."""

    def __post_init__(self) -> None:
        require(2 <= self.accounts <= len(NAMES), f"accounts must be 2 to 26, got {self.accounts}")
        require(2 <= self.chunks <= 50, f"chunks must be 2 to 50, got {self.chunks}")
        require(1 <= self.entries <= 50, f"entries must be 1 to 50, got {self.entries}")
        require(1 <= self.asked <= self.accounts, f"asked must be 1 to accounts, got {self.asked}")
        require(10 <= self.notes_limit <= 2000, f"notes_limit must be 10 to 2000, got {self.notes_limit}")
        require(0 <= self.examples <= 4, f"examples must be 0 to 4, got {self.examples}")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens must be 1 or more, or None")
        require_one_of("kinds", self.kinds, ("all", "set"))
        require_one_of("history", self.history, ("compact", "full"))
        require_one_of("style", self.style, STYLES)
        require_one_of("invalid", self.invalid, ("lost_turn", "end", "retry"))
        require_one_of("credit", self.credit, ("none", "notes"))


def scenarios(split: str, n: int, seed: int = 0, **variant: Any) -> list[Scenario]:
    """Ledgers; the scenario's seed decides every entry and the question."""
    return make_scenarios("long_ledger", split, n, seed, Variant(**variant))


class Episode:
    """One ledger: whoever follows it calls ``note`` after each part but the last, then ``answer``."""

    def __init__(self, variant: Variant, ledger: Ledger) -> None:
        self.variant, self.ledger = variant, ledger
        self.part = 0
        """The part that is being told, from 0."""
        self.notes = ""
        """What stays of the parts before."""
        self.written: list[str | None] = []
        """The notes after each part, None for a reply that was none."""
        self.notes_right = 0.0
        """The share of the accounts whose balance the latest notes tell right."""
        self.given: tuple[int, ...] | None = None
        """The answer."""
        self.turns = self.invalid = 0
        self.ended_by = ""
        """answer or invalid; empty while it goes on."""
        self.credits: list[float] = []
        self.asked_again = False
        """True while a part is told again, after a reply that was none."""

    @classmethod
    def of(cls, scenario: Scenario) -> Episode:
        v = variant_of(scenario, Variant)
        return cls(v, draw_ledger(scenario.seed, v.accounts, v.chunks, v.entries, v.kinds, v.asked))

    @property
    def is_last(self) -> bool:
        return self.part == len(self.ledger.parts) - 1

    def note(self, text: str | None) -> None:
        """Take the notes after a part, None for a reply that is none."""
        self.turns += 1
        if text is None and self._refuse():
            return
        if text is not None:
            self.notes = text[: self.variant.notes_limit]
            self.notes_right = self._told_right(self.notes)
            self.credits.append(self.notes_right)
        self.written.append(None if text is None else self.notes)
        self.asked_again = False
        self.part += 1

    def answer(self, numbers: tuple[int, ...] | None) -> None:
        """Take the answer, None for a reply that is none."""
        self.turns += 1
        if numbers is None and self._refuse():
            return
        self.given = numbers
        if numbers is not None:
            self.credits.append(self.reward)
        self.ended_by = self.ended_by or ("invalid" if numbers is None else "answer")

    def _refuse(self) -> bool:
        """Count an invalid reply; True when the part is not over by it."""
        self.invalid += 1
        self.credits.append(-1.0)
        if self.variant.invalid == "end" or (self.variant.invalid == "retry" and self.asked_again):
            self.ended_by = "invalid"
            return True
        self.asked_again = self.variant.invalid == "retry"
        return self.asked_again

    def _told_right(self, notes: str) -> float:
        """The share of the accounts whose balance after this part stands in the notes, as ``A 40``."""
        true = self.ledger.after(self.part + 1)
        told = {name.upper(): int(n) for name, n in re.findall(r"\b([A-Za-z])[ :=]{1,3}(\d{1,6})\b", notes)}
        return sum(told.get(name) == amount for name, amount in true.items()) / len(true)

    @property
    def reward(self) -> float:
        """The share of the balances asked about that the answer tells right."""
        truth = self.ledger.truth
        if self.given is None or len(self.given) != len(truth):
            return 0.0
        return sum(told == true for told, true in zip(self.given, truth, strict=True)) / len(truth)

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Write reward, metrics, and the credits of the turns where asked for, onto the trajectory."""
        trajectory.reward = self.reward
        lengths = [len(text or "") for text in self.written]
        trajectory.metrics |= {
            "right": self.reward,
            "all_right": float(self.reward == 1.0),
            "answered": float(self.given is not None),
            "notes_right": self.notes_right,
            "notes_length": fmean(lengths) if lengths else 0.0,
            "turns": float(self.turns),
            "invalid": float(self.invalid),
        }
        trajectory.metadata |= {
            "asked": list(self.ledger.asked),
            "truth": list(self.ledger.truth),
            "answer": None if self.given is None else list(self.given),
            "parts": [[str(entry) for entry in part] for part in self.ledger.parts],
            "notes": list(self.written),
            "ended_by": self.ended_by,
        }
        if self.variant.credit != "none":
            credit_turns(trajectory, self.credits)
        return trajectory
