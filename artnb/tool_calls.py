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

Tools = Sequence[dict[str, Any]]
_HERMES = ("<tool_call>", "</tool_call>")
_KIMI = ("<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_NAME = "<｜tool▁sep｜>"
_MISTRAL, _MISTRAL_ARGUMENTS, _MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

CALL_MARKUP = frozenset(
    {*_HERMES, "<|python_tag|>", *_KIMI, _KIMI_ARGUMENTS, *_KIMI_SECTION, *_DEEPSEEK, *_DEEPSEEK_SECTION}
    | {_DEEPSEEK_NAME, _MISTRAL, _MISTRAL_ARGUMENTS, _MISTRAL_ID}
)
"""Tokens that a parser reads, so that decoding keeps them even where a tokenizer calls them special."""


@dataclass(frozen=True)
class ParsedText:
    """A model's text, with its tool calls taken out."""

    content: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    """OpenAI tool calls."""
    error: str | None = None
    """Why some call could not be read."""


Parser = Callable[[str, Tools], ParsedText]
"""Reads a model's text; the tools say which arguments are strings."""


def make_call(name: str, arguments: Any, call_id: str | None = None) -> dict[str, Any]:
    """An OpenAI tool call; ``arguments`` become its JSON text."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call_id or f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


def parse_hermes(text: str, tools: Tools = ()) -> ParsedText:
    """Read calls written as ``<tool_call>{"name": .., "arguments": {..}}</tool_call>``.

    >>> parse_hermes('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>').calls[0]["function"]
    {'name': 'f', 'arguments': '{"x": 1}'}
    >>> parse_hermes('<tool_call>{"name": "f"').error
    'the tool call is not closed by </tool_call>'
    """
    return _parse_blocks(text, _HERMES, lambda body: _read_call(body, "arguments"))


def _parse_blocks(
    text: str,
    marks: tuple[str, str],
    read: Callable[[str], dict[str, Any] | str],
    section: tuple[str, ...] = (),
) -> ParsedText:
    """Take out every block between two marks that ``read`` can read; the other ones stay."""
    if marks[0] not in text:
        error = "the section of tool calls holds no call" if any(mark in text for mark in section) else None
        return ParsedText(text, [], error)
    calls: list[dict[str, Any]] = []
    errors: list[str] = []

    def take(match: re.Match[str]) -> str:
        call = read(match[1]) if match[2] else f"the tool call is not closed by {marks[1]}"
        if isinstance(call, str):
            errors.append(call)
            return match[0]
        calls.append(call)
        return ""

    begin, end = map(re.escape, marks)
    content = re.sub(rf"{begin}(.*?)({end}|\Z)", take, text, flags=re.DOTALL)
    if not errors:
        for mark in section:
            content = content.replace(mark, "")
    return ParsedText(content.strip() if calls else content, calls, "; ".join(errors) or None)


def parse_glm(text: str, tools: Tools = ()) -> ParsedText:
    """Read GLM 4.5's calls: a name, then pairs of ``<arg_key>`` and ``<arg_value>``.

    >>> text = "<tool_call>f\\n<arg_key>x</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>"
    >>> parse_glm(text).calls[0]["function"]
    {'name': 'f', 'arguments': '{"x": 1}'}
    """

    def read(body: str) -> dict[str, Any] | str:
        name = _GLM_PAIR.sub("", body).strip()
        if not name or "<" in name or "\n" in name:
            return "the tool call is not a name with <arg_key> and <arg_value> pairs"
        strings = _string_arguments(name, tools)
        arguments = {k: v if k in strings else _json_or_text(v) for k, v in _GLM_PAIR.findall(body)}
        return make_call(name, arguments)

    return _parse_blocks(text, _HERMES, read)


def parse_kimi(text: str, tools: Tools = ()) -> ParsedText:
    """Read Kimi K2's calls: ``functions.name:0``, a mark and the JSON of the arguments, in a section.

    The id is the model's own, because the template shows it again beside the result.
    """

    def read(body: str) -> dict[str, Any] | str:
        call_id, found, arguments = body.partition(_KIMI_ARGUMENTS)
        call_id = call_id.strip()
        name = call_id.removeprefix("functions.").rpartition(":")[0]
        if not found:
            return f"the tool call has no {_KIMI_ARGUMENTS}"
        return _checked_call(name, arguments, call_id=call_id)

    return _parse_blocks(text, _KIMI, read, _KIMI_SECTION)


def parse_deepseek(text: str, tools: Tools = ()) -> ParsedText:
    """Read DeepSeek's calls: V3's with a fenced JSON block, V3.1's with bare JSON after the name."""

    def read(body: str) -> dict[str, Any] | str:
        before, found, after = body.partition(_DEEPSEEK_NAME)
        if not found:
            return f"the tool call has no {_DEEPSEEK_NAME}"
        fenced = re.fullmatch(r"\s*(\S+)\s*```json\s*(.*?)\s*```\s*", after, re.DOTALL)
        return _checked_call(fenced[1], fenced[2]) if fenced else _checked_call(before.strip(), after)

    return _parse_blocks(text, _DEEPSEEK, read, _DEEPSEEK_SECTION)


def parse_mistral(text: str, tools: Tools = ()) -> ParsedText:
    """Read Mistral's calls: a JSON list after ``[TOOL_CALLS]``, or from v11 on ``name[ARGS]{..}``.

    >>> parse_mistral('[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]').calls[0]["function"]
    {'name': 'f', 'arguments': '{"x": 1}'}
    >>> parse_mistral('[TOOL_CALLS]f[ARGS]{"x": 1}').calls[0]["function"]
    {'name': 'f', 'arguments': '{"x": 1}'}
    """
    content, *pieces = text.split(_MISTRAL)
    calls: list[dict[str, Any]] = []
    errors: list[str] = []
    for piece in pieces:
        read = _read_mistral(piece)
        problems = [call for call in read if isinstance(call, str)]
        errors += problems
        if problems:
            content += _MISTRAL + piece  # one sampled list: half of it is not what the model asked for
        else:
            calls += [call for call in read if not isinstance(call, str)]
    return ParsedText(content.strip() if calls else content, calls, "; ".join(errors) or None)


def _read_mistral(piece: str) -> list[dict[str, Any] | str]:
    name, found, arguments = piece.partition(_MISTRAL_ARGUMENTS)
    if found:
        name, _, call_id = name.partition(_MISTRAL_ID)
        return [_checked_call(name.strip(), arguments, call_id=call_id.strip() or None)]
    try:
        records = json.loads(piece)
    except (ValueError, RecursionError) as error:
        return [f"the tool call is not JSON: {error}"]
    if not isinstance(records, list) or not records:
        return ["the tool calls are not a JSON list"]
    return [_read_record(record, "arguments") for record in records]


def parse_llama(text: str, tools: Tools = ()) -> ParsedText:
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
    except (ValueError, RecursionError) as error:
        return f"the tool call is not JSON: {error}"
    return _read_record(record, key)


def _read_record(record: Any, key: str) -> dict[str, Any] | str:
    if not isinstance(record, dict) or not isinstance(record.get("name"), str):
        return "the tool call has no name"
    call_id = record.get("id")
    return _checked_call(
        record["name"], record.get(key, {}), key=key, call_id=call_id if isinstance(call_id, str) else None
    )


def _checked_call(
    name: str, arguments: Any, *, key: str = "arguments", call_id: str | None = None
) -> dict[str, Any] | str:
    """The call, or what is wrong with it; arguments may be JSON text."""
    if not name:
        return "the tool call has no name"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return f"the tool call's {key} are not JSON"
    if not isinstance(arguments, dict):
        return f"the tool call's {key} are not a JSON object"
    try:
        return make_call(name, arguments, call_id)
    except RecursionError:  # read at the very limit of nesting, and a level too deep to be written
        return f"the tool call's {key} are nested too deeply"


def _string_arguments(name: str, tools: Tools) -> set[str]:
    """Arguments that this tool declares as strings: ``17`` stays text there."""
    for tool in tools:
        function = tool.get("function") or tool
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {k for k, schema in properties.items() if schema.get("type") == "string"}
    return set()


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def native_parser(template: str) -> Parser | None:
    """The parser of the calls that this chat template writes, None when it is told of no tools.

    None also when it has a format of its own that no parser here reads.
    """
    if "tools" not in template:
        return None
    if _KIMI_SECTION[0] in template:
        return parse_kimi
    if _DEEPSEEK_SECTION[0] in template:
        return parse_deepseek
    if _MISTRAL in template:
        return parse_mistral
    if "<tool_call>" in template and "<arg_key>" in template:
        return parse_glm
    if "<tool_call>" in template and "<function=" not in template:
        return parse_hermes
    if '"parameters": ' in template and "ipython" in template:
        return parse_llama
    return None


def text_parser(template: str) -> Parser:
    """The parser of calls by a model that was asked in the system message for the Hermes format.

    DeepSeek's first templates are told of no tools and yet write calls: a model trained on them may
    answer in that format.
    """
    if _DEEPSEEK_SECTION[0] not in template:
        return parse_hermes

    def parse(text: str, tools: Tools = ()) -> ParsedText:
        return (parse_hermes if _HERMES[0] in text else parse_deepseek)(text, tools)

    return parse


def describe_tools(tools: Tools) -> str:
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


def tools_as_text(messages: Sequence[Message], tools: Tools | None = None) -> list[Message]:
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
