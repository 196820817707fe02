"""What does a chat template understand, and what is not guaranteed about it?

A template is a program that nobody has seen before. Its families are told apart by the markup that
they write, its quirks by asking it; what no test of ours covers is said once, as a warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from artnb.errors import RequestError
from artnb.prompt_memory import text_of
from artnb.tool_calls import Parser, Tools, native_parser, parse_mistral, text_parser, tools_as_text
from artnb.types import Message

Write = Callable[[list[Message], Tools | None], str]
"""Messages to the template's text. Raises RequestError when the template refuses them."""

_FAMILIES = {
    "<|im_middle|>": "kimi",
    "<|im_start|>": "chatml",
    "<|start_header_id|>": "llama3",
    "[INST]": "mistral",
    "<start_of_turn>": "gemma",
    "<｜Assistant｜>": "deepseek",
    "<|observation|>": "glm",
}
_NINE = re.compile(r"[a-zA-Z0-9]{9}")


class UnknownTemplateWarning(UserWarning):
    """Something about this model's chat template is not covered by artnb's tests."""


@dataclass(frozen=True)
class ChatTemplate:
    """What was found out about one template."""

    family: str | None
    """The family whose markup it writes, None when no test covers one like it."""
    parse_calls: Parser
    writes_tools: bool
    """False: tools, calls and results are written as the text of system, user and assistant messages."""
    has_system_role: bool
    """False: the system message goes before the first user message's text."""
    arguments_as_text: bool
    """True: a call's arguments are handed over as JSON text, not as an object."""
    not_guaranteed: tuple[str, ...]
    """Sentences for people; empty where tests cover everything."""

    def prepare(self, messages: Sequence[Message], tools: Tools | None) -> tuple[list[Message], Tools | None]:
        """Messages and tools as this template understands them."""
        plain = [plain_message(m) for m in messages]
        if not self.writes_tools:
            plain, tools = tools_as_text(plain, tools), None
        if not self.has_system_role:
            plain = _without_system(plain)
        if self.arguments_as_text:
            plain = [_map_calls(m, _arguments_to_text) for m in plain]
        if self.parse_calls is parse_mistral:
            plain = [_map_calls(m, _shorten_id) for m in plain]
        return plain, tools or None


def inspect_template(text: str, write: Write) -> ChatTemplate:
    """Find out what a template understands; ``text`` is its jinja, ``write`` runs it."""
    family = next((name for markup, name in _FAMILIES.items() if markup in text), None)
    native = native_parser(text)
    system = [{"role": "system", "content": "ARTNB-SYSTEM"}, {"role": "user", "content": "?"}]
    has_system_role = "ARTNB-SYSTEM" in _attempt(write, system)
    return ChatTemplate(
        family=family,
        parse_calls=native or text_parser(text),
        writes_tools=native is not None,
        has_system_role=has_system_role,
        arguments_as_text=native is not None and _wants_text(write),
        not_guaranteed=tuple(_limits(family, native, "tools" in text, has_system_role)),
    )


def _limits(family: str | None, native: Parser | None, has_tools: bool, has_system: bool) -> list[str]:
    limits = []
    if family is None:
        limits.append(
            "it belongs to no family that artnb tests, so messages are written by the template itself, "
            "and a next prompt that continues the model's own tokens may differ from what the template "
            "would write afresh, also in the thinking it keeps"
        )
    if native is None and (has_tools or family is None):
        limits.append(
            "no parser here reads its tool calls: tools are described in the system message and calls "
            "are read as <tool_call>{...}</tool_call>, which the model may not have learnt"
        )
    if not has_system:
        limits.append(
            "it has no system role, so a system message is written before the first user message's text"
        )
    return limits


def _attempt(write: Write, messages: list[Message]) -> str:
    with contextlib.suppress(RequestError):
        return write(messages, None)
    return ""


def _wants_text(write: Write) -> bool:
    """True when arguments given as an object make the template fail or write Python's repr."""
    call = {"id": "artnb0000", "type": "function", "function": {"name": "f", "arguments": {"key": "v"}}}
    asked: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    written = _attempt(write, asked)
    if "{'key'" not in written and "key" in written:
        return False
    as_text = [_map_calls(m, _arguments_to_text) for m in asked]
    return '{"key": "v"}' in _attempt(write, as_text)


def _without_system(messages: list[Message]) -> list[Message]:
    if not messages or messages[0]["role"] != "system":
        return messages
    system, *rest = messages
    for k, message in enumerate(rest):
        if message["role"] == "user":
            content = f"{system['content']}\n\n{message['content']}"
            return [*rest[:k], {**message, "content": content}, *rest[k + 1 :]]
    return messages  # the template says what it thinks of a lone system message


def _map_calls(message: Message, change: Callable[[Message], Message]) -> Message:
    """The message with its calls, or as a tool's result itself, changed."""
    if message.get("tool_calls"):
        return {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}
    return change(message) if message.get("tool_call_id") else message


def _arguments_to_text(call: Message) -> Message:
    function = call.get("function")
    if function is None or isinstance(function["arguments"], str):
        return call
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _shorten_id(item: Message) -> Message:
    """Mistral's templates refuse ids that are not nine letters or digits."""
    key = "tool_call_id" if "tool_call_id" in item else "id"
    if _NINE.fullmatch(item.get(key) or ""):
        return item
    digest = hashlib.blake2b((item.get(key) or "").encode(), digest_size=5).hexdigest()
    return {**item, key: digest[:9]}


def plain_message(message: Message) -> Message:
    """A message as chat templates expect it: text content, call arguments as objects, no empty keys."""
    role = message["role"]
    plain: Message = {
        "role": "system" if role == "developer" else role,
        "content": text_of(message.get("content")),
    }
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key):
            plain[key] = message[key]
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError):
            function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}
