"""A checkpoint is there as a whole or not at all."""

import os

import pytest

from artnb.errors import CheckpointError, ConfigurationError
from artnb.store import Run


@pytest.fixture
def run(tmp_path):
    with Run.open("demo", tmp_path) as opened:
        yield opened


def write(text):
    def fill(folder):
        (folder / "adapter").mkdir()
        (folder / "adapter/weights.safetensors").write_text(text)

    return fill


def names(run):
    return sorted(p.name for p in (run.path / "checkpoints").iterdir())


def test_a_checkpoint_keeps_its_files_and_state(run):
    path = run.save_checkpoint(
        12, write("w"), {"policy_version": 12, "cursor": {"epoch": 1}, "best": float("inf")}
    )
    assert path == run.path / "checkpoints/step_000012"
    (found,) = run.checkpoints()
    assert (found.step, found.path, found.name) == (12, path, "step_000012")
    assert found.state == {"step": 12, "policy_version": 12, "cursor": {"epoch": 1}, "best": float("inf")}
    assert found.files["adapter/weights.safetensors"]["bytes"] == 1
    found.verify()


def test_the_run_stands_at_its_latest_checkpoint(tmp_path):
    with Run.open("demo", tmp_path) as run:
        run.save_checkpoint(2, write("a"), {})
        run.save_checkpoint(10, write("b"), {})
    with Run.open("demo", tmp_path) as run:
        assert run.step == 10 and run.latest_checkpoint().step == 10


def test_saving_a_step_again_replaces_it(run):
    run.save_checkpoint(1, write("old"), {"k": 1})
    run.save_checkpoint(1, write("new"), {"k": 2})
    (found,) = run.checkpoints()
    assert found.state["k"] == 2
    assert (found.path / "adapter/weights.safetensors").read_text() == "new"
    assert names(run) == ["step_000001"]


def test_a_failed_writer_leaves_the_last_good_one(run):
    run.save_checkpoint(1, write("good"), {})

    def fail(folder):
        (folder / "half").write_text("x")
        raise ValueError("out of luck")

    def full(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="out of luck"):
        run.save_checkpoint(1, fail, {})
    with pytest.raises(CheckpointError, match=r"No space left on device\. Earlier checkpoints are intact"):
        run.save_checkpoint(2, full, {})
    assert names(run) == ["step_000001"]
    run.latest_checkpoint().verify()


def test_a_failed_rename_puts_the_old_one_back(run, monkeypatch):
    run.save_checkpoint(1, write("good"), {})
    rename = os.rename

    def refuse(source, target):
        if str(source).endswith(".tmp"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError):
        run.save_checkpoint(1, write("new"), {})
    monkeypatch.undo()
    assert (run.latest_checkpoint().path / "adapter/weights.safetensors").read_text() == "good"
    assert names(run) == ["step_000001"]


async def test_an_async_writer_fills_the_folder_in_a_block(run):
    with run.writing_checkpoint(3, {"k": 1}) as folder:
        (folder / "a.json").write_text("{}")
        assert run.checkpoints() == []
    assert [c.step for c in run.checkpoints()] == [3]


def test_leftovers_of_a_killed_writer_are_cleared_away(tmp_path):
    with Run.open("demo", tmp_path) as run:
        run.save_checkpoint(1, write("a"), {})
        run.save_checkpoint(2, write("b"), {})
    folder = run.path / "checkpoints"
    (folder / ".step_000003.abc123.tmp").mkdir()
    (folder / ".step_000003.abc123.tmp/half").touch()
    os.rename(folder / "step_000002", folder / ".step_000002.abc123.old")  # killed between the two renames
    with Run.open("demo", tmp_path) as run:
        assert names(run) == ["step_000001", "step_000002"]
        assert run.step == 2
        assert sum("killed checkpoint writer" in e.get("message", "") for e in run.events()) == 2


@pytest.mark.parametrize("damage", ["no state", "cut state", "lost file", "short file", "foreign state"])
def test_an_incomplete_checkpoint_is_not_listed(tmp_path, damage):
    with Run.open("demo", tmp_path) as run:
        run.save_checkpoint(1, write("good"), {})
        bad = run.save_checkpoint(2, write("good"), {})
    state, weights = bad / "state.json", bad / "adapter/weights.safetensors"
    if damage == "no state":
        state.unlink()
    elif damage == "cut state":
        state.write_text(state.read_text()[:-20])
    elif damage == "lost file":
        weights.unlink()
    elif damage == "short file":
        weights.write_text("goo")
    else:
        state.write_text('["not", "ours"]')
    with Run.open("demo", tmp_path) as run:
        assert [c.step for c in run.checkpoints()] == [1]
        assert run.step == 1
        assert any("step_000002 is incomplete" in e.get("message", "") for e in run.events())
        run.save_checkpoint(2, write("again"), {})
        assert run.latest_checkpoint().step == 2


def test_changed_bytes_are_found_by_verify(run):
    path = run.save_checkpoint(1, write("good"), {})
    (path / "adapter/weights.safetensors").write_text("evil")
    with pytest.raises(CheckpointError, match=r"weights\.safetensors is not what was written"):
        run.latest_checkpoint().verify()


def test_pruning_keeps_the_newest_and_the_chosen(run):
    for step in (1, 2, 3, 4, 5):
        run.save_checkpoint(step, write("w"), {})
    removed = run.prune_checkpoints(2, keep=[1])
    assert [p.name for p in removed] == ["step_000002", "step_000003"]
    assert names(run) == ["step_000001", "step_000004", "step_000005"]
    with pytest.raises(ConfigurationError, match="keep_last must be >= 1"):
        run.prune_checkpoints(0)
