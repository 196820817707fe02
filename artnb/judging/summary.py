"""What did a call of ``judge`` do, and what did it cost? As words, as a row, as a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from artnb.judging.panel import Spent
from artnb.ui.html import esc, table_html, visible


@dataclass
class JudgedGroups:
    """Facts about a call of ``judge``, on the groups' ``judging``."""

    judges: list[str]
    groups: int
    scored: int
    """Trajectories with a score."""
    unscored: dict[str, int] = field(default_factory=dict)
    """Reason -> groups without a verdict."""
    too_close: int = 0
    """Groups whose scores differ by less than min_spread."""
    shortened: int = 0
    """Trajectories of which the judge did not read everything."""
    mean_spread: float | None = None
    """Mean over trajectories of the standard deviation between opinions; None with one opinion each."""
    beats_anchor: float | None = None
    """Share of attempts that scored above the anchor of their scenario, ties half."""
    criteria: list[dict[str, Any]] = field(default_factory=list)
    """Of a Rubric: name, mean part, the weight given and the weight used."""
    spent: Spent = field(default_factory=Spent)
    seconds: float = 0.0

    def words(self) -> str:
        """The call in a line."""
        facts = [f"{self.scored} trajectories scored by {', '.join(self.judges)}"]
        facts += [f"{count} groups unscored ({reason})" for reason, count in self.unscored.items()]
        facts += [f"{self.too_close} groups too close to tell apart"] * bool(self.too_close)
        facts += [f"{self.shortened} shortened"] * bool(self.shortened)
        return "; ".join(facts)

    def row(self) -> dict[str, Any]:
        spent = self.spent
        return {
            "judge": ", ".join(self.judges),
            "groups": self.groups,
            "scored": self.scored,
            "groups unscored": sum(self.unscored.values()),
            "too close": self.too_close,
            "shortened": self.shortened,
            "spread": self.mean_spread,
            "beats anchor": self.beats_anchor,
            "requests": spent.requests,
            "from cache": spent.cached,
            "asked again": spent.invalid,
            "tokens": spent.input_tokens + spent.output_tokens,
            "dollars": spent.dollars if spent.is_priced else None,
            "seconds": self.seconds,
        }

    def _repr_html_(self) -> str:
        reasons = "".join(f"<div>⚠ {n} × {esc(reason)}</div>" for reason, n in self.unscored.items())
        return table_html([self.row()]) + (table_html(self.criteria) if self.criteria else "") + reasons

    def __repr__(self) -> str:
        return visible(self.words())
