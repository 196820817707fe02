"""What do tests of models and training steps share? A tiny model in a run, a rollout, and groups by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import artnb as nb

LORA = nb.LoraConfig(rank=4)
SCENARIOS = [nb.Scenario(id=f"say {word}") for word in ("one", "two", "three")]


def open_model(base: Path, root: Path, run: str = "demo", **options: Any) -> nb.Model:
    """The tiny model in fp32: on a CPU its arithmetic repeats bit for bit."""
    return nb.Model(base, run, root=root, **{"lora": LORA, "dtype": "float32"} | options)


def open_fake(root: Path, run: str = "demo", **options: Any) -> nb.Model:
    """A model without a model: for what happens around the arithmetic."""
    return nb.Model(run=run, root=root, **{"backend": nb.FakeBackend()} | options)


async def rollout(model: Any, scenario: nb.Scenario) -> nb.Trajectory:
    """One reply of up to six tokens; the reward is the share of even ids in it."""
    messages = [{"role": "user", "content": scenario.id}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=6)
    trajectory = nb.Trajectory([*messages, reply.choices[0]])
    ids = trajectory.turns[0].completion_ids
    trajectory.reward = sum(i % 2 == 0 for i in ids) / len(ids)
    return trajectory


async def play(model: Any, **options: Any) -> nb.Groups:
    """Three groups of four."""
    options = {"group_size": 4, "progress": False} | options
    return await nb.gather(rollout, SCENARIOS, model=model, **options)


def copied(groups: nb.Groups) -> nb.Groups:
    """The same groups for another model."""
    return copy.deepcopy(groups)


def attempt(reward: float | None, *, version: int = 0, completion: int = 2, **fields: Any) -> nb.Trajectory:
    """A trajectory by hand with one turn of ``completion`` sampled tokens."""
    ids = tuple(range(65, 65 + completion))
    turn = nb.Turn(
        (1, 2, 3), ids, (-0.5,) * completion, version, "stop", {"role": "assistant", "content": "x"}
    )
    return nb.Trajectory([{"role": "user", "content": "?"}, turn], reward=reward, **fields)


def group(*rewards: float | None, **fields: Any) -> nb.TrajectoryGroup:
    """A group by hand, one attempt a reward."""
    return nb.TrajectoryGroup([attempt(reward, **fields) for reward in rewards])
