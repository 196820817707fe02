"""vLLM gets the memory that the plan gives it: decided without a GPU, from a card's figures."""

from __future__ import annotations

from typing import Any

import pytest

from artnb.backends.vllm_memory import engine_options, planned_options, shared
from artnb.memory import GPUS, Setting, weight_bytes
from artnb.plan import plan

LLAMA_3B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
TOKEN = 2 * 28 * 8 * 128 * 2
"""Bytes of its keys and values."""


def setting(card: str, **options: Any) -> Setting:
    return plan(LLAMA_3B, device=card, context=2048, **options).setting


def options_on(card: str, *, free: float = 1.0, **options: Any) -> dict[str, Any]:
    total = GPUS[card]
    return engine_options(setting(card, **options), free=int(free * total), total=total)


def test_a_roomy_card_gets_what_a_step_needs_and_no_more():
    found = options_on("H200", free=0.9)
    own = 64 * 1024 * TOKEN  # 8 groups of 8, each with 1024 tokens of its own and a prompt for each group
    assert found["kv_bytes"] == own + 8 * 1024 * TOKEN
    assert found["enable_sleep_mode"] is False
    weights = weight_bytes(setting("H200"))
    share = (found["kv_bytes"] + weights) / GPUS["H200"]
    assert share < found["gpu_memory_utilization"] < share + 0.05


def test_a_cache_that_does_not_fit_beside_training_sleeps_meanwhile():
    small = {"gradient_checkpointing": True}
    assert setting("T4", **small).fits
    found = options_on("T4", **small)
    assert found["enable_sleep_mode"] is True
    assert 2048 * TOKEN < found["kv_bytes"] < GPUS["T4"] - weight_bytes(setting("T4"))
    assert options_on("L4", **small)["enable_sleep_mode"] is False


def test_vllm_asks_for_no_more_than_is_free_when_it_starts():
    assert options_on("L4", free=0.5)["gpu_memory_utilization"] == pytest.approx(0.45)
    assert options_on("H200", free=0.1)["gpu_memory_utilization"] == pytest.approx(0.09)


@pytest.mark.parametrize("said", [{"kv_bytes": 1 << 30}, {"gpu_memory_utilization": 0.5}])
def test_who_says_how_much_vllm_takes_is_not_overruled(said):
    assert planned_options(None, "unsloth", None, said, {}) == {}


def test_one_copy_of_the_weights_serves_engine_and_trainer_where_both_are_awake():
    roomy = setting("L4", gradient_checkpointing=True, trainer="unsloth")
    found = shared(roomy, total=GPUS["L4"])
    assert found["fast_inference"] is True
    assert found["max_lora_rank"] == roomy.lora.rank
    cache = engine_options(roomy, free=GPUS["L4"], total=GPUS["L4"])["kv_bytes"]
    assert cache + weight_bytes(roomy) < found["gpu_memory_utilization"] * GPUS["L4"] < 0.9 * GPUS["L4"]


def test_an_engine_that_has_to_sleep_is_one_of_its_own():
    tight = setting("T4", gradient_checkpointing=True, trainer="unsloth")
    assert engine_options(tight, free=GPUS["T4"], total=GPUS["T4"])["enable_sleep_mode"] is True
    assert shared(tight, total=GPUS["T4"]) == {}
    assert shared(setting("L4", gradient_checkpointing=True, trainer="peft"), total=GPUS["L4"]) == {}
