"""What did one agent of a team do? Its place, its task, every call with its result, its report."""

from __future__ import annotations

from typing import Any

from artnb import Trajectory, esc

_BOX = "margin:4px 0;padding:4px 8px;border-left:3px solid #aaa;white-space:pre-wrap;overflow-wrap:anywhere"
_LONGEST = 4000


def render(trajectory: Trajectory) -> str:
    """Everything that an agent wrote is escaped; long texts are cut."""
    told = trajectory.metadata
    reward = "not scored" if trajectory.reward is None else f"{trajectory.reward:.2f}"
    caller = told.get("parent")
    below = "the root" if caller is None else f"called by agent {caller}, depth {told.get('depth')}"
    rows: list[tuple[str, Any]] = [
        ("agent", f"{told.get('agent', '?')}, {below}"),
        ("task", told.get("instruction")),
        ("reads", "nothing" if caller is None else f"report {told.get('document')}, {told.get('parts')}"),
        ("said", told.get("answer") if caller is None else told.get("report")),
        ("truth", told.get("truth")),
        ("outcome", f"{told.get('ended_by', 'unknown')}, reward {reward}, own {told.get('own_score')}"),
    ]
    table = "".join(f"<tr><th>{name}</th><td>{_text(value)}</td></tr>" for name, value in rows)
    boxes = "".join(
        f'<div style="{_BOX}">{_text(_words(message))}</div>'
        for message in trajectory.messages()
        if message.get("role") != "system"
    )
    return f"<div><table>{table}</table><details><summary>calls</summary>{boxes}</details></div>"


def _words(message: dict[str, Any]) -> str:
    """A message as text: its content, or its calls."""
    lines = [str(message.get("content") or "")]
    for call in message.get("tool_calls") or []:
        lines.append(f"{call['function']['name']} {call['function']['arguments']}")
    return f"{message.get('role')}: " + "\n".join(line for line in lines if line)


def _text(value: Any) -> str:
    text = "none" if value is None else str(value)
    return esc(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} […]")
