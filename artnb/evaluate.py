"""How good is a policy? Its mean reward on held-out scenarios, with an interval that says how sure we are."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, stdev
from typing import Any

from artnb.environments import Environment
from artnb.errors import ConfigurationError, Stopped
from artnb.gather import gather
from artnb.session import remember
from artnb.types import Groups, Scenario, TrajectoryGroup
from artnb.ui.html import esc, table_html, visible
from artnb.ui.text import table_text

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval; None where there is too little to say."""

    mean: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.mean is None:
            return "–"
        if self.low is None or self.high is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Evaluation:
    """What a policy scored: ``mean_reward`` with the 95 % interval from ``low`` to ``high``."""

    name: str
    mean_reward: float | None
    """None when no rollout was scored."""
    low: float | None
    high: float | None
    n: int
    """Scored rollouts."""
    rewards: tuple[float, ...] = field(default=(), repr=False)
    """Reward of each scored rollout."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Mean of each metric over the scored rollouts that have it."""
    intervals: Mapping[str, Estimate] = field(default_factory=dict, repr=False)
    """The same means with their 95 % intervals, for example ``intervals["win"].low``."""
    seconds: float = 0.0
    scenarios: int = 0
    attempts: int = 1
    failed: int = 0
    """Rollouts that raised; they are in no mean."""
    unscored: int = 0
    """Rollouts that nobody scored; they are in no mean."""
    policy_version: int | None = None
    status: str = "complete"
    """``complete``, ``interrupted``, ``stopped`` or ``timeout``: whether all of it was played."""

    @property
    def reward(self) -> Estimate:
        return Estimate(self.mean_reward, self.low, self.high)

    @property
    def note(self) -> str:
        """What a reader must know beside the figures; empty when all went well."""
        left_out = [f"{self.failed} failed"] * bool(self.failed)
        left_out += [f"{self.unscored} not scored"] * bool(self.unscored)
        facts = [] if self.status == "complete" else [f"partial ({self.status})"]
        return "; ".join([*facts, f"{' and '.join(left_out)}, in no mean"] if left_out else facts)

    def to_json(self) -> dict[str, Any]:
        record = dataclasses.asdict(self)
        return record | {"rewards": list(self.rewards), "metrics": dict(self.metrics), "note": self.note}

    def row(self) -> dict[str, Any]:
        """The figures as one row of a table."""
        metrics = {name: estimate.mean for name, estimate in self.intervals.items()}
        return {
            "policy": self.name,
            "mean reward": str(self.reward),
            "n": self.n,
            **metrics,
            "note": self.note,
        }

    def __repr__(self) -> str:
        note = f", {self.note}" if self.note else ""
        return visible(f"{self.name}: mean reward {self.reward} (n={self.n}, {self.seconds:.1f} s{note})")

    def _repr_html_(self) -> str:
        return Comparison([self])._repr_html_()


class Comparison(list[Evaluation]):
    """Evaluations side by side, as a table."""

    def rows(self) -> list[dict[str, Any]]:
        rows = [evaluation.row() for evaluation in self]
        names = list(dict.fromkeys(name for row in rows for name in row if name != "note"))
        if any(row["note"] for row in rows):
            names.append("note")
        return [{name: row.get(name) for name in names} for row in rows]

    def __repr__(self) -> str:
        return table_text(self.rows())

    def _repr_html_(self) -> str:
        caption = f"mean reward with its {CONFIDENCE:.0%} interval"
        return f"<div>{table_html(self.rows())}<small>{esc(caption)}</small></div>"


def compare(evaluations: Iterable[Evaluation]) -> Comparison:
    """Evaluations and baselines side by side: ``compare([before, after, *baselines])``."""
    return Comparison(evaluations)


async def evaluate(
    rollout: Callable[[Any, Scenario], Awaitable[Any]],
    scenarios: Iterable[Scenario],
    *,
    model: Any,
    attempts: int = 1,
    name: str = "evaluation",
    policy: str | None = None,
    split: str = "test",
    judge: Callable[[Groups], Awaitable[Groups]] | None = None,
    **gather_options: Any,
) -> Evaluation:
    """Play every scenario ``attempts`` times and report the mean reward; nothing is trained.

    policy: None for the current one, ``"base"`` for the untrained model, or a checkpoint such as
    ``"step_000012"``. judge: scores the finished groups, for tasks without a reward of their own:
    ``partial(artnb.judge, model=model)``. Other options go to ``gather``. Rollouts are kept in the run under
    ``split``. After ■ the Evaluation of what was finished is on ``Interrupted.partial``, or returned with
    ``on_interrupt="return"``; its ``status`` and ``note`` say that it is partial.
    """
    scenarios, started = list(scenarios), time.monotonic()
    player = model if policy in (None, "current") else policy_of(model, str(policy))

    def summary(groups: Groups) -> Evaluation:
        facts = {"attempts": attempts, "scenarios": len(scenarios), "policy_version": player.policy_version}
        seconds = time.monotonic() - started
        found = remember(summarise(name, groups, seconds=seconds, status=groups.status, **facts))
        _record(model, found, split=split, policy=policy or "current")
        return found

    try:
        options = {"group_size": attempts, "split": split, **gather_options}
        groups = await gather(rollout, scenarios, model=player, **options)
        return summary(await judge(groups) if judge is not None else groups)
    except Stopped as error:
        error.partial = summary(error.partial)
        raise


def _record(model: Any, evaluation: Evaluation, **about: str) -> None:
    """Keep the figures in the run's journal; the rollouts are there already."""
    run = getattr(model, "run", None)
    if run is not None:
        figures = {n: v for n, v in evaluation.to_json().items() if n not in ("rewards", "intervals")}
        run.record_event("evaluation", step=run.step, **about, **figures)


def evaluate_baseline(environment: Environment, name: str, scenarios: Iterable[Scenario]) -> Evaluation:
    """Play every scenario once with one of the environment's baselines; needs no model."""
    started = time.monotonic()
    groups = [TrajectoryGroup([environment.play(name, one)], scenario_id=one.id) for one in scenarios]
    seconds = time.monotonic() - started
    return summarise(name, groups, attempts=1, scenarios=len(groups), seconds=seconds)


def summarise(name: str, groups: Sequence[TrajectoryGroup], **facts: Any) -> Evaluation:
    """Means and intervals of groups' rewards and metrics; each group holds one scenario's attempts."""
    scored = [[t for t in group if t.is_scored] for group in groups]
    failed = sum(t.error is not None for group in groups for t in group)
    rewards = [[float(t.reward) for t in group if t.reward is not None] for group in scored]
    names = dict.fromkeys(name for group in scored for t in group for name in t.metrics)
    intervals = {
        metric: estimate([[t.metrics[metric] for t in group if metric in t.metrics] for group in scored])
        for metric in names
    }
    reward = estimate(rewards)
    n = sum(map(len, scored))
    return Evaluation(
        name=name,
        mean_reward=reward.mean,
        low=reward.low,
        high=reward.high,
        n=n,
        rewards=tuple(r for group in rewards for r in group),
        metrics={metric: e.mean for metric, e in intervals.items() if e.mean is not None},
        intervals=intervals,
        failed=failed,
        unscored=sum(map(len, groups)) - n - failed,
        **facts,
    )


def policy_of(model: Any, policy: str) -> PolicyOf:
    """The model as another of its policies, to hand to ``gather``: ``"base"``, or ``"step_000012"``.

    A policy of a policy is one of the model behind it. Raises ConfigurationError for another name.
    """
    return PolicyOf(model, policy)


class PolicyOf:
    """A model seen from another of its policies: requests by ``name`` go to that policy."""

    def __init__(self, model: Any, policy: str) -> None:
        self._model = model
        self.name = f"{model.name.partition('@')[0]}@{policy}"
        self.policy_version = _version_of(policy)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._model, attribute)


def _version_of(policy: str) -> int:
    step = policy.removeprefix("step_")
    if policy != "base" and not step.isdecimal():
        raise ConfigurationError(
            f"policy must be 'current', 'base' or a checkpoint such as 'step_000012'; got {policy!r}"
        )
    return -1 if policy == "base" else int(step)


def estimate(clusters: Sequence[Sequence[float]]) -> Estimate:
    """Mean and 95 % interval of values that come in clusters, one cluster a scenario.

    Attempts at one scenario are not independent of each other, so with several attempts the
    interval is Student's over the scenarios' means. Single attempts worth 0 or 1 get Wilson's.

    >>> print(estimate([[1.0], [0.0], [1.0], [1.0]]))
    0.750 [0.301, 0.954]
    """
    kept = [cluster for cluster in clusters if cluster]
    if not kept:
        return Estimate(None, None, None)
    if all(len(cluster) == 1 and cluster[0] in (0.0, 1.0) for cluster in kept):
        wins = sum(cluster[0] == 1.0 for cluster in kept)
        return Estimate(wins / len(kept), *wilson_interval(wins, len(kept)))
    means = [fmean(cluster) for cluster in kept]
    mean = fmean(means)
    if len(means) == 1:
        return Estimate(mean, None, None)
    margin = t_quantile((1 + CONFIDENCE) / 2, len(means) - 1) * stdev(means) / math.sqrt(len(means))
    return Estimate(mean, mean - margin, mean + margin)


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (JASA 22, 1927); sound also at 0 and n successes."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share = successes / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    margin = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return max(0.0, centre - margin), min(1.0, centre + margin)


def t_quantile(p: float, freedom: int) -> float:
    """Quantile of Student's t distribution, for p above one half.

    >>> round(t_quantile(0.975, 9), 3)
    2.262
    """
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < p:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def t_cdf(t: float, freedom: int) -> float:
    """P(T <= t) for t >= 0, by the finite series for whole degrees of freedom (A & S 26.7.3-4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for k in range(1 + is_odd, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    inside = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return 0.5 + inside / 2
