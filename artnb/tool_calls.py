"""How are tool calls read from a model's text, and written for a chat template that knows no tools?

Models whose template has no place for tools get the Hermes format (the one of Qwen2.5 and Qwen3):
tools described in the system message, calls as ``<tool_call>{...}</tool_call>``, results as
``<tool_response>``. A call that cannot be read stays in the text and is reported, never dropped.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from artnb.types import Message

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ParsedText:
    """A model's text, with its tool calls taken out."""

    content: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    """OpenAI tool calls."""
    error: str | None = None
    """Why some call could not be read."""


Parser = Callable[[str], ParsedText]


def make_call(name: str, arguments: Any) -> dict[str, Any]:
    """An OpenAI tool call; ``arguments`` become its JSON text."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


def parse_hermes(text: str) -> ParsedText:
    """Read calls written as ``<tool_call>{"name": .., "arguments": {..}}</tool_call>``.

    >>> parse_hermes('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>').calls[0]["function"]
    {'name': 'f', 'arguments': '{"x": 1}'}
    >>> parse_hermes('<tool_call>{"name": "f"').error
    'the tool call is not closed by </tool_call>'
    """
    if "<tool_call>" not in text:
        return ParsedText(text)
    calls: list[dict[str, Any]] = []
    errors: list[str] = []

    def take(match: re.Match[str]) -> str:
        if not match[2]:
            errors.append("the tool call is not closed by </tool_call>")
            return match[0]
        call = _read_call(match[1], "arguments")
        if isinstance(call, str):
            errors.append(call)
            return match[0]
        calls.append(call)
        return ""

    content = _BLOCK.sub(take, text)
    return ParsedText(content.strip() if calls else content, calls, "; ".join(errors) or None)


def parse_llama(text: str) -> ParsedText:
    """Read Llama 3.1's call: the whole answer is ``{"name": .., "parameters": {..}}``.

    >>> parse_llama('{"name": "f", "parameters": {}}').calls[0]["function"]
    {'name': 'f', 'arguments': '{}'}
    >>> parse_llama("It is 7.")
    ParsedText(content='It is 7.', calls=[], error=None)
    """
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not (body.startswith("{") and '"name"' in body):
        return ParsedText(text)
    call = _read_call(body, "parameters")
    return ParsedText(text, [], call) if isinstance(call, str) else ParsedText("", [call])


def _read_call(body: str, key: str) -> dict[str, Any] | str:
    """The call in this JSON text, or what is wrong with it."""
    try:
        record = json.loads(body)
    except ValueError as error:
        return f"the tool call is not JSON: {error}"
    if not isinstance(record, dict) or not isinstance(record.get("name"), str) or not record["name"]:
        return "the tool call has no name"
    arguments = record.get(key, {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return f"the tool call's {key} are not JSON"
    if not isinstance(arguments, dict):
        return f"the tool call's {key} are not a JSON object"
    return make_call(record["name"], arguments)


def native_parser(template: str) -> Parser | None:
    """The parser of the calls that this chat template writes, None when it knows no tools."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template and "<function=" not in template:
        return parse_hermes
    if '"parameters": ' in template and "ipython" in template:
        return parse_llama
    return None


def describe_tools(tools: Sequence[dict[str, Any]]) -> str:
    """The part of a system message that tells a model which tools it has and how to call them."""
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{signatures}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, '
        '"arguments": <args-json-object>}\n</tool_call>'
    )


def tools_as_text(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
) -> list[Message]:
    """The same conversation in system, user and assistant messages alone."""
    written: list[Message] = []
    in_response = False
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            response = f"<tool_response>\n{content}\n</tool_response>"
            if in_response:
                written[-1]["content"] += "\n" + response
            else:
                written.append({"role": "user", "content": response})
        elif message.get("tool_calls"):
            blocks = [_write_call(call["function"]) for call in message["tool_calls"]]
            written.append({"role": role, "content": "\n".join([content, *blocks] if content else blocks)})
        else:
            written.append({"role": role, "content": content})
        in_response = role == "tool"
    if tools:
        description = describe_tools(tools)
        if written and written[0]["role"] == "system":
            written[0]["content"] = f"{written[0]['content']}\n\n{description}".lstrip()
        else:
            written.insert(0, {"role": "system", "content": description})
    return written


def _write_call(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {text}}}\n</tool_call>'
