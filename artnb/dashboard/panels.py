"""Which curves of which runs stand in one drawing? Panels that plotly, matplotlib and SVG draw alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from artnb.dashboard.charts import charts
from artnb.dashboard.view import View
from artnb.errors import ConfigurationError

REWARD: dict[str, Any] = {
    "id": "reward",
    "title": "Mean reward",
    "series": [["reward_mean", "mean reward"], ["reward_best", "best so far"]],
}


@dataclass(frozen=True)
class Curve:
    """Points of one metric of one run; ``run`` and ``place`` choose colour and dashes."""

    label: str
    xs: list[int]
    ys: list[float]
    run: int = 0
    place: int = 0

    @property
    def mark(self) -> int:
        """The number of its colour and dashes: by metric in one run's chart, by run among several."""
        return self.place + self.run


@dataclass(frozen=True)
class Panel:
    """One pair of axes; ``bands`` are (steps, low, high) of the reward's spread within groups, by run."""

    title: str
    curves: list[Curve]
    bands: list[tuple[list[int], list[float], list[float], int]] = field(default_factory=list)
    levels: dict[str, float] = field(default_factory=dict)
    checks: list[tuple[dict[str, Any], int]] = field(default_factory=list)
    """Evaluations: ``step``, ``mean``, ``low``, ``high``, ``is_base``; and the number of the run."""
    is_stacked: bool = False
    is_compared: bool = False
    """Whether the curves are those of several runs."""


def panels(views: Sequence[View], wanted: Sequence[str] | None = None) -> list[Panel]:
    """The reward and what else is wanted: ids of charts or names of metrics, None for every chart.

    Several runs share panels of one metric each. Raises ConfigurationError for a name that no run has.
    """
    specs = [REWARD, *charts(name for view in views for name in view.names)]
    if wanted is not None:
        specs = [_find(name, specs, views) for name in wanted]
    if len(views) > 1:
        pairs = [(spec, *pair) for spec in specs for pair in spec["series"] if pair[0] != "reward_best"]
        specs = [_alone(*one) for one in pairs]
    return [panel for spec in specs if (panel := _panel(spec, views)).curves]


def _find(name: str, specs: Sequence[dict[str, Any]], views: Sequence[View]) -> dict[str, Any]:
    found = next((spec for spec in specs if spec["id"] == name), None)
    if found is not None:
        return found
    label = next((words for spec in specs for metric, words in spec["series"] if metric == name), None)
    known = dict.fromkeys(metric for view in views for metric in view.names)
    if label is None and name not in known:
        ids = ", ".join(spec["id"] for spec in specs)
        raise ConfigurationError(f"no chart or metric {name!r}; charts: {ids}; metrics: {', '.join(known)}")
    return {"id": name, "title": name, "series": [[name, label or name]]}


def _alone(spec: dict[str, Any], metric: str, words: str) -> dict[str, Any]:
    is_reward = metric == "reward_mean"
    is_whole = is_reward or len(spec["series"]) == 1
    title = spec["title"] if is_whole else f"{spec['title']}: {words}"
    return {"id": "reward" if is_reward else metric, "title": title, "series": [[metric, words]]}


def _panel(spec: dict[str, Any], views: Sequence[View]) -> Panel:
    curves = []
    for run, view in enumerate(views):
        for place, (metric, words) in enumerate(spec["series"]):
            xs, ys = _points(view, metric)
            if xs:
                curves.append(Curve(view.head["name"] if len(views) > 1 else words, xs, ys, run, place))
    if spec["id"] != "reward":
        is_stacked = spec["id"] == "time" and len(views) == 1
        return Panel(spec["title"], curves, is_stacked=is_stacked, is_compared=len(views) > 1)
    bands: list[tuple[list[int], list[float], list[float], int]] = []
    levels: dict[str, float] = {}
    for run, view in enumerate(views):
        levels |= {name: level for name, level in view.head["baselines"].items() if level is not None}
        (xs, low), (_, high) = (_points(view, name) for name in ("band_low", "band_high"))
        bands += [(xs, low, high, run)] if len(views) == 1 and xs else []
    checks = [(c, run) for run, view in enumerate(views) for c in view.tables["checks"].values()]
    return Panel(spec["title"], curves, bands, levels, checks, is_compared=len(views) > 1)


def _points(view: View, metric: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row["values"][metric]) for row in view.rows if metric in row["values"]]
    return [x for x, _ in points], [y for _, y in points]
