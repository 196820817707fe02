"""Attention over a tree of shared prefixes equals attention under a dense mask, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from artnb.backends.attention import NAME, TreePlan, _similar_lengths, check_supported, register
from artnb.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("one_thread")


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Segments (start, length, parent) in flat order, whose parents come before them."""
    count, start = draw(st.integers(1, 9)), 0
    segments: list[tuple[int, int, int]] = []
    for number in range(count):
        length = draw(st.integers(1, 12) | st.integers(60, 90))
        segments.append((start, length, draw(st.integers(-1, number - 1))))
        start += length
    return segments


def visible(segments: list[tuple[int, int, int]]) -> torch.Tensor:
    """(N, N) bool: may token i look at token j?"""
    total = segments[-1][0] + segments[-1][1]
    mask = torch.zeros(total, total, dtype=torch.bool)
    for start, length, parent in segments:
        own = slice(start, start + length)
        mask[own, own] = torch.ones(length, length, dtype=torch.bool).tril()
        while parent >= 0:
            above, count, parent = segments[parent]
            mask[own, above : above + count] = True
    return mask


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, mask: torch.Tensor
) -> torch.Tensor:
    """q (N, H, D), k and v (N, KV, D): plain masked attention."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scaling
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


def inputs(tokens: int, heads: int, kv_heads: int, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, 8), (tokens, kv_heads, 8), (tokens, kv_heads, 8), (tokens, heads, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def attend(
    segments: list[tuple[int, int, int]], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Output and the gradients of q, k and v."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    output = TreePlan(segments).attend(0, *leaves, 0.3)
    return (output.detach(), *torch.autograd.grad(output, leaves, up))


@given(segments=trees(), heads=st.sampled_from([(1, 1), (2, 2), (6, 2), (4, 1)]), seed=st.integers(0, 99))
@settings(max_examples=30, derandomize=True)
def test_a_tree_equals_the_dense_mask_with_its_gradients(segments, heads, seed):
    mask = visible(segments)
    q, k, v, up = inputs(len(mask), *heads, seed, torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    reference = dense(*leaves, 0.3, mask)
    expected = (reference.detach(), *torch.autograd.grad(reference, leaves, up))
    for ours, theirs in zip(attend(segments, q, k, v, up), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_lower_precision_stays_near_the_double_result(dtype, tolerance):
    segments = [(0, 40, -1), (40, 30, 0), (70, 9, 0), (79, 1, 1), (80, 70, 1)]
    exact = inputs(150, 6, 2, 0, torch.float64)
    reference = attend(segments, *exact)
    for ours, theirs in zip(attend(segments, *(x.to(dtype) for x in exact)), reference, strict=True):
        assert ours.dtype == dtype
        assert float((ours.double() - theirs).norm() / theirs.norm()) < tolerance


def test_views_with_other_strides_give_the_same():
    segments = [(0, 5, -1), (5, 3, 0), (8, 4, 0)]
    q, k, v, up = inputs(12, 4, 2, 3, torch.float64)
    expected = attend(segments, q, k, v, up)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    output = TreePlan(segments).attend(0, *turned, 0.3)
    assert torch.equal(output, expected[0])


def test_nothing_reaches_a_sibling_or_a_later_token():
    segments = [(0, 4, -1), (4, 3, 0), (7, 3, 0), (10, 2, 2)]
    q, k, v, _ = inputs(12, 2, 1, 1, torch.float64)
    before = TreePlan(segments).attend(0, q, k, v, 0.3)
    k[4:7] += 5.0  # the first child
    v[11] += 5.0  # the last token
    after = TreePlan(segments).attend(0, q, k, v, 0.3)
    changed = (before != after).any(-1).any(-1).tolist()
    assert changed == [i in (4, 5, 6, 11) for i in range(12)]


@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=40))
@settings(max_examples=50, derandomize=True)
def test_batches_of_siblings_waste_little_and_lose_none(lengths):
    segments = [(sum(lengths[:i]), n) for i, n in enumerate(lengths)]
    batches = _similar_lengths(segments)
    assert sorted(s for batch in batches for s in batch) == segments
    for batch in batches:
        real = sum(n for _, n in batch)
        assert len(batch) * max(n for _, n in batch) <= max(1.25 * real + 64, real)


def test_a_whole_model_runs_under_the_plan_as_under_eager_attention(tiny_model):
    from reference_models import load

    ids = torch.arange(5, 35)[None]
    eager = load(tiny_model)(input_ids=ids, use_cache=False).logits
    ours = load(tiny_model, implementation=NAME)(
        input_ids=ids, use_cache=False, plan=TreePlan([(0, 30, -1)])
    ).logits
    assert torch.allclose(eager, ours, atol=1e-4)


def test_registering_twice_is_harmless():
    register()
    register()
    assert NAME in transformers.AttentionInterface()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.MistralConfig(sliding_window=64, max_position_embeddings=512), "sliding-window"),
        (transformers.Gemma2Config(), "attention|caps|window"),
        (transformers.Qwen2Config(layer_types=["linear_attention"] * 24, num_hidden_layers=24), "linear"),
    ],
)
def test_attention_that_is_more_than_causal_softmax_is_refused(config: Any, reason: str):
    with pytest.raises(ConfigurationError, match=reason):
        check_supported(config)


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(),
        transformers.Qwen2Config(),
        transformers.Qwen3Config(),
        transformers.MistralConfig(sliding_window=None),
    ],
)
def test_plain_decoders_are_accepted(config: Any):
    check_supported(config)
