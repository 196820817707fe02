"""Which parts of a decoder layer keep less for the backward pass than transformers' own, with equal results?

Root-mean-square norms keep their input instead of float32 copies of it; a gated feed-forward keeps
what its two first projections gave, and not what it made of them. Together that is nearly half of
what a layer of Llama's shape keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from artnb.backends.lora import MergedLora


def make_lean(model: torch.nn.Module, layers: Iterable[MergedLora]) -> None:
    """Replace the forward of the norms and gated feed-forwards that are found in a peft model.

    A module is left alone unless the replacement gives what the module itself gives.
    """
    by_layer = {id(layer.layer): layer for layer in layers}
    module: Any
    for module in model.modules():
        if isinstance(getattr(module, "variance_epsilon", None), float):
            _replace(module, _LeanNorm(module), module.weight)
        elif (down := by_layer.get(id(getattr(module, "down_proj", None)))) and _is_gated(module):
            _replace(module, _LeanGated(module, down), down.base.T)


def _is_gated(module: Any) -> bool:
    return all(isinstance(getattr(module, n, None), torch.nn.Module) for n in ("gate_proj", "up_proj"))


@torch.no_grad()
def _replace(module: Any, lean: Any, like: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, like.shape[-1], generator=generator).to(like.device, like.dtype)
    if torch.equal(module(x), lean(x)):
        module.forward = lean


class _LeanNorm:
    def __init__(self, module: Any) -> None:
        self.module, self.eps = module, module.variance_epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _RootMeanSquare.apply(x, self.module.weight, self.eps)


class _LeanGated:
    def __init__(self, module: Any, down: MergedLora) -> None:
        self.module, self.down = module, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.gated(self.module.gate_proj(x), self.module.up_proj(x))


class _RootMeanSquare(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps), computed in float32 as transformers does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            through = (grad * weight).to(normed.dtype)
            along = torch.linalg.vecdot(through, normed).div_(x.shape[-1]).unsqueeze(-1)
            grad_x = through.addcmul_(normed, along, value=-1).mul_(scale).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normed.to(grad.dtype)).flatten(0, -2).sum(0)
        return grad_x, grad_weight, None
