"""Does the bundled model learn the small environments? Minutes each, so `make test-slow` runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import artnb as nb

pytestmark = pytest.mark.slow


async def learn(
    environment: Any,
    folder: Path,
    *,
    steps: int,
    scenarios: int,
    floor: float = 1.0,
    learning_rate: float,
    **options: Any,
) -> tuple[nb.Evaluation, nb.Evaluation]:
    """Train on 8 attempts at each of ``scenarios`` a step; 100 held-out episodes before and after.

    The learning rate falls to ``floor`` of itself.
    """
    heldout = environment.scenarios("test", n=100)
    with nb.Model(run=environment.name, root=folder) as model:
        before = await nb.evaluate(environment.rollout, heldout, model=model)
        for step in model.run.steps(steps):
            listed = environment.scenarios("train", n=scenarios, seed=step)
            groups = await nb.gather(environment.rollout, listed, model=model)
            await nb.train_step(
                model, groups, learning_rate=nb.schedule(learning_rate, step, steps, floor=floor), **options
            )
        return before, await nb.evaluate(environment.rollout, heldout, model=model)


def rose_clearly(before: nb.Evaluation, after: nb.Evaluation) -> bool:
    """Whether the intervals of 95 % have nothing in common."""
    assert before.n == after.n == 100 and before.high is not None and after.low is not None
    return after.low > before.high


async def test_it_learns_which_of_three_words_pays_most(tmp_path: Path) -> None:
    environment = nb.load_environment("say_maybe")
    before, after = await learn(environment, tmp_path, steps=4, scenarios=8, learning_rate=1e-3)
    assert rose_clearly(before, after)
    assert after.metrics["maybe"] >= 0.9


async def test_it_learns_to_guess_better_than_anywhere(tmp_path: Path) -> None:
    environment = nb.load_environment("guess_number", preset="small")
    anywhere = nb.evaluate_baseline(environment, "random", environment.scenarios("test", n=100))
    before, after = await learn(
        environment, tmp_path, steps=10, scenarios=4, learning_rate=1e-3, floor=0.3, credit_weight=0.5
    )
    assert rose_clearly(before, after)
    assert after.metrics["win"] > anywhere.metrics["win"]


async def test_it_learns_to_play_tic_tac_toe_by_the_rules(tmp_path: Path) -> None:
    environment = nb.load_environment("tic_tac_toe", preset="small")
    before, after = await learn(
        environment,
        tmp_path,
        steps=12,
        scenarios=4,
        learning_rate=8e-4,
        floor=0.25,
        advantage="grpo",
        credit_weight=0.8,
        max_samples=96,
    )
    assert rose_clearly(before, after)


async def test_it_learns_to_look_a_price_up_over_mcp(tmp_path: Path) -> None:
    environment = nb.load_environment("finance_mcp", preset="small")
    before, after = await learn(environment, tmp_path, steps=8, scenarios=6, learning_rate=1e-3)
    assert rose_clearly(before, after)
    assert after.metrics["correct"] >= 0.9
