"""How does code score a trajectory? With a function, or with several weighted ones whose parts are kept."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Awaitable, Callable
from typing import Any

from artnb.errors import ConfigurationError
from artnb.types import Failure, Trajectory

RewardFunction = Callable[..., "float | Awaitable[float]"]
"""Takes (trajectory) or (trajectory, scenario), sync or async, and returns a number."""


class Reward:
    """A weighted sum of reward functions; each part is kept as the metric ``reward/<name>``.

    >>> import asyncio
    >>> def correct(trajectory): return 1.0
    >>> def brief(trajectory): return 0.5
    >>> reward = Reward(correct, (brief, 0.2))
    >>> trajectory = Trajectory()
    >>> asyncio.run(reward(trajectory))
    1.1
    >>> trajectory.metrics
    {'reward/correct': 1.0, 'reward/brief': 0.5}

    Functions are given alone (weight 1) or as (function, weight); a keyword gives another name.
    """

    def __init__(
        self,
        *functions: RewardFunction | tuple[RewardFunction, float],
        **named: RewardFunction | tuple[RewardFunction, float],
    ) -> None:
        self.parts: dict[str, tuple[RewardFunction, float]] = {}
        for entry in functions:
            function, _ = _weighted(entry)
            self._add(getattr(function, "__name__", type(function).__name__), entry)
        for name, entry in named.items():
            self._add(name, entry)
        if not self.parts:
            raise ConfigurationError("Reward needs at least one function: Reward(correct, (brief, 0.2))")

    def _add(self, name: str, entry: RewardFunction | tuple[RewardFunction, float]) -> None:
        if name in self.parts:
            raise ConfigurationError(
                f"two reward functions are called {name!r}; give one another name: Reward(other=function)"
            )
        self.parts[name] = _weighted(entry)

    async def __call__(self, trajectory: Trajectory, scenario: Any = None) -> float:
        """Score a trajectory; its ``reward`` is left to the caller."""
        values = {}
        for name, (function, _) in self.parts.items():
            values[name] = await call_reward(function, trajectory, scenario)
        trajectory.metrics.update({f"reward/{name}": value for name, value in values.items()})
        return sum(weight * values[name] for name, (_, weight) in self.parts.items())

    def __repr__(self) -> str:
        return f"Reward({', '.join(f'{weight:g} * {name}' for name, (_, weight) in self.parts.items())})"


def _weighted(entry: RewardFunction | tuple[RewardFunction, float]) -> tuple[RewardFunction, float]:
    function, weight = entry if isinstance(entry, tuple) else (entry, 1.0)
    if not callable(function) or not isinstance(weight, numbers.Real):
        raise ConfigurationError(
            f"a reward is a function or a pair (function, weight); got {entry!r}. "
            "Pass the function itself, without calling it."
        )
    return function, float(weight)


def _takes_scenario(function: RewardFunction) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    return len(positional) >= 2 and (
        positional[1].default is inspect.Parameter.empty or positional[1].name == "scenario"
    )


async def call_reward(function: RewardFunction, trajectory: Trajectory, scenario: Any = None) -> float:
    """The number that a reward function gives a trajectory. Raises TypeError when it is none."""
    answer: Any = function(trajectory, scenario) if _takes_scenario(function) else function(trajectory)
    if inspect.isawaitable(answer):
        answer = await answer
    if not isinstance(answer, numbers.Real):
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"reward function {name} returned {type(answer).__name__}; return a number")
    return float(answer)


async def score(trajectory: Trajectory, reward: RewardFunction, scenario: Any = None) -> None:
    """Set the reward of a finished trajectory that has none.

    A reward function that raises leaves the trajectory unscored, with a RewardError as its error.
    """
    if trajectory.error is not None or trajectory.reward is not None:
        return
    try:
        trajectory.reward = await call_reward(reward, trajectory, scenario)
    except Exception as error:  # a rollout that cannot be scored is data, like one that failed
        cause = Failure.from_exception(error)
        trajectory.error = Failure("RewardError", f"{cause.type}: {cause.message}", cause.traceback)
