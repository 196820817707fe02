"""Learning rates by step: warm-up, the fall, the last step and everything out of range."""

from __future__ import annotations

import itertools

import pytest

import artnb as nb


def rates(steps: int, **options) -> list[float]:
    return [nb.schedule(1e-3, step, steps, **options) for step in range(steps)]


def test_warm_up_rises_to_the_peak_without_reaching_it_early():
    assert rates(10, warmup=3, shape="constant")[:5] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_it_falls_from_the_peak_after_the_warm_up_to_the_floor_at_the_last_step(shape):
    found = rates(12, warmup=2, shape=shape, floor=0.1)
    assert found[2] == pytest.approx(1e-3) and found[-1] == pytest.approx(1e-4)
    assert all(later < earlier for earlier, later in itertools.pairwise(found[2:]))


def test_steps_beyond_the_last_keep_its_rate_and_one_step_has_the_peak():
    assert nb.schedule(1.0, 50, 10, floor=0.3) == pytest.approx(0.3)
    assert rates(1) == [1e-3] and rates(1, warmup=1) == [5e-4]


@pytest.mark.parametrize(
    "wrong",
    [
        {"peak": 0},
        {"step": -1},
        {"steps": 0},
        {"warmup": -1},
        {"floor": 1.5},
        {"shape": "square"},
    ],
)
def test_what_cannot_be_a_schedule_is_refused(wrong):
    given = {"peak": 1e-3, "step": 4, "steps": 5} | wrong
    with pytest.raises(nb.ConfigurationError):
        nb.schedule(**given)
