"""Which score does a stored trajectory have, when a judge or a person scored it after it was written?

A ``judged`` event holds a judge's rewards, an ``override`` event a person's: the last of each kind wins, and
a person's goes before a judge's until it is taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from artnb.types import BEFORE_OVERRIDE, Trajectory


@dataclass
class Scores:
    """What the journal says of trajectories, by id."""

    judged: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """``reward``, ``metrics`` and ``judge``."""
    overrides: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The event: ``value``, ``reason``, ``time``."""

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Scores:
        scores = cls()
        for event in events:
            scores.add(event)
        return scores

    def add(self, event: Mapping[str, Any]) -> None:
        if event.get("kind") == "judged":
            self.judged.update(event.get("scores") or {})
        elif event.get("kind") == "override":
            name = str(event.get("trajectory"))
            self.overrides.pop(name, None)
            if event.get("value") is not None:
                self.overrides[name] = event

    def apply(self, trajectory: Trajectory) -> Trajectory:
        """Give the trajectory the score that it has now; returns it."""
        if (told := self.judged.get(trajectory.id)) is not None:
            trajectory.reward = told.get("reward")
            trajectory.metrics = {**trajectory.metrics, **(told.get("metrics") or {})}
            trajectory.metadata = {**trajectory.metadata, "judge": told.get("judge")}
        if (asked := self.overrides.get(trajectory.id)) is not None:
            before = {BEFORE_OVERRIDE: trajectory.reward}
            trajectory.metadata = {**trajectory.metadata, **before}
            trajectory.reward = asked["value"]
        return trajectory
