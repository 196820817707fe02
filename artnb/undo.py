"""How does a training step, or a way back to a checkpoint, happen as a whole or not at all?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from artnb.errors import CheckpointError, Interrupted, RunInUse
from artnb.interrupts import to_its_end
from artnb.session import remember, session
from artnb.store import Checkpoint, Run
from artnb.store.random_sources import load_random_sources, save_random_sources

T = TypeVar("T")

_under_way: set[int] = set()
"""Ids of the backends of which a step is under way: undoing it would undo another one as well."""


def is_under_way(backend: Any) -> bool:
    """Whether a step of this backend is between its beginning and its end, in any thread."""
    return id(backend) in _under_way


async def whole_or_not_at_all(backend: Any, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``work``; whatever goes wrong or is interrupted before its last statement is undone.

    Raises Interrupted, also when ■ came too late to undo anything: ``partial`` then holds the result.
    Raises RunInUse while another step of this backend is under way.
    """
    if is_under_way(backend):
        raise RunInUse("a training step of this model is under way already: await it before the next one")
    _under_way.add(id(backend))
    try:
        return await _whole_or_not_at_all(backend, work)
    finally:
        _under_way.discard(id(backend))


async def _whole_or_not_at_all(backend: Any, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    before = await backend.snapshot()
    task = asyncio.create_task(work())
    async with session(task.cancel) as watch:
        try:
            result = remember(await task)
        except BaseException as error:
            is_undone = await to_its_end(_undo(backend, task, before))
            if is_undone and watch.interrupted and isinstance(error, asyncio.CancelledError):
                raise Interrupted(
                    "the step was interrupted and undone: the policy is the one before it. "
                    "Run the cell again to train on the same groups."
                ) from None
            raise
    if watch.interrupted:
        raise Interrupted("interrupted just after the step was finished and saved; it is on .partial", result)
    return result


async def keep_start(backend: Any, run: Run) -> None:
    """Keep the policy that a run begins with, before its first step, so that it can be gone back to.

    Only an adapter, which is small; all weights of a model that is trained as a whole are those of its base.
    Raises CheckpointError.
    """
    if run.step > 0 or getattr(backend, "trains_all", False) or run.start() is not None:
        return
    state = {"policy_version": backend.policy_version, "cursor": run.cursor}
    with run.writing_start(state) as folder:
        await to_its_end(backend.save(folder))
        save_random_sources(folder)


async def go_back(backend: Any, run: Run, checkpoint: Checkpoint) -> None:
    """Take backend and run back to a checkpoint; after an error both are as they were.

    Raises RunInUse while a step is under way, CheckpointError for a checkpoint that cannot be loaded.
    """
    if is_under_way(backend):
        raise RunInUse("a training step of this model is under way: await it before going back")
    checkpoint.verify()
    version, cursor = policy_version_of(checkpoint), dict(checkpoint.state.get("cursor") or {})
    before = await backend.snapshot()
    try:
        await backend.load(checkpoint.path, policy_version=version)
        run.roll_back(checkpoint.step)
    except BaseException:
        await backend.restore(before)
        raise
    run.cursor = cursor
    load_random_sources(checkpoint.path)


def policy_version_of(checkpoint: Checkpoint) -> int:
    """The version of the policy in a checkpoint. Raises CheckpointError when it does not say."""
    version = checkpoint.state.get("policy_version")
    if not isinstance(version, int):
        raise CheckpointError(
            f"{checkpoint.path} does not say its policy version: train_step did not write it"
        )
    return version


async def _undo(backend: Any, task: asyncio.Task[Any], before: Any) -> bool:
    """Stop the work and go back to ``before``; False when it had been finished already."""
    task.cancel()
    await asyncio.wait([task])
    is_unfinished = task.cancelled() or task.exception() is not None
    if is_unfinished:
        await backend.restore(before)
    return is_unfinished
