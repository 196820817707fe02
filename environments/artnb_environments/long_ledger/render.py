"""What did an episode look like? Each part beside the notes after it, the question and both answers."""

from __future__ import annotations

from typing import Any

from artnb import Trajectory, esc

_CELL = "vertical-align:top;text-align:left;padding:2px 8px;white-space:pre-wrap;overflow-wrap:anywhere"


def render(trajectory: Trajectory) -> str:
    """Everything that a model wrote is escaped."""
    told = trajectory.metadata
    parts, notes = told.get("parts", []), told.get("notes", [])
    rows = [
        (f"{n + 1}", "\n".join(map(str, part)), _note(notes[n]) if n < len(notes) else "")
        for n, part in enumerate(parts)
    ]
    table = "".join(_row("td", row) for row in rows)
    reward = "not scored" if trajectory.reward is None else f"{trajectory.reward:.2f}"
    heading = f"reward {reward}, ended by: {told.get('ended_by', 'unknown')}"
    asked = f"asked {_list(told.get('asked'))}: answer {_list(told.get('answer'))}, truth "
    return (
        f"<div><p>{esc(heading)}</p><table>{_row('th', ('part', 'entries', 'notes after it'))}{table}</table>"
        f"<p>{esc(asked + _list(told.get('truth')))}</p></div>"
    )


def _row(cell: str, values: tuple[str, ...]) -> str:
    cells = "".join(f'<{cell} style="{_CELL}">{esc(value)}</{cell}>' for value in values)
    return f"<tr>{cells}</tr>"


def _note(note: Any) -> str:
    return "no notes" if note is None else str(note)


def _list(values: Any) -> str:
    return ", ".join(map(str, values)) if isinstance(values, list) else "none"
