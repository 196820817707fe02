"""How good is guessing without a model? Anywhere, anywhere that is possible, and in the middle."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from artnb import Scenario, Trajectory
from artnb_environments.guess_number.game import Game

Policy = Callable[[Game, random.Random], int]


def anywhere(game: Game, draw: random.Random) -> int:
    return draw.randint(1, game.variant.highest)


def in_range(game: Game, draw: random.Random) -> int:
    """A number that is still possible, any of them."""
    return draw.randint(game.low, game.high)


def middle(game: Game, draw: random.Random) -> int:
    """Halves what is possible: 2**turns - 1 numbers are found for sure."""
    return (game.low + game.high) // 2


def play(policy: Policy, scenario: Scenario) -> Trajectory:
    """One game of a policy, without a model."""
    game, draw = Game.of(scenario), random.Random(f"baseline/{scenario.seed}")
    conversation: list[Any] = []
    while not game.ended_by:
        guess = policy(game, draw)
        conversation.append({"role": "assistant", "content": f"{guess}"})
        conversation.append({"role": "user", "content": game.guess(guess)})
    return game.score(Trajectory(conversation, scenario_id=scenario.id))


def _player(policy: Policy) -> Callable[[Scenario], Trajectory]:
    return lambda scenario: play(policy, scenario)


baselines: dict[str, Callable[[Scenario], Trajectory]] = {
    "random": _player(anywhere),
    "in_range": _player(in_range),
    "oracle": _player(middle),
}
