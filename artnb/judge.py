"""How do groups get rewards without labels? A language model compares the attempts of each group.

The scores are relative to the group, as in RULER: they say which attempt is better, which is all that
training needs. Every answer is checked; a group without a valid one stays unscored and says why.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from artnb.errors import ConfigurationError, Interrupted, Stopped
from artnb.judging.blend import blend
from artnb.judging.cache import Cache
from artnb.judging.forms import Relative
from artnb.judging.panel import Panel, Spent, Verdict
from artnb.judging.prompt import DEFAULT_RUBRIC, case_of
from artnb.judging.referee import JudgeRefused, Referee
from artnb.judging.referees import referees
from artnb.judging.summary import JudgedGroups
from artnb.rubric import Rubric
from artnb.session import remember, session
from artnb.types import BEFORE_OVERRIDE, Groups, Trajectory, TrajectoryGroup
from artnb.ui.display import Progress

UNSCORED = "unscored"
"""Key of a group's metadata: why the judge left it without rewards."""
TOO_CLOSE = "too_close"
"""Key of a group's metadata: its scores lie so close that their order is noise; it is not trained on."""


async def judge(
    groups: Iterable[TrajectoryGroup],
    *,
    model: Any = None,
    judge: str | Referee | Sequence[str | Referee] | None = None,
    rubric: str | Rubric = DEFAULT_RUBRIC,
    scenarios: Iterable[Any] = (),
    samples: int = 1,
    weight: float = 1.0,
    normalise: bool = False,
    anchors: Iterable[Trajectory | TrajectoryGroup] = (),
    min_spread: float = 0.0,
    budget: float | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    price: tuple[float, float] | None = None,
    options: Mapping[str, Any] | None = None,
    context: int | None = None,
    max_tokens: int = 2048,
    timeout: float = 120.0,
    concurrency: int = 8,
    attempts: int = 3,
    cache: bool | str | Path = True,
    seed: int = 0,
    on_interrupt: Literal["raise", "return"] = "raise",
    progress: bool = True,
) -> Groups:
    """Score the attempts of each group against each other, from 0 to 1; returns new groups.

    judge: the name of a model behind an OpenAI-compatible endpoint (``base_url``, OpenAI's own if None),
        a Referee, or several of either; None is ``model`` itself with its adapter off: no key, no network.
    api_key: read with ``artnb.secret("OPENAI_API_KEY")`` if None.
    rubric: how to score, in words; or a Rubric of weighted questions and functions, whose parts are kept as
        metrics ``reward/<name>``. scenarios: what its functions look expected answers up in.
    samples: how often each judge is asked, each time in another order; the mean counts, the spread is kept.
    weight: share of the judge in the reward; the rest is the reward that the trajectory already had.
        With ``normalise`` each part is first divided by its standard deviation in the group (GDPO,
        arXiv 2601.05242). The parts are kept as metrics ``reward/judge`` and ``reward/own``.
    anchors: trajectories of a frozen policy, such as step 0's, compared with the attempts at the same
        scenario and not returned; metric ``judge/beats_anchor`` is 1, 0.5 for a tie, or 0.
    min_spread: a group whose scores differ by less is not trained on.
    price: dollars for a million tokens read and written. budget: dollars after which nothing is asked.
    context, max_tokens: tokens of the judge's context and of its answer; longer attempts lose their
        middle and are marked as shortened.
    attempts: how often a judge may answer until its answer is valid. timeout: seconds for each request.
    cache: keep answers in the run's folder (or in this one), so that judging again costs nothing.

    Failed trajectories are not judged. A group without a valid answer keeps no reward, and its
    ``metadata["unscored"]`` says why; nothing is ever scored 0 for want of an answer. A trajectory's
    ``metadata["judge"]`` holds score, spread, explanations, order and judges; a group's the raw answers.

    Raises ConfigurationError; Stopped when a judge refuses the key or is not there, Interrupted after ■:
    what was scored is on ``.partial``, and in the cache.
    """
    listed, status = list(groups), getattr(groups, "status", "complete")
    _check(listed, samples, weight, min_spread, budget, attempts, concurrency, on_interrupt)
    form = Relative(rubric) if isinstance(rubric, str) else rubric.form
    panel = None
    if form is not None:
        asked = referees(
            judge,
            model,
            base_url=base_url,
            api_key=api_key,
            price=price,
            options=options or {},
            context=context,
            max_tokens=max_tokens,
            timeout=timeout,
        )
        if budget is not None and any(referee.price is None for referee in asked):
            raise ConfigurationError("a budget needs a price: price=(dollars a million tokens read, written)")
        stored = Cache(_cache_folder(cache, model))
        places = asyncio.Semaphore(concurrency)
        panel = Panel(asked, form, samples, attempts, seed, stored, Spent(budget), places)
    work = _Judging(
        panel,
        listed,
        rubric if isinstance(rubric, Rubric) else None,
        {str(getattr(scenario, "id", "")): scenario for scenario in scenarios},
        _by_scenario(anchors),
        weight,
        normalise,
        min_spread,
    )
    try:
        judged = await work.run(progress)
    finally:
        for referee in panel.referees if panel else ():
            if referee.is_ours:
                await referee.client.close()
    if judged.status == "complete":
        judged.status = status  # groups of an interrupted gather stay partial
    _record(model, judged)
    if work.refused is not None:
        raise Stopped(str(work.refused), partial=judged) from work.refused
    if work.is_interrupted and on_interrupt == "raise":
        raise Interrupted(f"judge was interrupted: {judged.judging.words()}, on .partial", partial=judged)
    _warn(judged)
    return judged


@dataclass
class _Judged:
    """What is known of a group once its judges have answered."""

    members: list[int]
    """Places in the group of the attempts that were judged."""
    attempt_of: tuple[int, ...]
    """For each member, then each anchor, its attempt in the verdict."""
    verdict: Verdict | None
    """None where the rubric asks nobody."""
    measured: list[dict[str, float] | str] = field(default_factory=list)
    """For each member and anchor: what the rubric's functions gave, or why they failed."""

    def parts(self, place: int) -> dict[str, float] | None:
        """Every criterion of a member or anchor; None when a function failed."""
        measured = self.measured[place]
        if isinstance(measured, str):
            return None
        return (self.verdict.parts(self.attempt_of[place]) if self.verdict else {}) | measured


class _Judging:
    """One call of judge: which groups have their verdict."""

    def __init__(
        self,
        panel: Panel | None,
        groups: list[TrajectoryGroup],
        rubric: Rubric | None,
        scenarios: Mapping[str, Any],
        anchors: Mapping[str, list[Trajectory]],
        weight: float,
        normalise: bool,
        min_spread: float,
    ) -> None:
        self.panel = panel
        self.groups = groups
        self.rubric = rubric
        self.scenarios = scenarios
        self.anchors = anchors
        self.weight = weight
        self.normalise = normalise
        self.min_spread = min_spread
        self.refused: JudgeRefused | None = None
        self.is_interrupted = False
        self.judged: dict[int, _Judged | str] = {}
        """By the group's place: what is known, or why it is unscored."""

    async def run(self, progress: bool) -> Groups:
        started = time.monotonic()
        bar = Progress(len(self.groups), "judge", enabled=progress)
        ended = asyncio.Event()
        async with session(ended.set) as watch:
            tasks: list[asyncio.Task[Any]] = [
                asyncio.create_task(self._group(index, bar)) for index in range(len(self.groups))
            ]
            waiting: asyncio.Task[Any] = asyncio.create_task(ended.wait())
            try:
                pending = set(tasks)
                while pending and not watch.interrupted and self.refused is None:
                    done, rest = await asyncio.wait({*pending, waiting}, return_when=asyncio.FIRST_COMPLETED)
                    pending = rest - {waiting}
                    for task in done - {waiting}:
                        await task  # our own errors are raised
            finally:
                for task in (*tasks, waiting):
                    task.cancel()
                await asyncio.wait({*tasks, waiting})
        self.is_interrupted = watch.interrupted
        status = "interrupted" if watch.interrupted else "stopped" if self.refused else "complete"
        left = "judging was interrupted" if watch.interrupted else str(self.refused)
        weights = self._weights()
        groups = Groups(
            self._finished(group, self.judged.get(index, left), weights)
            for index, group in enumerate(self.groups)
        )
        groups.status, groups.seconds = status, time.monotonic() - started
        if self.rubric is not None:
            self._weigh(groups, self.rubric)
        groups.judging = self._summary(groups, weights)
        bar.finish(groups.judging.words() if progress else "")
        return remember(groups)

    async def _group(self, index: int, bar: Progress) -> None:
        group = self.groups[index]
        members = [i for i, one in enumerate(group) if one.error is None and one.messages_and_choices]
        if not members:
            self.judged[index] = "no attempt to judge: all of them failed"
            return
        players = [*(group[i] for i in members), *self.anchors.get(group.scenario_id, [])]
        case = case_of(players)
        try:
            verdict = await self.panel.verdict(case) if self.panel else None
        except JudgeRefused as error:
            self.refused = error
            return
        if verdict is not None and not verdict.opinions:
            self.judged[index] = "; ".join(verdict.problems)
        else:
            measured = [await self._measure(player) for player in players]
            self.judged[index] = _Judged(members, case.attempt_of, verdict, measured)
        bar.update(len(self.judged), tokens=self.panel.spent.output_tokens if self.panel else 0)

    async def _measure(self, trajectory: Trajectory) -> dict[str, float] | str:
        if self.rubric is None:
            return {}
        try:
            return await self.rubric.measure(trajectory, self.scenarios.get(trajectory.scenario_id))
        except Exception as error:  # one attempt that cannot be measured is data, as in gather
            return f"{type(error).__name__}: {error}"

    def _weights(self) -> dict[str, float]:
        """Weights of the rubric's criteria, which may depend on what everybody got."""
        known = [one for one in self.judged.values() if isinstance(one, _Judged)]
        parts = [one.parts(place) for one in known for place in range(len(one.members))]
        return self.rubric.adapted([p for p in parts if p is not None]) if self.rubric else {}

    def _finished(
        self, group: TrajectoryGroup, judged: _Judged | str, weights: Mapping[str, float]
    ) -> TrajectoryGroup:
        """The group with its rewards."""
        if isinstance(judged, str):
            return _unscored(group, judged)
        new, verdict = _copied(group), judged.verdict
        if verdict is not None:
            opinions = [opinion.to_json() for opinion in verdict.opinions]
            new.metadata["judge"] = {"opinions": opinions, "problems": list(verdict.problems)}
        scores = [self._score(judged, place, weights) for place in range(len(judged.measured))]
        anchors = [score for score in scores[len(judged.members) :] if score is not None]
        rewards = self._rewards(group, judged.members, scores)
        for place, (member, reward) in enumerate(zip(judged.members, rewards, strict=True)):
            trajectory, score = new[member], scores[place]
            if BEFORE_OVERRIDE in trajectory.metadata:  # a person's word goes before a judge's
                trajectory.metadata[BEFORE_OVERRIDE] = reward
            else:
                trajectory.reward = reward
            own = _own_reward(group[member])
            details = verdict.details(judged.attempt_of[place]) if verdict else {}
            trajectory.metadata["judge"] = details | {"score": score, "own_reward": own}
            parts = judged.parts(place) or {}
            trajectory.metrics |= {f"reward/{name}": value for name, value in parts.items()}
            if score is not None:
                trajectory.metrics["reward/judge"] = score
            if self.weight < 1 and own is not None:
                trajectory.metrics["reward/own"] = own
            if anchors and score is not None:
                trajectory.metrics["judge/beats_anchor"] = _share_beaten(score, anchors)
        failed = [one for one in judged.measured if isinstance(one, str)]
        if None in rewards:
            why = f"weight={self.weight:g} needs a reward of the trajectory's own"
            new.metadata[UNSCORED] = failed[0] if failed else why
        given = [score for score in scores[: len(judged.members)] if score is not None]
        if self.min_spread > 0 and given and max(given) - min(given) < self.min_spread:
            new.metadata[TOO_CLOSE] = f"the judge's scores differ by less than {self.min_spread:g}"
        return new

    def _score(self, judged: _Judged, place: int, weights: Mapping[str, float]) -> float | None:
        """What the judge and the rubric give a member or an anchor; None when a function failed."""
        if self.rubric is not None:
            parts = judged.parts(place)
            return None if parts is None else self.rubric.total(parts, weights)
        assert judged.verdict is not None, "without a rubric somebody was asked"
        return judged.verdict.score(judged.attempt_of[place])

    def _rewards(
        self, group: TrajectoryGroup, members: Sequence[int], scores: Sequence[float | None]
    ) -> list[float | None]:
        parts = []
        for member, score in zip(members, scores, strict=False):
            own = _own_reward(group[member])
            given = {"judge": score, "own": own}
            parts.append({name: value for name, value in given.items() if value is not None})
        weights = {"judge": self.weight, "own": 1 - self.weight}
        return blend(parts, weights, normalise=self.normalise)

    def _weigh(self, groups: Groups, rubric: Rubric) -> None:
        """How much each group counts in the loss, where the rubric adapts."""
        if not rubric.adaptive:
            return
        means = [[s for t in g if (s := t.metrics.get("reward/judge")) is not None] for g in groups]
        known = [(group, sum(m) / len(m)) for group, m in zip(groups, means, strict=True) if m]
        factors = rubric.group_weights([mean for _, mean in known])
        for (group, _), factor in zip(known, factors, strict=True):
            group.metadata["weight"] = factor

    def _summary(self, groups: Groups, weights: Mapping[str, float]) -> JudgedGroups:
        unscored: dict[str, int] = {}
        for group in groups:
            if reason := group.metadata.get(UNSCORED):
                unscored[reason] = unscored.get(reason, 0) + 1
        scored = [t for t in groups.trajectories if (t.metadata.get("judge") or {}).get("score") is not None]
        told = [t.metadata["judge"] for t in scored]
        spreads = [one["spread"] for one in told if len(one.get("scores", ())) > 1]
        beats = [v for t in scored if (v := t.metrics.get("judge/beats_anchor")) is not None]
        return JudgedGroups(
            judges=[r.name for r in self.panel.referees] if self.panel else ["functions"],
            groups=len(groups),
            scored=len(scored),
            unscored=unscored,
            too_close=sum(TOO_CLOSE in group.metadata for group in groups),
            shortened=sum(bool(one.get("shortened")) for one in told),
            mean_spread=sum(spreads) / len(spreads) if spreads else None,
            beats_anchor=sum(beats) / len(beats) if beats else None,
            criteria=[
                {
                    "criterion": name,
                    "mean": _mean(t.metrics.get(f"reward/{name}") for t in scored),
                    "weight": self.rubric.weights[name] if self.rubric else None,
                    "weight used": used,
                }
                for name, used in weights.items()
            ],
            spent=self.panel.spent if self.panel else Spent(),
            seconds=groups.seconds,
        )


def _share_beaten(score: float, anchors: Sequence[float]) -> float:
    """Share of these scores that lie below, ties half."""
    return sum(1.0 if score > one else 0.5 if score == one else 0.0 for one in anchors) / len(anchors)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _copied(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group with trajectories of its own that share the turns."""
    trajectories = [
        dataclasses.replace(t, metrics=dict(t.metrics), metadata=copy.copy(t.metadata), logs=list(t.logs))
        for t in group
    ]
    metadata = {k: v for k, v in group.metadata.items() if k not in (UNSCORED, TOO_CLOSE, "judge")}
    return dataclasses.replace(group, trajectories=trajectories, metadata=metadata)


def _unscored(group: TrajectoryGroup, reason: str) -> TrajectoryGroup:
    """The group without rewards; what its trajectories had of their own is in their metadata."""
    new = _copied(group)
    new.metadata[UNSCORED] = reason
    for trajectory in new:
        own = _own_reward(trajectory)
        if own is not None:
            trajectory.metadata["judge"] = {"own_reward": own}
        if BEFORE_OVERRIDE in trajectory.metadata:
            trajectory.metadata[BEFORE_OVERRIDE] = None
        else:
            trajectory.reward = None
    return new


def _own_reward(trajectory: Trajectory) -> float | None:
    """The reward from before any judge, also when this is judged again."""
    before = trajectory.metadata.get("judge")
    if isinstance(before, Mapping) and "own_reward" in before:
        return before["own_reward"]
    return trajectory.metadata.get(BEFORE_OVERRIDE, trajectory.reward)


def _by_scenario(anchors: Iterable[Trajectory | TrajectoryGroup]) -> dict[str, list[Trajectory]]:
    found: dict[str, list[Trajectory]] = {}
    for one in anchors:
        name = one.scenario_id
        members = list(one) if isinstance(one, TrajectoryGroup) else [one]
        found.setdefault(name, []).extend(t for t in members if t.error is None)
    return found


def _cache_folder(cache: bool | str | Path, model: Any) -> Path | None:
    if cache is True:
        run = getattr(model, "run", None)
        return None if run is None else Path(run.path) / "judge_cache"
    return Path(cache) if cache else None


def _record(model: Any, groups: Groups) -> None:
    """Write the scores into the run's journal: they are read with the trajectories from now on."""
    run = getattr(model, "run", None)
    if run is None:
        return
    scores = {
        t.id: {
            "reward": t.metadata.get(BEFORE_OVERRIDE, t.reward),
            "metrics": t.metrics,
            "judge": t.metadata["judge"],
        }
        for t in groups.trajectories
        if "judge" in t.metadata
    }
    unscored = [
        {"scenario_id": group.scenario_id, "why": group.metadata[UNSCORED]}
        for group in groups
        if UNSCORED in group.metadata
    ]
    spent = dataclasses.asdict(groups.judging.spent)
    run.record_event("judged", step=run.step, scores=scores, unscored=unscored, spent=spent)


def _warn(groups: Groups) -> None:
    if groups.judging.unscored:
        reasons = "; ".join(f"{n} × {reason}" for reason, n in groups.judging.unscored.items())
        warnings.warn(f"groups that the judge left without a score: {reasons}", stacklevel=3)


def _check(
    groups: Sequence[Any],
    samples: int,
    weight: float,
    min_spread: float,
    budget: float | None,
    attempts: int,
    concurrency: int,
    on_interrupt: str,
) -> None:
    if not groups or not all(isinstance(group, TrajectoryGroup) for group in groups):
        raise ConfigurationError("judge takes a list of TrajectoryGroups, as gather returns it; got none")
    for name, count in (("samples", samples), ("attempts", attempts), ("concurrency", concurrency)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigurationError(f"{name} must be a whole number >= 1, got {count!r}")
    if not (math.isfinite(weight) and 0 < weight <= 1):
        raise ConfigurationError(f"weight, the judge's share, must be above 0 and at most 1; got {weight!r}")
    if not (math.isfinite(min_spread) and 0 <= min_spread <= 1):
        raise ConfigurationError(f"min_spread must lie between 0 and 1, got {min_spread!r}")
    if budget is not None and not budget > 0:
        raise ConfigurationError(f"budget must be a number of dollars > 0, or None; got {budget!r}")
    if on_interrupt not in ("raise", "return"):
        raise ConfigurationError(f"on_interrupt must be 'raise' or 'return', got {on_interrupt!r}")
