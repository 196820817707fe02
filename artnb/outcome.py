"""Did a run do what was asked of it? One check at a notebook's end, so that its exit code is right.

It reads the run's own journal. Papermill's metadata cannot be trusted with that: it marks cells "completed"
after a kernel died in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from artnb.dashboard.alarms import KINDS, Alarm
from artnb.dashboard.view import View
from artnb.errors import ConfigurationError, RunFailed
from artnb.report import outcome
from artnb.ui.snapshot import is_step, number_text, reward_of

_ALL = ("any", "serious")


def assert_ok(run: Any, steps: int | None, alarms: Iterable[str], min_reward: float | None) -> None:
    """See ``RunFolder.assert_ok``."""
    kinds = _checked_kinds(alarms)
    if min_reward is not None and not math.isfinite(min_reward):
        raise ConfigurationError(f"min_reward must be a finite number or None, got {min_reward}")
    problems = [*_unfinished(run, steps), *_alarmed(run, kinds), *_too_low(run, min_reward)]
    if problems:
        raise RunFailed(f"run {run.name!r} did not come out as asked: {'; '.join(problems)}")


def _checked_kinds(alarms: Iterable[str]) -> list[str]:
    kinds = [alarms] if isinstance(alarms, str) else list(alarms)
    unknown = [kind for kind in kinds if kind not in (*KINDS, *_ALL)]
    if unknown:
        raise ConfigurationError(
            f"there is no alarm {', '.join(map(repr, unknown))}. There are: {', '.join((*KINDS, *_ALL))}"
        )
    return kinds


def _unfinished(run: Any, steps: int | None) -> list[str]:
    found = outcome(run.events(), run.trained_steps)
    wanted = found["steps_asked"] if steps is None else steps
    if wanted is None:
        return [] if found["steps"] else ["it took no training step"]
    if found["steps"] >= wanted:
        return []
    reasons = {"stopped": _stop_reason(run), "interrupted": "it was interrupted"}
    reason = reasons.get(found["status"], "its loop ended early")
    return [f"it took {found['steps']} of {wanted} steps: {reason}. Run its training cell again to go on"]


def _stop_reason(run: Any) -> str:
    stops = [event for event in run.events() if event.get("kind") == "stopped"]
    return f"it was stopped ({stops[-1].get('reason')})" if stops else "it was stopped"


def _alarmed(run: Any, kinds: Sequence[str]) -> list[str]:
    if not kinds:
        return []
    view = View(run)
    while view.look():  # a look reads for a tenth of a second
        pass
    found = [Alarm(**alarm) for alarm in view.head["alarms"]]
    wanted = [
        a for a in found if a.kind in kinds or "any" in kinds or ("serious" in kinds and _is_serious(a))
    ]
    return [f"{alarm.kind} at step {alarm.step}: {alarm.text.rstrip('.')}" for alarm in wanted]


def _is_serious(alarm: Alarm) -> bool:
    return alarm.level == "serious"


def _too_low(run: Any, minimum: float | None) -> list[str]:
    if minimum is None:
        return []
    result = run.result() or {}
    after = (result.get("evaluation") or {}).get("after")
    if after is not None and result.get("steps") == run.trained_steps:  # of this policy, not an earlier one
        reward, what = after.get("mean_reward"), "the evaluation after training"
    else:
        steps = [record for record in run.metrics() if is_step(record)]
        reward, what = (reward_of(steps[-1]) if steps else None), "the last step"
    if reward is None:
        return [f"{what} has no reward, {number_text(minimum)} was wanted"]
    if reward >= minimum:
        return []
    return [f"the mean reward of {what} is {number_text(reward)}, {number_text(minimum)} was wanted"]
