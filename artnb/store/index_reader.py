"""Which rows of a run's index can be believed, and what has to be read again from the trajectories?

Rows count where they cover a trajectories file from its start without a gap or an overlap, and where the
file is as long as they say. Everything else is read from the file, in slices; a process that may write the
run keeps what it read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from artnb.store.checkpoints import step_name
from artnb.store.codec import decode
from artnb.store.index import FIELDS, WIDTH, IndexWriter, Row, index_name, index_row, with_schema

_INDEX = re.compile(r"steps_(\d{6,})\.v1\.jsonl")
_BODY = re.compile(r"step_(\d{6,})\.jsonl")
_RESCAN_SECONDS = 20.0
_ID, _SCHEMA = FIELDS.index("id"), FIELDS.index("schema")


class News(NamedTuple):
    """What a look at the index found."""

    rows: list[Row]
    """New rows; those of a step in the order of its file."""
    void: set[int]
    """Steps whose earlier rows do not count any more; what does is among ``rows``, now or later."""


class Index:
    """The rows of a run's trajectories, kept up by ``look`` and completed by ``fill``.

    ``may_write`` is asked before rows are kept in the run's folder.
    """

    def __init__(self, trajectories: Path, *, may_write: Callable[[], bool] = lambda: False) -> None:
        self.path = trajectories
        self.schemas: dict[str, list[str]] = {"": []}
        """Schema -> names of the metrics whose values end a row."""
        self._may_write = may_write
        self._writer: IndexWriter | None = IndexWriter(trajectories)
        self._steps: dict[int, _Step] = {}
        self._read: dict[str, int] = {}
        self._scanned = float("-inf")
        self._is_first = True
        self._forgotten: set[int] = set()

    @property
    def share(self) -> float | None:
        """Share of the bytes that rows cover; None when nothing is left to do."""
        if not any(one.is_fillable for one in self._steps.values()):
            return None
        total = sum(one.size for one in self._steps.values())
        return 1 - sum(one.todo for one in self._steps.values()) / max(total, 1)

    def look(self) -> News:
        """Read what was added to the index, and see which files have grown beyond it."""
        for one in self._steps.values():
            one.gap_at = one.end if one.todo else -1
        found, resets = self._new_rows()
        self._measure(found)
        rows, void = list[Row](), self._forgotten
        self._forgotten = set()
        for step in resets & self._steps.keys():
            self._steps[step].restart(is_told=True)
            void.add(step)
        for step, mine in found.items():
            if step in self._steps:
                rows += self._take(step, mine, void)
        for step, state in list(self._steps.items()):
            if state.reach > state.size:
                rows = [row for row in rows if row[0] != step]
                state.restart()
                void.add(step)
            if state.size == 0:
                del self._steps[step]
            elif self._is_first:
                state.gap_at = state.end  # what was there before us waits for no writer
        self._is_first = False
        return News(rows, void)

    def _take(self, step: int, given: Iterable[Row], void: set[int]) -> list[Row]:
        """Rows of one step that count now; all of them are void when one contradicts the others."""
        state, rows = self._steps[step], list[Row]()
        rest = list(given)
        if self._fits_behind(state, rest):  # as a writer leaves them: nothing to sort out
            state.end = rest[-1][1] + rest[-1][2]
            return rest
        for row in rest:
            if len(row) > 3:
                names = self.schemas.get(row[_SCHEMA])
                if names is None or len(row) != WIDTH + len(names):
                    continue  # its bytes are a gap
            taken = state.take(row)
            if taken is None:
                state.restart()
                void.add(step)
                return []
            rows += taken
        return [row for row in rows if len(row) > 3]

    def _fits_behind(self, state: _Step, rows: list[Row]) -> bool:
        """True for complete rows that go on without a gap where the covered part ends."""
        if not rows or state.waiting:
            return False
        ends = [row[1] + row[2] for row in rows]
        if [row[1] for row in rows] != [state.end, *ends[:-1]]:
            return False
        if any(len(row) < WIDTH or row[2] <= 0 for row in rows):
            return False
        kinds = {(row[_SCHEMA], len(row)) for row in rows}
        return all(name in self.schemas and len(self.schemas[name]) == size - WIDTH for name, size in kinds)

    def forget(self, step: int) -> None:
        """A line was not what its row says: the next ``fill`` reads this step again."""
        if step in self._steps:
            self._steps[step].restart()
            self._forgotten.add(step)

    def fill(self, seconds: float) -> News:
        """Read lines that have no row yet, the newest step first, for about so long."""
        until = time.monotonic() + seconds
        rows, void = list[Row](), self._forgotten
        self._forgotten = set()
        for step in sorted(self._steps, reverse=True):
            while self._steps[step].is_fillable and time.monotonic() < until:
                contradicted = set[int]()
                taken = self._take(step, self._read_lines(step, until), contradicted)
                if contradicted:
                    void |= contradicted
                    rows = [row for row in rows if row[0] != step]
                rows += taken
                self._steps[step].gap_at = self._steps[step].end
        if self.share is None:
            self.close()
        return News(rows, void)

    def _read_lines(self, step: int, until: float) -> list[Row]:
        """Rows of the lines behind the covered part, kept on disk where that is allowed."""
        state = self._steps[step]
        made: list[tuple[Row, list[str]]] = []
        at, stop = state.end, min(state.waiting, default=state.size)
        try:
            with open(self.path / f"{step_name(step)}.jsonl", "rb") as file:
                file.seek(at)
                while at < stop and (not made or time.monotonic() < until):
                    line = file.readline()
                    if not line.endswith(b"\n"):
                        state.stuck = state.size  # it is being written, or was never finished
                        break
                    made.append(_row_of_line(line, step, at))
                    at += len(line)
        except OSError:  # the file went away; a later look sees that
            state.stuck = state.size
        if made:
            self._keep(step, made)
        full = [with_schema(*pair) for pair in made]
        self.schemas.update((row[_SCHEMA], pair[1]) for row, pair in zip(full, made, strict=True) if pair[1])
        return full

    def _keep(self, step: int, made: list[tuple[Row, list[str]]]) -> None:
        if self._writer is None or not self._may_write():
            return
        try:
            self._writer.write(step, made, reset=self._steps[step].is_void)
            name = index_name(step)
            self._read[name] = (self.path / "index" / name).stat().st_size
        except OSError:  # a folder that cannot be written: rows stay in memory
            self._writer = None
        self._steps[step].is_void = False

    def close(self) -> None:
        """Let go of the file that ``fill`` writes to."""
        if self._writer is not None:
            self._writer.close()

    def _new_rows(self) -> tuple[dict[int, list[Row]], set[int]]:
        """Rows by step that were added to the index's files, and the steps that were reset."""
        found: dict[int, list[Row]] = {}
        resets: set[int] = set()
        for name, size in sorted(_sizes(self.path / "index", _INDEX).values()):
            start = self._read.get(name, 0)
            if size == start:
                continue
            if size < start:  # it was replaced; rows that are known already are taken for copies
                start = 0
            with contextlib.suppress(OSError):  # removed at this moment
                for row in self._lines(name, start):
                    if row[0] == "metrics":
                        self.schemas[row[1]] = row[2]
                    elif row[0] == "reset":
                        found.pop(row[1], None)
                        resets.add(row[1])
                    else:
                        found.setdefault(row[0], []).append(row)
        return found, resets

    def _lines(self, name: str, start: int) -> list[Row]:
        with open(self.path / "index" / name, "rb") as file:
            file.seek(start)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read[name] = start + len(whole)
        lines = [line for line in whole.split(b"\n") if line]
        rows = _parsed(b"[%s]" % b",".join(lines))  # at once: three times as fast as line by line
        if rows is None:
            rows = [_parsed(line) for line in lines]
        return rows if all(map(_is_sound, rows)) else [row for row in rows if _is_sound(row)]

    def _measure(self, fresh: Iterable[int]) -> None:
        """Sizes of the trajectories' files: of all of them now and then, else of those that may grow."""
        now = time.monotonic()
        if now - self._scanned > _RESCAN_SECONDS:
            self._scanned = now
            sizes = {step: size for step, (_, size) in _sizes(self.path, _BODY).items()}
            sizes |= dict.fromkeys(self._steps.keys() - sizes.keys(), 0)
        else:
            last = max(self._steps, default=-1)
            wanted = {last, last + 1, *fresh, *(step for step, one in self._steps.items() if one.todo)}
            sizes = {step: size for step in wanted if (size := self._size(step))}
        for step, size in sizes.items():
            self._steps.setdefault(step, _Step()).size = size

    def _size(self, step: int) -> int | None:
        with contextlib.suppress(OSError):
            return (self.path / f"{step_name(step)}.jsonl").stat().st_size
        return None


class _Step:
    """How much of one trajectories file is covered by rows."""

    def __init__(self) -> None:
        self.size = 0
        self.end = 0
        """Bytes from the start that rows cover without a gap."""
        self.waiting: dict[int, Row] = {}
        """Rows beyond a gap, by offset."""
        self.stuck = -1
        """Size at which what lies behind ``end`` was no whole line."""
        self.gap_at = -1
        """``end`` at the last look, if there was a gap behind it: a writer's row would be there by now."""
        self.is_void = False
        """Rows of it in the index do not fit; the next ones that are written say so."""

    def take(self, row: Row) -> list[Row] | None:
        """Rows that count now, this one among them or waiting; None when it contradicts the others."""
        offset, end = row[1], row[1] + row[2]
        if row[2] <= 0 or offset < self.end < end:
            return None
        if offset > self.end:
            self.waiting[offset] = row
            return []
        if end <= self.end:
            return []  # a copy
        self.end = end
        taken = [row]
        while self.waiting and (first := min(self.waiting)) <= self.end:
            more = self.take(self.waiting.pop(first))
            if more is None:
                return None
            taken += more
        return taken

    def restart(self, *, is_told: bool = False) -> None:
        """Nothing is covered. ``is_told``: the index says so itself."""
        self.end, self.stuck, self.gap_at = 0, -1, -1
        self.waiting = {}
        self.is_void = not is_told

    @property
    def reach(self) -> int:
        return max([self.end, *(row[1] + row[2] for row in self.waiting.values())])

    @property
    def todo(self) -> int:
        return 0 if self.stuck == self.size else max(0, self.size - self.end)

    @property
    def is_fillable(self) -> bool:
        """True when there are lines whose rows no living writer is about to add."""
        return self.todo > 0 and (self.is_void or self.gap_at == self.end)


def _sizes(folder: Path, name: re.Pattern[str]) -> dict[int, tuple[str, int]]:
    """The number in the name of each file -> its name and size in bytes."""
    found: dict[int, tuple[str, int]] = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if (match := name.fullmatch(entry.name)) is not None:
                with contextlib.suppress(OSError):  # removed at this moment
                    found[int(match[1])] = entry.name, entry.stat().st_size
    return found


def _row_of_line(line: bytes, step: int, offset: int) -> tuple[Row, list[str]]:
    record = None
    with contextlib.suppress(ValueError):  # spoilt by the disk
        record = decode(line)
    if not isinstance(record, dict) or not isinstance(record.get("trajectory"), dict):
        return [step, offset, len(line)], []
    return index_row(record, step, offset, len(line))


def _parsed(text: bytes) -> Any:
    with contextlib.suppress(ValueError, RecursionError):  # torn: the lines that it stood for are read again
        return json.loads(text)
    return None


def _is_sound(row: Any) -> bool:
    """True for a line of the index that has the form of one."""
    if type(row) is not list or not row:
        return False
    if type(row[0]) is int:
        if len(row) < WIDTH:
            return len(row) == 3 and type(row[1]) is int and type(row[2]) is int
        return type(row[1]) is int and type(row[2]) is int and type(row[_SCHEMA]) is type(row[_ID]) is str
    if row[0] == "reset":
        return len(row) == 2 and type(row[1]) is int
    is_schema = row[0] == "metrics" and len(row) == 3 and type(row[1]) is str and type(row[2]) is list
    return is_schema and all(type(name) is str for name in row[2])
