"""A new task learned from another task's adapter, beside the same task learned from the base."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from steps import open_model

import artnb as nb

Rollout = Callable[[Any, nb.Scenario], Awaitable[nb.Trajectory]]
STEPS = 8


def ids_divisible_by(number: int) -> Rollout:
    """An environment: write token ids that this number divides. Who knows 2 has half of what 4 asks for."""

    async def rollout(model: Any, scenario: nb.Scenario) -> nb.Trajectory:
        messages = [{"role": "user", "content": scenario.id}]
        reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=6)
        trajectory = nb.Trajectory([*messages, reply.choices[0]])
        ids = trajectory.turns[0].completion_ids
        trajectory.reward = sum(i % number == 0 for i in ids) / len(ids)
        return trajectory

    return rollout


def scenarios(split: str) -> list[nb.Scenario]:
    return [nb.Scenario(id=f"{split} {number}", split=split) for number in range(12)]


async def learn(model: nb.Model, rollout: Rollout, steps: int) -> list[nb.Evaluation]:
    """Train on a task; what held-out scenarios earned before and after."""

    async def check() -> nb.Evaluation:
        return await nb.evaluate(rollout, scenarios("test"), model=model, attempts=16, progress=False)

    found = [await check()]
    for _ in model.run.steps(steps):
        groups = await nb.gather(rollout, scenarios("train"), model=model, group_size=8, progress=False)
        await nb.train_step(model, groups, learning_rate=5e-3, entropy_coef=0.02)
    return [*found, await check()]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
async def test_a_related_task_is_learned_sooner_from_the_first_ones_adapter(tiny_model: Path, tmp_path: Path):
    first, second = ids_divisible_by(2), ids_divisible_by(4)
    with open_model(tiny_model, tmp_path, "first") as model:
        learned = await learn(model, first, 5)
    with open_model(tiny_model, tmp_path, "from scratch") as model:
        scratch = await learn(model, second, STEPS)
    with open_model(tiny_model, tmp_path, "continued", init_from="first") as model:
        continued = await learn(model, second, STEPS)
    print(nb.compare([*learned, *scratch, *continued]))
    assert learned[1].low > learned[0].high
    assert continued[0].mean_reward > scratch[0].mean_reward, "it starts ahead"
    assert continued[1].low > scratch[1].high, "and is still ahead after the same steps"
