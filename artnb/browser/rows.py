"""How are 100,000 trajectories filtered and sorted in a moment? As columns of numbers and of coded texts.

Built from rows of the index (store/index.py), those of a run's folder or of groups in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np

from artnb.browser.plain import mapping, number, text
from artnb.store.index import FIELDS, WIDTH, Row, short_id
from artnb.store.timeline import Timeline

Floats = np.ndarray[Any, np.dtype[np.float64]]
Rows = np.ndarray[Any, np.dtype[np.intp]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

TEXTS = ("split", "gather", "id", "scenario", "seat", "error", "tools", "parent")
_SCHEMA = FIELDS.index("schema")
STATUSES = ("scored", "unscored", "failed", "rolled back")

COLUMNS: dict[str, tuple[str, str, str]] = {
    "step": ("step", "number", "what"),
    "split": ("split", "text", "what"),
    "scenario": ("scenario", "text", "what"),
    "seat": ("seat", "text", "what"),
    "id": ("id", "text", "what"),
    "status": ("status", "text", "what"),
    "reward": ("reward", "number", "reward"),
    "override": ("override", "number", "person"),
    "advantage": ("advantage", "number", "reward"),
    "turns": ("turns", "number", "what"),
    "tokens": ("sampled tokens", "number", "what"),
    "seconds": ("seconds", "number", "what"),
    "tools": ("tools", "text", "what"),
    "error": ("error", "text", "what"),
    "version": ("policy version", "number", "policy"),
    "version_min": ("oldest version", "number", "policy"),
    "bookmark": ("bookmark", "flag", "person"),
    "note": ("note", "text", "person"),
    "rolled_back": ("rolled back", "flag", "what"),
    "gather": ("gather", "text", "what"),
    "attempt": ("attempt", "number", "what"),
    "parent": ("parent", "text", "what"),
    "histories": ("histories", "number", "what"),
}
"""Key -> title, kind, group; parts of the reward and metrics come from the rows."""


@dataclass
class Coded:
    """A column of texts: each once, and its place for every row."""

    values: list[str] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    codes: Rows = field(default_factory=lambda: np.empty(0, np.intp))

    def extend(self, texts: Sequence[str]) -> None:
        places = self.places
        for one in dict.fromkeys(texts):
            places.setdefault(one, len(places))
        fresh = np.fromiter(map(places.__getitem__, texts), np.intp, len(texts))
        self.values = list(places)
        self.codes = np.concatenate([self.codes, fresh])

    def ranks(self) -> Floats:
        """For every row the place of its text among the sorted ones; NaN where it is empty."""
        order = sorted(range(len(self.values)), key=self.values.__getitem__)
        ranks = np.empty(len(order))
        ranks[order] = np.arange(len(order))
        if "" in self.places:
            ranks[self.places[""]] = np.nan
        return ranks[self.codes] if len(order) else np.empty(0)


class Table:
    """Columns of trajectories in the order in which they came. Rows are added, or those of a step dropped."""

    def __init__(self) -> None:
        self.count = 0
        self.texts: dict[str, Coded] = {name: Coded() for name in TEXTS}
        self.numbers: dict[str, Floats] = {
            name: np.empty(0) for name in FIELDS if name not in TEXTS and name != "schema"
        }
        self.measured: list[str] = []
        """Keys of reward parts and metrics."""
        self.row_of: dict[str, int] = {}
        """Shown id -> row."""
        self._copies: dict[str, list[str]] = {}
        """Stored id -> the ids under which it is shown, where those are several."""
        self._stored: dict[str, str] = {}
        """Shown id -> stored id, where they differ."""
        self._shown: set[str] = set()
        self.cache: dict[Any, Any] = {}
        """What was worked out from the columns as they stand."""
        self.timeline = Timeline()
        self.judged: dict[str, dict[str, float]] = {}
        """Stored id -> what a judge's event says of columns: reward, its parts, metrics."""
        self.overrides: dict[str, Mapping[str, Any]] = {}
        """Stored id -> event of the journal."""
        self.bookmarks: dict[str, Mapping[str, Any]] = {}
        self.advantages: dict[str, float] = {}

    # ---- growing --------------------------------------------------------------------------------

    def extend(self, rows: Iterable[Row], schemas: Mapping[str, Sequence[str]]) -> None:
        """Add rows of the index. Schemas tell what the values at their ends are."""
        by_schema: dict[str, list[Row]] = {}
        for schema, run in itertools.groupby(rows, key=itemgetter(_SCHEMA)):
            by_schema.setdefault(schema, []).extend(run)
        for schema, alike in by_schema.items():
            self._extend(list(zip(*alike, strict=True)), schemas[schema])
        if by_schema:
            self.cache.clear()

    def _extend(self, columns: Sequence[Sequence[Any]], names: Sequence[str]) -> None:
        count, before = len(columns[0]), self.count
        for place, name in enumerate(FIELDS):
            if name == "id":
                shown = self._own_ids(_as_texts(columns[place]))
                self.texts["id"].extend(shown)
                self.row_of.update(zip(shown, range(before, before + count), strict=True))
            elif name in self.texts:
                self.texts[name].extend(_as_texts(columns[place]))
            elif name != "schema":
                self.numbers[name] = np.concatenate([self.numbers[name], _as_floats(columns[place])])
        values = {_key(n): c for n, c in zip(names, columns[WIDTH:], strict=True)}
        for key in values.keys() - self.numbers.keys():
            self._add_column(key)
        for key in self.measured:
            fresh = _as_floats(values[key]) if key in values else np.full(count, np.nan)
            self.numbers[key] = np.concatenate([self.numbers[key], fresh])
        self.count += count

    def _add_column(self, key: str) -> None:
        self.numbers[key] = np.full(self.count, np.nan)
        self.measured = sorted([*self.measured, key], key=lambda k: (k.startswith("metric/"), k))

    def _own_ids(self, stored: Sequence[str]) -> list[str]:
        """Ids that no other rows have: a trajectory that was written twice is shown twice."""
        given = list(map(text, stored))
        fresh = set(given)
        if len(fresh) == len(given) and self._shown.isdisjoint(fresh):
            self._shown |= fresh
            return given
        return list(map(self._own_id, given))

    def _own_id(self, given: str) -> str:
        if given not in self._shown:
            self._shown.add(given)
            return given
        copies = self._copies.setdefault(given, [given])
        number_of_copy = len(copies) + 1
        while (name := f"{given}#{number_of_copy}") in self._shown:
            number_of_copy += 1
        copies.append(name)
        self._stored[name] = given
        self._shown.add(name)
        return name

    def drop_steps(self, steps: Iterable[int]) -> None:
        """Leave out all rows of these steps; other rows get new numbers."""
        keep = ~np.isin(self.numbers["step"], list(steps))
        for coded in self.texts.values():
            coded.codes = coded.codes[keep]
        self.numbers = {name: values[keep] for name, values in self.numbers.items()}
        self.count = int(keep.sum())
        ids = self.texts["id"]
        kept = [ids.values[code] for code in ids.codes]
        self.row_of = {name: row for row, name in enumerate(kept)}
        self._shown = set(kept)
        self._stored = {shown: stored for shown, stored in self._stored.items() if shown in self._shown}
        self._copies = {}
        for shown, stored in self._stored.items():
            self._copies.setdefault(stored, [stored]).append(shown)
        self.cache.clear()

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Take in an event of the journal: rollbacks, scores, overrides, bookmarks."""
        self.timeline.add(event)
        kind, name = event.get("kind"), text(short_id(event.get("trajectory")))
        if kind == "judged":
            for one, told in mapping(event.get("scores")).items():
                self._add_score(text(short_id(one)), mapping(told))
        if kind in ("override", "bookmark"):
            kept = self.overrides if kind == "override" else self.bookmarks
            kept.pop(name, None)
            if event.get("value") is not None:
                kept[name] = event
        if kind in ("judged", "override", "bookmark", "rolled_back", "reused", "replaced"):
            self.cache.clear()

    def _add_score(self, name: str, told: Mapping[str, Any]) -> None:
        values = {"reward": told.get("reward")}
        values |= {_key(str(metric)): value for metric, value in mapping(told.get("metrics")).items()}
        self.judged[name] = {k: np.nan if (v := number(value)) is None else v for k, value in values.items()}
        for key in values.keys() - self.numbers.keys():
            self._add_column(key)

    # ---- columns --------------------------------------------------------------------------------

    def columns(self) -> list[dict[str, str]]:
        """What the table shows, in order: key, title, kind and group."""
        shown = dict(COLUMNS)
        for key in self.measured:
            group, _, name = key.partition("/")
            shown[key] = (name if group == "metric" else key, "number", group)
        return [
            {"key": key, "title": text(title), "kind": kind, "group": group}
            for key, (title, kind, group) in shown.items()
        ]

    def kind(self, key: str) -> str | None:
        """``number``, ``text`` or ``flag``; None for no column."""
        return COLUMNS[key][1] if key in COLUMNS else "number" if key in self.numbers else None

    def numeric(self, key: str) -> Floats:
        """A number for every row, NaN where there is none; flags are 1 and 0."""
        if key == "reward":
            return self._once("rewards", self._rewards)
        if key == "override":
            return self._once("override", lambda: self._of_people(self.overrides))
        if key == "advantage":
            return self._once("advantage", self._advantages)
        if key == "bookmark":
            return self._once("bookmark", lambda: self._marked().astype(np.float64))
        if key == "rolled_back":
            return self.rolled_back().astype(np.float64)
        return self._once(("scored", key), lambda: self._scored(key))

    def coded(self, key: str) -> Coded:
        """A column of texts."""
        if key == "status":
            return self._once("status", self._statuses)
        return self._once("note", self._notes) if key == "note" else self.texts[key]

    def rolled_back(self) -> Mask:
        """True for rows that a rollback or a restart undid."""
        return self._once("rolled back", self._rolled_back)

    def groups(self) -> tuple[list[str], Rows]:
        """Keys of all groups, and the place of each row's group among them."""
        return self._once("groups", self._groups)

    def stored_id(self, row: int) -> str:
        """The id as it stands in the trajectories file (shortened, if it is very long)."""
        shown = self.id_of(row)
        return self._stored.get(shown, shown)

    def id_of(self, row: int) -> str:
        """The id that is shown."""
        ids = self.texts["id"]
        return ids.values[ids.codes[row]]

    def value(self, key: str, row: int) -> Any:
        """One cell as a JSON value."""
        kind = self.kind(key)
        if kind == "text":
            coded = self.coded(key)
            return text(coded.values[coded.codes[row]]) or None
        found = number(self.numeric(key)[row])
        if kind == "flag":
            return bool(found)
        return int(found) if found is not None and float(found).is_integer() else found

    def ranks(self, key: str, *, descending: bool) -> Floats:
        """Numbers that sort rows by this column, missing values last."""
        if self.kind(key) == "text":
            ranks = self._once(("ranks", key), lambda: self.coded(key).ranks())
        else:
            ranks = self.numeric(key)
        return -ranks if descending else ranks

    def order(self, rows: Rows, sort: Sequence[tuple[str, bool]]) -> Rows:
        """Rows sorted by (key, descending) pairs, the first one decides first; then as they were written."""
        keys = [self.ranks(key, descending=down)[rows] for key, down in reversed(sort)]
        return rows[np.lexsort([self.numbers["offset"][rows], self.numbers["step"][rows], *keys])]

    # ---- worked out -----------------------------------------------------------------------------

    def _once(self, name: Any, make: Any) -> Any:
        if name not in self.cache:
            self.cache[name] = make()
        return self.cache[name]

    def rows_of_stored(self, name: str) -> list[int]:
        """Rows of the trajectory with this stored id: more than one when it was written more than once."""
        name = text(name)
        shown = self._copies.get(name, [name])
        return [
            self.row_of[one] for one in shown if one in self.row_of and self._stored.get(one, one) == name
        ]

    def _of_people(self, events: Mapping[str, Mapping[str, Any]]) -> Floats:
        values = np.full(self.count, np.nan)
        for name, event in events.items():
            value = number(event.get("value"))
            values[self.rows_of_stored(name)] = np.nan if value is None else value
        return values

    def _rewards(self) -> Floats:
        override = self.numeric("override")
        return np.where(np.isnan(override), self.recorded_rewards(), override)

    def recorded_rewards(self) -> Floats:
        """Rewards without a person's overrides."""
        return self._once("recorded rewards", lambda: self._scored("reward"))

    def _scored(self, key: str) -> Floats:
        """A column with what a judge wrote later."""
        if not self.judged:
            return self.numbers[key]
        values = self.numbers[key].copy()
        for name, told in self.judged.items():
            if key in told:
                values[self.rows_of_stored(name)] = told[key]
        return values

    def _advantages(self) -> Floats:
        values = np.full(self.count, np.nan)
        for name, value in self.advantages.items():
            values[self.rows_of_stored(name)] = value
        values[self.rolled_back()] = np.nan
        return values

    def _marked(self) -> Mask:
        marked = np.zeros(self.count, bool)
        for name in self.bookmarks:
            marked[self.rows_of_stored(name)] = True
        return marked

    def _notes(self) -> Coded:
        notes = {r: str(e.get("value")) for n, e in self.bookmarks.items() for r in self.rows_of_stored(n)}
        reasons = {
            r: str(e.get("reason") or "") for n, e in self.overrides.items() for r in self.rows_of_stored(n)
        }
        coded = Coded()
        coded.extend([""])
        codes = np.zeros(self.count, np.intp)
        for row in notes.keys() | reasons.keys():
            words = "; ".join(filter(None, [notes.get(row), reasons.get(row)]))[:200]
            codes[row] = coded.places.setdefault(words, len(coded.places))
        coded.values, coded.codes = list(coded.places), codes
        return coded

    def _statuses(self) -> Coded:
        errors = self.texts["error"]
        is_failed = errors.codes != errors.places.get("", -1)
        codes = np.where(np.isfinite(self.numeric("reward")), 0, 1)
        codes[is_failed] = 2
        codes[self.rolled_back()] = 3
        return Coded(list(STATUSES), {name: i for i, name in enumerate(STATUSES)}, codes.astype(np.intp))

    def _rolled_back(self) -> Mask:
        session = self.numbers["session"].copy()
        for name, later in self.timeline.reused.items():
            for row in self.rows_of_stored(name):
                session[row] = max(session[row], later)
        step, split = self.numbers["step"], self.texts["split"]
        last = step - (split.codes != split.places.get("train", -1))  # an evaluation is of the policy before
        undone = np.zeros(self.count, bool)
        for later, to in self.timeline.rollbacks:
            undone |= (session < later) & (last >= to)
        for name in self.timeline.replaced:
            undone[self.rows_of_stored(name)] = True
        return undone

    def _groups(self) -> tuple[list[str], Rows]:
        code = np.zeros(self.count, np.int64)
        _, steps = np.unique(self.numbers["step"], return_inverse=True)
        parts = [self.texts[name].codes for name in ("gather", "scenario", "seat")]
        for codes in (steps, *parts):
            code = code * (int(codes.max(initial=0)) + 1) + codes
            if len(code) and int(code.max()) > 2**40:  # keep the product of all sizes in 64 bits
                _, code = np.unique(code, return_inverse=True)
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        return [self._group_key(int(row)) for row in first], inverse.astype(np.intp)

    def _group_key(self, row: int) -> str:
        names = [self.texts[n].values[self.texts[n].codes[row]] for n in ("gather", "scenario", "seat")]
        return f"{self.numbers['step'][row]:.0f}/{'/'.join(names)}".rstrip("/")


def _key(name: str) -> str:
    return text(name if name.startswith("reward/") else f"metric/{name}")


def _as_floats(values: Sequence[Any]) -> Floats:
    try:
        return np.array(values, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):  # a row that the disk spoilt
        return np.array(
            [value if isinstance(value, (int, float)) else np.nan for value in values], np.float64
        )


def _as_texts(values: Sequence[Any]) -> Sequence[str]:
    return values if set(map(type, values)) == {str} else [str(value) for value in values]
