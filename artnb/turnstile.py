"""How does a notebook stay responsive while thousands of calls are ready at once? They take turns."""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakKeyDictionary

AT_ONCE = 8
"""Coroutines that go on in one turn of the event loop: about 10 ms of work for calls of a chat client."""


async def take_turn() -> None:
    """Wait until fewer than AT_ONCE others have gone on in this turn of the event loop; first come, first
    served. Heartbeats, clicks and interrupts get their turn in between."""
    await _of(asyncio.get_running_loop()).wait()


class _Turnstile:
    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._passed = 0
        self._is_scheduled = False

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._next_turn, loop)
        if self._passed < AT_ONCE and not self._waiting:
            self._passed += 1
            return
        future = loop.create_future()
        self._waiting.append(future)
        await future

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._passed = 0
        while self._waiting and self._passed < AT_ONCE:
            future = self._waiting.popleft()
            if not future.done():  # else it was cancelled
                future.set_result(None)
                self._passed += 1
        self._is_scheduled = self._passed > 0
        if self._is_scheduled:
            loop.call_soon(self._next_turn, loop)


_TURNSTILES: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turnstile] = WeakKeyDictionary()


def _of(loop: asyncio.AbstractEventLoop) -> _Turnstile:
    turnstile = _TURNSTILES.get(loop)
    if turnstile is None:
        turnstile = _TURNSTILES[loop] = _Turnstile()
    return turnstile
