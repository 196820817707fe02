"""What does the dashboard show? A run's records as rows, points and words; plain values that JSON holds.

The view is a ``head`` of small facts and three tables, each keyed by a number or a name so that only
what changed has to be sent: ``steps`` (a training step's metrics), ``rollouts`` (what its rollouts say)
and ``checks`` (evaluations with their intervals). A look costs what is new, however long the run is.
"""

from __future__ import annotations

import bisect
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from artnb.dashboard.alarms import alarms
from artnb.dashboard.charts import charts
from artnb.dashboard.follow import Follower, News
from artnb.dashboard.protocol import thinned
from artnb.dashboard.rows import check_points, number, rollout_row, short, step_row
from artnb.store.controls import GROUP_SIZES, SETTINGS, Controls
from artnb.store.folder import reward_to_rank

Table = dict[str, dict[str, Any]]

MOST_BYTES = {"steps": 450_000, "rollouts": 250_000, "checks": 100_000}
"""Of each table's rows in one sending."""
_LATEST_EVENTS = 8
_REDRAW_SECONDS = 30.0
TOLD = (
    *("note", "control", "refused", "stopped", "rolled_back", "took_over", "warning", "opened"),
    *("alarm", "forked"),
)


class View:
    """A run as the dashboard sees it, kept up by ``look``."""

    def __init__(self, run: Any, baselines: Mapping[str, float] | None = None) -> None:
        self.run = run
        self.follower = Follower(run)
        self.head: dict[str, Any] = {}
        self.tables: dict[str, Table] = {"steps": {}, "rollouts": {}, "checks": {}}
        self.rows: list[dict[str, Any]] = []
        """Steps in order, the figures of their rollouts among their values."""
        self.lock = threading.RLock()
        """Held while a look changes the tables: hold it to read them from another thread."""
        self._given = dict(baselines or {})
        self._drawn = float("-inf")
        self._new: dict[str, set[str]] = {}
        self._is_shrunk = False
        self.names: dict[str, None] = {}
        """Metrics that some step has, in the order in which they came."""
        self._best: dict[str, Any] | None = None
        self._controls = Controls()
        self._told: deque[dict[str, Any]] = deque(maxlen=_LATEST_EVENTS)
        self._created: float | None = None
        self._written = 0.0
        self._result: tuple[int, dict[str, float]] = 0, {}
        self._checkpoints: list[int] = []

    def look(self) -> bool:
        """Read what is new in the run's folder; False when the view is as it was."""
        with self.lock:
            news = self.follower.look()
            is_due = time.monotonic() - self._drawn > _REDRAW_SECONDS  # silence is worth an alarm, too
            if news or is_due:
                self._take(news)
                self._drawn = time.monotonic()
            return bool(news) or is_due or news.is_partial

    def look_at_everything(self) -> None:
        """Read the run to its present end."""
        while self.look():
            pass

    def take_new(self) -> dict[str, Table] | None:
        """The rows that changed since the last call, by table; None when some are gone."""
        with self.lock:
            new, self._new = self._new, {}
            is_shrunk, self._is_shrunk = self._is_shrunk, False
            if is_shrunk:
                return None
            tables = {name: (self.tables[name], sorted(keys, key=_place)) for name, keys in new.items()}
            return _bounded(
                {n: {key: rows[key] for key in keys if key in rows} for n, (rows, keys) in tables.items()}
            )

    def outline(self) -> dict[str, Table]:
        """The tables for who knows nothing yet: of a long run not every step."""
        return _bounded(self.tables)

    def between(self, first: float, last: float) -> dict[str, Table]:
        """The rows of these steps, for who looks at them closely."""
        return _bounded(
            {
                name: {key: row for key, row in table.items() if first <= row["step"] <= last}
                for name, table in self.tables.items()
            },
            latest=0.0,
        )

    # ---- what is new ----------------------------------------------------------------------------

    def _take(self, news: News) -> None:
        for event in news.events:
            self._controls.add(event)
            self._created = self._created or event.get("time")
            self._written = max(self._written, event.get("time") or 0.0)
            if event.get("kind") in TOLD:
                self._told.append(event_words(event))
            if event.get("kind") == "rolled_back":
                news.rollouts |= self._go_back(int(event["to"]))
        changed = set()
        for record in news.metrics:
            if self.follower.timeline.counts(record, is_training=True):
                self._add_step(record)
                changed.add(record["step"])
        for step in sorted(news.rollouts):
            self._add_rollouts(step)
        for step in sorted(changed | news.rollouts):
            self._merge(step)
        if news.metrics or news.events:
            self._checkpoints = self.run.known_steps()
        self.head = self._head()

    def _add_step(self, record: Mapping[str, Any]) -> None:
        before = self.rows[-1]["values"].get("reward_best") if self.rows else None
        known = [r for r in (before, reward_to_rank(record)) if r is not None]
        row = step_row(record, max(known, default=-math.inf))
        self._put("steps", str(record["step"]), row)
        self._written = max(self._written, row["time"])
        self._best = _better(self._best, row)
        self._merge(record["step"])

    def _add_rollouts(self, step: int) -> None:
        briefs, checks = self.follower.rollouts(step), self.tables["checks"]
        trained = [one for one in briefs if one["split"] == "train"]
        if trained:
            self._put("rollouts", str(step), rollout_row(step, trained))
        for point in check_points(step, [one for one in briefs if one["split"] not in ("train", "chat")]):
            if checks.get(point["key"]) != point:
                self._put("checks", point["key"], point)

    def _put(self, table: str, key: str, row: dict[str, Any]) -> None:
        self.tables[table][key] = row
        self._new.setdefault(table, set()).add(key)

    def _merge(self, step: int) -> None:
        """Make the step's row of ``rows`` anew."""
        row = self.tables["steps"].get(str(step))
        if row is None:
            return
        about = self.tables["rollouts"].get(str(step), {}).get("values", {})
        merged = {**row, "values": {**about, **row["values"]}}
        self.names |= dict.fromkeys(merged["values"])
        place = bisect.bisect_left(self.rows, step, key=lambda one: one["step"])
        if place < len(self.rows) and self.rows[place]["step"] == step:
            self.rows[place] = merged
        else:
            self.rows.insert(place, merged)

    def _go_back(self, to: int) -> set[int]:
        """Drop what does not count any more; returns the steps whose rollouts are to be read again."""
        self._is_shrunk = True
        for name, table in self.tables.items():
            for key in [key for key, row in table.items() if row["step"] >= to + (name == "checks")]:
                del table[key]
        del self.rows[bisect.bisect_left(self.rows, to, key=lambda one: one["step"]) :]
        self._best = functools.reduce(_better, self.rows, None)
        return {step for step in self.follower.known_steps() if step >= to}

    # ---- the head -------------------------------------------------------------------------------

    def _head(self) -> dict[str, Any]:
        rows, status = self.rows, self.follower.status
        is_working = status == "running" and not self._controls.paused
        quiet = time.time() - self._written if is_working and self._written else None
        baselines = self._recorded_baselines() | self._given
        return {
            "name": self.run.name,
            "status": status,
            "created": self._created,
            "written": self._written or None,
            "steps": len(rows),
            "controls": {n: v for n, v in asdict(self._controls).items() if n != GROUP_SIZES},
            "settings": {name: setting.words for name, setting in SETTINGS.items()},
            "checkpoints": self._checkpoints,
            "best": self._best,
            "baselines": {short(n): number(v) for n, v in baselines.items()},
            "charts": charts(self.names),
            "alarms": [alarm.to_json() for alarm in alarms(rows, quiet_seconds=quiet)],
            "events": list(self._told)[::-1],
        }

    def _recorded_baselines(self) -> dict[str, float]:
        """Those in result.json, which is read when it has changed."""
        try:
            written = (self.run.path / "result.json").stat().st_mtime_ns
        except OSError:
            return {}
        if written != self._result[0]:
            recorded = ((self.run.result() or {}).get("evaluation") or {}).get("baselines") or {}
            found = {n: b["mean_reward"] for n, b in recorded.items() if b.get("mean_reward") is not None}
            self._result = written, found
        return self._result[1]


def _bounded(tables: Mapping[str, Table], **how: float) -> dict[str, Any]:
    return {name: thinned(rows, MOST_BYTES[name], **how) for name, rows in tables.items()}


def _better(best: dict[str, Any] | None, row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The step of the higher mean reward; of equal ones the later, whose checkpoint is kept longer."""
    reward = row["values"].get("reward_mean")
    if reward is None or (best is not None and best["reward"] > reward):
        return best
    return {"reward": reward, "step": row["step"]}


def _place(key: str) -> tuple[int, str]:
    return (int(key), "") if key.isdecimal() else (-1, key)


def event_words(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event of the journal as a sentence."""
    kind, control = event["kind"], event.get("control")
    words = {
        "note": f"Note: {event.get('text', '')}",
        "stopped": f"Stopped: {event.get('reason', '')}",
        "rolled_back": f"Went back from step {event.get('from')} to step {event.get('to')}",
        "refused": f"Could not go back to {event.get('value')}: {event.get('message', '')}",
        "took_over": "Another process took the run over",
        "warning": f"Warning: {event.get('message', '')}",
        "opened": f"Opened at step {event.get('step')}",
        "alarm": f"Alarm: {', '.join(map(str, event.get('alarms') or ()))}. {event.get('done') or ''}",
        "forked": f"Branched off run {event.get('run')} at step {event.get('step')}",
        "control": _control_words(control, event.get("value")),
    }[kind]
    return {"time": event.get("time"), "text": short(words)}


def _control_words(control: Any, value: Any) -> str:
    if control in SETTINGS:
        name = SETTINGS[control].words
        number_words = f"{value:g}" if isinstance(value, int | float) else str(value)
        return f"{name[0].upper()}{name[1:]}: {'the notebook’s own again' if value is None else number_words}"
    if control == "roll_back":
        return f"Asked to go back to {'the best step' if value == 'best' else f'step {value}'}"
    said = {"stop": "Stop asked for", "pause": "Paused", "resume": "Going on"}
    return said.get(control, str(control))
