"""Which step comes next, and what does a person want of the loop meanwhile? The steering half of a Run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from artnb.errors import ArtnbError, ConfigurationError
from artnb.store.controls import GROUP_SIZES, Controls, Target, check_control

Rule = Callable[[Any], Mapping[str, Any] | None]
"""What changes settings between two steps: a function of the run."""


class Loop:
    """What ``Run`` inherits: step numbers, and what a person asks for, which its journal remembers."""

    path: Path
    step: int
    """Training steps finished so far, skipped ones included."""
    controls: Controls
    """What a person asked of the loop; see ``ask``."""
    on_roll_back: Callable[[Target], object] | None = None
    """Takes model and run back to a checkpoint; the model sets it."""
    _has_begun = False

    def record_event(self, kind: str, **fields: Any) -> None:
        """Append a line to events.jsonl."""
        raise NotImplementedError

    def steps(self, total: int, *, rules: Sequence[Rule] = ()) -> Iterator[int]:
        """Step numbers from where the run stands up to ``total - 1``.

        rules: called with this run before each step; what they return, values by name as ``ask`` takes them,
        is asked for when it differs from what is set, and the journal says by which rule.
        Ends early when a file named STOP appears in the run folder, which is removed, or after
        ``ask("stop")``. After ``ask("roll_back", to)`` it goes on from the step that was gone back to.
        """
        self.record_event("loop", step=self.step, total=total)
        self._has_begun = True
        step = self.step
        while True:
            if self._takes_roll_back():
                step = self.step
            if self.takes_stop():
                return
            if step >= total:
                break
            self._adjust(rules)
            before = self.step
            yield step
            step = step + 1 if self.step == before else self.step
        self.record_event("finished", step=self.step)

    def _adjust(self, rules: Sequence[Rule]) -> None:
        for rule in rules:
            for name, value in dict(rule(self) or {}).items():
                now: Any = self.controls.settings.get(name)
                if name == GROUP_SIZES:
                    now, value = self.controls.group_sizes or None, value or None
                if value != now:
                    self.ask(name, value, by=getattr(rule, "__name__", type(rule).__name__))

    def takes_stop(self) -> bool:
        """True once for each stop that was asked for, by click or by file; it counts as carried out."""
        reasons = ["STOP file"] * self.has_stop_file + ["asked for"] * self.controls.stop
        if not reasons:
            return False
        (self.path / "STOP").unlink(missing_ok=True)
        self.record_event("stopped", step=self.step, reason=reasons[0])
        return True

    @property
    def has_stop_file(self) -> bool:
        return (self.path / "STOP").exists()

    def _takes_roll_back(self) -> bool:
        to = self.controls.roll_back
        if to is None:
            return False
        try:
            if self.on_roll_back is None:
                raise ConfigurationError("no model holds this run, so there is nothing to go back with")
            self.on_roll_back(to)
        except ArtnbError as error:  # the loop goes on where it stands, and its journal says why
            self.record_event("refused", control="roll_back", value=to, step=self.step, message=str(error))
            return False
        return True

    def ask(self, control: str, value: Any = None, *, by: str | None = None) -> None:
        """Ask the running loop for something; any thread may, and the journal remembers it.

        stop: ``steps`` ends after the step under way. pause: the next ``gather``, ``evaluate`` or
        ``train_step`` waits for resume, or for stop. roll_back: ``steps`` goes back to the checkpoint of
        step ``value``, or to the best one ("best"), after the step under way. A name of
        ``store.controls.SETTINGS``, such as ``learning_rate``: from the next step on ``value`` is taken
        instead of the notebook's own; None gives that back. group_sizes: attempts at single scenarios, a dict
        by id, for example more at the hard ones. by: who asks, when it is not a person. Raises
        ConfigurationError, and what ``record_event`` raises.
        """
        check_control(control, value)
        asking = {} if by is None else {"by": by}
        self.record_event("control", control=control, step=self.step, value=value, **asking)

    def note(self, text: str) -> None:
        """Write a person's remark into the journal."""
        self.record_event("note", step=self.step, text=text)
