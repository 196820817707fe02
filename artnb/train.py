"""How do scored groups become a better policy? The whole idea on one page.

groups -> advantages -> rows -> gradient -> update -> the engine serves it -> checkpoint -> metrics
"""

from __future__ import annotations

import asyncio
import math
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from artnb.batch import Rows, loss_denominator, minibatches, to_samples
from artnb.config import TrainConfig
from artnb.errors import ConfigurationError, Interrupted, NothingToTrain, StalePolicy
from artnb.interrupts import watching
from artnb.types import TrajectoryGroup


@dataclass
class StepResult:
    """What one ``train_step`` did; ``skipped`` says in words why nothing was trained."""

    step: int
    policy_version: int
    """Version that the engine serves now."""
    metrics: dict[str, float]
    dropped: dict[str, int] = field(default_factory=dict)
    """What was left out, by reason."""
    skipped: str | None = None

    def __repr__(self) -> str:
        from artnb.ui.text import step_text

        return step_text(self)

    def _repr_html_(self) -> str:
        from artnb.ui.html import step_html

        return step_html(self)


async def train_step(
    model: Any,
    groups: Sequence[TrajectoryGroup],
    config: TrainConfig | None = None,
    *,
    strict: bool = False,
    allow_partial: bool = False,
    **options: Any,
) -> StepResult:
    """Train one step on groups that the current policy sampled, publish it, and save a checkpoint.

    Step k samples from policy version k and publishes version k + 1. ``options`` change single fields
    of ``config``, for example ``learning_rate=1e-4``. The step happens as a whole or not at all: after
    an error or ■ model and run stand where they stood. A step without anything to learn from is
    recorded and returned with ``skipped``; the policy version stays. ``strict`` raises NothingToTrain
    instead. ``allow_partial`` accepts what an interrupted ``gather`` returned.

    Raises StalePolicy, NothingToTrain, Interrupted, PublicationError, ConfigurationError.
    """
    config = (config or TrainConfig()).replace(**options)
    started = time.perf_counter()
    if getattr(groups, "status", "complete") != "complete" and not allow_partial:
        raise ConfigurationError(
            f"gather was {groups.status}: these groups are partial. Gather again, or pass allow_partial=True"  # type: ignore[attr-defined]
        )
    step, version = model.run.step, model.policy_version
    staleness = _check_staleness(groups, version, config.max_staleness)
    rows = to_samples(groups, config, step=step)
    metrics = _describe(groups, rows) | {"staleness": staleness}
    skipped = None
    if rows.samples:
        metrics |= await _whole_or_not_at_all(model, rows, config, version + 1)
    else:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in rows.dropped.items()) or "no groups"
        skipped = f"nothing to learn from: {reasons}"
        if strict:
            raise NothingToTrain(skipped)
    metrics["seconds_gather"] = getattr(groups, "seconds", 0.0)
    metrics["seconds"] = time.perf_counter() - started
    metrics["memory_peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    result = StepResult(step, model.policy_version, metrics, rows.dropped, skipped)
    about = {"policy_version": result.policy_version, "dropped": rows.dropped, "skipped": skipped}
    model.run.append_metrics({"kind": "train", "step": step, **about, **metrics})
    with model.run.writing_checkpoint(model.run.step, {"policy_version": result.policy_version}) as folder:
        await model.backend.save(folder)
    model.run.prune_checkpoints(model.keep_checkpoints)
    return result


async def _whole_or_not_at_all(model: Any, rows: Rows, config: TrainConfig, version: int) -> dict[str, float]:
    """Update and publish; whatever goes wrong or is interrupted on the way is undone."""
    backend = model.backend
    before = await backend.snapshot()
    work = asyncio.create_task(_update(backend, rows, config, version))
    async with watching(work.cancel) as watch:
        try:
            return await work
        except BaseException as error:
            work.cancel()
            await asyncio.wait([work])
            await backend.restore(before)
            if watch.interrupted and isinstance(error, asyncio.CancelledError):
                raise Interrupted(
                    "train_step was interrupted: the policy is the one before this step. "
                    "Run the cell again to train on the same groups."
                ) from None
            raise


async def _update(backend: Any, rows: Rows, config: TrainConfig, version: int) -> dict[str, float]:
    """One optimizer update per mini-batch, then the engine gets the new policy."""
    parts: list[dict[str, float]] = []
    started = time.perf_counter()
    for samples in minibatches(rows.samples, config.minibatches):
        denominator = loss_denominator(samples, config)
        measured = await backend.forward_backward(samples, config, loss_denominator=denominator)
        parts.append(measured | await backend.optim_step(config))
    trained = time.perf_counter()
    proof = await backend.publish_weights(version)
    metrics = {name: statistics.fmean(part[name] for part in parts) for name in parts[0]}
    for name in ("packed_tokens", "row_tokens", "padded_tokens"):
        metrics[name] = math.fsum(part.get(name, 0.0) for part in parts)
    for name in ("logprob_gap_mean", "logprob_gap_max"):  # later updates' gaps hold the policy's own change
        metrics[name] = parts[0].get(name, 0.0)
    return metrics | {
        "updates": len(parts),
        "seconds_train": trained - started,
        "seconds_publish": proof.seconds,
        "tokens_per_second_train": metrics["packed_tokens"] / (trained - started),
        "probe_gap_mean": proof.probe_mean,
        "probe_gap_max": proof.probe_max,
        "rounding_lost": proof.rounding_lost,
        "weights_changed": float(proof.changed),
    }


def _check_staleness(groups: Sequence[TrajectoryGroup], version: int, allowed: int) -> int:
    """The age of the oldest turn, in policy versions."""
    versions = {turn.policy_version for group in groups for t in group if t.is_scored for turn in t.turns}
    foreign = sorted(v for v in versions if not 0 <= version - v <= allowed)
    if foreign:
        raise StalePolicy(
            f"these trajectories were sampled under policy version {', '.join(map(str, foreign))}, the model "
            f"is at version {version} and max_staleness is {allowed}. Run the gather cell again, or pass a "
            "larger max_staleness."
        )
    return max((version - v for v in versions), default=0)


def _describe(groups: Sequence[TrajectoryGroup], rows: Rows) -> dict[str, float]:
    """Rewards and sizes, known before anything is trained."""
    trajectories = [t for group in groups for t in group]
    rewards = [float(t.reward) for t in trajectories if t.is_scored and t.reward is not None]
    advantages = [
        a for s in rows.samples for a, own in zip(s.advantages_T, s.is_sampled_T, strict=True) if own
    ]
    turns = [turn for t in trajectories for turn in t.turns]
    metrics: dict[str, float] = {
        "groups": len(groups),
        "trajectories": len(trajectories),
        "failed": sum(t.error is not None for t in trajectories),
        "samples": len(rows.samples),
        "tokens": len(advantages),
        "tokens_sampled": sum(len(turn.completion_ids) for turn in turns),
        "truncated": statistics.fmean(t.finish_reason == "length" for t in turns) if turns else 0.0,
        "rows_split": rows.notes["trajectories_split"],
        "turns_truncated_support": rows.notes["turns_truncated_support"],
    }
    if rewards:
        metrics |= {
            "reward_mean": statistics.fmean(rewards),
            "reward_std": statistics.pstdev(rewards),
            "reward_min": min(rewards),
            "reward_max": max(rewards),
        }
    if advantages:
        metrics |= {
            "advantage_mean": statistics.fmean(advantages),
            "advantage_std": statistics.pstdev(advantages),
        }
    return metrics
