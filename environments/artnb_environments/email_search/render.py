"""What did an episode look like? The question, each call with its result, and both answers, in HTML."""

from __future__ import annotations

from artnb import Trajectory, esc

_BOX = "margin:4px 0;padding:4px 8px;border-left:3px solid #aaa;white-space:pre-wrap;overflow-wrap:anywhere"
_LONGEST = 4000


def render(trajectory: Trajectory) -> str:
    """Everything a model, a mail or a user wrote is escaped; long texts are cut."""
    told = trajectory.metadata
    reward = "not scored" if trajectory.reward is None else f"{trajectory.reward:.2f}"
    rows = (
        ("question", f"{told.get('question', '')} (on {told.get('day', 'an unknown day')})"),
        ("answer", f"{_or_none(told.get('answer'))} [{told.get('sources', '')}]"),
        ("truth", f"{_or_none(told.get('truth'))} [{told.get('true_sources', '')}]"),
        ("outcome", f"{told.get('outcome', 'unknown')}, reward {reward}"),
    )
    table = "".join(f"<tr><th>{name}</th><td>{_text(value)}</td></tr>" for name, value in rows)
    boxes = "".join(
        f'<div style="{_BOX}">{_text(_words(message))}</div>'
        for message in trajectory.messages()
        if message.get("role") in ("assistant", "tool", "user")
    )
    return f"<div><table>{table}</table><details open><summary>calls</summary>{boxes}</details></div>"


def _words(message: dict[str, object]) -> str:
    """A message as text: its content, or its calls."""
    calls = message.get("tool_calls")
    lines = [str(message.get("content") or "")]
    for call in calls if isinstance(calls, list) else []:
        lines.append(f"{call['function']['name']} {call['function']['arguments']}")
    return f"{message.get('role')}: " + "\n".join(line for line in lines if line)


def _or_none(value: object) -> str:
    return "none" if value is None else str(value)


def _text(value: object) -> str:
    text = str(value)
    return esc(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} […]")
