"""What a checkpoint holds, and what it never holds; disks that are full, slow, read-only or cannot lock."""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import pickle
import random
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from steps import group, open_fake, open_model, play

import artnb as nb
from artnb.store import Run
from artnb.store.random_sources import load_random_sources
from artnb.store.versions import versions

LEARN = {"learning_rate": 1e-2}


async def train(model: nb.Model, *rewards: float) -> None:
    for reward in rewards:
        await nb.train_step(model, [group(reward - 0.1, reward + 0.1, version=model.policy_version)])


# ---- contents -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
async def test_a_checkpoint_says_what_made_it_and_holds_nothing_but_numbers_and_text(
    tiny_model: Path, tmp_path: Path
):
    with open_model(tiny_model, tmp_path, seed=7) as model:
        model.run.cursor["next"] = 3
        await nb.train_step(model, await play(model), kl_coef=0.01, **LEARN)
        saved = model.run.latest_checkpoint()
    assert {path.suffix for path in saved.path.rglob("*")} == {".json", ".safetensors"}
    assert set(saved.files) == {p.name for p in saved.path.iterdir()} - {"state.json"}
    assert saved.state["cursor"] == {"next": 3} and saved.state["policy_version"] == 1
    assert saved.state["config"]["kl_coef"] == 0.01 and saved.state["config"]["learning_rate"] == 1e-2
    assert saved.state["versions"] == versions() and "torch" in versions()
    assert saved.state["seed"] == 7
    assert saved.state["scenarios"] == ["say one", "say two", "say three"]


def draws() -> list[float]:
    """What comes next from every global source."""
    return [
        random.random(),
        random.gauss(0, 1),
        *np.random.rand(3),
        np.random.randn(),
        *torch.rand(3).tolist(),
    ]


@contextlib.contextmanager
def sources_put_back() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


async def test_every_random_source_goes_on_where_it_stood(tmp_path: Path):
    with sources_put_back():
        with open_fake(tmp_path) as model:
            draws()
            await train(model, 0.5)
            expected = draws()
            await train(model, 0.4)
            later = draws()
            model.rollback(1)
            assert draws() == expected
        random.seed(0)
        with open_fake(tmp_path):
            assert draws() == expected, "after a resume too"
        assert expected != later


def test_random_states_that_are_none_are_refused(tmp_path: Path):
    for content in ({"python": [3, [1, 2], None]}, {}, {"python": "x"}):
        (tmp_path / "random.json").write_text(json.dumps(content))
        with sources_put_back(), pytest.raises(nb.CheckpointError, match="holds no random states"):
            load_random_sources(tmp_path)


PICKLERS = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "shelve",
    "marshal",
    "jsonpickle",
}
LOADERS = {("torch", "load"), ("torch", "save"), ("pandas", "read_pickle"), ("yaml", "load")}


def test_no_file_of_ours_pickles(repository: Path):
    found = []
    for folder in ("artnb", "environments"):
        for path in (repository / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                found += [(path, n) for n in names if n.split(".")[0] in PICKLERS]
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    found += [(path, node.attr)] * ((node.value.id, node.attr) in LOADERS)
                if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                    is_off = isinstance(node.value, ast.Constant) and node.value.value is False
                    found += [] if is_off else [(path, "allow_pickle")]
    assert not found


_unpickled: list[Any] = []
_is_listening = False


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_listening and event.startswith("pickle."):
        _unpickled.append(arguments)


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is unpickled in this process from here on; Python tells audit hooks."""
    sys.addaudithook(_listen)
    _unpickled.clear()
    monkeypatch.setattr(sys.modules[__name__], "_is_listening", True)
    return _unpickled


async def test_nothing_is_unpickled_while_a_run_is_saved_resumed_rolled_back_and_forked(
    tiny_model: Path, tmp_path: Path, unpickled: list[Any]
):
    with open_model(tiny_model, tmp_path) as model:
        for _ in range(2):
            await nb.train_step(model, await play(model), **LEARN)
        model.rollback(1)
    with open_model(tiny_model, tmp_path) as model:
        await nb.train_step(model, await play(model), **LEARN)
        model.run.fork("best", "branch")
        list(model.run.trajectories())
    assert unpickled == []
    pickle.loads(pickle.dumps(Path("it does hear")))
    assert unpickled


# ---- retention ----------------------------------------------------------------------------------


async def test_the_latest_the_best_and_every_third_stay(tmp_path: Path):
    rewards = (0.1, 0.2, 0.9, 0.3, 0.2, 0.1, 0.2, 0.1, 0.2, 0.3)
    with open_fake(tmp_path, keep_checkpoints=2, keep_every=3) as model:
        await train(model, *rewards)
        assert [one.step for one in model.run.checkpoints()] == [2, 3, 6, 9, 10]
    with pytest.raises(nb.ConfigurationError, match="keep_every must be >= 1"):
        open_fake(tmp_path, keep_every=0)


async def test_the_best_is_best_in_what_was_chosen(tmp_path: Path):
    evaluations = iter((0.2, 0.7, 0.3, 0.3, 0.4))

    async def check(model: Any, scenario: Any) -> nb.Trajectory:
        return nb.Trajectory([{"role": "user", "content": "?"}], reward=reward)

    options = {"keep_checkpoints": 1, "best_metric": "evaluation"}
    with open_fake(tmp_path, **options) as model:
        for mean in (0.9, 0.8, 0.7, 0.6):
            await train(model, mean)
            reward = next(evaluations)
            await nb.evaluate(check, [nb.Scenario("a")], model=model, progress=False)
            await nb.evaluate(check, [nb.Scenario("a")], model=model, policy="base", progress=False)
        assert [one.step for one in model.run.checkpoints()] == [2, 4]
    with open_fake(tmp_path, **options) as model:  # also after a resume
        await train(model, 0.5)
        assert [one.step for one in model.run.checkpoints()] == [2, 5]
        assert model.run.best_checkpoint().step == 2
        assert model.run.best_checkpoint("-evaluation").step == 2, "the only one that was kept and measured"
        assert model.rollback("best") == 2
    with pytest.raises(nb.CheckpointError, match=r"was measured \(no_such_metric\)"):
        open_fake(tmp_path, best_metric="no_such_metric").rollback("best")
    Run.live("demo", tmp_path).close()


# ---- disks --------------------------------------------------------------------------------------


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder that this user may not write, root included: root becomes somebody else meanwhile."""
    is_root = os.geteuid() == 0
    modes = {path: path.stat().st_mode for path in (folder, *folder.rglob("*"))}
    for path, mode in modes.items():
        path.chmod(stat.S_IMODE(mode) & 0o555 | 0o444)
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(stat.S_IMODE(mode))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def test_a_target_that_is_read_only_says_so_before_anything_starts(open_folder: Path):
    with open_fake(open_folder) as model:
        await train(model, 0.1)
        (model.run.path / "owner.json").unlink()
    with read_only(open_folder):
        with pytest.raises(OSError, match=r"cannot write .*demo: Permission denied.*another root="):
            open_fake(open_folder)
        with pytest.raises(OSError, match=r"cannot write .*other: Permission denied.*another root="):
            open_fake(open_folder, "other")
        run = nb.Run.read("demo", open_folder)
        assert len(run.metrics()) == 1 and "mean reward" in run._repr_html_()
        run.latest_checkpoint().verify()


async def test_a_target_that_becomes_read_only_keeps_the_last_good_checkpoint(open_folder: Path):
    with open_fake(open_folder) as model:
        await train(model, 0.1, 0.2)
        with read_only(model.run.path / "checkpoints"):
            with pytest.raises(
                nb.CheckpointError, match=r"Permission denied\. Earlier checkpoints are intact"
            ):
                await train(model, 0.3)
        assert model.run.step == model.policy_version == 2
        model.run.latest_checkpoint().verify()
        await train(model, 0.3)
        assert [record["step"] for record in model.run.metrics()] == [0, 1, 2]


FULL = """
import asyncio, resource, signal, sys, warnings
warnings.simplefilter("ignore")
base, root, tests = sys.argv[1:]
sys.path.insert(0, tests)
import artnb as nb
from steps import open_model, play
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

async def main():
    with open_model(base, root) as model:
        await nb.train_step(model, await play(model), learning_rate=1e-2)
        groups = await play(model)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        for room in (0, 100, 20_000, 40_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
            try:
                await nb.train_step(model, groups, learning_rate=1e-2)
                print("no error")
            except (nb.CheckpointError, OSError) as error:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
                model.run.latest_checkpoint().verify()
                print(type(error).__name__, model.run.step, model.policy_version, error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        print("then", (await nb.train_step(model, groups, learning_rate=1e-2)).policy_version)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_disk_without_room_leaves_the_last_good_checkpoint(tiny_model: Path, tmp_path: Path):
    command = [sys.executable, "-c", FULL, tiny_model, str(tmp_path), Path(__file__).parent]
    answer = subprocess.run(command, capture_output=True, text=True)
    *refused, then = [line for line in answer.stdout.splitlines() if not line.startswith(("Load", "step"))]
    assert then == "then 2" and len(refused) == 4, answer.stdout + answer.stderr
    for line in refused:
        assert line.split()[1:3] == ["1", "1"] and "File too large" in line and "ree space" in line, line
    with open_model(tiny_model, tmp_path) as model:
        assert (model.run.step, len(model.run.metrics())) == (2, 2)


async def test_a_full_device_is_heard_of_where_rollouts_are_written(tmp_path: Path):
    """/dev/full answers every write as a full disk does."""
    with open_fake(tmp_path) as model:
        await train(model, 0.1)
        trajectories = model.run.path / "trajectories"
        trajectories.mkdir(exist_ok=True)
        (trajectories / "step_000001.jsonl").symlink_to("/dev/full")
        with pytest.raises(OSError, match=r"No space left on device.*already on disk is intact"):
            await play(model)
        (trajectories / "step_000001.jsonl").unlink()
        assert len(await play(model)) == 3
        model.run.latest_checkpoint().verify()


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a mount as Google Drive's in Colab: no sync, no links, no truncation, no locks, slow renames."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    def slow(function: Any) -> Any:
        def later(*paths: Any, **options: Any) -> Any:
            time.sleep(0.02)
            return function(*paths, **options)

        return later

    for name in ("fsync", "truncate", "ftruncate", "link"):
        monkeypatch.setattr(os, name, refuse)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, slow(getattr(os, name)))
    monkeypatch.setitem(sys.modules, "fcntl", None)  # importing it fails


@pytest.mark.usefixtures("drive")
async def test_a_run_on_a_network_mount_needs_neither_locks_nor_sync(tmp_path: Path):
    with open_fake(tmp_path) as model:
        for _ in range(3):
            groups = await play(model)
            groups[0].override(0, 5.0, "better")
            await nb.train_step(model, groups)
        model.rollback(2)
        groups = await play(model)
    path = model.run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"torn')
    with open_fake(tmp_path) as model:
        assert model.run.step == 2 and [r["step"] for r in model.run.metrics()] == [0, 1]
        await train(model, 0.3)
        model.run.fork(3, "branch")
    with open_fake(tmp_path, "branch") as branch:
        assert branch.run.step == 3


def test_no_file_of_ours_locks(repository: Path):
    for path in (repository / "artnb").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"fcntl", "msvcrt", "filelock", "portalocker", "sqlite3"} & set(names), path


def test_a_kill_while_a_run_is_claimed_does_not_lock_it(tmp_path: Path):
    killed = """
import os, sys
from artnb.store import Run
os.fsync = lambda handle: os.kill(os.getpid(), 9)  # the first one is that of the claim
Run.open("demo", sys.argv[1])
"""
    assert subprocess.run([sys.executable, "-c", killed, tmp_path]).returncode == -9
    assert not (tmp_path / "demo" / "owner.json").exists()
    with Run.open("demo", tmp_path) as run:
        assert run.step == 0 and not list(run.path.glob(".*"))
