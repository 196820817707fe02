"""What is worth seeing in a trajectory, in groups and in a step? Plain dicts that HTML and text draw."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from artnb.types import Trajectory, TrajectoryGroup, Turn

LONGEST_TEXT = 8000
"""Characters of one message that are shown; a saved notebook stays small."""

SECTIONS: dict[str, dict[str, str]] = {
    "reward": {
        "reward_mean": "mean reward",
        "reward_std": "standard deviation",
        "reward_min": "lowest",
        "reward_max": "highest",
        "advantage_mean": "mean advantage",
        "advantage_std": "advantage spread",
        "groups": "groups",
        "trajectories": "trajectories",
        "failed": "failed rollouts",
        "unscored": "rollouts that nobody scored",
    },
    "policy": {
        "loss": "loss",
        "nll": "negative log-likelihood per token",
        "entropy": "entropy per token",
        "kl_k1": "KL to the sampling policy (k1)",
        "kl_k3": "KL to the sampling policy (k3)",
        "kl_base": "KL to the base",
        "ratio_p05": "ratio, 5% quantile",
        "ratio_p50": "ratio, median",
        "ratio_p95": "ratio, 95% quantile",
        "ratio_p99": "ratio, 99% quantile",
        "ratio_max": "ratio, highest",
        "effective_sample_size": "effective sample size (share)",
        "fraction_capped": "share of ratios capped",
        "fraction_clipped": "share of tokens bounded by the loss",
        "fraction_masked": "share of tokens masked",
        "kl_teacher": "KL to the teacher",
        "logprob_gap_mean": "|engine - trainer logprob|, mean",
        "logprob_gap_max": "|engine - trainer logprob|, highest",
        "grad_norm": "gradient norm",
        "learning_rate": "learning rate",
        "updates": "optimizer updates",
    },
    "engine": {
        "probe_gap_mean": "mean |engine - trainer logprob| on the probe",
        "probe_gap_max": "highest |engine - trainer logprob| on the probe",
        "rounding_lost": "share of the update lost to rounding",
        "weights_changed": "published weights changed",
    },
    "data": {
        "examples": "examples",
        "samples": "rows trained",
        "tokens": "tokens learned",
        "tokens_sampled": "sampled tokens gathered",
        "packed_tokens": "tokens computed",
        "row_tokens": "tokens of all rows",
        "padded_tokens": "tokens of padded rows",
        "truncated": "share cut off by max_tokens",
        "rows_split": "trajectories split into rows",
        "rows_shortened": "rows cut to fit into memory",
        "tokens_dropped": "sampled tokens cut off with them",
        "turns_truncated_support": "turns sampled with top_p, top_k, min_p or a structured form",
        "staleness": "policy versions old",
    },
    "time": {
        "seconds_gather": "gather seconds",
        "tokens_per_second_gather": "gather tokens/s",
        "seconds_judge": "judge seconds",
        "tokens_per_second_judge": "judge tokens/s",
        "judge_requests": "questions to the judge",
        "judge_invalid": "answers of the judge that were asked for again",
        "cost_judge": "judge dollars",
        "seconds_train": "train seconds",
        "tokens_per_second_train": "train tokens/s",
        "seconds_publish": "publish seconds",
        "seconds_checkpoint": "checkpoint seconds",
        "seconds": "whole step seconds",
        "memory_gb": "memory GB",
        "memory_peak_gb": "memory peak GB",
        "gpu_memory_allocated_gb": "GPU memory in tensors GB",
        "gpu_memory_reserved_gb": "GPU memory reserved GB",
        "gpu_memory_peak_gb": "GPU memory peak GB",
    },
}
"""Plain words for the metrics that train_step records, by section; others are shown by name."""

ABOUT_STEP = ("step", "policy_version", "dropped", "skipped", "warnings")
"""What a StepResult says beside its metrics."""


def reward_of(record: Mapping[str, Any]) -> float | None:
    """Mean reward of one step's metrics, None when nobody scored it."""
    value = record.get("reward_mean")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def is_step(record: Mapping[str, Any]) -> bool:
    """True for a line of a run's metrics that is of a step; evaluations have lines too."""
    return record.get("kind") in ("train", "sft")


def is_supervised(record: Mapping[str, Any]) -> bool:
    """True for the metrics of an ``sft_step``: a run's line says its kind, a StepResult's hold ``nll``.

    >>> is_supervised({"kind": "sft"}), is_supervised({"nll": 2.5}), is_supervised({"kind": "train"})
    (True, True, False)
    """
    return record.get("kind", "sft" if "nll" in record else None) == "sft"


def number_text(value: Any) -> str:
    """A number as a person writes it.

    >>> number_text(0.123456), number_text(1234567), number_text(0.00005), number_text(None)
    ('0.123', '1,234,567', '5e-05', '–')
    """
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    if value.is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 1:
        return f"{value:.3g}"
    return f"{value:.3f}" if abs(value) >= 0.001 else f"{value:.2g}"


def seconds_text(seconds: float) -> str:
    """A duration in the unit a person would use.

    >>> seconds_text(4.26), seconds_text(75), seconds_text(3700)
    ('4.3 s', '1 min 15 s', '1 h 1 min')
    """
    if seconds < 60 or not math.isfinite(seconds):  # read from a file, it may be anything
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def content_text(content: Any) -> str:
    """The text of a chat message's content: a string, a list of parts, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part_text(part) for part in content)
    return json.dumps(content, ensure_ascii=False, default=str)


def _part_text(part: Any) -> str:
    if isinstance(part, Mapping):
        if "text" in part:
            return str(part["text"])
        return f"[{part.get('type', 'content')}]"
    return str(part)


def shorten(text: str, longest: int = LONGEST_TEXT) -> str:
    """The text, or its beginning with a note of how much is missing."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]} … {len(text) - longest:,} more characters"


def trajectory_snapshot(trajectory: Trajectory) -> dict[str, Any]:
    """Everything that a drawing of one trajectory needs."""
    histories = [trajectory.messages_and_choices]
    histories += [history.messages_and_choices for history in trajectory.additional_histories]
    error = trajectory.error
    return {
        "id": trajectory.id,
        "scenario_id": trajectory.scenario_id,
        "seat": trajectory.seat,
        "reward": trajectory.reward,
        "seconds": trajectory.seconds,
        "tokens": trajectory.completion_tokens,
        "turns": len(trajectory.turns),
        "metrics": dict(trajectory.metrics),
        "logs": list(trajectory.logs),
        "error": error and {"type": error.type, "message": error.message, "traceback": error.traceback},
        "histories": [[_entry(item) for item in items] for items in histories],
    }


def _entry(item: Any) -> dict[str, Any]:
    if isinstance(item, Mapping):
        return _message_entry(item)
    turn = item if isinstance(item, Turn) else Turn.from_choice(item)
    logprobs = turn.logprobs
    return _message_entry(turn.message) | {
        "tokens": len(turn.completion_ids),
        "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
        "policy_version": turn.policy_version,
        "finish_reason": turn.finish_reason,
        "credit": turn.credit,
    }


def _message_entry(message: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "role": str(message.get("role", "?")),
        "text": shorten(content_text(message.get("content"))),
        "reasoning": shorten(content_text(message.get("reasoning_content"))),
        "calls": [_call_text(call) for call in message.get("tool_calls") or []],
    }


def _call_text(call: Any) -> str:
    function = call.get("function", {}) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, default=str)
    return shorten(f"{function.get('name', '?')}({arguments})")


def _statistics(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    rewards = [t.reward for t in trajectories if t.is_scored and t.reward is not None]
    failed = sum(t.error is not None for t in trajectories)
    return {
        "trajectories": len(trajectories),
        "failed": failed,
        "unscored": len(trajectories) - failed - len(rewards),
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "lowest": min(rewards, default=None),
        "highest": max(rewards, default=None),
        "tokens": sum(t.completion_tokens for t in trajectories),
    }


def groups_snapshot(groups: Iterable[TrajectoryGroup]) -> dict[str, Any]:
    """Everything that a drawing of what ``gather`` returned needs."""
    members = list(groups)
    trajectories = [t for group in members for t in group]
    failures: dict[tuple[str, str], dict[str, Any]] = {}
    for error in (t.error for t in trajectories if t.error):
        kept = failures.setdefault(
            (error.type, error.message),
            {"type": error.type, "message": error.message, "traceback": error.traceback, "count": 0},
        )
        kept["count"] += 1
    return _statistics(trajectories) | {
        "status": getattr(groups, "status", "complete"),
        "seconds": getattr(groups, "seconds", 0.0),
        "failures": sorted(failures.values(), key=lambda f: -f["count"]),
        "rows": [{"scenario_id": g.scenario_id, "seat": g.seat} | _statistics(list(g)) for g in members],
    }


def step_snapshot(result: Any) -> dict[str, Any]:
    """Everything that a drawing of one training step needs, from a StepResult or its metrics."""
    if isinstance(result, Mapping):
        metrics, about = dict(result), dict(result)
    else:
        metrics = dict(result.metrics)
        about = {name: getattr(result, name, None) for name in ABOUT_STEP}
    of_examples = is_supervised(metrics)
    for name in (*ABOUT_STEP, "kind", "time"):
        metrics.pop(name, None)
    sections: dict[str, list[tuple[str, str]]] = {}
    for section, words in SECTIONS.items():
        rows = [(label, number_text(metrics.pop(name))) for name, label in words.items() if name in metrics]
        if rows:
            sections[section] = rows
    timing = [n for n in metrics if "second" in n or n.startswith("time/")]
    if timing:
        sections.setdefault("time", []).extend((_words(n), number_text(metrics.pop(n))) for n in timing)
    if metrics:
        sections["more"] = [(_words(n), number_text(v)) for n, v in metrics.items()]
    return {
        "step": about.get("step"),
        "policy_version": about.get("policy_version"),
        "is_supervised": of_examples,
        "skipped": about.get("skipped"),
        "warnings": list(about.get("warnings") or []),
        "dropped": {k: v for k, v in dict(about.get("dropped") or {}).items() if v},
        "sections": sections,
    }


def _words(name: str) -> str:
    return name.replace("_", " ").replace("/", ": ")
