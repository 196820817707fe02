"""What does an OpenAI chat request ask for, and what is wrong with it?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from artnb.config import SamplingConfig
from artnb.errors import ConfigurationError, RequestError
from artnb.secrets import redact
from artnb.types import Message

_MAX_N, _MAX_STOP, _MAX_TOP_LOGPROBS = 128, 16, 20
_ROLES = ("system", "developer", "user", "assistant", "tool")
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"} | {
    *("prompt_cache_retention", "parallel_tool_calls", "stream_options", "modalities", "verbosity")
}
"""Parameters that change nothing about what is sampled here."""
_NEUTRAL: dict[str, Any] = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}}
"""Parameters accepted at the value that asks for nothing."""
_SAMPLED = ("n", "stop", "temperature", "top_p", "top_k", "min_p", "seed")
_KNOWN = {"model", "messages", "tools", "tool_choice", "response_format", "stream", *_SAMPLED} | {
    *("max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "structured_outputs")
}


class ChatError(RequestError):
    """A chat request that is answered with an OpenAI error."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON body of OpenAI's error responses, without values of known keys."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": redact(str(self)), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """A chat request whose parameters are in range."""

    model: str
    messages: list[Message]
    sampling: SamplingConfig
    tools: list[dict[str, Any]] | None = None
    calls_allowed: bool = True
    """False with ``tool_choice="none"``: tools stay in the prompt, calls are not read."""
    n: int = 1
    fits_context: bool = False
    """True when max_tokens was not given and may shrink to what the context holds."""
    logprobs: bool = False
    top_logprobs: int = 0
    stream: bool = False
    include_usage: bool = False
    structured: dict[str, Any] | None = None
    """The form that an answer must have, as SampleRequest takes it."""


def read_request(body: Mapping[str, Any], defaults: SamplingConfig) -> ChatRequest:
    """Check a request body; ``defaults`` stand in for what it leaves out. Raises ChatError (400)."""
    given = {key: value for key, value in body.items() if value is not None}
    _refuse_unsupported(given)
    limit = given.get("max_completion_tokens", given.get("max_tokens"))
    tools, calls_allowed = _read_tools(given)
    logprobs = _boolean(given, "logprobs")
    top = _integer(given, "top_logprobs", 0, 0, _MAX_TOP_LOGPROBS)
    if top and not logprobs:
        raise ChatError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    options = given.get("stream_options", {})
    return ChatRequest(
        model=_text(given, "model"),
        messages=_read_messages(given),
        sampling=_read_sampling(given, defaults),
        tools=tools,
        calls_allowed=calls_allowed,
        n=_integer(given, "n", 1, 1, _MAX_N),
        fits_context=limit is None,
        logprobs=logprobs,
        top_logprobs=top,
        stream=_boolean(given, "stream"),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        structured=_read_structured(given),
    )


def _refuse_unsupported(given: Mapping[str, Any]) -> None:
    for key in given.keys() - _KNOWN - _IGNORED:
        if key not in _NEUTRAL:
            raise ChatError(400, f"unknown parameter {key!r}; known: {', '.join(sorted(_KNOWN))}", param=key)
        if given[key] != _NEUTRAL[key]:
            raise ChatError(
                400, f"{key} is not supported: it would change the policy that is trained", param=key
            )


def _read_structured(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """``response_format`` as OpenAI has it, or vLLM's ``structured_outputs``."""
    form = given.get("response_format", {"type": "text"})
    kind = form.get("type") if isinstance(form, dict) else None
    outputs = given.get("structured_outputs")
    if outputs is not None:
        if kind != "text":
            raise ChatError(
                400, "structured_outputs and response_format exclude each other", param="structured_outputs"
            )
        return _read_outputs(outputs)
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    schema = form.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise ChatError(
            400,
            "response_format must be {'type': 'text'}, {'type': 'json_object'} or "
            "{'type': 'json_schema', 'json_schema': {'name': ..., 'schema': {...}}}",
            param="response_format",
        )
    return {"json_schema": schema["schema"]}


def _read_outputs(outputs: Any) -> dict[str, Any]:
    kinds = {"json": dict, "regex": str, "choice": list}
    items = list(outputs.items()) if isinstance(outputs, dict) else []
    if len(items) != 1 or not isinstance(items[0][1], kinds.get(items[0][0], ())):
        raise ChatError(
            400,
            "structured_outputs takes one of json (a schema), regex (a pattern) and choice (a list of texts)",
            param="structured_outputs",
        )
    ((kind, value),) = items
    return {"json_schema" if kind == "json" else kind: value}


def _read_sampling(given: Mapping[str, Any], defaults: SamplingConfig) -> SamplingConfig:
    changes: dict[str, Any] = {}
    for key in ("temperature", "top_p", "min_p"):
        if key in given:
            changes[key] = _number(given, key)
    for key in ("top_k", "seed"):
        if key in given:
            changes[key] = _integer(given, key, 0)
    if changes.get("top_k") == -1:
        changes["top_k"] = 0
    for key in ("max_tokens", "max_completion_tokens"):
        if key in given:
            changes["max_tokens"] = _integer(given, key, 0, 1)
    if "stop" in given:
        changes["stop"] = _read_stop(given["stop"])
    try:
        return dataclasses.replace(defaults, **changes) if changes else defaults
    except ConfigurationError as error:
        raise ChatError(400, str(error), param=str(error).split()[0]) from error


def _read_stop(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) and s for s in stops):
        raise ChatError(400, "stop must be a string or a list of strings, none of them empty", param="stop")
    if len(stops) > _MAX_STOP:
        raise ChatError(400, f"stop takes at most {_MAX_STOP} strings, got {len(stops)}", param="stop")
    return tuple(stops)


def _read_tools(given: Mapping[str, Any]) -> tuple[list[dict[str, Any]] | None, bool]:
    tools = given.get("tools") or None
    for number, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ChatError(
                400, "a tool needs {'type': 'function', 'function': {'name': ...}}", param=f"tools[{number}]"
            )
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise ChatError(
            400,
            f"tool_choice={choice!r}: this engine cannot force a call. Use 'auto' (or 'none'), and ask "
            "for the call in the prompt.",
            param="tool_choice",
        )
    return tools, choice == "auto"


def _read_messages(given: Mapping[str, Any]) -> list[Message]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ChatError(400, "messages must be a list of at least one message", param="messages")
    for number, message in enumerate(messages):
        _check_message(message, f"messages[{number}]")
    return messages


def _check_message(message: Any, where: str) -> None:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in _ROLES:
        raise ChatError(400, f"role must be one of {', '.join(_ROLES)}; got {role!r}", param=f"{where}.role")
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise ChatError(400, f"a {role} message needs content", param=f"{where}.content")
    elif not isinstance(content, str):
        _check_parts(content, f"{where}.content")
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not {"name", "arguments"} <= function.keys():
            raise ChatError(
                400, "a tool call needs function.name and function.arguments", param=f"{where}.tool_calls"
            )


def _check_parts(parts: Any, where: str) -> None:
    if not isinstance(parts, list):
        raise ChatError(400, "content must be a string or a list of text parts", param=where)
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ChatError(400, f"this model reads text only, not {kind!r} parts", param=where)


def _number(given: Mapping[str, Any], key: str) -> float:
    value = given[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ChatError(400, f"{key} must be a number, got {value!r}", param=key)
    return float(value)


def _integer(
    given: Mapping[str, Any], key: str, default: int, low: int | None = None, high: int | None = None
) -> int:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ChatError(400, f"{key} must be a whole number, got {value!r}", param=key)
    if (low is not None and value < low) or (high is not None and value > high):
        limits = f">= {low}" if high is None else f"between {low} and {high}"
        raise ChatError(400, f"{key} must be {limits}, got {value}", param=key)
    return value


def _boolean(given: Mapping[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise ChatError(400, f"{key} must be true or false, got {value!r}", param=key)
    return value


def _text(given: Mapping[str, Any], key: str) -> str:
    value = given.get(key)
    if not isinstance(value, str) or not value:
        raise ChatError(400, f"{key} must be a string", param=key)
    return value
