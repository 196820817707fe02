"""How does one kernel bear thousands of rollouts at once? Time, memory, and how late the notebook hears.

Rollouts of ten turns, each with a tool call's result to read, run through ``gather`` and the client in
this process on a random two-layer model. What grows: seconds, and resident memory. What must not: the
event loop's lag, which is how long a click, a heartbeat or ■ waits.

    python tests/benchmarks/load.py [--rollouts 10 100 500 2000] [--turns 10] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import Machine, arguments, peak_memory, quiet_output, report, reset_peak_memory, table
from tiny import make_tiny_tokenizer, write_tiny_model

import artnb as nb

TOKENS = 8
TICK = 0.005
COLUMNS = [
    ("rollouts", "rollouts", ",d"),
    ("seconds", "seconds", ".2f"),
    ("turns_per_second", "turns/s", ",.0f"),
    ("failed", "failed", "d"),
    ("lag_p50_ms", "lag p50 ms", ".1f"),
    ("lag_p99_ms", "p99", ".1f"),
    ("lag_max_ms", "max", ".1f"),
    ("memory_mib", "memory MiB", ",.0f"),
    ("kib_a_rollout", "KiB a rollout", ".0f"),
    ("chart", "seconds a rollout, and p99", "s"),
]


def make_rollout(turns: int) -> Any:
    """A model that calls a tool every turn, and reads what it says; what it says means nothing."""

    async def rollout(model: nb.Model, scenario: nb.Scenario) -> nb.Trajectory:
        trajectory = nb.Trajectory(
            [{"role": "user", "content": f"scenario {scenario.id}"}], scenario_id=scenario.id
        )
        for turn in range(turns):
            reply = await model.client.chat.completions.create(
                model=model.name, messages=trajectory.messages(), max_tokens=TOKENS, stop=[]
            )
            trajectory.messages_and_choices.append(reply.choices[0])
            if turn < turns - 1:
                told = {"role": "user", "content": f"result {turn}"}
                trajectory.messages_and_choices.append(told)
        trajectory.reward = len(trajectory.messages()) % 2
        return trajectory

    return rollout


async def measure(model: nb.Model, rollouts: int, turns: int) -> dict[str, Any]:
    """One gather of so many rollouts, all at once, with a ticking task beside it."""
    lags: list[float] = []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK)
            lags.append(time.perf_counter() - before - TICK)

    base = reset_peak_memory()
    ticker = asyncio.create_task(tick())
    started = time.perf_counter()
    groups = await nb.gather(
        make_rollout(turns),
        [nb.Scenario(str(number)) for number in range(max(1, rollouts // 8))],
        model=model,
        group_size=min(8, rollouts),
        concurrency=rollouts,
        progress=False,
    )
    seconds = time.perf_counter() - started
    ticker.cancel()
    peak = peak_memory()
    asked = max(1, rollouts // 8) * min(8, rollouts)
    played = [trajectory for group in groups for trajectory in group.trajectories]
    failed = sum(trajectory.error is not None for trajectory in played)
    if len(played) != asked:
        raise AssertionError(f"{asked - len(played)} of {asked} rollouts were lost")
    lags.sort()
    used = None if base is None or peak is None else peak - base
    return {
        "rollouts": asked,
        "failed": failed,
        "seconds": seconds,
        "turns_per_second": asked * turns / seconds,
        "ms_a_rollout": 1e3 * seconds / asked,
        "lag_p50_ms": 1e3 * lags[len(lags) // 2],
        "lag_p99_ms": 1e3 * lags[int(0.99 * (len(lags) - 1))],
        "lag_max_ms": 1e3 * lags[-1],
        "memory_mib": None if used is None else used / 2**20,
        "kib_a_rollout": None if used is None else used / 2**10 / asked,
    }


def draw(rows: list[dict[str, Any]]) -> None:
    """A bar for the seconds a rollout, and one for the lag: a hundred milliseconds are twenty blocks."""
    longest = max(row["ms_a_rollout"] for row in rows)
    for row in rows:
        bar = "█" * max(1, round(12 * row["ms_a_rollout"] / longest))
        lag = "▒" * max(1, round(row["lag_p99_ms"] / 5))
        row["chart"] = f"{bar:12} {lag}"


async def run(options: argparse.Namespace, folder: str, root: str) -> dict[str, Any]:
    with nb.Model(folder, run="load", root=root) as model:
        await measure(model, 8, 2)  # imports and caches
        rows = [await measure(model, count, options.turns) for count in options.rollouts]
    draw(rows)
    first, last = rows[0], rows[-1]
    return {
        "benchmark": "load",
        "turns": options.turns,
        "tokens_a_turn": TOKENS,
        "rows": rows,
        "growth": last["ms_a_rollout"] / first["ms_a_rollout"],
        "worst_lag_p99_ms": max(row["lag_p99_ms"] for row in rows),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rollouts", type=int, nargs="+", help="default: 10 100 500 2000")
    parser.add_argument("--turns", type=int, help="default: 10")
    options = parser.parse_args()
    options.rollouts = options.rollouts or ([8, 16] if options.quick else [10, 100, 500, 2000])
    options.turns = options.turns or (2 if options.quick else 10)
    machine = Machine()
    with tempfile.TemporaryDirectory() as place, quiet_output():
        folder = options.model or str(write_tiny_model(Path(place) / "tiny", make_tiny_tokenizer()))
        figures = asyncio.run(run(options, folder, place))
    text = (
        f"{options.turns} turns of {TOKENS} tokens a rollout, all rollouts at once\n"
        + table(figures["rows"], COLUMNS)
        + f"\nseconds a rollout, most against fewest at once: {figures['growth']:.2f}"
    )
    report(machine, figures, text, only_json=options.json)


if __name__ == "__main__":
    main()
