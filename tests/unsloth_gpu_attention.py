"""Does Unsloth's GPU attention hand over to our plan? Its real dispatch, on CPU tensors.

Runs in a process of its own: importing Unsloth's GPU models changes more than its CPU backend does, and
writes a folder of compiled sources into the working directory.
"""

from __future__ import annotations

import unsloth  # before the packages that it changes

# isort: split
import torch
import unsloth.models  # noqa: F401  # its GPU code imports in this order only
from unsloth.utils import attention_dispatch

from artnb.backends.attention import TreePlan
from artnb.backends.trainer_unsloth import _seat_plans

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 8, 12


def attend(qkv: list[torch.Tensor], **seat: TreePlan) -> torch.Tensor:
    """(1, N, heads, D) as a layer of Unsloth's Llama gets it."""
    config = attention_dispatch.AttentionConfig(
        backend=attention_dispatch.select_attention_backend(),
        n_kv_heads=KV_HEADS,
        n_groups=HEADS // KV_HEADS,
        flash_dense_kwargs={"causal": True},
        flash_varlen_kwargs={"dropout_p": 0.0, "causal": True},
    )
    context = attention_dispatch.AttentionContext(
        bsz=1,
        q_len=TOKENS,
        kv_seq_len=TOKENS,
        n_heads=HEADS,
        head_dim=DIM,
        requires_grad=True,
        seq_info=None,
        attention_mask=None,
        causal_mask=None,
        training=True,
        prefix_seg_info=attention_dispatch.resolve_prefix_seg_info(seat, None, None),
    )
    q, k, v = qkv
    return attention_dispatch.run_attention(config=config, context=context, Q=q, K=k, V=v)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    qkv = [torch.randn(1, heads, TOKENS, DIM).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS)]
    flat = [x[0].transpose(0, 1) for x in qkv]
    tree = TreePlan([(0, 6, -1), (6, 4, 0), (10, 2, 0)])
    assert _seat_plans()
    assert _seat_plans()  # a second model in the same kernel

    out = attend(qkv, prefix_seg_info=tree)
    expected = tree.attend(0, *flat, DIM**-0.5)
    assert torch.equal(out[0], expected)
    grads = [torch.autograd.grad(y.square().sum(), qkv, retain_graph=True) for y in (out, expected)]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))

    without = attend(qkv)[0]
    causal = TreePlan([(0, TOKENS, -1)]).attend(0, *flat, DIM**-0.5)
    assert torch.allclose(without, causal, atol=1e-5), "nothing in the seat: plain causal attention"
    assert not torch.allclose(without, out[0], atol=1e-2), "and that is not the tree's"

    del attention_dispatch._flex_shared_prefix_attention
    assert not _seat_plans(), "another version of Unsloth: rows are computed one by one"
    print("the plan was heard")


if __name__ == "__main__":
    main()
