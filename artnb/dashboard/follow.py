"""What is new in a run's folder since the last look? Only the lines that were added are read.

The dashboard of a running, a finished and a crashed run are the same: all of it comes from here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

from artnb.store.checkpoints import step_name
from artnb.store.folder import STEP_KINDS, RunFolder
from artnb.store.journal import Tail
from artnb.store.owner import is_stale, read_owner
from artnb.store.timeline import Timeline
from artnb.store.trajectories import TrajectoryFolder

Status = Literal["running", "ended", "crashed"]

MOST_STEPS = 200
"""Of so many of the latest steps the rollouts are read, the newest first."""
_LOOK_SECONDS = 0.1
"""After so long a look at rollouts stops; the next one goes on."""
_STATUS_SECONDS = 2.0


class Follower:
    """A run as it stands on disk, kept up by ``look``."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.events: list[dict[str, Any]] = []
        self.status: Status = "ended"
        self.timeline = Timeline()
        self._metrics: list[dict[str, Any]] = []
        self._rollouts: dict[int, list[dict[str, Any]]] = {}
        self._tails = Tail(run.path / "metrics.jsonl"), Tail(run.path / "events.jsonl")
        self._files: dict[int, Tail] = {}
        self._folder = TrajectoryFolder(run.path / "trajectories")
        self._asked = float("-inf")

    def look(self) -> bool:
        """Read what is new; True when something is. Many rollouts take several looks."""
        new_metrics, new_events = (tail.read() for tail in self._tails)
        self._metrics += new_metrics
        self.events += new_events
        for event in new_events:
            self.timeline.add(event)
        status = self._status()
        is_new = bool(new_metrics or new_events) or status != self.status
        self.status = status
        return self._read_rollouts() or is_new

    def metrics(self) -> list[dict[str, Any]]:
        """Records of steps that count, one a step, in order."""
        kept = (r for r in self._metrics if r.get("kind") in STEP_KINDS and isinstance(r.get("step"), int))
        by_step = {r["step"]: r for r in kept if self.timeline.counts(r, is_training=True)}
        return [by_step[step] for step in sorted(by_step)]

    def rollouts(self) -> dict[int, list[dict[str, Any]]]:
        """What is known of the rollouts that count, by step: see ``brief``."""
        return {step: [b for b in self._rollouts[step] if self._counts(b)] for step in sorted(self._rollouts)}

    def _counts(self, brief: Mapping[str, Any]) -> bool:
        return self.timeline.counts(brief, is_training=brief["split"] == "train", id=brief["id"])

    def _read_rollouts(self) -> bool:
        until, is_new = time.monotonic() + _LOOK_SECONDS, False
        for step in reversed(self._folder.steps()[-MOST_STEPS:]):
            path = self._folder.path / f"{step_name(step)}.jsonl"
            records = self._files.setdefault(step, Tail(path)).read()
            if records:
                is_new = True
                self._rollouts.setdefault(step, []).extend(map(brief, records))
                if time.monotonic() > until:
                    break
        return is_new

    def _status(self) -> Status:
        if time.monotonic() - self._asked < _STATUS_SECONDS:
            return self.status
        self._asked = time.monotonic()
        owner = read_owner(self.run.path / "owner.json")
        if owner is None:
            return "ended"
        return "crashed" if is_stale(owner) else "running"


def brief(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a trajectories file without its texts and tokens."""
    trajectory = record["trajectory"]
    histories = [trajectory, *trajectory.get("additional_histories", [])]
    turns = [item["turn"] for h in histories for item in h["messages_and_choices"] if "turn" in item]
    kept = {name: record.get(name) for name in ("step", "split", "gather_id", "session")}
    told = {name: trajectory.get(name) for name in ("id", "scenario_id", "seat", "reward")}
    return {
        **kept,
        **told,
        "failed": trajectory.get("error") is not None,
        "metrics": dict(trajectory.get("metrics") or {}),
        "turns": len(turns),
        "tokens": sum(len(turn["completion_ids"]) for turn in turns),
        "version": turns[-1]["policy_version"] if turns else None,
    }
