"""Which lines does the table show, as a flat list or as steps -> groups -> trajectories?"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from artnb.browser.plain import number, text
from artnb.browser.rows import Rows, Table

Sort = Sequence[tuple[str, bool]]
"""(column key, descending), the one that decides first comes first."""


@dataclass(frozen=True)
class Branch:
    """A line that stands for several trajectories."""

    kind: Literal["step", "group"]
    key: str
    rows: Rows
    is_open: bool


Line = int | Branch
"""A row of the table, or a branch above rows."""


def branches(table: Table, rows: Rows, sort: Sort, expanded: Collection[str]) -> list[Line]:
    """Lines of a tree; ``rows`` are sorted already, which orders the trajectories within a group.

    Steps and groups are sorted by their means, of texts by the first one. "*" in ``expanded`` opens all.
    """
    lines: list[Line] = []
    is_all = "*" in expanded
    keys, places = table.groups()
    of_rows = table.numbers["step"]
    steps = _parts(table, rows, of_rows[rows].astype(np.int64), sort)
    opened = [is_all or f"step:{step}" in expanded for step, _ in steps]
    shown = [step for (step, _), is_open in zip(steps, opened, strict=True) if is_open]
    inside = rows if is_all else rows[np.isin(of_rows[rows], shown)]
    groups: dict[int, list[tuple[int, Rows]]] = {}
    for place, members in _parts(table, inside, places[inside], sort):
        groups.setdefault(int(of_rows[members[0]]), []).append((place, members))
    for (step, of_step), is_open in zip(steps, opened, strict=True):
        lines.append(Branch("step", f"step:{step}", of_step, is_open))
        for place, members in groups.get(step, ()):
            is_group_open = is_all or keys[place] in expanded
            lines.append(Branch("group", keys[place], members, is_group_open))
            if is_group_open:
                lines += members.tolist()
    return lines


def _parts(table: Table, rows: Rows, codes: Rows, sort: Sort) -> list[tuple[int, Rows]]:
    """Rows shared out by code; the parts sorted by their means, else by code."""
    if not len(rows):
        return []
    found, inverse, counts = np.unique(codes, return_inverse=True, return_counts=True)
    inverse = inverse.ravel()
    shared = np.split(rows[np.argsort(inverse, kind="stable")], np.cumsum(counts)[:-1])
    keys = [_means(table, key, down, rows, inverse, len(found)) for key, down in reversed(sort)]
    order = np.lexsort([found, *keys])
    return [(int(found[i]), shared[i]) for i in order]


def _means(table: Table, key: str, down: bool, rows: Rows, inverse: Rows, count: int) -> np.ndarray:
    values = table.ranks(key, descending=down)[rows]
    is_there = ~np.isnan(values)
    if table.kind(key) == "text":
        lowest = np.full(count, np.inf)
        np.minimum.at(lowest, inverse[is_there], values[is_there])
        return lowest
    with np.errstate(invalid="ignore"):
        sums = np.bincount(inverse[is_there], values[is_there], minlength=count)
        return sums / np.where(counts := np.bincount(inverse[is_there], minlength=count), counts, np.nan)


def branch_line(table: Table, branch: Branch, skipped: str | None = None) -> dict[str, Any]:
    """A branch as the table shows it: means of numbers, and texts in which all agree."""
    rows = branch.rows
    line: dict[str, Any] = {
        "kind": branch.kind,
        "key": text(branch.key),
        "level": 0 if branch.kind == "step" else 1,
        "open": branch.is_open,
        "trajectories": len(rows),
        "group": text(branch.key) if branch.kind == "group" else None,
    }
    for column in table.columns():
        key, kind = column["key"], column["kind"]
        if kind == "number":
            values = table.numeric(key)[rows]
            values = values[np.isfinite(values)]
            line[key] = number(float(values.mean())) if len(values) else None
        elif kind == "flag":
            line[key] = bool(table.numeric(key)[rows].any())
        else:
            coded = table.coded(key)
            codes = coded.codes[rows]
            line[key] = (text(coded.values[codes[0]]) or None) if (codes == codes[0]).all() else None
    line["step"] = None if line["step"] is None else int(line["step"])
    if branch.kind == "step":
        line["title"] = f"step {line['step']}"
    else:
        line["title"] = (line["scenario"] or "scenario") + (f" ({line['seat']})" if line["seat"] else "")
        line["skipped"] = skipped
    return line


def row_line(table: Table, row: int, keys: Sequence[str], *, level: int = 0) -> dict[str, Any]:
    """A trajectory as the table shows it."""
    names, places = table.groups()
    line = {key: table.value(key, row) for key in keys}
    return {
        "kind": "row",
        "key": table.id_of(row),
        "level": level,
        "group": text(names[places[row]]),
        **line,
    }
