"""How is a LoRA layer computed with one matrix product instead of three?

The adapter is created, named and stored by peft. Its layers' forward is replaced: the effective
weight W + scale * B @ A is formed once after each update, rounded to the model's dtype, and used
for every token until the next one. The engine samples from these very tensors, so that sampler
and trainer hold the same policy bit for bit, and the base weight is never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import silu

from artnb.errors import ConfigurationError


class _MergedLinear(torch.autograd.Function):
    """y = x @ merged.T + bias; gradients reach x and, through the factors, A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        merged: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, merged, a, b)
        ctx.scale = scale
        return torch.nn.functional.linear(x, merged, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, merged, a, b = ctx.saved_tensors
        grad_x = grad @ merged if ctx.needs_input_grad[0] else None
        return grad_x, None, None, *_factor_gradients(grad, x, a, b, ctx.scale), None


class _MergedGatedLinear(torch.autograd.Function):
    """``_MergedLinear`` of silu(gate) * up, which is computed again in the backward pass, not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: torch.Tensor,
        up: torch.Tensor,
        merged: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(gate, up, merged, a, b)
        ctx.scale = scale
        return torch.nn.functional.linear(silu(gate).mul_(up), merged, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up, merged, a, b = ctx.saved_tensors
        opened = silu(gate)
        factors = _factor_gradients(grad, opened * up, a, b, ctx.scale)
        grad_x = grad @ merged
        grad_up = opened.mul_(grad_x)
        grad_gate = torch.ops.aten.silu_backward(grad_x.mul_(up), gate)
        return grad_gate, grad_up, None, None, *factors, None


def _factor_gradients(
    grad: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of A and B where y = x @ (W + scale * B @ A).T has the gradient ``grad``."""
    flat_grad, flat_x = grad.flatten(0, -2), x.flatten(0, -2)
    through_b = flat_grad @ b.to(grad.dtype)  # (N, r)
    through_a = flat_x @ a.to(x.dtype).T  # (N, r)
    grad_a = (through_b.T @ flat_x).to(a.dtype) * scale
    grad_b = (flat_grad.T @ through_a).to(b.dtype) * scale
    return grad_a, grad_b


class MergedLora:
    """One peft LoRA layer under its merged forward."""

    def __init__(self, name: str, layer: Any, adapter: str) -> None:
        self.name, self.layer, self.adapter = name, layer, adapter
        self.base: torch.Tensor = layer.base_layer.weight
        self.a: torch.nn.Parameter = layer.lora_A[adapter].weight
        self.b: torch.nn.Parameter = layer.lora_B[adapter].weight
        self.scale: float = layer.scaling[adapter]
        self.merged = self.base.detach().clone()
        layer.forward = self._forward

    def _forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        bias = self.layer.base_layer.bias
        if self.layer.disable_adapters:
            return torch.nn.functional.linear(x, self.base, bias)
        return _MergedLinear.apply(x, self.merged, bias, self.a, self.b, self.scale)

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """This layer of silu(gate) * up, keeping only the two for the backward pass."""
        bias = self.layer.base_layer.bias
        if self.layer.disable_adapters:
            return torch.nn.functional.linear(silu(gate) * up, self.base, bias)
        return _MergedGatedLinear.apply(gate, up, self.merged, bias, self.a, self.b, self.scale)

    @torch.no_grad()
    def merge(self) -> tuple[float, float]:
        """Form the effective weight anew. Returns the adapter's update D times itself, and times the
        change of the stored weight: equal where rounding to the model's dtype lost none of it."""
        update = (self.b @ self.a).mul_(self.scale)
        self.merged.copy_(self.base + update)
        stored = self.merged.to(update.dtype) - self.base
        return float(update.square().sum()), float(stored.mul_(update).sum())

    def merged_with(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The effective weight of another adapter of the same shape."""
        return (self.base.to(a.dtype) + (b @ a) * self.scale).to(self.base.dtype)


def merged_layers(model: torch.nn.Module, adapter: str = "default") -> Iterator[MergedLora]:
    """Replace the forward of every LoRA layer of a peft model."""
    from peft.tuners.lora import LoraLayer

    prefix = "base_model.model."
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            if not isinstance(module.base_layer, torch.nn.Linear):
                kind = type(module.base_layer).__name__
                raise ConfigurationError(f"LoRA targets: {name.removeprefix(prefix)} is {kind}, not Linear")
            yield MergedLora(name.removeprefix(prefix), module, adapter)
