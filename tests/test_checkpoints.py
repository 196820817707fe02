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


def texts(run, folder="checkpoints"):
    """What each checkpoint holds, by name."""
    found = (run.path / folder).glob("step_*/adapter/weights.safetensors")
    return {path.parent.parent.name: path.read_text() for path in found}


def test_a_rolled_back_run_is_resumed_where_it_was_rolled_back_to(tmp_path):
    with Run.open("demo", tmp_path) as run:
        for step in (1, 2, 3, 4):
            run.save_checkpoint(step, write(f"first {step}"), {"cursor": {"next": step}})
            run.append_metrics({"kind": "train", "step": step - 1})
        run.roll_back(2)
        assert run.step == run.latest_checkpoint().step == 2
    with Run.open("demo", tmp_path) as run:
        assert run.step == run.trained_steps == 2 and run.cursor == {"next": 2}
        assert texts(run) == {"step_000001": "first 1", "step_000002": "first 2"}
        aside = {"step_000003": "first 3", "step_000004": "first 4"}
        assert texts(run, "checkpoints/rolled_back") == aside
        assert not any(e["kind"] == "warning" for e in run.events())
        run.save_checkpoint(3, write("second 3"), {})
        run.append_metrics({"kind": "train", "step": 2})
    with Run.open("demo", tmp_path) as run:
        assert run.step == 3 and texts(run)["step_000003"] == "second 3"
        assert texts(run, "checkpoints/rolled_back") == aside, "and nothing of it is lost"
        run.roll_back(0)
        assert run.latest_checkpoint() is None
        assert texts(run, "checkpoints/rolled_back")["step_000003"] == "second 3", "the last one undone"
    with Run.open("demo", tmp_path) as run:
        assert run.step == run.trained_steps == 0


@pytest.mark.parametrize("killed_after", range(3))
def test_a_rollback_that_is_killed_half_way_leaves_a_run_that_can_go_on(tmp_path, killed_after, monkeypatch):
    with Run.open("demo", tmp_path) as run:
        for step in (1, 2, 3):
            run.save_checkpoint(step, write("w"), {})
            run.append_metrics({"kind": "train", "step": step - 1})
        rename, done = os.rename, []

        def until_killed(source, target):
            if len(done) == killed_after:
                raise KeyboardInterrupt
            done.append(rename(source, target))

        monkeypatch.setattr(os, "rename", until_killed)
        if killed_after < 2:
            with pytest.raises(KeyboardInterrupt):
                run.roll_back(1)
        else:  # after the last rename, before the event
            monkeypatch.setattr(run, "record_event", lambda *_, **__: until_killed("", ""))
            with pytest.raises(KeyboardInterrupt):
                run.roll_back(1)
        monkeypatch.undo()
    with Run.open("demo", tmp_path) as run:
        assert run.step == run.trained_steps == 3 - killed_after
        assert run.latest_checkpoint().step == run.step


def test_pruning_counts_what_was_set_aside_by_itself(run):
    for step in range(1, 7):
        run.save_checkpoint(step, write("w"), {})
    run.roll_back(2)
    run.prune_checkpoints(2)
    assert sorted(texts(run)) == ["step_000001", "step_000002"]
    assert sorted(texts(run, "checkpoints/rolled_back")) == ["step_000005", "step_000006"]
