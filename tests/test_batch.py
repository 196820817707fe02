"""Trajectories become rows, rows become packed arrays, and nothing is lost or counted twice on the way."""

import math
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artnb.batch import loss_denominator, minibatches, pack, to_samples
from artnb.config import TrainConfig
from artnb.packing import MIN_SHARED
from artnb.types import History, Sample, Trajectory, TrajectoryGroup, Turn


def a_turn(prompt, completion, *, logprob=-0.5, credit=None, seconds=0.0, finish_reason="stop", **sampling):
    return Turn(
        tuple(prompt),
        tuple(completion),
        (logprob,) * len(completion),
        0,
        finish_reason,
        {"role": "assistant", "content": ""},
        sampling={"temperature": 1.0, **sampling},
        timing={"seconds": seconds},
        credit=credit,
    )


def a_trajectory(*turns, reward=1.0, **fields):
    return Trajectory(list(turns), reward=reward, **fields)


def samples_of(trajectory, config=None, **options):
    """Rows of one trajectory, whose advantage is 0.5; its partner in the group is worth nothing."""
    partner = a_trajectory(a_turn([1], [2]), reward=trajectory.reward - 1.0)
    rows = to_samples([TrajectoryGroup([trajectory, partner])], config or TrainConfig(), **options)
    return [s for s in rows.samples if s.trajectory_id == trajectory.id], rows


# Rows


def test_a_turn_that_extends_the_tokens_so_far_continues_the_row():
    first = a_turn([1, 2, 3], [4, 5], logprob=-0.1)
    second = a_turn([1, 2, 3, 4, 5, 6, 7], [8, 9], logprob=-0.2)
    (row,), rows = samples_of(a_trajectory(first, second))
    assert row.ids_T == (1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert row.is_sampled_T == (False,) * 3 + (True,) * 2 + (False,) * 2 + (True,) * 2
    assert row.logprobs_T == (0, 0, 0, -0.1, -0.1, 0, 0, -0.2, -0.2)
    assert row.advantages_T == (0, 0, 0, 0.5, 0.5, 0, 0, 0.5, 0.5)
    assert row.weights_T == (0, 0, 0, 1, 1, 0, 0, 1, 1)
    assert (rows.notes["trajectories"], rows.notes["trajectories_split"], rows.dropped) == (2, 0, {})


def test_a_turn_on_another_context_opens_a_row_without_repeating_a_loss():
    first, second = a_turn([1, 2], [3]), a_turn([1, 2, 9], [4])
    split, rows = samples_of(a_trajectory(first, second))
    assert [(r.ids_T, r.is_sampled_T) for r in split] == [
        ((1, 2, 3), (False, False, True)),
        ((1, 2, 9, 4), (False, False, False, True)),
    ]
    assert rows.notes["trajectories_split"] == 1


def test_a_turn_extends_the_longest_row_that_fits():
    turns = [a_turn([1, 2, 3], [4]), a_turn([1], [2]), a_turn([1, 2, 3, 4, 5], [6]), a_turn([1, 2, 9], [7])]
    split, _ = samples_of(a_trajectory(*turns))
    assert [r.ids_T for r in split] == [(1, 2, 3, 4, 5, 6), (1, 2, 9, 7)]


def test_a_turn_kept_in_two_histories_carries_its_loss_once():
    shared = a_turn([1, 2], [3, 4])
    trajectory = a_trajectory(shared, a_turn([1, 2, 3, 4, 5], [6]))
    trajectory.additional_histories.append(History([shared, a_turn([1, 2, 3, 4, 7], [8])]))
    split, _ = samples_of(trajectory)
    assert [(r.ids_T, r.sampled_tokens) for r in split] == [
        ((1, 2, 3, 4, 5, 6), 3),
        ((1, 2, 3, 4, 7, 8), 1),
    ]


def test_two_samples_of_one_prompt_both_count():
    split, _ = samples_of(a_trajectory(a_turn([1, 2], [3], seconds=0.1), a_turn([1, 2], [3], seconds=0.2)))
    assert [r.ids_T for r in split] == [(1, 2, 3), (1, 2, 3)]


def test_a_row_has_one_temperature():
    split, _ = samples_of(a_trajectory(a_turn([1], [2]), a_turn([1, 2, 3], [4], temperature=0.7)))
    assert [(r.temperature, r.is_sampled_T) for r in split] == [
        (1.0, (False, True)),
        (0.7, (False, False, False, True)),
    ]


def test_a_greedy_turn_is_context_and_counted():
    (row,), rows = samples_of(a_trajectory(a_turn([1], [2], temperature=0.0), a_turn([1, 2, 3], [4])))
    assert row.ids_T == (1, 2, 3, 4) and row.is_sampled_T == (False, False, False, True)
    assert rows.dropped == {"turn sampled greedily (temperature 0)": 1}


def test_turns_that_cannot_be_trained_are_counted():
    trajectory = a_trajectory(a_turn([], [1]), a_turn([1], [2], logprob=-math.inf), a_turn([1], []))
    found, rows = samples_of(trajectory)
    assert found == []
    assert rows.dropped == {
        "turn without a prompt token": 1,
        "turn with a logprob that is not finite": 1,
        "trajectory without a turn to train on": 1,
    }


def test_truncated_support_and_cut_turns_are_noted():
    turns = [
        a_turn([1], [2], top_p=0.9),
        a_turn([1, 2, 3], [4], finish_reason="length"),
        a_turn([5], [6], top_k=0, structured=None),
        a_turn([7], [8], structured={"choice": ["left", "right"]}),
    ]
    _, rows = samples_of(a_trajectory(*turns))
    assert rows.notes["turns"] == 5
    assert rows.notes["turns_truncated_support"] == 2 and rows.notes["turns_cut_by_length"] == 1


def test_credit_blends_into_the_advantage_of_its_own_turn():
    turns = [
        a_turn([1], [2], credit=1.0),
        a_turn([1, 2, 3], [4, 5], credit=0.0),
        a_turn([1, 2, 3, 4, 5], [6]),
    ]
    (row,), _ = samples_of(a_trajectory(*turns), TrainConfig(credit_weight=0.5))
    # baseline 0.5; 0.5 * 0.5 + 0.5 * (1 - 0.5), 0.5 * 0.5 + 0.5 * (0 - 0.5), and no credit
    assert row.advantages_T == (0, 0.5, 0, 0.0, 0.0, 0.5)


def test_only_usable_groups_give_rows():
    equal = TrajectoryGroup([a_trajectory(a_turn([1], [2])) for _ in range(2)])
    rows = to_samples([equal, equal], TrainConfig())
    assert rows.samples == [] and rows.dropped == {"equal rewards": 2}
    assert set(rows.notes.values()) == {0} and loss_denominator([], TrainConfig()) == 0.0


# Weights


def a_step(*lengths):
    """A group of trajectories of so many sampled tokens, each split into rows of at most three."""
    trajectories = []
    for index, length in enumerate(lengths):
        pieces = [range(3)] * (length // 3) + ([range(length % 3)] if length % 3 else [])
        turns = [a_turn([index, place], list(piece)) for place, piece in enumerate(pieces)]
        trajectories.append(a_trajectory(*turns, reward=float(index), id=f"t{index}"))
    return [TrajectoryGroup(trajectories)]


def test_every_trajectory_weighs_the_same_when_asked():
    config = TrainConfig(aggregate="trajectory")
    samples = to_samples(a_step(1, 5), config).samples  # 6 tokens, 2 trajectories: 3 each
    assert [sorted(set(s.weights_T) - {0.0}) for s in samples] == [[3.0], [0.6], [0.6]]
    assert loss_denominator(samples, config) == pytest.approx(6.0)


def test_the_denominator_counts_tokens_or_trajectories():
    samples = to_samples(a_step(1, 5), TrainConfig()).samples
    assert loss_denominator(samples, TrainConfig()) == 6.0
    assert loss_denominator(samples, TrainConfig(aggregate="constant", constant_tokens=10)) == 20.0


def test_max_samples_draws_the_same_rows_for_the_same_step_and_counts_the_rest():
    config = TrainConfig(max_samples=4)
    drawn = [to_samples(a_step(6, 6, 6, 6), config, step=step) for step in (3, 3, 4)]
    assert drawn[0][:3] == drawn[1][:3] and drawn[0].samples != drawn[2].samples
    assert len(drawn[0].samples) == 4 and drawn[0].dropped == {"not drawn (max_samples)": 4}


def test_rows_with_large_advantages_are_drawn_sooner_and_weigh_less():
    trajectories = [a_trajectory(a_turn([n], [n]), reward=float(n >= 14), id=f"t{n}") for n in range(16)]
    config = TrainConfig(max_samples=4)
    counts, totals = Counter(), Counter()
    for step in range(400):
        for sample in to_samples([TrajectoryGroup(trajectories)], config, step=step).samples:
            won = sample.advantages_T[-1] > 0
            counts[won] += 1
            totals[won] += sum(sample.weights_T)
    assert counts[True] / 2 > 2 * counts[False] / 14
    assert totals[True] / 2 == pytest.approx(totals[False] / 14, rel=0.15)


def test_minibatches_are_even_and_keep_trajectories_whole():
    samples = to_samples(a_step(9, 3, 4, 2, 5, 1), TrainConfig()).samples
    parts = minibatches(samples, 3)
    assert sorted(sum(s.sampled_tokens for s in part) for part in parts) == [7, 8, 9]
    owners = [{s.trajectory_id for s in part} for part in parts]
    assert sum(map(len, owners)) == 6 == len(set.union(*owners))
    assert minibatches(samples[:1], 4) == [samples[:1]] and minibatches(samples, 1) == [samples]


# Packing


def a_sample(ids, sampled, owner="t"):
    mask = tuple(place in sampled for place in range(len(ids)))
    return Sample(
        ids_T=tuple(ids),
        is_sampled_T=mask,
        logprobs_T=tuple(-float(place) if m else 0.0 for place, m in enumerate(mask)),
        advantages_T=tuple(0.25 * place if m else 0.0 for place, m in enumerate(mask)),
        weights_T=tuple(0.5 if m else 0.0 for m in mask),
        trajectory_id=owner,
        group=0,
        temperature=0.5,
    )


def paths(batch):
    """For each segment the flat indices from its root to its end."""
    found = []
    for segment in batch.segments:
        before = found[segment.parent] if segment.parent >= 0 else []
        found.append(before + list(range(segment.start, segment.start + segment.length)))
    return found


def assert_faithful(samples, batches, max_tokens):
    trained = []
    for batch in batches:
        assert batch.tokens <= max_tokens or len(batch.rows_R) == 1
        assert batch.tokens <= batch.row_tokens <= batch.padded_tokens
        assert [s.start for s in batch.segments] == list(
            np.cumsum([0, *(s.length for s in batch.segments)])[:-1]
        )
        assert all(s.parent < index and s.length > 0 for index, s in enumerate(batch.segments))
        parents = [s.parent for s in batch.segments]
        assert sum(a != b for a, b in pairwise(parents)) == len(set(parents)) - 1, "siblings are neighbours"
        context = {
            path[-1 - back]: path[: len(path) - back] for path in paths(batch) for back in range(len(path))
        }
        for s, source in enumerate(batch.source_S):
            sample = samples[batch.rows_R[batch.row_S[s]]]
            place = int(batch.positions_N[source]) + 1
            assert [batch.ids_N[i] for i in context[source]] == list(sample.ids_T[:place])
            assert [batch.positions_N[i] for i in context[source]] == list(range(place))
            assert sample.is_sampled_T[place] and batch.target_S[s] == sample.ids_T[place]
            assert batch.logprobs_S[s] == np.float32(sample.logprobs_T[place])
            assert batch.advantages_S[s] == np.float32(sample.advantages_T[place])
            assert batch.weights_S[s] == np.float32(sample.weights_T[place])
            assert batch.temperature_S[s] == np.float32(sample.temperature)
            trained.append((int(batch.rows_R[batch.row_S[s]]), place))
    wanted = [(row, place) for row, s in enumerate(samples) for place, m in enumerate(s.is_sampled_T) if m]
    assert sorted(trained) == wanted, "each sampled token is trained once"
    assert sorted(row for batch in batches for row in batch.rows_R) == list(range(len(samples)))


@st.composite
def trees(draw):
    """Rows that branch off each other at random places, over an alphabet so small that they collide."""
    random_ids = draw(st.randoms(use_true_random=False))
    rows, samples = [], []
    for index in range(draw(st.integers(1, 12))):
        kept = []
        if rows:
            kept = rows[draw(st.integers(0, len(rows) - 1))]
            kept = kept[: draw(st.integers(0, len(kept)))]
        ids = kept + [random_ids.randrange(3) for _ in range(draw(st.integers(2, 40)))]
        rows.append(ids)
        sampled = draw(st.sets(st.integers(1, len(ids) - 1), min_size=1))
        samples.append(a_sample(ids, sampled, f"t{index}"))
    return samples


@settings(max_examples=150)
@given(samples=trees(), max_tokens=st.integers(1, 200), share=st.booleans())
def test_packing_keeps_every_row_and_every_sampled_token(samples, max_tokens, share):
    batches = pack(samples, max_tokens=max_tokens, share_prefixes=share)
    assert_faithful(samples, batches, max_tokens)
    if not share:
        assert all(b.tokens == b.row_tokens and len(b.segments) == len(b.rows_R) for b in batches)


def test_a_shared_prompt_is_stored_once():
    prompt = list(range(100, 150))
    samples = [a_sample([*prompt, answer, 7, 8], {50, 51, 52}) for answer in range(8)]
    (batch,) = pack(samples, max_tokens=10_000)
    assert batch.tokens == 50 + 8 * 2 and batch.row_tokens == batch.padded_tokens == 8 * 52
    assert batch.segments[0] == (0, 50, -1)
    assert batch.segments[1:] == tuple((50 + 2 * i, 2, 0) for i in range(8))
    assert list(batch.source_S[:3]) == [49, 50, 51], "the prompt's last token predicts the first answer token"


def test_a_prompt_shared_by_all_groups_is_the_root_of_their_own_prompts():
    system, first, second = [0] * 40, [1] * 30, [2] * 30
    samples = [a_sample([*system, *group, row, 9], {70, 71}) for group in (first, second) for row in (3, 4)]
    (batch,) = pack(samples, max_tokens=1000)
    assert [(s.length, s.parent) for s in batch.segments] == [
        (40, -1),
        (30, 0),
        (30, 0),
        (1, 1),
        (1, 1),
        (1, 2),
        (1, 2),
    ]


def test_equal_rows_share_everything_and_keep_their_own_losses():
    samples = [a_sample(range(30), {20, 29}), a_sample(range(30), {20, 29})]
    (batch,) = pack(samples, max_tokens=100)
    assert batch.segments == ((0, 29, -1),)
    assert list(batch.source_S) == [19, 28, 19, 28] and list(batch.row_S) == [0, 0, 1, 1]


def test_a_row_may_end_inside_the_prefix_of_another():
    samples = [a_sample(range(60), {59}), a_sample([*range(30), 5], {30})]
    (batch,) = pack(samples, max_tokens=100)
    assert batch.segments == ((0, 30, -1), (30, 29, 0))
    assert_faithful(samples, [batch], 100)


def test_a_prefix_too_short_to_be_worth_a_segment_is_not_shared():
    short = [a_sample([*range(MIN_SHARED - 1), last, 9], {MIN_SHARED}) for last in (100, 101)]
    assert len(pack(short, max_tokens=1000)[0].segments) == 2
    enough = [a_sample([*range(MIN_SHARED), last, 9], {MIN_SHARED + 1}) for last in (100, 101)]
    assert len(pack(enough, max_tokens=1000)[0].segments) == 3


def test_context_after_the_last_sampled_token_is_not_computed():
    (batch,) = pack([a_sample(range(20), {5})], max_tokens=100)
    assert batch.tokens == 5 and list(batch.source_S) == [4]


def test_batches_are_cut_between_prompts_rather_than_inside_one():
    samples = [a_sample([group] * 60 + [row, 9], {60, 61}) for group in range(4) for row in range(5)]
    random.Random(0).shuffle(samples)
    batches = pack(samples, max_tokens=256)  # a group takes 60 + 5 tokens; three and a part would fit
    assert sum(b.tokens for b in batches) == 4 * 65 and len(batches) == 2


def test_a_row_longer_than_a_batch_is_alone():
    samples = [a_sample([1, *range(50)], {50}), a_sample([2, 3], {1}), a_sample([0, 3], {1})]
    batches = pack(samples, max_tokens=10)
    assert sorted(b.tokens for b in batches) == [1, 1, 50]
    assert_faithful(samples, batches, 10)


def test_rows_without_context_or_loss_are_refused():
    assert pack([], max_tokens=10) == []
    for bad in (a_sample([1, 2], {0}), a_sample([1, 2], set())):
        with pytest.raises(ValueError, match="must start with context"):
            pack([bad], max_tokens=10)
