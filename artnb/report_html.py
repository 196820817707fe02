"""How does a run become one page that needs nothing else? ``report.html``, without scripts, under 1 MB.

Every text passes through ``esc``, a strict content policy stands in the page's head, and each section has
a budget of bytes: what does not fit is counted, and stands in the run's folder.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from artnb.report_view import RunPage, look
from artnb.store.journal import write_atomically
from artnb.types import Trajectory, Turn
from artnb.ui.curve import curve_svg, sparkline, thinned
from artnb.ui.html import esc, table_html, trajectory_html
from artnb.ui.intervals import interval_text, intervals_svg
from artnb.ui.snapshot import number_text, shorten

MOST_BYTES = 1_000_000
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_BUDGETS = {
    "alarms": 20_000,
    "evaluations": 70_000,
    "curves": 240_000,
    "steps": 90_000,
    "trajectories": 320_000,
    "environment": 60_000,
    "configuration": 60_000,
    "judge": 40_000,
    "events": 50_000,
}
"""Bytes of each section; their sum leaves room for the head and the style."""
_ONE_TRAJECTORY = 60_000
_MOST_POINTS, _MOST_STEPS, _MOST_EVENTS = 200, 100, 500
_LONGEST_CELL, _LONGEST_CARD = 300, 12_000
_STEP_COLUMNS = {
    "mean reward": "reward_mean",
    "± std": "reward_std",
    "lowest": "reward_min",
    "highest": "reward_max",
    "loss": "loss",
    "entropy": "entropy",
    "KL": "kl_k3",
    "|Δ logprob|": "logprob_gap_mean",
    "learning rate": "learning_rate",
    "gather s": "seconds_gather",
    "step s": "seconds",
}
_CUTS = ((200, 8000), (60, 2000), (20, 800), (8, 300), (4, 100))
"""(entries kept, characters of each): tried in turn until a trajectory fits."""


def write_report(run: Any, path: str | Path | None, environment: Any) -> Path:
    """Write the page of a run, say where it is, and return its path. See ``RunFolder.report``."""
    path = Path(path).expanduser() if path is not None else run.path / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page_html(look(run, environment)))
    print(path)
    return path


def page_html(page: RunPage) -> str:
    """The whole page. Pure: the same content gives the same text."""
    sections = {
        "Alarms": _within("alarms", map(_alarm, page.alarms)),
        "Evaluations": _evaluations(page),
        "Curves": _curves(page),
        "Steps": _steps(page),
        "Trajectories": _trajectories(page),
        "Environment": _environment(page),
        "Configuration": _configuration(page),
        "Judge": _judge(page),
        "Costs": _facts(page.costs) if page.costs else "",
        "Events": _latest("events", page.events[-_MOST_EVENTS:]),
        "Versions and machine": _machine(page),
    }
    shown = {title: body for title, body in sections.items() if body}
    links = " ".join(f'<a href="#{_anchor(title)}">{esc(title)}</a>' for title in shown)
    body = "".join(
        f'<section id="{_anchor(title)}"><h2>{esc(title)}</h2>{part}</section>'
        for title, part in shown.items()
    )
    style = (resources.files("artnb.ui") / "static" / "report.css").read_text(encoding="utf-8")
    name = esc(shorten(page.name))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{name} · artnb</title>'
        f"<style>{style}</style></head><body>{_header(page)}<nav>{links}</nav><main>{body}</main>"
        f"<footer><small>{esc(' '.join(page.notes))}</small></footer></body></html>\n"
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _header(page: RunPage) -> str:
    facts = "".join(
        f"<div><dt>{esc(name)}</dt><dd>{esc(_short(value))}</dd></div>" for name, value in page.facts.items()
    )
    return (
        f"<header><h1>{esc(page.name)}</h1><p>Training run, {esc(page.status)}</p><dl>{facts}</dl></header>"
    )


def _alarm(alarm: Mapping[str, Any]) -> str:
    return (
        f'<p class="alarm">⚠ <b>{esc(alarm["kind"])}</b> ({esc(alarm["level"])}, step {esc(alarm["step"])}): '
        f"{esc(_short(alarm['text'], 600))}</p>"
    )


# ---- pieces -------------------------------------------------------------------------------------


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _within(section: str, parts: Iterable[str], budget: int | None = None) -> str:
    """The parts that fit into the section's budget, and how many did not."""
    left, kept, dropped = _BUDGETS[section] if budget is None else budget, [], 0
    for part in parts:
        if (size := _size(part)) <= left:
            kept.append(part)
            left -= size
        else:
            dropped += 1
    if dropped:
        kept.append(f'<p class="soft">{dropped} more would not fit here; all of it is in the run folder.</p>')
    return "".join(kept)


def _latest(section: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of the latest rows that fit into the section's budget."""
    shown = rows
    while len(shown) > 1 and _size(_table(shown)) > _BUDGETS[section]:
        shown = shown[len(shown) // 2 :]
    earlier = len(rows) - len(shown)
    said = f'<p class="soft">{earlier} earlier ones would not fit here; the run folder has them.</p>'
    return (said if earlier else "") + _within(section, [_table(shown)] if shown else [])


def _short(value: Any, longest: int = _LONGEST_CELL) -> str:
    text = number_text(value) if isinstance(value, int | float) or value is None else str(value)
    return text if len(text) <= longest else text[:longest] + "…"


def _facts(facts: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row" style="text-align:left">{esc(_short(name))}</th>'
        f"<td>{esc(_short(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f'<div class="wide"><table><tbody>{rows}</tbody></table></div>'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    cut = [{k: _short(v) if isinstance(v, str) else v for k, v in row.items()} for row in rows]
    return f'<div class="wide">{table_html(cut)}</div>' if cut else ""


# ---- sections -----------------------------------------------------------------------------------


def _evaluations(page: RunPage) -> str:
    parts = []
    if page.evaluations:
        rows = [_evaluation_row(one) for one in page.evaluations]
        drawn = intervals_svg(page.evaluations)
        parts += [_figure("Mean reward with its 95 % interval", drawn) if drawn else "", _table(rows)]
    if page.checks:
        rows = [
            {
                "step": check["step"],
                "policy": "base" if check["is_base"] else f"after {check['step']} steps",
                "split": check["split"],
                "mean reward (95 % interval)": interval_text(check),
                "n": check["n"],
            }
            for check in page.checks[-_MOST_STEPS:]
        ]
        parts += ["<h3>Every evaluation that this run gathered</h3>", _table(rows)]
    if not parts:
        return ""
    return _within("evaluations", parts)


def _evaluation_row(one: Mapping[str, Any]) -> dict[str, Any]:
    metrics = {name: value for name, value in one.items() if name not in ("name", "mean", "low", "high", "n")}
    about = {"evaluation": str(one["name"]), "mean reward (95 % interval)": interval_text(one), "n": one["n"]}
    return {**about, **dict(list(metrics.items())[:12])}


def _curves(page: RunPage) -> str:
    rewards = _points(page.rows, "reward_mean")
    parts = []
    if rewards:
        series = [{"name": "mean reward", "points": rewards}]
        largest: dict[int, Mapping[str, Any]] = {}  # a few episodes to look at are no evaluation
        for check in page.checks:
            if not check["is_base"] and check["n"] >= largest.get(check["step"], check)["n"]:
                largest[check["step"]] = check
        if largest:
            checks = [(step, check["mean"]) for step, check in sorted(largest.items())]
            series.append({"name": "evaluation", "points": checks[-_MOST_POINTS:]})
        line = sparkline([reward for _, reward in rewards[-60:]])
        caption = f"Mean reward of each step <small>{esc(line)}</small>"
        parts.append(_figure(caption, curve_svg(series, page.baselines, width=860, height=300)))
    small = []
    for chart in page.charts:
        series = [{"name": words, "points": _points(page.rows, name)} for name, words in chart["series"]]
        kept = [one for one in series if one["points"]]
        if kept:
            title = chart["title"].removesuffix(", stacked")  # here the lines stand one by one
            small.append(_figure(esc(title), curve_svg(kept, width=440, height=190, y_label="")))
    grid = _within("curves", small, budget=_BUDGETS["curves"] - sum(map(_size, parts)))
    return "".join(parts) + (f'<div class="charts" style="margin-top:1rem">{grid}</div>' if grid else "")


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{caption}</figcaption>{svg}</figure>"


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """(step, value) of a metric, as many as a chart has room for."""
    points = [(r["step"], r["values"][name]) for r in rows if r["values"].get(name) is not None]
    return thinned(points, _MOST_POINTS)


def _steps(page: RunPage) -> str:
    if not page.rows:
        return "<p>No finished step yet.</p>"
    every = math.ceil(len(page.rows) / _MOST_STEPS)
    shown = page.rows[::-1][::every][::-1]
    rows = [_step_row(row) for row in shown]
    used = [n for n in ("step", *_STEP_COLUMNS, "notes") if any(r[n] not in (None, "") for r in rows)]
    said = f'<p class="soft">Every {every}th step; metrics.jsonl has all.</p>' if every > 1 else ""
    kept = [{name: row[name] for name in used} for row in rows]
    return said + _latest("steps", kept)


def _step_row(row: Mapping[str, Any]) -> dict[str, Any]:
    notes = [f"skipped: {row['skipped']}"] if row.get("skipped") else []
    notes += [f"⚠ {warning}" for warning in row.get("warnings") or []]
    values = {title: row["values"].get(name) for title, name in _STEP_COLUMNS.items()}
    return {"step": row["step"], **values, "notes": "; ".join(notes)}


def _trajectories(page: RunPage) -> str:
    parts = []
    for title, trajectories in page.trajectories.items():
        drawn = "".join(f"<article>{_fitting(trajectory)}</article>" for trajectory in trajectories)
        parts.append(f"<h3>{esc(title)}</h3>{drawn}")
    return _within("trajectories", parts)


def _fitting(trajectory: Trajectory) -> str:
    """A trajectory, turn by turn, with the middle left out where it is too long for a page."""
    for entries, longest in _CUTS:
        cut = _cut(trajectory, entries, longest)
        if sum(len(str(message)) for message in cut.messages()) > _ONE_TRAJECTORY:
            continue  # without its HTML it is too long already
        drawn = trajectory_html(cut)
        if _size(drawn) <= _ONE_TRAJECTORY:
            return drawn
    return f"<p>{esc(_short(trajectory.scenario_id))}: too long to show; it is in the run folder.</p>"


def _cut(trajectory: Trajectory, entries: int, longest: int) -> Trajectory:
    error = trajectory.error
    return dataclasses.replace(
        trajectory,
        messages_and_choices=_cut_items(trajectory.messages_and_choices, entries, longest),
        additional_histories=[
            dataclasses.replace(h, messages_and_choices=_cut_items(h.messages_and_choices, entries, longest))
            for h in trajectory.additional_histories[: max(1, entries // 20)]
        ],
        scenario_id=_short(trajectory.scenario_id),
        metrics={_short(k, 80): v for k, v in list(trajectory.metrics.items())[:entries]},
        logs=[_cut_text(str(line), longest) for line in trajectory.logs[-entries:]],
        error=error
        and dataclasses.replace(
            error, message=_cut_text(error.message, longest), traceback=_cut_text(error.traceback, longest)
        ),
    )


def _cut_items(items: Sequence[Any], entries: int, longest: int) -> list[Any]:
    kept = [_cut_item(item, longest) for item in items]
    if len(kept) <= entries:
        return kept
    head, tail = entries // 2, entries - entries // 2
    left_out = {"role": "…", "content": f"{len(kept) - entries} entries are left out here"}
    return [*kept[:head], left_out, *kept[-tail:]]


def _cut_item(item: Any, longest: int) -> Any:
    if isinstance(item, Turn):
        return dataclasses.replace(item, message=_cut_message(item.message, longest))
    return _cut_message(item, longest) if isinstance(item, Mapping) else item


def _cut_message(message: Mapping[str, Any], longest: int) -> dict[str, Any]:
    cut = {name: _cut_text(v, longest) if isinstance(v, str) else v for name, v in message.items()}
    if isinstance(cut.get("content"), list):
        cut["content"] = [
            {**part, "text": _cut_text(part["text"], longest)}
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            else part
            for part in cut["content"][:20]
        ]
    if isinstance(cut.get("tool_calls"), list):
        cut["tool_calls"] = cut["tool_calls"][:20]
    return cut


def _cut_text(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]} … {len(text) - longest:,} more characters"


def _environment(page: RunPage) -> str:
    about = page.environment
    if about is None:
        return ""
    parts = [f"<h3>{esc(about['name'])}</h3>"]
    if about["variant"]:
        parts.append(_facts(about["variant"]))
    if about["card"]:
        parts.append(
            f"<details open><summary>Its card</summary><pre>{esc(_card(about['card']))}</pre></details>"
        )
    return _within("environment", parts)


def _card(text: str) -> str:
    return text if len(text) <= _LONGEST_CARD else text[:_LONGEST_CARD] + " …"


def _configuration(page: RunPage) -> str:
    sets = [f"<div><h3>{esc(title)}</h3>{_facts(facts)}</div>" for title, facts in page.configuration.items()]
    return f'<div class="sets">{_within("configuration", sets)}</div>' if sets else ""


def _judge(page: RunPage) -> str:
    told = "".join(f"<h3>Against known rewards</h3>{_facts(one)}" for one in page.judge_reports[-3:])
    return _within("judge", [told] if told else []) + _latest("judge", page.judged[-_MOST_STEPS:])


def _machine(page: RunPage) -> str:
    machine = {name: value for name, value in page.machine.items() if value is not None}
    return f'<div class="sets"><div>{_facts(page.versions)}</div><div>{_facts(machine)}</div></div>'
