"""Which curves stand together in one chart, and under which words?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

CHARTS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("reward_spread", "reward", "Rewards in a step", {"reward_max": "highest", "reward_min": "lowest"}),
    (
        "outcomes",
        "rollouts",
        "Shares of a step",
        {
            "groups_solved": "groups solved",
            "groups_equal": "groups that teach nothing",
            "failed_share": "rollouts failed",
            "unscored_share": "rollouts nobody scored",
            "truncated": "turns cut off",
        },
    ),
    ("length", "rollouts", "Sampled tokens a rollout", {"rollout_tokens": "tokens"}),
    ("turns", "rollouts", "Turns a rollout", {"rollout_turns": "turns"}),
    ("loss", "policy", "Loss", {"loss": "loss", "nll": "negative log-likelihood"}),
    ("entropy", "policy", "Entropy a token", {"entropy": "entropy"}),
    ("kl", "policy", "KL a token", {"kl_k1": "k1", "kl_k3": "k3", "kl_base": "to the base"}),
    (
        "ratio",
        "policy",
        "Ratio to the sampling policy",
        {"ratio_p05": "5 %", "ratio_p50": "median", "ratio_p95": "95 %", "ratio_max": "highest"},
    ),
    ("sample_size", "policy", "Effective sample size", {"effective_sample_size": "share of samples"}),
    (
        "bounded",
        "policy",
        "Tokens bounded",
        {"fraction_capped": "capped", "fraction_clipped": "clipped", "fraction_masked": "masked"},
    ),
    (
        "agreement",
        "engine",
        "|engine − trainer| logprob",
        {"logprob_gap_mean": "mean", "logprob_gap_max": "highest", "probe_gap_mean": "mean of the probe"},
    ),
    ("staleness", "engine", "Policy versions old", {"staleness": "versions"}),
    ("gradient", "optimizer", "Gradient norm", {"grad_norm": "norm"}),
    ("learning_rate", "optimizer", "Learning rate", {"learning_rate": "rate"}),
    (
        "speed",
        "speed",
        "Tokens a second",
        {
            "tokens_per_second_gather": "gather",
            "tokens_per_second_judge": "judge",
            "tokens_per_second_train": "train",
        },
    ),
    (
        "time",
        "speed",
        "Seconds of a step, stacked",
        {
            "seconds_gather": "gather",
            "seconds_judge": "judge",
            "seconds_train": "train",
            "seconds_publish": "publish",
            "seconds_checkpoint": "checkpoint",
            "seconds_other": "other",
        },
    ),
    ("memory", "speed", "Memory of this process, GB", {"memory_gb": "now", "memory_peak_gb": "peak"}),
    (
        "gpu_memory",
        "speed",
        "GPU memory, GB",
        {
            "gpu_memory_allocated_gb": "tensors",
            "gpu_memory_reserved_gb": "reserved",
            "gpu_memory_peak_gb": "peak",
        },
    ),
)
"""Id, section, title, and the words for each metric."""

_BY_PREFIX = (
    ("parts", "reward/", "Parts of the reward"),
    ("measured", "metric/", "Measured by rollouts"),  # rates of success or of invalid moves, and the like
    ("cost", "cost_", "Cost of a step, dollars"),
)
_MOST_CURVES = 6
"""Curves of one chart; more of a kind go into the next."""
_SECTIONS = ("reward", "rollouts", "policy", "engine", "optimizer", "speed")


def charts(present: Iterable[str]) -> list[dict[str, Any]]:
    """The charts for which there are numbers: id, section, title, and pairs of metric and words.

    present: names of metrics, in the order in which they came.
    """
    names = dict.fromkeys(present)
    found = []
    for key, section, title, words in CHARTS:
        series = [[name, label] for name, label in words.items() if name in names]
        if series:
            found.append({"id": key, "section": section, "title": title, "series": series})
    for key, prefix, title in _BY_PREFIX:
        series = [[name, name.removeprefix(prefix)] for name in names if name.startswith(prefix)]
        section = "speed" if key == "cost" else "reward"
        for start in range(0, len(series), _MOST_CURVES):
            about = {"id": f"{key}{start or ''}", "section": section, "title": title}
            found.append({**about, "series": series[start : start + _MOST_CURVES]})
    return sorted(found, key=lambda chart: _SECTIONS.index(chart["section"]))
