"""Log-probabilities of sampled tokens from hidden states, without ever holding all the logits.

The derivative of a log-probability by its hidden state is a difference of rows of the output matrix:
W[target] - sum_v p_v W[v]. It is taken while a chunk's probabilities are at hand, so that the
backward pass multiplies no matrix and computes no logit a second time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from artnb.sizes import CHUNK


def sampled_logprobs(
    hidden_S_H: Tensor,
    weight_V_H: Tensor,
    target_S: Tensor,
    temperature_S: Tensor,
    *,
    chunk: int = CHUNK,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """Score each target, and measure the entropy, under softmax(hidden @ weight.T / temperature).

    Returns (logprobs_S, entropy_S) in float32 (float64 for float64 input). The product runs in the
    input's dtype, the softmax in float32. Gradients go to the hidden states, and to the weight if
    it requires them; ``entropy_gradient=False`` saves a product when the entropy is only looked at.
    """
    return _SampledLogprobs.apply(
        hidden_S_H, weight_V_H, target_S, temperature_S, chunk, entropy_gradient, torch.is_grad_enabled()
    )


class _SampledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: Tensor,
        chunk: int,
        entropy_gradient: bool,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        temperature = temperature.to(torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        logprobs, entropy = torch.empty_like(temperature), torch.empty_like(temperature)
        wants_hidden = grad_enabled and ctx.needs_input_grad[0]
        by_logprob = torch.empty_like(hidden) if wants_hidden else None
        by_entropy = torch.empty_like(hidden) if wants_hidden and entropy_gradient else None
        scratch = _Scratch(hidden, weight, temperature, chunk)
        for rows in _chunks(len(hidden), chunk):
            logp_V, probs_V = scratch.distribution(rows)
            here = target[rows, None]
            logprobs[rows] = logp_V.gather(1, here)[:, 0]
            entropy[rows] = -torch.einsum("sv,sv->s", probs_V, logp_V)
            if by_entropy is not None:
                logp_V.add_(entropy[rows, None]).mul_(probs_V).neg_()  # dH / dlogit
                by_entropy[rows] = scratch.times_weight(logp_V)
            if by_logprob is not None:
                # One is taken off in float32: where p is nearly 1 the difference must not be rounded away.
                probs_V.scatter_add_(1, here, probs_V.new_full(here.shape, -1.0)).neg_()
                by_logprob[rows] = scratch.times_weight(probs_V)
        ctx.save_for_backward(hidden, weight, target, temperature, by_logprob, by_entropy)
        ctx.chunk, ctx.entropy_gradient = chunk, entropy_gradient
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, target, temperature, by_logprob, by_entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grad_logprobs / temperature, grad_entropy / temperature
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            total = by_logprob * grad_logprobs[:, None]
            if by_entropy is not None:
                total.addcmul_(by_entropy, grad_entropy[:, None])
            grad_hidden = total.to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=grad_logprobs.dtype)
            scratch = _Scratch(hidden, weight, temperature, ctx.chunk)
            for rows in _chunks(len(hidden), ctx.chunk):
                logp_V, probs_V = scratch.distribution(rows)
                slope_V = probs_V * -grad_logprobs[rows, None]
                slope_V.scatter_add_(1, target[rows, None], grad_logprobs[rows, None])
                if ctx.entropy_gradient:
                    entropy = -torch.einsum("sv,sv->s", probs_V, logp_V)
                    slope_V -= logp_V.add_(entropy[:, None]).mul_(probs_V).mul_(grad_entropy[rows, None])
                grad_weight += slope_V.to(hidden.dtype).T @ hidden[rows]
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(first, min(first + chunk, length)) for first in range(0, length, chunk)]


class _Scratch:
    """Room for one chunk's logits, used again and again: fresh pages cost more than the arithmetic."""

    def __init__(self, hidden: Tensor, weight: Tensor, temperature: Tensor, chunk: int) -> None:
        self.hidden, self.weight, self.temperature = hidden, weight, temperature
        shape = (min(chunk, len(hidden)), len(weight))
        self.logits = hidden.new_empty(shape)
        self.logp, self.probs = temperature.new_empty(shape), temperature.new_empty(shape)

    def distribution(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Log-probabilities and probabilities over the vocabulary; the next call overwrites them."""
        temperature = self.temperature[rows, None]
        logits, logp, probs = (x[: len(temperature)] for x in (self.logits, self.logp, self.probs))
        torch.mm(self.hidden[rows], self.weight.T, out=logits)
        torch.log_softmax(probs.copy_(logits).div_(temperature), dim=-1, out=logp)
        torch.exp(logp, out=probs)
        return logp, probs

    def times_weight(self, by_logit: Tensor) -> Tensor:
        return self.logits[: len(by_logit)].copy_(by_logit) @ self.weight
