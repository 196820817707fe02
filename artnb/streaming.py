"""Which part of an answer can be told while the rest is still being sampled? What no later token changes."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from artnb.types import Message

_THINKING = ("<think>", "</think>")
_MARKUP = re.compile(r"[<\[{`]")
"""What tool calls begin with, in any family of models."""

Delta = dict[str, Any]


class Tokens:
    """The tokens of a request's choices, as engines tell them in threads of their own."""

    def __init__(self, choices: int) -> None:
        self.ids: list[list[int]] = [[] for _ in range(choices)]
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    def hear(self, choice: int, token: int) -> None:
        """Take a token, in any thread."""
        self.ids[choice].append(token)
        with contextlib.suppress(RuntimeError):  # the loop has been closed: there is nobody to tell
            self._loop.call_soon_threadsafe(self._news.set)

    def wake(self) -> None:
        """Have ``news`` return."""
        self._news.set()

    async def news(self) -> None:
        """Wait until there are tokens since the last call, or ``wake`` was called."""
        await self._news.wait()
        self._news.clear()


class Spelling:
    """The text of one choice in pieces; ``parse`` reads the tokens so far as a message without tool calls."""

    def __init__(
        self, parse: Callable[[Sequence[int]], Message], *, stop: Sequence[str], has_tools: bool
    ) -> None:
        self._parse, self._stop, self._has_tools = parse, stop, has_tools
        self._sent = {"reasoning_content": "", "content": ""}
        self._read = 0

    def more(self, ids: Sequence[int]) -> list[Delta]:
        """What can be told now and was not yet."""
        if len(ids) == self._read:
            return []
        self._read = len(ids)
        message = self._parse(ids)
        content = settled(message.get("content") or "", self._stop, has_tools=self._has_tools)
        return self._new(
            {"reasoning_content": settled(message.get("reasoning_content") or ""), "content": content}
        )

    def rest(self, message: Mapping[str, Any]) -> list[Delta]:
        """What is left of the finished message, its tool calls among it."""
        calls = enumerate(message.get("tool_calls") or ())
        return [
            *self._new({name: message.get(name) or "" for name in self._sent}),
            *({"tool_calls": [{"index": number, **call}]} for number, call in calls),
        ]

    def _new(self, texts: Mapping[str, str]) -> list[Delta]:
        found: list[Delta] = []
        for name, text in texts.items():
            before = self._sent[name]
            if len(text) > len(before) and text.startswith(before):
                found.append({name: text[len(before) :]})
                self._sent[name] = text
        return found


def settled(text: str, stop: Sequence[str] = (), *, has_tools: bool = False) -> str:
    """The beginning of an unfinished text that stays as it is, whatever comes next.

    Left out is what may still become markup, a tool call, a stop string or a character of several tokens, and
    white space, which may turn out to be the end.

    >>> settled("4 \\ufffd"), settled("kite </ca", ["</call>"]), settled("It is <b>so</b>.")
    ('4', 'kite', 'It is <b>so</b>.')
    >>> settled('I ask. {"name": "price"', has_tools=True)
    'I ask.'
    """
    if has_tools:
        begun = _MARKUP.search(text)
        text = "" if text[:1].isspace() else text[: begun.start() if begun else None]
    text = text.rstrip("\ufffd")
    held = max(_begun(text, mark) for mark in (*_THINKING, *stop))
    return text[: len(text) - held].rstrip()


def _begun(text: str, mark: str) -> int:
    """How many characters at the end of the text are the beginning of ``mark``."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


class Chunks:
    """Chunks of a stream as OpenAI forms them."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._head = {**head, "object": "chat.completion.chunk"}
        self._begun: set[int] = set()

    def of(self, index: int, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        """What is new of one choice; its first chunk says who speaks."""
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""})
        for delta in deltas:
            yield self._chunk(index, delta)

    def last(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        """The end of a choice, with its turn."""
        told = {name: value for name, value in choice.items() if name not in ("index", "message")}
        return self._chunk(choice["index"], {}, **told)

    def usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage}

    def _chunk(self, index: int, delta: Delta, **more: Any) -> dict[str, Any]:
        return {**self._head, "choices": [{"index": index, "delta": delta, "finish_reason": None, **more}]}
