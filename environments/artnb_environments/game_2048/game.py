"""What are the rules of 2048? Sliding, merging, spawning, and when a game is over."""

from __future__ import annotations

import random
from functools import lru_cache

Row = tuple[int, ...]
Board = tuple[Row, ...]
"""Rows from top to bottom; 0 is an empty cell."""

MOVES = ("left", "right", "up", "down")
SPAWN = ((2, 0.9), (4, 0.1))
"""Tiles that appear after a move, with their probabilities."""


@lru_cache(maxsize=1 << 16)
def slide(row: Row) -> tuple[Row, int]:
    """Slide a row to its left and merge equal neighbours once; also the points of the merges.

    >>> slide((2, 2, 2, 2)), slide((0, 4, 2, 2)), slide((2, 2, 4, 0))
    (((4, 4, 0, 0), 8), ((4, 4, 0, 0), 4), ((4, 4, 0, 0), 4))
    """
    tiles = [tile for tile in row if tile]
    merged: list[int] = []
    points = position = 0
    while position < len(tiles):
        tile = tiles[position]
        if tiles[position + 1 : position + 2] == [tile]:
            tile *= 2
            points += tile
            position += 1
        merged.append(tile)
        position += 1
    return tuple(merged + [0] * (len(row) - len(merged))), points


def transpose(board: Board) -> Board:
    return tuple(zip(*board, strict=True))


def mirror(board: Board) -> Board:
    return tuple(row[::-1] for row in board)


@lru_cache(maxsize=1 << 16)
def _slide_back(row: Row) -> tuple[Row, int]:
    """The same towards the row's right."""
    after, points = slide(row[::-1])
    return after[::-1], points


def shift(board: Board, move: str) -> tuple[Board, int]:
    """The board after a move and before the spawn, and the points of its merges."""
    rows = transpose(board) if move in ("up", "down") else board
    slid = list(map(_slide_back if move in ("right", "down") else slide, rows))
    after = tuple([row for row, _ in slid])
    return (transpose(after) if move in ("up", "down") else after), sum([points for _, points in slid])


def legal_moves(board: Board) -> list[str]:
    """The moves that change the board."""
    return [move for move in MOVES if shift(board, move)[0] != board]


def merges_of_moves(board: Board) -> dict[str, int]:
    """How many pairs each legal move merges.

    >>> merges_of_moves(((2, 2, 0), (0, 0, 0), (0, 0, 0)))
    {'left': 1, 'right': 1, 'down': 0}
    """
    after = {move: shift(board, move)[0] for move in MOVES}
    return {move: count_empty(b) - count_empty(board) for move, b in after.items() if b != board}


def empty_cells(board: Board) -> list[tuple[int, int]]:
    return [(i, j) for i, row in enumerate(board) if 0 in row for j, tile in enumerate(row) if not tile]


def count_empty(board: Board) -> int:
    return sum(row.count(0) for row in board)


def max_tile(board: Board) -> int:
    return max(map(max, board))


def tile_sum(board: Board) -> int:
    return sum(map(sum, board))


def place(board: Board, cell: tuple[int, int], tile: int) -> Board:
    i, j = cell
    row = (*board[i][:j], tile, *board[i][j + 1 :])
    return (*board[:i], row, *board[i + 1 :])


class Game:
    """A game in progress. The same seed and the same moves always give the same boards.

    ``rules="classic"`` is 2048: a move that changes nothing spawns nothing, and the game is over when
    no move changes the board. ``rules="art"`` is ART's version of it: every move spawns a tile, and a
    full board ends the game even when tiles could merge.
    """

    def __init__(self, seed: int, size: int = 4, rules: str = "classic") -> None:
        self.rules = rules
        self.score = 0
        self._draw = random.Random(seed)
        self.board: Board = ((0,) * size,) * size
        self._spawn()
        self._spawn()

    def move(self, move: str) -> bool:
        """Make a move; True when it changed the board."""
        after, points = shift(self.board, move)
        changed = after != self.board
        self.board = after
        self.score += points
        if changed or self.rules == "art":
            self._spawn()
        return changed

    def is_over(self) -> bool:
        if count_empty(self.board):
            return False  # beside an empty cell some tile can always move
        return self.rules == "art" or not legal_moves(self.board)

    def _spawn(self) -> None:
        cells = empty_cells(self.board)
        if cells:
            (small, often), (large, _) = SPAWN
            cell = self._draw.choice(cells)
            self.board = place(self.board, cell, small if self._draw.random() < often else large)
