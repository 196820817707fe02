"""Where do the browser's trajectories stand: in memory, or in the folder of a run?

A shelf fills a table with short rows, and hands out one whole trajectory when it is asked for.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from artnb.advantage import EQUAL_REWARDS, NO_TOKEN, TOO_FEW, reason_to_drop
from artnb.browser.plain import mapping, sequence, text
from artnb.browser.rows import Rows, Table
from artnb.errors import RunInUse
from artnb.store.checkpoints import step_name
from artnb.store.codec import decode, encode
from artnb.store.folder import RunFolder
from artnb.store.index import WIDTH, index_row, short_id, with_schema
from artnb.store.index_reader import Index, News
from artnb.store.journal import Journal, Tail
from artnb.store.owner import Owner, is_stale, read_owner
from artnb.store.run import live_run
from artnb.types import Trajectory, TrajectoryGroup, Turn, override_reward

_OWNER_SECONDS = 2.0


class Shelf(Protocol):
    """What the browser needs of a place with trajectories."""

    name: str
    kind: str
    table: Table
    epoch: int
    """Changes when rows of the table get other numbers."""
    run: RunFolder | None
    problems: list[str]

    def refresh(self, seconds: float) -> bool:
        """Look for what is new, working for about so long; True when something changed."""
        ...

    @property
    def share(self) -> float | None:
        """Share of what is indexed, None when all is."""
        ...

    @property
    def is_growing(self) -> bool: ...

    @property
    def can_write(self) -> bool: ...

    def reader(self) -> Callable[[int], bytes]:
        """A function that gives a row's line of JSON, for any thread, whatever becomes of the table.

        It raises OSError or LookupError.
        """
        ...

    def record(self, row: int) -> dict[str, Any]:
        """The line read. Raises OSError, LookupError."""
        ...

    def judge_of(self, row: int) -> Any:
        """What a judge's event says of it: reward, metrics, judge. None without one."""
        ...

    def skipped(self, rows: Rows) -> str | None:
        """Why training learned nothing from this group; None when it did, or was not asked to."""
        ...

    def keep(self, row: int, kind: str, value: Any, reason: str) -> str:
        """Remember a person's word; where: ``run`` or ``memory``."""
        ...


class RunShelf:
    """The folder of a run, also while it is written."""

    kind = "run"

    def __init__(self, run: RunFolder) -> None:
        self.run: RunFolder | None = run
        self.path, self.name = run.path, run.name
        self.table = Table()
        self.epoch = 0
        self.problems: list[str] = []
        self._index = Index(run.path / "trajectories", may_write=self._may_index)
        self._events = _Lines(run.path / "events.jsonl")
        self._metrics = Tail(run.path / "metrics.jsonl")
        self._steps: dict[int, dict[str, Any]] = {}
        self._judged: dict[str, tuple[int, int]] = {}
        """Stored id -> where the event with its judge's words stands."""
        self._unscored: dict[tuple[Any, str], str] = {}
        self._owner: tuple[float, Mapping[str, Any] | None] = (-math.inf, None)

    @property
    def share(self) -> float | None:
        return self._index.share

    @property
    def is_growing(self) -> bool:
        owner = self._read_owner()
        return owner is not None and not is_stale(dict(owner))

    @property
    def can_write(self) -> bool:
        return (not self.is_growing or self._is_ours()) and os.access(self.path, os.W_OK)

    def refresh(self, seconds: float) -> bool:
        has_changed = self._look_at_events()
        for news in (self._index.look(), self._index.fill(seconds)):
            has_changed = self._take(news) or has_changed
        return has_changed

    def _take(self, news: News) -> bool:
        if news.void:
            self.table.drop_steps(news.void)
            self.epoch += 1
        self.table.extend(news.rows, self._index.schemas)
        return bool(news.rows or news.void)

    def _look_at_events(self) -> bool:
        fresh = self._events.read()
        for event, offset, length in fresh:
            self.table.add_event(event)
            if event.get("kind") == "judged":
                names = mapping(event.get("scores"))
                self._judged.update((text(short_id(name)), (offset, length)) for name in names)
                for one in map(mapping, sequence(event.get("unscored"))):
                    self._unscored[event.get("step"), str(one.get("scenario_id"))] = str(one.get("why"))
        return bool(fresh)

    def reader(self) -> Callable[[int], bytes]:
        steps, offsets, lengths = (self.table.numbers[name] for name in ("step", "offset", "length"))

        def read(row: int) -> bytes:
            with open(self.path / "trajectories" / f"{step_name(int(steps[row]))}.jsonl", "rb") as file:
                file.seek(int(offsets[row]))
                return file.read(int(lengths[row]))

        return read

    def record(self, row: int) -> dict[str, Any]:
        found: Any = None
        with contextlib.suppress(ValueError):  # said below
            found = decode(self.reader()(row))
        trajectory = mapping(mapping(found).get("trajectory"))
        if text(short_id(trajectory.get("id"))) != self.table.stored_id(row):
            self._index.forget(int(self.table.numbers["step"][row]))
            raise LookupError("the run's files have changed since they were indexed; they are read again")
        return found

    def judge_of(self, row: int) -> Any:
        place = self._judged.get(self.table.stored_id(row))
        if place is None:
            return None
        with contextlib.suppress(OSError, ValueError):  # what the row says is enough then
            event = decode(self._events.at(*place))
            scores = mapping(event.get("scores"))
            by_id = {text(short_id(name)): told for name, told in scores.items()}
            return by_id.get(self.table.stored_id(row))
        return None

    def skipped(self, rows: Rows) -> str | None:
        for record in self._metrics.read():
            if record.get("kind") in ("train", "sft") and isinstance(record.get("step"), int):
                self._steps[record["step"]] = record
        step = int(self.table.numbers["step"][rows[0]])
        scenario = self.table.texts["scenario"]
        judge = self._unscored.get((step, scenario.values[scenario.codes[rows[0]]]))
        dropped = mapping(self._steps[step].get("dropped")) if step in self._steps else None
        return why_skipped(self.table, rows, dropped, judge)

    def keep(self, row: int, kind: str, value: Any, reason: str) -> str:
        name = str(mapping(self.record(row).get("trajectory")).get("id"))
        step = int(self.table.numbers["step"][row])
        fields = {"trajectory": name, "value": value, "reason": reason, "step": step}
        self.problems = []
        try:
            self._write(kind, fields)
        except (OSError, RunInUse) as error:
            self.problems = [f"kept in this notebook only: {error}"]
            self.table.add_event({"kind": kind, "time": time.time(), **fields})
            return "memory"
        self._look_at_events()
        return "run"

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        run = live_run(self.path)
        if run is not None:
            run.record_event(kind, **fields)
            return
        owner = Owner(self.path)
        owner.claim()
        try:
            session = self.table.timeline.session
            event = {"kind": kind, "time": time.time(), **fields, "session": session}
            journal = Journal(self.path / "events.jsonl")
            journal.repair()
            journal.append(event)
        finally:
            owner.release()

    def _read_owner(self) -> Mapping[str, Any] | None:
        if time.monotonic() - self._owner[0] > _OWNER_SECONDS:
            self._owner = time.monotonic(), read_owner(self.path / "owner.json")
        return self._owner[1]

    def _is_ours(self) -> bool:
        owner = self._read_owner() or {}
        return owner.get("pid") == os.getpid() and owner.get("host") == socket.gethostname()

    def _may_index(self) -> bool:
        return not self.is_growing or self._is_ours()


class MemoryShelf:
    """Groups of this process. What is changed here is changed there."""

    kind = "memory"
    share = None
    is_growing = False
    can_write = False
    run: RunFolder | None = None

    def __init__(self, groups: Sequence[TrajectoryGroup], name: str = "groups") -> None:
        self.name = name
        self.table = Table()
        self.epoch = 0
        self.problems: list[str] = []
        self._groups = groups
        self._events: list[dict[str, Any]] = []
        self._members: list[tuple[TrajectoryGroup, Trajectory]] = []
        self._mark: list[Any] | None = None

    def refresh(self, seconds: float = 0.0) -> bool:
        members = [(group, trajectory) for group in self._groups for trajectory in group]
        mark = [_mark(trajectory) for _, trajectory in members]
        if mark == self._mark:
            return False
        self._members, self._mark = members, mark
        self._fill()
        return True

    def _fill(self) -> None:
        self.table, self.epoch = Table(), self.epoch + 1
        rows, schemas = [], dict[str, list[str]]({"": []})
        place = 0
        for index, group in enumerate(self._groups):
            for attempt, trajectory in enumerate(group):
                record = _record(group, index, attempt, trajectory)
                row, names = index_row(record, record["step"], place, 1)
                full = with_schema(row, names)
                schemas[full[WIDTH - 1]] = names
                rows.append(full)
                place += 1
        self.table.extend(rows, schemas)
        for event in self._events:
            self.table.add_event(event)

    def reader(self) -> Callable[[int], bytes]:
        members, places = self._members, self.table.numbers["offset"]

        def read(row: int) -> bytes:
            group, trajectory = members[int(places[row])]
            return encode(_record(group, 0, 0, trajectory)).encode("ascii")

        return read

    def record(self, row: int) -> dict[str, Any]:
        group, trajectory = self._members[int(self.table.numbers["offset"][row])]
        return _record(group, 0, 0, trajectory)

    def judge_of(self, row: int) -> Any:
        return None  # it is in the metadata

    def skipped(self, rows: Rows) -> str | None:
        group = self._members[int(self.table.numbers["offset"][rows[0]])][0]
        if str(group.metadata.get("split") or "train") != "train":
            return None
        reason = reason_to_drop(group)
        judge = group.metadata.get("unscored")
        return f"{reason}: {judge}" if reason and judge else reason

    def keep(self, row: int, kind: str, value: Any, reason: str) -> str:
        trajectory = self._members[int(self.table.numbers["offset"][row])][1]
        fields = {"trajectory": trajectory.id, "value": value, "reason": reason}
        self._events.append({"kind": kind, "time": time.time(), **fields})
        if kind == "override":
            override_reward(trajectory, value)
        self._mark = None
        self.refresh()
        return "memory"


def why_skipped(
    table: Table, rows: Rows, dropped: Mapping[str, Any] | None, judge: str | None = None
) -> str | None:
    """Why a training group taught nothing, by ``artnb.advantage``'s rules on what its rows say.

    ``dropped`` are the step's own counts: a reason that is not among them was none (credits differed, or
    rewards came later). None: the step has not been trained.
    """
    split = table.texts["split"]
    if split.values[split.codes[rows[0]]] != "train":
        return None
    errors, rewards = table.texts["error"], table.recorded_rewards()[rows]
    is_failed = errors.codes[rows] != errors.places.get("", -1)
    scored = rewards[~is_failed & (abs(rewards) < math.inf)]
    reason, detail = None, ""
    if len(scored) < 2:
        reason, failed = TOO_FEW, int(is_failed.sum())
        detail = judge or (f"{failed} of {len(rows)} failed" if failed else f"{len(scored)} of {len(rows)}")
    elif not table.numbers["tokens"][rows].sum():
        reason = NO_TOKEN
    elif math.isclose(scored.min(), scored.max(), rel_tol=1e-9, abs_tol=1e-12):
        reason, detail = EQUAL_REWARDS, f"all {scored[0]:.4g}"
    if reason is None or (dropped is not None and reason not in dropped):
        return None
    return f"{reason} ({text(detail)})" if detail else reason


class _Lines:
    """Whole lines that were added to a growing file of JSON lines, with their places."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0

    def read(self) -> list[tuple[dict[str, Any], int, int]]:
        """(record, offset, length) since the last call; spoilt lines are passed over."""
        try:
            if self.path.stat().st_size <= self._at:
                return []
            with open(self.path, "rb") as file:
                file.seek(self._at)
                added = file.read()
        except FileNotFoundError:
            return []
        found = []
        for line in added[: added.rfind(b"\n") + 1].splitlines(keepends=True):
            with contextlib.suppress(ValueError):  # spoilt by the disk
                record = decode(line)
                if isinstance(record, dict):
                    found.append((record, self._at, len(line)))
            self._at += len(line)
        return found

    def at(self, offset: int, length: int) -> bytes:
        """The line that stands there."""
        with open(self.path, "rb") as file:
            file.seek(offset)
            return file.read(length)


def _mark(trajectory: Trajectory) -> tuple[Any, ...]:
    """What changes when there is something new to show."""
    reward = trajectory.reward
    return (
        id(trajectory),
        repr(reward),
        trajectory.error is None,
        len(trajectory.messages_and_choices),
        tuple(trajectory.metrics.items()),
    )


def _record(group: TrajectoryGroup, index: int, attempt: int, trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory in memory as a line of a run would hold it."""
    about = group.metadata
    step = about.get("step")
    return {
        "step": step if isinstance(step, int) and step >= 0 else 0,
        "split": about.get("split") or "train",
        "gather_id": about.get("gather_id") or f"group {index}",
        "attempt": attempt,
        "group_metadata": about,
        "trajectory": _plain_trajectory(trajectory),
    }


def _plain_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    try:
        return trajectory.to_json()
    except (ValueError, TypeError, AttributeError):  # choices of another client among its messages
        items: list[Any] = []
        for item in trajectory.messages_and_choices:
            known = isinstance(item, (dict, Turn))
            items.append(item if known else {"role": "assistant", "content": str(item)})
        known_items = {**vars(trajectory), "messages_and_choices": items, "additional_histories": []}
        return Trajectory(**known_items).to_json()
