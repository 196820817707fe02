"""Code scores trajectories; parts are kept, and what cannot be scored is data."""

import pytest

from artnb.errors import ConfigurationError
from artnb.rewards import Reward, call_reward, score
from artnb.types import Failure, Scenario, Trajectory

SCENARIO = Scenario("s", task={"answer": 3})


def correct(trajectory, scenario):
    return float(scenario.task["answer"] == 3)


async def brief(trajectory):
    return 0.5


async def test_several_functions_are_weighted_and_their_parts_kept():
    trajectory = Trajectory()
    reward = Reward(correct, (brief, -0.2), bonus=(lambda t: 2, 0.25))
    assert await reward(trajectory, SCENARIO) == pytest.approx(1.0 - 0.1 + 0.5)
    assert trajectory.metrics == {"reward/correct": 1.0, "reward/brief": 0.5, "reward/bonus": 2.0}
    assert repr(reward) == "Reward(1 * correct, -0.2 * brief, 0.25 * bonus)"


async def test_functions_take_the_scenario_only_when_they_ask():
    seen = []

    def only(trajectory, weight=2.0):
        seen.append(weight)
        return weight

    def optional(trajectory, scenario=None):
        seen.append(scenario)
        return 0

    def anything(*arguments):
        seen.append(len(arguments))
        return 0

    class Checker:
        async def __call__(self, trajectory, scenario):
            seen.append(scenario.id)
            return 0

    for function in (only, optional, anything, Checker(), Reward(only)):
        await call_reward(function, Trajectory(), SCENARIO)
    assert seen == [2.0, SCENARIO, 2, "s", 2.0]


async def test_a_failing_reward_is_the_trajectorys_error():
    trajectory = Trajectory()
    await score(trajectory, lambda t: 1 / 0)
    assert trajectory.reward is None
    assert trajectory.error.type == "RewardError"
    assert trajectory.error.message == "ZeroDivisionError: division by zero"
    assert "1 / 0" in trajectory.error.traceback


async def test_an_answer_that_is_no_number_is_an_error_not_a_zero():
    trajectory = Trajectory()
    await score(trajectory, lambda t: None)
    assert trajectory.reward is None and "returned NoneType; return a number" in trajectory.error.message


async def test_only_finished_unscored_trajectories_are_scored():
    scored, failed = Trajectory(reward=0.0), Trajectory(error=Failure("ValueError", "no"))
    for trajectory in (scored, failed):
        await score(trajectory, lambda t: 1.0)
    assert scored.reward == 0.0 and failed.reward is None


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Reward(), "needs at least one function"),
        (lambda: Reward(1.0), "got 1.0"),
        (lambda: Reward((correct, "high")), "a pair"),
        (lambda: Reward(correct, correct), "two reward functions are called 'correct'"),
    ],
)
def test_mistakes_are_told_when_the_reward_is_made(build, message):
    with pytest.raises(ConfigurationError, match=message):
        build()
