"""Cells may be run again in any order: one model, each step once, no data twice without a word."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import socket
import threading
import warnings
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from steps import copied, group, open_fake, open_model, play

import artnb as nb
from artnb.backends.local import LocalBackend
from artnb.interrupts import uninterrupted


class Notebook:
    """The cells of a notebook over one namespace; a cell that fails leaves the rest as it was."""

    def __init__(self, base: Path, root: Path) -> None:
        self.base, self.root = base, root
        self.model: nb.Model | None = None
        self.groups: nb.Groups | None = None
        self.trained = Counter[str]()
        """How often each trajectory was trained on without a word."""
        self.refused = Counter[str]()

    async def load(self) -> None:
        self.model = open_model(self.base, self.root)

    async def gather(self) -> None:
        self.groups = await play(self.model, group_size=2)

    async def judge(self) -> None:
        for one in self.groups:
            one.override(0, 1.5, "better")

    async def train(self) -> None:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            result = await nb.train_step(self.model, self.groups, learning_rate=1e-2, max_staleness=1)
        if not any("trained on before" in str(one.message) for one in heard) and not result.skipped:
            self.trained.update(t.id for t in self.groups.trajectories)

    async def loop(self) -> None:
        for _ in self.model.run.steps(self.model.run.step + 1):
            await self.gather()
            await self.train()

    async def evaluate(self) -> None:
        await play(self.model, group_size=1, split="test")

    async def go_back(self) -> None:
        before = self.model.run.step
        if self.model.rollback("best") < before:
            self.trained.clear()

    async def close(self) -> None:
        self.model.close()

    async def serve(self) -> None:
        self.model.serve()


CELLS = ("load", "gather", "judge", "train", "train", "loop", "evaluate", "go_back", "close", "serve")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", [1, None])
async def test_any_order(tiny_model: Path, tmp_path: Path, seed: int | None):
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    print(f"seed {seed}")
    rng, notebook = random.Random(seed), Notebook(tiny_model, tmp_path)
    await notebook.load()
    await notebook.loop()
    done = Counter[str]()
    for _ in range(40):
        is_closed = notebook.model.backend._closed
        name = "load" if is_closed and rng.random() < 0.5 else rng.choice(CELLS)
        try:
            await getattr(notebook, name)()
            done[name] += 1
        except nb.ArtnbError as error:
            notebook.refused[f"{name}: {type(error).__name__}"] += 1
        check(notebook, name in ("load", "close"))
    print(dict(done), dict(notebook.refused))
    assert done["train"] + done["loop"] >= 3
    await notebook.load()
    await notebook.loop()
    notebook.model.close()


def check(notebook: Notebook, may_have_loaded: bool) -> None:
    if may_have_loaded:
        gc.collect()
        models = [o for o in gc.get_objects() if type(o) is LocalBackend and not o._closed]
        assert len(models) <= 1, "a second model on the device"
    run = nb.Run.read("demo", notebook.root)
    assert [record["step"] for record in run.metrics()] == list(range(run.trained_steps))
    assert max(notebook.trained.values(), default=1) == 1, "trained twice without a word"


async def test_training_again_on_the_same_rollouts_says_so(tmp_path: Path):
    with open_fake(tmp_path) as model:
        groups = await play(model)
        for one in groups:
            one.override(0, 9.0, "better")
        await nb.train_step(model, groups)
        with pytest.raises(nb.StalePolicy):
            await nb.train_step(model, groups)
        with pytest.warns(UserWarning, match="12 of these trajectories were trained on before"):
            again = await nb.train_step(model, groups, max_staleness=1)
        assert again.metrics["trajectories_again"] == 12
        model.rollback(1)  # undone, so once only
        with pytest.warns(UserWarning, match="trained on before"):
            await nb.train_step(model, groups, max_staleness=1)
        fresh = await nb.train_step(model, await with_rewards(model))
        assert "trajectories_again" not in fresh.metrics


async def with_rewards(model: Any) -> nb.Groups:
    groups = await play(model)
    for one in groups:
        one.override(0, 9.0, "better")
    return groups


async def test_a_step_that_was_undone_is_no_first_time(tmp_path: Path, monkeypatch: Any):
    with open_fake(tmp_path) as model:
        groups = await with_rewards(model)

        async def fail(folder: Path) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(model.backend, "save", fail)
            with pytest.raises(nb.CheckpointError):
                await nb.train_step(model, groups)
        assert "trajectories_again" not in (await nb.train_step(model, groups)).metrics


async def test_an_example_that_is_shown_again_is_counted(tmp_path: Path):
    example = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    other = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]
    with open_fake(tmp_path) as model:
        assert "examples_again" not in (await nb.sft_step(model, [example])).metrics
        assert (await nb.sft_step(model, [example, other])).metrics["examples_again"] == 1


async def test_a_closed_model_serves_nobody(tmp_path: Path):
    with open_fake(tmp_path) as model:
        pass
    with pytest.raises(nb.ArtnbError, match="is closed"):
        model.serve()
    assert not any(thread.name == "artnb-serve" for thread in threading.enumerate())


async def test_a_server_is_opened_once(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open_fake(tmp_path) as model:
        server = model.serve(port)
        assert model.serve(port) is server and model.serve() is server
        server.close()
        again = model.serve(port)
        assert again is not server and again.port == port and again.is_open
    assert not again.is_open


async def test_an_interrupt_while_a_model_loads_is_heard_once_it_is_there(
    tiny_model: Path, tmp_path: Path, monkeypatch: Any
):
    load, loads = LocalBackend._load, []

    def pressed(self: Any, *arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        load(self, *arguments)
        loads.append(self)

    monkeypatch.setattr(LocalBackend, "_load", pressed)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(nb.Interrupted, match="loading a model cannot be cut short: it is finished"):
        open_model(tiny_model, tmp_path)
    assert signal.getsignal(signal.SIGINT) is before
    model = open_model(tiny_model, tmp_path)  # the cell is run again
    assert loads == [model.backend], "loaded once"
    assert (await play(model)).status == "complete"
    close = model.backend.close

    async def pressed_too() -> None:
        signal.raise_signal(signal.SIGINT)
        await close()

    monkeypatch.setattr(model.backend, "close", pressed_too)
    with pytest.raises(nb.Interrupted, match="closing a model"):
        model.close()
    assert not (model.run.path / "owner.json").exists()


@pytest.mark.usefixtures("one_thread")
async def test_the_traceback_of_an_interrupted_step_does_not_keep_a_closed_model_in_memory(
    tiny_model: Path, tmp_path: Path, monkeypatch: Any
):
    model = open_model(tiny_model, tmp_path)
    groups, in_compute = await play(model), LocalBackend._in_compute
    weights = [weakref.ref(p) for p in model.backend.trainer.parameters.values()]

    async def pressed(self: Any, work: Any) -> Any:
        if "forward_backward" in repr(work):
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        return await in_compute(self, work)

    monkeypatch.setattr(LocalBackend, "_in_compute", pressed)
    with pytest.raises(nb.Interrupted) as caught:  # a kernel keeps the last error, and its frames
        await nb.train_step(model, groups, microbatch_tokens=16)
    model.close()
    del model
    gc.collect()
    assert not [ref for ref in weights if ref() is not None] and caught.traceback


def test_a_second_interrupt_ends_what_cannot_be_cut_short():
    with pytest.raises(KeyboardInterrupt), uninterrupted("waiting"):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def test_the_same_cell_twice_at_once_takes_the_step_once(tmp_path: Path):
    with open_fake(tmp_path) as model:
        groups = [group(0, 1)]
        steps = [nb.train_step(model, copied(groups)) for _ in range(2)]
        first, second = await asyncio.gather(*steps, return_exceptions=True)
        assert first.step == 0 and isinstance(second, nb.RunInUse) and model.run.step == 1
