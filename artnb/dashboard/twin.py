"""What stays when the kernel or the widgets are gone? The same views as plain HTML, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from artnb.dashboard.view import View
from artnb.ui.curve import curve_svg, sparkline
from artnb.ui.html import esc, table_html
from artnb.ui.snapshot import number_text

_MOST_ROWS = 15
_MOST_POINTS = 400
_COLUMNS = {
    "mean reward": "reward_mean",
    "lowest": "reward_min",
    "highest": "reward_max",
    "loss": "loss",
    "entropy": "entropy",
    "KL": "kl_k3",
    "|Δ logprob|": "logprob_gap_mean",
    "seconds": "seconds",
}
STATUS = {"running": "running", "idle": "no loop is running", "ended": "not open", "crashed": "crashed"}


def summary_text(view: View) -> str:
    """The run in a line."""
    head, rows = view.head, view.rows
    facts = [f"{head['name']}: {STATUS[head['status']]}", f"{len(rows)} steps"]
    rewards = [(row["step"], row["values"]["reward_mean"]) for row in rows if "reward_mean" in row["values"]]
    if rewards:
        facts.append(f"mean reward {number_text(rewards[-1][1])} at step {rewards[-1][0]}")
        facts.append(f"best {number_text(head['best']['reward'])} at step {head['best']['step']}")
        facts.append(sparkline([reward for _, reward in rewards[-40:]]))
    return ", ".join(facts)


def twin_html(
    views: Sequence[View], note: str = "", *, is_folded: bool = False, has_picture: bool = False
) -> str:
    """The views without scripts or style sheets; folded behind their summary beside a live one.

    has_picture: the curve stands beside it as an image.
    """
    summary = "; ".join(esc(summary_text(view)) for view in views)
    parts = [f"<div>{esc(note)}</div>"] if note else []
    if len(views) > 1:
        parts.append(table_html([_run_row(view) for view in views]))
    if not has_picture:
        parts.append(_chart(views))
    for view in views:
        parts += (
            [_view_html(view)] if len(views) == 1 else [_folded(esc(summary_text(view)), _view_html(view))]
        )
    body = "".join(parts)
    if is_folded:
        return _folded(f"<small>Static copy: {summary}</small>", body)
    return f"<div><div><b>{summary}</b></div>{body}</div>"


def _folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>{body}</details>"


def _view_html(view: View) -> str:
    head, rows = view.head, view.rows
    parts = [
        f"<div>⚠ <b>{esc(a['kind'])}</b> (step {a['step']}): {esc(a['text'])}</div>" for a in head["alarms"]
    ]
    if view.tables["checks"]:
        columns = {"step": "step", "mean reward": "mean", "95 % low": "low", "95 % high": "high", "n": "n"}
        checks = [{title: c[n] for title, n in columns.items()} for c in view.tables["checks"].values()]
        parts.append(f"<div>Evaluations</div>{table_html(checks[-_MOST_ROWS:])}")
    if rows:
        shown = [{"step": r["step"], **_row(r)} for r in rows[-_MOST_ROWS:]]
        kept = [name for name in ("step", *_COLUMNS) if any(row[name] is not None for row in shown)]
        parts.append(table_html(shown, kept))
    parts += [f"<div><small>{esc(event['text'])}</small></div>" for event in head["events"]]
    return "".join(parts)


def _run_row(view: View) -> dict[str, Any]:
    head, last = view.head, view.rows[-1]["values"] if view.rows else {}
    best, check = head["best"] or {}, next(reversed(view.tables["checks"].values()), {})
    return {
        "run": head["name"],
        "status": STATUS[head["status"]],
        "steps": len(view.rows),
        "mean reward": last.get("reward_mean"),
        "best": best.get("reward"),
        "at step": best.get("step"),
        "last evaluation": check.get("mean"),
        "curve": sparkline([r["values"].get("reward_mean", 0.0) for r in view.rows[-20:]]),
    }


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {title: row["values"].get(name) for title, name in _COLUMNS.items()}


def _chart(views: Sequence[View]) -> str:
    series: list[dict[str, Any]] = []
    levels: dict[str, float] = {}
    for view in views:
        points = [(r["step"], r["values"]["reward_mean"]) for r in view.rows if "reward_mean" in r["values"]]
        name = "mean reward" if len(views) == 1 else view.head["name"]
        series += [{"name": name, "points": thinned(points)}] if points else []
        checks = [(c["step"], c["mean"]) for c in view.tables["checks"].values() if not c["is_base"]]
        if checks and len(views) == 1:
            series.append({"name": "evaluation", "points": thinned(checks)})
        levels |= view.head["baselines"]
    return curve_svg(series, levels) if series else "<div>No finished step yet.</div>"


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most so many points as a small chart can show, the last one among them."""
    step = -(-len(points) // _MOST_POINTS)
    return list(points[:: -step or -1])[::-1] if points else []
