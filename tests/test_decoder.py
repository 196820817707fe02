"""The fused decoder and the packed modules compute what transformers does, for every family they accept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from reference_models import Engine, error_of, linear_weights, request

from artnb.backends import attention
from artnb.backends.attention import TreePlan
from artnb.backends.decoder import LeanDecoder, ModulesDecoder, PackedLinear, make_decoder

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {
    "vocab_size": 203,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[Any, type]] = {
    "llama": (transformers.LlamaConfig(**SHAPE), LeanDecoder),
    "llama, biases, tied": (
        transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        LeanDecoder,
    ),
    "llama, wide heads": (transformers.LlamaConfig(**SHAPE, head_dim=20), LeanDecoder),
    "llama, long rope": (
        transformers.LlamaConfig(
            **SHAPE,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        LeanDecoder,
    ),
    "mistral": (transformers.MistralConfig(**SHAPE, sliding_window=None), LeanDecoder),
    "qwen2": (transformers.Qwen2Config(**SHAPE), LeanDecoder),
    "qwen3": (transformers.Qwen3Config(**SHAPE, head_dim=12), LeanDecoder),
    "llama, gelu": (transformers.LlamaConfig(**SHAPE, hidden_act="gelu"), ModulesDecoder),
    "granite": (transformers.GraniteConfig(**SHAPE, attention_multiplier=0.2), ModulesDecoder),
    "olmo2": (transformers.Olmo2Config(**SHAPE), ModulesDecoder),
    "smollm3": (transformers.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0]), ModulesDecoder),
}


def build(config: Any) -> tuple[Any, Any]:
    """The same random model under eager attention and under ours; biases and norms are random too."""
    attention.register()
    models = []
    for implementation in ("eager", attention.NAME):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=implementation
            )
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.data += 0.3 * torch.randn(parameter.shape)
        models.append(model.requires_grad_(False).eval())
    return models[0], models[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_logits_are_transformers(family):
    config, kind = FAMILIES[family]
    plain, ours = build(config)
    decoder = make_decoder(ours)
    if torch.backends.mkldnn.is_available():
        assert type(decoder) is kind
    ids, positions = torch.arange(5, 45), torch.arange(40)
    with torch.inference_mode():
        hidden = decoder.forward(ids, positions, TreePlan([(0, 40, -1)]))
        expected = plain(input_ids=ids[None], use_cache=False).logits[0]
        assert torch.allclose(decoder.logits(hidden), expected, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("family", ["llama, biases, tied", "qwen3", "granite"])
def test_an_engine_over_it_samples_exactly(family, tiny_tokenizer):
    plain, ours = build(FAMILIES[family][0])
    weights = linear_weights(ours)
    engine = Engine(ours, tiny_tokenizer, {"current": (weights, 0)})
    asked = [request(tuple(range(10, 80 + i % 2)), max_tokens=5 + i) for i in range(5)]
    results = engine.answers(*asked)
    assert max(error_of(plain, a, r) for a, r in zip(asked, results, strict=True)) < 1e-3


@pytest.mark.parametrize("family", ["llama", "llama, gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_exchanged_bit_for_bit_one_by_one_or_all(family, dtype):
    _, model = build(FAMILIES[family][0])
    model = model.to(dtype)
    decoder, base = make_decoder(model), {n: w.clone() for n, w in linear_weights(model).items()}
    new = {name: weight + 1 for name, weight in base.items()}
    assert decoder.holds(base) == [] and not decoder.load(base), "nothing changes"
    one = next(name for name in base if "k_proj" in name)
    assert decoder.load({one: new[one]})
    assert decoder.holds(new) == [name for name in decoder.holds(new) if name != one]
    assert decoder.holds({**base, one: new[one]}) == []
    assert decoder.load(new) and decoder.holds(new) == []
    assert set(decoder.holds(base)) == set(base)
    assert decoder.load(base) and decoder.holds(base) == []
    assert all(torch.equal(w, base[n]) for n, w in linear_weights(model).items()), "the model keeps its own"


@pytest.mark.parametrize("packs", [True, False])
def test_a_packed_linear_layer_is_a_linear_layer(packs):
    if packs and not torch.backends.mkldnn.is_available():
        packs = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sources = [torch.nn.Linear(17, n) for n in (5, 33)]
        x = torch.randn(9, 17)
    packed = PackedLinear(*sources, packs=packs)
    expected = torch.cat([source(x) for source in sources], dim=-1)
    with torch.inference_mode():
        assert torch.allclose(packed(x), expected, atol=1e-5)
        assert all(torch.equal(w, s.weight) for w, s in zip(packed.plain(), sources, strict=True))


@pytest.mark.parametrize("packs", [True, False])
def test_what_was_loaded_stays_when_the_given_weights_change(packs):
    _, ours = build(FAMILIES["llama, gelu"][0])
    decoder = ModulesDecoder(ours, packs=packs)
    given = {n: m.weight + 0.5 for n, m in ours.named_modules() if n and hasattr(m, "weight")}
    kept = {name: weight.clone() for name, weight in given.items()}
    assert decoder.load(given) and not decoder.holds(kept)
    for weight in given.values():
        weight.add_(1.0)
    assert decoder.holds(kept) == [] and set(decoder.holds(given)) >= given.keys()
    assert decoder.load(given) and decoder.holds(given) == []
    assert not torch.equal(ours.get_decoder().norm.weight, decoder.model.get_decoder().norm.weight)
