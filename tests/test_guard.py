"""A run that collapses is noticed, and goes back by itself when it was told to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from steps import group, open_fake, open_model, play

import artnb as nb
from artnb.dashboard.alarms import KINDS, alarms
from artnb.guard import COLLAPSE, NOT_FINITE

RISE = (0.1, 0.2, 0.4, 0.6, 0.7, 0.8)


class Spoilt(nb.FakeBackend):
    """Reports what it is told to, once for each step."""

    def __init__(self, **told: list[float]) -> None:
        super().__init__()
        self.told = {name: list(values) for name, values in told.items()}

    async def forward_backward(self, samples: Any, config: Any, **options: Any) -> dict[str, float]:
        measured = await super().forward_backward(samples, config, **options)
        return measured | {n: v.pop(0) for n, v in self.told.items() if v and n != "grad_norm"}

    async def optim_step(self, config: Any) -> dict[str, float]:
        norms = self.told.get("grad_norm") or [1.0]
        norm = norms.pop(0)
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm}; the update was not applied")
        await super().optim_step(config)
        return {"grad_norm": norm}


async def loop(model: nb.Model, steps: int, rewards: Any = lambda step, visit: 0.5) -> list[int]:
    """Train with these mean rewards; returns the steps in the order in which they were taken."""
    taken: list[int] = []
    for step in model.run.steps(steps):
        mean = rewards(step, taken.count(step))
        taken.append(step)
        await nb.train_step(model, [group(mean - 0.1, mean + 0.1, version=model.policy_version)])
        assert len(taken) < 5 * steps
    return taken


def alarms_of(model: nb.Model) -> list[dict[str, Any]]:
    return [event for event in model.run.events() if event["kind"] == "alarm"]


def fall_once(step: int, visit: int) -> float:
    return 0.1 if step in (8, 9) and visit == 0 else [*RISE, *[0.8] * 9][step]


async def test_a_collapse_goes_back_to_the_best_step_with_half_the_learning_rate(tmp_path: Path):
    with open_fake(tmp_path, guard=nb.Guard("act"), keep_checkpoints=20) as model:
        with pytest.warns(UserWarning, match=r"collapse: .*Going back to step 7 with a learning rate"):
            taken = await loop(model, 12, fall_once)
        told = alarms_of(model)
        assert len(told) == 1 and told[0]["alarms"] == ["collapse"]
        back = told[0]["step"]
        assert taken == [*range(back), *range(7, 12)]
        assert model.run.step == model.policy_version == 12
        assert [r["step"] for r in model.run.metrics()] == list(range(12))
        assert model.run.controls.settings == {"learning_rate": 2.5e-5}
        asked = [e for e in model.run.events() if e["kind"] == "control"]
        assert {e["by"] for e in asked} == {"guard"} and {e["control"] for e in asked} == {
            "roll_back",
            "learning_rate",
        }


async def test_a_guard_that_warns_says_it_once_and_does_nothing(tmp_path: Path):
    with open_fake(tmp_path, guard=nb.Guard("warn")) as model:
        with pytest.warns(UserWarning, match="collapse") as heard:
            assert await loop(model, 12, fall_once) == list(range(12))
        assert len(heard) == 1 and len(alarms_of(model)) == 1 and alarms_of(model)[0]["done"] == ""


async def test_without_a_guard_nothing_is_said(tmp_path: Path):
    with open_fake(tmp_path) as model:
        assert await loop(model, 12, fall_once) == list(range(12)) and not alarms_of(model)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("entropy collapse", {"entropy": [2.0] * 4 + [0.01] * 8}),
        ("drift", {"kl_k3": [0.01] * 6 + [0.5]}),
        ("engine and trainer disagree", {"logprob_gap_mean": [0.01] * 6 + [0.5]}),
        ("gradient", {"grad_norm": [1.0] * 7 + [50.0]}),
        (NOT_FINITE, {"grad_norm": [1.0] * 5 + [math.nan]}),
    ],
)
async def test_each_kind_of_collapse_is_acted_on(tmp_path: Path, kind: str, told: dict[str, list[float]]):
    guard = nb.Guard("act", alarms=(kind,))
    with open_fake(tmp_path, backend=Spoilt(**told), guard=guard) as model:
        with pytest.warns(UserWarning, match=rf"{kind}: .*Going back to step"):
            taken = await loop(model, 10, lambda step, visit: 0.3 + step / 100)
        assert alarms_of(model)[0]["alarms"] == [kind]
        assert len(taken) > 10 and model.run.step == 10
        assert [r["step"] for r in model.run.metrics()] == list(range(10))


@pytest.mark.parametrize("mode", ["off", "warn"])
async def test_a_gradient_that_is_not_finite_raises_unless_the_guard_acts(tmp_path: Path, mode: Any):
    with open_fake(tmp_path, backend=Spoilt(grad_norm=[math.nan]), guard=nb.Guard(mode)) as model:
        with pytest.raises(FloatingPointError, match="norm is nan"):
            await loop(model, 1)
        assert model.run.step == 0 and model.run.metrics() == []


async def test_a_step_that_could_not_be_taken_is_skipped_and_says_why(tmp_path: Path):
    with open_fake(tmp_path, backend=Spoilt(grad_norm=[math.inf]), guard=nb.Guard("act")) as model:
        with pytest.warns(UserWarning, match="It cannot go back: run 'demo' has no checkpoint"):
            result = await nb.train_step(model, [group(0, 1)])
        assert result.skipped == "nothing to learn from: 2 × not finite"
        assert (result.policy_version, model.run.step) == (0, 1)


@pytest.mark.parametrize("mode", ["warn", "act"])
async def test_an_evaluation_that_falls(tmp_path: Path, mode: Any):
    guard = nb.Guard(mode, evaluation_drop=0.2)
    rewards = iter((0.5, 0.6, 0.45, 0.3, 0.6, 0.6, 0.6))

    async def check(model: Any, scenario: Any) -> nb.Trajectory:
        return nb.Trajectory([{"role": "user", "content": "?"}], reward=reward)

    with open_fake(tmp_path, guard=guard, best_metric="evaluation") as model:
        taken = []
        with pytest.warns(UserWarning, match=r"mean reward is 0\.3; it has been 0\.6") as heard:
            for step in model.run.steps(5):
                taken.append(step)
                await nb.train_step(model, [group(0, 1, version=model.policy_version)])
                reward = next(rewards)
                await nb.evaluate(check, [nb.Scenario("a")], model=model, progress=False)
        assert len(heard) == 1
        assert taken == ([0, 1, 2, 3, 2, 3, 4] if mode == "act" else [0, 1, 2, 3, 4])
        assert model.run.best_checkpoint().step == 5


async def test_it_goes_back_no_more_often_than_it_may(tmp_path: Path):
    guard = nb.Guard("act", alarms=("drift",), limit=2, learning_rate_factor=1)
    drifting = [0.01] * 3 + [0.5] * 50
    with open_fake(tmp_path, backend=Spoilt(kl_k3=drifting), guard=guard) as model:
        with pytest.warns(UserWarning, match="drift"):
            await loop(model, 6)
        assert [event["done"][:10] for event in alarms_of(model)] == ["Going back", "Going back"]
        assert model.run.controls.settings == {} and model.run.step == 6
    backend = Spoilt(kl_k3=[0.5] * 9)
    with open_fake(tmp_path, backend=backend, guard=guard) as model:  # the journal remembers how often
        with pytest.warns(UserWarning, match=r"2 times already \(limit\)"):
            await loop(model, 8)


async def test_another_guard_does_not_load_the_model_again(tmp_path: Path):
    with open_fake(tmp_path, backend=(backend := nb.FakeBackend())) as model:
        again = open_fake(tmp_path, backend=backend, guard=nb.Guard("warn"))
        assert again is model and model.guarding.guard.mode == "warn"
        assert open_fake(tmp_path, backend=backend).guarding.guard.mode == "off"


@pytest.mark.usefixtures("one_thread")
async def test_a_real_model_goes_back_bit_for_bit(tiny_model: Path, tmp_path: Path, monkeypatch: Any):
    guard = nb.Guard("act", alarms=(NOT_FINITE,), to=1)
    with open_model(tiny_model, tmp_path, guard=guard) as model:
        trainer, optim_step = model.backend.trainer, model.backend.trainer.optim_step

        def spoilt(_: Any, config: Any) -> Any:
            if model.run.step == 2 and not model.run.controls.settings:
                next(iter(trainer.parameters.values())).grad.fill_(float("nan"))
            return optim_step(config)

        monkeypatch.setattr(type(trainer), "optim_step", spoilt)
        seen = {}
        with pytest.warns(UserWarning, match="Going back to step 1"):
            for step in model.run.steps(4):
                weights = [p.detach().clone() for p in trainer.parameters.values()]
                before = seen.setdefault(step, weights)
                assert all((a == b).all() for a, b in zip(before, weights, strict=True))
                await nb.train_step(model, await play(model), learning_rate=1e-2)
                if step == 1:
                    seen.pop(2, None)
        assert model.run.step == model.policy_version == 4


def test_answers_that_the_environment_cannot_use_again_are_an_alarm():
    def rows(*shares: float) -> list[dict[str, Any]]:
        return [
            {"step": step, "values": {"metric/invalid": 4 * share, "rollout_turns": 4.0}}
            for step, share in enumerate(shares)
        ]

    learning = [0.9, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05, 0.05, 0.05, 0.05]
    assert alarms(rows(*learning)) == [], "bad at first is no collapse"
    assert alarms(rows(*learning, 0.6, 0.1, 0.1, 0.1, 0.1)) == [], "neither is a bad step"
    (found,) = alarms(rows(*learning, 0.4, 0.5, 0.5, 0.6, 0.6))
    assert (found.kind, found.level, found.step) == ("invalid answers", "serious", 14)
    assert "52% of the turns" in found.text and "6%" in found.text


def test_a_guard_that_cannot_be_is_refused():
    assert set(COLLAPSE) - {NOT_FINITE} <= set(KINDS)
    for options, message in (
        ({"mode": "on"}, "'off', 'warn' or 'act'"),
        ({"alarms": ("colapse",)}, "no alarm 'colapse'.*collapse"),
        ({"evaluation_drop": -0.1}, "evaluation_drop must be >= 0"),
        ({"learning_rate_factor": 0.0}, "learning_rate_factor must be in"),
    ):
        with pytest.raises(nb.ConfigurationError, match=message):
            nb.Guard(**options)
