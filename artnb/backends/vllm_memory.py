"""How much of a GPU may vLLM take beside a trainer? What the plan says, never a share of the card.

The figures are those of ``memory``: formulas, which no GPU has confirmed yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from artnb.architecture import read_config
from artnb.config import LoraConfig
from artnb.memory import Setting, engine_budget, machine

_SAID_BY_HAND = {"kv_bytes", "kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"}
_START = 0.9
"""Of the free memory: vLLM takes some for itself before it looks."""


def planned_options(
    model: Any,
    trainer: str,
    lora: LoraConfig | None,
    options: Mapping[str, Any],
    trainer_options: Mapping[str, Any],
) -> dict[str, Any]:
    """What a VllmEngine with weights of its own is to be made with on this GPU.

    model: the trainer's, which is there already. options: the engine_kwargs; nothing is planned where
    they say how much memory vLLM takes.
    """
    if _SAID_BY_HAND & options.keys():
        return {}
    config = read_config(model.config)
    setting = _setting(
        config,
        str(config.name_or_path),
        model.dtype,
        trainer_options,
        options,
        trainer=trainer,
        lora=lora or LoraConfig(),
        context=min(int(config.max_position_embeddings), int(options.get("max_context") or 4096)),
        load_in_4bit=bool(getattr(model, "is_loaded_in_4bit", False)),
        shared_weights=False,
    )
    free, total = torch.cuda.mem_get_info()
    return engine_options(setting, free=free, total=total)


def shared_options(
    base: str | Path,
    dtype: torch.dtype,
    lora: LoraConfig,
    trainer_options: Mapping[str, Any],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """What makes Unsloth put vLLM on the trainer's own weights: one copy of them on this GPU.

    options: the engine_kwargs. Empty where it was decided by hand, and where only an engine of its own will
    do: for what else engine_kwargs ask, or because it has to sleep while the trainer steps.
    """
    if "fast_inference" in trainer_options or options.keys() - {"max_running"}:
        return {}
    setting = _setting(
        read_config(base),
        str(base),
        dtype,
        trainer_options,
        options,
        trainer="unsloth",
        lora=lora,
        context=int(trainer_options.get("max_seq_length", 4096)),
        load_in_4bit=bool(trainer_options.get("load_in_4bit", False)),
    )
    return shared(setting, total=torch.cuda.mem_get_info()[1])


def _setting(
    config: Any,
    base: str,
    dtype: torch.dtype,
    trainer_options: Mapping[str, Any],
    options: Mapping[str, Any],
    **rest: Any,
) -> Setting:
    kind, capacity = machine()
    return Setting.of(
        config,
        base=base,
        device=kind,
        capacity=capacity,
        dtype=str(dtype).removeprefix("torch."),
        engine="vllm",
        gradient_checkpointing=bool(trainer_options.get("gradient_checkpointing", False)),
        full_finetuning=bool(trainer_options.get("full_finetuning", False)),
        optimizer=trainer_options.get("optimizer", Setting.optimizer),
        max_running=int(options.get("max_running", Setting.max_running)),
        **rest,
    )


def shared(setting: Setting, *, total: int) -> dict[str, Any]:
    """The same for a setting, on a card with ``total`` bytes."""
    budget = engine_budget(setting)
    if budget.sleeps or budget.weight_copies > 1:
        return {}
    return {
        "fast_inference": True,
        "max_lora_rank": setting.lora.rank,
        "gpu_memory_utilization": budget.engine_bytes / total,
    }


def engine_options(setting: Setting, *, free: int, total: int) -> dict[str, Any]:
    """The same for a setting, on a card with ``free`` of ``total`` bytes.

    With ``kv_bytes`` vLLM sizes nothing by ``gpu_memory_utilization``, but it still refuses to start
    where that share of the card is not free.
    """
    budget = engine_budget(setting)
    return {
        "kv_bytes": budget.kv_bytes,
        "enable_sleep_mode": budget.sleeps,
        "gpu_memory_utilization": min(budget.engine_bytes, _START * free) / total,
    }
