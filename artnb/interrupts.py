"""How does ■ (SIGINT) reach work that is awaited, without killing the loop it runs on?

While a primitive runs on the main thread, SIGINT calls back into its event loop instead of raising
KeyboardInterrupt somewhere inside it. A second SIGINT goes to the handler that was there before
(ipykernel's, asyncio.run's or Python's own), and so does every SIGINT once no primitive is running.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

from artnb.errors import Interrupted

T = TypeVar("T")


class Watch:
    """One primitive that wants to hear of an interrupt."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.interrupted = False
        """True once ■ was pressed, also when the callback has not run yet."""
        self._callback = callback
        self._loop = asyncio.get_running_loop()

    def interrupt(self) -> None:
        """Mark the interrupt and wake the loop; safe in a signal handler and from any thread."""
        self.interrupted = True
        with contextlib.suppress(RuntimeError):  # the loop has just been closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._callback)


_watches: list[Watch] = []
_previous: Any = signal.SIG_DFL


def _handle(number: int, frame: FrameType | None) -> None:
    untold = [watch for watch in _watches if not watch.interrupted]
    for watch in untold:
        watch.interrupt()
    if untold or _previous is signal.SIG_IGN:
        return
    if callable(_previous):
        _previous(number, frame)
    else:
        raise KeyboardInterrupt


@contextlib.contextmanager
def watching(callback: Callable[[], object]) -> Iterator[Watch]:
    """Call ``callback`` in this event loop when the user interrupts; see ``Watch.interrupted`` at the end."""
    watch = Watch(callback)
    _watches.append(watch)
    _install()
    try:
        yield watch
    finally:
        _watches.remove(watch)
        if not _watches:
            _uninstall()


def _install() -> None:
    global _previous
    if threading.current_thread() is not threading.main_thread():
        return
    current = signal.getsignal(signal.SIGINT)
    if current is _handle or current is None or current is signal.SIG_IGN:
        return  # already ours, not Python's to change, or the process was told to ignore it
    with contextlib.suppress(ValueError):  # a sub-interpreter may not set handlers
        signal.signal(signal.SIGINT, _handle)
        _previous = current


def _uninstall() -> None:
    # Someone else's later handler stays; if they restore ours after this, it passes everything on.
    is_ours = signal.getsignal(signal.SIGINT) is _handle
    if is_ours and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _previous)


_is_deferring = False


@contextlib.contextmanager
def uninterrupted(what: str) -> Iterator[None]:
    """Let work that cannot be cut short end before ■ is heard: then raise Interrupted, which names it.

    Cut off in the middle it would leave a second model in memory, or a run that nobody gives back. A
    second ■ goes to the handler that was there before. Outside of the main thread nothing changes.
    """
    global _is_deferring
    previous = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if _is_deferring or not is_main or previous is None or previous is signal.SIG_IGN:
        yield
        return
    heard: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if len(heard) > 1 and callable(previous):
            previous(number, frame)
        elif len(heard) > 1:
            raise KeyboardInterrupt

    _is_deferring = True
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        _is_deferring = False
    if heard:
        raise Interrupted(f"{what} cannot be cut short: it is finished. Run the cell again to go on.")


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work that must not be cut short; a cancellation is raised once it has ended."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # the cancellation is what the caller hears of
        raise cancelled
    return task.result()
