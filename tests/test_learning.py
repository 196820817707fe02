"""Learning runs on the bundled model: minutes each, so `make test-slow` runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import artnb as nb
from artnb.judging.loopback import Asked, LoopbackJudge, Says, answer

pytestmark = pytest.mark.slow


async def test_it_learns_to_use_a_tool_on_items_it_never_saw(tmp_path: Path) -> None:
    environment = nb.load_environment("tool_lookup")
    heldout = environment.scenarios("test", n=64)
    with nb.Model(run="tool", root=tmp_path) as model:
        before = await nb.evaluate(environment.rollout, heldout, model=model)
        for step in model.run.steps(14):
            scenarios = environment.scenarios("train", n=8, seed=step)
            groups = await nb.gather(environment.rollout, scenarios, model=model)
            await nb.train_step(model, groups, learning_rate=1e-3)
        after = await nb.evaluate(environment.rollout, heldout, model=model)
    assert before.mean_reward is not None and before.mean_reward <= 0.3
    assert after.mean_reward is not None and after.mean_reward >= 0.9


def _said(messages: list[dict[str, Any]]) -> str:
    """What makes an episode the same one to the judge and to the shop: everything that was said."""
    return json.dumps([message.get("content", "") for message in messages])


async def test_an_oracle_judge_teaches_as_much_as_the_true_reward(tmp_path: Path) -> None:
    environment, true = nb.load_environment("tool_lookup"), {}
    heldout = environment.scenarios("test", n=64)

    async def unrewarded(model: Any, scenario: nb.Scenario) -> nb.Trajectory:
        trajectory = await environment.rollout(model, scenario)
        true[_said(trajectory.messages())], trajectory.reward = trajectory.reward, None
        return trajectory

    def oracle(asked: Asked) -> Says:
        return Says(answer({n: true[_said(asked.context + e)] for n, e in asked.attempts.items()}))

    with LoopbackJudge(oracle) as server, nb.Model(run="judged", root=tmp_path) as model:
        for step in model.run.steps(14):
            scenarios = environment.scenarios("train", n=8, seed=step)
            groups = await nb.gather(unrewarded, scenarios, model=model)
            judged = await nb.judge(groups, model=model, judge="oracle", **server.access)
            assert not judged.judging.unscored
            await nb.train_step(model, judged, learning_rate=1e-3)
        after = await nb.evaluate(environment.rollout, heldout, model=model)
    assert after.mean_reward is not None and after.mean_reward >= 0.9


def test_it_learns_to_use_the_tool_on_unsloth_and_vllm_too(tmp_path: Path) -> None:
    script = Path(__file__).with_name("stack_learning.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["stack"] == ["unsloth", "vllm"] and report["trained"] > 0
    (before, asked), (after, again) = report["before"], report["after"]
    assert asked == again == 64
    assert before is not None and before <= 0.3
    assert after is not None and after >= 0.9


async def test_it_learns_to_play_2048_better_than_random_legal_moves(tmp_path: Path) -> None:
    environment = nb.load_environment(
        "game_2048",
        preset="tile16",
        move_style="word",
        max_tokens=1,
        examples=8,
        hint="merges",
        credit="relative",
    )
    heldout = environment.scenarios("test", n=100)
    legal = nb.evaluate_baseline(environment, "random_legal", heldout)
    with nb.Model(run="2048", root=tmp_path) as model:
        for step in model.run.steps(12):
            scenarios = environment.scenarios("train", n=4, seed=step)
            groups = await nb.gather(environment.rollout, scenarios, model=model)
            await nb.train_step(
                model,
                groups,
                learning_rate=nb.schedule(4e-4, step, 12, warmup=1, floor=0.4),
                advantage="grpo",
                credit_weight=0.9,
                entropy_coef=0.005,
                max_samples=160,
            )
        after = await nb.evaluate(environment.rollout, heldout, model=model)
    assert after.mean_reward is not None and after.mean_reward >= 0.6
    assert after.metrics["win"] > legal.metrics["win"]
