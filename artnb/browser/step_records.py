"""What did training record of a step's tokens, and which advantage did each trajectory get?

Read from store/token_records.py, one step at a time, when something of it is to be seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from artnb.browser.plain import text
from artnb.browser.rows import Table
from artnb.errors import ArtnbError
from artnb.store.checkpoints import step_name
from artnb.store.index import short_id
from artnb.store.token_records import read_token_records


class StepRecords:
    """Token records of a run; ``path`` is its folder, or None where there is no run."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._last: tuple[int, int, Mapping[str, Any]] | None = None
        self._known: dict[int, int] = {}

    def of(self, step: int, id: str) -> tuple[Any, str]:
        """The TokenRecord of a trajectory, or None and why there is none."""
        if self.path is None:
            return None, "these groups belong to no run: browse the run, or pass model="
        try:
            records = self._read(step)
        except ArtnbError as error:  # damaged, or safetensors is not installed
            return None, str(error)
        if records is None:
            return None, f"no training step has recorded the tokens of step {step}"
        found = records.get(id)
        return found, "" if found is not None else f"step {step} did not train on this trajectory"

    def add_advantages(self, table: Table, steps: Iterable[int], seconds: float) -> None:
        """Give the table the mean advantages of these steps, as far as that takes no longer than so."""
        until = time.monotonic() + seconds
        for step in steps:
            stamp = self._stamp(step)
            if stamp is None or self._known.get(step) == stamp:
                continue
            self._known[step] = stamp
            try:
                records = self._read(step) or {}
            except ArtnbError:  # the detail view says what is wrong
                continue
            for name, record in records.items():
                own = record.advantages[np.isfinite(record.advantages)]
                if len(own):
                    table.advantages[text(short_id(name))] = float(own.mean())
            for key in ("advantage", ("ranks", "advantage")):
                table.cache.pop(key, None)
            if time.monotonic() > until:
                return

    def forget(self) -> None:
        """A new table knows no advantages."""
        self._known.clear()

    def _read(self, step: int) -> Mapping[str, Any] | None:
        """Records by id, None when the step has none. Raises ArtnbError."""
        stamp = self._stamp(step)
        if stamp is None or self.path is None:
            return None
        if self._last is None or self._last[:2] != (step, stamp):
            self._last = step, stamp, read_token_records(self.path, step)
        return self._last[2]

    def _stamp(self, step: int) -> int | None:
        """Changes when the step's file does."""
        if self.path is None:
            return None
        try:
            return (self.path / "tokens" / f"{step_name(step)}.safetensors").stat().st_mtime_ns
        except OSError:
            return None
