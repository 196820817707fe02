"""Is something wrong with this training? Alarms in words, from a run's numbers alone.

Every threshold stands here. An alarm says what was seen and what to do about it; it stops nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Row = Mapping[str, Any]
"""A step of the view: ``step`` and ``values``, a number by the name of its metric."""

RECENT = 200
"""Steps whose usual gradient, duration and noise the latest are compared with."""
WINDOW = 5
"""Steps over which rewards are averaged before they are compared."""
COLLAPSE_SHARE = 0.5
"""Share of the gain since the start that is lost again."""
COLLAPSE_NOISE = 3.0
"""The loss must also be so many standard errors of a window's mean."""
ENTROPY_SHARE = 0.1
"""Entropy against that of the first steps, below which the policy has stopped trying things."""
GAP = 0.1
"""Mean |engine - trainer logprob|; bf16 engines and trainers differ by 0.01 to 0.06."""
LEAST_SAMPLE_SIZE = 0.5
"""Effective sample size as a share of the samples."""
MOST_KL = 0.1
"""k3 estimate of KL to the sampling policy, in nats a token."""
SILENT_STEPS = 3
"""Steps in a row of which nothing, or next to nothing, could be learned."""
SILENT_SHARE = 0.9
"""Share of a step's groups whose rewards are all equal."""
OLDEST = 2
"""Policy versions between sampling and training."""
MOST_FAILED = 0.2
MOST_UNSCORED = 0.2
"""Share of a step's finished rollouts that neither a judge nor a reward function scored."""
MOST_INVALID = 0.3
"""Share of a judge's answers that could not be used and were asked for again."""
MOST_INVALID_TURNS = 0.3
"""By how much the share of turns that the environment could not use has grown since its lowest."""
MOST_TRUNCATED = 0.5
GRADIENT_TIMES = 10.0
"""Gradient norm against the median of the steps before."""
QUIET_SECONDS, QUIET_TIMES = 600.0, 5.0
"""A running run that wrote nothing for so long, and for so many of its steps' median duration."""

Level = Literal["warning", "serious"]
KINDS = (
    *("collapse", "entropy collapse", "drift", "engine and trainer disagree", "no signal"),
    *("judge trouble", "invalid answers", "staleness", "failures", "cut off", "gradient", "quiet"),
)
"""Every kind of alarm there is."""


@dataclass(frozen=True)
class Alarm:
    """``kind`` is one word or two, ``text`` a sentence or two, ``step`` where it was seen."""

    kind: str
    level: Level
    step: int
    text: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def alarms(rows: Sequence[Row], *, quiet_seconds: float | None = None) -> list[Alarm]:
    """What the latest steps give reason to say, the most serious first.

    rows: all steps in order. quiet_seconds: time since a running run last wrote something, None for one
    that is not running.

    >>> rows = [{"step": step, "values": {"reward_mean": 0.5, "kl_k3": 0.2}} for step in range(3)]
    >>> [alarm.kind for alarm in alarms(rows)]
    ['drift']
    """
    if not rows:
        return []
    found = [alarm for check in _CHECKS if (alarm := check(rows)) is not None]
    if quiet_seconds is not None and (alarm := _quiet(rows, quiet_seconds)) is not None:
        found.append(alarm)
    return sorted(found, key=lambda alarm: alarm.level != "serious")


def _series(rows: Sequence[Row], name: str) -> list[float]:
    return [row["values"][name] for row in rows if name in row["values"]]


def _collapse(rows: Sequence[Row]) -> Alarm | None:
    rewards = _series(rows, "reward_mean")
    if len(rewards) < 2 * WINDOW:
        return None
    sums = [0.0, *itertools.accumulate(rewards)]
    windows = [(after - before) / WINDOW for before, after in zip(sums, sums[WINDOW:], strict=False)]
    changes = [abs(b - a) for a, b in itertools.pairwise(rewards[-RECENT:])]
    noise = statistics.median(changes) / WINDOW**0.5
    first, best, now = windows[0], max(windows), windows[-1]
    if best - now <= max(COLLAPSE_SHARE * (best - first), COLLAPSE_NOISE * noise, 1e-9):
        return None
    return Alarm(
        "collapse",
        "serious",
        rows[-1]["step"],
        f"The mean reward of the last {WINDOW} steps is {now:.3g}; it has been {best:.3g}. Stop, go back to "
        "a checkpoint near the best step, and go on with a lower learning rate.",
    )


def _entropy(rows: Sequence[Row]) -> Alarm | None:
    first, last = _series(rows[:RECENT], "entropy"), _series(rows[-RECENT:], "entropy")
    if len(last) < 2 * SILENT_STEPS or len(first) < SILENT_STEPS:
        return None
    before = statistics.fmean(first[:SILENT_STEPS])
    now = statistics.fmean(last[-SILENT_STEPS:])
    if before <= 0 or now >= ENTROPY_SHARE * before:
        return None
    return Alarm(
        "entropy collapse",
        "warning",
        rows[-1]["step"],
        f"Entropy fell from {before:.3g} to {now:.3g} nats a token: the policy hardly tries anything new. A "
        "lower learning rate, a higher temperature or an entropy bonus (entropy_coef) keeps it open.",
    )


def _drift(rows: Sequence[Row]) -> Alarm | None:
    last = rows[-1]["values"]
    seen = []
    if (kl := last.get("kl_k3", 0.0)) > MOST_KL:
        seen.append(f"KL to the sampling policy is {kl:.3g} (more than {MOST_KL})")
    if (size := last.get("effective_sample_size", 1.0)) < LEAST_SAMPLE_SIZE:
        seen.append(
            f"the effective sample size is {size:.0%} of the samples (less than {LEAST_SAMPLE_SIZE:.0%})"
        )
    if not seen:
        return None
    text = " and ".join(seen)
    return Alarm(
        "drift",
        "serious",
        rows[-1]["step"],
        f"{text[0].upper()}{text[1:]}: the step learned from samples of another policy than the one it "
        "changed. Take fewer minibatches a step or a lower learning rate.",
    )


def _disagreement(rows: Sequence[Row]) -> Alarm | None:
    gap = rows[-1]["values"].get("logprob_gap_mean", 0.0)
    if gap <= GAP:
        return None
    return Alarm(
        "engine and trainer disagree",
        "serious",
        rows[-1]["step"],
        f"Their logprobs differ by {gap:.3g} nats a token on average (more than {GAP}). They may hold "
        "different weights or render prompts differently.",
    )


def _no_signal(rows: Sequence[Row]) -> Alarm | None:
    latest = rows[-SILENT_STEPS:]
    if len(latest) < SILENT_STEPS:
        return None
    shares = [1.0 if row.get("skipped") else row["values"].get("groups_equal", 0.0) for row in latest]
    if min(shares) < SILENT_SHARE:
        return None
    return Alarm(
        "no signal",
        "warning",
        rows[-1]["step"],
        f"In each of the last {SILENT_STEPS} steps at least {min(shares):.0%} of the groups had equal "
        "rewards, which teach nothing. Choose scenarios that are neither always solved nor never, larger "
        "groups, or a reward with more steps in it.",
    )


def _staleness(rows: Sequence[Row]) -> Alarm | None:
    age = rows[-1]["values"].get("staleness", 0.0)
    if age <= OLDEST:
        return None
    return Alarm(
        "staleness",
        "warning",
        rows[-1]["step"],
        f"The last step trained on samples that are {age:.0f} policy versions old. Gather again before "
        "training.",
    )


def _failures(rows: Sequence[Row]) -> Alarm | None:
    values = rows[-1]["values"]
    failed = values.get("failed", 0.0) / max(1.0, values.get("trajectories", 0.0))
    if failed <= MOST_FAILED:
        return None
    return Alarm(
        "failures",
        "warning",
        rows[-1]["step"],
        f"{failed:.0%} of the last step's rollouts failed (more than {MOST_FAILED:.0%}); they teach nothing. "
        "The groups that gather returned show the errors.",
    )


def _judge(rows: Sequence[Row]) -> Alarm | None:
    values = rows[-1]["values"]
    finished = values.get("trajectories", 0.0) - values.get("failed", 0.0)
    unscored = values.get("unscored", 0.0) / max(1.0, finished)
    invalid = values.get("judge_invalid", 0.0) / max(1.0, values.get("judge_requests", 0.0))
    seen = []
    if unscored > MOST_UNSCORED:
        seen.append(f"nobody scored {unscored:.0%} of the last step's finished rollouts: they teach nothing")
    if invalid > MOST_INVALID:
        seen.append(f"{invalid:.0%} of the judge's answers could not be used and were asked for again")
    if not seen:
        return None
    text = " and ".join(seen)
    return Alarm(
        "judge trouble",
        "warning",
        rows[-1]["step"],
        f"{text[0].upper()}{text[1:]}. What judge returned says why; look at its raw answers.",
    )


def _invalid(rows: Sequence[Row]) -> Alarm | None:
    shares = [
        row["values"]["metric/invalid"] / max(1.0, row["values"].get("rollout_turns", 1.0))
        for row in rows[-RECENT:]
        if "metric/invalid" in row["values"]
    ]
    if len(shares) < 2 * WINDOW:
        return None
    lowest = min(statistics.fmean(shares[at : at + WINDOW]) for at in range(len(shares) - WINDOW + 1))
    now = statistics.fmean(shares[-WINDOW:])
    if now <= lowest + MOST_INVALID_TURNS:
        return None
    return Alarm(
        "invalid answers",
        "serious",
        rows[-1]["step"],
        f"The environment could not use {now:.0%} of the turns of the last {WINDOW} steps; it has been "
        f"{lowest:.0%}. Stop, go back to a checkpoint from then, and go on with a lower learning rate.",
    )


def _truncation(rows: Sequence[Row]) -> Alarm | None:
    share = rows[-1]["values"].get("truncated", 0.0)
    if share <= MOST_TRUNCATED:
        return None
    return Alarm(
        "cut off",
        "warning",
        rows[-1]["step"],
        f"max_tokens cut off {share:.0%} of the last step's turns: what they earn says little about the "
        "policy. Allow more tokens.",
    )


def _gradient(rows: Sequence[Row]) -> Alarm | None:
    norms = _series(rows[-RECENT:], "grad_norm")
    if len(norms) <= WINDOW or "grad_norm" not in rows[-1]["values"]:
        return None
    usual = statistics.median(norms[:-1])
    if usual <= 0 or norms[-1] <= GRADIENT_TIMES * usual:
        return None
    return Alarm(
        "gradient",
        "warning",
        rows[-1]["step"],
        f"The gradient norm is {norms[-1]:.3g}, {norms[-1] / usual:.0f} times its usual {usual:.3g}. It was "
        "clipped to max_grad_norm; if it stays there, lower the learning rate.",
    )


def _quiet(rows: Sequence[Row], seconds: float) -> Alarm | None:
    durations = _series(rows[-RECENT:], "seconds")
    usual = statistics.median(durations) if durations else 0.0
    if seconds <= max(QUIET_SECONDS, QUIET_TIMES * usual):
        return None
    return Alarm(
        "quiet",
        "warning",
        rows[-1]["step"],
        f"The run has written nothing for {seconds / 60:.0f} minutes; its steps take {usual:.3g} s. Its cell "
        "may have ended, or a rollout hangs (timeout= bounds them).",
    )


_CHECKS: tuple[Callable[[Sequence[Row]], Alarm | None], ...] = (
    *(_collapse, _entropy, _drift, _disagreement, _no_signal),
    *(_judge, _invalid, _staleness, _failures, _truncation, _gradient),
)
