"""The cells of test_interrupt_campaign.py: a loop over a real model, and what must hold between two cells."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from steps import play

import artnb as nb
from artnb.backends.local import LocalBackend
from artnb.undo import is_under_way


async def train_on_and_on(model: nb.Model, judge: dict[str, Any]) -> None:
    """The loop of a notebook: gather, judge, train (which publishes and saves)."""
    for step in model.run.steps(100_000):
        groups = await play(model, group_size=3)
        groups = await nb.judge(groups, model=model, cache=False, progress=False, **judge)
        await nb.train_step(model, groups, learning_rate=1e-2)
        print("step", step, flush=True)


async def one_reply(model: nb.Model) -> None:
    """What a next cell may do."""
    messages = [{"role": "user", "content": "still there?"}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=3)
    turn = nb.Turn.from_choice(reply.choices[0])
    assert turn.policy_version == model.policy_version and len(turn.completion_ids) <= 3


def tell_where_on_signal(path: str) -> None:
    """On SIGUSR1 write down where every task and thread is: for a cell that does not end."""
    loop = asyncio.get_running_loop()

    def tell(*_: Any) -> None:
        with Path(path).open("w") as file:
            for task in asyncio.all_tasks(loop):
                task.print_stack(file=file)
            faulthandler.dump_traceback(file)

    signal.signal(signal.SIGUSR1, tell)


def facts(model: nb.Model) -> dict[str, Any]:
    """What a person would want to be sure of between two cells."""
    backend, run = model.backend, model.run
    latest = run.latest_checkpoint()
    if latest is not None:
        latest.verify()
    trained = {name: p.detach() for name, p in backend.trainer.parameters.items()}
    served = backend.engine.call(lambda: backend.engine.holds(backend.trainer.merged_weights())).result()
    return {
        "weights_differ": [] if latest is None else _differing(backend, latest.path, trained),
        "gradients": sum(p.grad is not None for p in backend.trainer.parameters.values()),
        "engine_differs": served,
        "versions": [
            backend.policy_version,
            backend.engine.version,
            0 if latest is None else latest.state["policy_version"],
        ],
        "steps": [run.step, 0 if latest is None else latest.step, len(run.metrics())],
        "metrics_in_order": [record["step"] for record in run.metrics()] == list(range(run.step)),
        "under_way": is_under_way(backend),
        "queued": len(list(backend.engine._futures())),
        **_files(run),
        **_process(),
    }


def _differing(backend: Any, folder: Any, trained: dict[str, torch.Tensor]) -> list[str]:
    """Trained weights that are not those of the last finished step's checkpoint, bit for bit."""
    saved = safetensors.torch.load_file(folder / backend.trainer.weights_file)
    begin = backend.trainer.names_begin
    return [name for name, weight in trained.items() if not torch.equal(saved[begin + name], weight)]


def _files(run: nb.Run) -> dict[str, Any]:
    """Torn lines, half-written files, rollouts that count twice, failures that were none."""
    torn, places, failed = 0, Counter(), 0
    for path in run.path.rglob("*.jsonl"):
        lines = path.read_bytes().splitlines(keepends=True)
        torn += sum(not line.endswith(b"\n") or json.loads(line) is None for line in lines)
    for one in run.stored():
        places[one.gather_id, one.trajectory.scenario_id, one.attempt] += 1
        failed += one.trajectory.error is not None
    left = [p.name for p in run.path.rglob(".*") if p.name.endswith((".tmp", ".old"))]
    repeated = sum(count > 1 for count in places.values())
    return {"torn_lines": torn, "leftovers": left, "repeated_rollouts": repeated, "failed_rollouts": failed}


def _process() -> dict[str, Any]:
    # the interpreter keeps the last error with its traceback, and that the frames of an interrupted cell
    sys.last_value = sys.last_traceback = None
    gc.collect()
    objects = gc.get_objects()
    threads = Counter(t.name.rstrip("0123456789").rstrip("_-") for t in threading.enumerate())
    threads["asyncio"] = 0  # the loop's own pool, which stays
    tasks = [task for task in asyncio.all_tasks() if "artnb" in repr(task.get_coro())]
    return {
        "threads": {name: count for name, count in sorted(threads.items()) if count},
        "tasks": [repr(task) for task in tasks],
        "tensors": sum(issubclass(type(o), torch.Tensor) for o in objects),
        "models": sum(type(o) is LocalBackend and not o._closed for o in objects),
    }
