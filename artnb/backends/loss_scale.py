"""How does a gradient survive in float16, whose smallest numbers are not small enough?

The loss is multiplied by a power of two before the backward pass and the gradient divided by it
after, which is exact. When something on the way overflowed, the factor is halved and the same rows
are computed again, so that no update is ever skipped or made from part of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

T = TypeVar("T")

LARGEST = 2.0**16
GROW_AFTER = 256
"""Backward passes without an overflow before the factor is tried at twice its size."""


class LossScale:
    """The factor for the gradient of these parameters. Not ``enabled``: 1, and nothing is checked."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, enabled: bool) -> None:
        self.parameters = list(parameters)
        self.enabled = enabled
        self.factor = LARGEST if enabled else 1.0
        self._since_change = 0

    def backward(self, compute: Callable[[], tuple[torch.Tensor, T]]) -> tuple[torch.Tensor, T]:
        """Add the gradient of ``compute()[0]``, which may be called again; returns what it returned."""
        if not self.enabled:
            loss, rest = compute()
            loss.backward()
            return loss, rest
        before = [parameter.grad for parameter in self.parameters]
        while True:
            for parameter in self.parameters:
                parameter.grad = None
            loss, rest = compute()
            (loss * self.factor).backward()
            found = [parameter.grad for parameter in self.parameters]
            overflowed = not all(grad is None or bool(torch.isfinite(grad).all()) for grad in found)
            # a loss that is not finite itself is no matter of scale: whoever takes the step refuses it
            if not overflowed or self.factor <= 1.0 or not bool(torch.isfinite(loss)):
                break
            self.factor, self._since_change = self.factor / 2, 0
        for parameter, old, new in zip(self.parameters, before, found, strict=True):
            parameter.grad = old if new is None else new / self.factor + (0.0 if old is None else old)
        self._since_change += 1
        if self._since_change >= GROW_AFTER and self.factor < LARGEST:
            self.factor, self._since_change = self.factor * 2, 0
        return loss, rest
