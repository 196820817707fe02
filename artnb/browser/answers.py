"""How do questions of a page become answers? In worker threads, and in messages of moderate size.

A page asks ``{"type": "ask", "id", "view", "what", ...arguments}`` and gets ``{"type": "answer", "id",
"view", "data"}``, or ``"error"``, words, instead of ``"data"``. Long answers come in parts: pieces of the
JSON of the data, ``{"type": "part", "id", "view", "seq", "of", "text"}``.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from artnb.browser.source import Source
from artnb.errors import ArtnbError, ConfigurationError

MOST_BYTES = 200_000
"""Of one message's JSON."""
_THREADS = 4
"""A replay waits for its tokens in one of them; pages are turned meanwhile."""
_LONGEST_WORDS = 5000

log = logging.getLogger(__name__)

Question = Mapping[str, Any]


class Answers:
    """Takes questions in any thread, and calls ``put`` with messages in others."""

    def __init__(self, source: Source, put: Callable[[list[dict[str, Any]]], None]) -> None:
        self.source = source
        self.loop: asyncio.AbstractEventLoop | None = None
        """Where the model samples, once this is shown."""
        self._put = put
        self._pool = _threads()

    def ask(self, question: Question) -> None:
        """Answer this as soon as a thread is free."""
        self._pool.submit(self._work, dict(question))

    def close(self) -> None:
        """Forget what nobody began to answer. Asked again, this answers again."""
        before, self._pool = self._pool, _threads()
        before.shutdown(wait=False, cancel_futures=True)

    def _work(self, question: Question) -> None:
        place = {"id": question.get("id"), "view": question.get("view")}
        try:
            messages = in_parts(place, self._answer(question))
        except Exception as error:  # told to who asked; the page and the run go on
            if not isinstance(error, ArtnbError | OSError):
                log.warning("the trajectory browser could not answer %r", question.get("what"), exc_info=True)
            kind = "" if isinstance(error, ArtnbError) else f"{type(error).__name__}: "
            messages = [{"type": "answer", **place, "error": f"{kind}{error}"}]
        self._put(messages)

    def _answer(self, question: Question) -> Any:
        what = str(question.get("what"))
        if what == "replay":
            return self._replay(_name(question), int(question["turn"]))
        if what not in _QUESTIONS:
            raise ConfigurationError(f"the browser knows no question {what!r}")
        return _QUESTIONS[what](self.source, question)

    def _replay(self, name: str, turn: int) -> dict[str, Any]:
        """Sample a turn anew, in the loop that the model lives in."""
        if self.loop is None:
            raise ConfigurationError("a replay needs a notebook: its loop is where the model samples")
        told = asyncio.run_coroutine_threadsafe(self.source.replay(name, turn), self.loop).result()
        self.source.refresh()  # it may be opened at once
        return told


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="artnb-browse")  # started when one is needed


def _name(question: Question) -> str:
    return str(question["trajectory"])


def _query(source: Source, asked: Question) -> dict[str, Any]:
    return source.query(
        str(asked.get("filter") or ""),
        asked.get("sort") or [],
        bool(asked.get("tree")),
        expanded=asked.get("expanded") or [],
    )


def _export(source: Source, asked: Question) -> dict[str, Any]:
    chosen = [str(name) for name in asked["ids"]] if asked.get("ids") else str(asked["query"])
    return source.export(chosen, str(asked["kind"]), str(asked["path"]))


def _override(source: Source, asked: Question) -> dict[str, Any]:
    reward = asked.get("reward")
    return source.override(_name(asked), None if reward is None else float(reward), _words(asked.get("why")))


def _bookmark(source: Source, asked: Question) -> dict[str, Any]:
    note = asked.get("note")
    return source.bookmark(_name(asked), None if note is None else _words(note))


def _words(value: Any) -> str:
    return str(value or "").strip()[:_LONGEST_WORDS]


_QUESTIONS: dict[str, Callable[[Source, Question], Any]] = {
    "facts": lambda source, _: source.facts(),
    "query": _query,
    "progress": lambda source, asked: source.progress(str(asked["query"])),
    "page": lambda source, asked: source.page(str(asked["query"]), int(asked["start"]), int(asked["count"])),
    "trajectory": lambda source, asked: source.trajectory(_name(asked)),
    "tokens": lambda source, asked: source.tokens(_name(asked), int(asked["history"]), int(asked["start"])),
    "compare": lambda source, asked: source.compare([str(name) for name in asked["ids"]]),
    "same_scenario": lambda source, asked: source.same_scenario(_name(asked)),
    "extremes": lambda source, asked: source.extremes(asked.get("step")),
    "messages": lambda source, asked: source.as_messages(_name(asked), int(asked["history"])),
    "json": lambda source, asked: source.as_json(_name(asked)),
    "curl": lambda source, asked: source.as_curl(_name(asked), int(asked["turn"])),
    "export": _export,
    "override": _override,
    "bookmark": _bookmark,
}


def in_parts(place: Mapping[str, Any], data: Any, most_bytes: int = MOST_BYTES) -> list[dict[str, Any]]:
    """The messages of an answer: one, or parts that make its JSON when put behind each other.

    >>> [m["text"] for m in in_parts({"id": 1}, "abcdef", most_bytes=4)]
    ['"abc', 'def"']
    """
    text = json.dumps(data, allow_nan=False)
    if len(text) <= most_bytes:
        return [{"type": "answer", **place, "data": data}]
    pieces = [text[i : i + most_bytes] for i in range(0, len(text), most_bytes)]
    return [
        {"type": "part", **place, "seq": i, "of": len(pieces), "text": piece}
        for i, piece in enumerate(pieces)
    ]
