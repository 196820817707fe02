"""What becomes of one attempt at a scenario? Always trajectories: what it returned, or how it failed."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import numbers
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from artnb.errors import ConfigurationError
from artnb.rewards import RewardFunction, score
from artnb.types import Failure, Item, Trajectory, Turn

_HOW_TO_BE_ASYNC = "Write it as `async def rollout(model, scenario)` and await the model's answers inside."
_seed: ContextVar[int | None] = ContextVar("artnb_attempt_seed", default=None)


class NotAsync(ConfigurationError):
    """The rollout cannot be awaited: no attempt at all can work."""


def attempt_seed() -> int | None:
    """The seed of the rollout that is running here, another for each attempt; None without a seed."""
    return _seed.get()


def scenario_id(scenario: Any, index: int) -> str:
    """The scenario's own id, else its place in the list."""
    named = scenario.get("id") if isinstance(scenario, dict) else getattr(scenario, "id", None)
    return str(index) if named is None else str(named)


def check_rollout(rollout: Any) -> None:
    """Refuse what cannot be awaited, before anything starts."""
    if not callable(rollout):
        raise ConfigurationError(
            f"rollout must be an async function taking (model, scenario), got {type(rollout).__name__}. "
            "Pass the function itself, without calling it."
        )
    inner = rollout.func if isinstance(rollout, functools.partial) else rollout
    if not inspect.isroutine(inner):
        return  # a callable object may well return a coroutine: the first call will tell
    inner = inspect.unwrap(inner)
    if not inspect.iscoroutinefunction(inner) and getattr(inner, "__name__", "") != "<lambda>":
        raise NotAsync(f"rollout {getattr(inner, '__qualname__', inner)} is not async. {_HOW_TO_BE_ASYNC}")


@dataclass(frozen=True)
class Attempts:
    """How attempts are made: the rollout, and what surrounds each call of it."""

    rollout: Callable[..., Any]
    model: Any
    timeout: float | None = None
    retries: int = 0
    reward: RewardFunction | None = None
    seed: int | None = None

    async def make(self, scenario: Any, name: str, number: int) -> list[Trajectory]:
        """Run one attempt, and again while it fails and retries are left; score what it returned."""
        logs: list[str] = []
        for retry in range(self.retries + 1):
            seed = self._seed(name, number, retry)
            trajectories = await self._try(scenario, seed)
            failure = next((t.error for t in trajectories if t.error), None)
            if failure is None or retry == self.retries:
                break
            logs.append(f"try {retry + 1} failed and was repeated: {failure.type}: {failure.message}")
        for trajectory in trajectories:
            trajectory.scenario_id = name
            trajectory.logs[:0] = logs
            if seed is not None:
                trajectory.metadata.setdefault("seed", seed)
            if self.reward is not None:
                await score(trajectory, self.reward, scenario)
        return trajectories

    async def _try(self, scenario: Any, seed: int | None) -> list[Trajectory]:
        from artnb.recording import recording

        started, returned = time.time(), None
        token = _seed.set(seed)
        limit = asyncio.timeout(self.timeout)
        try:
            with recording() as recorder:
                try:
                    async with limit:
                        returned = await self._call(scenario)
                    if limit.expired():  # the rollout caught its own cancellation
                        raise TimeoutError
                    return _trajectories(returned, recorder, started)
                except NotAsync:
                    raise
                except (Exception, SystemExit) as error:
                    failure = Failure.from_exception(error)
                    if limit.expired():
                        message = f"the rollout took longer than timeout={self.timeout:g} s"
                        failure = Failure("TimeoutError", message, failure.traceback)
                    return _failed(failure, returned, recorder, started)
        finally:
            _seed.reset(token)

    async def _call(self, scenario: Any) -> Any:
        answer = self.rollout(self.model, scenario)
        if not inspect.isawaitable(answer):
            raise NotAsync(f"rollout returned {type(answer).__name__}, no awaitable. {_HOW_TO_BE_ASYNC}")
        return await answer

    def _seed(self, name: str, number: int, retry: int) -> int | None:
        if self.seed is None:
            return None
        text = f"{self.seed}/{name}/{number}/{retry}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1


def _trajectories(returned: Any, recorder: Any, started: float) -> list[Trajectory]:
    """The finished trajectories of what a rollout returned."""
    if returned is None or isinstance(returned, numbers.Real):
        reward = None if returned is None else float(returned)
        found = [Trajectory(reward=reward, started=started)]
    else:
        found = [returned] if isinstance(returned, Trajectory) else list(_members(returned))
    if len(found) == 1:
        recorder.fill(found[0])
    return _finished(found, started)


def _finished(found: Sequence[Trajectory], started: float) -> list[Trajectory]:
    """Close the episodes; they began with the rollout, also those that it made at its end."""
    for trajectory in found:
        trajectory.started = min(trajectory.started, started)
    return [trajectory.finish() for trajectory in found]


def _members(returned: Any) -> Sequence[Trajectory]:
    is_list = isinstance(returned, (list, tuple)) and len(returned) > 0
    if not is_list or not all(isinstance(member, Trajectory) for member in returned):
        what = "an empty list" if returned == [] else type(returned).__name__
        raise TypeError(
            f"the rollout returned {what}; return a Trajectory, a list of them, a number (the reward) or None"
        )
    return returned


def _failed(failure: Failure, returned: Any, recorder: Any, started: float) -> list[Trajectory]:
    """A failed attempt with everything that it returned or had recorded."""
    members = returned if isinstance(returned, (list, tuple)) else [returned]
    found = [m for m in members if isinstance(m, Trajectory)] or [Trajectory(started=started)]
    for trajectory in found:
        trajectory.messages_and_choices = _readable(trajectory.messages_and_choices)
        for history in trajectory.additional_histories:
            history.messages_and_choices = _readable(history.messages_and_choices)
        trajectory.error = trajectory.error or failure
    if len(found) == 1:
        recorder.fill(found[0])
    return _finished(found, started)


def _readable(items: list[Item]) -> list[Item]:
    """Items that can be stored: a foreign Choice, which has no tokens, becomes its message."""
    kept: list[Item] = []
    for item in items:
        if isinstance(item, (dict, Turn)):
            kept.append(item)
            continue
        try:
            kept.append(Turn.from_choice(item))
        except (ValueError, TypeError):
            kept.append({"role": "assistant", "content": str(getattr(item, "message", item))})
    return kept
