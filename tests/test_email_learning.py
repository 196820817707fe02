"""Does the bundled model learn to search a small inbox? Shown a few episodes first, then by reinforcement."""

from __future__ import annotations

from pathlib import Path

import pytest

import artnb as nb
from artnb_environments.email_search import demonstration

pytestmark = pytest.mark.slow

SHOWN, REINFORCED = 8, 16


async def test_it_learns_to_answer_from_a_small_inbox(tmp_path: Path) -> None:
    environment = nb.load_environment("email_search", preset="small", examples=0)
    heldout = environment.scenarios("test", n=64)
    with nb.Model(run="mail", root=tmp_path) as model:
        before = await nb.evaluate(environment.rollout, heldout, model=model)
        for step in range(SHOWN):
            drawn = environment.scenarios("train", n=8, seed=100 + step)
            await nb.sft_step(model, [demonstration(one) for one in drawn], learning_rate=1e-3)
        shown = await nb.evaluate(environment.rollout, heldout, model=model)
        for step in range(REINFORCED):
            scenarios = environment.scenarios("train", n=4, seed=step)
            groups = await nb.gather(environment.rollout, scenarios, model=model)
            await nb.train_step(model, groups, learning_rate=4e-4)
        after = await nb.evaluate(environment.rollout, heldout, model=model)
    print(before, shown, after, sep="\n")
    first, last = before.intervals["correct"], after.intervals["correct"]
    assert first.high is not None and last.low is not None and last.low > first.high
    assert after.metrics["found"] > before.metrics["found"] + 0.3
    assert (after.mean_reward or -2.0) > (before.mean_reward or -2.0)
