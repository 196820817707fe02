"""Which exact tokens stand behind these messages?

Chat requests carry messages only. The same text can be tokenised in several ways, and a model need
not have sampled the canonical one; so a finished turn is remembered under a key of its whole
conversation, and the next request finds the longest conversation that it extends.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from artnb.types import Message, Turn


@dataclass(frozen=True)
class Remembered:
    """A conversation that ends with one of the model's own turns."""

    messages: tuple[Message, ...]
    """Including the assistant's message of the turn."""
    turn: Turn


class PromptMemory:
    """A bounded, least-recently-used map from conversations to the turns that ended them.

    Keys do not hold the policy version. Token ids are what a model reads, not what it computed: a
    prompt built from a turn of an older policy is as exact as any other, and the version of every
    sampled token stays on its own turn. (An engine's prefix *cache* is another matter.)
    """

    def __init__(self, max_tokens: int = 2_000_000) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._entries: OrderedDict[bytes, Remembered] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def remember(self, key: bytes, messages: Sequence[Message], turn: Turn) -> None:
        """Keep a turn under the key of ``messages``, which end with the turn's message."""
        with self._lock:
            self._forget(key)
            self._entries[key] = Remembered(tuple(messages), turn)
            self._tokens += _size(turn)
            while self._tokens > self._max_tokens and len(self._entries) > 1:
                self._forget(next(iter(self._entries)))

    def find(self, keys: Sequence[bytes]) -> Remembered | None:
        """The longest remembered conversation among these prefixes' keys."""
        with self._lock:
            for key in reversed(keys):
                if key in self._entries:
                    self._entries.move_to_end(key)
                    return self._entries[key]
        return None

    def _forget(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._tokens -= _size(entry.turn)


def _size(turn: Turn) -> int:
    return len(turn.prompt_ids) + len(turn.completion_ids)


def conversation_keys(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, scope: str = ""
) -> list[bytes]:
    """One key for each beginning of the conversation; ``scope`` names the renderer."""
    key = scope.encode()
    if tools:
        key += json.dumps(tools, sort_keys=True).encode()
    keys = []
    for message in messages:
        key = next_key(key, message)
        keys.append(key)
    return keys


def next_key(key: bytes, message: Message) -> bytes:
    """The key of a conversation with one more message."""
    return hashlib.blake2b(key + b"\0" + canonical(message).encode(), digest_size=16).digest()


def text_of(content: Any) -> str:
    """A message's content as one string: parts are joined, None is empty.

    >>> text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    'ab'
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part["text"] for part in content)


def canonical(message: Message) -> str:
    """What makes two messages the same: role, content, name, and the calls without their ids.

    White space around an assistant's text and inside a call's JSON does not count, because agent
    frameworks change it; the model's own tokens are used in any case.
    """
    role, content = message["role"], text_of(message.get("content"))
    if role == "assistant":
        content = content.strip()
    calls = [_canonical_call(call) for call in message.get("tool_calls") or ()]
    return json.dumps([role, content, calls, message.get("name")], sort_keys=True)


def _canonical_call(call: dict[str, Any]) -> list[Any]:
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return [function.get("name"), arguments]
    return [function.get("name"), arguments]


def same_message(one: Message, other: Message) -> bool:
    """True when two messages are the same turn of a conversation."""
    return one is other or canonical(one) == canonical(other)
