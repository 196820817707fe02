"""How do buttons work while a cell awaits? Their comm messages are handled at once, not after the cell.

ipykernel hands out one shell message at a time, so that a click waits for the running cell. From 7.4 on
it makes an exception for comm messages; for 6.x and 7.0 to 7.3 this pump does, while a primitive runs.
6.x keeps what waits in a queue, which is looked through at every heartbeat; 7.x lets it wait for a lock,
which is opened while another one lets only comm messages pass. All of it happens to this process's kernel
object and is taken back at the end. The environment variable ARTNB_COMM_PUMP=0 switches it off.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from artnb.ui.display import kernel as find_kernel

_COMM = ("comm_open", "comm_msg", "comm_close")
_SEES_TO_IT_ITSELF = (7, 4)


class _Pump:
    """Handles comm messages of a kernel in the middle of a cell."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.users = 0

    def start(self) -> None:
        """Take hold of the kernel; raises what comes of one that is built otherwise."""

    def stop(self) -> None:
        """Let go of it."""

    def turn(self) -> None:
        """Handle what waits; called at every heartbeat."""

    def is_heard(self, frames: list[Any]) -> bool:
        """Whether this message, going the kernel's own way, arrives at the pump. It is not handled."""
        raise NotImplementedError

    def is_comm(self, frames: Sequence[Any]) -> bool:
        """Look at the header only: a message that is read in full counts as received."""
        session = self.kernel.session
        try:
            _, rest = session.feed_identities(frames, copy=False)
            kind = session.deserialize(rest, content=False, copy=False)["msg_type"]
        except (ValueError, TypeError, KeyError, IndexError):  # the kernel will say what is wrong with it
            return False
        return kind in _COMM

    def handle(self, frames: Sequence[Any]) -> None:
        """Do what the kernel would do after the cell, and leave the cell's output where it belongs."""
        kernel = self.kernel
        cell = kernel._parent_ident["shell"], kernel.get_parent("shell")
        _flush()
        try:
            idents, rest = kernel.session.feed_identities(frames, copy=False)
            message = kernel.session.deserialize(rest, copy=False)
            kernel.set_parent(idents, message, channel="shell")
            kernel._publish_status("busy", "shell")
            kernel.shell_handlers[message["msg_type"]](kernel.shell_stream, idents, message)
            _flush()
            kernel._publish_status("idle", "shell")
        except Exception:  # one message's, as for the kernel itself
            kernel.log.error("a comm message failed", exc_info=True)
        finally:
            kernel.set_parent(*cell, channel="shell")
            kernel._publish_status("busy", "shell")  # the cell goes on


class _QueuePump(_Pump):
    """ipykernel 6: messages wait in ``msg_queue`` as (number, what dispatches them, its arguments)."""

    def turn(self) -> None:
        queue, waiting = self.kernel.msg_queue, []
        while queue.qsize():
            waiting.append(queue.get_nowait())
        comms = [self._comm(item) for item in waiting]
        for item, frames in zip(waiting, comms, strict=True):
            if frames is None:
                queue.put_nowait(item)
        for frames in comms:
            if frames is not None:
                self.handle(frames)

    def _comm(self, item: Any) -> Any:
        """The frames of a waiting comm message, None for everything else."""
        _, dispatch, arguments = item
        is_shell = dispatch == self.kernel.dispatch_shell and len(arguments) == 1
        return arguments[0] if is_shell and self.is_comm(arguments[0]) else None

    def is_heard(self, frames: list[Any]) -> bool:
        kind, real = type(self.kernel), self.kernel.msg_queue
        # Not into the real queue: where no cell is running, the kernel would be quicker.
        stand_in = SimpleNamespace(
            _message_counter=itertools.count(), msg_queue=type(real)(), io_loop=self.kernel.io_loop
        )
        kind.schedule_dispatch(stand_in, self.kernel.dispatch_shell, frames)
        return self._comm(stand_in.msg_queue.get_nowait()) is frames


class _LockPump(_Pump):
    """ipykernel 7.0 to 7.3: messages wait for ``_main_asyncio_lock`` and then go to ``dispatch_shell``."""

    _lock: Any = None
    _heard: Any = None
    _test: Any = None

    def start(self) -> None:
        if "dispatch_shell" in vars(self.kernel):
            raise AttributeError("dispatch_shell has been replaced by another package")
        self._dispatch = self.kernel.dispatch_shell
        self._lock, self.kernel._main_asyncio_lock = self.kernel._main_asyncio_lock, contextlib.nullcontext()
        self.kernel.dispatch_shell = self._dispatch_in_turn

    def stop(self) -> None:
        if self._lock is not None:
            self.kernel._main_asyncio_lock = self._lock
            del self.kernel.dispatch_shell

    async def _dispatch_in_turn(self, frames: Any, /, subshell_id: str | None = None) -> None:
        if subshell_id is not None:  # in that subshell's thread, which has a lock of its own
            await self._dispatch(frames, subshell_id=subshell_id)
        elif frames is self._test:
            self._heard = frames if self.is_comm(frames) else None
        elif self._lock.locked() and self.is_comm(frames):
            self.handle(frames)
        else:
            async with self._lock:
                await self._dispatch(frames, subshell_id=None)

    def is_heard(self, frames: list[Any]) -> bool:
        self._test = frames
        arrival = self.kernel.shell_main(None, frames)
        try:
            arrival.send(None)
        except StopIteration:
            return self._heard is frames
        arrival.close()  # it waits for something: the lock is not the one that was opened
        return False


_running: dict[int, _Pump] = {}
"""Pumps at work by the id of their kernel: there is one kernel in a process, outside of tests."""


@contextlib.contextmanager
def comm_pump() -> Iterator[Callable[[], None]]:
    """While inside, comm messages are handled although a cell is running.

    Yields what is to be called at every heartbeat. Does nothing outside a kernel's own event loop, with
    an ipykernel that needs no help, and, after a warning, with one that is not as it is known here.
    """
    kernel = _kernel_in_need()
    pump = None if kernel is None else _running.get(id(kernel)) or _started(kernel)
    if pump is None:
        yield lambda: None
        return
    _running[id(kernel)] = pump
    pump.users += 1
    try:
        yield pump.turn
    finally:
        pump.users -= 1
        if not pump.users:
            del _running[id(kernel)]
            pump.stop()


def _kernel_in_need() -> Any:
    kernel = find_kernel()
    version = getattr(sys.modules.get("ipykernel"), "version_info", ())[:2]
    if kernel is None or not (6,) <= version < _SEES_TO_IT_ITSELF or os.environ.get("ARTNB_COMM_PUMP") == "0":
        return None
    loop = getattr(getattr(kernel, "io_loop", None), "asyncio_loop", None)
    return kernel if loop is asyncio.get_running_loop() else None


def _started(kernel: Any) -> _Pump | None:
    """A pump that was seen to work, or None and a warning."""
    pump = _LockPump(kernel) if hasattr(kernel, "_main_asyncio_lock") else _QueuePump(kernel)
    problem = "its messages go another way"
    try:
        pump.start()
        if pump.is_heard(_comm_message(kernel)) and _handlers_return_at_once(kernel):
            return pump
    except (AttributeError, TypeError, ValueError, LookupError, AssertionError) as error:
        problem = f"{type(error).__name__}: {error}"
    pump.stop()
    warnings.warn(
        f"buttons will be answered only after the cell: this ipykernel is not as artnb knows it ({problem}). "
        "ipykernel 7.4 or newer needs no help; ARTNB_COMM_PUMP=0 silences this.",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _comm_message(kernel: Any) -> list[Any]:
    """A signed message to no comm, as it comes from the socket; it is never handled."""
    import zmq

    session = kernel.session
    content = {"comm_id": "artnb", "data": {}}
    return [zmq.Frame(part) for part in session.serialize(session.msg("comm_msg", content), ident=[b"artnb"])]


def _handlers_return_at_once(kernel: Any) -> bool:
    return not any(inspect.iscoroutinefunction(kernel.shell_handlers[kind]) for kind in _COMM)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
