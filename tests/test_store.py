"""A run folder survives kills, other writers, hostile text, and being opened again."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from artnb.errors import ArtnbError, ConfigurationError, RunInUse, RunMismatch
from artnb.store import Run, Stored
from artnb.store import owner as owner_module
from artnb.store.codec import decode, encode
from artnb.store.journal import Journal
from artnb.types import Failure, Trajectory, Turn

IDENTITY = {"base_model": "tiny", "tokenizer": "abc", "adapter": {"rank": 8, "targets": ["q", "v"]}}


def turn(version=0):
    return Turn((1, 2), (3,), (-0.5,), version, "stop", {"role": "assistant", "content": "hi"})


def trajectory(**values):
    return Trajectory(**{"messages_and_choices": [turn()], "reward": 1.0, "scenario_id": "s", **values})


def kinds(run):
    return [event["kind"] for event in run.events()]


@pytest.fixture
def run(tmp_path):
    with Run.open("demo", tmp_path) as opened:
        yield opened


def in_another_process(code, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True, **options
    )


# Lines

awkward = st.text(st.characters(exclude_categories=()))
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | awkward,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(awkward | st.sampled_from(["$float", "$int", "$text", "$object", "$deep"]), inner)
    ),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None)
@given(anything)
@example("\ud83d\ude00 and \U0001f600")
@example({"$float": "nan"})
@example({"$object": [["$float", math.inf]]})
@example("\x1b[2J\u202e\u2028\x85\x9b1m\x00")
@example(10**5000)
def test_any_json_value_comes_back_equal_from_one_ascii_line(value):
    line = encode({"value": value})
    assert line.isascii() and "\n" not in line
    json.loads(line, parse_constant=pytest.fail)
    assert decode(line) == {"value": value}


def test_values_nested_too_deeply_for_json_come_back_equal():
    value, depth = {"end": ["\ud83d\ude00", math.inf]}, 5000
    for level in range(depth):
        value = [value] if level % 2 else {"$float": value, "x": 1}
    again = decode(encode({"value": value}))["value"]
    for level in reversed(range(depth)):
        (again, other) = (again[0], 1) if level % 2 else (again["$float"], again["x"])
        assert other == 1
    assert again == {"end": ["\ud83d\ude00", math.inf]}


def test_objects_unknown_to_json_are_kept_as_text_or_numbers():
    import numpy as np

    circular: list = []
    circular.append(circular)
    record = {
        "a": np.float32(0.5),
        "b": np.arange(2),
        "c": {1},
        "d": (1, 2),
        "e": Failure("A", "b"),
        "f": circular,
    }
    assert decode(encode(record)) == {
        "a": 0.5,
        "b": [0, 1],
        "c": [1],
        "d": [1, 2],
        "e": "Failure(type='A', message='b', traceback='')",
        "f": ["<circular>"],
    }


# Records


def test_a_run_folder_can_be_read_by_a_person(tmp_path):
    with Run.open("demo", tmp_path, identity=IDENTITY) as run:
        run.append_metrics({"kind": "train", "step": 0, "loss": math.nan})
        run.append_trajectory(trajectory(), step=1, split="test", gather_id="g", attempt=0)
        run.write_result({"seconds": 1.5})
    names = {str(p.relative_to(run.path)) for p in run.path.rglob("*") if p.is_file()}
    assert names == {
        "run.json",
        "metrics.jsonl",
        "events.jsonl",
        "result.json",
        "trajectories/step_000001.jsonl",
        "trajectories/index/steps_000000.v1.jsonl",
    }
    described = json.loads((run.path / "run.json").read_text())
    assert (
        described["name"] == "demo"
        and described["identity"] == IDENTITY
        and "python" in described["versions"]
    )
    assert math.isnan(run.metrics()[0]["loss"])


def test_trajectories_come_back_as_they_were(run):
    kept = trajectory(reward=math.inf, metrics={"won": 1.0}, error=Failure("ValueError", "no", "trace"))
    run.append_trajectory(kept, step=0, split="train", gather_id="g", attempt=3, group_metadata={"a": 1})
    run.append_trajectory(trajectory(), step=0, split="test", gather_id="h", attempt=0)
    (stored,) = run.stored(0, "train")
    assert stored.trajectory == kept
    assert (stored.attempt, stored.gather_id, stored.group_metadata) == (3, "g", {"a": 1})
    assert len(list(run.trajectories())) == 2
    assert list(run.trajectories(step=1)) == []


def test_ten_megabytes_and_control_characters_are_stored(run):
    text = "<script>\x1b[31m\x00\u202e\ud800" + "x" * 10_000_000
    run.append_trajectory(trajectory(logs=[text]), step=0, split="train", gather_id="g", attempt=0)
    assert next(run.trajectories()).logs == [text]
    assert b"\x1b" not in (run.path / "trajectories/step_000000.jsonl").read_bytes()


def test_threads_append_whole_lines(run):
    def write(name):
        for number in range(50):
            run.record_event("note", writer=name, number=number, text="x" * 5000)
            one = trajectory(metadata={"writer": name})
            run.append_trajectory(one, step=number // 25, split="train", gather_id=str(name), attempt=number)

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    notes = [e for e in run.events() if e["kind"] == "note"]
    assert sorted((e["writer"], e["number"]) for e in notes) == [(w, n) for w in range(4) for n in range(50)]
    assert sorted((t.gather_id, t.attempt) for t in run.stored()) == sorted(
        (str(w), n) for w in range(4) for n in range(50)
    )


def test_a_step_is_recorded_once_and_in_order(run):
    run.append_metrics({"kind": "train", "step": 0})
    run.append_metrics({"kind": "evaluation", "step": 1})
    assert run.step == 1
    with pytest.raises(ConfigurationError, match="stands at step 1, but metrics of training step 0"):
        run.append_metrics({"kind": "train", "step": 0})


def test_frames_have_a_row_for_each_record(run):
    run.append_metrics({"kind": "train", "step": 0, "loss": 0.5})
    run.append_metrics({"kind": "sft", "step": 1, "loss": 0.25, "nll": 2.5})
    run.append_trajectory(
        trajectory(id="t", metrics={"won": 1.0}), step=0, split="train", gather_id="g", attempt=2
    )
    failed = Trajectory(error=Failure("KeyError", "k"), scenario_id="s", id="u")
    run.append_trajectory(failed, step=0, split="test", gather_id="g", attempt=0)
    frame = run.trajectories_frame()
    first, second = frame.to_dict("records")
    assert (first["turns"], first["completion_tokens"], first["policy_version"]) == (1, 1, 0)
    assert (first["id"], first["attempt"], first["metric/won"]) == ("t", 2, 1.0)
    assert (second["error"], second["split"], second["turns"]) == ("KeyError", "test", 0)
    assert run.metrics_frame()[["kind", "loss"]].values.tolist() == [["train", 0.5], ["sft", 0.25]]
    assert "step_" not in run._repr_html_() and "<table>" in run._repr_html_()


def test_an_empty_run_has_frames_with_columns(run):
    assert {"step", "reward", "error"} <= set(run.trajectories_frame().columns)
    assert len(run.metrics_frame()) == 0


# Kills


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "trajectories/step_000000.jsonl"])
def test_a_torn_last_line_is_moved_aside(tmp_path, name):
    with Run.open("demo", tmp_path) as run:
        run.append_metrics({"kind": "evaluation", "step": 0})
        run.append_trajectory(trajectory(), step=0, split="test", gather_id="g", attempt=0)
    file = run.path / name
    whole = file.read_bytes()
    file.write_bytes(whole + whole.splitlines()[-1][:-7])
    with Run.open("demo", tmp_path) as run:
        assert (run.path / f"{name}.torn").read_bytes().strip() == whole.splitlines()[-1][:-7]
        assert any(e["kind"] == "warning" and ".torn" in e["message"] for e in run.events())
        assert file.read_bytes().startswith(whole)
        assert len(run.metrics()) == 1 and len(list(run.trajectories())) == 1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_journal_cut_anywhere_loses_no_whole_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("journal") / "j.jsonl"
    records = [{"n": n, "text": "é" * n} for n in range(4)]
    Journal(path).append(*records)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    torn = Journal(path).repair()
    kept = list(Journal(path).read())
    assert kept == records[: len(kept)]
    assert len(kept) == whole[:cut].count(b"\n") + (cut < len(whole) and whole[cut : cut + 1] == b"\n")
    lost = path.with_name("j.jsonl.torn").read_bytes() if torn else b""
    assert b"".join(path.read_bytes().split(b"\n")) + lost.strip() == b"".join(whole[:cut].split(b"\n"))
    Journal(path).append({"n": 9})
    assert list(Journal(path).read()) == [*kept, {"n": 9}]


def test_a_line_spoilt_by_the_disk_is_passed_over(tmp_path):
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"n":1}\n\x00\x00\x00\xff\n[1]\n{"n":2}\n')
    assert list(Journal(path).read()) == [{"n": 1}, {"n": 2}]


def test_a_disk_error_leaves_whole_lines_and_says_what_to_do(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "j.jsonl")
    journal.append({"n": 1})
    write, calls = os.write, []

    def full(handle, data):
        calls.append(len(data))
        if len(calls) == 1:
            return write(handle, bytes(data[:4]))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"No space left on device.*already on disk is intact"):
        journal.append({"n": 2})
    monkeypatch.undo()
    journal.append({"n": 3})
    assert list(journal.read()) == [{"n": 1}, {"n": 3}]


KILLED = """
import sys, time
from artnb.store import Run
from artnb.types import Trajectory, Turn
run = Run.open("demo", sys.argv[1])
for step in run.steps(100):
    for attempt in range(4):
        turn = Turn((1,), (2,), (-1.0,), step, "stop", {"role": "assistant", "content": "x" * 2000})
        one = Trajectory([turn])
        run.append_trajectory(one, step=step, split="train", gather_id=f"g{step}", attempt=attempt)
    run.append_metrics({"kind": "train", "step": step})
    run.save_checkpoint(step + 1, lambda folder: (folder / "w.bin").write_bytes(b"w" * 300_000), {"k": step})
    run.prune_checkpoints(2)
    print("going", flush=True)
"""


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.011, 0.03, 0.05])
def test_it_resumes_without_gap_or_duplicate_after_kill_9(tmp_path, delay):
    for _ in range(2):
        with in_another_process(KILLED, tmp_path) as process:
            process.stdout.readline()
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
    with Run.open("demo", tmp_path) as run:
        latest = run.latest_checkpoint()
        latest.verify()
        assert run.step == latest.step == latest.state["k"] + 1
        assert [r["step"] for r in run.metrics()] == list(range(run.step))
        counted = [(t.step, t.attempt) for t in run.stored()]
        assert counted == [(s, a) for s in range(run.step) for a in range(4)]
        assert [p.name for p in (run.path / "checkpoints").iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("kind", ["train", "sft"])
def test_work_after_the_last_checkpoint_is_marked_and_done_again(tmp_path, kind):
    with Run.open("demo", tmp_path) as run:
        for step in range(3):
            if step == 1:
                run.save_checkpoint(1, lambda folder: None, {})
            run.append_trajectory(trajectory(), step=step, split="train", gather_id="g", attempt=0)
            run.append_metrics({"kind": kind, "step": step, "take": 1})
        run.append_metrics({"kind": "evaluation", "step": 1})
    with Run.open("demo", tmp_path) as run:
        assert run.step == run.trained_steps == 1
        assert (event := run.events()[-1])["kind"] == "rolled_back" and (event["from"], event["to"]) == (3, 1)
        assert [(r["kind"], r["step"]) for r in run.metrics()] == [(kind, 0), ("evaluation", 1)]
        assert [r["rolled_back"] for r in run.metrics(include_rolled_back=True)] == [False, True, True, False]
        assert [t.step for t in run.stored()] == [0]
        run.append_metrics({"kind": kind, "step": 1, "take": 2})
        assert [r.get("take") for r in run.metrics()] == [1, None, 2]
    with Run.open("demo", tmp_path) as run:
        assert run.step == 1 and len(run.metrics()) == 2


@pytest.mark.parametrize("kind", ["train", "sft"])
def test_a_rollback_undoes_later_records_in_the_same_process(run, kind):
    for step in range(3):
        run.append_metrics({"kind": kind, "step": step, "take": 1})
    run.roll_back(1)
    run.append_metrics({"kind": kind, "step": 1, "take": 2})
    assert [(r["step"], r["take"]) for r in run.metrics()] == [(0, 1), (1, 2)]


# Steps


def test_steps_resume_stop_and_follow_the_run(tmp_path):
    with Run.open("demo", tmp_path) as run:
        assert list(run.steps(3)) == [0, 1, 2]  # nothing trained: the numbers still move on
        seen = []
        for step in run.steps(10):
            seen.append(step)
            run.append_metrics({"kind": "train", "step": step})
            if step == 3 and seen.count(3) == 1:
                run.roll_back(2)
            if step == 5:
                (run.path / "STOP").touch()
        assert seen == [0, 1, 2, 3, 2, 3, 4, 5]
        assert "stopped" in kinds(run) and not (run.path / "STOP").exists()
        assert next(run.steps(10)) == 6


# Owners


def test_a_second_process_is_told_who_writes(tmp_path):
    code = """
import sys
from artnb.store import Run
run = Run.open("demo", sys.argv[1]); print("open", flush=True); sys.stdin.read()
"""
    with in_another_process(code, tmp_path, stdin=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(
            RunInUse, match=rf"run 'demo' is being written by process {other.pid} \(heartbeat \d+ s ago"
        ):
            Run.open("demo", tmp_path)
        assert Run.read("demo", tmp_path).description()["name"] == "demo"
        other.stdin.close()
    with Run.open("demo", tmp_path) as run:  # the other one left in order
        assert "took_over" not in kinds(run)


def test_a_killed_owner_is_replaced(tmp_path):
    code = "import os, sys; from artnb.store import Run; Run.open('demo', sys.argv[1]); os._exit(9)"
    in_another_process(code, tmp_path).communicate()
    assert (tmp_path / "demo/owner.json").exists()
    with Run.open("demo", tmp_path) as run:
        assert "took_over" in kinds(run)


@pytest.mark.parametrize(
    ("change", "is_stale"),
    [
        ({"host": "elsewhere"}, False),
        ({"host": "elsewhere", "heartbeat": time.time() - 100}, True),
        ({"process_started": 1}, True),  # the pid was given to another process
        ({"pid": 2**22 + 1}, True),
    ],
)
def test_an_owner_is_stale_when_nobody_can_be_writing(tmp_path, change, is_stale):
    owner = owner_module.Owner(tmp_path)
    owner.claim()
    record = {**json.loads((tmp_path / "owner.json").read_text()), **change}
    owner.release()
    assert owner_module.is_stale(record) is is_stale


def test_a_process_whose_run_was_taken_learns_it_at_its_next_write(tmp_path):
    with Run.open("demo", tmp_path) as run:
        code = """
import sys
from artnb.store import Run
run = Run.open("demo", sys.argv[1], takeover=True)
run.record_event("mine")
import os; os._exit(0)
"""
        in_another_process(code, tmp_path).communicate()
        run._owner._renew()  # what the heartbeat does every 5 s
        with pytest.raises(RunInUse, match="was taken over by process"):
            run.record_event("note")
        taken = (run.path / "owner.json").read_text()
        again = Run.open("demo", tmp_path)  # the other process is gone
        assert again is not run and "mine" in kinds(again)
        assert (run.path / "owner.json").read_text() != taken
        again.close()


def test_a_claim_half_written_counts_as_in_use_until_it_is_old(tmp_path):
    (tmp_path / "demo").mkdir()
    file = tmp_path / "demo/owner.json"
    file.touch()
    with pytest.raises(RunInUse):
        Run.open("demo", tmp_path)
    os.utime(file, (time.time() - 100,) * 2)
    Run.open("demo", tmp_path).close()


def test_the_heartbeat_moves_and_close_gives_the_run_back(tmp_path, monkeypatch):
    monkeypatch.setattr(owner_module, "HEARTBEAT_SECONDS", 0.05)
    run = Run.open("demo", tmp_path)
    first = json.loads((run.path / "owner.json").read_text())["heartbeat"]
    deadline = time.time() + 5
    while json.loads((run.path / "owner.json").read_text())["heartbeat"] == first and time.time() < deadline:
        time.sleep(0.02)
    assert json.loads((run.path / "owner.json").read_text())["heartbeat"] > first
    run.close()
    run.close()
    assert not (run.path / "owner.json").exists()
    with pytest.raises(ArtnbError, match="is closed"):
        run.record_event("note")
    assert kinds(run) == ["opened"]


def test_the_same_process_gets_the_run_it_holds(tmp_path):
    with Run.open("demo", tmp_path, identity=IDENTITY) as run:
        assert Run.open("demo", tmp_path, identity=IDENTITY) is run
        with pytest.raises(RunMismatch):
            Run.open("demo", tmp_path, identity={"base_model": "other"})


# Names and identity


def test_another_model_under_the_same_name_is_refused_with_the_difference(tmp_path):
    Run.open("demo", tmp_path, identity=IDENTITY).close()
    other = {**IDENTITY, "base_model": "big", "adapter": {"rank": 16, "targets": ("q", "v")}}
    with pytest.raises(RunMismatch, match=r"base_model 'tiny' \(now 'big'\); adapter.rank 8 \(now 16\)"):
        Run.open("demo", tmp_path, identity=other)
    Run.open("demo", tmp_path, identity=IDENTITY).close()  # the refusal left nothing behind
    Run.open("demo", tmp_path).close()


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "a/b", "a\\b", "../x", ".hidden", "a\x00", "a\n", "x" * 200, "a:b"]
)
def test_a_name_that_could_leave_the_root_is_refused(tmp_path, name):
    with pytest.raises(ConfigurationError, match="cannot name a run"):
        Run.open(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work/thesis.tex").touch()
    with pytest.raises(ConfigurationError, match=r"is not a run.*thesis.tex"):
        Run.open("work", tmp_path)
    assert [p.name for p in (tmp_path / "work").iterdir()] == ["thesis.tex"]
    with pytest.raises(ConfigurationError, match="there is no run"):
        Run.read("nothing", tmp_path)


def test_no_environment_variable_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "canary-4711")
    with Run.open("demo", tmp_path, identity=IDENTITY) as run:
        run.append_metrics({"kind": "train", "step": 0})
        run.save_checkpoint(1, lambda folder: None, {})
        for path in run.path.rglob("*"):
            assert path.is_dir() or b"canary-4711" not in path.read_bytes()


def test_only_earlier_processes_rollouts_are_reusable(tmp_path):
    with Run.open("demo", tmp_path) as run:
        mine = Stored(0, "train", "g", 0, trajectory(id="mine"), key="k")
        other = Stored(0, "train", "g", 1, trajectory(id="other"), key="k", process="earlier")
        run.append_attempt([mine])
        run.append_attempt([other])
    with Run.open("demo", tmp_path) as run:
        assert list(run.trajectories()) == []
        (found,) = run.reusable(0, "train")
        assert found.trajectory.id == "other"
        run.reuse([found.trajectory], "h")
        assert [t.id for t in run.trajectories()] == ["other"]
        assert run.reusable(0, "train") == []
