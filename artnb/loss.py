"""The objective of a step: pure functions on one number per sampled token; the file to experiment in.

A loss is one function with the signature of ``cispo`` below, entered in ``LOSSES`` under its name
(and in ``config.LossName``). It returns the loss of each token, to be minimised, and which tokens'
updates it bounded or stopped. Averaging is not its business: see ``objective``.

S sampled tokens, in any order; ``row_S`` says which row each belongs to. ``ratio`` is the trained
policy's probability of a token divided by the *sampling* policy's, both at the turn's temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from artnb.config import TrainConfig

LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor, TrainConfig], tuple[Tensor, Tensor]]

MAX_LOG_RATIO = 20.0
"""Beyond it exp() would drown everything else in the sum."""


def cispo(
    logprobs_S: Tensor, old_logprobs_S: Tensor, advantages_S: Tensor, row_S: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """REINFORCE weighted by the ratio, which is capped and carries no gradient: -sg(min(r, cap)) A log p.

    Every token keeps a gradient, however far the policy has moved. This is CISPO (MiniMax-M1, arXiv
    2506.13585) without a lower bound, and so it is truncated importance sampling per token (Ionides 2008,
    doi:10.1198/106186008X320456) for REINFORCE: there is no other name for that here.
    """
    ratio = log_ratio(logprobs_S, old_logprobs_S).detach().exp()
    return -ratio.clamp(max=config.ratio_cap) * advantages_S * logprobs_S, ratio > config.ratio_cap


def reinforce(
    logprobs_S: Tensor, old_logprobs_S: Tensor, advantages_S: Tensor, row_S: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """Policy gradient without any correction for the sampling policy: -A log p."""
    return -advantages_S * logprobs_S, torch.zeros_like(row_S, dtype=torch.bool)


def ppo(
    logprobs_S: Tensor, old_logprobs_S: Tensor, advantages_S: Tensor, row_S: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate per token: -min(r A, clip(r, 1 - low, 1 + high) A)."""
    return _clipped(log_ratio(logprobs_S, old_logprobs_S).exp(), advantages_S, config)


def gspo(
    logprobs_S: Tensor, old_logprobs_S: Tensor, advantages_S: Tensor, row_S: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """PPO's surrogate with one ratio a row: exp of the mean log ratio of the row's sampled tokens.

    This is the paper's GSPO-token: in value and gradient equal to sequence-level GSPO where a row
    has one advantage, and right also where turns have advantages of their own. The paper's mean
    over sequences is ``aggregate="trajectory"``. Its clips are far narrower than PPO's (3e-4, 4e-4).
    """
    of_row = _mean_of_row(log_ratio(logprobs_S, old_logprobs_S).detach(), row_S).exp()
    return _clipped(of_row * (logprobs_S - logprobs_S.detach()).exp(), advantages_S, config)


def dppo(
    logprobs_S: Tensor, old_logprobs_S: Tensor, advantages_S: Tensor, row_S: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """-r A, dropping tokens whose probability has already moved the advantage's way by the threshold.

    The test is on p - mu, not on p / mu: a rare token may double, a likely one may not move far.
    """
    moved = (logprobs_S.exp() - old_logprobs_S.exp()).detach()
    masked = moved * advantages_S.sign() > config.dppo_threshold
    ratio = log_ratio(logprobs_S, old_logprobs_S).exp()
    return -torch.where(masked, 0.0, ratio * advantages_S), masked


LOSSES: dict[str, LossFunction] = {
    "cispo": cispo,
    "reinforce": reinforce,
    "ppo": ppo,
    "gspo": gspo,
    "dppo": dppo,
}
"""By the name in ``TrainConfig.loss``."""


def token_loss(
    logprobs_S: Tensor,
    old_logprobs_S: Tensor,
    advantages_S: Tensor,
    row_S: Tensor,
    entropy_S: Tensor,
    config: TrainConfig,
    base_logprobs_S: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each sampled token: the policy loss, the KL to the base, the entropy bonus; 0 where masked.

    Masked tokens still count in ``batch.loss_denominator``: leaving some out makes the others no louder.
    The second value holds one detached number a token, for ``summarize``.
    """
    loss_S, limited_S = LOSSES[config.loss](logprobs_S, old_logprobs_S, advantages_S, row_S, config)
    statistics = {
        "log_ratio": log_ratio(logprobs_S, old_logprobs_S).detach(),
        "gap": (logprobs_S - old_logprobs_S).detach().abs(),
        "limited": limited_S.detach(),
        "entropy": entropy_S.detach(),
        "logprob": logprobs_S.detach(),
    }
    if base_logprobs_S is not None:
        kl_S = k3(logprobs_S, base_logprobs_S)
        statistics["kl_base"] = kl_S.detach()
        if config.kl_coef:
            loss_S = loss_S + config.kl_coef * kl_S
    elif config.kl_coef > 0:
        raise ValueError("kl_coef > 0 needs the base model's logprobs")
    if config.entropy_coef:
        loss_S = loss_S - config.entropy_coef * entropy_S
    if config.mask != "none":
        masked_S = is_masked(logprobs_S, old_logprobs_S, row_S, config)
        statistics["masked"] = masked_S
        loss_S = torch.where(masked_S, 0.0, loss_S)
    return loss_S, statistics


def is_masked(logprobs_S: Tensor, old_logprobs_S: Tensor, row_S: Tensor, config: TrainConfig) -> Tensor:
    """Which tokens lie too far off the sampling policy to learn from, as ``config.mask`` says: (S,) bool.

    ``token``: r outside [low, high], the mask of IcePop (arXiv 2510.18855). ``sequence``: exp(mean of
    log r) over the sampled tokens of the row, all of its turns together, outside [low, high]: the row is
    one context, so what went wrong in one turn is in what the next ones read. The geometric mean is that
    of GSPO (arXiv 2507.18071). The product of a row's ratios would mask long rows for being long.
    """
    difference = log_ratio(logprobs_S, old_logprobs_S).detach()
    if config.mask == "sequence":
        difference = _mean_of_row(difference, row_S)
    ratio = difference.exp()
    return (ratio < config.mask_low) | (ratio > config.mask_high)


def objective(loss_S: Tensor, weights_S: Tensor, denominator: float) -> Tensor:
    """What is minimised: the weighted sum over ``batch.loss_denominator`` of the whole update.

    The objectives of an update's micro-batches add up to the update's.
    """
    return (weights_S * loss_S).sum() / denominator


def log_ratio(logprobs_S: Tensor, old_logprobs_S: Tensor) -> Tensor:
    """Log of trained over sampling probability, clamped so that its exp stays finite."""
    return (logprobs_S - old_logprobs_S).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(logprobs_S: Tensor, base_logprobs_S: Tensor) -> Tensor:
    """Estimate KL(policy || base) per token, never below 0: exp(d) - d - 1 with d = base - policy."""
    difference = (base_logprobs_S - logprobs_S).clamp(max=MAX_LOG_RATIO)
    return difference.exp() - difference - 1


def summarize(statistics: Iterable[Mapping[str, Tensor]], config: TrainConfig) -> dict[str, float]:
    """Metrics of an update from the token statistics of its micro-batches, each token counting once.

    ``kl_k1`` and ``kl_k3`` estimate KL(sampling policy || trained policy). ``fraction_capped`` is the
    share of ratios above ``ratio_cap``, ``fraction_clipped`` of tokens that the chosen loss bounded
    or stopped, ``fraction_masked`` of those left out by ``config.mask``. ``logprob_gap`` is engine against
    trainer, true before the step's first update.
    """
    parts = list(statistics)
    if not parts or not sum(len(part["gap"]) for part in parts):
        return {}
    tokens = {name: torch.cat([part[name] for part in parts]).double().cpu() for name in parts[0]}
    difference, ratio = tokens["log_ratio"], tokens["log_ratio"].exp()
    quantiles = torch.quantile(ratio, ratio.new_tensor([0.05, 0.5, 0.95, 0.99]))
    metrics = {
        "entropy": tokens["entropy"].mean(),
        "kl_k1": -difference.mean(),
        "kl_k3": (ratio - difference - 1).mean(),
        **dict(zip(("ratio_p05", "ratio_p50", "ratio_p95", "ratio_p99"), quantiles, strict=True)),
        "ratio_max": ratio.max(),
        "effective_sample_size": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "fraction_capped": (ratio > config.ratio_cap).double().mean(),
        "fraction_clipped": tokens["limited"].mean(),
        "logprob_gap_mean": tokens["gap"].mean(),
        "logprob_gap_max": tokens["gap"].max(),
    }
    if "kl_base" in tokens:
        metrics["kl_base"] = tokens["kl_base"].mean()
    if "masked" in tokens:
        metrics["fraction_masked"] = tokens["masked"].mean()
    return {name: float(value) for name, value in metrics.items()}


def _mean_of_row(values_S: Tensor, row_S: Tensor) -> Tensor:
    """For each token the mean over the tokens of its row."""
    rows = int(row_S.max()) + 1 if len(row_S) else 0
    totals = values_S.new_zeros(rows).index_add_(0, row_S, values_S)
    counts = values_S.new_zeros(rows).index_add_(0, row_S, torch.ones_like(values_S))
    return (totals / counts)[row_S]  # a row without tokens here is 0 / 0, and never looked up


def _clipped(ratio_S: Tensor, advantages_S: Tensor, config: TrainConfig) -> tuple[Tensor, Tensor]:
    free = ratio_S * advantages_S
    held = ratio_S.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_S
    return -torch.minimum(free, held), (held < free).detach()
