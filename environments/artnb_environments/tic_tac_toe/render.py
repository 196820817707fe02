"""What did a game look like? Its boards and moves as escaped HTML."""

from __future__ import annotations

from typing import Any

from artnb import Trajectory, esc

CELL = "width:1.6em;height:1.6em;text-align:center;color:#333;border:1px solid #888;padding:0"
LAST = ";background:#fff2b3"
"""The cell that the move before the board has filled."""


def render(trajectory: Trajectory) -> str:
    """The boards from first to last, the move that led to each, and the player's own words."""
    told = trajectory.metadata
    boards, moves = _texts(told.get("boards")), _texts(told.get("moves"))
    figures = [
        _figure(board, boards[number - 1] if number else board, _caption(number, moves))
        for number, board in enumerate(boards)
    ]
    reward = "not scored" if trajectory.reward is None else f"{trajectory.reward:.2f}"
    heading = f"{told.get('mark', '')}: reward {reward}, ended by: {told.get('ended_by', 'unknown')}"
    replies = "".join(f"<li><code>{esc(_said(turn.message))}</code></li>" for turn in trajectory.turns)
    words = f"<details><summary>replies</summary><ol>{replies}</ol></details>" if replies else ""
    return (
        f"<div><p>{esc(heading)}</p>"
        f'<div style="display:flex;flex-wrap:wrap;gap:12px">{"".join(figures)}</div>{words}</div>'
    )


def _texts(values: Any) -> list[str]:
    return [str(value) for value in values] if isinstance(values, list) else []


def _caption(number: int, moves: list[str]) -> str:
    if number == 0:
        return "start"
    move = moves[number - 1] if number <= len(moves) else ""
    return f"{number}. {move if len(move) > 1 else f'{move} loses the turn'}"


def _figure(board: str, before: str, caption: str) -> str:
    cells = [_cell(mark, changed=before[n : n + 1] != mark) for n, mark in enumerate(board[:9])]
    rows = "".join(f"<tr>{''.join(cells[row : row + 3])}</tr>" for row in (0, 3, 6))
    table = f'<table style="border-collapse:collapse;margin:0">{rows}</table>'
    return f'<figure style="margin:0">{table}<figcaption>{esc(caption)}</figcaption></figure>'


def _cell(mark: str, changed: bool) -> str:
    return f'<td style="{CELL}{LAST if changed else ""}">{esc(mark if mark != "." else "")}</td>'


def _said(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls") or []
    return str(calls[0]["function"] if calls else message.get("content") or "")
