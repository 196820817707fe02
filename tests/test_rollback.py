"""A model and its run go back to a checkpoint as a whole or not at all, from a cell or by click."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import group, open_fake, open_model, play

import artnb as nb
from artnb.store.controls import TRAINING

LEARN = {"learning_rate": 1e-2}
PROBE = list(range(3, 40))


async def train(model: nb.Model, *rewards: float) -> None:
    """One step for each mean reward."""
    for reward in rewards:
        await nb.train_step(model, [group(reward - 0.1, reward + 0.1, version=model.policy_version)])


def logprobs(model: nb.Model) -> torch.Tensor:
    return model.backend.engine.call(lambda: model.backend.engine.score(PROBE)).result()


@pytest.mark.usefixtures("one_thread")
async def test_the_next_step_is_that_of_a_run_that_never_went_further(tiny_model: Path, tmp_path: Path):
    with open_model(tiny_model, tmp_path) as model, open_model(tiny_model, tmp_path, "twin") as twin:
        known = []
        for step in range(4):
            for one in (model, twin) if step < 2 else (model,):
                one.run.cursor["next"] = 10 * step
                await nb.train_step(one, await play(one, concurrency=1), **LEARN)
            known.append(logprobs(model))
        assert not torch.equal(known[1], known[3])
        assert model.rollback(2) == 2
        assert torch.equal(logprobs(model), known[1])
        assert model.run.step == model.policy_version == 2 and model.run.cursor == {"next": 10}
        assert [record["step"] for record in model.run.metrics()] == [0, 1]
        again, theirs = [await play(one, concurrency=1) for one in (model, twin)]
        assert ids_of(again) == ids_of(theirs)  # the engine's random state is back too
        mine, other = await nb.train_step(model, again, **LEARN), await nb.train_step(twin, theirs, **LEARN)
        same = {name for name in other.metrics if not name.startswith(("seconds", "tokens_per", "memory"))}
        assert {n: mine.metrics[n] for n in same} == {n: other.metrics[n] for n in same}
        assert torch.equal(logprobs(model), logprobs(twin))
        first, second = (one.backend.trainer.optimizer.state_dict()["state"] for one in (model, twin))
        assert all(torch.equal(first[i][name], second[i][name]) for i in first for name in first[i])


async def test_a_step_without_a_checkpoint_is_refused_and_nothing_moves(tmp_path: Path):
    with open_fake(tmp_path, keep_checkpoints=2) as model:
        with pytest.raises(nb.CheckpointError, match="no checkpoint of step 1; complete ones: none yet"):
            model.rollback(1)
        await train(model, 0.5, 0.5, 0.5, 0.5)
        for missing in (1, 9):
            with pytest.raises(nb.CheckpointError, match=f"of step {missing}; complete ones: 3, 4"):
                model.rollback(missing)
        with pytest.raises(nb.ConfigurationError, match="'best'"):
            model.rollback("worst")  # type: ignore[arg-type]
        assert model.run.step == model.policy_version == 4


@pytest.mark.usefixtures("one_thread")
async def test_the_policy_that_a_run_began_with_can_be_gone_back_to(tiny_model: Path, tmp_path: Path):
    with open_model(tiny_model, tmp_path, keep_checkpoints=1) as model:
        before = logprobs(model)
        assert model.run.start() is None
        for _ in range(3):
            await nb.train_step(model, await play(model), **LEARN)
        assert not torch.equal(logprobs(model), before)
        asked = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 4, "temperature": 0.0}
        first = await model.client.chat.completions.create(model=f"{model.name}@step_000000", **asked)
        assert first.choices[0].model_extra["policy_version"] == 0
        assert nb.chat(model).policies[:3] == ["current", "base", "step_000000"]
        assert model.rollback(0) == 0 and torch.equal(logprobs(model), before)
        assert model.run.step == model.policy_version == 0 and not model.run.checkpoints()
        again = await model.client.chat.completions.create(model=model.name, **asked)
        assert again.choices[0].message.content == first.choices[0].message.content
        await nb.train_step(model, await play(model), **LEARN)
        assert model.run.step == 1 and model.run.known_steps() == [0, 1]
    with open_model(tiny_model, tmp_path) as model:
        assert model.run.step == 1 and model.rollback(0) == 0 and torch.equal(logprobs(model), before)


async def test_the_best_is_kept_and_found(tmp_path: Path):
    with open_fake(tmp_path, keep_checkpoints=1) as model:
        await train(model, 0.9, 0.2, 0.7, 0.1, 0.3)  # the policy before any step has no checkpoint
        assert [one.step for one in model.run.checkpoints()] == [2, 5]
        assert model.rollback("best") == 2 and model.policy_version == 2
        await train(model, 0.7, 0.8, 0.6)
    with open_fake(tmp_path, keep_checkpoints=1) as model:
        assert model.run.step == 5 and [one.step for one in model.run.checkpoints()] == [3, 5]
        assert model.rollback("best") == 3


@pytest.mark.parametrize("is_repeated", [False, True])
async def test_what_was_undone_does_not_come_back_with_a_resume(
    tmp_path: Path, monkeypatch: Any, is_repeated: bool
):
    with open_fake(tmp_path) as model:
        await train(model, 0.1)
        await play(model)
        await train(model, 0.2, 0.3)
        model.rollback(1)
        if is_repeated:
            await play(model)  # and then the process is killed
    monkeypatch.setattr("artnb.store.trajectories.PROCESS", "another")
    with open_fake(tmp_path) as model:
        assert model.run.step == model.policy_version == 1 and model.backend._steps == 1
        assert len(model.run.reusable(1, "train")) == (12 if is_repeated else 0)
        assert not [e for e in model.run.events() if "incomplete" in e.get("message", "")]


async def test_a_rollback_that_fails_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: Any):
    with open_fake(tmp_path) as model:
        await train(model, 0.1, 0.2, 0.3)

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "no space left")

        monkeypatch.setattr(model.run, "roll_back", full)
        with pytest.raises(OSError, match="no space"):
            model.rollback(1)
        assert model.run.step == model.policy_version == model.backend._steps == 3
        saved = model.run.path / "checkpoints" / "step_000002" / "fake.json"
        saved.write_text(saved.read_text().replace("2", "7"))
        with pytest.raises(nb.CheckpointError, match="is damaged"):
            model.rollback(2)
        assert model.policy_version == model.backend._steps == 3


async def test_it_is_refused_while_a_step_is_under_way(tmp_path: Path):
    refused = []

    class Asking(nb.FakeBackend):
        async def optim_step(self, config: nb.TrainConfig) -> dict[str, float]:
            if self.policy_version == 1:
                with pytest.raises(nb.RunInUse, match="under way"):
                    model.rollback(1)
                refused.append(True)
            return await super().optim_step(config)

    with open_fake(tmp_path, backend=Asking()) as model:
        await train(model, 0.1, 0.2)
        assert refused and model.run.step == 2


def ids_of(groups: nb.Groups) -> list[Any]:
    return [trajectory.turns[0].completion_ids for one in groups for trajectory in one]


# ---- by click -----------------------------------------------------------------------------------


async def test_the_loop_goes_on_from_where_a_click_took_it(tmp_path: Path):
    with open_fake(tmp_path) as model:
        seen = []
        for step in model.run.steps(5):
            seen.append((step, model.policy_version))
            await train(model, 0.5 - step / 10)
            if len(seen) == 4:
                model.run.ask("roll_back", 2)
            elif len(seen) == 7:
                model.run.ask("roll_back", "best")  # during the last step
            assert len(seen) < 20
        assert [step for step, _ in seen] == [0, 1, 2, 3, 2, 3, 4, 1, 2, 3, 4]
        assert all(step == version for step, version in seen)
        assert [r["step"] for r in model.run.metrics()] == [0, 1, 2, 3, 4]


async def test_a_rollback_that_cannot_be_is_refused_in_the_journal_and_the_loop_goes_on(tmp_path: Path):
    with open_fake(tmp_path) as model:
        seen = []
        for step in model.run.steps(3):
            seen.append(step)
            model.run.ask("roll_back", 7)
            await train(model, 0.5)
        assert seen == [0, 1, 2] and model.run.controls.roll_back is None
        told = [e["message"] for e in model.run.events() if e["kind"] == "refused"]
        assert len(told) == 3 and "no checkpoint of step 7" in told[0]


async def test_what_was_asked_of_an_old_process_is_not_done_by_a_new_one(tmp_path: Path):
    with open_fake(tmp_path) as model:
        await train(model, 0.1, 0.2, 0.3)
        model.run.ask("roll_back", 1)
    with open_fake(tmp_path) as model:
        assert list(zip(model.run.steps(5), range(1), strict=False)) == [(3, 0)]


# ---- pause and stop -----------------------------------------------------------------------------


@pytest.mark.parametrize("by_file", [False, True])
async def test_stop_while_paused_runs_no_further_step(tmp_path: Path, by_file: bool):
    with open_fake(tmp_path) as model:
        model.run.ask("pause")

        async def loop() -> None:
            for _ in model.run.steps(10):
                await nb.train_step(model, await play(model))

        waiting = asyncio.create_task(loop())
        await asyncio.sleep(0.25)
        if by_file:
            (model.run.path / "STOP").touch()
        else:
            model.run.ask("stop")
        with pytest.raises(nb.Stopped, match="while it was paused"):
            await asyncio.wait_for(waiting, 10)
        assert model.run.step == 0 and not model.backend.requests
        assert not model.run.controls.stop and not model.run.controls.paused
        assert next(model.run.steps(10)) == 0  # it was carried out: the cell may be run again


async def test_train_step_and_evaluate_wait_too(tmp_path: Path):
    with open_fake(tmp_path) as model:
        groups = await play(model)
        asked = len(model.backend.requests)
        model.run.ask("pause")
        step = asyncio.create_task(nb.train_step(model, groups))
        check = asyncio.create_task(play(model, split="test"))
        await asyncio.sleep(0.3)
        assert model.run.step == 0 and len(model.backend.requests) == asked
        model.run.ask("learning_rate", 3e-3)
        model.run.ask("resume")
        await asyncio.wait_for(asyncio.gather(step, check), 10)
        assert model.run.step == 1 and len(model.backend.requests) == 2 * asked


# ---- settings -----------------------------------------------------------------------------------


async def test_every_setting_reaches_the_step_and_is_given_back(tmp_path: Path):
    used: list[nb.TrainConfig] = []

    class Seen(nb.FakeBackend):
        async def optim_step(self, config: nb.TrainConfig) -> dict[str, float]:
            used.append(config)
            return await super().optim_step(config)

    with open_fake(tmp_path, backend=Seen()) as model:
        asked = {name: 2 if setting.is_whole else 0.25 for name, setting in TRAINING.items()}
        for name, value in asked.items():
            model.run.ask(name, value)
        await train(model, 0.5)
        assert {name: getattr(used[-1], name) for name in asked} == asked
        for name in asked:
            model.run.ask(name, None)
        await train(model, 0.5)
        assert used[-1] == nb.TrainConfig()
        model.run.ask("group_size", 2)
        model.run.ask("concurrency", 3)
        assert [len(one) for one in await play(model)] == [2, 2, 2]
        assert [len(one) for one in await play(model, split="test")] == [4, 4, 4]


@pytest.mark.parametrize(
    ("control", "value", "message"),
    [
        ("kl_coef", -0.1, "kl_coef .* >= 0"),
        ("group_size", 2.5, "whole number >= 1"),
        ("group_size", 0, "whole number >= 1"),
        ("clip_low", "0.2", "must be a number"),
        ("roll_back", -1, "to a step or to 'best'"),
        ("roll_back", True, "to a step or to 'best'"),
        ("seed", 3, "can be asked for stop, pause"),
    ],
)
async def test_what_cannot_be_is_not_written(tmp_path: Path, control: str, value: Any, message: str):
    with open_fake(tmp_path) as model:
        with pytest.raises(nb.ConfigurationError, match=message):
            model.run.ask(control, value)
        assert not [e for e in model.run.events() if e["kind"] == "control"]
