"""How is a policy trained with Unsloth? It makes the model and computes its layers; the rest is ``trainer``.

The only file that imports unsloth. Unsloth has two backends that differ in all but the name:

On a **GPU** it replaces attention, feed-forward, normalisation and LoRA layers of its families by its
own kernels, which read an adapter's factors directly: the effective weight is never formed. They
ignore transformers' attention interface, and drop any attention mask while training; what they do
honour is a table of shared prefixes that travels in the forward's keywords, and our plan takes that
seat (``_seat_plans``). On a **CPU** it is stock transformers and peft, called with its defaults: it
chooses the dtype, quantises to 4 bits, and changes only what TRL's trainers use. Whether packed rows
are kept apart is measured in either case, at the first step, by ``packing_check``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from artnb.backends import attention
from artnb.backends.attention import TreePlan
from artnb.backends.lean_layers import make_lean
from artnb.backends.lora import merged_layers
from artnb.backends.quiet import without_bars
from artnb.backends.trainer import OptimizerName, recompute_activations
from artnb.backends.trainer_lora import LoraTrainer
from artnb.config import LoraConfig
from artnb.errors import ConfigurationError, require
from artnb.packing import PackedBatch

_PATCHED = ("transformers", "peft", "trl", "vllm")
"""Packages that Unsloth changes while they are imported, and which must therefore come after it."""


def import_unsloth() -> Any:
    """Import Unsloth, which changes transformers, peft and trl for the whole process.

    Raises ConfigurationError when one of them is there already: what was made of it so far would
    stay unchanged, and half-changed packages fail late and oddly. Raises MissingDependency.
    """
    early = [name for name in _PATCHED if name in sys.modules]
    if "unsloth" not in sys.modules and early:
        raise ConfigurationError(
            f"Unsloth must be imported before {', '.join(early)}, which this kernel has loaded already. "
            "Restart the kernel and run the cell that makes the Model first, or put `import unsloth` into "
            "the first cell."
        )
    return require("unsloth", extra="gpu", why="to train with its kernels")


def load(
    base: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_seq_length: int = 4096,
    load_in_4bit: bool = False,
    gradient_checkpointing: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """A frozen model and its tokenizer from ``FastLanguageModel.from_pretrained``.

    base: a Hugging Face id or a folder. dtype: None lets Unsloth choose (bf16 where the device has
    it). max_seq_length: longest row in tokens; Unsloth cuts longer ones. load_in_4bit: QLoRA; the
    base weights are kept in bitsandbytes' NF4. options: go to Unsloth as they are, for example
    ``fast_inference=True``, which puts a vLLM engine on the same weights at ``model.vllm_engine``.
    """
    unsloth = import_unsloth()
    attention.register()
    with without_bars():
        model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
            str(base),
            max_seq_length=max_seq_length,
            dtype=dtype,
            load_in_4bit=load_in_4bit,
            use_gradient_checkpointing="unsloth" if gradient_checkpointing else False,
            **{"attn_implementation": attention.NAME} | options,
        )
    if load_in_4bit and not any(_quant_state(m.weight) for m in _linears(model)):
        raise ConfigurationError(
            f"Unsloth loaded {base} without quantising it: bitsandbytes has no working 4-bit kernels for "
            "this device and model. Use load_in_4bit=False"
        )
    if dtype not in (None, model.dtype):
        raise ConfigurationError(f"Unsloth loaded {base} in {model.dtype} where {dtype} was asked for")
    model.requires_grad_(False)
    return model, tokenizer


class UnslothTrainer(LoraTrainer):
    """Trains an adapter on a model that ``load`` made.

    gradient_checkpointing: keep only the layers' inputs, on a GPU in the host's memory, and compute
    the rest again in the backward pass. optimizer: see ``Trainer``. merged: replace peft's LoRA
    layers by one product with the effective weight, as PeftTrainer does. On a CPU, where Unsloth has
    no layers of its own, that is faster; with its GPU kernels or a 4-bit base it cannot be had.
    """

    def __init__(
        self,
        model: Any,
        lora: LoraConfig,
        *,
        gradient_checkpointing: bool = False,
        optimizer: OptimizerName = "adamw",
        merged: bool = False,
    ) -> None:
        unsloth = import_unsloth()
        self._gpu: bool = unsloth.DEVICE_TYPE != "cpu"
        if merged and (self._gpu or any(_quant_state(m.weight) for m in _linears(model))):
            raise ConfigurationError("merged=True needs Unsloth's CPU backend and a base that is not 4-bit")
        self._lora_forward_is_merged = merged
        peft_model = _with_adapter(unsloth, model, lora, gradient_checkpointing)
        if gradient_checkpointing:
            recompute_activations(model)
        self._plans_are_seated = self._gpu and _seat_plans()
        layers: list[Any] = list(merged_layers(peft_model) if merged else _stored_layers(peft_model))
        if merged:
            make_lean(model, layers)
        super().__init__(model, peft_model, layers, optimizer=optimizer)

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        if not self._gpu:
            return super().hidden(batch)
        plan = TreePlan(batch.segments, self.device)
        # One row alone needs no plan. Which of the two keywords is heard depends on whose attention runs.
        seat = {"prefix_seg_info": plan} if self._plans_are_seated and len(batch.segments) > 1 else {}
        with self._autocast():
            output = self.model.get_decoder()(
                input_ids=self._tensor(batch.ids_N)[None],
                position_ids=self._tensor(batch.positions_N)[None],
                use_cache=False,
                plan=plan,
                **seat,
            )
        return output.last_hidden_state[0]

    def _autocast(self) -> AbstractContextManager[Any]:
        """Unsloth's kernels expect the autocast in which its own trainers call them."""
        if self.dtype not in (torch.bfloat16, torch.float16):
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def merge(self) -> None:
        """The adapter has changed. Nothing is formed before somebody asks, unless the forward needs it."""
        if self._lora_forward_is_merged:
            super().merge()

    @property
    def rounding_lost(self) -> float:
        if not self._lora_forward_is_merged:
            self._products = [layer.merge() for layer in self.layers]
        return super().rounding_lost


def _with_adapter(unsloth: Any, model: Any, lora: LoraConfig, gradient_checkpointing: bool) -> Any:
    targets = lora.peft_targets
    whole = {"lm_head", "embed_tokens"} & set([targets] if isinstance(targets, str) else targets)
    if whole:  # Unsloth would train them in full
        raise ConfigurationError(f"LoRA targets: {', '.join(sorted(whole))} cannot have an adapter")
    with torch.random.fork_rng(devices=[]):
        try:
            return unsloth.FastLanguageModel.get_peft_model(
                model,
                r=lora.rank,
                lora_alpha=lora.alpha,
                target_modules=targets,
                lora_dropout=0.0,
                bias="none",
                random_state=lora.seed,
                use_gradient_checkpointing="unsloth" if gradient_checkpointing else False,
            )
        except ValueError as error:
            raise ConfigurationError(f"LoRA targets: {error}") from error


class StoredLora:
    """One LoRA layer that somebody else computes; its effective weight is formed when it is asked for.

    A 4-bit base is de-quantised for it, into the dtype in which Unsloth computes.
    """

    def __init__(self, name: str, layer: Any, adapter: str = "default") -> None:
        self.name, self.layer = name, layer
        self.a: torch.nn.Parameter = layer.lora_A[adapter].weight
        self.b: torch.nn.Parameter = layer.lora_B[adapter].weight
        self.scale: float = layer.scaling[adapter]

    @property
    def base(self) -> torch.Tensor:
        weight = self.layer.base_layer.weight
        state = _quant_state(weight)
        if state is None:
            return weight.detach()
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.detach(), state)

    @property
    def merged(self) -> torch.Tensor:
        return self.merged_with(self.a, self.b)

    @torch.no_grad()
    def merged_with(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        base = self.base
        return (base.to(a.dtype) + (b @ a) * self.scale).to(base.dtype)

    @torch.no_grad()
    def merge(self) -> tuple[float, float]:
        base, update = self.base, (self.b @ self.a) * self.scale
        stored = (base + update).to(base.dtype).to(update.dtype) - base
        return float(update.square().sum()), float(stored.mul_(update).sum())


def _stored_layers(peft_model: torch.nn.Module) -> Iterator[StoredLora]:
    from peft.tuners.lora import LoraLayer

    for name, module in peft_model.named_modules():
        if isinstance(module, LoraLayer):
            short = name.removeprefix("base_model.model.")
            if not isinstance(module.base_layer, torch.nn.Linear):
                kind = type(module.base_layer).__name__
                raise ConfigurationError(f"LoRA targets: {short} is {kind}, not Linear")
            yield StoredLora(short, module)


def _linears(model: torch.nn.Module) -> Iterator[torch.nn.Linear]:
    return (module for module in model.modules() if isinstance(module, torch.nn.Linear))


def _quant_state(weight: torch.Tensor) -> Any:
    """bitsandbytes' key to a 4-bit weight; None for a plain one."""
    return getattr(weight, "quant_state", None)


def _seat_plans() -> bool:
    """Let Unsloth's GPU attention hand over to an ``AttentionPlan`` that sits where its own table of
    shared prefixes would: it passes that one, untouched, from the decoder's keywords to a function.

    False for a version without that function. Its packed rows read each other, which ``packing_check``
    finds and says, so that they are computed one by one.
    """
    try:
        from unsloth.utils import attention_dispatch

        theirs = attention_dispatch._flex_shared_prefix_attention
    except (ImportError, AttributeError):
        return False
    if getattr(theirs, "seats_plans", False):
        return True

    def ours(query: Any, key: Any, value: Any, seat: Any, scale: float | None = None) -> torch.Tensor:
        # (1, N, heads, D) each, and so is what goes back
        if not isinstance(seat, TreePlan):
            if theirs is None:
                from unsloth.utils.prefix_grouper_kernel import flex_shared_prefix_attention

                return flex_shared_prefix_attention(query, key, value, seat, scale=scale)
            return theirs(query, key, value, seat, scale=scale)
        scaling = query.shape[-1] ** -0.5 if scale is None else scale
        return seat.attend(-1, query[0], key[0], value[0], scaling).unsqueeze(0)

    ours.seats_plans = True  # type: ignore[attr-defined]
    attention_dispatch._flex_shared_prefix_attention = ours
    return True
