"""What did a person ask of a running loop? The control events of its journal, read in order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from artnb.errors import ConfigurationError

Control = Literal["stop", "pause", "resume", "learning_rate"]


@dataclass
class Controls:
    """What is asked for now.

    >>> asked = Controls.of([{"kind": "control", "control": "pause"}])
    >>> asked.paused, asked.stop
    (True, False)
    """

    stop: bool = False
    """The loop ends after the step that is under way."""
    paused: bool = False
    """The next gather waits."""
    learning_rate: float | None = None
    """Taken by every step instead of the notebook's own; None leaves it to the notebook."""

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Controls:
        controls = cls()
        for event in events:
            controls.add(event)
        return controls

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in one event of the journal; others than control events pass by."""
        if event.get("kind") == "opened":
            # a new process neither waits nor stops for what the old one was asked
            self.stop = self.paused = False
        elif event.get("kind") == "stopped":
            self.stop = False
        elif event.get("kind") == "control":
            self._apply(event.get("control"), event.get("value"))

    def _apply(self, control: Any, value: Any) -> None:
        if control == "stop":
            self.stop, self.paused = True, False
        elif control in ("pause", "resume"):
            self.paused = control == "pause"
        elif control == "learning_rate":
            self.learning_rate = value


def check_control(control: str, value: Any) -> None:
    """Raise ConfigurationError for what cannot be asked."""
    if control not in Control.__args__:  # type: ignore[attr-defined]
        raise ConfigurationError(f"a run can be asked to {', '.join(Control.__args__)}; got {control!r}")  # type: ignore[attr-defined]
    if control != "learning_rate" or value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value > 0):
        raise ConfigurationError(f"the learning rate must be a number > 0, or None; got {value!r}")
