"""How is a policy trained with transformers and peft alone? With one matrix product a layer, see ``lora``."""

from __future__ import annotations

from typing import Any

import torch

from artnb.backends.lean_layers import make_lean
from artnb.backends.lora import merged_layers
from artnb.backends.trainer import OptimizerName, checkpoint_gradients
from artnb.backends.trainer_lora import LoraTrainer
from artnb.config import LoraConfig
from artnb.errors import ConfigurationError

_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


class PeftTrainer(LoraTrainer):
    """Trains an adapter on a model that transformers loaded with ``attn_implementation="artnb"``.

    gradient_checkpointing: keep only the layers' inputs and compute them again in the backward pass.
    optimizer: see ``Trainer``.
    """

    def __init__(
        self,
        model: Any,
        lora: LoraConfig,
        *,
        gradient_checkpointing: bool = False,
        optimizer: OptimizerName = "adamw",
    ) -> None:
        import peft

        targets = lora.peft_targets
        if targets == "all-linear":  # peft's would adapt a mixture's experts too, which are no linear layers
            targets = _linear_layers(model)
        peft_config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft takes floats too
            target_modules=targets,
            lora_dropout=0.0,
            bias="none",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(lora.seed)
            try:
                peft_model = peft.get_peft_model(model, peft_config)
            except ValueError as error:
                raise ConfigurationError(f"LoRA targets: {error}") from error
        if gradient_checkpointing:
            checkpoint_gradients(model)
        layers = list(merged_layers(peft_model))
        make_lean(model, layers)
        super().__init__(model, peft_model, layers, optimizer=optimizer)


def _linear_layers(model: Any) -> list[str]:
    """Names of a model's linear layers, but for the one that gives the logits.

    Where experts are stacked in one parameter, feed-forward layers beside them (dense or shared) are
    left out: peft would take their names for the experts'.
    """
    head = model.get_output_embeddings()
    names = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]
    if any(".experts." in name and p.dim() == 3 for name, p in model.named_parameters()):
        return [name for name in names if not name.endswith(_FEED_FORWARD)]
    return names
