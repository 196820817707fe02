"""Rewards become advantages: numbers worked out by hand, and every reason for leaving something out."""

import doctest
import math

import pytest

from artnb import advantage
from artnb.advantage import advantages, center, credit_baseline, grpo, reason_to_drop, rloo
from artnb.config import TrainConfig
from artnb.errors import ConfigurationError
from artnb.types import Failure, Trajectory, TrajectoryGroup, Turn


def a_turn(credit=None, completion=(7,)):
    return Turn(
        (1, 2), completion, (-0.5,) * len(completion), 0, "stop", {"role": "assistant"}, credit=credit
    )


def a_group(*rewards, credits=None):
    credits = credits or [None] * len(rewards)
    return TrajectoryGroup(
        [
            Trajectory([a_turn(credit)], reward=r, id=f"t{i}")
            for i, (r, credit) in enumerate(zip(rewards, credits, strict=True))
        ]
    )


def test_the_examples_in_the_docstrings_are_true():
    assert doctest.testmod(advantage).failed == 0


def test_center_subtracts_the_mean():
    assert center([3.0, 1.0, 1.0, -1.0]) == [2.0, 0.0, 0.0, -2.0]


def test_grpo_divides_by_the_population_deviation():
    # mean 2, squared deviations 4 + 0 + 4 over 3
    assert grpo([0.0, 2.0, 4.0], eps=0.0) == pytest.approx([-2 / math.sqrt(8 / 3), 0.0, 2 / math.sqrt(8 / 3)])


def test_rloo_leaves_the_member_itself_out():
    assert rloo([3.0, 1.0]) == [2.0, -2.0]
    assert rloo([4.0, 1.0, 1.0]) == [3.0, -1.5, -1.5]


@pytest.mark.parametrize("name", ["mean", "grpo", "rloo"])
def test_advantages_of_a_group_add_up_to_zero(name):
    (found,), dropped = advantages([a_group(0.1, 0.7, 0.4, 1.0)], TrainConfig(advantage=name))
    assert sum(found.values()) == pytest.approx(0.0, abs=1e-12)
    assert list(found) == ["t0", "t1", "t2", "t3"] and dropped == {}


def test_what_has_no_finite_reward_does_not_enter_the_mean_and_is_counted():
    group = a_group(1.0, 0.0, None, math.nan, math.inf)
    group.trajectories.append(Trajectory([a_turn()], reward=9.0, error=Failure("KeyError", "x")))
    (found,), dropped = advantages([group], TrainConfig())
    assert found == {"t0": 0.5, "t1": -0.5}
    assert dropped == {"not scored": 1, "reward is not finite": 2, "failed": 1}


def test_a_group_that_cannot_teach_is_dropped_with_its_reason():
    silent = a_group(1.0, 0.0)
    for trajectory in silent:
        trajectory.messages_and_choices = [{"role": "assistant", "content": "by hand"}]
    groups = [a_group(1.0), a_group(0.3, 0.3), a_group(0.0, 0.0), silent, a_group(1.0, 0.0)]
    found, dropped = advantages(groups, TrainConfig())
    assert found == [{}, {}, {}, {}, {"t0": 0.5, "t1": -0.5}]
    assert dropped == {"fewer than two scored trajectories": 1, "equal rewards": 2, "no sampled token": 1}


def test_rewards_that_differ_only_by_rounding_are_equal():
    assert reason_to_drop(a_group(0.1 + 0.2, 0.3)) == "equal rewards"
    assert reason_to_drop(a_group(0.3, 0.3001)) is None


def test_equal_rewards_with_differing_credits_teach_only_when_credit_counts():
    group = a_group(1.0, 1.0, credits=[0.0, 1.0])
    assert reason_to_drop(group) == "equal rewards"
    assert reason_to_drop(group, credit_weight=0.5) is None
    assert reason_to_drop(a_group(1.0, 1.0, credits=[1.0, 1.0]), credit_weight=0.5) == "equal rewards"


def test_the_credit_baseline_is_the_mean_over_turns_of_scored_trajectories():
    group = a_group(1.0, 0.0, None, credits=[0.2, 0.4, 100.0])
    group[0].messages_and_choices += [a_turn(), a_turn(credit=0.6)]
    assert credit_baseline(group) == pytest.approx(0.4)
    assert credit_baseline(a_group(1.0, 0.0)) == 0.0


def test_a_credit_that_is_not_finite_is_counted_and_ignored():
    _, dropped = advantages([a_group(1.0, 0.0, credits=[math.nan, 0.5])], TrainConfig(credit_weight=0.5))
    assert dropped == {"credit is not finite": 1}


def test_a_copied_trajectory_must_have_its_own_id():
    group = a_group(1.0, 0.0)
    group[1].id = group[0].id
    with pytest.raises(ConfigurationError, match="same id"):
        advantages([group], TrainConfig())
