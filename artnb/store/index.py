"""How is one of 100,000 stored trajectories found without reading them all? A short row for each.

``trajectories/index/steps_000000.v1.jsonl`` holds the rows of steps 0 to 99: JSON arrays in the order of
``FIELDS``, then the values of the metrics that the row's schema names. Beside them stand

    ["metrics", schema, [name, ..]]   the names of a schema, which is their hash
    ["reset", step]                   rows of this step that stand above do not count
    [step, offset, length]            bytes that hold no trajectory: a line that the disk spoilt

The writer of a run appends rows as it appends trajectories. They are believed only where offsets and
lengths cover the trajectories' files; what is missing or does not fit is read again from those, so the
folder can be removed at any time (index_reader.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from artnb.store.journal import Journal

Row = list[Any]
FIELDS = (
    *("step", "offset", "length", "split", "gather", "attempt", "session", "id", "scenario", "seat"),
    *("reward", "error", "turns", "tokens", "version", "version_min", "seconds", "tools", "histories"),
    *("parent", "schema"),
)
"""``offset`` and ``length`` in bytes, ``tokens`` sampled ones, ``seconds`` of the episode, ``version`` of the
last turn, ``tools`` names joined by ", ", ``error`` its type. Missing numbers are null, missing texts empty;
a reward that is not finite is its name."""
WIDTH = len(FIELDS)
_STEPS = 100
"""Steps whose rows share a file: few files to open, and small ones for mounts that upload whole files."""
_MOST_METRICS, _MOST_TOOLS = 40, 8
_LONGEST = {"id": 80, "scenario": 160, "error": 60, "parent": 80}
_LONGEST_TEXT, _LONGEST_METRIC = 40, 60


def index_row(record: Mapping[str, Any], step: int, offset: int, length: int) -> tuple[Row, list[str]]:
    """The row of one line of a trajectories file, without its schema, and the names of its metrics.

    The row ends where the schema goes; the metrics' values are to follow. Whatever the record holds, short
    texts and numbers come out.
    """
    trajectory = _mapping(record.get("trajectory"))
    histories = [trajectory, *map(_mapping, _list(trajectory.get("additional_histories")))]
    items = [_mapping(item) for h in histories for item in _list(h.get("messages_and_choices"))]
    turns = [_mapping(item["turn"]) for item in items if "turn" in item]
    messages = [_mapping(_mapping(item.get("turn")).get("message") or item.get("message")) for item in items]
    versions = [v for turn in turns if (v := _number(turn.get("policy_version"))) is not None]
    error, reward = trajectory.get("error"), _number(trajectory.get("reward"))
    values = {
        "step": step,
        "offset": offset,
        "length": length,
        "split": record.get("split"),
        "gather": record.get("gather_id"),
        "attempt": _whole(record.get("attempt")),
        "session": _whole(record.get("session")) or 0,
        "id": trajectory.get("id"),
        "scenario": trajectory.get("scenario_id"),
        "seat": trajectory.get("seat"),
        "reward": reward if reward is None or _is_finite(reward) else str(reward),
        "error": (_mapping(error).get("type") or "Error") if error is not None else None,
        "turns": len(turns),
        "tokens": sum(len(_list(turn.get("completion_ids"))) for turn in turns),
        "version": _whole(versions[-1]) if versions else None,
        "version_min": _whole(min(versions)) if versions else None,
        "seconds": _rounded(trajectory.get("seconds")),
        "tools": ", ".join(_tools(messages)),
        "histories": len(histories),
        "parent": trajectory.get("parent_id"),
    }
    row = [_short(name, values[name]) if name in _TEXTS else values[name] for name in FIELDS[:-1]]
    metrics = _metrics(trajectory.get("metrics"))
    return [*row, *metrics.values()], list(metrics)


_TEXTS = frozenset({"split", "gather", "id", "scenario", "seat", "error", "tools", "parent"})


def with_schema(row: Row, names: Sequence[str]) -> Row:
    """The row as it stands in the file."""
    if len(row) < WIDTH - 1:
        return row  # of no trajectory
    schema = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:8] if names else ""
    return [*row[: WIDTH - 1], schema, *row[WIDTH - 1 :]]


def short_id(value: Any) -> str:
    """An id as rows hold it."""
    return _short("id", value)


def _short(name: str, value: Any) -> str:
    text = "" if value is None else str(value)
    longest = _LONGEST.get(name, 120 if name == "tools" else _LONGEST_TEXT)
    if len(text) <= longest:
        return text
    mark = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:6]
    return f"{text[: longest - 7]}…{mark}"


def _tools(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    calls = [_mapping(call) for message in messages for call in _list(message.get("tool_calls"))]
    names = dict.fromkeys(str(_mapping(call.get("function")).get("name") or "?") for call in calls)
    return [name.replace(",", " ")[:_LONGEST_TEXT] for name in list(names)[:_MOST_TOOLS]]


def _metrics(given: Any) -> dict[str, float | str]:
    """Numbers by name, parts of the reward first; of very many metrics the first ones."""
    found: dict[str, float | str] = {}
    named = [(str(name), _number(value)) for name, value in _mapping(given).items()]
    for name, value in sorted(named, key=lambda pair: not pair[0].startswith("reward/")):
        if value is not None and len(found) < _MOST_METRICS:
            found[name[:_LONGEST_METRIC]] = _rounded(value) if _is_finite(value) else str(value)
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _number(value: Any) -> float | None:
    if type(value).__module__ in ("numpy", "torch") and hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, numbers.Real):
        return None
    with contextlib.suppress(OverflowError):  # an integer of hundreds of digits
        return float(value)
    return None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and abs(number) < 2**53 else None


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")


def _rounded(value: Any) -> Any:
    """Seven digits are enough to sort and to show."""
    number = _number(value)
    if number is None or not _is_finite(number):
        return None
    short = float(f"{number:.7g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short


class IndexWriter:
    """Appends rows. The index is disposable: when the disk refuses, readers do without."""

    def __init__(self, trajectories: Path) -> None:
        self.folder = trajectories / "index"
        self._open: tuple[Path, Journal] | None = None
        self._told: set[str] = set()

    def append(
        self, step: int, records: Sequence[Mapping[str, Any]], spans: Sequence[tuple[int, int]]
    ) -> None:
        """Add the rows of lines that were just written, with one write."""
        rows = [index_row(r, step, *span) for r, span in zip(records, spans, strict=True)]
        with contextlib.suppress(OSError):  # a reader finds the lines that have no row
            self.write(step, rows)

    def write(self, step: int, rows: Iterable[tuple[Row, list[str]]], *, reset: bool = False) -> None:
        """Add rows of one step; ``reset`` says first that its earlier ones do not count. Raises OSError."""
        path = self.folder / index_name(step)
        lines: list[Any] = [["reset", step]] if reset else []
        if self._open is None or self._open[0] != path:
            self.close()
            self._open = path, Journal(path, keep_open=True)
            if _lacks_newline(path):
                lines.insert(0, None)
        told = set(self._told)
        for row, names in rows:
            full = with_schema(row, names)
            if names and full[WIDTH - 1] not in told:
                told.add(full[WIDTH - 1])
                lines.append(["metrics", full[WIDTH - 1], names])
            lines.append(full)
        text = "".join("\n" if line is None else f"{_json(line)}\n" for line in lines)
        self._open[1].append_lines(text.encode("ascii"))
        self._told = told

    def close(self) -> None:
        """Let go of the file."""
        if self._open is not None:
            self._open[1].close()
        self._open, self._told = None, set()


def index_name(step: int) -> str:
    """Name of the file that holds the rows of this step."""
    return f"steps_{step // _STEPS * _STEPS:06d}.v1.jsonl"


def _json(line: Any) -> str:
    return json.dumps(line, allow_nan=False, separators=(",", ":"))


def _lacks_newline(path: Path) -> bool:
    """True when a killed process left its last row without an end."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    return False
