"""How does the view reach the browser? Numbered messages that hold what changed, each of them small.

A message is ``{"type": "view", "seq", "reset", "more", "tables"}`` and perhaps ``head``. ``tables`` holds
rows to add or replace. Numbers are consecutive; a view that misses one asks for everything (``resync``),
which starts with ``reset``. ``more`` says that the next message belongs to the same picture. Of a long run
everything is an outline (``thinned``); a view that zooms in asks for what lies between (``detail``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MOST_BYTES = 200_000
"""Of one message's JSON. Front ends drop or choke on messages of megabytes."""

Tables = Mapping[str, Mapping[str, Mapping[str, Any]]]


class Stream:
    """The messages from one picture to the next."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._seq = 0
        self._head: Mapping[str, Any] = {}
        self._sent: dict[str, dict[str, Mapping[str, Any]]] = {}

    def changes(self, head: Mapping[str, Any], tables: Tables) -> list[dict[str, Any]]:
        """What leads from the last picture to this one; nothing when they are the same."""
        is_shrunk = any(set(rows) - set(tables.get(name, {})) for name, rows in self._sent.items())
        if is_shrunk:  # a rollback: rows that do not count any more
            return self.everything(head, tables)
        new = {
            name: {key: row for key, row in rows.items() if not self._has(name, key, row)}
            for name, rows in tables.items()
        }
        self._sent = {name: dict(rows) for name, rows in tables.items()}
        return self.news(head, new)

    def news(self, head: Mapping[str, Any], new: Tables) -> list[dict[str, Any]]:
        """The same for who knows which rows are new: nothing is compared, so long runs cost no more."""
        told = head if head != self._head else None
        if told is None and not any(new.values()):
            return []
        return self._messages(told, new, head)

    def everything(self, head: Mapping[str, Any], tables: Tables) -> list[dict[str, Any]]:
        """The whole picture, for a view that knows nothing."""
        self._sent = {name: dict(rows) for name, rows in tables.items()}
        messages = self._messages(head, tables, head)
        messages[0]["reset"] = True
        return messages

    def _has(self, name: str, key: str, row: Mapping[str, Any]) -> bool:
        sent = self._sent.get(name, {}).get(key)
        return sent is row or (sent is not None and sent == row)

    def _messages(
        self, told: Mapping[str, Any] | None, new: Tables, head: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        message = self._next({} if told is None else {"head": told})
        messages, size = [message], _size(told)
        for name, rows in new.items():
            for key, row in rows.items():
                length = _size(row) + len(key) + 8
                if size + length > self._most:
                    message["more"] = True
                    message, size = self._next({}), 0
                    messages.append(message)
                message["tables"].setdefault(name, {})[key] = row
                size += length
        self._head = head
        return messages

    def _next(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        self._seq += 1
        return {"type": "view", "seq": self._seq, "reset": False, "more": False, "tables": {}, **extra}


def thinned(
    rows: Mapping[str, Mapping[str, Any]], most_bytes: int, *, latest: float = 0.25
) -> dict[str, Mapping[str, Any]]:
    """About so many bytes of rows in the order of their steps: of too many every k-th, the latest in full.

    ``latest`` is the share of the bytes that the latest rows get.

    >>> rows = {str(step): {"step": step} for step in range(100)}
    >>> list(thinned(rows, 8 * len('{"step": 10}')))
    ['0', '16', '33', '49', '65', '82', '98', '99']
    """
    keys = sorted(rows, key=lambda key: rows[key]["step"])
    some = keys[:: max(1, len(keys) // 64)]
    most = max(2, most_bytes * len(some) // max(1, sum(_size(rows[key]) for key in some)))
    if len(keys) > most:
        ends = len(keys) - max(1, round(latest * most))
        evenly = most - (len(keys) - ends)
        keys = [keys[round(i * ends / evenly)] for i in range(evenly)] + keys[ends:]
    return {key: rows[key] for key in keys}


def _size(value: Any) -> int:
    return len(json.dumps(value))
