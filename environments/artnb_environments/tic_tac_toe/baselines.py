"""How good is play without a model? At random, by rule of thumb, by minimax, and by knowing the opponent."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from artnb import Scenario, Trajectory
from artnb_environments.tic_tac_toe.episode import Game
from artnb_environments.tic_tac_toe.game import best_cells, moves_of

Policy = Callable[[Game, random.Random], int]
"""A scripted agent: the game in which it is to move, randomness -> a cell, 0 to 8."""


def anything(game: Game, draw: random.Random) -> int:
    """Any of the nine cells, taken or not."""
    return draw.randrange(9)


def best_response(game: Game, draw: random.Random) -> int:
    """A cell with the highest expected score against this very opponent."""
    return draw.choice(best_cells(game.board, game.to_move, game.variant.opponent))


def play(policy: Policy, scenario: Scenario) -> Trajectory:
    """One game of a policy against the scenario's opponent, without a model."""
    game, draw = Game.of(scenario), random.Random(f"baseline/{scenario.seed}")
    mark = str(scenario.task["mark"])
    conversation: list[Any] = []
    while not game.ended_by:
        if game.to_move != mark:
            game.play_scripted(game.variant.opponent)
            continue
        digit = f"{policy(game, draw) + 1}"
        conversation += [
            {"role": "user", "content": game.board},
            {"role": "assistant", "content": digit},
        ]
        game.take(digit)
    return game.score(Trajectory(conversation, scenario_id=scenario.id), mark)


def _player(policy: Policy) -> Callable[[Scenario], Trajectory]:
    return lambda scenario: play(policy, scenario)


def _scripted(player: str) -> Callable[[Scenario], Trajectory]:
    return _player(lambda game, draw: draw.choice(moves_of(player, game.board, game.to_move)))


baselines: dict[str, Callable[[Scenario], Trajectory]] = {
    "random": _player(anything),
    "random_legal": _scripted("random"),
    "heuristic": _scripted("heuristic"),
    "minimax": _scripted("minimax"),
    "oracle": _player(best_response),
}
