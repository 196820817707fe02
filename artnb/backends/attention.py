"""How do the tokens of a packed or batched forward attend to each other?

One attention function is registered with transformers under the name ``artnb``. It hands queries,
keys and values to the *plan* of the running forward, so that any model built on transformers'
attention interface can run a tree of shared prefixes (training) or a set of cached sequences
(sampling) as one flat row of tokens, without padding in the linear layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch

from artnb.errors import ConfigurationError

NAME = "artnb"


class AttentionPlan(Protocol):
    """Who attends to whom in one forward over N flat tokens."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """query (N, H, D), key and value (N, KV, D) -> output (N, H, D)."""
        ...


def register() -> None:
    """Make ``attn_implementation="artnb"`` known to transformers. May be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)


def check_supported(config: Any) -> None:
    """Raise ConfigurationError for models whose attention is more than causal softmax."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    uses_window = getattr(text, "use_sliding_window", True) and window is not None
    if uses_window and window < text.max_position_embeddings:
        raise ConfigurationError(
            f"{text.model_type} uses sliding-window attention ({window} tokens), which the "
            "transformers backend does not run yet"
        )
    if getattr(text, "attn_logit_softcapping", None):
        raise ConfigurationError(f"{text.model_type} caps attention logits, which is not supported yet")
    layer_types = set(getattr(text, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ConfigurationError(
            f"{text.model_type} has layers other than full attention ({', '.join(sorted(layer_types))}), "
            "which the transformers backend does not run yet"
        )


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    plan: AttentionPlan,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    # transformers hands over (1, heads, N, D) views of (1, N, heads, D) memory
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = plan.attend(cast(int, module.layer_idx), q, k, v, scaling)
    return output.unsqueeze(0), None


class _Siblings:
    """Segments with one parent, padded to one length: they see the same ancestors, then themselves."""

    def __init__(
        self,
        segments: Sequence[tuple[int, int]],
        ancestors: Sequence[tuple[int, int]],
        device: torch.device | None = None,
    ) -> None:
        self.rows = len(segments)
        self.width = max(length for _, length in segments)
        starts = torch.tensor([start for start, _ in segments])
        lengths = torch.tensor([length for _, length in segments])
        columns = torch.arange(self.width)
        # padding repeats a row's last token; its output is never read and its gradient is zero
        self.index = (starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)).flatten().to(device)
        self.real = (columns < lengths[:, None]).flatten().to(device)
        self.ancestors = (
            torch.cat([torch.arange(start, start + length) for start, length in ancestors]).to(device)
            if ancestors
            else None
        )
        above = torch.ones(self.width, self.width, dtype=torch.bool).triu(1)
        self.bias = torch.zeros(self.width, self.width).masked_fill_(above, float("-inf")).to(device)

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """(N, heads, D) -> (heads, rows, width, D)"""
        return x[self.index].view(self.rows, self.width, *x.shape[1:]).permute(2, 0, 1, 3)

    def queries_of(self, x: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """(N, H, D) -> (KV, rows, H/KV * width, D): query heads that share a key head side by side."""
        grouped = x[self.index].view(self.rows, self.width, kv_heads, -1, x.shape[-1])
        return grouped.permute(2, 0, 3, 1, 4).reshape(kv_heads, self.rows, -1, x.shape[-1])

    def flat_of(self, x: torch.Tensor) -> torch.Tensor:
        """Inverse of queries_of, padding dropped: -> (real tokens, H, D)"""
        kv_heads, head_dim = x.shape[0], x.shape[-1]
        back = x.view(kv_heads, self.rows, -1, self.width, head_dim).permute(1, 3, 0, 2, 4)
        return back.reshape(self.rows * self.width, -1, head_dim)[self.real]

    def probabilities(self, q: torch.Tensor, k: torch.Tensor, past: torch.Tensor | None) -> torch.Tensor:
        """q (KV, rows, G*width, D) scaled, k (KV, rows, width, D), past (KV, A, D)
        -> float32 (KV, rows, G*width, A + width)"""
        accumulate = torch.promote_types(q.dtype, torch.float32)
        own = torch.matmul(q, k.transpose(-1, -2)).to(accumulate)
        own = own.view(*own.shape[:2], -1, self.width, self.width) + self.bias
        own = own.view(*q.shape[:3], self.width)
        if past is None:
            return own.softmax(-1)
        shared = torch.matmul(q.flatten(1, 2), past.transpose(-1, -2)).to(accumulate)
        return torch.cat([shared.view(*q.shape[:3], -1), own], dim=-1).softmax(-1)


class TreePlan:
    """Training: segments form a tree; a segment sees its ancestors, and itself causally.

    segments: (start, length, parent) in flat order, parent -1 for a root. device: where the tokens are.
    """

    def __init__(self, segments: Sequence[tuple[int, int, int]], device: torch.device | None = None) -> None:
        children: dict[int, list[int]] = {}
        for number, (_, _, parent) in enumerate(segments):
            children.setdefault(parent, []).append(number)
        self.sets: list[_Siblings] = []
        for parent, numbers in children.items():
            ancestors: list[tuple[int, int]] = []
            while parent >= 0:
                start, length, above = segments[parent]
                ancestors.insert(0, (start, length))
                parent = above
            for batch in _similar_lengths([segments[n][:2] for n in numbers]):
                self.sets.append(_Siblings(batch, ancestors, device))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        return _TreeAttention.apply(query, key, value, scaling, self.sets)


def _similar_lengths(segments: Sequence[tuple[int, int]], waste: float = 1.25) -> list[list[tuple[int, int]]]:
    """Cut siblings into batches in which padding costs at most ``waste`` times the real tokens."""
    batches: list[list[tuple[int, int]]] = []
    real = 0
    for segment in sorted(segments, key=lambda s: -s[1]):
        widest = batches[-1][0][1] if batches else 0
        if batches and (len(batches[-1]) + 1) * widest <= waste * (real + segment[1]) + 64:
            batches[-1].append(segment)
            real += segment[1]
        else:
            batches.append([segment])
            real = segment[1]
    return batches


class _TreeAttention(torch.autograd.Function):
    """Exact softmax attention over a tree; probabilities are recomputed in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        sets: Sequence[_Siblings],
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scaling, ctx.sets = scaling, sets
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for siblings in sets:
            q = siblings.queries_of(query, key.shape[1]) * scaling
            k, v = siblings.rows_of(key), siblings.rows_of(value)
            past = None if siblings.ancestors is None else key[siblings.ancestors].transpose(0, 1)
            p = siblings.probabilities(q, k, past).to(v.dtype)
            out = torch.matmul(p[..., -siblings.width :], v)
            if siblings.ancestors is not None:
                past_v = value[siblings.ancestors].transpose(0, 1)
                shared = p[..., : past_v.shape[1]].flatten(1, 2)
                out = out + torch.matmul(shared, past_v).view_as(out)
            output[siblings.index[siblings.real]] = siblings.flat_of(out)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        kv_heads, accumulate = key.shape[1], torch.promote_types(key.dtype, torch.float32)
        d_query = torch.empty_like(query)
        d_key = torch.zeros(key.shape, dtype=accumulate, device=key.device)
        d_value = torch.zeros(value.shape, dtype=accumulate, device=value.device)
        for siblings in ctx.sets:
            width = siblings.width
            real = siblings.index[siblings.real]
            padded = torch.zeros(
                siblings.rows * width, *query.shape[1:], dtype=query.dtype, device=query.device
            )
            padded[siblings.real] = grads[0][real]
            grad = padded.view(siblings.rows, width, kv_heads, -1, query.shape[-1])
            grad = grad.permute(2, 0, 3, 1, 4).reshape(kv_heads, siblings.rows, -1, query.shape[-1])
            q = siblings.queries_of(query, kv_heads) * ctx.scaling
            k, v = siblings.rows_of(key), siblings.rows_of(value)
            past_k = past_v = None
            if siblings.ancestors is not None:
                past_k = key[siblings.ancestors].transpose(0, 1)
                past_v = value[siblings.ancestors].transpose(0, 1)
            p = siblings.probabilities(q, k, past_k)
            d_p = torch.matmul(grad, v.transpose(-1, -2)).to(p.dtype)
            if past_v is not None:
                shared = torch.matmul(grad.flatten(1, 2), past_v.transpose(-1, -2)).to(p.dtype)
                d_p = torch.cat([shared.view(*d_p.shape[:3], -1), d_p], dim=-1)
            d_s = torch.ops.aten._softmax_backward_data(d_p, p, -1, p.dtype).to(q.dtype)
            p = p.to(q.dtype)
            own_p, own_s = p[..., -width:], d_s[..., -width:]
            d_q = torch.matmul(own_s, k)
            # the narrow factor is transposed: it is the cheaper one to rearrange
            d_k = torch.matmul(q.transpose(-1, -2), own_s).transpose(-1, -2)
            d_v = torch.matmul(grad.transpose(-1, -2), own_p).transpose(-1, -2)
            if past_k is not None:
                span = past_k.shape[1]
                past_p, past_s = (x[..., :span].flatten(1, 2) for x in (p, d_s))
                d_q = d_q + torch.matmul(past_s, past_k).view_as(d_q)
                d_past_k = torch.matmul(q.flatten(1, 2).transpose(-1, -2), past_s).permute(2, 0, 1)
                d_past_v = torch.matmul(grad.flatten(1, 2).transpose(-1, -2), past_p).permute(2, 0, 1)
                d_key[siblings.ancestors] += d_past_k.to(accumulate)
                d_value[siblings.ancestors] += d_past_v.to(accumulate)
            d_query[real] = siblings.flat_of(d_q) * ctx.scaling
            for total, part in ((d_key, d_k), (d_value, d_v)):
                flat = part.permute(1, 2, 0, 3).reshape(siblings.rows * width, *key.shape[1:])
                total[real] += flat[siblings.real].to(accumulate)
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), None, None
