"""How does a policy learn what a better one would have said in its place? Each token is graded by the other.

On-policy distillation (arXiv 2306.13649; thinkingmachines.ai/blog/on-policy-distillation): the student
samples, the teacher says how likely each sampled token is to it, and the difference is the advantage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, compress
from statistics import fmean
from typing import Any

from artnb.batch import check_complete, check_staleness, unrewarded_samples
from artnb.config import TrainConfig
from artnb.errors import ConfigurationError, Interrupted
from artnb.session import session
from artnb.step_metrics import describe_data
from artnb.train import StepResult, take_step
from artnb.types import Sample, TrajectoryGroup

NOT_HERE = {"advantage", "credit_weight"}
"""Options that speak of rewards; a given ``config`` may hold them."""


async def distill_step(
    model: Any,
    groups: Sequence[TrajectoryGroup],
    teacher: Any,
    config: TrainConfig | None = None,
    *,
    allow_partial: bool = False,
    **options: Any,
) -> StepResult:
    """Train one step towards a teacher on what the current policy sampled, publish it, save a checkpoint.

    teacher: another open Model with the same tokenizer, or ``"base"`` for this one before its training. The
    advantage of a token is log p(teacher) - log p(sampling), at the turn's temperature and in nats: its
    mean is minus the reverse KL, the metric ``kl_teacher``. Rewards are not used and need not be there; a
    group may have one trajectory. Otherwise it is a step of the run like ``train_step``'s, with its options.

    Raises ConfigurationError for a teacher that cannot grade these tokens, StalePolicy, Interrupted,
    PublicationError, CheckpointError.
    """
    started = time.perf_counter()
    if useless := sorted(set(options) & NOT_HERE):
        raise ConfigurationError(f"{', '.join(useless)}: distillation looks at the teacher, not at rewards")
    config = (config or TrainConfig()).replace(**options)
    source = _source(model, teacher)
    model.run.check_writable()
    if not allow_partial:
        check_complete(groups)
    staleness = check_staleness(groups, model.policy_version, config.max_staleness, unscored=True)
    rows = unrewarded_samples(groups, config, step=model.run.step)
    graded = await _grade(source, rows.samples, config, base=source is model.backend)
    rows = rows._replace(samples=graded)
    metrics = describe_data(groups, rows) | {"staleness": staleness}
    advantages = list(chain(*(compress(s.advantages_T, s.is_sampled_T) for s in graded)))
    if advantages:
        metrics["kl_teacher"] = -fmean(advantages)
    return await take_step(model, rows, config, metrics, started)


def _source(model: Any, teacher: Any) -> Any:
    """The backend that knows the teacher; the model's own stands for its base."""
    if teacher is model or not (teacher == "base" or hasattr(teacher, "backend")):
        raise ConfigurationError(f"the teacher must be another Model or 'base', got {teacher!r}")
    source = model.backend if teacher == "base" else teacher.backend
    if not hasattr(source, "score"):
        raise ConfigurationError(f"{type(source).__name__} cannot score tokens that it did not sample")
    own, other = (b.describe()["identity"]["tokenizer"] for b in (model.backend, source))
    if own != other:
        raise ConfigurationError(
            f"the teacher {source.base_model} has another tokenizer than {model.backend.base_model}: "
            "the same token ids mean other texts to it"
        )
    return source


async def _grade(source: Any, samples: list[Sample], config: TrainConfig, *, base: bool) -> list[Sample]:
    """The rows with the teacher's advantages. Raises Interrupted, nothing having happened yet."""
    if not samples:
        return samples
    if (longest := max(len(s.ids_T) for s in samples)) > source.max_context:
        raise ConfigurationError(f"a row has {longest} tokens, the teacher reads {source.max_context}")
    task = asyncio.create_task(source.score(samples, config, base=base))
    async with session(task.cancel) as watch:
        try:
            logprobs = await task
        except asyncio.CancelledError:
            if not watch.interrupted:
                raise
            raise Interrupted("interrupted while the teacher read; nothing was trained") from None
    return [_towards(sample, scored) for sample, scored in zip(samples, logprobs, strict=True)]


def _towards(sample: Sample, logprobs: Sequence[float]) -> Sample:
    """The row with the advantage log p(teacher) - log p(sampling) at each sampled token."""
    scored = iter(logprobs)
    pairs = zip(sample.is_sampled_T, sample.logprobs_T, strict=True)
    return replace(
        sample, advantages_T=tuple(next(scored) - own if is_ours else 0.0 for is_ours, own in pairs)
    )
