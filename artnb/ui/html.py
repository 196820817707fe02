"""How do runs look as HTML? Pure functions; every dynamic string passes through ``esc``.

The HTML reads without style sheets and scripts (GitHub strips both) and takes its colours from the
page, so that it fits light and dark themes.
"""

from __future__ import annotations

import html as html_module
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from artnb.types import Trajectory, TrajectoryGroup
from artnb.ui.snapshot import (
    groups_snapshot,
    number_text,
    seconds_text,
    shorten,
    step_snapshot,
    trajectory_snapshot,
)

_PRE = "white-space:pre-wrap;overflow-wrap:anywhere;margin:2px 0;background:transparent;color:inherit"
_SMALL = "opacity:.75;font-size:90%"
_MOST_ROWS = 40
_GROUP_COLUMNS = [
    *["scenario_id", "seat", "trajectories", "mean", "lowest", "highest"],
    *["failed", "unscored", "tokens"],
]
_SHADES = {"user": "47,127,224", "assistant": "31,163,122", "tool": "224,122,31", "system": "128,128,128"}


def esc(value: Any) -> str:
    """Any value as HTML text in which nothing is markup; control and bidi characters are made visible.

    >>> esc('<img src=x onerror="alert(1)">')
    '&lt;img src=x onerror=&quot;alert(1)&quot;&gt;'
    >>> esc("a\\u202eb\\x1b")
    'a‹U+202E›b‹U+001B›'
    """
    return html_module.escape(visible(str(value)), quote=True)


def visible(text: str) -> str:
    """The text with its control, bidi and zero-width characters spelt out: a terminal obeys none of them.

    >>> visible("a\\x1b[2Jb")
    'a‹U+001B›[2Jb'
    """
    return text if text.isprintable() else "".join(map(_visible, text))  # almost all of it is


def _visible(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    if character in "\u200d\ufe0f":  # they join emoji
        return character
    return f"‹U+{ord(character):04X}›"


def progress_html(title: str, share: float, facts: Sequence[str]) -> str:
    """A progress bar with facts beside it."""
    value = max(0.0, min(1.0, share))
    head = f"<b>{esc(title)}</b> " if title else ""
    return (
        f'<div>{head}<progress value="{value:.4f}" max="1">{value:.0%}</progress> '
        f"{' · '.join(map(esc, facts))}</div>"
    )


def table_html(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Rows as a table; numbers are written as a person would, and stand on the right.

    >>> table_html([{"step": 1, "reward": 0.25}]).count("<td")
    2
    """
    kept = list(rows)
    names = list(columns) if columns is not None else list(dict.fromkeys(k for row in kept for k in row))
    head = "".join(_head(name, [row.get(name) for row in kept]) for name in names)
    body = "".join("<tr>" + "".join(_cell(row.get(name)) for name in names) + "</tr>" for row in kept)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def facts_html(facts: Mapping[str, Any]) -> str:
    """Names with their values, one a line."""
    rows = (
        f'<tr><th style="text-align:left">{esc(name)}</th>{_cell(str(value))}</tr>'
        for name, value in facts.items()
    )
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def _head(name: str, values: Sequence[Any]) -> str:
    side = "left" if values and all(isinstance(value, str) for value in values) else "right"
    return f'<th style="text-align:{side}">{esc(name)}</th>'


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return f'<td style="text-align:left">{esc(value)}</td>'
    return f'<td style="text-align:right">{esc(number_text(value))}</td>'


def _details(summary: str, body: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{summary}</summary>{body}</details>"


def _pre(text: str) -> str:
    return f'<pre style="{_PRE}">{esc(text)}</pre>'


def trajectory_html(trajectory: Trajectory) -> str:
    """One trajectory, turn by turn, with its reward, metrics and failure."""
    view = trajectory_snapshot(trajectory)
    facts = [f"<b>{esc(view['scenario_id'] or 'trajectory')}</b>"]
    facts.append(f"reward <b>{esc(_reward_words(view))}</b>")
    facts.append(f"{view['turns']} turns, {view['tokens']:,} sampled tokens")
    if view["seconds"] is not None:
        facts.append(esc(seconds_text(view["seconds"])))
    if view["seat"]:
        facts.append(f"seat {esc(view['seat'])}")
    parts = [f"<div>{' · '.join(facts)} <small>{esc(view['id'])}</small></div>"]
    if view["error"]:
        parts.append(_failure(view["error"]))
    for index, entries in enumerate(view["histories"]):
        bubbles = "".join(map(_bubble, entries))
        title = f"history {index + 1} of {len(view['histories'])}"
        parts.append(bubbles if index == 0 else _details(title, bubbles))
    if view["metrics"]:
        parts.append(table_html([{"metric": k, "value": v} for k, v in view["metrics"].items()]))
    if view["logs"]:
        parts.append(
            _details(f"{len(view['logs'])} log lines", _pre(shorten("\n".join(map(str, view["logs"])))))
        )
    return f"<div>{''.join(parts)}</div>"


def _reward_words(view: Mapping[str, Any]) -> str:
    if view["error"]:
        return "none (failed)"
    return "not scored" if view["reward"] is None else number_text(view["reward"])


def _failure(error: Mapping[str, Any], count: int = 1) -> str:
    times = f" ({count} times)" if count > 1 else ""
    summary = f"⚠ <b>{esc(error['type'])}</b>: {esc(shorten(error['message']))}{times}"
    if not error["traceback"]:
        return f"<div>{summary}</div>"
    return _details(summary, _pre(shorten(error["traceback"])))


def _bubble(entry: Mapping[str, Any]) -> str:
    shade = _SHADES.get(entry["role"], "128,128,128")
    facts = []
    if "tokens" in entry:
        facts.append(f"{entry['tokens']} tokens")
        if entry["mean_logprob"] is not None:
            facts.append(f"mean logprob {entry['mean_logprob']:.2f}")
        facts.append(f"policy {entry['policy_version']}")
        if entry["finish_reason"] == "length":
            facts.append("cut off by max_tokens")
        if entry["credit"] is not None:
            facts.append(f"credit {number_text(entry['credit'])}")
    elif entry["role"] == "assistant":
        facts.append("given, not sampled")
    body = _details("reasoning", _pre(entry["reasoning"])) if entry["reasoning"] else ""
    if entry["text"] or not entry["calls"]:
        body += _pre(entry["text"] or "(empty)")
    body += "".join(_pre(f"→ {call}") for call in entry["calls"])
    return (
        f'<div style="border-left:3px solid rgb({shade});background:rgba({shade},.08);padding:4px 8px;'
        f'margin:4px 0"><div style="{_SMALL}"><b>{esc(entry["role"])}</b> '
        f"{esc(' · '.join(facts))}</div>{body}</div>"
    )


def conversation_html(entries: Iterable[Mapping[str, Any]]) -> str:
    """Messages and moves, one below the other: entries of a history of ``trajectory_snapshot``."""
    return "".join(map(_bubble, entries))


def groups_html(groups: Iterable[TrajectoryGroup]) -> str:
    """What ``gather`` returned: rewards by group, and failures by kind."""
    view = groups_snapshot(groups)
    facts = [f"<b>{len(view['rows'])} groups</b>", f"{view['trajectories']} trajectories"]
    facts.append(f"mean reward <b>{esc(number_text(view['mean']))}</b>")
    facts += [f"{view[name]} {name}" for name in ("failed", "unscored") if view[name]]
    facts.append(f"{view['tokens']:,} sampled tokens")
    if view["seconds"]:
        facts.append(esc(seconds_text(view["seconds"])))
    if view["status"] != "complete":
        facts.append(f"<b>{esc(view['status'])}</b>")
    shown = view["rows"][:_MOST_ROWS]
    columns = [
        "scenario_id",
        "seat",
        "trajectories",
        "mean",
        "lowest",
        "highest",
        "failed",
        "unscored",
        "tokens",
    ]
    if not any(row["seat"] for row in shown):
        columns.remove("seat")
    left = len(view["rows"]) - len(shown)
    more = f'<div style="{_SMALL}">and {left} more groups</div>' if left else ""
    failures = "".join(_failure(f, f["count"]) for f in view["failures"][:10])
    return f"<div><div>{' · '.join(facts)}</div>{failures}{table_html(shown, columns)}{more}</div>"


def step_html(result: Any) -> str:
    """One training step, from a StepResult or a mapping of its metrics, in plain words."""
    view = step_snapshot(result)
    facts = [f"<b>step {esc(view['step'])}</b>"] if view["step"] is not None else ["<b>step</b>"]
    if view["policy_version"] is not None:
        facts.append(f"policy version {esc(view['policy_version'])}")
    if view["is_supervised"]:
        facts.append("supervised")
    parts = [f"<div>{' · '.join(facts)}</div>"]
    if view["skipped"]:
        parts.append(f"<div>⚠ skipped: {esc(view['skipped'])}</div>")
    parts += [f"<div>⚠ {esc(warning)}</div>" for warning in view["warnings"]]
    if view["dropped"]:
        reasons = ", ".join(f"{number_text(count)} × {reason}" for reason, count in view["dropped"].items())
        parts.append(f"<div>left out: {esc(reasons)}</div>")
    if view["sections"]:
        parts.append(
            f"<table><tbody>{''.join(_section(*s) for s in view['sections'].items())}</tbody></table>"
        )
    return f"<div>{''.join(parts)}</div>"


def _section(name: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = []
    for index, (label, value) in enumerate(rows):
        head = f'<th rowspan="{len(rows)}" style="vertical-align:top">{esc(name)}</th>' if not index else ""
        lines.append(
            f'<tr>{head}<td style="text-align:left">{esc(label)}</td>'
            f'<td style="text-align:right">{esc(value)}</td></tr>'
        )
    return "".join(lines)
