"""What can be asked about stored trajectories? One object that answers with plain JSON values.

Groups in memory and a run's folder answer alike. Of a run only the index is held (store/index.py); a
trajectory's text and tokens are read from disk, by offset, when somebody opens it.

Answers hold dicts, lists, strings, finite floats, ints, bools and None: a value that JSON cannot say is
None, lone surrogates are written as ‹U+D800›, long texts are cut and say by how much. Nothing is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from artnb.browser import actions, filters
from artnb.browser.compare import (
    common_entries,
    common_tokens,
    first_divergence,
    group_extremes,
    outcomes,
    scenario_history,
)
from artnb.browser.detail import LONGEST_ALL, LONGEST_TEXT, detail, histories
from artnb.browser.listing import FORGOTTEN, Listing, whole_numbers
from artnb.browser.plain import Cutter, mapping, number, text
from artnb.browser.rows import Table
from artnb.browser.shelves import MemoryShelf, RunShelf, Shelf
from artnb.browser.step_records import StepRecords
from artnb.browser.texts import TokenTexts
from artnb.browser.tokens import MOST_TOKENS, token_view
from artnb.browser.views import rendering
from artnb.errors import ConfigurationError
from artnb.store.folder import RunFolder
from artnb.store.index import short_id
from artnb.store.run import Run
from artnb.store.scores import BEFORE_OVERRIDE
from artnb.types import Trajectory, TrajectoryGroup

_MOST_RELATED, _MOST_COMPARED = 256, 4


def source_of(
    what: Any, *, model: Any = None, environment: Any = None, root: str | Path | None = None
) -> Source:
    """The source of a run (Run, RunFolder, its name or path), of groups, trajectories or a Model.

    ``model`` lends its tokenizer for texts of tokens, and is what ``replay`` samples from. ``environment``
    draws trajectories; None takes the installed one that their scenarios name. ``root`` is where a run of
    this name lies. Opening reads the index that is there and, for at most 0.2 s, what it lacks; ``refresh``
    goes on. Raises ConfigurationError when ``what`` is none of these or there is no such run.
    """
    if hasattr(what, "run") and hasattr(what, "backend"):
        what, model = what.run, model or what
    shelf: Shelf
    if isinstance(what, (str, Path)):
        path = Path(what).expanduser()
        has_run = (path / "run.json").is_file()
        what = RunFolder(path.resolve()) if has_run else Run.read(str(what), root)
    if isinstance(what, RunFolder):
        shelf = RunShelf(what)
    else:
        shelf = MemoryShelf(_groups(what))
    source = Source(shelf, model=model, environment=environment)
    source.refresh()
    return source


def _groups(what: Any) -> Sequence[TrajectoryGroup]:
    if isinstance(what, Trajectory):
        what = [what]
    if isinstance(what, TrajectoryGroup):
        return [what]
    listed = what if isinstance(what, list) else list(what) if isinstance(what, tuple) else None
    if listed is not None and all(isinstance(one, TrajectoryGroup) for one in listed):
        return listed
    if listed is not None and all(isinstance(one, Trajectory) for one in listed):
        groups: dict[tuple[str, str], TrajectoryGroup] = {}
        for one in listed:
            place = one.scenario_id, one.seat
            groups.setdefault(place, TrajectoryGroup([], *place)).trajectories.append(one)
        return list(groups.values())
    raise ConfigurationError(
        f"cannot browse {type(what).__name__}: give a run, its name or path, what gather returned, or a list "
        "of groups or trajectories"
    )


class Source(Listing):
    """Trajectories to be browsed. Any thread may ask; answers come one at a time."""

    def __init__(self, shelf: Shelf, *, model: Any = None, environment: Any = None) -> None:
        run = shelf.run or getattr(model, "run", None)
        super().__init__(shelf, StepRecords(None if run is None else run.path))
        self.model = model
        """Whose tokenizer and policy are used, or None."""
        self.environment = environment
        self._texts = TokenTexts(run, model)

    def facts(self) -> dict[str, Any]:
        """What the table is about::

            {"name": str, "kind": "run" | "memory", "count": int, "groups": int,
             "steps": [int], "splits": [str], "versions": [int],
             "columns": [{"key", "title", "kind": "number" | "text" | "flag",
                          "group": "what" | "reward" | "metric" | "policy" | "person"}],
             "is_growing": bool, "indexing": None | float (share done), "problems": [str],
             "can_write": bool   # override and bookmark are kept in the run's journal; else in memory
             "can_replay": bool, "has_texts": bool (a tokenizer is there), "help": str (the filter grammar)}

        Column keys: step, split, scenario, seat, id, status, reward, override, ``reward/<part>``,
        ``metric/<name>``, turns, tokens, seconds, tools, error, version, version_min, advantage,
        bookmark, note, rolled_back, gather, attempt, parent, histories.
        """
        with self._lock:
            table = self.table
            return {
                "name": text(self.shelf.name),
                "kind": self.shelf.kind,
                "count": table.count,
                "groups": len(table.groups()[0]),
                "steps": whole_numbers(table.numbers["step"]),
                "splits": sorted({text(table.texts["split"].values[c]) for c in _codes(table, "split")}),
                "versions": whole_numbers(table.numbers["version"]),
                "columns": table.columns(),
                "is_growing": self.shelf.is_growing,
                "indexing": self.shelf.share,
                "problems": [text(one) for one in self.shelf.problems],
                "can_write": self.shelf.can_write,
                "can_replay": self.model is not None,
                "has_texts": self._texts.is_likely,
                "help": (filters.__doc__ or "").partition("\n\n")[2],
            }

    # ---- one trajectory -------------------------------------------------------------------------

    def trajectory(self, id: str) -> dict[str, Any]:
        """Everything about one trajectory (detail.py)::

            {"id", "facts": {column key: value}, "group": key, "reward": float | None, "reward_text": str,
             "override": {"reward", "was", "reason", "time"} | None, "bookmark": {"note", "time"} | None,
             "rolled_back": bool, "skipped": why its group taught nothing | None,
             "parts": {name: float}, "metrics": {name: float | str},
             "judge": {"explanation", "raw", "score", ...} | None,
             "error": {"type", "message", "traceback"} | None, "logs": [str],
             "timings": {"started": Unix s, "seconds", "queued", "sampling", "elsewhere"},
             "metadata": pretty JSON text, "tools": [{"name", "description", "parameters": pretty JSON}],
             "parent": {"id", "known": bool} | None, "children": [{"id", "scenario", "seat", "reward"}],
             "siblings": [{"id", "reward", "status", "is_self"}],
             "histories": [{"title", "kind": "main" | "additional", "turns": n, "entries": [entry],
                            "hidden": n entries left out}],
             "rendered": escaped HTML of the environment's own rendering | None, "render_error": str | None,
             "cut": characters left out of all texts together}

        entry::

            {"index", "role", "name", "text", "reasoning", "calls": [call], "result_of": call id | None,
             "images": [{"kind": "data" | "url" | "audio", "source": str, "mime", "bytes": n, "shown": bool}],
             "unparsed": why a tool call in the text could not be read | None,
             "sampled": bool, "turn": k | None, "tokens", "mean_logprob", "version", "finish_reason",
             "seconds", "queued", "credit", "sampling": {}, "cut": characters left out}

        call: ``{"id", "name", "arguments": pretty JSON, "raw": text, "parsed": bool, "error": words | None,
        "result": index of the entry that answers it | None}``. An image's ``source`` is a data: URL only for
        PNG, JPEG, GIF and WebP of at most 2 MB; URLs are text, never to be loaded by themselves.
        ``turn`` counts over all histories, as ``Trajectory.turns`` does.

        Unknown id: ``{"missing": words}``.
        """
        with self._lock:
            try:
                row, record = self._open(id)
            except (OSError, LookupError) as error:
                return {"missing": text(str(error))}
            return {
                "id": self.table.id_of(row),
                **detail(record),
                **self._surroundings(row, record),
                **rendering(record, self.environment),
            }

    def _surroundings(self, row: int, record: Mapping[str, Any]) -> dict[str, Any]:
        """What the table and the journal say of a trajectory."""
        table, stored = self.table, self.table.stored_id(row)
        self._add_advantages([int(table.numbers["step"][row])], 0.0)
        keys, places = table.groups()
        siblings = np.flatnonzero(places == places[row])[:_MOST_RELATED].tolist()
        parent = table.value("parent", row)
        return {
            "facts": {column["key"]: table.value(column["key"], row) for column in table.columns()},
            "group": text(keys[places[row]]),
            "override": self._override_of(stored, record),
            "bookmark": self._bookmark_of(stored),
            "rolled_back": bool(table.rolled_back()[row]),
            "skipped": self._why_skipped(row),
            "parent": None if parent is None else {"id": parent, "known": parent in table.row_of},
            "children": [self._brief(one) for one in self._children(stored)],
            "siblings": [{**self._brief(one), "is_self": one == row} for one in siblings],
        }

    def _override_of(self, stored: str, record: Mapping[str, Any]) -> dict[str, Any] | None:
        event = self.table.overrides.get(stored)
        if event is None:
            return None
        metadata = mapping(mapping(record.get("trajectory")).get("metadata"))
        return {
            "reward": number(event.get("value")),
            "was": number(metadata.get(BEFORE_OVERRIDE)),
            "reason": text(event.get("reason")),
            "time": number(event.get("time")),
        }

    def _bookmark_of(self, stored: str) -> dict[str, Any] | None:
        event = self.table.bookmarks.get(stored)
        return None if event is None else {"note": text(event["value"]), "time": number(event.get("time"))}

    def _children(self, stored: str) -> list[int]:
        parents = self.table.texts["parent"]
        if stored not in parents.places:
            return []
        return np.flatnonzero(parents.codes == parents.places[stored])[:_MOST_RELATED].tolist()

    def _brief(self, row: int) -> dict[str, Any]:
        told = {key: self.table.value(key, row) for key in ("scenario", "seat", "reward", "status")}
        return {"id": self.table.id_of(row), **told}

    def _row(self, id: str) -> int:
        row = self.table.row_of.get(str(id), self.table.row_of.get(text(short_id(id))))
        if row is None:
            raise LookupError(f"there is no trajectory {text(id)[:100]!r} here")
        return row

    def _open(self, id: str) -> tuple[int, dict[str, Any]]:
        """A trajectory's row and its record, with the scores of now. Raises OSError, LookupError."""
        row = self._row(id)
        event = self.table.overrides.get(self.table.stored_id(row))
        value = None if event is None else number(event.get("value"))
        return row, actions.rescored(self.shelf.record(row), self.shelf.judge_of(row), value)

    def tokens(self, id: str, history: int = 0, start: int = 0, count: int = MOST_TOKENS) -> dict[str, Any]:
        """The exact tokens of one history (tokens.py), rows one after another where it splits::

            {"id", "history", "start", "total": n, "hidden": n left out, "rows": [first token of each row],
             "ids": [int], "texts": [str] | None, "sampled": [0/1], "turn": [k | -1],
             "values": {"logprob", "trainer_logprob", "ratio", "advantage", "entropy", "weight":
                        [float | None]},
             "ranges": {name: [low, high]},  # 2 % and 98 % quantiles of what is there
             "missing": {name or "text": why it is not there}}

        Every list has one entry a token, from ``start`` on, at most ``count`` (20,000). A value's list is
        absent from ``values`` when ``missing`` says why.
        """
        tokenizer, why_no_texts = self._texts.tokenizer()
        with self._lock:
            try:
                row, record = self._open(id)
                trajectory = mapping(record.get("trajectory"))
                found, why = self._recorded(row, str(trajectory.get("id")))
                shown = token_view(trajectory, history, start, count, found, why, tokenizer, why_no_texts)
            except (OSError, LookupError) as error:
                return {"missing": text(str(error))}
            return {"id": self.table.id_of(row), **shown}

    def _recorded(self, row: int, stored: str) -> tuple[Any, str]:
        """What training recorded of this trajectory's tokens, or None and why there is nothing."""
        split = self.table.value("split", row)
        if split != "train":
            return None, f"rollouts of split {split} are not trained on"
        found, why = self._records.of(int(self.table.numbers["step"][row]), stored)
        skipped = None if found is not None else self._why_skipped(row)
        return found, f"{why}: {skipped}" if skipped else why

    # ---- several --------------------------------------------------------------------------------

    def compare(self, ids: Sequence[str]) -> dict[str, Any]:
        """Two to four trajectories side by side, main histories::

        {"columns": [{"id", "facts", "reward", "error", "entries": [entry]}],
         "common_prefix_entries": n,
             "first_divergence": [{"entry": n | None, "at": character, "in": part of the entry}],
         "common_prefix_tokens": n,      # exact tokens that all share from the start
         "outcome": [{"column", "values": [..]}]}   # columns in which they differ
        """
        if not 2 <= len(ids) <= _MOST_COMPARED:
            raise ConfigurationError(f"two to {_MOST_COMPARED} trajectories are compared, got {len(ids)}")
        with self._lock:
            try:
                opened = [self._open(one) for one in ids]
            except (OSError, LookupError) as error:
                return {"missing": text(str(error))}
            cuts = [Cutter(LONGEST_TEXT // 2, LONGEST_ALL // len(ids)) for _ in ids]
            bodies = [mapping(record.get("trajectory")) for _, record in opened]
            entries = [histories(t, cut)[0]["entries"] for t, cut in zip(bodies, cuts, strict=True)]
            columns = [
                {
                    "id": self.table.id_of(row),
                    "facts": {c["key"]: self.table.value(c["key"], row) for c in self.table.columns()},
                    "reward": self.table.value("reward", row),
                    "error": self.table.value("error", row),
                    "entries": own,
                    "cut": cut.cut,
                }
                for (row, _), own, cut in zip(opened, entries, cuts, strict=True)
            ]
            return {
                "columns": columns,
                "common_prefix_entries": common_entries(entries),
                "first_divergence": first_divergence(entries),
                "common_prefix_tokens": common_tokens(bodies),
                "outcome": outcomes(self.table, [row for row, _ in opened]),
            }

    def same_scenario(self, id: str) -> dict[str, Any]:
        """Attempts at the same scenario, seat and split that count, over the steps::

            {"scenario", "first": id, "last": id, "steps": [{"step", "count", "mean": float | None, "ids"}]}

        ``first`` and ``last`` are of the earliest and the latest step: the nearest to its mean reward.
        """
        with self._lock:
            try:
                return scenario_history(self.table, self._row(id))
            except LookupError as error:
                return {"missing": text(str(error))}

    def extremes(self, step: int | None = None) -> list[dict[str, Any]]:
        """Groups of a step (None: the latest), the lowest mean reward first::

        [{"group", "scenario", "seat", "split", "count", "scored": n, "mean", "best": id, "worst": id,
          "skipped": why a training group taught nothing | None}]
        """
        with self._lock:
            kept, steps = ~self.table.rolled_back(), self.table.numbers["step"]
            if not kept.any():
                return []
            wanted = steps[kept].max() if step is None else int(step)
            found = group_extremes(self.table, np.flatnonzero(kept & (steps == wanted)))
            reasons = [self.shelf.skipped(one.pop("rows")) for one in found]
            return [{**one, "skipped": why} for one, why in zip(found, reasons, strict=True)]

    # ---- actions --------------------------------------------------------------------------------

    def as_messages(self, id: str, history: int = 0) -> str:
        """OpenAI chat messages as pretty JSON text, whole (not cut)."""
        return actions.messages_text(self._body(id), history)

    def as_json(self, id: str) -> str:
        """The stored trajectory as one line of strict JSON, whole."""
        return actions.json_line(self._body(id))

    def as_curl(self, id: str, turn: int = -1, address: str = "http://127.0.0.1:8000/v1") -> str:
        """A shell command that asks a server for the same; the key is what ``$OPENAI_API_KEY`` holds."""
        return actions.curl_text(self._body(id), turn, address, getattr(self.model, "name", "default"))

    def _body(self, id: str) -> Mapping[str, Any]:
        with self._lock:
            try:
                return mapping(self._open(id)[1].get("trajectory"))
            except LookupError as error:
                raise ConfigurationError(str(error)) from error

    def export(self, what: str | Sequence[str], kind: str, path: str | Path) -> dict[str, Any]:
        """Write what a query found (its id), or some trajectories (ids), to a file.

        Returns ``{"path", "kind", "count", "left_out": {reason: n}}``. kind: ``jsonl`` (the lines of the run,
        with the scores of now), ``parquet`` (columns of ``trajectories_frame`` and the lossless JSON),
        ``sft`` (``{"messages", "tools"}`` a line, what ``sft_step`` takes; failed ones are left out). Raises
        ConfigurationError, MissingDependency (parquet), OSError.
        """
        with self._lock:
            if isinstance(what, str):
                found = self._current(what)
                if found is None:
                    raise ConfigurationError(FORGOTTEN["error"])
                ids = [self.table.id_of(row) for row in found.rows.tolist()]
            else:
                ids = [str(one) for one in what]
        lost: list[str] = []
        told = actions.export(self._records_of(ids, lost), kind, Path(path))
        if lost:
            told["left_out"]["no longer there"] = len(lost)
        return told

    def _records_of(self, ids: Iterable[str], lost: list[str]) -> Iterator[dict[str, Any]]:
        for one in ids:
            try:
                with self._lock:  # others are answered between two trajectories
                    record = self._open(one)[1]
            except (OSError, LookupError):
                lost.append(one)
                continue
            yield record

    def override(self, id: str, reward: float | None, why: str) -> dict[str, Any]:
        """A person's score, with a reason; None takes it back: ``{"id", "override", "kept"}``.

        An event of the run's journal (``kept`` is "run"), unless another process writes the run or the folder
        is read-only: then it is kept in memory only ("memory"), and ``facts()["problems"]`` says why. In
        groups the trajectory's ``reward`` changes; the old one is in
        ``metadata["reward_before_override"]``. Raises ConfigurationError.
        """
        value = None if reward is None else number(reward)
        if reward is not None and value is None:
            raise ConfigurationError(f"a reward is a finite number, got {reward!r}")
        if not str(why or "").strip():
            raise ConfigurationError("say why: the reason is kept with the score")
        return self._keep(id, "override", value, str(why).strip())

    def bookmark(self, id: str, note: str | None = "") -> dict[str, Any]:
        """Mark a trajectory, with a note; None removes the mark: ``{"id", "bookmark", "kept"}``."""
        return self._keep(id, "bookmark", None if note is None else str(note), "")

    def _keep(self, id: str, kind: str, value: Any, reason: str) -> dict[str, Any]:
        with self._lock:
            try:
                row = self._row(id)
                kept = self.shelf.keep(row, kind, value, reason)
                row, record = self._open(id)
            except LookupError as error:
                raise ConfigurationError(str(error)) from error
            stored = self.table.stored_id(row)
            told = {"override": self._override_of(stored, record), "bookmark": self._bookmark_of(stored)}
            return {"id": self.table.id_of(row), "kept": kept, kind: told[kind]}

    async def replay(self, id: str, turn: int = -1, *, model: Any = None) -> dict[str, Any]:
        """Sample turn ``turn`` (of all histories, -1 the last) anew with the current policy.

        Recorded in the model's run under split ``replay``, so that it never trains, with the original as
        its parent: ``{"id": of the new one, "entries": [..]}``. Raises ConfigurationError, PromptTooLong.
        """
        chosen = model or self.model
        if chosen is None:
            raise ConfigurationError("a replay needs a model: browse(run, model=model)")
        with self._lock:
            try:
                record = self._open(id)[1]
            except LookupError as error:
                raise ConfigurationError(str(error)) from error
        new = await actions.replay(chosen, record, turn)
        shown = histories(new.to_json(), Cutter(LONGEST_TEXT, LONGEST_ALL))
        return {"id": new.id, "entries": shown[0]["entries"]}


def _codes(table: Table, name: str) -> list[int]:
    return np.unique(table.texts[name].codes).tolist()
