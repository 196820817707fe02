"""How are finished attempts kept in the run, and found again after a kill?

Attempts are written in the order in which they end, by one thread of their own, so that a slow disk
does not hold up the event loop. An attempt that an earlier process finished at the same step, for the
same scenario, with the same rollout, sampling and policy version is taken over instead of made again.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from artnb.attempts import Attempts
from artnb.rewards import Reward
from artnb.store.codec import encode
from artnb.store.run import Run
from artnb.store.trajectories import Stored
from artnb.types import RUN_OF_GATHER, Trajectory

Slot = tuple[int, int]
"""Index of a scenario, number of an attempt at it."""


class GatherLog:
    """What one gather writes to its model's run; without a run it keeps nothing."""

    def __init__(self, attempts: Attempts, split: str, on_problem: Callable[[], None]) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.split = split
        self.problem: BaseException | None = None
        """The first write that failed."""
        self._on_problem = on_problem
        self._attempts = attempts
        self._run: Run | None = getattr(attempts.model, "run", None)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="artnb-store") if self._run else None
        self._writes: set[asyncio.Future[Any]] = set()
        self._keys: dict[int, str] = {}
        self._code = code_key(attempts.rollout, attempts.reward)
        self.step = self._run.step if self._run else 0
        if self._run is not None:
            RUN_OF_GATHER[self.id] = self._run

    def append(self, scenario: Any, slot: Slot, trajectories: list[Trajectory]) -> None:
        """Write the trajectories of one attempt."""
        if self._run is None:
            return
        index, number = slot
        key = self._key(scenario, index)
        stored = [
            Stored(self.step, self.split, self.id, number, t, members=len(trajectories), key=key)
            for t in trajectories
        ]
        self._submit(self._run.append_attempt, stored)

    def event(self, kind: str, **fields: Any) -> None:
        """Record an event of this gather."""
        if self._run is not None:
            self._submit(functools.partial(self._run.record_event, kind, gather_id=self.id, **fields))

    async def earlier(self, slots: Iterable[tuple[Any, int, int]]) -> dict[Slot, list[Trajectory]]:
        """Finished attempts of an earlier process that fit (scenario, index, number); they count again."""
        if self._run is None or not self._run.has_earlier_rollouts:
            return {}
        stored = await self._submit(self._run.reusable, self.step, self.split)
        whole = _whole_attempts(stored, self._attempts.model.policy_version)
        found: dict[Slot, list[Trajectory]] = {}
        for scenario, index, number in slots:
            candidates = whole.get((self._key(scenario, index), number))
            if candidates:
                found[index, number] = candidates.pop(0)
        taken = [trajectory for trajectories in found.values() for trajectory in trajectories]
        if taken:
            await self._submit(self._run.reuse, taken, self.id)
        return found

    async def close(self) -> asyncio.CancelledError | None:
        """Wait for every write and let go of the file; returns a cancellation that came meanwhile."""
        if self._run is None or self._writer is None:
            return None
        self._submit(self._run.sync)
        cancelled: asyncio.CancelledError | None = None
        while self._writes:
            try:
                await asyncio.wait(self._writes)
            except asyncio.CancelledError as error:
                if cancelled is not None:
                    break  # asked twice: the thread goes on writing, nobody waits for it
                cancelled = error
        self._writer.shutdown(wait=False)
        return cancelled

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        assert self._writer is not None
        write = asyncio.get_running_loop().run_in_executor(self._writer, function, *arguments)
        self._writes.add(write)
        write.add_done_callback(self._on_written)
        return write

    def _on_written(self, write: asyncio.Future[Any]) -> None:
        self._writes.discard(write)
        error = None if write.cancelled() else write.exception()
        if error is not None and self.problem is None:
            self.problem = error
            self._on_problem()

    def _key(self, scenario: Any, index: int) -> str:
        """What must be equal for a stored attempt to be taken over."""
        if index not in self._keys:
            model = self._attempts.model
            facts = {
                "scenario": scenario.to_json() if hasattr(scenario, "to_json") else scenario,
                "code": self._code,
                "model": getattr(model, "name", None),
                "sampling": repr(getattr(model, "sampling", None)),
                "seed": self._attempts.seed,
            }
            self._keys[index] = hashlib.sha256(encode(facts).encode()).hexdigest()[:16]
        return self._keys[index]


def _whole_attempts(
    stored: list[Stored], policy_version: int
) -> dict[tuple[str, int], list[list[Trajectory]]]:
    """Complete, successful attempts under this policy by (key, number), in the order they were written."""
    attempts: dict[tuple[str, str, int], list[Stored]] = {}
    for one in stored:
        attempts.setdefault((one.gather_id, one.key, one.attempt), []).append(one)
    whole: dict[tuple[str, int], list[list[Trajectory]]] = {}
    for (_, key, number), members in attempts.items():
        versions = {turn.policy_version for one in members for turn in one.trajectory.turns}
        is_complete = bool(key) and len(members) == members[0].members
        if is_complete and versions == {policy_version} and not any(m.trajectory.error for m in members):
            whole.setdefault((key, number), []).append([m.trajectory for m in members])
    return whole


def code_key(*functions: Any) -> str:
    """A short text that changes when the code of one of these functions does."""
    facts = repr([_function_facts(function) for function in functions])
    return hashlib.sha256(facts.encode("utf-8", "replace")).hexdigest()


def _function_facts(function: Any) -> Any:
    if isinstance(function, functools.partial):
        return _function_facts(function.func), repr(function.args), repr(sorted(function.keywords.items()))
    if isinstance(function, Reward):
        return [(name, weight, _function_facts(part)) for name, (part, weight) in function.parts.items()]
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return getattr(function, "__qualname__", type(function).__qualname__), _code_facts(code)


def _code_facts(code: Any) -> Any:
    if code is None:
        return None
    constants = [_code_facts(c) if inspect.iscode(c) else _constant(c) for c in code.co_consts]
    return code.co_code.hex(), constants, code.co_names, code.co_varnames


def _constant(value: Any) -> str:
    return repr(sorted(value, key=repr)) if isinstance(value, frozenset) else repr(value)
