"""Keys and values stay with their sequence, and sequences attend to their own past only."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artnb.backends.kv_cache import BatchPlan, Block, BlockPlan, KVCache, Slot

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, KV, HEADS, D = 2, 2, 6, 4
TOKEN_BYTES = 2 * LAYERS * KV * D * 4


def make_cache(slots: int = 4, *, at_256: int = 4) -> KVCache:
    """A cache whose budget holds ``at_256`` slots of 256 tokens."""
    return KVCache(LAYERS, KV, D, torch.float32, slots=slots, budget_bytes=TOKEN_BYTES * 256 * at_256)


def vectors(ids: list[int], layer: int, heads: int, salt: int) -> torch.Tensor:
    """(N, heads, D): made-up activations that depend on the token, its layer and its kind alone."""
    rows = [
        torch.randn(heads, D, generator=torch.Generator().manual_seed(i * 64 + 8 * layer + salt)) for i in ids
    ]
    return torch.stack(rows) if rows else torch.empty(0, heads, D)


def fill(cache: KVCache, slot: Slot, ids: list[int]) -> None:
    """Write a sequence's own tokens as a forward would, and their count into every column."""
    at = len(slot.tokens)
    slot.tokens += ids
    for layer in range(LAYERS):
        keys, values = vectors(ids, layer, KV, 1), vectors(ids, layer, KV, 2)
        cache.keys[layer][slot.row, :, at : at + len(ids)] = keys.transpose(0, 1)
        cache.values[layer][slot.row, :, at : at + len(ids)] = values.transpose(0, 1)


def holds(cache: KVCache, slot: Slot) -> bool:
    """Are the slot's tokens' keys and values where it says?"""
    for layer in range(LAYERS):
        for store, salt in ((cache.keys, 1), (cache.values, 2)):
            found = store[layer][slot.row, :, : len(slot.tokens)].transpose(0, 1)
            if slot.tokens and not torch.equal(found, vectors(slot.tokens, layer, KV, salt)):
                return False
    return True


def make_block(ids: list[int]) -> Block:
    return Block(
        tuple(ids),
        [vectors(ids, layer, KV, 1).transpose(0, 1) for layer in range(LAYERS)],
        [vectors(ids, layer, KV, 2).transpose(0, 1) for layer in range(LAYERS)],
    )


def expected(sequence: list[int], new: int, layer: int) -> torch.Tensor:
    """Plain causal attention of a sequence's last tokens: (new, HEADS, D)."""
    q = vectors(sequence, layer, HEADS, 3).double()[-new:]
    k, v = (vectors(sequence, layer, KV, s).double().repeat_interleave(HEADS // KV, 1) for s in (1, 2))
    scores = 0.5 * torch.einsum("nhd,mhd->hnm", q, k)
    future = torch.ones(new, len(sequence), dtype=torch.bool).triu(len(sequence) - new + 1)
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


# ---- slots ---------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_contents_survive_taking_releasing_compacting_and_growing(seed):
    source = random.Random(seed)
    cache = make_cache(8, at_256=8)
    busy: list[Slot] = []
    for _ in range(40):
        action = source.choice(["take", "take", "fill", "fill", "release", "reuse", "compact", "grow"])
        if action == "take" and len(busy) < len(cache.slots):
            busy.append(cache.take(None))
            assert busy[-1].tokens == []
        elif action == "fill" and busy:
            slot = source.choice(busy)
            room = cache.capacity - len(slot.tokens)
            fill(cache, slot, source.choices(range(50), k=source.randint(0, min(room, 9))))
        elif action == "release" and busy:
            cache.release(busy.pop(source.randrange(len(busy))), forget=source.random() < 0.3)
        elif action == "reuse" and (idle := cache.idle_by_sequence()):
            slot = source.choice(list(idle.values()))
            busy.append(cache.take(slot.block, reuse=slot))
        elif action == "compact":
            cache.compact()
            assert sorted(s.row for s in busy) == list(range(len(busy)))
        elif action == "grow" and len(busy) <= cache.slots_at(2 * cache.capacity) and cache.capacity < 1024:
            cache.resize(2 * cache.capacity)
        assert all(s in cache.slots and s.busy for s in busy)
        assert [s.row for s in cache.slots] == list(range(len(cache.slots)))
        assert all(holds(cache, slot) for slot in cache.slots)


def test_room_is_divided_among_fewer_slots_as_sequences_grow():
    cache = make_cache(4)
    assert (cache.capacity, len(cache.slots), cache.max_tokens) == (256, 4, 1024)
    assert [cache.slots_at(n) for n in (256, 512, 700, 1024, 5000)] == [4, 2, 1, 1, 1]
    cache.resize(512)
    assert (len(cache.slots), cache.keys[0].shape) == (2, (2, KV, 512, D))


def test_growing_keeps_running_slots_and_then_the_latest_idle_ones():
    cache = make_cache(4)
    slots = [cache.take(None) for _ in range(4)]
    for number, slot in enumerate(slots):
        fill(cache, slot, [number] * 5)
    for slot in (slots[0], slots[1], slots[3]):
        cache.release(slot, forget=False)
    cache.resize(512)
    assert [s.tokens[0] for s in cache.slots] == [2, 3]
    assert all(holds(cache, slot) for slot in cache.slots)
    with pytest.raises(AssertionError, match="running"):
        cache.take(None, reuse=cache.slots[1])
        cache.resize(1024)


def test_a_new_sequence_takes_an_empty_slot_and_else_the_one_unused_for_longest():
    cache = make_cache(2, at_256=2)
    first, second = cache.take(None), cache.take(None)
    fill(cache, first, [1])
    fill(cache, second, [2])
    cache.release(first, forget=False)
    cache.release(second, forget=True)
    assert cache.take(None) is second
    fill(cache, second, [3])
    cache.release(second, forget=False)
    assert cache.take(None) is first


def test_an_erased_slot_holds_no_trace():
    cache = make_cache()
    slot, neighbour = cache.take(None), cache.take(None)
    fill(cache, slot, [1, 2, 3])
    fill(cache, neighbour, [4])
    cache.keys[0][slot.row] = float("nan")
    cache.erase(slot)
    assert not any(t[slot.row].any() for t in (*cache.keys, *cache.values))
    assert holds(cache, neighbour)


# ---- blocks --------------------------------------------------------------------------------------


def test_the_longest_block_that_leaves_a_token_is_found():
    cache = make_cache()
    for length in (2, 4, 6):
        cache.add_block(make_block(list(range(length))))
    assert [
        len(b.tokens) if (b := cache.find_block(tuple(range(n)))) else 0 for n in (1, 2, 3, 5, 6, 7, 9)
    ] == [0, 0, 2, 4, 4, 6, 6]
    assert cache.find_block((9, 1, 2)) is None


def test_blocks_in_use_stay_and_old_ones_make_room():
    cache = make_cache(4, at_256=4)  # a quarter of the budget: 256 tokens of blocks
    used, old, new = (make_block([i] * 100) for i in (1, 2, 3))
    cache.add_block(used)
    slot = cache.take(used)
    cache.add_block(old)
    cache.add_block(new)
    assert cache.blocks == [used, new]
    cache.release(slot, forget=False)
    cache.add_block(make_block([4] * 100))
    assert used in cache.blocks, "an idle sequence still needs its block"
    cache.release(slot, forget=True)
    cache.add_block(make_block([5] * 100))
    assert used not in cache.blocks


def test_forgetting_everything_needs_rest():
    cache = make_cache()
    cache.add_block(make_block([1, 2]))
    slot = cache.take(cache.blocks[0])
    fill(cache, slot, [3])
    with pytest.raises(AssertionError, match="between requests"):
        cache.clear()
    cache.release(slot, forget=False)
    cache.clear()
    assert cache.blocks == [] and cache.idle_by_sequence() == {}
    assert slot.length == 0


# ---- attention -----------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_batch_of_decoding_and_prefilling_rows_attends_as_each_alone(seed):
    """With and without blocks, some slots absent from the batch, stale content in unused columns."""
    source = random.Random(seed)
    cache = make_cache(8, at_256=8)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(3.0)
    blocks = [
        make_block(source.choices(range(50), k=source.randint(1, 20))) for _ in range(source.randint(0, 3))
    ]
    slots = [cache.take(source.choice([None, *blocks])) for _ in range(source.randint(1, 8))]
    if blocks and source.random() < 0.3:
        for slot in slots:
            slot.block = blocks[0]
    for slot in slots:
        fill(cache, slot, source.choices(range(50), k=source.randint(0, 12)))
    present = source.sample(slots, source.randint(1, len(slots)))
    rows, ids = [], []
    for slot in present:
        new = source.choices(range(50), k=source.choice([1, 1, 1, 2, 5, 30]))
        rows.append((slot, new))
    rows.sort(key=lambda entry: (len(entry[1]), entry[0].row))
    for slot, new in rows:
        slot.tokens += new
        ids += new
    plan = BatchPlan(cache, [(slot, len(new)) for slot, new in rows])
    assert plan.positions_N.tolist() == [slot.length - len(n) + i for slot, n in rows for i in range(len(n))]
    for layer in range(LAYERS):
        q, k, v = (vectors(ids, layer, heads, salt) for heads, salt in ((HEADS, 3), (KV, 1), (KV, 2)))
        before = [x.clone() for x in (q, k, v)]
        output = plan.attend(layer, q, k, v, 0.5)
        assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))
        wanted = [expected(list(slot.sequence()), len(new), layer) for slot, new in rows]
        assert torch.allclose(output.double(), torch.cat(wanted), atol=1e-5)
    assert all(holds(cache, slot) for slot in slots)


@pytest.mark.parametrize("parts", [[12], [1] * 12, [5, 7], [11, 1]])
def test_a_block_may_be_computed_in_parts(parts):
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    block, done, outputs = Block(tuple(ids)), 0, []
    for count in parts:
        plan, new = BlockPlan(block, done), ids[done : done + count]
        outputs.append(
            [
                plan.attend(
                    layer,
                    vectors(new, layer, HEADS, 3),
                    vectors(new, layer, KV, 1),
                    vectors(new, layer, KV, 2),
                    0.5,
                )
                for layer in range(LAYERS)
            ]
        )
        done += count
    for layer in range(LAYERS):
        assert torch.equal(block.keys[layer], vectors(ids, layer, KV, 1).transpose(0, 1))
        output = torch.cat([part[layer] for part in outputs])
        assert torch.allclose(output.double(), expected(ids, len(ids), layer), atol=1e-5)


def test_a_block_extends_another_without_changing_it():
    first = make_block([1, 2, 3])
    longer = Block((1, 2, 3, 4, 5), list(first.keys), list(first.values))
    for layer in range(LAYERS):
        new = [vectors([4, 5], layer, heads, salt) for heads, salt in ((HEADS, 3), (KV, 1), (KV, 2))]
        output = BlockPlan(longer, 3).attend(layer, *new, 0.5)
        assert torch.allclose(output.double(), expected([1, 2, 3, 4, 5], 2, layer), atol=1e-5)
        assert first.keys[layer].shape[1] == 3 and longer.keys[layer].shape[1] == 5


def test_clearing_gives_the_slots_back_that_a_long_sequence_took() -> None:
    cache = KVCache(1, 1, 4, torch.float32, slots=8, budget_bytes=8 * 256 * 32)
    cache.resize(1024)
    assert len(cache.slots) == 2
    cache.clear()
    assert len(cache.slots) == 8
