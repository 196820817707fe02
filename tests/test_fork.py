"""A run branches off another at a checkpoint, with its history, and neither spoils the other."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from steps import copied, group, open_fake, open_model, play

import artnb as nb
from artnb.store.token_records import read_token_records


async def train(model: nb.Model, *rewards: float) -> None:
    for reward in rewards:
        await play(model)
        await nb.train_step(model, [group(reward - 0.1, reward + 0.1, version=model.policy_version)])


def digests(folder: Path) -> dict[str, str]:
    found = (p for p in folder.rglob("*") if p.is_file() and p.name != "owner.json")
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


@pytest.mark.usefixtures("one_thread")
async def test_it_goes_on_as_the_other_would_have(tiny_model: Path, tmp_path: Path):
    with open_model(tiny_model, tmp_path) as model:
        kept = []
        for step in range(3):
            model.run.cursor["next"] = step + 1
            kept.append(await play(model))
            await nb.train_step(model, copied(kept[-1]), learning_rate=1e-2)
        fork = model.run.fork(2, "branch")
        before = digests(model.run.path)
        with open_model(tiny_model, tmp_path, "branch") as branch:
            assert branch.run.step == branch.policy_version == 2 and branch.run.cursor == {"next": 2}
            again = await nb.train_step(branch, copied(kept[2]), learning_rate=1e-2)
            assert again.metrics["loss"] == model.run.metrics()[2]["loss"]
            ours, theirs = (run.latest_checkpoint().files for run in (branch.run, model.run))
            for name in ("adapter_model.safetensors", "optimizer.safetensors"):
                assert ours[name]["sha256"] == theirs[name]["sha256"]
            assert (
                read_token_records(branch.run.path, 1).keys() == read_token_records(model.run.path, 1).keys()
            )
        assert digests(model.run.path) == before, "the run that was left is as it was"
        assert fork.description()["lineage"] == [{"run": "demo", "step": 2}]


async def test_its_history_is_what_counts_up_to_the_checkpoint(tmp_path: Path):
    with open_fake(tmp_path) as model:
        await train(model, 0.1, 0.2, 0.3)
        model.rollback(1)
        await train(model, 0.4, 0.5)
        groups = await play(model, split="test")
        model.run.note("before")
        judged = groups[0].trajectories[0]
        groups[0].override(0, 0.25, "by hand")
        kept = {t.id for step in range(3) for t in model.run.trajectories(step)}
        await train(model, 0.6)
        model.run.note("after")
        fork = model.run.fork(3, "branch")
        assert [r["reward_mean"] for r in fork.metrics()] == pytest.approx([0.1, 0.4, 0.5])
        found = list(fork.trajectories())
        assert {t.id for t in found} == kept | {t.id for g in groups for t in g}
        assert next(t for t in found if t.id == judged.id).reward == 0.25
        assert [e["text"] for e in fork.events() if e["kind"] == "note"] == ["before"]
        assert [one.step for one in fork.checkpoints()] == [3]
    with open_fake(tmp_path, "branch") as branch:
        assert branch.run.step == branch.policy_version == 3
        assert not [e for e in branch.run.events() if e["kind"] == "warning"]
        await train(branch, 0.7, 0.8)
        branch.rollback(3)
        await train(branch, 0.9)
        assert [r["reward_mean"] for r in branch.run.metrics()] == pytest.approx([0.1, 0.4, 0.5, 0.9])
        again = branch.run.fork("best", "twig")
        assert [one["step"] for one in again.description()["lineage"]] == [3, 3]
        assert [one["run"] for one in again.description()["lineage"]] == ["demo", "branch"]
    report = nb.Run.read("branch", tmp_path).report(tmp_path / "report.html")
    assert report.stat().st_size > 1000


async def test_a_run_that_nobody_holds_can_be_forked(tmp_path: Path):
    with open_fake(tmp_path) as model:
        await train(model, 0.1, 0.2)
    nb.Run.read("demo", tmp_path).fork(1, "branch")
    with open_fake(tmp_path, "branch") as branch:
        assert branch.run.step == 1


async def test_what_cannot_be_leaves_nothing(tmp_path: Path, monkeypatch: Any):
    with open_fake(tmp_path) as model:
        await train(model, 0.1, 0.2)
        run = model.run
        with pytest.raises(nb.CheckpointError, match="no checkpoint of step 9; complete ones: 1, 2"):
            run.fork(9, "branch")
        with pytest.raises(nb.ConfigurationError, match="already"):
            run.fork(1, "demo")
        with pytest.raises(nb.ConfigurationError, match="cannot name a run"):
            run.fork(1, "../elsewhere")

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("artnb.store.fork.shutil.copytree", full)
            with pytest.raises(OSError, match=r"cannot write .*branch: No space left"):
                run.fork(1, "branch")
        saved = run.path / "checkpoints" / "step_000002" / "fake.json"
        saved.write_text(saved.read_text().replace("2", "7"))
        with pytest.raises(nb.CheckpointError, match="is damaged"):
            run.fork(2, "branch")
    assert [p.name for p in tmp_path.iterdir()] == ["demo"]
    assert "lineage" not in json.loads((tmp_path / "demo" / "run.json").read_text())
