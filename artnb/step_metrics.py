"""What is worth knowing about a step: of its data before anything is trained, and in words afterwards?"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from artnb.batch import Rows
from artnb.types import Sample, TrajectoryGroup

_LOST = ("rows_shortened", "tokens_dropped")
_SIZES = ("packed_tokens", "row_tokens", "padded_tokens", "out_of_memory_retries", *_LOST)
MOST_MASKED = 0.2
"""Share of masked tokens above which a step is not what its numbers say."""
_GAPS = ("logprob_gap_mean", "logprob_gap_max")
_OF_RATIOS = {"kl_k1", "kl_k3", "effective_sample_size", "fraction_capped", "fraction_clipped", *_GAPS} | {
    *("fraction_masked", "ratio_p05", "ratio_p50", "ratio_p95", "ratio_p99", "ratio_max")
}
"""Metrics that compare a token with the policy that sampled it."""


def describe_examples(rows: Rows) -> dict[str, float]:
    """Sizes of a supervised step: how many examples and rows, and how many tokens are learned."""
    return {
        "examples": rows.notes["trajectories"],
        "samples": len(rows.samples),
        "tokens": sum(sample.sampled_tokens for sample in rows.samples),
        "rows_split": rows.notes["trajectories_split"],
    }


def names_of(samples: Sequence[Sample], kind: str) -> set[str]:
    """What a step is trained on: the ids of its trajectories, or digests of its examples."""
    if kind == "train":
        return {sample.trajectory_id for sample in samples}
    return {hashlib.sha256(repr(sample.ids_T).encode()).hexdigest()[:32] for sample in samples}


def described_again(count: int, kind: str) -> dict[str, float]:
    """How much of the data was trained on before, where any was. Examples may be: that is an epoch."""
    name = "trajectories_again" if kind == "train" else "examples_again"
    return {name: float(count)} if count else {}


def over_updates(parts: Sequence[Mapping[str, float]], kind: str) -> dict[str, float]:
    """The measurements of a step's updates as one: sizes add up, the rest is averaged.

    A supervised step (kind ``sft``) has ``nll``, the mean negative log-likelihood of a token, and
    nothing that speaks of a sampling policy.
    """
    metrics = {name: statistics.fmean(part[name] for part in parts) for name in parts[0]}
    metrics |= {name: math.fsum(part.get(name, 0.0) for part in parts) for name in _SIZES}
    if "microbatch_tokens_used" in metrics:  # what the next step begins with
        metrics["microbatch_tokens_used"] = parts[-1]["microbatch_tokens_used"]
    if kind == "sft":  # logprobs of 0 stand for the engine's, so the gap to them is -log p
        nll = metrics.get("logprob_gap_mean", metrics["loss"])
        return {name: value for name, value in metrics.items() if name not in _OF_RATIOS} | {"nll": nll}
    # later updates' gaps hold the policy's own change
    return metrics | {name: parts[0].get(name, 0.0) for name in _GAPS}


def describe_data(groups: Sequence[TrajectoryGroup], rows: Rows) -> dict[str, float]:
    """Rewards, advantages and sizes."""
    trajectories = [t for group in groups for t in group]
    turns = [turn for t in trajectories for turn in t.turns]
    seconds, sampled = getattr(groups, "seconds", 0.0), sum(len(turn.completion_ids) for turn in turns)
    metrics: dict[str, float] = {
        "groups": len(groups),
        "trajectories": len(trajectories),
        "failed": sum(t.error is not None for t in trajectories),
        "unscored": sum(t.error is None and not t.is_scored for t in trajectories),
        "samples": len(rows.samples),
        "tokens": sum(sample.sampled_tokens for sample in rows.samples),
        "tokens_sampled": sampled,
        "truncated": statistics.fmean(t.finish_reason == "length" for t in turns) if turns else 0.0,
        "rows_split": rows.notes["trajectories_split"],
        "turns_truncated_support": rows.notes["turns_truncated_support"],
        "seconds_gather": seconds,
    }
    if seconds > 0:
        metrics["tokens_per_second_gather"] = sampled / seconds
    metrics |= _judging(getattr(groups, "judging", None))
    rewards = [float(t.reward) for t in trajectories if t.is_scored and t.reward is not None]
    if rewards:
        metrics |= {"reward_min": min(rewards), "reward_max": max(rewards)} | _spread("reward", rewards)
    advantages = [
        a for s in rows.samples for a, own in zip(s.advantages_T, s.is_sampled_T, strict=True) if own
    ]
    return metrics | _spread("advantage", advantages)


def _judging(summary: Any) -> dict[str, float]:
    """What the judge of these groups took; dollars only where its price is known."""
    if summary is None:
        return {}
    spent, seconds = summary.spent, summary.seconds
    metrics = {"seconds_judge": seconds, "judge_requests": spent.requests, "judge_invalid": spent.invalid}
    if seconds > 0:
        metrics["tokens_per_second_judge"] = spent.output_tokens / seconds
    return metrics | ({"cost_judge": spent.dollars} if spent.is_priced and spent.requests else {})


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_mean": statistics.fmean(values), f"{name}_std": statistics.pstdev(values)}


def warnings_of(metrics: Mapping[str, float]) -> list[str]:
    """What a user should know about a finished step, in words."""
    found = []
    if cut := metrics.get("turns_truncated_support"):
        found.append(
            f"{cut:.0f} turns were sampled with top_p, top_k or min_p, or in a structured form. Their ratio "
            "to the trained policy is biased, because training sees the whole vocabulary: sample without "
            "them to train."
        )
    if again := metrics.get("trajectories_again"):
        found.append(
            f"{again:.0f} of these trajectories were trained on before: the same data counts twice now. If "
            "the cell was run again by mistake, go back with model.rollback; else gather anew for each step."
        )
    if (masked := metrics.get("fraction_masked", 0.0)) > MOST_MASKED:
        found.append(
            f"the mask left {masked:.0%} of the tokens out of this step. Trained and sampling policy differ "
            f"by {metrics['logprob_gap_mean']:.3g} nats a token before the first update: widen mask_low and "
            "mask_high, or take fewer and smaller updates a step."
        )
    if metrics.get("weights_changed") == 0:
        found.append(
            "the published weights equal the previous ones bit for bit: this update changed nothing. The "
            "learning rate may be too small for the model's dtype, or the gradient was zero."
        )
    if retries := metrics.get("out_of_memory_retries"):
        same = "" if metrics.get("rows_shortened") else " with the same gradient"
        found.append(
            f"memory ran out {retries:.0f} times in this step, which was computed again in smaller pieces"
            f"{same}. They are kept for the next steps: micro-batches of at most "
            f"{metrics['microbatch_tokens_used']:.0f} tokens (microbatch_tokens)."
        )
    if rows := metrics.get("rows_shortened"):
        found.append(
            f"{rows:.0f} rows do not fit into memory by themselves. Their ends were left out of this step: "
            f"{metrics['tokens_dropped']:.0f} of {metrics['tokens']:.0f} sampled tokens."
        )
    if metrics.get("rows_unpacked"):
        found.append(
            "rows were computed one by one, which is slow and right: packed, they would have read each other "
            f"({metrics['packing_error']:.3g} nats a token between packed and unpacked logprobs)."
        )
    return found


def memory_held() -> dict[str, float]:
    """What this process holds now and held at most, in GB, and of it on a GPU where torch uses one.

    ``gpu_memory_allocated_gb`` is what tensors take, ``gpu_memory_reserved_gb`` what torch keeps for them.
    Windows does not say what the process holds.
    """
    found: dict[str, float] = {}
    if sys.platform != "win32":
        import resource

        unit = 2**30 if sys.platform == "darwin" else 2**20
        found["memory_peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    with contextlib.suppress(OSError):  # not Linux
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["memory_gb"] = pages * os.sysconf("SC_PAGE_SIZE") / 2**30
    torch = sys.modules.get("torch")  # whoever trains on a GPU has imported it
    if torch is not None and torch.cuda.is_initialized():
        for name, bytes_held in (
            ("allocated", torch.cuda.memory_allocated()),
            ("reserved", torch.cuda.memory_reserved()),
            ("peak", torch.cuda.max_memory_allocated()),
        ):
            found[f"gpu_memory_{name}_gb"] = bytes_held / 2**30
    return found
