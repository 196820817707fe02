"""What does the dashboard show? A run's records as rows, points and words; plain values that JSON holds.

The view is a ``head`` of small facts and three tables, each keyed by a number or a name so that only
what changed has to be sent: ``steps`` (a training step's metrics), ``rollouts`` (what its rollouts say)
and ``checks`` (evaluations with their intervals).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from artnb.dashboard.alarms import alarms
from artnb.dashboard.charts import charts
from artnb.dashboard.follow import Follower
from artnb.evaluate import estimate
from artnb.store.controls import Controls
from artnb.ui.snapshot import reward_of

Table = dict[str, dict[str, Any]]

MOST_CELLS = 64
"""Groups of a step that the strip shows."""
_LATEST_EVENTS = 8
_MOST_METRICS = 60
_REDRAW_SECONDS = 30.0
_TOLD = ("note", "control", "stopped", "rolled_back", "took_over", "warning", "opened")
_LONGEST_TEXT, _LONGEST_NAME = 500, 80


class View:
    """A run as the dashboard sees it, kept up by ``look``."""

    def __init__(self, run: Any, baselines: Mapping[str, float] | None = None) -> None:
        self.run = run
        self.follower = Follower(run)
        self.head: dict[str, Any] = {}
        self.tables: dict[str, Table] = {"steps": {}, "rollouts": {}, "checks": {}}
        self._given = dict(baselines or {})
        self._drawn = float("-inf")
        self._known: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {}

    def look(self) -> bool:
        """Read what is new in the run's folder; True when the view has changed."""
        is_due = time.monotonic() - self._drawn > _REDRAW_SECONDS  # a run that fell silent changes nothing
        has_changed = self.follower.look() or is_due
        if has_changed:
            self._draw()
            self._drawn = time.monotonic()
        return has_changed

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Steps in order, the figures of their rollouts among their values."""
        rollouts = self.tables["rollouts"]
        return [
            {**row, "values": {**rollouts.get(key, {}).get("values", {}), **row["values"]}}
            for key, row in self.tables["steps"].items()
        ]

    def _draw(self) -> None:
        records, rollouts = self.follower.metrics(), self.follower.rollouts()
        steps, groups, checks = {}, {}, {}
        best = -math.inf
        for record in records:
            best = max(best, -math.inf if (reward := reward_of(record)) is None else reward)
            key = str(record["step"])
            steps[key] = self._once("steps", key, (id(record), best), lambda r=record, b=best: step_row(r, b))
        for step, briefs in rollouts.items():
            trained = [b for b in briefs if b["split"] == "train"]
            if trained:
                key, mark = str(step), (len(trained), trained[-1]["id"])
                groups[key] = self._once("rollouts", key, mark, lambda s=step, t=trained: rollout_row(s, t))
            for point in check_points(step, [b for b in briefs if b["split"] != "train"]):
                checks[point["key"]] = self._once("checks", point["key"], point["n"], lambda p=point: p)
        self.tables = {"steps": steps, "rollouts": groups, "checks": checks}
        self.head = self._head()

    def _once(self, table: str, key: str, mark: Any, make: Any) -> dict[str, Any]:
        """A row that is made again only when its ``mark`` changes: an equal row is the same object."""
        known = self._known.get((table, key))
        if known is None or known[0] != mark:
            known = self._known[table, key] = mark, make()
        return known[1]

    def _head(self) -> dict[str, Any]:
        rows, events = self.rows, self.follower.events
        result = self.run.result() or {}
        recorded = (result.get("evaluation") or {}).get("baselines") or {}
        baselines = {
            name: b["mean_reward"] for name, b in recorded.items() if b.get("mean_reward") is not None
        }
        written = max([e.get("time", 0.0) for e in events[-1:]] + [rows[-1]["time"] if rows else 0.0])
        status = self.follower.status
        controls = Controls.of(events)
        is_working = status == "running" and not controls.paused
        quiet = time.time() - written if is_working and written else None
        return {
            "name": self.run.name,
            "status": status,
            "created": events[0].get("time") if events else None,
            "written": written or None,
            "controls": asdict(controls),
            "best": _best(rows),
            "baselines": {_short(n): _number(v) for n, v in (baselines | self._given).items()},
            "charts": charts(rows),
            "alarms": [alarm.to_json() for alarm in alarms(rows, quiet_seconds=quiet)],
            "events": [event_words(e) for e in events if e.get("kind") in _TOLD][-_LATEST_EVENTS:][::-1],
        }


def _best(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    scored = [(row["values"]["reward_mean"], -row["step"]) for row in rows if "reward_mean" in row["values"]]
    return {"reward": max(scored)[0], "step": -max(scored)[1]} if scored else None


def step_row(record: Mapping[str, Any], best: float = -math.inf) -> dict[str, Any]:
    """One line of a run's metrics; ``best`` is the highest mean reward up to it."""
    numbers = {name: number for name, value in record.items() if (number := _number(value)) is not None}
    for name in ("step", "time", "policy_version", "session"):
        numbers.pop(name, None)
    if math.isfinite(best):
        numbers["reward_best"] = best
    if numbers.get("trajectories"):
        numbers["failed_share"] = numbers.get("failed", 0.0) / numbers["trajectories"]
    spent = [numbers.get(f"seconds_{phase}", 0.0) for phase in ("train", "publish", "checkpoint")]
    if numbers.get("seconds", 0.0) > sum(spent):  # ``seconds`` are train_step's own: gather's are beside
        numbers["seconds_other"] = numbers["seconds"] - sum(spent)
    return {
        "step": record["step"],
        "kind": record.get("kind"),
        "time": float(record.get("time") or 0.0),
        "values": {_short(name, _LONGEST_NAME): _number(value) for name, value in numbers.items()},
        "skipped": _short(record["skipped"]) if record.get("skipped") else None,
        "warnings": [_short(warning) for warning in record.get("warnings") or []],
    }


def rollout_row(step: int, briefs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a step's rollouts say: the spread within groups, lengths, parts of the reward, and the strip."""
    groups: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for one in briefs:
        groups.setdefault((one["scenario_id"], one["seat"]), []).append(one)
    rewards = {key: _rewards(members) for key, members in groups.items()}
    highest = max((r for own in rewards.values() for r in own), default=0.0)
    cells = [_cell(*key, groups[key], rewards[key], highest) for key in groups]
    cells.sort(key=lambda cell: -math.inf if cell["mean"] is None else cell["mean"])
    values = {f"rollout_{name}": statistics.fmean(b[name] for b in briefs) for name in ("turns", "tokens")}
    values |= _measured(briefs)
    scored = [own for own in rewards.values() if own]
    if scored:
        mean = statistics.fmean(r for own in scored for r in own)
        spread = statistics.fmean(statistics.pstdev(own) for own in scored)
        values |= {"band_low": mean - spread, "band_high": mean + spread}
        values["groups_equal"] = statistics.fmean(max(own) - min(own) < 1e-9 for own in scored)
        values["groups_solved"] = statistics.fmean(
            min(own) >= highest - 1e-9 and highest > 0 for own in scored
        )
    return {
        "step": step,
        "count": len(briefs),
        "values": {
            _short(n, _LONGEST_NAME): number for n, v in values.items() if (number := _number(v)) is not None
        },
        "cells": cells[:MOST_CELLS],
        "hidden": max(0, len(cells) - MOST_CELLS),
    }


def _measured(briefs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means of what rollouts and rewards wrote into ``trajectory.metrics``."""
    found: dict[str, list[float]] = {}
    for one in briefs:
        for name, value in one["metrics"].items():
            if (number := _number(value)) is not None:
                key = name if name.startswith("reward/") else f"metric/{name}"
                found.setdefault(key, []).append(number)
    return {name: statistics.fmean(numbers) for name, numbers in list(found.items())[:_MOST_METRICS]}


def _rewards(briefs: Iterable[Mapping[str, Any]]) -> list[float]:
    return [r for b in briefs if not b["failed"] and (r := _number(b["reward"])) is not None]


def _cell(
    scenario: Any, seat: Any, members: Sequence[Any], rewards: Sequence[float], highest: float
) -> dict[str, Any]:
    name = f"{scenario or 'scenario'}{f' ({seat})' if seat else ''}"
    told = {
        "name": _short(name, _LONGEST_NAME),
        "n": len(members),
        "failed": sum(m["failed"] for m in members),
    }
    if not rewards:
        return {**told, "mean": None, "low": None, "high": None, "mark": "unscored"}
    low, high = min(rewards), max(rewards)
    if high - low >= 1e-9:
        mark = "teaches"
    else:
        mark = "solved" if high > 0 and high >= highest - 1e-9 else "equal"
    return {**told, "mean": _number(statistics.fmean(rewards)), "low": low, "high": high, "mark": mark}


def check_points(step: int, briefs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Evaluations at this step, one for each gather: mean reward and its 95 % interval over scenarios.

    Those of another policy than the one after ``step`` steps (the base, a checkpoint) say so.
    """
    gathers: dict[str, list[Mapping[str, Any]]] = {}
    for one in briefs:
        gathers.setdefault(str(one["gather_id"]), []).append(one)
    points = []
    for gather_id, members in gathers.items():
        scenarios: dict[Any, list[float]] = {}
        for one in members:
            scenarios.setdefault(one["scenario_id"], []).extend(_rewards([one]))
        found = estimate([rewards for rewards in scenarios.values() if rewards])
        if found.mean is None:
            continue
        point = {name: _number(getattr(found, name)) for name in ("mean", "low", "high")}
        is_base = any(one["version"] == -1 for one in members)
        about = {"key": f"{step}/{gather_id}", "step": step, "n": len(members), "is_base": is_base}
        points.append({**about, **point, "split": _short(members[0]["split"])})
    return points


def event_words(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event of the journal as a sentence."""
    kind, control = event["kind"], event.get("control")
    words = {
        "note": f"Note: {event.get('text', '')}",
        "stopped": f"Stopped: {event.get('reason', '')}",
        "rolled_back": f"Went back from step {event.get('from')} to step {event.get('to')}",
        "took_over": "Another process took the run over",
        "warning": f"Warning: {event.get('message', '')}",
        "opened": f"Opened at step {event.get('step')}",
        "control": _control_words(control, event.get("value")),
    }[kind]
    return {"time": event.get("time"), "text": _short(words)}


def _control_words(control: Any, value: Any) -> str:
    if control == "learning_rate":
        return "Learning rate: the notebook's own again" if value is None else f"Learning rate: {value:g}"
    said = {"stop": "Stop asked for", "pause": "Paused", "resume": "Going on"}
    return said.get(control, str(control))


def _short(text: Any, longest: int = _LONGEST_TEXT) -> str:
    kept = str(text)
    return kept if len(kept) <= longest else kept[:longest] + "…"


def _number(value: Any) -> float | None:
    """A finite number of seven digits, None for everything else; true and false are 1 and 0."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.7g}")
