"""How does the real openai client reach a model in this process, without a socket?

Its HTTP transport calls the ChatApp directly. openai 2.x is built on httpx and 3.x on httpx2; the
transport is made for whichever the installed one uses.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import importlib
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from artnb.completions import ChatApp, Reply
from artnb.turnstile import take_turn

if TYPE_CHECKING:
    import openai

T = TypeVar("T")
LoopGetter = Callable[[], asyncio.AbstractEventLoop | None]
_URL = "http://in-process.invalid/v1"
_KEY = "in-process"
"""The client insists on a key; nothing reads it."""


def async_client(app: ChatApp) -> openai.AsyncOpenAI:
    """An ``openai.AsyncOpenAI`` whose calls are coroutines of this app.

    They run in the caller's task: cancelling the call cancels the sampling, and ``recording()``
    around it sees it.
    """
    import openai

    http_client = _httpx().AsyncClient(transport=_async_transport()(app), timeout=None)
    client = openai.AsyncOpenAI(
        api_key=_KEY, base_url=_URL, http_client=http_client, max_retries=0, timeout=None
    )
    create = client.chat.completions.create

    @functools.wraps(create)
    async def quick_create(**body: Any) -> Any:
        await take_turn()
        return await create(**_past_the_transform(body))

    client.chat.completions.create = quick_create  # type: ignore[method-assign]
    return client


def _past_the_transform(body: dict[str, Any]) -> dict[str, Any]:
    """Send plain messages as ``extra_body``, which openai takes as it is.

    It walks through ``messages`` entry by entry to serialise objects of its own, which costs more
    than all the rest of a call; dicts and strings come out as they went in.
    """
    messages = body.get("messages")
    if not (isinstance(messages, list) and _is_plain(messages)):
        return body
    extra = {"messages": messages, **(body.get("extra_body") or {})}
    return {**body, "messages": [], "extra_body": extra}


def _is_plain(value: Any) -> bool:
    """True for what json.dumps takes without help."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float))


def sync_client(app: ChatApp, loop_getter: LoopGetter) -> openai.OpenAI:
    """An ``openai.OpenAI`` that runs each call on another thread's event loop and waits for it.

    ``loop_getter`` returns the loop that the model works on; when it returns None or a loop that is
    not running, a private one is started. Calling it on a thread that itself runs an event loop
    raises RuntimeError, because that loop would stand still.
    """
    http_client = _httpx().Client(transport=_sync_transport()(app, _Bridge(loop_getter)), timeout=None)
    return _sync_openai()(api_key=_KEY, base_url=_URL, http_client=http_client, max_retries=0, timeout=None)


@cache
def _httpx() -> ModuleType:
    """The HTTP package that the installed openai builds on."""
    import openai

    parents = openai.DefaultAsyncHttpxClient.__mro__
    return importlib.import_module(
        next(c for c in parents if c.__name__ == "AsyncClient").__module__.split(".")[0]
    )


@cache
def _async_transport() -> Any:
    httpx = _httpx()

    class InProcessTransport(httpx.AsyncBaseTransport):  # type: ignore[name-defined]
        def __init__(self, app: ChatApp) -> None:
            self._app = app

        async def handle_async_request(self, request: Any) -> Any:
            call = self._app.reply(request.method, request.url.path, await request.aread())
            reply = await within(call, request)
            if reply.chunks is None:
                return _response(reply, request, content=reply.encode())
            return _response(reply, request, stream=Events(reply.events(), request))

    class Events(httpx.AsyncByteStream):  # type: ignore[name-defined]
        def __init__(self, events: AsyncGenerator[bytes], request: Any) -> None:
            self._events, self._request = events, request

        async def __aiter__(self) -> AsyncIterator[bytes]:
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    yield await within(anext(self._events), self._request)

        async def aclose(self) -> None:
            await self._events.aclose()

    async def within(call: Awaitable[T], request: Any) -> T:
        limit = _time_limit(request)
        try:
            return await (call if limit is None else asyncio.wait_for(call, limit))
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no answer within {limit} s", request=request) from error

    return InProcessTransport


@cache
def _sync_transport() -> Any:
    httpx = _httpx()

    class InProcessSyncTransport(httpx.BaseTransport):  # type: ignore[name-defined]
        def __init__(self, app: ChatApp, bridge: _Bridge) -> None:
            self._app = app
            self._bridge = bridge

        def handle_request(self, request: Any) -> Any:
            answer = _answer(self._app, request.method, request.url.path, request.read())
            found = self._bridge.each(answer, _time_limit(request))
            with timed(request):
                reply = next(found)
            if reply.chunks is not None:
                return _response(reply, request, stream=Events(found, request))
            found.close()
            return _response(reply, request, content=reply.encode())

        def close(self) -> None:
            self._bridge.close()

    class Events(httpx.SyncByteStream):  # type: ignore[name-defined]
        def __init__(self, events: Generator[Any], request: Any) -> None:
            self._events, self._request = events, request

        def __iter__(self) -> Iterator[Any]:
            with timed(self._request):
                yield from self._events

        def close(self) -> None:
            self._events.close()

    @contextlib.contextmanager
    def timed(request: Any) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            words = f"no answer within {_time_limit(request)} s"
            raise httpx.ReadTimeout(words, request=request) from error

    return InProcessSyncTransport


async def _answer(app: ChatApp, method: str, path: str, content: bytes) -> AsyncGenerator[Any]:
    """The reply, and the events of its stream if it is one."""
    reply = await app.reply(method, path, content)
    yield reply
    if reply.chunks is not None:
        async with contextlib.aclosing(reply.events()) as events:
            async for event in events:
                yield event


@cache
def _sync_openai() -> Any:
    import openai

    class InProcessOpenAI(openai.OpenAI):
        def _prepare_options(self, options: Any) -> Any:
            _refuse_running_loop()  # here, because openai hides errors of the transport
            return super()._prepare_options(options)

    return InProcessOpenAI


def _response(reply: Reply, request: Any, **body: Any) -> Any:
    headers = {"content-type": reply.content_type}
    return _httpx().Response(reply.status, headers=headers, request=request, **body)


def _time_limit(request: Any) -> float | None:
    return request.extensions.get("timeout", {}).get("read")


def _refuse_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "the sync client would block the event loop that runs this code. Use `await "
        "model.client.chat.completions.create(...)`, or call the sync client in asyncio.to_thread(...)."
    )


class _Bridge:
    """Has a loop of another thread work, in the caller's context."""

    def __init__(self, loop_getter: LoopGetter) -> None:
        self._loop_getter = loop_getter
        self._private: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def each(self, items: AsyncGenerator[T], limit: float | None) -> Generator[T]:
        """Items as they come, each within ``limit`` seconds; closing this ends them. Raises TimeoutError."""
        loop = self._loop()
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        tasks: list[asyncio.Task[None]] = []

        async def pass_on() -> None:
            async with contextlib.aclosing(items):
                async for item in items:
                    found.put(item)

        def start() -> None:
            task = loop.create_task(pass_on(), context=context)
            tasks.append(task)
            task.add_done_callback(lambda finished: _pass_on(finished, done))

        def stop() -> None:
            for task in tasks:
                task.cancel()

        context = contextvars.copy_context()
        done.add_done_callback(found.put)
        loop.call_soon_threadsafe(start)
        try:
            while (item := found.get(timeout=limit)) is not done:
                yield item
            done.result()
        except queue.Empty:
            raise TimeoutError from None
        finally:
            if not done.done():  # a time limit, KeyboardInterrupt, or closed: the sampling must not go on
                loop.call_soon_threadsafe(stop)

    def close(self) -> None:
        with self._lock:
            loop, self._private = self._private, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop_getter()
        if loop is not None and loop.is_running():
            return loop
        with self._lock:
            if self._private is None:
                self._private = asyncio.new_event_loop()
                threading.Thread(
                    target=_run_loop, args=(self._private,), name="artnb-sync-client", daemon=True
                ).start()
            return self._private


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _pass_on(task: asyncio.Task[T], done: concurrent.futures.Future[T]) -> None:
    if task.cancelled():
        done.cancel()
    elif error := task.exception():
        done.set_exception(error)
    else:
        done.set_result(task.result())
