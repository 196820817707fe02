"""What are the rules, and which moves are good? Boards are texts of nine characters: X, O, or . for free."""

from __future__ import annotations

import statistics
from functools import cache

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
EMPTY = "." * 9
CENTRE = 4
OPPONENTS = ("random", "heuristic", "minimax")


def other(mark: str) -> str:
    return "O" if mark == "X" else "X"


def free_cells(board: str) -> list[int]:
    return [cell for cell in range(9) if board[cell] == "."]


def place(board: str, cell: int, mark: str) -> str:
    """The board after a move. The cell must be free."""
    assert board[cell] == ".", f"cell {cell} of {board} is taken"
    return board[:cell] + mark + board[cell + 1 :]


def winner(board: str) -> str:
    """The mark that has three in a line, else an empty text."""
    for a, b, c in LINES:
        if board[a] != "." and board[a] == board[b] == board[c]:
            return board[a]
    return ""


def is_over(board: str) -> bool:
    return "." not in board or bool(winner(board))


def winning_cells(board: str, mark: str) -> list[int]:
    """The cells that make three in a line."""
    return [cell for cell in free_cells(board) if winner(place(board, cell, mark)) == mark]


@cache
def moves_of(player: str, board: str, mark: str) -> tuple[int, ...]:
    """The cells that a scripted player may take, each as likely as the others.

    ``random``: any free one. ``heuristic``: one that wins, else one that blocks, else the centre, else any.
    ``minimax``: any of those that are best against an opponent who errs never.
    """
    if player == "minimax":
        return best_cells(board, mark, "minimax")
    free = free_cells(board)
    if player == "heuristic":
        centre = [CENTRE] if CENTRE in free else []
        return tuple(winning_cells(board, mark) or winning_cells(board, other(mark)) or centre or free)
    return tuple(free)


@cache
def expected_score(board: str, mark: str, to_move: str, opponent: str) -> float:
    """What ``mark`` scores on average with best play against a scripted opponent: 1 win, 0.5 draw, 0 loss."""
    if is_over(board):
        return {mark: 1.0, "": 0.5}.get(winner(board), 0.0)
    if to_move == mark:
        return max(move_scores(board, mark, opponent).values())
    if opponent == "minimax":  # its best is the worst for us
        return 1.0 - expected_score(board, to_move, to_move, opponent)
    after = [place(board, cell, to_move) for cell in moves_of(opponent, board, to_move)]
    return statistics.fmean(expected_score(one, mark, mark, opponent) for one in after)


def move_scores(board: str, mark: str, opponent: str) -> dict[int, float]:
    """The expected score of each free cell when ``mark`` moves."""
    return {
        cell: expected_score(place(board, cell, mark), mark, other(mark), opponent)
        for cell in free_cells(board)
    }


def best_cells(board: str, mark: str, opponent: str) -> tuple[int, ...]:
    """The cells with the highest expected score, in order."""
    scores = move_scores(board, mark, opponent)
    best = max(scores.values())
    return tuple(cell for cell, score in scores.items() if score > best - 1e-9)
