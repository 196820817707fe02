"""How are many rollouts run at once? Concurrently, bounded, each kept as it finishes, failures as values."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from artnb.attempts import Attempts, check_rollout, scenario_id
from artnb.errors import ConfigurationError, Interrupted, Stopped, TooManyFailures
from artnb.gather_log import GatherLog
from artnb.rewards import RewardFunction
from artnb.session import remember, session, until_resumed
from artnb.store.controls import GATHERING
from artnb.types import Failure, Groups, Trajectory, TrajectoryGroup

Rollout = Callable[[Any, Any], Awaitable["Trajectory | list[Trajectory] | float | None"]]

_GRACE_SECONDS = 5.0
"""How long a cancelled rollout may clean up before it is cancelled again."""
_LAST_GRACE_SECONDS = 1.0
"""The same after a second ■ or another cancellation of ``gather`` itself."""
_PATIENCE = 3
"""How often it is cancelled before gather goes on without it."""
_Slot = tuple[int, int]  # index of the scenario, number of the attempt


async def gather(
    rollout: Rollout,
    scenarios: Iterable[Any],
    *,
    model: Any,
    group_size: int = 8,
    concurrency: int = 256,
    timeout: float | None = None,
    time_limit: float | None = None,
    retries: int = 0,
    max_failures: int | float | None = 0.5,
    split: str = "train",
    reward: RewardFunction | None = None,
    on_interrupt: Literal["raise", "return"] = "raise",
    progress: bool = True,
    seed: int | None = None,
) -> Groups:
    """Run ``group_size`` attempts at each scenario, at most ``concurrency`` at once.

    ``rollout(model, scenario)`` returns a Trajectory, a list of them (grouped by seat), a number (the
    reward of the calls it made), or None. One that raises, or takes longer than ``timeout`` seconds
    in all its ``retries``, becomes a trajectory with an ``error``. Groups come in the order of the
    scenarios, and each is written to ``model.run`` attempt by attempt.

    max_failures: the number (int) or share (float) of attempts that may fail; None for no limit.
        One more cancels and awaits the others, and raises TooManyFailures.
    reward: scores finished trajectories that have no reward.
    time_limit: seconds for all of it; what has not finished by then is cancelled.
    on_interrupt: after ■ ``raise`` Interrupted, after time_limit Stopped; or ``return`` the finished
        groups with status ``interrupted`` or ``timeout``. Rollouts that are cut off leave nothing.
    seed: gives every attempt its own ``artnb.attempts.attempt_seed()``.
    """
    check_rollout(rollout)
    listed = _checked_scenarios(scenarios)
    _check_counts(group_size=(group_size, 1), concurrency=(concurrency, 1), retries=(retries, 0))
    _check_options(timeout, time_limit, reward, on_interrupt)
    attempts = Attempts(rollout, model, timeout, retries, reward, seed)
    asked = _asked_of(model, split)
    group_size, concurrency = asked.get("group_size", group_size), asked.get("concurrency", concurrency)
    sizes = [asked.get("group_sizes", {}).get(scenario_id(s, i), group_size) for i, s in enumerate(listed)]
    allowed = _allowed_failures(max_failures, sum(sizes))
    work = _Gathering(attempts, listed, sizes, concurrency, allowed, split)
    groups = await work.run(progress=progress, time_limit=time_limit)
    if work.problem is not None:
        raise work.problem
    if groups.status == "complete" or on_interrupt == "return":
        return groups
    what = (
        f"{work.done} of {work.total} rollouts are finished, on .partial and artnb.last(). Model and run are "
        "ready for the next cell."
    )
    if work.is_stopped:
        raise Stopped(
            "the run was stopped while it was paused, so this gather began nothing. Run the cell to go on.",
            partial=groups,
        )
    if groups.status == "timeout":
        raise Stopped(f"gather reached its time_limit of {time_limit:g} s: {what}", partial=groups)
    raise Interrupted(f"gather was interrupted: {what}", partial=groups)


def _asked_of(model: Any, split: str) -> dict[str, Any]:
    """What a person or a rule set; an evaluation keeps its own number of attempts."""
    controls = getattr(getattr(model, "run", None), "controls", None)
    if controls is None:
        return {}
    asked = controls.given(GATHERING) | {"group_sizes": controls.group_sizes}
    return asked if split == "train" else {k: v for k, v in asked.items() if k == "concurrency"}


def _checked_scenarios(scenarios: Iterable[Any]) -> list[Any]:
    if isinstance(scenarios, (str, bytes, Mapping)) or not isinstance(scenarios, Iterable):
        raise ConfigurationError(
            f"scenarios must be a list, got {type(scenarios).__name__}. For a single one pass [scenario]."
        )
    listed = list(scenarios)
    if not listed:
        raise ConfigurationError("scenarios is empty: there is nothing to roll out. Pass at least one.")
    return listed


def _check_counts(**counts: tuple[int, int]) -> None:
    for name, (value, least) in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name} must be a whole number >= {least}, got {value!r}")


def _check_options(timeout: float | None, time_limit: float | None, reward: Any, on_interrupt: str) -> None:
    for name, seconds in (("timeout", timeout), ("time_limit", time_limit)):
        if seconds is not None and not seconds > 0:
            raise ConfigurationError(f"{name} must be a number of seconds > 0, or None; got {seconds!r}")
    if reward is not None and not callable(reward):
        raise ConfigurationError(
            f"reward must be a function of a trajectory, or a Reward; got {type(reward).__name__}"
        )
    if on_interrupt not in ("raise", "return"):
        raise ConfigurationError(f"on_interrupt must be 'raise' or 'return', got {on_interrupt!r}")


def _allowed_failures(limit: int | float | None, total: int) -> float:
    if limit is None:
        return math.inf
    is_share = isinstance(limit, float)
    if isinstance(limit, bool) or not limit >= 0 or (is_share and limit > 1):
        raise ConfigurationError(
            f"max_failures must be a number of rollouts (int) or a share between 0.0 and 1.0, got {limit!r}"
        )
    return math.floor(limit * total) if is_share else limit


class _Gathering:
    """One call of gather: what is waiting, running and finished."""

    def __init__(
        self,
        attempts: Attempts,
        scenarios: list[Any],
        group_sizes: list[int],
        concurrency: int,
        allowed_failures: float,
        split: str,
    ) -> None:
        self.attempts = attempts
        self.scenarios = scenarios
        self.names = [scenario_id(scenario, index) for index, scenario in enumerate(scenarios)]
        self.total = sum(group_sizes)
        self.group_sizes = group_sizes
        self.concurrency = concurrency
        self.allowed_failures = allowed_failures
        self.split = split
        self.problem: BaseException | None = None
        self.is_late = False
        self.is_stopped = False
        """True when a person stopped the run while it was paused: nothing is begun."""
        self.finished: dict[_Slot, list[Trajectory]] = {}
        self._failures: list[Failure] = []
        self._rewards: list[float] = []
        self._tokens = 0
        self._running: dict[asyncio.Task[list[Trajectory] | None], _Slot] = {}
        self._cancelled: set[asyncio.Task[list[Trajectory] | None]] = set()
        self._ended: list[asyncio.Task[list[Trajectory] | None]] = []
        self._wake = asyncio.Event()
        self._log = GatherLog(attempts, split, self._wake.set)

    @property
    def done(self) -> int:
        return len(self.finished)

    async def run(self, *, progress: bool, time_limit: float | None) -> Groups:
        """Run everything; sets ``problem`` when there is something to raise afterwards."""
        from artnb.ui.display import Progress

        started = time.monotonic()
        bar = Progress(self.total, f"gather {self.split}", enabled=progress)
        cancelled: asyncio.CancelledError | None = None
        async with session(self._wake.set) as watch:
            self._watch = watch
            run = getattr(self.attempts.model, "run", None)
            self.is_stopped = run is not None and await until_resumed(run, watch) and run.takes_stop()
            started = time.monotonic()
            timer = time_limit and asyncio.get_running_loop().call_later(time_limit, self._expire)
            try:
                await self._work(bar)
            except asyncio.CancelledError as error:
                cancelled = error
            except BaseException as error:  # raised once nothing runs any more
                self.problem = error
            finally:
                if timer:
                    timer.cancel()
            cancelled = await self._drain() or cancelled
            groups = remember(self._groups(self._status(cancelled), time.monotonic() - started))
            self._log.event("gather", **self._facts(groups))
            cancelled = await self._log.close() or cancelled
            self.problem = self.problem or self._log.problem
        if watch.interrupted and self.problem is None and groups.status == "complete":
            groups.status = "interrupted"
        bar.finish("" if groups.status == "complete" else groups.status)
        if isinstance(self.problem, TooManyFailures):
            self.problem.partial = groups
        if cancelled is not None:
            raise cancelled
        return groups

    def _facts(self, groups: Groups) -> dict[str, Any]:
        return {
            "step": self._log.step,
            "split": self.split,
            "status": groups.status,
            "done": self.done,
            "total": self.total,
            "failed": len(self._failures),
            "seconds": groups.seconds,
        }

    def _status(self, cancelled: asyncio.CancelledError | None) -> str:
        if self._watch.interrupted:
            return "interrupted"
        if self.problem is not None or cancelled is not None or self.is_stopped:
            return "stopped"
        return "timeout" if self.is_late and self.done < self.total else "complete"

    def _expire(self) -> None:
        self.is_late = True
        self._wake.set()

    # While it goes well

    async def _work(self, bar: Any) -> None:
        await self._reuse()
        waiting = self._waiting()
        while not self._watch.interrupted and not self._is_over and self.problem is None:
            self._start(waiting)
            if not self._running:
                return
            await self._wake.wait()
            self._wake.clear()
            self._collect()
            mean = sum(self._rewards) / len(self._rewards) if self._rewards else None
            bar.update(self.done, len(self._failures), mean, self._tokens)

    @property
    def _is_over(self) -> bool:
        return self.is_late or self.is_stopped

    def _waiting(self) -> Iterator[_Slot]:
        for index, size in enumerate(self.group_sizes):
            for number in range(size):
                if (index, number) not in self.finished:
                    yield index, number

    def _start(self, waiting: Iterator[_Slot]) -> None:
        while len(self._running) < self.concurrency:
            slot = next(waiting, None)
            if slot is None:
                return
            task = asyncio.create_task(self._attempt(*slot))
            task.add_done_callback(self._on_end)
            self._running[task] = slot

    def _on_end(self, task: asyncio.Task[list[Trajectory] | None]) -> None:
        self._ended.append(task)
        self._wake.set()

    async def _attempt(self, index: int, number: int) -> list[Trajectory] | None:
        try:
            return await self.attempts.make(self.scenarios[index], self.names[index], number)
        except KeyboardInterrupt:  # raised inside blocking code of the rollout: the user pressed ■
            self._watch.interrupt()
            return None

    def _collect(self) -> None:
        """Take in every task that has ended."""
        ended, self._ended = self._ended, []
        for task in ended:
            slot = self._running.pop(task)
            if task in self._cancelled:
                # Whatever it made of its cancellation is neither a result nor a failure.
                if not task.cancelled():
                    task.exception()
                continue
            error = _self_cancelled(self.names[slot[0]]) if task.cancelled() else task.exception()
            if error is not None:
                self.problem = self.problem or error
            elif (trajectories := task.result()) is not None:
                self._take(slot, trajectories)
                self._log.append(self.scenarios[slot[0]], slot, trajectories)
        self.problem = self.problem or self._log.problem

    def _take(self, slot: _Slot, trajectories: list[Trajectory]) -> None:
        self.finished[slot] = trajectories
        self._tokens += sum(trajectory.completion_tokens for trajectory in trajectories)
        self._rewards += [t.reward for t in trajectories if t.is_scored and t.reward is not None]
        failure = next((t.error for t in trajectories if t.error), None)
        if failure is None:
            return
        self._failures.append(failure)
        if len(self._failures) > self.allowed_failures and self.problem is None:
            kinds = Counter(f"{f.type}: {_first_line(f.message)}" for f in self._failures)
            kind, count = kinds.most_common(1)[0]
            self.problem = TooManyFailures(
                f"{len(self._failures)} of {self.total} rollouts failed, {self.allowed_failures:g} may "
                f"(max_failures). Most often ({count}): {kind}. Finished rollouts are on .partial and "
                "artnb.last(); each group's .exceptions hold the tracebacks."
            )

    # When it ends early

    async def _drain(self) -> asyncio.CancelledError | None:
        """Cancel what still runs and wait for it; returns a cancellation that came meanwhile."""
        cancelled: asyncio.CancelledError | None = None
        patience = _PATIENCE
        self._collect()
        while self._running and patience > 0:
            fresh = [task for task in self._running if task not in self._cancelled]
            for task in fresh or list(self._running):
                if task.cancel():
                    self._cancelled.add(task)
            patience -= 1
            try:
                grace = _GRACE_SECONDS if cancelled is None else _LAST_GRACE_SECONDS
                await asyncio.wait(self._running, timeout=grace)
            except asyncio.CancelledError as error:
                patience = min(patience, 1) if cancelled is None else 0
                cancelled = error
            self._collect()
        if self._running:
            names = sorted({self.names[index] for index, _ in self._running.values()})
            self._log.event(
                "warning", message=f"rollouts did not end when cancelled; scenarios {', '.join(names[:5])}"
            )
        return cancelled

    # Results

    def _groups(self, status: str, seconds: float) -> Groups:
        found: dict[tuple[int, str], TrajectoryGroup] = {}
        metadata = {"gather_id": self._log.id, "split": self.split, "step": self._log.step}
        for index, number in sorted(self.finished):
            for trajectory in self.finished[index, number]:
                seat = trajectory.seat
                group = found.setdefault(
                    (index, seat), TrajectoryGroup([], self.names[index], seat, dict(metadata))
                )
                group.trajectories.append(trajectory)
        groups = Groups(found.values())
        groups.status, groups.seconds = status, seconds
        return groups

    async def _reuse(self) -> None:
        """Take over attempts that a killed process had finished at this very step."""
        slots = [(self.scenarios[index], index, number) for index, number in self._waiting()]
        for slot, trajectories in (await self._log.earlier(slots)).items():
            self._take(slot, trajectories)


def _self_cancelled(name: str) -> asyncio.CancelledError:
    return asyncio.CancelledError(f"the rollout of scenario {name} was cancelled, and not by gather")


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:200]
