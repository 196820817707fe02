"""Which records of a run still count, when a killed process or a rollback left later ones behind?

Every opening of a run, and every rollback, starts a new session. Its ``rolled_back`` event says to
which step the run went back; records that earlier sessions wrote about later work no longer count. A
``reused`` event brings back rollouts of an unfinished step that the new session took over; a ``replaced``
event names those of which a later line holds a longer version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


def is_after(step: int, to: int, *, is_training: bool) -> bool:
    """True when a record of ``step`` is about work later than the policy after ``to`` steps.

    Training in step k makes policy k + 1; an evaluation at step k is of policy k itself.

    >>> is_after(3, 3, is_training=True), is_after(3, 3, is_training=False)
    (True, False)
    """
    return step >= to if is_training else step > to


@dataclass
class Timeline:
    """The sessions of a run and what each of them undid."""

    session: int = 0
    """The latest session, counted from 1."""
    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    """(session, step it went back to), in order."""
    reused: dict[str, int] = field(default_factory=dict)
    """Trajectory id -> the session that took it over."""
    replaced: set[str] = field(default_factory=set)
    """Ids of trajectories that were written again when they had grown."""

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Timeline:
        timeline = cls()
        for event in events:
            timeline.add(event)
        return timeline

    def add(self, event: Mapping[str, Any]) -> None:
        session = int(event.get("session") or 0)
        self.session = max(self.session, session)
        if event.get("kind") == "rolled_back":
            self.rollbacks.append((session, int(event["to"])))
        elif event.get("kind") == "reused":
            self.reused.update({name: session for name in event["trajectories"]})
        elif event.get("kind") == "replaced":
            self.replaced.update(event["trajectories"])

    def counts(self, record: Mapping[str, Any], *, is_training: bool, id: str | None = None) -> bool:
        """True unless a later session went back to before this record, or another took its place."""
        if id in self.replaced:
            return False
        step = record.get("step")
        if not isinstance(step, int):
            return True
        session = max(int(record.get("session") or 0), self.reused.get(id or "", 0))
        return not any(
            session < later and is_after(step, to, is_training=is_training) for later, to in self.rollbacks
        )
