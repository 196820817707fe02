"""Which token comes next, and how likely was it? Pure functions over a batch of logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from artnb.config import SamplingConfig


def processed(logits_B_V: torch.Tensor, sampling: Sequence[SamplingConfig]) -> torch.Tensor:
    """Logits of the distribution that is sampled: temperature applied, cut tokens at -inf.

    A request with temperature 0 keeps its raw logits: its token is the largest one, and its
    logprob is reported under temperature 1.
    """
    temperatures = [s.temperature or 1.0 for s in sampling]
    logits = logits_B_V
    if any(t != 1.0 for t in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    cut = [row for row, s in enumerate(sampling) if s.truncates]
    if cut:
        logits = logits.clone()
        for row in cut:
            logits[row] = _truncate(logits[row], sampling[row])
    return logits


def _truncate(logits_V: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    order = logits_V.argsort(descending=True)
    ranked = logits_V[order]
    probabilities = ranked.softmax(-1)
    # a token is kept while the mass before it is below top_p, so at least one always is
    keep = probabilities.cumsum(-1) - probabilities < sampling.top_p
    if sampling.top_k:
        keep[sampling.top_k :] = False
    if sampling.min_p:
        keep &= probabilities >= sampling.min_p * probabilities[0]
    result = torch.full_like(logits_V, float("-inf"))
    result[order[keep]] = ranked[keep]
    return result


def draw(
    logits_B_V: torch.Tensor, sampling: Sequence[SamplingConfig], uniform: Sequence[float]
) -> tuple[list[int], list[float], torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting the cumulative distribution at ``uniform`` in [0, 1).

    Returns ids, their logprobs (natural log), the processed logits (B, V) float32 and log of the sum
    of their exponentials (B,), which is NaN or infinite for a row without a distribution. One number
    a token makes a seeded request reproducible whatever else is in the batch.
    """
    logits = processed(logits_B_V.float(), sampling)
    largest = logits.amax(-1, keepdim=True)
    cumulative = (logits - largest).exp_().cumsum(-1)
    total = cumulative[:, -1:]
    point = torch.tensor(uniform, dtype=total.dtype, device=total.device)[:, None] * total
    # rounding may carry the point up to the total, where only tokens without any mass would be left
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, point, right=True)[:, 0]
    ids = ids.clamp_(max=logits.shape[-1] - 1)
    greedy = [row for row, s in enumerate(sampling) if s.temperature == 0]
    if greedy:
        ids[greedy] = logits[greedy].argmax(-1)
    log_total = (largest + total.log())[:, 0]
    chosen = logits.gather(1, ids[:, None])[:, 0] - log_total
    return ids.tolist(), chosen.tolist(), logits, log_total
