"""How does a connection to an MCP server live? In a task of its own, which leaves its scopes where it
entered them, so that one cell may open it and another close it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from artnb.errors import ToolServerError, require

_SECONDS_TO_START = 30.0
_SECONDS_TO_END = 10.0
_SECONDS_TO_ANSWER = 5.0
"""For the list of its tools, of a server that is well."""
_LAST_WORDS = 1500
"""Characters of a server's stderr that an error repeats."""
_MOST_TOOL_PAGES = 100
_SDK_HANDLERS: set[logging.Handler] = set()
"""One for each server of this process that is connected."""
CLOSED = -32000
"""The SDK's code of a connection that has ended."""


class Connection:
    """One life of a connection: started once, ended once.

    server: a command as a list of words, a URL, or a server object of this process. log: the file that a
    command's stderr is added to; None for a temporary one, which stays when the connection fails.
    """

    def __init__(
        self,
        server: Any,
        *,
        env: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
        log: Path | None,
    ) -> None:
        self._server, self._env, self._headers = server, env, headers
        self.name = name_of(server)
        self.client: Any = None
        """The SDK's Client while the connection is up."""
        self.tools: list[Any] = []
        self.instructions = ""
        """What the server says about itself."""
        self.loop = asyncio.get_running_loop()
        self.why_ended = ""
        self._task: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self._is_command = not isinstance(server, str) and isinstance(server, Sequence)
        self._log_path, self._keeps_log = log, log is not None
        self._log: IO[str] | None = None
        self._log_start = 0
        self._asking = False

    @property
    def is_up(self) -> bool:
        return self.client is not None and not self._ending.is_set()

    async def start(self) -> None:
        """Connect and list the tools. Raises ToolServerError, MissingDependency."""
        mcp = require("mcp", extra="mcp", why="to reach tools of an MCP server")
        ready: asyncio.Future[None] = self.loop.create_future()
        self._task = asyncio.create_task(self._live(mcp, ready), name=f"MCP server {self.name}")
        try:
            async with asyncio.timeout(_SECONDS_TO_START):
                await ready
        except TimeoutError:
            self.why_ended = f"{self.name} did not answer within {_SECONDS_TO_START:g} s"
            raise ToolServerError(self.why_ended + await self.last_words()) from None
        finally:
            if self.client is None:
                await self.end()

    async def _live(self, mcp: Any, ready: asyncio.Future[None]) -> None:
        """Hold the connection until it is told to end."""
        try:
            async with contextlib.AsyncExitStack() as scopes:
                transport = await self._transport(mcp, scopes)
                client = await scopes.enter_async_context(mcp.Client(transport))
                self.tools = await _all_tools(client)
                self.instructions = client.instructions or ""
                self.client = client
                if not ready.done():
                    ready.set_result(None)
                await self._ending.wait()
        except Exception as error:  # whatever a transport raises, a user needs to know which server it was
            self.why_ended = f"{self.name} did not start: {self.cause_of(error)}"
            if not ready.done():
                ready.set_exception(ToolServerError(self.why_ended + await self.last_words()))
        finally:
            self.client = None
            self._close_log()

    async def _transport(self, mcp: Any, scopes: contextlib.AsyncExitStack) -> Any:
        if isinstance(self._server, str) and self._headers:
            httpx = require("httpx2", extra="mcp", why="to send headers to an MCP server")
            from mcp.client.streamable_http import streamable_http_client

            http = httpx.AsyncClient(headers=dict(self._headers), timeout=httpx.Timeout(30.0, read=300.0))
            return streamable_http_client(self._server, http_client=await scopes.enter_async_context(http))
        if isinstance(self._server, str):
            return self._server
        if not self._is_command:
            scopes.enter_context(_sdk_logs_to(self._open_log()))
            return self._server
        command, *arguments = self._server
        environment = dict(self._env) if self._env else None
        parameters = mcp.StdioServerParameters(command=command, args=arguments, env=environment)
        return mcp.stdio_client(parameters, errlog=self._open_log())  # a notebook's own stderr is no file

    def _open_log(self) -> IO[str]:
        if self._log_path is None:
            with tempfile.NamedTemporaryFile(prefix="artnb-mcp-", suffix=".log", delete=False) as made:
                self._log_path = Path(made.name)
            atexit.register(self._close_log)  # a kernel ends without leaving any scope
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = self._log_path.open("a", encoding="utf-8")
        self._log_start = self._log.tell()
        return self._log

    async def fail(self, why: str) -> None:
        """End a connection that is of no more use; its log stays."""
        self.why_ended = self.why_ended or why
        await self.end()

    async def is_well(self) -> bool:
        """Whether the server still lists its tools; asked once at a time, True to whoever else asks."""
        if self._asking or not self.is_up:
            return True
        self._asking = True
        try:
            async with asyncio.timeout(_SECONDS_TO_ANSWER):
                await self.client.list_tools(cache_mode="bypass")
            return True
        except Exception:  # no answer, or an error instead of one: either way it cannot serve
            return False
        finally:
            self._asking = False

    async def end(self) -> None:
        """Leave the connection, and end the process if there is one. May be called again."""
        self._ending.set()
        task = self._task
        if task is not None and not task.done():
            await asyncio.wait([task], timeout=_SECONDS_TO_END)
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=_SECONDS_TO_END)

    def _close_log(self) -> None:
        """Close it, and remove a temporary one that says nothing about a failure."""
        atexit.unregister(self._close_log)
        if self._log is None or self._log_path is None:
            return
        self._log.close()
        is_empty = not self._log_path.exists() or self._log_path.stat().st_size == 0
        if not self._keeps_log and (is_empty or not self.why_ended):
            self._log_path.unlink(missing_ok=True)

    def cause_of(self, error: BaseException) -> str:
        """The first cause inside the groups that task groups wrap around it, without the URL's secrets."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        text = f"{type(error).__name__}: {error}"
        if isinstance(self._server, str):
            parts = urlsplit(self._server)
            for secret in filter(None, (parts.query, parts.password)):
                text = text.replace(secret, "…")
        return text

    async def last_words(self) -> str:
        """The end of what the server wrote to stderr, and where all of it stands."""
        if self._log_path is None or not self._log_path.exists():
            return ""
        await asyncio.sleep(0.05)  # its last words may be on their way
        with self._log_path.open("rb") as file:
            file.seek(self._log_start)
            said = file.read().decode("utf-8", "replace").strip()
        return f"; it said: …{said[-_LAST_WORDS:]} (all of it: {self._log_path})" if said else ""


@contextlib.contextmanager
def _sdk_logs_to(file: IO[str]) -> Iterator[None]:
    """What the SDK logs in this process goes to a file, and not into the notebook."""
    logger, handler = logging.getLogger("mcp"), logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _SDK_HANDLERS.add(handler)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        _SDK_HANDLERS.discard(handler)
        logger.removeHandler(handler)
        logger.propagate = not _SDK_HANDLERS


async def _all_tools(client: Any) -> list[Any]:
    """The tools of a server, which may list them in pages."""
    tools, cursor = list[Any](), None
    for _ in range(_MOST_TOOL_PAGES):
        listed = await client.list_tools(cursor=cursor)
        tools += listed.tools
        cursor = listed.next_cursor
        if not cursor:
            break
    return tools


def name_of(server: Any) -> str:
    """How errors call a server; of a URL nothing that may be a key."""
    if isinstance(server, str):
        parts = urlsplit(server)
        return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
    if isinstance(server, Sequence):
        return " ".join(server)
    return f"the MCP server {getattr(server, 'name', type(server).__name__)!r} of this process"
