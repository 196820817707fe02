"""What stays of the browser without widgets or a kernel? Counts, and the best and worst trajectories in full.

It reads without style sheets and scripts: tables, ``<details>`` and ``<pre>``, every string escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from artnb.browser.source import Source
from artnb.ui.html import esc, table_html, visible
from artnb.ui.snapshot import number_text, seconds_text, shorten
from artnb.ui.text import table_text

SHOWN = 3
"""How many of the best, and how many of the worst."""
_MOST_STEPS = 12
_LONGEST = 1500
"""Characters of a message: a saved notebook stays small."""
_FIRST_ENTRIES, _LAST_ENTRIES = 4, 8
_STEP_COLUMNS = {"reward": "mean reward", "turns": "turns", "tokens": "tokens", "seconds": "seconds"}


def browser_text(source: Source) -> str:
    """What there is in a line, and a table of the latest steps."""
    return "\n".join([visible(_summary(source.facts())), table_text(_steps(source))])


def browser_html(source: Source, *, note: str = "", is_folded: bool = False) -> str:
    """The static copy; folded behind its summary beside a live view. ``note`` says why it stands there."""
    facts = source.facts()
    parts = [f"<div>{esc(note)}</div>"] if note else []
    parts += [f"<div>⚠ {esc(problem)}</div>" for problem in facts["problems"]]
    steps = _steps(source)
    if steps:
        parts.append(table_html(steps))
    parts += _extremes(source, facts)
    if not facts["count"]:
        parts.append("<div>No trajectory yet.</div>")
    body, summary = "".join(parts), esc(_summary(facts))
    if is_folded:
        return f"<details><summary><small>Static copy: {summary}</small></summary>{body}</details>"
    return f"<div><div><b>{summary}</b></div>{body}</div>"


def _summary(facts: Mapping[str, Any]) -> str:
    words = [f"{facts['count']:,} trajectories", f"{facts['groups']:,} groups"]
    if facts["steps"]:
        words.append(f"steps {facts['steps'][0]} to {facts['steps'][-1]}")
    if facts["indexing"] is not None:
        words.append(f"{facts['indexing']:.0%} of the run read")
    return f"{facts['name']}: {', '.join(words)}"


def _rows(source: Source, filter: str, sort: Sequence[Sequence[str]], tree: bool) -> list[dict[str, Any]]:
    """The first and the last rows of a query."""
    query = source.query(filter, sort, tree)
    if "error" in query:
        return []
    count, most = query["count"], 2 * SHOWN if not tree else _MOST_STEPS
    if tree:
        return source.page(query["query"], max(0, count - most), most)["rows"]
    first = source.page(query["query"], 0, SHOWN)["rows"]
    last = source.page(query["query"], max(SHOWN, count - SHOWN), SHOWN)["rows"]
    return [*first, *last]


def _steps(source: Source) -> list[dict[str, Any]]:
    rows = _rows(source, "", [("step", "asc")], tree=True)
    kept = [name for name in _STEP_COLUMNS if any(row.get(name) is not None for row in rows)]
    return [
        {"": row.get("title") or row.get("scenario") or row["key"], "rollouts": row.get("trajectories", 1)}
        | {_STEP_COLUMNS[name]: row.get(name) for name in kept}
        for row in rows
    ]


def _extremes(source: Source, facts: Mapping[str, Any]) -> list[str]:
    step = f"step:{facts['steps'][-1]} " if facts["steps"] else ""
    rows = _rows(source, f"{step}scored", [("reward", "desc")], tree=False)
    failed = _rows(source, f"{step}failed", [], tree=False)[:SHOWN]
    best, worst = rows[:SHOWN], rows[SHOWN:][::-1]
    of = f" of step {facts['steps'][-1]}" if facts["steps"] else ""
    titled = [(f"Best{of}", best), (f"Worst{of}", worst), (f"Failed{of}", failed)]
    return [part for title, some in titled if some for part in _listed(source, title, some)]


def _listed(source: Source, title: str, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    parts = [f"<div><b>{esc(title)}</b></div>"]
    for row in rows:
        told = source.trajectory(row["key"])
        if "missing" not in told:
            parts.append(_trajectory(told))
    return parts


def _trajectory(told: Mapping[str, Any]) -> str:
    facts, error = told["facts"], told["error"]
    reward = "failed" if error else f"reward {number_text(told['reward'])}"
    words = [reward, str(facts.get("scenario") or told["id"]), _count(facts.get("turns") or 0, "turn")]
    if facts.get("seconds") is not None:
        words.append(seconds_text(facts["seconds"]))
    parts = [f"<div>⚠ <b>{esc(error['type'])}</b>: {esc(error['message'])}</div>"] if error else []
    if told["override"]:
        parts.append(f"<div>Reward set by a person: {esc(told['override'].get('reason') or '')}</div>")
    values = {**told["parts"], **told["metrics"]}
    if values:
        parts.append(table_html([{"": name, "value": value} for name, value in values.items()]))
    parts += _entries(told["histories"][0]["entries"]) if told["histories"] else []
    if told["judge"] and told["judge"].get("explanation"):
        parts.append(f"<div><b>judge</b></div>{_pre(told['judge']['explanation'])}")
    return f"<details><summary>{esc(' · '.join(words))}</summary>{''.join(parts)}</details>"


def _entries(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    left = len(entries) - _FIRST_ENTRIES - _LAST_ENTRIES
    if left <= 1:
        return [_entry(entry) for entry in entries]
    first, last = entries[:_FIRST_ENTRIES], entries[-_LAST_ENTRIES:]
    gap = f"<div>… {left:,} messages left out …</div>"
    return [*map(_entry, first), gap, *map(_entry, last)]


def _entry(entry: Mapping[str, Any]) -> str:
    facts = [str(entry["role"])]
    if entry["sampled"]:
        facts.append(_count(entry["tokens"], "token"))
    parts = [f"<div><b>{esc(' · '.join(facts))}</b></div>"]
    if entry["reasoning"]:
        parts.append(f"<details><summary>reasoning</summary>{_pre(entry['reasoning'])}</details>")
    if entry["text"] or not entry["calls"]:
        parts.append(_pre(entry["text"] or "(empty)"))
    for call in entry["calls"]:
        parts.append(_pre(f"→ {call['name']} {call['arguments'] if call['parsed'] else call['raw']}"))
    if entry["unparsed"]:
        parts.append(f"<div>⚠ tool call not read: {esc(entry['unparsed'])}</div>")
    return "".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _pre(text: str) -> str:
    return f'<pre style="white-space:pre-wrap">{esc(shorten(str(text), _LONGEST))}</pre>'
