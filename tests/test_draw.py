"""Rows drawn by their influence: as many as asked, unbiased, and better than a uniform draw."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artnb.draw import UNIFORM_SHARE, draw, inclusion

sizes_and_count = st.lists(st.floats(0, 1e6), min_size=1, max_size=60).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.integers(1, len(sizes)))
)


@given(sizes_and_count)
def test_chances_add_up_to_the_count_and_none_is_above_one_or_zero(drawn):
    sizes, count = drawn
    chances = inclusion(sizes, count)
    assert sum(chances) == pytest.approx(count)
    assert all(0 < chance <= 1 + 1e-9 for chance in chances)


@given(sizes_and_count, st.integers(0, 1000))
def test_exactly_the_count_is_drawn_each_row_once_in_order(drawn, seed):
    sizes, count = drawn
    indices = [index for index, _ in draw(sizes, count, random.Random(seed))]
    assert indices == sorted(set(indices)) and len(indices) == count


def test_no_row_weighs_more_than_the_uniform_share_allows():
    drawn = draw([0.0] * 50 + [1.0] * 50, 40, random.Random(1))
    assert max(weight for _, weight in drawn) == pytest.approx(1 / UNIFORM_SHARE)


def test_the_weighted_draw_estimates_the_sum_without_bias_and_closer_than_a_uniform_one():
    values = [0.0] * 30 + [0.5, -1.0, 2.0, 0.25] * 5
    true_sum = sum(values) * 10 / len(values)
    weighted, uniform = [], []
    for seed in range(4000):
        generator = random.Random(seed)
        weighted.append(sum(w * values[i] for i, w in draw([abs(v) for v in values], 10, generator)))
        uniform.append(sum(generator.sample(values, 10)))
    assert statistics.fmean(weighted) == pytest.approx(true_sum, abs=0.1)
    assert statistics.stdev(weighted) < 0.7 * statistics.stdev(uniform)


def test_rows_of_one_size_are_drawn_evenly_and_rows_without_any_too():
    for sizes in ([2.0] * 12, [0.0] * 12):
        drawn = draw(sizes, 4, random.Random(0))
        assert [b - a for (a, _), (b, _) in itertools.pairwise(drawn)] == [3, 3, 3]
        assert [weight for _, weight in drawn] == pytest.approx([1.0] * 4)
