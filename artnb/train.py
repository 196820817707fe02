"""How do scored groups become a better policy? The whole idea on one page.

groups -> advantages -> rows -> gradient -> update -> the engine serves it -> checkpoint and metrics
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from artnb.batch import Rows, check_complete, check_staleness, loss_denominator, minibatches, to_samples
from artnb.config import TrainConfig
from artnb.errors import NothingToTrain
from artnb.interrupts import to_its_end
from artnb.session import hold
from artnb.step_metrics import (
    describe_data,
    described_again,
    memory_held,
    names_of,
    over_updates,
    warnings_of,
)
from artnb.step_tokens import token_records
from artnb.store.controls import TRAINING
from artnb.store.random_sources import save_random_sources
from artnb.store.token_records import TokenRecord
from artnb.store.versions import versions
from artnb.types import TrajectoryGroup
from artnb.ui.display import log
from artnb.ui.text import step_line
from artnb.undo import keep_start, whole_or_not_at_all


@dataclass
class StepResult:
    """What one ``train_step`` or ``sft_step`` did; ``skipped`` says in words why nothing was trained."""

    step: int
    policy_version: int
    """Version that the engine serves now."""
    metrics: dict[str, float]
    dropped: dict[str, int] = field(default_factory=dict)
    """What was left out, by reason."""
    skipped: str | None = None
    warnings: list[str] = field(default_factory=list)

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
    an error or ■ model and run stand where they stood, and the cell can be run again on the same
    groups. A step without anything to learn from is recorded and returned with ``skipped``; the policy
    version stays. ``strict`` raises NothingToTrain instead. ``allow_partial`` accepts what an
    interrupted ``gather`` returned.

    Raises StalePolicy, NothingToTrain, Interrupted, OutOfMemory, PublicationError,
    CheckpointError, ConfigurationError.
    """
    started = time.perf_counter()
    config = (config or TrainConfig()).replace(**options)
    model.run.check_writable()
    if not allow_partial:
        check_complete(groups)
    staleness = check_staleness(groups, model.policy_version, config.max_staleness)
    rows = to_samples(groups, config, step=model.run.step)
    if strict and rows.skipped:
        raise NothingToTrain(rows.skipped)
    metrics = describe_data(groups, rows) | {"staleness": staleness}
    return await take_step(model, rows, config, metrics, started)


async def take_step(
    model: Any,
    rows: Rows,
    config: TrainConfig,
    metrics: dict[str, float],
    started: float,
    *,
    kind: str = "train",
) -> StepResult:
    """Learn from these rows as a whole or not at all; ``kind`` is what the metrics' line says it was.

    ``metrics`` describe the rows; ``started`` is the caller's ``time.perf_counter()``. Warnings are of
    the caller's caller. Raises Interrupted, PublicationError, CheckpointError.
    """
    await hold(model.run)
    config = config.replace(**model.run.controls.given(TRAINING))
    model.run.record_configuration(dataclasses.asdict(config))

    async def take(rows: Rows) -> StepResult:
        work = partial(_step, model, rows, config, metrics, started, kind)
        return await whole_or_not_at_all(model.backend, work)

    result = await model.guarding.step(take, rows, config.learning_rate)
    log(step_line(result))
    model.run.prune_checkpoints(model.keep_checkpoints, every=model.keep_every)
    for warning in result.warnings:
        warnings.warn(warning, stacklevel=3)
    return result


async def _step(
    model: Any, rows: Rows, config: TrainConfig, metrics: dict[str, float], started: float, kind: str
) -> StepResult:
    """Train, publish, and write it all down; until the run has moved on, everything can be undone."""
    step, skipped = model.run.step, rows.skipped
    await keep_start(model.backend, model.run)
    tokens: dict[str, TokenRecord] = {}
    names = names_of(rows.samples, kind)
    metrics |= described_again(model.run.learned_before(names), kind)
    if rows.samples:
        measured, tokens = await _update(model.backend, rows, config, model.policy_version + 1, kind)
        metrics |= measured
    metrics |= memory_held()
    result = StepResult(step, model.policy_version, metrics, rows.dropped, skipped, warnings_of(metrics))
    state = {"policy_version": result.policy_version}
    about = {"kind": kind, "dropped": rows.dropped, "skipped": skipped, "warnings": result.warnings}
    record = {**state, **about, **metrics}
    trained = time.perf_counter()
    made_by = {"config": dataclasses.asdict(config), "versions": versions(), **model.seeds(rows.groups)}
    made_by["trained_on"] = model.run.lately_learned(step, names)
    with model.run.finishing_step(record, state | made_by, tokens) as (folder, seal):
        await to_its_end(model.backend.save(folder))
        save_random_sources(folder)
        await to_its_end(asyncio.to_thread(seal))
        now = time.perf_counter()
        timing = {"seconds_checkpoint": now - trained, "seconds": now - started}
        metrics |= timing
        record |= timing
    model.run.remember_learned(step, names)
    return result


async def _update(
    backend: Any, rows: Rows, config: TrainConfig, version: int, kind: str
) -> tuple[dict[str, float], dict[str, TokenRecord]]:
    """One optimizer update per mini-batch, then the engine gets the new policy."""
    parts, of_tokens, started = [], [], time.perf_counter()
    for part in minibatches(rows.samples, config.minibatches):
        denominator = loss_denominator(part, config)
        measured = await backend.forward_backward(part, config, loss_denominator=denominator)
        parts.append(measured | await backend.optim_step(config))
        of_tokens.append((part, getattr(measured, "tokens", None)))
    trained = time.perf_counter()
    proof = await backend.publish_weights(version)
    metrics = over_updates(parts, kind)
    metrics |= {
        "updates": len(parts),
        "seconds_train": trained - started,
        "seconds_publish": proof.seconds,
        "tokens_per_second_train": metrics["packed_tokens"] / max(trained - started, 1e-9),
        "probe_gap_mean": proof.probe_mean,
        "probe_gap_max": proof.probe_max,
        "rounding_lost": proof.rounding_lost,
        "weights_changed": float(proof.changed),
    }
    return metrics, token_records(rows, of_tokens) if config.record_tokens else {}
