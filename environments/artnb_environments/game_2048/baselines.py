"""How good is play without a model? Random, corner, greedy and expectimax, each a function of the game."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import lru_cache

from artnb import Scenario, Trajectory
from artnb_environments.game_2048.episode import Episode
from artnb_environments.game_2048.game import (
    MOVES,
    SPAWN,
    Board,
    empty_cells,
    legal_moves,
    merges_of_moves,
    place,
    shift,
)

Policy = Callable[[Board, random.Random], str]
CORNER_ORDER = ("left", "down", "right", "up")


def uniform(board: Board, draw: random.Random) -> str:
    """Any of the four moves; one that changes nothing is lost."""
    return draw.choice(MOVES)


def uniform_legal(board: Board, draw: random.Random) -> str:
    return draw.choice(legal_moves(board) or MOVES)


def corner(board: Board, draw: random.Random) -> str:
    """Left, else down, else right, else up."""
    legal = legal_moves(board)
    return next((move for move in CORNER_ORDER if move in legal), CORNER_ORDER[0])


def greedy_moves(board: Board) -> list[str]:
    """The legal moves that merge the most pairs, and so leave the most empty cells."""
    merges = merges_of_moves(board)
    return [move for move, pairs in merges.items() if pairs == max(merges.values())]


def greedy(board: Board, draw: random.Random) -> str:
    """A move that leaves the most empty cells, any of them."""
    return draw.choice(greedy_moves(board) or MOVES)


def expectimax(board: Board, draw: random.Random) -> str:
    """The move with the best mean value over every tile that may appear and the best reply to it."""
    legal = legal_moves(board)
    return max(legal, key=lambda move: _mean_value(shift(board, move)[0])) if legal else MOVES[0]


def _mean_value(board: Board) -> float:
    cells = empty_cells(board)
    if not cells:
        return _best_value(board)
    values = (weight * _best_value(place(board, cell, tile)) for cell in cells for tile, weight in SPAWN)
    return sum(values) / len(cells)


def _best_value(board: Board) -> float:
    after = [shift(board, move)[0] for move in MOVES]
    return max((value(one) for one in after if one != board), default=-100.0)


def value(board: Board) -> float:
    """How promising a board is: empty cells, and large tiles in an order that snakes from a corner."""
    return sum(_row_value(row, number) for number, row in enumerate(board))


@lru_cache(maxsize=1 << 16)
def _row_value(row: tuple[int, ...], number: int) -> float:
    """Empty cells, plus each tile's size halved at every step of the snake."""
    columns = row if number % 2 == 0 else row[::-1]
    start = number * len(row)
    snake = sum(tile * 0.5 ** (start + step) for step, tile in enumerate(columns))
    return 1.0 * row.count(0) + 0.5 * math.sqrt(snake)


def play(policy: Policy, scenario: Scenario) -> Trajectory:
    """One game of a policy, without a model."""
    episode, draw = Episode(scenario), random.Random(f"baseline/{scenario.seed}")
    trajectory = Trajectory(scenario_id=scenario.id)
    while not episode.ended_by:
        move = policy(episode.game.board, draw)
        board = "\n".join("|".join(str(tile or "_") for tile in row) for row in episode.game.board)
        trajectory.messages_and_choices += [
            {"role": "user", "content": board},
            {"role": "assistant", "content": move},
        ]
        episode.play(move)
    return episode.score(trajectory)


def _player(policy: Policy) -> Callable[[Scenario], Trajectory]:
    return lambda scenario: play(policy, scenario)


baselines: dict[str, Callable[[Scenario], Trajectory]] = {
    "random": _player(uniform),
    "random_legal": _player(uniform_legal),
    "corner": _player(corner),
    "greedy": _player(greedy),
    "expectimax": _player(expectimax),
}
