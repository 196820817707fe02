"""What does a dashboard cost on a long run? Time to attach, an update, bytes sent, overhead, saved size.

    python tests/benchmarks/dashboard.py --steps 10000 --loop 300

Prints one line of JSON. The long run is written by hand with numbers of a real step's size; the overhead is
measured on a training loop over FakeBackend whose steps take as long as those of a small model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import artnb as nb
from artnb.dashboard import widget
from artnb.dashboard.png import can_draw, views_png
from artnb.dashboard.twin import twin_html
from artnb.store import Run

_NAMES = (
    *("loss", "entropy", "kl_k1", "kl_k3", "ratio_p05", "ratio_p50", "ratio_p95", "ratio_max", "grad_norm"),
    *("effective_sample_size", "fraction_capped", "logprob_gap_mean", "logprob_gap_max", "learning_rate"),
    *("tokens_per_second_gather", "tokens_per_second_train", "seconds_gather", "seconds_train", "seconds"),
    *("reward_min", "reward_max", "reward_std", "advantage_mean", "advantage_std", "tokens", "packed_tokens"),
    *("memory_gb", "memory_peak_gb", "probe_gap_mean", "probe_gap_max", "truncated", "staleness"),
)


class Wire:
    """Counts what would go to the browser."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def send(self, message: Any) -> None:
        self.sizes.append(len(json.dumps(message)))

    def close(self) -> None:
        pass


def step_record(step: int, draw: random.Random) -> dict[str, Any]:
    values = {name: draw.random() for name in _NAMES}
    return {"kind": "train", "step": step, "policy_version": step + 1, "trajectories": 64, **values} | {
        "reward_mean": min(1.0, step / 8000) * 0.8 + 0.2 * draw.random()
    }


def long_run(root: Path, steps: int) -> Run:
    """A run with so many finished steps, open in this process."""
    run, draw = Run.open("long", root, identity={"base_model": "none"}), random.Random(0)
    for step in range(steps):
        run.append_metrics(step_record(step, draw))
    return run


def follow(run: Run, updates: int) -> dict[str, Any]:
    """Attach to the run, then let it grow step by step."""
    dashboard, wire = nb.Dashboard(run), Wire()
    dashboard.widget = wire
    dashboard._hear(None, {"type": "ready", "view": "one"})
    started = time.perf_counter()
    dashboard._look_at_everything()
    looked = time.perf_counter() - started
    for message in dashboard._news():
        wire.send(message)
    attached, whole = time.perf_counter() - started, list(wire.sizes)
    wire.sizes.clear()
    costs, draw = [], random.Random(1)
    for _ in range(updates):
        run.append_metrics(step_record(run.step, draw))
        started = time.thread_time()
        dashboard._look()
        for message in dashboard._news():
            wire.send(message)
        costs.append(time.thread_time() - started)
    saved = len(twin_html(dashboard.views))
    return {
        "look_seconds": looked,
        "attach_seconds": attached,
        "attach_messages": len(whole),
        "attach_bytes": sum(whole),
        "largest_message_bytes": max(whole + wire.sizes),
        "update_ms": 1000 * statistics.median(costs),
        "update_bytes": statistics.median(wire.sizes),
        "saved_html_bytes": saved,
        "saved_png_bytes": len(views_png(dashboard.views)) if can_draw() else None,
    }


async def rollout(model: Any, scenario: nb.Scenario) -> nb.Trajectory:
    messages = [{"role": "user", "content": scenario.id}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=8)
    return nb.Trajectory([*messages, reply.choices[0]], reward=random.random())


async def loop(root: Path, name: str, steps: int, *, is_shown: bool) -> float:
    """Seconds of processor that a loop takes, with or without a dashboard that somebody looks at."""
    scenarios = [nb.Scenario(id=f"task {i}") for i in range(8)]
    with nb.Model(run=name, root=root, backend=nb.FakeBackend(delay=0.05)) as model:
        if is_shown:
            dashboard = nb.Dashboard(model.run)
            dashboard.widget, dashboard._loop = Wire(), asyncio.get_running_loop()
            dashboard._hear(None, {"type": "ready", "view": "one"})
            dashboard._start()
        started, used = time.perf_counter(), time.process_time()
        for _ in model.run.steps(steps):
            groups = await nb.gather(rollout, scenarios, model=model, group_size=8, progress=False)
            await nb.train_step(model, groups)
        seconds, used = time.perf_counter() - started, time.process_time() - used
        if is_shown:
            dashboard.close()
    return used / seconds


async def overhead(root: Path, steps: int, rounds: int) -> dict[str, float]:
    """Processor time of the loop with a dashboard against without, in rounds that take turns."""
    shares: dict[bool, list[float]] = {True: [], False: []}
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for is_shown in (True, False) if number % 2 else (False, True):
            started = time.perf_counter()
            shares[is_shown].append(await loop(root, f"{number} {is_shown}", steps, is_shown=is_shown))
            times[is_shown].append(time.perf_counter() - started)
    with_it, without = (statistics.median(times[is_shown]) for is_shown in (True, False))
    return {
        "loop_seconds_without": without,
        "loop_seconds_with": with_it,
        "overhead_percent": 100 * (with_it / without - 1),
        "processor_percent": 100 * (statistics.median(shares[True]) - statistics.median(shares[False])),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=10_000)
    arguments.add_argument("--updates", type=int, default=100)
    arguments.add_argument(
        "--loop", type=int, default=100, help="steps of the loop whose overhead is measured"
    )
    arguments.add_argument("--rounds", type=int, default=5)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with long_run(Path(folder), given.steps) as run:
            told = follow(run, given.updates)
        told |= asyncio.run(overhead(Path(folder), given.loop, given.rounds))
    told |= {"widget_bytes": len(widget._widget_class()._esm) + len(widget._widget_class()._css)}
    print(json.dumps({"benchmark": "dashboard", "steps": given.steps, **told}))


if __name__ == "__main__":
    main()
