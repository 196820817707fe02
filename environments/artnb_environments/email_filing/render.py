"""How was the mail filed? The rules, and each mail with its folder beside the right one, in HTML."""

from __future__ import annotations

from artnb import Trajectory, esc


def render(trajectory: Trajectory) -> str:
    """Everything a model, a mail or a user wrote is escaped."""
    told = trajectory.metadata
    reward = "not scored" if trajectory.reward is None else f"{trajectory.reward:.2f}"
    rules = "".join(f"<li>{esc(line)}</li>" for line in told.get("rules", []))
    rows = "".join(
        f"<tr><td>{'✓' if put == right else '✗' if put else '–'}</td>"
        f"<td>{esc(str(subject)[:200])}</td><td>{esc(put or 'not filed')}</td><td>{esc(right)}</td></tr>"
        for subject, put, right in told.get("filed", [])
    )
    head = "<tr><th></th><th>mail</th><th>filed in</th><th>right</th></tr>"
    return f"<div><p>reward {esc(reward)}</p><ul>{rules}</ul><table>{head}{rows}</table></div>"
