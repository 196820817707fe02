"""What is new in a run's folder since the last look? Only the lines that were added are read.

The dashboard of a running, a finished and a crashed run are the same: all of it comes from here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from artnb.store.checkpoints import step_name
from artnb.store.folder import STEP_KINDS, RunFolder
from artnb.store.journal import Tail
from artnb.store.owner import is_stale, read_owner
from artnb.store.timeline import Timeline
from artnb.store.trajectories import TrajectoryFolder

Status = Literal["running", "idle", "ended", "crashed"]

MOST_STEPS = 200
"""Of so many of the latest steps the rollouts are read, the newest first."""
_LOOK_SECONDS = 0.1
"""After so long a look at rollouts stops; the next one goes on."""
_STATUS_SECONDS = 2.0


@dataclass
class News:
    """What a look found."""

    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Records of steps, in the order written; some may not count."""
    events: list[dict[str, Any]] = field(default_factory=list)
    rollouts: set[int] = field(default_factory=set)
    """Steps of which rollouts were read, or count again."""
    has_status: bool = False
    is_partial: bool = False
    """There is more to read: look again."""

    def __bool__(self) -> bool:
        return bool(self.metrics or self.events or self.rollouts or self.has_status)


class Follower:
    """A run as it stands on disk, kept up by ``look``."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.status: Status = "ended"
        self.timeline = Timeline()
        self._rollouts: dict[int, list[dict[str, Any]]] = {}
        self._scores: dict[str, dict[str, Any]] = {}
        self._tails = Tail(run.path / "metrics.jsonl"), Tail(run.path / "events.jsonl")
        self._files: dict[int, Tail] = {}
        self._waiting: list[int] | None = None
        """Steps whose rollouts are still to be read for the first time."""
        self._latest = 0
        self._asked = float("-inf")
        self._is_owned: bool | None = None
        self._loop = True
        """Whether the journal's last word is that something goes on."""

    def look(self) -> News:
        """Read what is new. Many rollouts take several looks."""
        metrics, events = (tail.read() for tail in self._tails)
        steps = [r for r in metrics if r.get("kind") in STEP_KINDS and isinstance(r.get("step"), int)]
        news = News(steps, events)
        for event in events:
            self.timeline.add(event)
            if event.get("kind") == "reused":
                news.rollouts.add(int(event.get("step") or 0))
            elif event.get("kind") == "rolled_back":
                self._latest = int(event["to"])
            elif event.get("kind") == "judged":
                self._scores |= event.get("scores") or {}
                news.rollouts.add(int(event.get("step") or 0))
        if metrics or events:
            self._loop = _goes_on(self._loop, metrics, events)
        before = self._latest
        counting = (r["step"] + 1 for r in steps if self.timeline.counts(r, is_training=True))
        self._latest = max(counting, default=before)
        status = self._status()
        news.has_status, self.status = status != self.status, status
        news.is_partial = self._read_rollouts(min(before, self._latest), news.rollouts)
        return news

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """What is known of a step's rollouts that count: see ``brief``."""
        return [self._scored(one) for one in self._rollouts.get(step, []) if self._counts(one)]

    def _scored(self, one: dict[str, Any]) -> dict[str, Any]:
        """With what a judge said of it after it was written down."""
        score = self._scores.get(one["id"])
        return one if score is None else {**one, "reward": score["reward"], "metrics": dict(score["metrics"])}

    def known_steps(self) -> list[int]:
        """Steps whose rollouts are held here."""
        return list(self._rollouts)

    def _counts(self, brief: Mapping[str, Any]) -> bool:
        return self.timeline.counts(brief, is_training=brief["split"] == "train", id=brief["id"])

    def _read_rollouts(self, since: int, found: set[int]) -> bool:
        """Read the files of the steps ``since`` then, for rollouts lie where the run stands."""
        until = time.monotonic() + _LOOK_SECONDS
        if self._waiting is None:
            self._waiting = TrajectoryFolder(self.run.path / "trajectories").steps()[-MOST_STEPS:]
        else:
            for step in range(max(since - 1, self._latest - MOST_STEPS), self._latest + 2):
                self._read_step(step, found)
        while self._waiting and time.monotonic() < until:
            self._read_step(self._waiting.pop(), found)
        first = self._latest - MOST_STEPS
        for old in [step for step in self._rollouts if step < first and step not in found]:
            for one in self._rollouts.pop(old):
                self._scores.pop(one["id"], None)
            del self._files[old]
        return bool(self._waiting)

    def _read_step(self, step: int, found: set[int]) -> None:
        path = self.run.path / "trajectories" / f"{step_name(step)}.jsonl"
        if step < 0 or (step not in self._files and not path.exists()):
            return
        records = self._files.setdefault(step, Tail(path)).read()
        if records:
            self._rollouts.setdefault(step, []).extend(map(brief, records))
            found.add(step)

    def _status(self) -> Status:
        if time.monotonic() - self._asked >= _STATUS_SECONDS:
            self._asked = time.monotonic()
            owner = read_owner(self.run.path / "owner.json")
            self._is_owned = None if owner is None else not is_stale(owner)
        if not self._is_owned:
            return "ended" if self._is_owned is None else "crashed"
        return "running" if self._loop else "idle"


def _goes_on(before: bool, metrics: list[dict[str, Any]], events: list[dict[str, Any]]) -> bool:
    """False once the latest loop over ``run.steps`` has ended and nothing was gathered or trained since."""
    words = {"loop": True, "opened": True, "gather": True, "finished": False, "stopped": False}
    told = [(e.get("time") or 0.0, words[e["kind"]]) for e in events if e.get("kind") in words]
    told += [(metrics[-1].get("time") or 0.0, True)] if metrics else []
    return max(told, default=(0.0, before), key=lambda one: one[0])[1]


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
