"""kill -9 at any moment costs no more than the step under way: a campaign over processes that train."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kill_process import GROUP_SIZE, WORDS
from steps import open_model

import artnb as nb
from artnb.store import RunFolder
from artnb.store.token_records import read_token_records

SLOTS = [(f"{{step}} {word}", attempt) for word in WORDS for attempt in range(GROUP_SIZE)]
"""Scenario and attempt of every rollout of a step."""
MOST_FILE_EVENTS, MOST_APPENDS = 150, 40
"""About as many as opening a run and two steps come to."""


class Processes:
    """A process that has imported torch, and starts those that train."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log.txt"
        command = [sys.executable, str(Path(__file__).with_name("kill_process.py"))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.parent = subprocess.Popen(command, **pipes, stderr=subprocess.DEVNULL, env=environment)
        assert self._line() == "ready"

    def _line(self) -> str:
        return self.parent.stdout.readline().strip()

    def train(self, job: dict[str, Any], kill_after: float | None = None) -> tuple[int, float]:
        """Start one; returns its status (9: killed) and how long it lived."""
        self.parent.stdin.write(json.dumps(job | {"log": str(self.log)}) + "\n")
        self.parent.stdin.flush()
        pid = int(self._line())
        started = time.monotonic()
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(pid, signal.SIGKILL)
        status = int(self._line())
        return status, time.monotonic() - started


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    opened = Processes(tmp_path_factory.mktemp("processes"))
    yield opened
    opened.parent.stdin.close()
    opened.parent.wait()


class Campaign:
    """One run, killed again and again."""

    def __init__(self, processes: Processes, base: Path | None, root: Path) -> None:
        self.processes, self.base, self.root = processes, base, root
        self.job = {"base": base and str(base), "root": str(root), "moment": "never", "number": 0}
        self.finished: dict[tuple[int, str, int], str] = {}
        """Every training rollout that ever counted: its step, scenario and attempt -> its id."""

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.root / "demo")

    def go_on(self, steps: int = 10**6, **moment: Any) -> tuple[int, float]:
        kill_after = moment.pop("kill_after", None)
        ended = self.processes.train(self.job | {"steps": steps} | moment, kill_after)
        self._look()
        return ended

    def _look(self) -> None:
        """What one killed process has finished must be what the next ones count."""
        for one in self.run.stored(split="train"):
            slot = (one.step, one.trajectory.scenario_id, one.attempt)
            before = self.finished.setdefault(slot, one.trajectory.id)
            assert before == one.trajectory.id, f"{slot} was finished and made again"

    def kill(self, rng: random.Random, seconds: float) -> str:
        """Let it train and die at a random moment; returns what kind."""
        kind = rng.choice(("time", "time", "file", "file", "append"))
        if kind == "time":
            status, _ = self.go_on(kill_after=rng.random() * seconds)
        else:
            most = MOST_FILE_EVENTS if kind == "file" else MOST_APPENDS
            status, _ = self.go_on(moment=kind, number=rng.randint(1, most))
        assert status == signal.SIGKILL, self.processes.log.read_text()[-3000:]
        return kind

    def check(self, steps: int) -> None:
        """No gap, no duplicate, no torn row, nothing half-written, and every finished rollout was used."""
        run = self.run
        assert [record["step"] for record in run.metrics()] == list(range(steps))
        counted = Counter((s.step, s.trajectory.scenario_id, s.attempt) for s in run.stored(split="train"))
        wanted = [(step, slot.format(step=step), attempt) for step in range(steps) for slot, attempt in SLOTS]
        assert counted == Counter(wanted)
        assert self.finished.keys() <= counted.keys()
        for path in run.path.rglob("*.jsonl"):
            lines = path.read_bytes().splitlines(keepends=True)
            assert all(line.endswith(b"\n") and json.loads(line) for line in lines), path
        assert not [p for p in run.path.rglob(".*") if not p.name.startswith(".nfs")]
        latest = run.latest_checkpoint()
        latest.verify()
        assert latest.step == steps and latest.state["cursor"] == {"next": steps}
        assert not (run.path / "owner.json").exists()


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_loop_of_many_small_steps(processes: Processes, tmp_path: Path, kills: int) -> None:
    run_campaign(Campaign(processes, None, tmp_path), kills)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
async def test_a_real_trainer_goes_on_bit_for_bit(
    processes: Processes, tmp_path: Path, tiny_model: Path, kills: int
) -> None:
    campaign = Campaign(processes, tiny_model, tmp_path)
    steps = run_campaign(campaign, kills)
    with open_model(tiny_model, tmp_path, "twin") as twin:
        for record in campaign.run.metrics():
            groups = recorded_groups(campaign.run, record["step"])
            undisturbed = await nb.train_step(twin, groups, learning_rate=1e-3)
            for name in ("loss", "grad_norm", "entropy", "reward_mean", "samples"):
                assert record.get(name) == undisturbed.metrics.get(name), (record["step"], name)
            tokens = read_token_records(campaign.run.path, record["step"])
            assert tokens.keys() == read_token_records(twin.run.path, record["step"]).keys()
        assert sum("loss" in record for record in campaign.run.metrics()) > steps / 2
        theirs, ours = (folder.latest_checkpoint() for folder in (campaign.run, twin.run))
        assert theirs.step == steps
        for name in ("adapter_model.safetensors", "optimizer.safetensors"):
            assert theirs.files[name]["sha256"] == ours.files[name]["sha256"], name


def run_campaign(campaign: Campaign, kills: int) -> int:
    """Kill it so often; returns how many steps it has finished in the end."""
    seed = random.SystemRandom().randrange(10**6)
    rng, kinds = random.Random(seed), Counter[str]()
    print(f"seed {seed}")
    status, seconds = campaign.go_on(steps=2)
    assert status == 0, campaign.processes.log.read_text()[-3000:]
    for _ in range(kills):
        kinds[campaign.kill(rng, 1.2 * seconds)] += 1
    steps = max(campaign.run.trained_steps, 2) + 1
    assert campaign.go_on(steps=steps)[0] == 0
    print(dict(kinds), f"{steps} steps")
    campaign.check(steps)
    return steps


def recorded_groups(run: RunFolder, step: int) -> list[nb.TrajectoryGroup]:
    """The groups of a step as gather returned them, from what is on disk."""
    found: dict[str, list[tuple[int, nb.Trajectory]]] = {}
    for one in run.stored(step, "train"):
        found.setdefault(one.trajectory.scenario_id, []).append((one.attempt, one.trajectory))
    names = [f"{step} {word}" for word in WORDS]
    return [nb.TrajectoryGroup([t for _, t in sorted(found[n], key=lambda m: m[0])], n) for n in names]
