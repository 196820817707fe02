"""What does every primitive enter? One session, in which ■ and clicks are noticed while the cell awaits.

It is made of the interrupt's watch (``interrupts``), the comm pump (``comm_pump``), and a heartbeat: ten
times a second the loop wakes, because ipykernel's own SIGINT handler does not wake it (ipykernel#881).
Heavy work belongs into a worker thread meanwhile. What a primitive made is kept for ``last``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from artnb.comm_pump import comm_pump
from artnb.errors import Interrupted
from artnb.interrupts import Watch, watching

T = TypeVar("T")

HEARTBEAT_SECONDS = 0.1

_last: Any = None


@contextlib.asynccontextmanager
async def session(on_interrupt: Callable[[], object]) -> AsyncIterator[Watch]:
    """Call ``on_interrupt`` in this event loop on the first ■; see ``Watch.interrupted`` at the end."""
    with watching(on_interrupt) as watch, comm_pump() as turn:
        heartbeat = asyncio.create_task(_beat(turn))
        try:
            yield watch
        finally:
            heartbeat.cancel()
            await asyncio.wait([heartbeat])
            turn()  # a session shorter than a heartbeat hears what was clicked, too


async def _beat(turn: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        turn()


async def until_resumed(run: Any, watch: Watch) -> bool:
    """Wait while a person has paused the run; resume, stop, the file STOP and ■ end the waiting.

    True when stop ended it.
    """
    controls = getattr(run, "controls", None)
    if controls is None or not controls.paused:
        return False
    while controls.paused and not watch.interrupted and not run.has_stop_file:
        await asyncio.sleep(HEARTBEAT_SECONDS)
    return controls.stop or run.has_stop_file


async def hold(run: Any) -> None:
    """Wait while a person has paused the run, before a step whose rollouts are there: stop lets it be taken.

    Raises Interrupted on ■.
    """
    if not run.controls.paused:
        return
    async with session(lambda: None) as watch:
        await until_resumed(run, watch)
    if watch.interrupted:
        raise Interrupted("interrupted while the run was paused: this step was not begun")


def remember(result: T) -> T:
    """Keep what a primitive finished, wholly or in part, for ``last``."""
    global _last
    _last = result
    return result


def last() -> Any:
    """What the latest primitive of this process finished, also when it was interrupted or raised.

    Groups of ``gather``, a StepResult of ``train_step`` or ``sft_step``, an Evaluation of ``evaluate``; their
    ``status`` says whether they are complete. A step that was undone finished nothing: after it this is
    still what came before, such as the groups to train on again.
    """
    return _last
