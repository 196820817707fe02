"""What did a game look like? Its boards and moves as escaped HTML."""

from __future__ import annotations

from typing import Any

from artnb import Trajectory, esc

TILE_COLOURS = ("#eee4da", "#ede0c8", "#f2b179", "#f59563", "#f67c5f", "#f65e3b", "#edcf72", "#edc22e")
EMPTY_COLOUR = "#cdc1b4"
CELL = "width:2.2em;height:2.2em;text-align:center;color:#333;border:2px solid #bbada0;padding:0"


def render(trajectory: Trajectory) -> str:
    """The boards from first to last, the move under each, and the player's own words."""
    metadata = trajectory.metadata
    boards, moves = metadata.get("boards", []), metadata.get("moves", [])
    figures = [
        _figure(board, f"{turn + 1}. {_move_name(moves[turn])}" if turn < len(moves) else "end")
        for turn, board in enumerate(boards)
    ]
    reward = "not scored" if trajectory.reward is None else f"{trajectory.reward:.2f}"
    heading = f"reward {reward}, ended by: {metadata.get('ended_by', 'unknown')}"
    replies = "".join(
        f"<li><code>{_text(turn.message.get('content'))}</code></li>" for turn in trajectory.turns
    )
    words = f"<details><summary>replies</summary><ol>{replies}</ol></details>" if replies else ""
    return (
        f"<div><p>{_text(heading)}</p>"
        f'<div style="display:flex;flex-wrap:wrap;gap:12px">{"".join(figures)}</div>{words}</div>'
    )


def _figure(board: list[list[Any]], caption: str) -> str:
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in board)
    table = f'<table style="border-collapse:collapse;margin:0">{rows}</table>'
    return f'<figure style="margin:0">{table}<figcaption>{_text(caption)}</figcaption></figure>'


def _cell(tile: Any) -> str:
    if not isinstance(tile, int) or tile <= 0:
        return f'<td style="{CELL};background:{EMPTY_COLOUR}"></td>'
    colour = TILE_COLOURS[min(tile.bit_length() - 2, len(TILE_COLOURS) - 1)]
    return f'<td style="{CELL};background:{colour}">{tile}</td>'


def _move_name(move: Any) -> str:
    return str(move) or "no move"


def _text(value: Any) -> str:
    return esc(value if value is not None else "")
