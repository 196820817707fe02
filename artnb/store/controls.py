"""What did a person ask of a running loop? The control events of its journal, read in order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from artnb.errors import ConfigurationError

Target = int | Literal["best"]
"""Where to go back to: so many steps, or the checkpoint whose policy earned the highest mean reward."""


@dataclass(frozen=True)
class Setting:
    """A number of the notebook's that a person may replace while the loop runs."""

    words: str
    low: float
    """Its smallest value; ``is_open`` leaves this one out."""
    is_open: bool = False
    is_whole: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigurationError when ``value`` cannot be it."""
        kinds = int if self.is_whole else int | float
        is_number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < self.low or (self.is_open and value == self.low):
            kind, sign = "whole number" if self.is_whole else "number", ">" if self.is_open else ">="
            raise ConfigurationError(
                f"{name} ({self.words}) must be a {kind} {sign} {self.low:g}, or None for the notebook's "
                f"own; got {value!r}"
            )


TRAINING = {
    "learning_rate": Setting("learning rate", 0.0, is_open=True),
    "kl_coef": Setting("weight of the KL to the base", 0.0),
    "entropy_coef": Setting("weight of the entropy bonus", 0.0),
    "clip_low": Setting("lower clip of the ratio", 0.0),
    "clip_high": Setting("upper clip of the ratio", 0.0),
    "ratio_cap": Setting("cap of the ratio in cispo", 0.0, is_open=True),
    "max_grad_norm": Setting("clip of the gradient norm", 0.0, is_open=True),
    "weight_decay": Setting("weight decay", 0.0),
    "minibatches": Setting("updates a step", 1.0, is_whole=True),
}
"""Fields of TrainConfig that every step takes from here when they are set."""
GATHERING = {
    "group_size": Setting("attempts at a scenario", 1.0, is_whole=True),
    "concurrency": Setting("rollouts at once", 1.0, is_whole=True),
}
"""Arguments of gather; ``group_size`` only of rollouts to train on."""
SETTINGS = TRAINING | GATHERING
GROUP_SIZES = "group_sizes"
"""Attempts at single scenarios, by id, to train on: more at hard ones. Goes before ``group_size``."""
ACTIONS = ("stop", "pause", "resume", "roll_back")


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
    """The next gather, train_step or evaluate waits."""
    roll_back: Target | None = None
    """Where the loop goes back to after the step that is under way."""
    settings: dict[str, float] = field(default_factory=dict)
    """Values, by name in ``SETTINGS``, taken instead of the notebook's own."""
    group_sizes: dict[str, int] = field(default_factory=dict)
    """Attempts at a scenario, by its id."""

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Controls:
        controls = cls()
        for event in events:
            controls.add(event)
        return controls

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in one event of the journal; others than control events pass by."""
        kind = event.get("kind")
        if kind == "opened":
            # a new process does not wait, stop or go back for what the old one was asked
            self.stop = self.paused = False
            self.roll_back = None
        elif kind == "stopped":
            self.stop = self.paused = False
        elif kind in ("rolled_back", "refused"):
            self.roll_back = None
        elif kind == "control":
            self._apply(event.get("control"), event.get("value"))

    def _apply(self, control: Any, value: Any) -> None:
        if control == "stop":
            self.stop, self.paused = True, False
        elif control in ("pause", "resume"):
            self.paused = control == "pause"
        elif control == "roll_back":
            self.roll_back = value
        elif control == GROUP_SIZES:
            self.group_sizes = dict(value or {})
        elif control in SETTINGS and value is None:
            self.settings.pop(control, None)
        elif control in SETTINGS:
            self.settings[control] = value

    def given(self, settings: Mapping[str, Setting]) -> dict[str, Any]:
        """The values that are set among these settings."""
        return {name: value for name, value in self.settings.items() if name in settings}


def check_control(control: Any, value: Any) -> None:
    """Raise ConfigurationError for what cannot be asked."""
    if control in SETTINGS:
        if value is not None:
            SETTINGS[control].check(control, value)
    elif control == GROUP_SIZES:
        if value is not None and not isinstance(value, Mapping):
            raise ConfigurationError(f"{GROUP_SIZES} are numbers by scenario id, or None; got {value!r}")
        for size in (value or {}).values():
            GATHERING["group_size"].check("group_size", size)
    elif control == "roll_back":
        is_step = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not is_step and value != "best":
            raise ConfigurationError(f"a run goes back to a step or to 'best'; got {value!r}")
    elif control not in ACTIONS:
        known = ", ".join([*ACTIONS, *SETTINGS, GROUP_SIZES])
        raise ConfigurationError(f"a run can be asked for {known}; got {control!r}")
