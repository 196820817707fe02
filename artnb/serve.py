"""How do other processes on this machine reach the model? Over loopback, with a token, when asked."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from artnb.completions import ChatApp, ChatError, Reply
from artnb.errors import ArtnbError, require
from artnb.secrets import keep_secret

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
T = TypeVar("T")
_MAX_BODY = 64 * 2**20
"""Bytes of a request body."""
_MOST_CONNECTIONS = 512
"""Callers at once; the next is told 503, which clients try again."""


@dataclass
class Server:
    """A running server. ``openai.OpenAI(base_url=server.url, api_key=server.api_key)`` reaches it."""

    url: str
    api_key: str = field(repr=False)
    _uvicorn: Any = field(repr=False)
    _thread: threading.Thread = field(repr=False)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1].split("/")[0])

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving and wait for the thread. Idempotent."""
        self._uvicorn.should_exit = True
        self._thread.join(timeout=5)
        if self._thread.is_alive():  # a request is still running: do not wait for its answer
            self._uvicorn.force_exit = True
            self._thread.join(timeout=5)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(app: ChatApp, port: int | None = None) -> Server:
    """Serve the app on 127.0.0.1; ``port=None`` takes a free one.

    Requests run on the server's own event loop, so they are answered while a cell is busy.
    """
    uvicorn = require("uvicorn", extra="serve", why="to serve a model")
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port or 0))
    except OSError as error:
        listener.close()
        raise ArtnbError(f"port {port} is taken; pass port=None for a free one") from error
    api_key = keep_secret("server's token", secrets.token_urlsafe(32))
    config = uvicorn.Config(
        asgi_app(app, api_key),
        log_level="error",
        access_log=False,
        lifespan="off",
        ws="none",
        limit_concurrency=_MOST_CONNECTIONS,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="artnb-serve", daemon=True
    )
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.005)
    if not server.started:
        raise ArtnbError("the server did not start; its log has the reason")
    return Server(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", api_key, server, thread)


def asgi_app(app: ChatApp, api_key: str) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The chat app as an ASGI application that asks for a bearer token."""
    expected = f"Bearer {api_key}".encode()

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "lifespan and websockets are switched off"
        given = dict(scope["headers"]).get(b"authorization", b"")
        if scope["path"] == "/health":
            reply: Reply | None = Reply(200, {"status": "ok"})
        elif not hmac.compare_digest(given, expected):
            error = ChatError(401, "a valid bearer token is needed", code="invalid_api_key")
            reply = Reply(401, error.body())
        else:
            reply = await _answer(app, scope, receive)
        if reply is not None:
            await _send(reply, receive, send)

    return application


async def _answer(app: ChatApp, scope: Scope, receive: Receive) -> Reply | None:
    """The app's reply; None when the caller hung up, which cancels the sampling."""
    content = await _body(receive)
    if content is None:
        error = ChatError(413, f"a request body may have {_MAX_BODY} bytes")
        return Reply(413, error.body())
    return await _until_hangup(app.reply(scope["method"], scope["path"], content), receive)


async def _until_hangup(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """What the work returns; None when the caller hung up, which cancels it."""
    answer = asyncio.create_task(work)
    hangup = asyncio.create_task(_hangup(receive))
    try:
        await asyncio.wait({answer, hangup}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        answer.cancel()
        hangup.cancel()
        await asyncio.gather(answer, hangup, return_exceptions=True)


async def _body(receive: Receive) -> bytes | None:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > _MAX_BODY:
            return None
        more = message.get("more_body", False)
    return b"".join(parts)


async def _hangup(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _send(reply: Reply, receive: Receive, send: Send) -> None:
    headers = [(b"content-type", reply.content_type.encode())]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    if reply.chunks is None:
        await send({"type": "http.response.body", "body": reply.encode()})
        return
    await _until_hangup(_send_events(reply, send), receive)


async def _send_events(reply: Reply, send: Send) -> None:
    async with contextlib.aclosing(reply.events()) as events:
        async for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
