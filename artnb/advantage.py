"""How much better each attempt was than its group: rewards become advantages.

One plain function an algorithm, standard library only. What cannot teach is dropped with a reason
and a count; the reasons are written once, below.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from artnb.config import TrainConfig
from artnb.errors import ConfigurationError
from artnb.types import Trajectory, TrajectoryGroup

Dropped = dict[str, int]
"""Reason -> count of what was left out of the step."""

# Reasons that count trajectories; such a trajectory gets no advantage and does not enter the mean.
FAILED = "failed"
NOT_SCORED = "not scored"
NOT_FINITE = "reward is not finite"
# Reasons that count groups.
TOO_FEW = "fewer than two scored trajectories"
NO_TOKEN = "no sampled token"
EQUAL_REWARDS = "equal rewards"
# A reason that counts turns; such a turn keeps its trajectory's advantage.
CREDIT_NOT_FINITE = "credit is not finite"


def center(rewards: Sequence[float]) -> list[float]:
    """Center each group's rewards on the group's own mean.

    >>> center([1.0, 0.0, 0.5])
    [0.5, -0.5, 0.0]

    A group whose rewards are all equal gets zeros and teaches nothing.
    """
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


def grpo(rewards: Sequence[float], eps: float = 1e-6) -> list[float]:
    """Center the rewards and divide them by the group's standard deviation (GRPO).

    >>> grpo([1.0, 0.0, 1.0, 0.0], eps=0.0)
    [1.0, -1.0, 1.0, -1.0]

    The standard deviation is the population's (divided by n, not n - 1), as in the paper.
    """
    deviation = statistics.pstdev(rewards)
    return [centered / (deviation + eps) for centered in center(rewards)]


def rloo(rewards: Sequence[float]) -> list[float]:
    """Compare each reward with the mean of the *other* rewards (REINFORCE leave-one-out).

    >>> rloo([1.0, 0.0, 0.5])
    [0.75, -0.75, 0.0]

    Equals ``center`` times n / (n - 1).
    """
    count, total = len(rewards), math.fsum(rewards)
    return [reward - (total - reward) / (count - 1) for reward in rewards]


ALGORITHMS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "mean": center,
    "grpo": grpo,
    "rloo": rloo,
}
"""By the name in ``TrainConfig.advantage``; each needs at least two rewards."""


def blend(advantage: float, credit: float | None, baseline: float, weight: float) -> float:
    """Mix a turn's own credit into its trajectory's advantage.

    >>> blend(1.0, credit=0.5, baseline=0.25, weight=0.5)
    0.625
    >>> blend(1.0, credit=None, baseline=0.25, weight=0.5)
    1.0

    A turn without a (finite) credit keeps the trajectory's advantage.
    """
    if credit is None or not math.isfinite(credit):
        return advantage
    return (1 - weight) * advantage + weight * (credit - baseline)


def credit_baseline(group: TrajectoryGroup) -> float:
    """Mean credit over the turns of the group's scored trajectories; 0 when there is none."""
    credits = _credits(group)
    return statistics.fmean(credits) if credits else 0.0


def reason_to_drop(group: TrajectoryGroup, *, credit_weight: float = 0.0) -> str | None:
    """Say why a group cannot teach anything, or None when it can.

    >>> reason_to_drop(TrajectoryGroup([Trajectory(reward=1.0), Trajectory()]))
    'fewer than two scored trajectories'

    With ``credit_weight`` above 0 a group of equal rewards still teaches when its credits differ.
    """
    scored = [t for t in group if t.is_scored]
    if len(scored) < 2:
        return TOO_FEW
    if why := group.metadata.get("too_close"):  # the judge could not tell its attempts apart
        return str(why)
    if not any(t.completion_tokens for t in scored):
        return NO_TOKEN
    if _all_equal(_reward(t) for t in scored) and not (credit_weight > 0 and not _all_equal(_credits(group))):
        return EQUAL_REWARDS
    return None


def advantages(
    groups: Sequence[TrajectoryGroup], config: TrainConfig
) -> tuple[list[dict[str, float]], Dropped]:
    """Give each scored trajectory of each usable group its advantage.

    Returns, for each group, trajectory id -> advantage (empty when the group is dropped), and the
    reasons and counts of what was left out.
    """
    dropped: Counter[str] = Counter()
    by_group: list[dict[str, float]] = []
    for group in groups:
        dropped.update(filter(None, (_why_unscored(t, group.metadata.get("unscored")) for t in group)))
        reason = reason_to_drop(group, credit_weight=config.credit_weight)
        if reason is not None:
            dropped[reason] += 1
            by_group.append({})
            continue
        scored = [t for t in group if t.is_scored]
        weight = float(group.metadata.get("weight", 1.0))  # of an adaptive rubric: hard scenarios count more
        values = [weight * value for value in ALGORITHMS[config.advantage]([_reward(t) for t in scored])]
        by_group.append(dict(zip((t.id for t in scored), values, strict=True)))
        if len(by_group[-1]) < len(scored):
            raise ConfigurationError(
                f"two trajectories of the group of scenario {group.scenario_id!r} have the same id; "
                "give a copied trajectory an id of its own"
            )
        if config.credit_weight > 0:
            bad = sum(t.credit is not None and not math.isfinite(t.credit) for s in scored for t in s.turns)
            dropped += Counter({CREDIT_NOT_FINITE: bad})
    return by_group, dict(dropped)


def _why_unscored(trajectory: Trajectory, judge: object) -> str | None:
    if trajectory.error is not None:
        return FAILED
    if trajectory.reward is None:
        return f"{NOT_SCORED}: {judge}" if judge else NOT_SCORED
    return None if math.isfinite(trajectory.reward) else NOT_FINITE


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None, "only scored trajectories are asked for their reward"
    return float(trajectory.reward)


def _credits(group: TrajectoryGroup) -> list[float]:
    turns = (turn for trajectory in group if trajectory.is_scored for turn in trajectory.turns)
    return [t.credit for t in turns if t.credit is not None and math.isfinite(t.credit)]


def _all_equal(values: Iterable[float]) -> bool:
    """True when the values differ by no more than the rounding of a sum of a few rewards."""
    listed = list(values)
    return not listed or math.isclose(min(listed), max(listed), rel_tol=1e-9, abs_tol=1e-12)
