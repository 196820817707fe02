"""How does an agent reach the tools of an MCP server? A server of this process on stdio, or one at a URL.

    async with nb.ToolServer([sys.executable, "-m", "my_server"]) as server:
        groups = await nb.gather(server.rollout, scenarios, model=model)

The connection lives in a task of its own, so that a notebook's cells may share it: ``await server.open()`` in
one cell, ``await server.close()`` in another.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Literal

from artnb.errors import ConfigurationError, ToolServerError, require
from artnb.types import Message, Trajectory, Turn

_SECONDS_TO_START = 30.0
_LONGEST_RESULT = 20_000
"""Characters of a tool's result that an agent reads; the rest is cut, and said to be."""
_LAST_WORDS = 1500
"""Characters of a server's stderr that an error repeats."""
_ENDS = ["</call>", "</answer>"]
_REFUSED = (-32600, -32601, -32602, -32603)
"""JSON-RPC's codes of a server that is there and does not take the call: unknown tool, wrong arguments."""

SYSTEM = "You work for a user with the tools you have. Call them as needed, then answer in one message."


class ToolServer:
    """Tools of an MCP server, ready for ``chat.completions.create(tools=...)``.

    server: the command that starts it, as a list; or its URL (streamable HTTP). env: variables for the
    command beside the few harmless ones that it inherits; keys of this process are not among them.
    timeout: seconds for each call.

    The rest is for ``rollout``. system: what the agent is told first. examples: messages of worked episodes
    that follow it. calls: ``api`` for tool calls of the chat API; ``text`` for models too small for them: a
    reply ``<call>tool argument</call>`` is a call, ``<answer>...</answer>`` ends the episode, and the
    system message must say so. max_turns, max_tokens: replies of an episode, and tokens of a reply.
    """

    def __init__(
        self,
        server: Sequence[str] | str,
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        system: str = SYSTEM,
        examples: Sequence[Message] = (),
        calls: Literal["api", "text"] = "api",
        max_turns: int = 8,
        max_tokens: int = 512,
    ) -> None:
        if not server or (not isinstance(server, str) and not all(isinstance(part, str) for part in server)):
            raise ConfigurationError("an MCP server is a command as a list of words, or a URL")
        if isinstance(server, str) and not server.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"{server!r} is no URL. A command is a list: ToolServer({server.split()!r})"
            )
        if calls not in ("api", "text"):
            raise ConfigurationError(f"calls must be 'api' or 'text', got {calls!r}")
        self.server = server
        self.timeout = timeout
        self.system = system
        self.examples = [dict(message) for message in examples]
        self.calls = calls
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self.tools: list[dict[str, Any]] = []
        """OpenAI definitions of the tools; filled by ``open``."""
        self._env = dict(env) if env else None
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self._log: IO[str] | None = None

    # ---- life -----------------------------------------------------------------------------------

    async def open(self) -> ToolServer:
        """Start the server, or do nothing where it runs. Raises ToolServerError, MissingDependency."""
        if self._task is not None and not self._task.done():
            return self
        mcp = require("mcp", extra="mcp", why="to reach tools of an MCP server")
        self._ending = asyncio.Event()
        ready: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(mcp, ready))
        try:
            async with asyncio.timeout(_SECONDS_TO_START):
                self.tools = await ready
        except TimeoutError:
            await self.close()
            raise ToolServerError(
                f"{self._name} did not answer within {_SECONDS_TO_START:g} s{self._words()}"
            ) from None
        return self

    async def _live(self, mcp: Any, ready: asyncio.Future[list[dict[str, Any]]]) -> None:
        """Hold the connection until it is told to end: its scopes must be left in the task they began in."""
        try:
            async with mcp.Client(self._transport(mcp), read_timeout_seconds=self.timeout) as client:
                listed = await client.list_tools()
                self._client = client
                if not ready.done():
                    ready.set_result([_definition(tool) for tool in listed.tools])
                await self._ending.wait()
        except Exception as error:  # whatever the transport raises, a user needs to know which server it was
            if not ready.done():
                ready.set_exception(
                    ToolServerError(f"{self._name} did not start: {_innermost(error)}{self._words()}")
                )
        finally:
            self._client = None

    def _transport(self, mcp: Any) -> Any:
        if isinstance(self.server, str):
            return self.server
        command, *arguments = self.server
        parameters = mcp.StdioServerParameters(command=command, args=arguments, env=self._env)
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        return mcp.stdio_client(parameters, errlog=self._log)  # a notebook's own stderr is no file

    async def close(self) -> None:
        """End the connection, and the server if this process started it. May be called again."""
        self._ending.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=10)
            self._task.cancel()
            await asyncio.wait([self._task])
        self._task = None
        if self._log is not None:
            self._log.close()
            self._log = None

    async def __aenter__(self) -> ToolServer:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- use ------------------------------------------------------------------------------------

    async def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> str:
        """The text of a tool's result; a tool's own error is text too, for the agent to read.

        Raises ToolServerError when the server has ended or does not answer in time.
        """
        if self._client is None:
            raise ToolServerError(f"{self._name} is not running: await server.open(){self._words()}")
        try:
            async with asyncio.timeout(self.timeout):
                result = await self._client.call_tool(name, dict(arguments or {}))
        except TimeoutError:
            raise ToolServerError(
                f"tool {name!r} of {self._name} did not answer within {self.timeout:g} s"
            ) from None
        except Exception as error:
            if getattr(error, "code", None) in _REFUSED:
                return f"Error: {getattr(error, 'message', error)}"
            raise ToolServerError(f"tool {name!r} of {self._name} failed: {_innermost(error)}") from error
        return _text(result)

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
            reply = await model.client.chat.completions.create(
                model=model.name, messages=trajectory.messages(), max_tokens=self.max_tokens, **options
            )
            turn = Turn.from_choice(reply.choices[0])
            messages.append(turn)
            calls = self._written(turn) if is_text else turn.message.get("tool_calls") or []
            if not calls:
                counts["answered"] = float(_is_answer(turn) if is_text else turn.finish_reason == "stop")
                break
            for call in calls:
                text, is_error = await self._answer(call["function"])
                counts["tool_calls"] += 1
                counts["tool_errors"] += is_error
                as_tool = {"role": "tool", "tool_call_id": call.get("id")}
                messages.append({**({"role": "user"} if is_text else as_tool), "content": text})
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
        first = next(iter(schemas.get(name, {}).get("properties", {})), "input")
        arguments = given if given.startswith("{") else json.dumps({first: given} if given else {})
        return [{"function": {"name": name, "arguments": arguments}}]

    async def _answer(self, function: Mapping[str, Any]) -> tuple[str, bool]:
        """What the agent reads after a call; a call that cannot be made is an error it can read."""
        known = [tool["function"]["name"] for tool in self.tools]
        if function["name"] not in known:
            return f"Error: there is no tool {function['name']!r}; there are {', '.join(known)}", True
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            return f"Error: the arguments are no JSON: {error}", True
        if not isinstance(arguments, dict):
            return "Error: the arguments must be a JSON object", True
        text = await self.call(function["name"], arguments)
        return text, text.startswith("Error")

    # ---- words ----------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return self.server if isinstance(self.server, str) else " ".join(self.server)

    def _words(self) -> str:
        """The end of what the server wrote to stderr."""
        if self._log is None or self._log.closed:
            return ""
        time.sleep(0.05)  # its last words may be on their way
        self._log.seek(0)
        said = self._log.read().strip()
        return f". It said: {said[-_LAST_WORDS:]}" if said else ""

    def __repr__(self) -> str:
        names = ", ".join(tool["function"]["name"] for tool in self.tools) or "not open"
        return f"ToolServer({self._name}: {names})"


def _is_answer(turn: Turn) -> bool:
    text = (turn.message.get("content") or "").strip()
    return turn.finish_reason == "stop" and text.startswith("<answer>")


def _definition(tool: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.input_schema,
        },
    }


def _text(result: Any) -> str:
    parts = []
    for block in result.content:
        text = getattr(block, "text", None)
        parts.append(text if isinstance(text, str) else f"[{getattr(block, 'type', 'content')}]")
    text = "\n".join(parts)
    if len(text) > _LONGEST_RESULT:
        text = f"{text[:_LONGEST_RESULT]} […{len(text) - _LONGEST_RESULT:,} characters left out]"
    return f"Error: {text}" if result.is_error else text


def _innermost(error: BaseException) -> str:
    """The first cause inside groups of exceptions, which task groups wrap around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
