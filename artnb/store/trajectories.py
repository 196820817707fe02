"""Where do a run's trajectories lie, and which of them count?

``trajectories/step_000012.jsonl`` holds every rollout gathered while the run stood at step 12, training
and evaluation alike, one line each: who gathered it first, then the trajectory itself. ``index/`` beside
them holds a short row for each line (index.py).
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artnb.store.checkpoints import step_name
from artnb.store.index import IndexWriter
from artnb.store.journal import Journal
from artnb.store.timeline import Timeline
from artnb.types import Trajectory

PROCESS = uuid.uuid4().hex
"""This process, in the records it writes: a restarted kernel may reuse what an earlier one finished."""
_FILE = re.compile(r"step_(\d{6,})\.jsonl")


@dataclass
class Stored:
    """A line of a trajectories file: the trajectory and how it was gathered."""

    step: int
    split: str
    gather_id: str
    attempt: int
    trajectory: Trajectory
    members: int = 1
    """How many trajectories the same attempt returned."""
    key: str = ""
    """What must be equal for another gather to reuse it: scenario, code of the rollout, sampling."""
    group_metadata: Mapping[str, Any] | None = None
    session: int = 0
    process: str = PROCESS

    def to_json(self) -> dict[str, Any]:
        record = {name: value for name, value in vars(self).items() if name != "trajectory"}
        return {**record, "trajectory": self.trajectory.to_json()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Stored:
        known = {name: record[name] for name in cls.__dataclass_fields__ if name in record}
        return cls(**{**known, "trajectory": Trajectory.from_json(record["trajectory"])})


class TrajectoryFolder:
    """The ``trajectories`` folder of a run. Any thread may append."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._open: tuple[int, Journal] | None = None
        self._index = IndexWriter(path)

    def append(self, stored: Sequence[Stored], *, session: int) -> None:
        """Write lines with one write; they belong to one step."""
        step = stored[0].step
        records = [{**one.to_json(), "session": session} for one in stored]
        with self._lock:
            if self._open is None or self._open[0] != step:
                self._close()
                self._open = (step, self._journal(step, keep_open=True))
            self._index.append(step, records, self._open[1].append(*records))

    def close(self) -> None:
        """Let go of the open file; some network mounts upload it only then."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None
        self._index.close()

    def steps(self) -> list[int]:
        """Steps that have a file, in order."""
        if not self.path.is_dir():
            return []
        named = (_FILE.fullmatch(path.name) for path in self.path.iterdir())
        return sorted(int(found[1]) for found in named if found is not None)

    def repair(self, first_step: int) -> list[str]:
        """Set torn last lines aside; earlier steps were closed when a later one began."""
        torn = [self._journal(step).repair() for step in self.steps() if step >= first_step]
        return [name for name in torn if name is not None]

    def records(self, timeline: Timeline, step: int | None = None) -> Iterator[dict[str, Any]]:
        """Raw records that count, oldest step first."""
        for one in self.steps() if step is None else [step]:
            for record in self._journal(one).read():
                is_training = record.get("split") == "train"
                if timeline.counts(record, is_training=is_training, id=record["trajectory"].get("id")):
                    yield record

    def from_earlier_processes(self, step: int, split: str) -> list[Stored]:
        """Rollouts of this step that other processes wrote, the oldest first, whether they count or not."""
        return [
            Stored.from_json(record)
            for record in self._journal(step).read()
            if record.get("split") == split and record.get("process") != PROCESS
        ]

    def _journal(self, step: int, *, keep_open: bool = False) -> Journal:
        return Journal(self.path / f"{step_name(step)}.jsonl", keep_open=keep_open)
