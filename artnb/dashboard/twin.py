"""What stays when the kernel or the widgets are gone? The same view as plain HTML, and as text."""

from __future__ import annotations

from typing import Any

from artnb.dashboard.view import View
from artnb.ui.curve import curve_svg, sparkline
from artnb.ui.html import esc, table_html
from artnb.ui.snapshot import number_text

_MOST_ROWS = 15
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


def summary_text(view: View) -> str:
    """The run in a line."""
    head, rows = view.head, view.rows
    facts = [f"{head['name']}: {head['status']}", f"{len(rows)} steps"]
    rewards = [(row["step"], row["values"]["reward_mean"]) for row in rows if "reward_mean" in row["values"]]
    if rewards:
        facts.append(f"mean reward {number_text(rewards[-1][1])} at step {rewards[-1][0]}")
        facts.append(f"best {number_text(head['best']['reward'])} at step {head['best']['step']}")
        facts.append(sparkline([reward for _, reward in rewards[-40:]]))
    return ", ".join(facts)


def twin_html(view: View, note: str = "", *, is_folded: bool = False) -> str:
    """The view without scripts or style sheets; folded behind its summary beside a live one."""
    head, rows = view.head, view.rows
    summary = esc(summary_text(view))
    parts = [f"<div>{esc(note)}</div>"] if note else []
    parts += [
        f"<div>⚠ <b>{esc(a['kind'])}</b> (step {a['step']}): {esc(a['text'])}</div>" for a in head["alarms"]
    ]
    parts.append(_chart(view))
    if view.tables["checks"]:
        columns = {"step": "step", "mean reward": "mean", "95 % low": "low", "95 % high": "high", "n": "n"}
        checks = [{title: c[n] for title, n in columns.items()} for c in view.tables["checks"].values()]
        parts.append(f"<div>Evaluations</div>{table_html(checks[-_MOST_ROWS:])}")
    if rows:
        shown = [{"step": r["step"], **_row(r)} for r in rows[-_MOST_ROWS:]]
        kept = [name for name in ("step", *_COLUMNS) if any(row[name] is not None for row in shown)]
        parts.append(table_html(shown, kept))
    parts += [f"<div><small>{esc(event['text'])}</small></div>" for event in head["events"]]
    body = "".join(parts)
    if is_folded:
        return f"<details><summary><small>Static copy: {summary}</small></summary>{body}</details>"
    return f"<div><div><b>{summary}</b></div>{body}</div>"


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {title: row["values"].get(name) for title, name in _COLUMNS.items()}


def _chart(view: View) -> str:
    points = [(r["step"], r["values"]["reward_mean"]) for r in view.rows if "reward_mean" in r["values"]]
    series = [{"name": "mean reward", "points": points}] if points else []
    checks = [(c["step"], c["mean"]) for c in view.tables["checks"].values() if not c["is_base"]]
    if checks:
        series.append({"name": "evaluation", "points": checks})
    return curve_svg(series, view.head["baselines"]) if series else "<div>No finished step yet.</div>"
