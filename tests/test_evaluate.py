"""Is an evaluation's mean the mean of what was scored, and its interval as wide as it must be?"""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from scripted import ScriptedModel

from artnb.environments import load_environment
from artnb.errors import ConfigurationError
from artnb.evaluate import (
    compare,
    estimate,
    evaluate,
    evaluate_baseline,
    summarise,
    t_quantile,
    wilson_interval,
)
from artnb.types import Failure, Scenario, Trajectory, TrajectoryGroup

SCENARIOS = [Scenario(f"toy/test/{i}", "test", i) for i in range(12)]


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228), (31, 2.040), (63, 1.998), (200, 1.972)],
)
def test_the_t_quantile_agrees_with_printed_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, abs=5e-4)


def test_the_t_quantile_of_one_tail_agrees_with_printed_tables() -> None:
    assert t_quantile(0.95, 5) == pytest.approx(2.015, abs=5e-4)
    assert t_quantile(0.995, 20) == pytest.approx(2.845, abs=5e-4)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_s_interval_agrees_with_worked_values(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=1e-4)


def test_a_t_interval_is_worked_out_by_hand() -> None:
    found = estimate([[0.2], [0.4], [0.9]])
    margin = 4.3027 * math.sqrt((0.3**2 + 0.1**2 + 0.4**2) / 2) / math.sqrt(3)
    assert found.mean == pytest.approx(0.5)
    assert (found.low, found.high) == pytest.approx((0.5 - margin, 0.5 + margin), abs=1e-4)


def test_attempts_at_one_scenario_count_as_one_observation() -> None:
    clustered = estimate([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    assert (clustered.low, clustered.high) == pytest.approx(
        (2 / 3 - 4.3027 / 3, 2 / 3 + 4.3027 / 3), abs=1e-3
    )
    assert estimate([[0.5], []]).mean == 0.5 and estimate([[0.5], []]).low is None
    assert estimate([[], []]).mean is None


def test_intervals_hold_the_truth_about_as_often_as_they_claim() -> None:
    draw = random.Random(0)
    held = {"wilson": 0, "t": 0}
    for _ in range(400):
        wins = estimate([[float(draw.random() < 0.3)] for _ in range(40)])
        shares = estimate([[draw.uniform(0, 0.9)] for _ in range(12)])
        held["wilson"] += wins.low <= 0.3 <= wins.high
        held["t"] += shares.low <= 0.45 <= shares.high
    assert all(0.91 <= count / 400 <= 0.99 for count in held.values()), held


def test_failed_and_unscored_rollouts_are_counted_apart_and_in_no_mean() -> None:
    group = TrajectoryGroup(
        [
            Trajectory(reward=1.0, metrics={"win": 1.0}),
            Trajectory(reward=0.0, metrics={"win": 0.0}),
            Trajectory(reward=0.9, error=Failure("ValueError", "no")),
            Trajectory(),
            Trajectory(reward=float("nan")),
        ]
    )
    evaluation = summarise("mixed", [group])
    assert (evaluation.n, evaluation.failed, evaluation.unscored) == (2, 1, 2)
    assert evaluation.mean_reward == 0.5 and evaluation.metrics == {"win": 0.5}
    assert evaluation.note == "1 failed and 2 not scored, in no mean"
    assert evaluation.note in repr(evaluation)


def test_an_evaluation_without_scores_says_so_and_is_still_json() -> None:
    evaluation = summarise("nothing", [TrajectoryGroup([Trajectory()])])
    assert evaluation.mean_reward is None and "–" in repr(evaluation)
    assert json.loads(json.dumps(evaluation.to_json(), allow_nan=False))["mean_reward"] is None


async def rewarded_by_seed(model: Any, scenario: Scenario) -> Trajectory:
    response = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": "?"}]
    )
    if scenario.seed == 3:
        raise RuntimeError("broken scenario")
    return Trajectory([response.choices[0]], reward=scenario.seed % 2, metrics={"seed": scenario.seed})


async def test_evaluate_plays_every_scenario_and_reports_the_mean() -> None:
    model = ScriptedModel(lambda _: "hello")
    evaluation = await evaluate(rewarded_by_seed, SCENARIOS, model=model, name="before", progress=False)
    assert (evaluation.name, evaluation.n, evaluation.failed, evaluation.scenarios) == ("before", 11, 1, 12)
    assert evaluation.mean_reward == pytest.approx(5 / 11)
    assert (evaluation.low, evaluation.high) == pytest.approx(wilson_interval(5, 11))
    assert evaluation.policy_version == 0 and evaluation.seconds > 0
    assert len(model.requests) == 12 and model.requests[0]["model"] == "scripted"


async def test_evaluate_plays_each_scenario_as_often_as_asked() -> None:
    model = ScriptedModel(lambda _: "hello")
    options: dict[str, Any] = {"model": model, "attempts": 3, "progress": False}
    evaluation = await evaluate(rewarded_by_seed, SCENARIOS[:2], **options)
    assert (evaluation.n, evaluation.attempts, len(model.requests)) == (6, 3, 6)


@pytest.mark.parametrize(("policy", "version"), [("base", -1), ("step_000012", 12), ("current", 0)])
async def test_evaluate_reaches_another_policy_by_its_name(policy: str, version: int) -> None:
    model = ScriptedModel(lambda _: "hello")
    options: dict[str, Any] = {"model": model, "policy": policy, "progress": False}
    evaluation = await evaluate(rewarded_by_seed, SCENARIOS[:2], **options)
    asked = "scripted" if policy == "current" else f"scripted@{policy}"
    assert {request["model"] for request in model.requests} == {asked}
    assert evaluation.policy_version == version


async def test_evaluate_refuses_a_policy_that_no_checkpoint_is_named_after() -> None:
    with pytest.raises(ConfigurationError, match="step_000012"):
        await evaluate(rewarded_by_seed, SCENARIOS, model=ScriptedModel(lambda _: ""), policy="best")


def test_a_baseline_is_evaluated_without_a_model() -> None:
    environment = load_environment("game_2048")
    evaluation = evaluate_baseline(environment, "greedy", environment.scenarios("test", 50))
    assert evaluation.name == "greedy" and evaluation.n == 50
    wins = evaluation.intervals["win"]
    assert wins.low is not None and wins.high is not None
    assert 0.7 < wins.low < evaluation.metrics["win"] < wins.high < 1.0
    with pytest.raises(ConfigurationError, match="greedy"):
        evaluate_baseline(environment, "gredy", environment.scenarios("test", 1))


def test_a_comparison_puts_policies_side_by_side_and_escapes_their_names() -> None:
    environment = load_environment("tool_lookup")
    scenarios = environment.scenarios("test", 20)
    table = compare([evaluate_baseline(environment, name, scenarios) for name in environment.baselines])
    assert "oracle" in repr(table) and "1.000 [0.839, 1.000]" in repr(table)
    assert table._repr_html_().count("<tr>") == 3 and "correct" in table._repr_html_()
    hostile = summarise("<script>x</script>", [TrajectoryGroup([Trajectory(reward=0.5)])])
    assert "<script>" not in hostile._repr_html_() and "0.500" in hostile._repr_html_()
