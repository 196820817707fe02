"""Which trajectories say this? Their lines are read one after another, in a thread that can be stopped."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from artnb.browser.plain import mapping, sequence
from artnb.browser.rows import Mask, Rows
from artnb.store.codec import decode
from artnb.ui.snapshot import content_text

_PLAIN = re.compile(r"[a-z0-9 .,;:!?()\[\]{}<>=+*/_'-]{2,}")
_SHOW_SECONDS, _PATIENCE_SECONDS = 0.1, 10.0


class Search:
    """Rows whose messages hold all of ``needles`` and none that is negated; more rows may be looked at later.

    It rests when nobody asked for ``share`` for some seconds, and goes on when it is started again.
    """

    def __init__(self, needles: Sequence[tuple[str, bool]]) -> None:
        self.needles = [(needle.casefold(), is_negated) for needle, is_negated in needles]
        self._surely = [longest for needle, no in self.needles if not no and (longest := _plain_part(needle))]
        """Bytes without which a line cannot hold a needle."""
        self._looked: Mask = np.zeros(0, bool)
        self._hits: Mask = np.zeros(0, bool)
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._share: float | None = None
        self._found = 0
        self._asked = time.monotonic()

    @property
    def share(self) -> float | None:
        """Share of the rows that were looked at; None when nothing is searched."""
        self._asked = time.monotonic()
        return self._share

    @property
    def found(self) -> int:
        """How many hits there were so far: grows while the thread works."""
        return self._found

    def start(self, rows: Rows, count: int, read: Callable[[int], bytes]) -> None:
        """Look at those of these rows that were not looked at; ``count`` is the size of the table.

        ``read`` gives the line of a row, and raises OSError or LookupError where there is none any more.
        """
        self.stop()
        grown = count - len(self._looked)
        if grown > 0:
            self._looked = np.concatenate([self._looked, np.zeros(grown, bool)])
            self._hits = np.concatenate([self._hits, np.zeros(grown, bool)])
        todo = rows[~self._looked[rows]]
        if not len(todo):
            return
        self._is_stopped.clear()
        self._share = 1 - len(todo) / max(len(rows), 1)
        self._thread = threading.Thread(
            target=self._work, args=(todo, len(rows), read), name="artnb-search", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the search; what was found stays."""
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def wait(self, seconds: float) -> None:
        """Let the thread work for so long, or until it is done."""
        if self._thread is not None:
            self._thread.join(seconds)

    def hits(self, rows: Rows) -> Rows:
        """Those of the rows that were found so far."""
        return rows[self._hits[rows]]

    def is_done(self, rows: Rows) -> bool:
        """True when all of these rows were looked at."""
        return len(self._looked) > int(rows.max(initial=-1)) and bool(self._looked[rows].all())

    def _work(self, rows: Rows, total: int, read: Callable[[int], bytes]) -> None:
        told = self._asked = time.monotonic()
        try:
            for done, row in enumerate(rows.tolist()):
                if self._is_stopped.is_set() or told - self._asked > _PATIENCE_SECONDS:
                    return
                if self._fits(row, read):
                    self._hits[row] = True
                    self._found += 1
                self._looked[row] = True
                if time.monotonic() - told > _SHOW_SECONDS:
                    told = time.monotonic()
                    self._share = 1 - (len(rows) - done - 1) / max(total, 1)
        finally:
            self._share = None

    def _fits(self, row: int, read: Callable[[int], bytes]) -> bool:
        try:
            line = read(row)
        except (OSError, LookupError):  # its file went away meanwhile
            return False
        low = line.lower()
        if any(part not in low for part in self._surely):
            return False
        try:
            record = decode(line)
        except ValueError:
            return False
        said = "\n".join(spoken(mapping(mapping(record).get("trajectory")))).casefold()
        return all((needle in said) != is_negated for needle, is_negated in self.needles)


def spoken(trajectory: Mapping[str, Any]) -> Iterator[str]:
    """Every text of a stored trajectory that a person may look for: messages, calls, logs, error."""
    for history in [trajectory, *map(mapping, sequence(trajectory.get("additional_histories")))]:
        for item in map(mapping, sequence(history.get("messages_and_choices"))):
            message = mapping(mapping(item.get("turn")).get("message") or item.get("message"))
            yield content_text(message.get("content"))
            yield content_text(message.get("reasoning_content"))
            for call in map(mapping, sequence(message.get("tool_calls"))):
                function = mapping(call.get("function"))
                arguments = function.get("arguments")
                yield str(function.get("name"))
                yield arguments if isinstance(arguments, str) else json.dumps(arguments, default=repr)
    yield from map(str, sequence(trajectory.get("logs")))
    error = mapping(trajectory.get("error"))
    yield from (str(error[name]) for name in ("type", "message", "traceback") if name in error)


def _plain_part(needle: str) -> bytes:
    """The longest piece that stands in a line's JSON as it was written, whatever JSON does to the rest."""
    pieces = _PLAIN.findall(needle.lower())
    return max(pieces, key=len, default="").encode()
