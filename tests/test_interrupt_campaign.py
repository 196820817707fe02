"""■ at any moment of the loop, or of loading, costs no more than the step under way: many, in a kernel."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kernel_tools import Cell, Kernel, running_kernel

from artnb.judging.loopback import Asked, LoopbackJudge, Says, answer

SETUP = """
import sys, warnings
sys.path.insert(0, {tests!r})
warnings.simplefilter("ignore")
import json
import artnb as nb
from interrupt_cells import facts, one_reply, tell_where_on_signal, train_on_and_on
from steps import open_model
tell_where_on_signal("where.txt")
"""
MAKE = "model = open_model({base!r}, '.')"
TRAIN = "print('begun', flush=True)\nawait train_on_and_on(model, {judge!r})"
LOAD = "print('begun', flush=True)\nmodel.close()\n" + MAKE + "\nprint('loaded', flush=True)"
FACTS = "print(json.dumps(facts(model)))"
ENDED = ("Interrupted", "KeyboardInterrupt", "CancelledError")
PATIENCE = 10.0
"""Seconds until the cell has ended; 2 on an idle machine."""


def some_order(asked: Asked) -> Says:
    """A judge that takes a moment and prefers one attempt to another for no reason."""
    scores = {name: (sum(map(ord, str(entries))) % 11) / 10 for name, entries in asked.attempts.items()}
    return Says(answer(scores), delay=0.02)


class Campaign:
    """A kernel with a real model, the loop over it, and how long its parts take here."""

    def __init__(self, kernel: Kernel, base: Path, judge: LoopbackJudge, folder: Path) -> None:
        self.kernel, self.folder = kernel, folder
        self.make = MAKE.format(base=str(base))
        self.train = TRAIN.format(judge={"judge": "some order", **judge.access})
        self.load = LOAD.format(base=str(base))
        kernel.run(SETUP.format(tests=str(Path(__file__).parent)))
        kernel.run(self.make)
        kernel.start(self.train).prints("step 0")
        self.stop()
        self.step_seconds = self._time(self.train, "step 3", after="step 1") / 2
        self.stop()
        self.load_seconds = self._time(self.load, "loaded", after="begun")
        self.before = self.facts()

    def _time(self, code: str, until: str, *, after: str) -> float:
        cell = self.kernel.start(code)
        cell.prints(after)
        started = time.monotonic()
        cell.prints(until)
        return time.monotonic() - started

    def stop(self) -> None:
        self.kernel.interrupt()
        self.kernel.run("pass")

    def facts(self) -> dict[str, Any]:
        return json.loads(self.kernel.run(FACTS))

    def interrupt(self, rng: random.Random) -> str:
        """Press ■ at one random moment; returns in which primitive it was."""
        is_loading = rng.random() < 0.2
        cell = self.kernel.start(self.load if is_loading else self.train)
        seconds = self.load_seconds if is_loading else 1.5 * self.step_seconds
        cell.prints("begun")  # an idle kernel ignores ■
        time.sleep(seconds * rng.random())
        self.kernel.interrupt()
        pressed = time.monotonic()
        try:
            reply = cell.reply()
        except AssertionError as error:
            self.kernel.manager.signal_kernel(signal.SIGUSR1)
            time.sleep(1)
            raise AssertionError(f"{cell.text}\n{(self.folder / 'where.txt').read_text()}") from error
        assert time.monotonic() - pressed < PATIENCE
        if is_loading and reply["status"] == "error":
            self.kernel.run(self.make)
        return where(cell, reply)

    def check(self, moment: str) -> None:
        """The invariant, whatever was interrupted; and the next cell works."""
        now = self.facts()
        at = f"after ■ in {moment}: {now}"
        for nothing in ("weights_differ", "gradients", "engine_differs", "under_way", "queued", "tasks"):
            assert not now[nothing], at
        for nothing in ("torn_lines", "leftovers", "repeated_rollouts", "failed_rollouts"):
            assert not now[nothing], at
        assert len(set(now["versions"])) == len(set(now["steps"])) == 1 and now["metrics_in_order"], at
        assert now["models"] == 1, at
        assert now["threads"] == self.before["threads"], at
        assert now["tensors"] <= self.before["tensors"] + 100, at
        self.kernel.run("await one_reply(model)")


def where(cell: Cell, reply: dict[str, Any]) -> str:
    """What ■ cut short, as the cell's error says it."""
    if reply["status"] == "ok":
        return "loading, too late"
    assert reply["ename"] in ENDED, (reply["ename"], reply["evalue"], reply["traceback"])
    if reply["ename"] == "Interrupted":
        return " ".join(reply["evalue"].split()[:2]).rstrip(":")
    frames = re.findall(r"(\w+\.py)\S*:\d+", re.sub(r"\x1b\[[\d;]*m", "", "".join(reply["traceback"])))
    return f"between two primitives ({frames[-1] if frames else 'the cell'})"


@pytest.fixture(scope="module")
def campaign(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    folder = tmp_path_factory.mktemp("campaign")
    with LoopbackJudge(some_order) as judge, running_kernel(folder, OMP_NUM_THREADS="1") as kernel:
        yield Campaign(kernel, tiny_model, judge, folder)


@pytest.mark.parametrize("presses", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_any_moment(campaign: Campaign, presses: int) -> None:
    seed = random.SystemRandom().randrange(10**6)
    rng, seen = random.Random(seed), Counter[str]()
    print(f"seed {seed}")
    for _ in range(presses):
        moment = campaign.interrupt(rng)
        seen[moment] += 1
        campaign.check(moment)
    print(dict(seen))
    first = campaign.facts()["steps"][0]
    cell = campaign.kernel.start(campaign.train)
    cell.prints(f"step {first + 1}")
    campaign.stop()
