"""Which models do tests plan? Their configurations, as their authors published them."""

from __future__ import annotations

from typing import Any


def qwen2(hidden: int, width: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 32768,
    } | more


def qwen3(hidden: int, width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    found = qwen2(hidden, width, layers, heads, 8, model_type="qwen3", head_dim=128)
    return found | {"max_position_embeddings": 40960} | more


def eight_billion(model_type: str, vocabulary: int, **more: Any) -> dict[str, Any]:
    """The layers that Llama 3.1 8B, Mistral 7B and Mixtral 8x7B have in common."""
    return {
        "model_type": model_type,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "sliding_window": None,
    } | more


def latent(model_type: str, **more: Any) -> dict[str, Any]:
    """DeepSeek-V3, and what Kimi-K2 changes of it."""
    return {
        "model_type": model_type,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "tie_word_embeddings": False,
        "max_position_embeddings": 163840,
    } | more


def gemma(model_type: str, hidden: int, width: int, layers: int, heads: int, kv_heads: int, vocabulary: int):
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "vocab_size": vocabulary,
    }


QWEN_HALF_B = qwen2(896, 4864, 24, 14, 2)
QWEN_3B = qwen2(2048, 11008, 36, 16, 2)
QWEN_7B = qwen2(3584, 18944, 28, 28, 4, vocab_size=152064, tie_word_embeddings=False)
MIXTRAL = eight_billion("mixtral", 32000, num_local_experts=8, num_experts_per_tok=2)
DEEPSEEK = latent("deepseek_v3")
KIMI = latent(
    "kimi_k2",
    vocab_size=163840,
    num_attention_heads=64,
    num_key_value_heads=64,
    n_routed_experts=384,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
)
QWEN_MOE = qwen3(2048, 6144, 48, 32, tie_word_embeddings=False) | {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
KNOWN = {
    "Qwen2.5-0.5B": (QWEN_HALF_B, 494_032_768),
    "Qwen2.5-3B": (QWEN_3B, 3_085_938_688),
    "Qwen2.5-7B": (QWEN_7B, 7_615_616_512),
    "Qwen3-0.6B": (qwen3(1024, 3072, 28, 16), 596_049_920),
    "Qwen3-8B": (qwen3(4096, 12288, 36, 32, tie_word_embeddings=False), 8_190_735_360),
    "Llama-3.1-8B": (eight_billion("llama", 128256), 8_030_261_248),
    "Mistral-7B-v0.3": (eight_billion("mistral", 32768), 7_248_023_552),
    "Mixtral-8x7B": (MIXTRAL, 46_702_792_704),
    "Qwen3-30B-A3B": (QWEN_MOE, 30_532_122_624),
    "DeepSeek-V3": (DEEPSEEK, 671_026_404_352),
    "Kimi-K2": (KIMI, 1_026_408_209_408),
    "Gemma-2B": (gemma("gemma", 2048, 16384, 18, 8, 1, 256000), 2_506_172_416),
    "Gemma-2-2B": (gemma("gemma2", 2304, 9216, 26, 8, 4, 256000), 2_614_341_888),
    "Gemma-3-1B": (gemma("gemma3_text", 1152, 6912, 26, 4, 1, 262144), 999_885_952),
}
"""Configurations as their authors published them, and how many parameters these models have."""
