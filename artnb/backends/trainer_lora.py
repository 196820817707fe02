"""How is an adapter trained over a frozen model? What both trainers with LoRA layers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from artnb.backends.trainer import OptimizerName, Policy, TrainedLayer, Trainer
from artnb.errors import ConfigurationError


class AdaptedLayer(TrainedLayer, Protocol):
    """A linear layer with an adapter: effective weight = base + scale * b @ a, in the base's dtype."""

    a: torch.nn.Parameter
    """(rank, in)"""
    b: torch.nn.Parameter
    """(out, rank)"""

    def merged_with(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The effective weight of another adapter of the same shape."""
        ...


class LoraTrainer(Trainer):
    """A LoRA adapter over a frozen causal language model.

    model: the transformers model whose layers ``peft_model`` has adapted in place. optimizer: see
    ``Trainer``.
    """

    weights_file = "adapter_model.safetensors"
    names_begin = "base_model.model."  # peft's

    def __init__(
        self,
        model: Any,
        peft_model: Any,
        layers: Sequence[AdaptedLayer],
        *,
        optimizer: OptimizerName = "adamw",
    ) -> None:
        if any(layer.layer is model.get_output_embeddings() for layer in layers):
            raise ConfigurationError("LoRA targets: the output layer cannot have an adapter")
        self.peft_model = peft_model
        parameters: dict[str, torch.nn.Parameter] = {}
        for layer in layers:
            parameters |= {f"{layer.name}.lora_A.weight": layer.a, f"{layer.name}.lora_B.weight": layer.b}
        super().__init__(model, layers, parameters, optimizer=optimizer)

    def as_base(self) -> AbstractContextManager[Any]:
        return self.peft_model.disable_adapter()

    def policy(self) -> Policy:
        return {layer.name: (layer.a.detach().clone(), layer.b.detach().clone()) for layer in self.layers}

    def policy_of(self, folder: Path) -> Policy:
        state = {name: tensor.to(self.device) for name, tensor in self._read(folder).items()}
        return {
            layer.name: (state[f"{layer.name}.lora_A.weight"], state[f"{layer.name}.lora_B.weight"])
            for layer in self.layers
        }

    def weights_from(self, policy: Policy) -> dict[str, torch.Tensor]:
        return {layer.name: layer.merged_with(*policy[layer.name]) for layer in self.layers}

    def save(self, folder: Path) -> None:
        """Write adapter (peft's format) and optimizer state into an existing folder."""
        self._write(folder)
        self.peft_model.peft_config["default"].save_pretrained(str(folder))
