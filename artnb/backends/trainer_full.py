"""How is a small model trained as a whole, without an adapter? Each weight has a float32 copy that learns.

The model computes with weights in its own dtype, rounded from those copies after each update: in
bfloat16 an update shows once it has grown beyond rounding (``rounding_lost``). The base weights are
kept too, for the policy ``base`` and the KL to it. With what an engine and the undoing of a step need,
that is 36 bytes a parameter in bfloat16, so it is for models that are small beside the memory.

Trained are the weights of all layers: linear ones, embeddings, the output layer, norms. Biases, and
experts that a mixture stacks in one parameter, stay what they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from artnb.backends.trainer import OptimizerName, Policy, Trainer, checkpoint_gradients


class FullTrainer(Trainer):
    """Trains every layer's weight of a model that ``stack.load_model`` made.

    gradient_checkpointing: keep only the layers' inputs and compute them again in the backward pass.
    optimizer: see ``Trainer``.
    """

    weights_file = "model.safetensors"

    def __init__(
        self, model: Any, *, gradient_checkpointing: bool = False, optimizer: OptimizerName = "adamw"
    ) -> None:
        layers = list(_own_weights(model))
        if gradient_checkpointing:
            checkpoint_gradients(model)
        parameters = {f"{layer.name}.weight": layer.master for layer in layers}
        super().__init__(model, layers, parameters, optimizer=optimizer)

    def _accumulate(self, *given: Any) -> Any:
        for layer in self.layers:  # memory may have run out between a gradient and its collection
            layer.layer.weight.grad = None
        return super()._accumulate(*given)

    @contextmanager
    def as_base(self) -> Iterator[None]:
        try:
            for layer in self.layers:
                layer.layer.weight.data = layer.base
            yield
        finally:
            for layer in self.layers:
                layer.layer.weight.data = layer.merged

    def policy(self) -> Policy:
        return {layer.name: (layer.merged.clone(),) for layer in self.layers}

    def policy_of(self, folder: Path) -> Policy:
        state = self._read(folder)
        return {
            layer.name: (state[f"{layer.name}.weight"].to(self.device, self.dtype),) for layer in self.layers
        }

    def weights_from(self, policy: Policy) -> dict[str, torch.Tensor]:
        return {name: weight for name, (weight,) in policy.items()}

    def save(self, folder: Path) -> None:
        """Write the model, which transformers loads, and optimizer state into an existing folder."""
        self._write(folder)
        self.model.config.save_pretrained(folder)

    def _untrained(self) -> dict[str, torch.Tensor]:
        return {name: p for name, p in self.model.named_parameters() if name not in self.parameters}


class FullWeight:
    """The weight of one layer: ``master`` learns, ``merged`` is what the model computes with."""

    def __init__(self, name: str, layer: Any) -> None:
        self.name, self.layer = name, layer
        self.base: torch.Tensor = layer.weight.detach()  # engines may compute with this very tensor
        wide = torch.promote_types(self.base.dtype, torch.float32)
        self.master = torch.nn.Parameter(self.base.to(wide, copy=True))
        self.merged = self.base.clone()
        layer.weight = torch.nn.Parameter(self.merged)
        layer.weight.register_post_accumulate_grad_hook(self._collect)

    def _collect(self, weight: torch.Tensor) -> None:
        """Add the gradient of a micro-batch in the master's dtype."""
        assert weight.grad is not None
        found = weight.grad.to(self.master.dtype)
        self.master.grad = found if self.master.grad is None else self.master.grad + found
        weight.grad = None

    @torch.no_grad()
    def merge(self) -> tuple[float, float]:
        """Round to the model's dtype. Returns the distance D from the base times itself, and times the
        change of the rounded weight: equal where rounding lost none of it."""
        self.merged.copy_(self.master)
        update = self.master - self.base
        stored = self.merged.to(update.dtype) - self.base
        return float(update.square().sum()), float(stored.mul_(update).sum())


def _own_weights(model: torch.nn.Module) -> Iterator[FullWeight]:
    """Give each layer a weight of its own in place of the loaded one; tied layers share one."""
    found: dict[int, FullWeight] = {}
    for name, module in list(model.named_modules()):
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        if id(weight) in found:
            module.weight = found[id(weight)].layer.weight
        else:
            found[id(weight)] = FullWeight(name, module)
            yield found[id(weight)]
