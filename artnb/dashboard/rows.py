"""What does one step say? Its metrics, its rollouts and its evaluations as rows that JSON holds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from artnb.evaluate import estimate

MOST_CELLS = 64
"""Groups of a step that the strip shows."""
_MOST_METRICS = 60
_LONGEST_TEXT, LONGEST_NAME = 500, 80
_ABOUT = frozenset(("step", "time", "policy_version", "session"))


def step_row(record: Mapping[str, Any], best: float = -math.inf) -> dict[str, Any]:
    """One line of a run's metrics; ``best`` is the highest mean reward up to it."""
    values = {
        short(name, LONGEST_NAME): found
        for name, value in record.items()
        if name not in _ABOUT and (found := number(value)) is not None
    }
    if math.isfinite(best):
        values["reward_best"] = rounded(best)
    for kind in ("failed", "unscored"):
        if values.get("trajectories") and kind in values:
            values[f"{kind}_share"] = rounded(values[kind] / values["trajectories"])
    spent = [values.get(f"seconds_{phase}", 0.0) for phase in ("train", "publish", "checkpoint")]
    if values.get("seconds", 0.0) > sum(spent):  # ``seconds`` are train_step's own: gather's are beside
        values["seconds_other"] = rounded(values["seconds"] - sum(spent))
    return {
        "step": record["step"],
        "kind": record.get("kind"),
        "time": float(record.get("time") or 0.0),
        "values": values,
        "skipped": short(record["skipped"]) if record.get("skipped") else None,
        "warnings": [short(warning) for warning in record.get("warnings") or []],
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
            short(n, LONGEST_NAME): known for n, v in values.items() if (known := number(v)) is not None
        },
        "cells": cells[:MOST_CELLS],
        "hidden": max(0, len(cells) - MOST_CELLS),
    }


def _measured(briefs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means of what rollouts and rewards wrote into ``trajectory.metrics``."""
    found: dict[str, list[float]] = {}
    for one in briefs:
        for name, value in one["metrics"].items():
            if (known := number(value)) is not None:
                key = name if name.startswith("reward/") else f"metric/{name}"
                found.setdefault(key, []).append(known)
    return {name: statistics.fmean(numbers) for name, numbers in list(found.items())[:_MOST_METRICS]}


def _rewards(briefs: Iterable[Mapping[str, Any]]) -> list[float]:
    return [r for b in briefs if not b["failed"] and (r := number(b["reward"])) is not None]


def _cell(
    scenario: Any, seat: Any, members: Sequence[Any], rewards: Sequence[float], highest: float
) -> dict[str, Any]:
    name = f"{scenario or 'scenario'}{f' ({seat})' if seat else ''}"
    told = {
        "name": short(name, LONGEST_NAME),
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
    return {**told, "mean": number(statistics.fmean(rewards)), "low": low, "high": high, "mark": mark}


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
        point = {name: number(getattr(found, name)) for name in ("mean", "low", "high")}
        is_base = any(one["version"] == -1 for one in members)
        about = {"key": f"{step}/{gather_id}", "step": step, "n": len(members), "is_base": is_base}
        points.append({**about, **point, "split": short(members[0]["split"])})
    return points


def short(text: Any, longest: int = _LONGEST_TEXT) -> str:
    kept = str(text)
    return kept if len(kept) <= longest else kept[:longest] + "…"


def number(value: Any) -> float | None:
    """A finite number of seven digits, None for everything else; true and false are 1 and 0."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return rounded(value)


def rounded(value: float) -> float:
    """Seven digits: a picture needs no more, and a message stays small."""
    return float(f"{value:.7g}")
