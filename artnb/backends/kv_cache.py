"""Where do keys and values of running sequences lie, and which prefixes are computed only once?

A sequence is a shared *block* (a prompt prefix that many requests have in common, held once) and
an own suffix in a *slot*. Decoding attends to each block with one matrix product for all the
sequences that share it, and to the suffixes with one batched product.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

Tokens = tuple[int, ...]
_FIRST_CAPACITY = 256
"""Own tokens that a slot has room for, until a sequence needs more."""
_clock = itertools.count()


@dataclass(eq=False)
class Block:
    """A prompt prefix whose keys and values are shared; per layer (KV, P, D)."""

    tokens: Tokens
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    users: int = 0
    last_used: int = 0

    def touch(self) -> None:
        self.last_used = next(_clock)


@dataclass(eq=False)
class Slot:
    """One row of the suffix cache."""

    row: int
    block: Block | None = None
    tokens: list[int] = field(default_factory=list)
    """Own tokens whose keys and values are in the cache (after the block's)."""
    busy: bool = False
    last_used: int = 0

    @property
    def offset(self) -> int:
        return len(self.block.tokens) if self.block else 0

    @property
    def length(self) -> int:
        return self.offset + len(self.tokens)

    def sequence(self) -> Tokens:
        return (self.block.tokens if self.block else ()) + tuple(self.tokens)


class KVCache:
    """Suffix slots, one tensor a layer (slots, KV, capacity, D), and the shared blocks."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *, slots: int, budget_bytes: int
    ) -> None:
        self.layers, self.kv_heads, self.head_dim, self.dtype = layers, kv_heads, head_dim, dtype
        self.budget_bytes = budget_bytes
        self.wanted_slots = slots
        self.token_bytes = 2 * layers * kv_heads * head_dim * dtype.itemsize
        self.capacity = 0
        self.slots: list[Slot] = []
        self.blocks: list[Block] = []
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.resize(_FIRST_CAPACITY)

    @property
    def max_tokens(self) -> int:
        """Longest sequence that fits when it runs alone."""
        return self.budget_bytes // self.token_bytes

    def slots_at(self, capacity: int) -> int:
        return max(1, min(self.wanted_slots, self.budget_bytes // (self.token_bytes * capacity)))

    def resize(self, capacity: int) -> None:
        """Change the room per slot; busy and recently used slots are kept, moved to the front."""
        keep = sorted((s for s in self.slots if s.busy or s.tokens), key=lambda s: (not s.busy, -s.last_used))
        keep = [s for s in keep if len(s.tokens) <= capacity][: self.slots_at(capacity)]
        assert all(s in keep for s in self.slots if s.busy), "a running sequence must not lose its slot"
        rows = torch.tensor([s.row for s in keep], dtype=torch.long)
        count, span = self.slots_at(capacity), min(capacity, self.capacity)
        for store in (self.keys, self.values):
            old = list(store)
            store.clear()
            for layer in range(self.layers):
                fresh = torch.zeros(count, self.kv_heads, capacity, self.head_dim, dtype=self.dtype)
                if len(rows):
                    fresh[: len(rows), :, :span] = old[layer][rows, :, :span]
                    old[layer] = fresh[:0]
                store.append(fresh)
        for dropped in self.slots:
            if dropped not in keep:
                self.release(dropped, forget=True)
        for row, slot in enumerate(keep):
            slot.row = row
        self.slots = keep + [Slot(row) for row in range(len(keep), count)]
        self.capacity = capacity

    def compact(self) -> None:
        """Move busy slots to the front rows, so that decoding reads only them."""
        busy = [s for s in self.slots if s.busy]
        high = [s for s in busy if s.row >= len(busy)]
        low = [s for s in self.slots if not s.busy and s.row < len(busy)]
        if not high:
            return
        a = torch.tensor([s.row for s in high])
        b = torch.tensor([s.row for s in low])
        span = max([len(s.tokens) for s in (*high, *low)] or [0])
        for tensor in (*self.keys, *self.values):
            kept = tensor[a, :, :span]
            tensor[a, :, :span] = tensor[b, :, :span]
            tensor[b, :, :span] = kept
        for up, down in zip(high, low, strict=True):
            up.row, down.row = down.row, up.row
        self.slots.sort(key=lambda s: s.row)

    def take(self, block: Block | None, *, reuse: Slot | None = None) -> Slot:
        """A slot for a new sequence: the given idle one with its content, or the least useful one."""
        slot = reuse
        if slot is None:
            idle = [s for s in self.slots if not s.busy]
            slot = min(idle, key=lambda s: (bool(s.tokens), s.last_used))
            self.release(slot, forget=True)
            slot.block = block
            if block:
                block.users += 1
        slot.busy = True
        slot.last_used = next(_clock)
        if slot.block:
            slot.block.touch()
        return slot

    def release(self, slot: Slot, *, forget: bool) -> None:
        """End a sequence; its content stays for a next turn unless it is to be forgotten."""
        slot.busy = False
        slot.last_used = next(_clock)
        if forget:
            slot.tokens = []
            if slot.block:
                slot.block.users -= 1
            slot.block = None

    def erase(self, slot: Slot) -> None:
        """Overwrite what may hold NaN: hidden columns take part in products, and 0 * NaN is NaN."""
        for tensor in (*self.keys, *self.values):
            tensor[slot.row] = 0

    def idle_by_sequence(self) -> dict[Tokens, Slot]:
        return {s.sequence(): s for s in self.slots if not s.busy and s.tokens}

    def find_block(self, prompt: Tokens) -> Block | None:
        """The longest block that is a proper prefix of the prompt."""
        fitting = [
            b for b in self.blocks if len(b.tokens) < len(prompt) and prompt[: len(b.tokens)] == b.tokens
        ]
        return max(fitting, key=lambda b: len(b.tokens), default=None)

    def add_block(self, block: Block) -> None:
        """Keep a block; unused ones make room when all of them outgrow a quarter of the budget."""
        block.touch()
        self.blocks.append(block)
        limit = self.budget_bytes // 4 // self.token_bytes
        for old in sorted(self.blocks, key=lambda b: b.last_used):
            if sum(len(b.tokens) for b in self.blocks) <= limit:
                break
            if old.users == 0 and old is not block:
                self.blocks.remove(old)

    def clear(self) -> None:
        """Forget everything: the weights changed."""
        for slot in self.slots:
            assert not slot.busy, "weights change only between requests"
            self.release(slot, forget=True)
        self.blocks.clear()
        if self.capacity > _FIRST_CAPACITY:  # long sequences left room for few slots
            self.resize(_FIRST_CAPACITY)


class BatchPlan:
    """Sampling: decode rows (one new token each) and prefill rows (several) in one flat forward.

    rows: (slot, number of new tokens), those with one new token first. The new tokens of a row are
    counted in ``slot.tokens`` already.
    """

    def __init__(self, cache: KVCache, rows: Sequence[tuple[Slot, int]]) -> None:
        self.cache = cache
        slots = [s for s, n in rows for _ in range(n)]
        self.row_N = torch.tensor([s.row for s in slots])
        self.own_N = torch.tensor([len(s.tokens) - n + i for s, n in rows for i in range(n)])
        self.positions_N = self.own_N + torch.tensor([s.offset for s in slots])
        decode = [s for s, n in rows if n == 1]
        prefill = [(s, n) for s, n in rows if n > 1]
        self.parts: list[_Part] = []
        if decode:
            self.parts.append(_Part([(s, 1) for s in decode], 0))
        if prefill:
            # long and short prompts apart, so that padding stays small
            start = len(decode)
            for batch in _by_length(prefill):
                self.parts.append(_Part(batch, start))
                start += sum(n for _, n in batch)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.row_N, :, self.own_N] = key
        values[self.row_N, :, self.own_N] = value
        query = query * scaling
        return torch.cat([part.attend(layer, query, keys, values) for part in self.parts])


def _by_length(rows: Sequence[tuple[Slot, int]]) -> list[list[tuple[Slot, int]]]:
    """Consecutive rows whose new tokens differ by less than a factor of two."""
    batches: list[list[tuple[Slot, int]]] = []
    for row in rows:
        if batches:
            lengths = [n for _, n in batches[-1]] + [row[1]]
            if max(lengths) <= 2 * min(lengths) + 8:
                batches[-1].append(row)
                continue
        batches.append([row])
    return batches


class _Part:
    """Rows of a plan that attend together, padded to one number of new tokens.

    Decoding rows that fill most of the first slots read the cache in place: every slot up to the
    highest one takes part and the output of absent ones is dropped. Others copy their slots out.
    """

    def __init__(self, rows: Sequence[tuple[Slot, int]], start: int) -> None:
        lengths = torch.tensor([n for _, n in rows])
        slot_rows = torch.tensor([s.row for s, _ in rows])
        own = torch.tensor([len(s.tokens) for s, _ in rows])
        self.width, self.span = int(lengths.max()), int(own.max())
        high = int(slot_rows.max()) + 1
        self.in_place = self.width == 1 and len(rows) >= 0.6 * high
        self.count = high if self.in_place else len(rows)
        self.at = slot_rows if self.in_place else torch.arange(len(rows))
        self.start, self.has_absent = start, self.count > len(rows)
        self.slot_rows = slot_rows
        columns = torch.arange(self.width)
        within = torch.minimum(columns, lengths[:, None] - 1)  # padding repeats the last token
        self.index = (start + (lengths.cumsum(0) - lengths)[:, None] + within).flatten()
        self.real = (columns < lengths[:, None]).flatten()
        # new token i of a row sees own columns up to its own
        hidden = torch.arange(self.span) > ((own - lengths)[:, None] + within)[..., None]
        self.bias = torch.zeros(self.count, 1, 1, self.width, self.span)
        self.bias[self.at] = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None]
        members: dict[int, list[int]] = {}
        blocks: dict[int, Block] = {}
        for number, (slot, _) in enumerate(rows):
            if slot.block:
                members.setdefault(id(slot.block), []).append(int(self.at[number]))
                blocks[id(slot.block)] = slot.block
        self.blocks = [(blocks[i], torch.tensor(numbers)) for i, numbers in members.items()]
        self.one_block = len(blocks) == 1 and len(self.blocks[0][1]) == len(rows)
        """All rows share one block, so that absent ones may be scored with it too."""
        self.widest_block = max((len(b.tokens) for b in blocks.values()), default=0)

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        kv_heads, head_dim = keys.shape[1], keys.shape[-1]
        # (B, KV, G*W, D): query heads that share a key head side by side
        if self.width == 1:
            q = query[self.start : self.start + len(self.at)].view(len(self.at), kv_heads, -1, head_dim)
        else:
            q = query[self.index].view(len(self.at), self.width, kv_heads, -1, head_dim)
            q = q.permute(0, 2, 3, 1, 4).reshape(len(self.at), kv_heads, -1, head_dim)
        if not self.in_place:
            k, v = keys[self.slot_rows, :, : self.span], values[self.slot_rows, :, : self.span]
        else:
            k, v = keys[: self.count, :, : self.span], values[: self.count, :, : self.span]
            if self.has_absent:
                q = q.new_zeros(self.count, *q.shape[1:]).index_copy_(0, self.at, q)
        own = torch.matmul(q, k.transpose(-1, -2))
        scores = torch.empty(*own.shape[:3], self.widest_block + self.span)
        torch.add(
            own.view(self.count, kv_heads, -1, self.width, self.span),
            self.bias,
            out=scores[..., self.widest_block :].view(self.count, kv_heads, -1, self.width, self.span),
        )
        if self.blocks:
            self._score_blocks(layer, q, scores[..., : self.widest_block])
        p = scores.softmax(-1).to(v.dtype)
        out = torch.matmul(p[..., self.widest_block :], v)
        if self.blocks:
            self._add_blocks(layer, p, out)
        if self.in_place and self.has_absent:
            out = out[self.at]
        if self.width == 1:
            return out.reshape(len(self.at), -1, head_dim)
        out = out.view(len(self.at), kv_heads, -1, self.width, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(len(self.at) * self.width, -1, head_dim)[self.real]

    def _score_blocks(self, layer: int, q: torch.Tensor, scores: torch.Tensor) -> None:
        if not self.one_block:
            scores.fill_(float("-inf"))
        for block, numbers in self.blocks:
            members = (q if self.one_block else q[numbers]).transpose(0, 1)  # (KV, M, G*W, D)
            found = torch.matmul(members.flatten(1, 2), block.keys[layer].transpose(-1, -2))
            found = found.view(*members.shape[:3], -1).transpose(0, 1)
            if self.one_block:
                scores.copy_(found)
            else:
                scores[numbers, :, :, : found.shape[-1]] = found.float()

    def _add_blocks(self, layer: int, p: torch.Tensor, out: torch.Tensor) -> None:
        for block, numbers in self.blocks:
            span = len(block.tokens)
            weights = (p[..., :span] if self.one_block else p[numbers, :, :, :span]).transpose(0, 1)
            part = torch.matmul(weights.flatten(1, 2), block.values[layer])
            part = part.view(*weights.shape[:3], -1).transpose(0, 1)
            if self.one_block:
                out += part
            else:
                out[numbers] += part


class BlockPlan:
    """Computing a block: its tokens after those of a shorter block that it extends, causally."""

    def __init__(self, block: Block, done: int) -> None:
        self.block, self.done = block, done

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        new_k, new_v = key.transpose(0, 1), value.transpose(0, 1)
        if self.done:
            new_k = torch.cat([self.block.keys[layer], new_k], dim=1)
            new_v = torch.cat([self.block.values[layer], new_v], dim=1)
        if len(self.block.keys) <= layer:
            self.block.keys.append(new_k.contiguous())
            self.block.values.append(new_v.contiguous())
        else:
            self.block.keys[layer], self.block.values[layer] = new_k, new_v
        count, kv_heads, head_dim = key.shape
        q = (query * scaling).view(count, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = torch.matmul(q.flatten(1, 2), new_k.transpose(-1, -2)).float()
        scores = scores.view(kv_heads, -1, count, self.done + count)
        future = torch.ones(count, self.done + count, dtype=torch.bool).triu(self.done + 1)
        p = scores.masked_fill(future, float("-inf")).softmax(-1).to(value.dtype)
        out = torch.matmul(p.flatten(1, 2), new_v).view(kv_heads, -1, count, head_dim)
        return out.permute(2, 0, 1, 3).reshape(count, -1, head_dim)
