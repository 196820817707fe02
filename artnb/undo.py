"""How does a training step happen as a whole or not at all, also when ■ is pressed in its middle?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from artnb.errors import Interrupted, RunInUse
from artnb.interrupts import to_its_end
from artnb.session import remember, session

T = TypeVar("T")

_under_way: set[int] = set()
"""Ids of the backends of which a step is under way: undoing it would undo another one as well."""


async def whole_or_not_at_all(backend: Any, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``work``; whatever goes wrong or is interrupted before its last statement is undone.

    Raises Interrupted, also when ■ came too late to undo anything: ``partial`` then holds the result.
    Raises RunInUse while another step of this backend is under way.
    """
    if id(backend) in _under_way:
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


async def _undo(backend: Any, task: asyncio.Task[Any], before: Any) -> bool:
    """Stop the work and go back to ``before``; False when it had been finished already."""
    task.cancel()
    await asyncio.wait([task])
    is_unfinished = task.cancelled() or task.exception() is not None
    if is_unfinished:
        await backend.restore(before)
    return is_unfinished
