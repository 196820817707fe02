"""In which form does an agent say one thing a turn? As a bare word, inside a tag, or as a tool call."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from artnb import Trajectory, Turn
from artnb_environments import read_tagged

STYLES = ("word", "tags", "tools")


@dataclass(frozen=True)
class Form:
    """How one value a turn is asked for, shown in worked turns, and read."""

    style: str
    """``word``: 7; ``tags``: <guess>7</guess>; ``tools``: a call of the API, guess(number=7)."""
    name: str
    """Of the tool and of the tag."""
    argument: str
    """Of the tool."""
    pattern: str
    """Regular expression of the values, without groups; case does not count."""
    about: str
    """What the tool does, for its description."""
    keep_case: bool = False
    """Read values as they were written, not in lower case."""

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tool in the tools style, else None."""
        if self.style != "tools":
            return None
        parameters = {
            "type": "object",
            "properties": {self.argument: {"type": "string", "description": "one value"}},
            "required": [self.argument],
        }
        function = {"name": self.name, "description": self.about, "parameters": parameters}
        return [{"type": "function", "function": function}]

    def written(self, value: object) -> str:
        """A reply with this value, as a text for prompts."""
        return {
            "word": f"{value}",
            "tags": f"<{self.name}>{value}</{self.name}>",
            "tools": f"{self.name}({self.argument}={value})",
        }[self.style]

    def reply(self, value: object, number: int = 0) -> dict[str, Any]:
        """The assistant's message with this value; ``number`` makes the id of its call."""
        if self.style != "tools":
            return {"role": "assistant", "content": self.written(value)}
        function = {"name": self.name, "arguments": json.dumps({self.argument: f"{value}"})}
        call = {"id": f"example_{number}", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def answer(self, message: dict[str, Any], text: str) -> list[dict[str, Any]]:
        """What the environment says to an assistant's message: a result for each call, or a user's turn."""
        calls = (message.get("tool_calls") or []) if self.style == "tools" else []
        if not calls:
            return [{"role": "user", "content": text}]
        results = [text] + ["not made: one call a turn"] * (len(calls) - 1)
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]

    def read(self, turn: Turn) -> str | None:
        """The value, in lower case unless ``keep_case``; None for a reply that is anything but one value.

        The engine cuts a reply before a stop string. A bare word may also end at the token limit.
        """
        message = turn.message
        if self.style == "tools":
            return self._called(message.get("tool_calls") or [])
        text = message.get("content")
        if self.style == "tags":
            is_cut = turn.finish_reason == "length"
            return read_tagged(text, self.name, self.pattern, cut_off=is_cut, keep_case=self.keep_case)
        return self._value((text or "").strip().removesuffix("."))

    def _called(self, calls: list[dict[str, Any]]) -> str | None:
        if len(calls) != 1 or calls[0]["function"]["name"] != self.name:
            return None
        try:
            arguments = json.loads(calls[0]["function"]["arguments"])
        except (ValueError, TypeError, RecursionError):  # a thousand brackets are no arguments either
            return None
        value = arguments.get(self.argument) if isinstance(arguments, dict) else None
        if isinstance(value, bool) or not isinstance(value, str | int):
            return None
        return self._value(value.strip() if isinstance(value, str) else f"{value:d}"[:100])

    def _value(self, text: str) -> str | None:
        if not re.fullmatch(self.pattern, text, re.IGNORECASE):
            return None
        return text if self.keep_case else text.lower()

    def options(self, max_tokens: int | None, longest_word: int) -> dict[str, Any]:
        """Of every request; ``max_tokens`` None: as long as the form needs, 64 for a call."""
        limit = {"word": longest_word, "tags": 8 + longest_word, "tools": 64}[self.style]
        stop = {"word": ["\n"], "tags": [f"</{self.name}>"]}.get(self.style)
        return {"max_tokens": max_tokens or limit} | ({"stop": stop} if stop else {})


def credit_turns(trajectory: Trajectory, credits: Iterable[float]) -> None:
    """Give the trajectory's turns, in order, these credits; those beyond the last keep theirs."""
    left = iter(credits)
    histories = [trajectory.messages_and_choices]
    for items in histories + [history.messages_and_choices for history in trajectory.additional_histories]:
        for index, item in enumerate(items):
            if isinstance(item, Turn):
                credit = next(left, None)
                items[index] = item if credit is None else item.with_credit(credit)
