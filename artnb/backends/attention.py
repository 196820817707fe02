"""How do the tokens of a packed or batched forward attend to each other?

One attention function is registered with transformers under the name ``artnb``. It hands queries,
keys and values to the *plan* of the running forward, so that any model built on transformers'
attention interface can run a tree of shared prefixes (training) or a set of cached sequences
(sampling) as one flat row of tokens, without padding in the linear layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol, cast

import torch

from artnb.errors import ConfigurationError
from artnb.sizes import SCORES_ON_CPU, SCORES_ON_GPU, SMALLEST_BLOCK

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


Span = tuple[int, int]
"""Start and length of a segment in the flat order."""


class _Tile:
    """Some queries of segments with one parent, and the keys that they see: ancestors, then their own.

    Several short segments are padded to one length, and share a product with their ancestors' keys.
    Of one long segment a tile holds a block of queries; its keys end where the block does.
    """

    def __init__(
        self, segments: Sequence[Span], ancestors: torch.Tensor, block: Span, device: torch.device | None
    ) -> None:
        self.rows, (first, self.width) = len(segments), block
        starts, lengths = torch.tensor(segments).unbind(1)
        # padding repeats a row's last token; its output is never read and its gradient is zero
        columns = torch.minimum(torch.arange(first + self.width), lengths[:, None] - 1)
        places = starts[:, None] + columns
        real = (torch.arange(first, first + self.width) < lengths[:, None]).flatten()
        self.queries = places[:, first:].flatten().to(device)
        self.real = None if real.all() else real.to(device)
        joined = self.rows == 1
        self.keys = (torch.cat([ancestors, places[0]]) if joined else places.flatten()).to(device)
        self.past = None if joined or not len(ancestors) else ancestors.to(device)
        self.bias = torch.full((self.width, self.width), float("-inf")).triu(1).to(device)

    def scores(self, heads: int) -> int:
        """How many scores it takes over all heads."""
        own = len(self.keys) // self.rows
        return heads * len(self.queries) * (own + (0 if self.past is None else len(self.past)))

    def keys_of(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(N, KV, D) -> own (KV, rows, E, D) and past (KV, A, D)"""
        own = x[self.keys].view(self.rows, -1, *x.shape[1:]).permute(2, 0, 1, 3).contiguous()
        return own, None if self.past is None else x[self.past].transpose(0, 1).contiguous()

    def queries_of(self, x: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """(N, H, D) -> (KV, rows, M, D): the M = H/KV * width queries of one key head side by side."""
        grouped = x[self.queries].view(self.rows, self.width, kv_heads, -1, x.shape[-1])
        turned = grouped.permute(2, 0, 3, 1, 4).contiguous()
        return turned.view(kv_heads, self.rows, -1, x.shape[-1])

    def put_queries(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Inverse of queries_of, padding left out: write (KV, rows, M, D) to its places in (N, H, D)."""
        back = x.view(len(x), self.rows, -1, self.width, x.shape[-1]).permute(1, 3, 0, 2, 4)
        back = back.reshape(self.rows * self.width, -1, x.shape[-1])
        if self.real is None:
            total[self.queries] = back
        else:
            total[self.queries[self.real]] = back[self.real]

    def add_keys(self, total: torch.Tensor, own: torch.Tensor, past: torch.Tensor | None) -> None:
        """Add (KV, rows, D, E) and (KV, D, A) to their places in (N, KV, D), padding left out."""
        flat = own.permute(1, 3, 0, 2).reshape(len(self.keys), *total.shape[1:])
        places = self.keys
        if self.real is not None:
            flat, places = flat[self.real], places[self.real]
        total[places] += flat
        if past is not None:
            total[self.past] += past.permute(2, 0, 1)

    def products(
        self, x: torch.Tensor, own: torch.Tensor, past: torch.Tensor | None, room: torch.Tensor
    ) -> torch.Tensor:
        """x (KV, rows, M, D) times the keys or values it sees -> (KV, rows, M, A + E), in ``room``."""
        heads, rows, queries, dim = x.shape
        span = 0 if past is None else past.shape[1]
        shape = (heads, rows, queries, span + own.shape[2])
        out = room[: heads * rows * queries * shape[-1]].view(shape)
        torch.bmm(
            x.view(-1, queries, dim),
            own.flatten(0, 1).transpose(1, 2),
            out=out[..., span:].view(heads * rows, queries, -1),
        )
        if past is not None:
            of_past = out[..., :span].view(heads, rows * queries, span)
            torch.bmm(x.view(heads, -1, dim), past.transpose(1, 2), out=of_past)
        return out

    def sums(self, weights: torch.Tensor, own: torch.Tensor, past: torch.Tensor | None) -> torch.Tensor:
        """(KV, rows, M, A + E) times what is seen -> (KV, rows, M, D)"""
        heads, rows, queries, _ = weights.shape
        span = 0 if past is None else past.shape[1]
        out = torch.bmm(weights[..., span:].view(heads * rows, queries, -1), own.flatten(0, 1))
        if past is not None:
            of_past = weights[..., :span].view(heads, rows * queries, span)
            out.view(heads, rows * queries, -1).baddbmm_(of_past, past)
        return out.view(heads, rows, queries, -1)

    def sums_by_key(self, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (KV, rows, M, D) summed by what was seen of it -> own (KV, rows, D, E), past (KV, D, A)

        The narrow factor is transposed: it is the cheaper one to rearrange.
        """
        heads, rows, queries, dim = x.shape
        span = 0 if self.past is None else len(self.past)
        own = torch.bmm(
            x.view(-1, queries, dim).transpose(1, 2), weights[..., span:].view(heads * rows, queries, -1)
        )
        own = own.view(heads, rows, dim, -1)
        if self.past is None:
            return own, None
        of_past = weights[..., :span].view(heads, rows * queries, span)
        return own, torch.bmm(x.view(heads, -1, dim).transpose(1, 2), of_past)

    def probabilities(
        self, q: torch.Tensor, k: torch.Tensor, past: torch.Tensor | None, room: torch.Tensor
    ) -> torch.Tensor:
        """q (KV, rows, M, D) scaled -> (KV, rows, M, A + E), in ``room``.

        The softmax of a narrow dtype is computed in float32 and rounded once.
        """
        scores = self.products(q, k, past, room)
        if self.bias.dtype != scores.dtype:
            self.bias = self.bias.to(scores.dtype)
        scores[..., -self.width :].view(*q.shape[:2], -1, self.width, self.width).add_(self.bias)
        return torch.softmax(scores, -1, out=scores)


class TreePlan:
    """Training: segments form a tree; a segment sees its ancestors, and itself causally.

    segments: (start, length, parent) in flat order, parent -1 for a root. device: where the tokens are.
    """

    def __init__(self, segments: Sequence[tuple[int, int, int]], device: torch.device | None = None) -> None:
        self.segments, self.device = list(segments), device
        self._tiles: dict[int, list[_Tile]] = {}
        self._room: list[torch.Tensor] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        return _TreeAttention.apply(query, key, value, scaling, self)

    def tiles(self, query: torch.Tensor) -> tuple[list[_Tile], list[torch.Tensor]]:
        """The work for so many heads, and twice the room for the scores of the largest part of it, used
        again and again: fresh pages cost more than the arithmetic."""
        heads = query.shape[1]
        if heads not in self._tiles:
            scores = SCORES_ON_CPU if query.device.type == "cpu" else SCORES_ON_GPU
            self._tiles[heads] = self._cut(scores // heads)
            self._room = []
        tiles = self._tiles[heads]
        if not self._room or self._room[0].dtype != query.dtype:
            most = max(tile.scores(heads) for tile in tiles)
            self._room = [torch.empty(most, dtype=query.dtype, device=query.device) for _ in range(2)]
        return tiles, self._room

    def _cut(self, most: int) -> list[_Tile]:
        children: dict[int, list[int]] = {}
        for number, (_, _, parent) in enumerate(self.segments):
            children.setdefault(parent, []).append(number)
        tiles: list[_Tile] = []
        for parent, numbers in children.items():
            ancestors: list[torch.Tensor] = []
            while parent >= 0:
                start, length, above = self.segments[parent]
                ancestors.insert(0, torch.arange(start, start + length))
                parent = above
            past = torch.cat(ancestors) if ancestors else torch.empty(0, dtype=torch.int64)
            for batch in _similar_lengths([self.segments[n][:2] for n in numbers], len(past), most):
                for block in _blocks(batch, len(past), most):
                    tiles.append(_Tile(batch, past, block, self.device))
        return tiles


def _similar_lengths(
    segments: Sequence[Span], past: int = 0, most: float = float("inf"), waste: float = 1.25
) -> list[list[Span]]:
    """Cut siblings into batches of at most ``most`` scores, where one by itself has no more, in which
    padding costs at most ``waste`` times the real tokens. past: tokens that all of them see."""
    batches: list[list[Span]] = []
    real = 0
    for segment in sorted(segments, key=lambda s: -s[1]):
        widest = batches[-1][0][1] if batches else 0
        padded = (len(batches[-1]) + 1) * widest if batches else 0
        if batches and padded <= waste * (real + segment[1]) + 64 and padded * (past + widest) <= most:
            batches[-1].append(segment)
            real += segment[1]
        else:
            batches.append([segment])
            real = segment[1]
    return batches


def _blocks(batch: Sequence[Span], past: int, most: int) -> list[Span]:
    """First query and number of queries: all of several segments, or blocks of one that is too long."""
    length = batch[0][1]
    if len(batch) > 1:
        return [(0, length)]
    count = max(1, min(-(-length * (past + length) // most), length // SMALLEST_BLOCK))
    bounds = [length * i // count for i in range(count + 1)]
    return [(first, end - first) for first, end in pairwise(bounds)]


class _TreeAttention(torch.autograd.Function):
    """Exact softmax attention over a tree; probabilities are recomputed in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        plan: TreePlan,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scaling, ctx.plan = scaling, plan
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        tiles, room = plan.tiles(query)
        for tile in tiles:
            q = tile.queries_of(query, key.shape[1]) * scaling
            p = tile.probabilities(q, *tile.keys_of(key), room[0])
            tile.put_queries(output, tile.sums(p, *tile.keys_of(value)))
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        kv_heads, accumulate = key.shape[1], torch.promote_types(key.dtype, torch.float32)
        d_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        d_key, d_value = (torch.zeros(x.shape, dtype=accumulate, device=x.device) for x in (key, value))
        tiles, room = ctx.plan.tiles(query)
        for tile in tiles:
            q = tile.queries_of(query, kv_heads) * ctx.scaling
            grad = tile.queries_of(grads[0], kv_heads)
            if tile.real is not None:
                padding = ~tile.real.view(1, tile.rows, 1, tile.width, 1)
                grad.view(kv_heads, tile.rows, -1, tile.width, grad.shape[-1]).masked_fill_(padding, 0)
            k, v = tile.keys_of(key), tile.keys_of(value)
            p = tile.probabilities(q, *k, room[0])
            d_s = tile.products(grad, *v, room[1])
            torch.ops.aten._softmax_backward_data.out(d_s, p, -1, p.dtype, grad_input=d_s)
            tile.put_queries(d_query, tile.sums(d_s, *k) * ctx.scaling)
            tile.add_keys(d_key, *tile.sums_by_key(q, d_s))
            tile.add_keys(d_value, *tile.sums_by_key(grad, p))
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), None, None
