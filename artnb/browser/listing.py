"""Which lines does the table show for a filter, a sort and what is unfolded? Queries, and pages of them."""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from artnb.browser import filters
from artnb.browser.plain import text
from artnb.browser.rows import Rows, Table
from artnb.browser.search import Search
from artnb.browser.shelves import Shelf
from artnb.browser.step_records import StepRecords
from artnb.browser.tree import Branch, Line, Sort, branch_line, branches, row_line

MOST_ROWS = 500
"""Of a page."""
_MOST_QUERIES = 64
_SLICE_SECONDS, _ADVANTAGE_SECONDS = 0.2, 0.1
FORGOTTEN = {"error": "this query is forgotten: ask it again"}


@dataclass
class _Query:
    """A question that the table was asked, and the lines that answer it."""

    filter: filters.Filter
    sort: Sort
    tree: bool
    expanded: frozenset[str]
    search: Search | None
    epoch: int = -1
    candidates: Rows = field(default_factory=lambda: np.empty(0, np.intp))
    """Rows that fit all but the texts that are searched for."""
    rows: Rows = field(default_factory=lambda: np.empty(0, np.intp))
    lines: list[Line] | None = None
    found: int = 0


class Listing:
    """The table of a shelf. Any thread may ask; answers come one at a time."""

    def __init__(self, shelf: Shelf, records: StepRecords) -> None:
        self.shelf = shelf
        self._lock = threading.RLock()
        self._records = records
        self._epoch = shelf.epoch
        self._queries: OrderedDict[str, _Query] = OrderedDict()
        self._search: tuple[Any, Search] | None = None

    @property
    def table(self) -> Table:
        """The columns of all trajectories."""
        return self.shelf.table

    def refresh(self) -> bool:
        """Look for new records and events, and index for at most 0.2 s; True when something changed.

        While ``facts()["indexing"]`` is a number there is more to index: call again soon (from a worker
        thread). A query keeps its rows until it is asked again.
        """
        with self._lock:
            return self.shelf.refresh(_SLICE_SECONDS)

    def query(
        self,
        filter: str = "",
        sort: Sequence[Sequence[str]] = (),
        tree: bool = False,
        expanded: Iterable[str] = (),
    ) -> dict[str, Any]:
        """Choose rows: ``{"query": id, "count": lines, "matched": trajectories, "searching": share | None}``.

        ``filter`` is described in filters.py (and ``facts()["help"]``); ``sort`` is a list of
        ``[column key, "asc" | "desc"]``, the first one decides first; missing values come last. With
        ``tree`` the rows are steps -> groups -> trajectories; of those whose ``key`` is in ``expanded``
        the children are shown ("*" expands all). Sorting a tree sorts steps and groups by their mean.

        A filter with ``text:"..."`` reads bodies in a thread: ``searching`` is the share done; ask
        ``progress(id)`` again until it is None, and ``page`` for what has been found so far. The next
        ``query`` of the same ``tree`` of calls cancels it. A filter or sort that cannot be understood gives
        ``{"error": words, "at": index of the character | None}``.
        """
        with self._lock:
            try:
                parsed = filters.parse_filter(str(filter), self.table)
                order = self._sort(sort)
            except filters.FilterError as error:
                return {"error": text(str(error)), "at": error.at}
            if "advantage" in str(filter) or any(key == "advantage" for key, _ in order):
                self._add_advantages(whole_numbers(self.table.numbers["step"]), float("inf"))
            found = _Query(parsed, order, bool(tree), frozenset(expanded), self._search_for(filter, parsed))
            name = uuid.uuid4().hex[:12]
            self._queries[name] = found
            while len(self._queries) > _MOST_QUERIES:
                self._queries.popitem(last=False)
            return self._state(name, self._bring_up(found))

    def progress(self, query: str) -> dict[str, Any]:
        """What ``query`` answered, as it stands now; ``{"error": words}`` when the query is forgotten."""
        with self._lock:
            found = self._current(query)
            return self._state(query, found) if found is not None else FORGOTTEN

    def page(self, query: str, start: int = 0, count: int = 100) -> dict[str, Any]:
        """Lines ``start`` to ``start + count`` (at most 500)::

            {"query", "start", "count": of all lines, "rows": [line]}

        A trajectory's line: ``{"kind": "row", "key": id, "level": 0 | 2, "group": key, <column>: value}``
        with missing values None and flags True/False. In a tree also::

            {"kind": "step", "key": "step:12", "level": 0, "open": bool, "trajectories": n, "title"}
            {"kind": "group", "key": group key, "level": 1, "open": bool, "trajectories": n,
             "title": scenario, "skipped": why the group taught nothing | None}

        Their number columns are means over their trajectories, text columns stand where all agree. The
        last 64 queries are kept; an older one gives ``{"error": words}``.
        """
        with self._lock:
            found = self._current(query)
            if found is None:
                return FORGOTTEN
            start, count = max(0, int(start)), max(0, min(int(count), MOST_ROWS))
            lines: Sequence[Line]
            if found.lines is None:
                lines = found.rows[start : start + count].tolist()
            else:
                lines = found.lines[start : start + count]
            self._add_advantages(self._steps_of(lines), _ADVANTAGE_SECONDS)
            keys = [column["key"] for column in self.table.columns()]
            level = 0 if found.lines is None else 2
            rows = [self._line(line, keys, level) for line in lines]
            return {"query": query, "start": start, "count": _count(found), "rows": rows}

    def _line(self, line: Line, keys: Sequence[str], level: int) -> dict[str, Any]:
        if not isinstance(line, Branch):
            return row_line(self.table, line, keys, level=level)
        reason = self._why_skipped(line.rows[0]) if line.kind == "group" else None
        return branch_line(self.table, line, reason)

    def _steps_of(self, lines: Sequence[Line]) -> list[int]:
        rows = [int(line.rows[0]) if isinstance(line, Branch) else line for line in lines]
        return whole_numbers(self.table.numbers["step"][rows]) if rows else []

    def _sort(self, sort: Sequence[Sequence[str]]) -> Sort:
        order = []
        for one in sort:
            key, way = (one, "asc") if isinstance(one, str) else (one[0], one[1] if len(one) > 1 else "asc")
            if self.table.kind(str(key)) is None:
                raise filters.FilterError(f"there is no column {str(key)!r} to sort by", 0)
            order.append((str(key), str(way).startswith("desc")))
        return order

    def _search_for(self, written: str, parsed: filters.Filter) -> Search | None:
        """The search of this filter, which goes on when the same is asked in another order."""
        if not parsed.needles:
            return None
        mark = str(written), self.shelf.epoch
        if self._search is None or self._search[0] != mark:
            if self._search is not None:
                self._search[1].stop()
            self._search = mark, Search(parsed.needles)
        return self._search[1]

    def _current(self, name: str) -> _Query | None:
        """A query whose lines are as they should be now; None when it is forgotten."""
        found = self._queries.get(name)
        if found is None:
            return None
        is_moved = found.epoch != self.shelf.epoch
        if is_moved and found.search is not None:
            found.search = Search(found.filter.needles)
        if is_moved or (found.search is not None and found.search.found != found.found):
            return self._bring_up(found)
        if found.search is not None and found.search.share is None:
            self._go_on(found)
        return found

    def _bring_up(self, query: _Query) -> _Query:
        if query.epoch != self.shelf.epoch:
            query.candidates = np.flatnonzero(query.filter.mask(self.table))
            query.epoch = self.shelf.epoch
        kept = query.candidates
        if query.search is not None:
            self._go_on(query)
            query.search.wait(0.05)  # a short search answers at once
            query.found = query.search.found
            kept = query.search.hits(query.candidates)
        query.rows = self.table.order(kept, query.sort)
        is_tree = query.tree
        query.lines = branches(self.table, query.rows, query.sort, query.expanded) if is_tree else None
        return query

    def _go_on(self, query: _Query) -> None:
        """Search what was not searched: it rests when nobody asks, and rows may have come."""
        search = query.search
        is_newest = self._search is not None and self._search[1] is search
        if search is None or not is_newest or search.share is not None or search.is_done(query.candidates):
            return
        search.start(query.candidates, self.table.count, self.shelf.reader())

    def _state(self, name: str, query: _Query) -> dict[str, Any]:
        share = None if query.search is None else query.search.share
        return {"query": name, "count": _count(query), "matched": len(query.rows), "searching": share}

    def _add_advantages(self, steps: Iterable[int], seconds: float) -> None:
        if self._epoch != self.shelf.epoch:
            self._records.forget()
            self._epoch = self.shelf.epoch
        self._records.add_advantages(self.table, steps, seconds)

    def _why_skipped(self, row: int) -> str | None:
        _, places = self.table.groups()
        return self.shelf.skipped(np.flatnonzero(places == places[row]))


def _count(query: _Query) -> int:
    return len(query.rows) if query.lines is None else len(query.lines)


def whole_numbers(values: np.ndarray) -> list[int]:
    return [int(value) for value in np.unique(values[np.isfinite(values)])]
