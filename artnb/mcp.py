"""How does an agent reach the tools of an MCP server? One of this process, a command on stdio, or a URL.

    async with nb.ToolServer([sys.executable, "-m", "my_server"]) as server:
        groups = await nb.gather(server.rollout, scenarios, model=model)

The connection lives in a task of its own, so that a notebook's cells may share it: ``await server.open()`` in
one cell, ``await server.close()`` in another.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from artnb.errors import ConfigurationError, ToolServerError
from artnb.mcp_connection import CLOSED, Connection, name_of
from artnb.mcp_result import READ_MORE, Pages, ToolResult, as_text, definitions_of, result_of
from artnb.types import Message, Trajectory, Turn

_ENDS = ["</call>", "</answer>"]
_REFUSED = (-32600, -32601, -32602, -32603)
"""JSON-RPC's codes of a server that is there and does not take the call: unknown tool, wrong arguments."""

SYSTEM = "You work for a user with the tools you have. Call them as needed, then answer in one message."


class ToolServer:
    """Tools of an MCP server, ready for ``chat.completions.create(tools=...)``.

    server: the command that starts it, as a list; its URL (streamable HTTP); or an ``MCPServer`` object of
    this process. env: variables for the command beside the few harmless ones that it inherits; keys of this
    process are not among them. headers: of every request to a URL. timeout: seconds for each call. page:
    characters of a result that an agent reads at once; a longer one is cut, and a tool ``read_more`` beside
    the server's own shows the rest; None cuts nothing and adds no tool. restarts: how often in a row a
    server that ends is started again without answering a call. log: file for what the command writes to
    stderr; None for a temporary one, which errors name.

    The rest is for ``rollout``. system: what the agent is told first. examples: messages of worked episodes
    that follow it. calls: ``api`` for tool calls of the chat API; ``text`` for models too small for them: a
    reply ``<call>tool arguments</call>`` is a call, ``<answer>...</answer>`` ends the episode, and the
    system message must say so. images: whether the model sees the images of results; the trajectory keeps
    them either way. max_turns, max_tokens: replies of an episode, and tokens of a reply.
    """

    def __init__(
        self,
        server: Any,
        *,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        page: int | None = 20_000,
        restarts: int = 3,
        log: str | Path | None = None,
        system: str = SYSTEM,
        examples: Sequence[Message] = (),
        calls: Literal["api", "text"] = "api",
        images: bool = False,
        max_turns: int = 8,
        max_tokens: int = 512,
    ) -> None:
        _check(server, env, headers, page, calls)
        self.server = server
        self.timeout = timeout
        self.restarts = restarts
        self.system = system
        self.examples = [dict(message) for message in examples]
        self.calls = calls
        self.images = images
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self.tools: list[dict[str, Any]] = []
        """OpenAI definitions of the tools; filled by ``open``."""
        self.instructions = ""
        """What the server says about itself; filled by ``open``."""
        self.crashes: list[str] = []
        """Why the server ended, each time that it did without being told to."""
        self._options: dict[str, Any] = {
            "env": env,
            "headers": headers,
            "log": Path(log).expanduser() if log else None,
        }
        self._pages = Pages(page) if page else None
        self._names: dict[str, str] = {}
        self._connection: Connection | None = None
        self._failures = 0
        self._lock = asyncio.Lock()
        self._lock_loop: asyncio.AbstractEventLoop | None = None

    # ---- life -----------------------------------------------------------------------------------

    async def open(self) -> ToolServer:
        """Start the server, or do nothing where it runs. Raises ToolServerError, MissingDependency."""
        self._failures = 0
        await self._start()
        return self

    async def _start(self, *, again: bool = False) -> Connection:
        loop = asyncio.get_running_loop()
        if self._lock_loop is not loop:
            self._lock, self._lock_loop = asyncio.Lock(), loop
        async with self._lock:
            before = self._connection
            if before is not None and before.is_up:
                self._require_loop(before)
                return before
            if again and self._failures > self.restarts:
                why = before.why_ended if before is not None else ""
                raise ToolServerError(
                    f"{name_of(self.server)} ended {self._failures} times in a row without answering a call "
                    f"and is not started again. The last time: {why}. Mend it, then await server.open()"
                )
            connection = self._connection = Connection(self.server, **self._options)
            try:
                await connection.start()
            except ToolServerError:
                self._failures += 1
                raise
            self._know(connection)
            return connection

    def _know(self, connection: Connection) -> None:
        found = definitions_of(connection.tools)
        self._names = {name: original for name, (original, _) in found.items()}
        self.tools = [definition for _, definition in found.values()]
        if self._pages is not None and READ_MORE not in found:
            self.tools.append(dict(Pages.definition))
        self.instructions = connection.instructions

    async def close(self) -> None:
        """End the connection, and the server if this process started it. May be called again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.end()

    async def __aenter__(self) -> ToolServer:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _running(self) -> Connection:
        """The connection; started again after it ended, a few times. Raises ToolServerError."""
        connection = self._connection
        if connection is None:
            raise ToolServerError(f"{name_of(self.server)} is not running: await server.open()")
        self._require_loop(connection)
        if connection.is_up:
            return connection
        return await self._start(again=True)

    def _require_loop(self, connection: Connection) -> None:
        if connection.loop is not asyncio.get_running_loop() and connection.is_up:
            raise ToolServerError(
                f"{connection.name} was opened in another event loop; open a ToolServer of its own in each"
            )

    async def _has_ended(self, connection: Connection, why: str) -> None:
        """Record that a connection is of no more use; the next call starts another one."""
        if connection is self._connection and connection.is_up:
            self._failures += 1
            await connection.fail(why)
            self.crashes.append(why + await connection.last_words())

    # ---- use ------------------------------------------------------------------------------------

    async def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> str:
        """The text of a tool's result; a tool's own error is text too, for the agent to read.

        Raises ToolServerError when the server has ended or does not answer in time. The call after that
        starts it again; no call is made twice.
        """
        return (await self.result(name, arguments)).text

    async def result(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        """A tool's result with its images; otherwise as ``call``."""
        given = dict(arguments or {})
        if name == READ_MORE and name not in self._names and self._pages is not None:
            return self._pages.read(given)
        connection = await self._running()
        task = asyncio.ensure_future(connection.client.call_tool(self._names.get(name, name), given))
        try:
            await asyncio.wait([task], timeout=self.timeout)
            if not task.done():
                await self._is_late(connection, name)
            result = result_of(task.result())
        except ToolServerError:
            raise
        except Exception as error:
            if getattr(error, "code", None) in _REFUSED:
                return ToolResult(f"Error: {getattr(error, 'message', error)}", is_error=True)
            why = f"tool {name!r} of {connection.name} failed: {connection.cause_of(error)}"
            if getattr(error, "code", None) == CLOSED:
                await self._has_ended(connection, why)
                why += await connection.last_words()
            raise ToolServerError(why) from error
        finally:
            task.cancel()  # nothing to a call that is done
        self._failures = 0
        return self._pages.first(result) if self._pages is not None else result

    async def _is_late(self, connection: Connection, name: str) -> None:
        """End the server too when it answers nothing at all. Raises ToolServerError."""
        why = f"tool {name!r} of {connection.name} did not answer within {self.timeout:g} s"
        if not await connection.is_well():
            await self._has_ended(connection, f"{why}, nor was anything else answered")
        raise ToolServerError(why)

    async def rollout(self, model: Any, scenario: Any) -> Trajectory:
        """Let the model work on ``scenario.task["task"]`` with the tools until it answers without a call.

        Metrics: ``tool_calls``, ``tool_errors``, ``answered``. The reward is left to a judge.
        """
        messages: list[Any] = [{"role": "system", "content": self.system}, *map(dict, self.examples)]
        messages.append({"role": "user", "content": str(scenario.task["task"])})
        is_text = self.calls == "text"
        trajectory = Trajectory(messages, tools=None if is_text else self.tools, scenario_id=scenario.id)
        options = {"stop": _ENDS} if is_text else {"tools": self.tools}
        counts = {"tool_calls": 0.0, "tool_errors": 0.0, "answered": 0.0}
        for _ in range(self.max_turns):
            said = trajectory.messages() if self.images else as_text(trajectory.messages())
            reply = await model.client.chat.completions.create(
                model=model.name, messages=said, max_tokens=self.max_tokens, **options
            )
            turn = Turn.from_choice(reply.choices[0])
            messages.append(turn)
            calls = self._written(turn) if is_text else turn.message.get("tool_calls") or []
            if not calls:
                counts["answered"] = float(_is_answer(turn) if is_text else turn.finish_reason == "stop")
                break
            for call in calls:
                result = await self.answer(call["function"]["name"], call["function"]["arguments"])
                counts["tool_calls"] += 1
                counts["tool_errors"] += result.is_error
                as_tool = {"role": "tool", "tool_call_id": call.get("id")}
                messages.append({**({"role": "user"} if is_text else as_tool), "content": result.content})
        trajectory.metrics |= counts
        return trajectory

    def _written(self, turn: Turn) -> list[dict[str, Any]]:
        """The call in a reply that is ``<call>tool argument</call>`` and nothing else, as the API has it."""
        found = re.fullmatch(
            r"\s*<call>\s*(\w+)\s*(.*?)\s*(?:</call>)?\s*", turn.message.get("content") or "", re.S
        )
        if found is None or turn.finish_reason == "length":
            return []
        name, given = found.groups()
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}
        arguments = self.arguments_of(given, schemas.get(name, {}))
        return [{"function": {"name": name, "arguments": arguments}}]

    @staticmethod
    def arguments_of(words: str, parameters: Mapping[str, Any]) -> str:
        """The words of a call in the text form as JSON arguments, in the order of the schema's properties.

        A tool's only argument is all of the words; JSON stays as it is. What is too much becomes an argument
        ``words``, for the server to refuse.
        """
        properties = parameters.get("properties", {})
        if words.startswith("{") or not words:
            return words or "{}"
        given = [words] if len(properties) <= 1 else words.split()
        if len(given) > max(1, len(properties)):
            return json.dumps({"words": words})
        named = zip(properties or ["input"], given, strict=False)
        return json.dumps({name: _typed(one, properties.get(name, {})) for name, one in named})

    async def answer(self, name: str, arguments: str | None) -> ToolResult:
        """What the agent reads after a call as the chat API has it: a name, and arguments as JSON text.

        A call that cannot be made is an error that the agent can read. Raises ToolServerError as ``call``.
        """
        known = [tool["function"]["name"] for tool in self.tools]
        if name not in known:
            return _unmade(f"there is no tool {name[:100]!r}; there are {', '.join(known)}")
        try:
            given = json.loads(arguments or "{}")
            json.dumps(given, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            return _unmade(f"the arguments are no JSON: {str(error)[:200]}")
        if not isinstance(given, dict):
            return _unmade("the arguments must be a JSON object")
        return await self.result(name, given)

    def __repr__(self) -> str:
        names = ", ".join(tool["function"]["name"] for tool in self.tools) or "not open"
        return f"ToolServer({name_of(self.server)}: {names})"


def _check(server: Any, env: Any, headers: Any, page: int | None, calls: str) -> None:
    """Refuse what is no server, or options that it cannot have."""
    is_object = not isinstance(server, str | Sequence) and hasattr(server, "run")
    if not is_object and (
        not server
        or not isinstance(server, str | Sequence)
        or (not isinstance(server, str) and not all(isinstance(part, str) for part in server))
    ):
        raise ConfigurationError(
            "an MCP server is a command as a list of words, a URL, or an MCPServer object"
        )
    if isinstance(server, str) and not server.startswith(("http://", "https://")):
        raise ConfigurationError(f"{server!r} is no URL. A command is a list: ToolServer({server.split()!r})")
    if headers and not isinstance(server, str):
        raise ConfigurationError("headers are for a server at a URL; a command gets its keys by env")
    if env and (is_object or isinstance(server, str)):
        raise ConfigurationError("env is for a server that is started here as a command")
    if calls not in ("api", "text"):
        raise ConfigurationError(f"calls must be 'api' or 'text', got {calls!r}")
    if page is not None and page < 100:
        raise ConfigurationError(f"page must be 100 characters or more, or None; got {page}")


def _typed(word: str, schema: Mapping[str, Any]) -> str | int | float:
    """A word as the type that a property's schema asks for, where it can be read as one."""
    kinds = {schema.get("type"), *(one.get("type") for one in schema.get("anyOf", ()))}
    try:
        return int(word) if "integer" in kinds else float(word) if "number" in kinds else word
    except ValueError:
        return word


def _unmade(text: str) -> ToolResult:
    return ToolResult(f"Error: {text}", is_error=True)


def _is_answer(turn: Turn) -> bool:
    text = (turn.message.get("content") or "").strip()
    return turn.finish_reason == "stop" and text.startswith("<answer>")
