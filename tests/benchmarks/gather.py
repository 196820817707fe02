"""How much of the raw engine's rate is left when ``gather`` drives it through the client?

``gather`` plays the two-turn tool lookup. Its requests are then replayed to the engine alone: the
same prompts, the same number of sampled tokens, the second turn of an episode once its first one has
ended. Before either, the weights are published again, as every training step does, so that nothing
is remembered from one to the other.

    python tests/benchmarks/gather.py [--scenarios 16] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "environments"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import Machine, arguments, median, model_folder, quiet_output, report, table

import artnb as nb
from artnb.backends.base import SampleRequest
from artnb.types import Groups, Turn


def replayable(turn: Turn) -> nb.SamplingConfig:
    """The turn's sampling with its length fixed: the same stop strings to look for, none that occurs."""
    given = turn.sampling
    stop = tuple("\x00" * len(text) for text in given["stop"])
    return nb.SamplingConfig(temperature=given["temperature"], max_tokens=len(turn.completion_ids), stop=stop)


async def replay(backend: Any, turns: list[Turn]) -> None:
    """One episode without anything around it: each turn continues what is sampled now."""
    before: Turn | None = None
    own: tuple[int, ...] = ()
    for turn in turns:
        prompt = turn.prompt_ids
        if before is not None and prompt[: len(before.ids)] == before.ids:
            prompt = own + prompt[len(before.ids) :]
        result = await backend.sample(SampleRequest(prompt, replayable(turn)))
        own, before = prompt + result.completion_ids, turn


class Watch:
    """Wall seconds, CPU seconds of this thread, which runs the event loop, and the engine's work."""

    def __init__(self, counters: dict[str, int]) -> None:
        self._counters = counters

    def __enter__(self) -> Watch:
        self._before = dict(self._counters)
        self._wall, self._cpu = time.perf_counter(), time.thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, self.cpu = time.perf_counter() - self._wall, time.thread_time() - self._cpu
        self.work = {name: count - self._before[name] for name, count in self._counters.items()}


async def measure(
    model: nb.Model, scenarios: list[nb.Scenario], rollout: Any, group_size: int
) -> dict[str, Any]:
    """One gather and the replay of its requests."""
    await model.backend.publish_weights(model.policy_version)
    with Watch(model.backend.engine.counters) as gathering:
        groups: Groups = await nb.gather(
            rollout, scenarios, model=model, group_size=group_size, progress=False
        )
    episodes = [trajectory.turns for trajectory in groups.trajectories]
    await model.backend.publish_weights(model.policy_version)
    with Watch(model.backend.engine.counters) as replaying:
        await asyncio.gather(*(replay(model.backend, turns) for turns in episodes))
    turns = [turn for episode in episodes for turn in episode]
    return {
        "rollouts": len(episodes),
        "turns": len(turns),
        "prompt_tokens": sum(len(turn.prompt_ids) for turn in turns),
        "sampled_tokens": sum(len(turn.completion_ids) for turn in turns),
        "gather_seconds": gathering.seconds,
        "raw_seconds": replaying.seconds,
        "gather_computed_prompt_tokens": gathering.work["computed_prompt_tokens"],
        "raw_computed_prompt_tokens": replaying.work["computed_prompt_tokens"],
        "gather_engine_steps": gathering.work["steps"],
        "raw_engine_steps": replaying.work["steps"],
        "gather_loop_cpu_ms_per_turn": 1e3 * gathering.cpu / len(turns),
        "raw_loop_cpu_ms_per_turn": 1e3 * replaying.cpu / len(turns),
        "gather_over_raw": replaying.seconds / gathering.seconds,
    }


async def gather_and_replay(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    environment = nb.load_environment("tool_lookup")
    with tempfile.TemporaryDirectory() as root, nb.Model(options.model, run="benchmark", root=root) as model:
        play = partial(measure, model, rollout=environment.rollout, group_size=options.group_size)
        await play(environment.scenarios("train", min(2, options.scenarios), seed=0))  # imports and pools
        rows = [
            await play(environment.scenarios("train", options.scenarios, seed=repeat + 1))
            for repeat in range(options.repeats)
        ]
        dtype = model.backend.describe()["dtype"]
    turns, seconds = median([r["turns"] for r in rows]), median([r["gather_seconds"] for r in rows])
    return {
        "benchmark": "gather",
        "model": folder if options.model else "bundled",
        "dtype": dtype,
        "environment": "tool_lookup",
        "group_size": options.group_size,
        "rows": rows,
        "turns_per_second": turns / seconds,
        "gather_over_raw": median([r["gather_over_raw"] for r in rows]),
    }


COLUMNS = (
    ("rollouts", "rollouts", "d"),
    ("turns", "turns", "d"),
    ("prompt_tokens", "prompt", "d"),
    ("sampled_tokens", "sampled", "d"),
    ("gather_seconds", "gather s", ".2f"),
    ("raw_seconds", "raw s", ".2f"),
    ("gather_computed_prompt_tokens", "gather computed", "d"),
    ("raw_computed_prompt_tokens", "raw computed", "d"),
    ("gather_engine_steps", "gather steps", "d"),
    ("raw_engine_steps", "raw steps", "d"),
    ("gather_loop_cpu_ms_per_turn", "gather loop ms/turn", ".2f"),
    ("raw_loop_cpu_ms_per_turn", "raw loop ms/turn", ".2f"),
    ("gather_over_raw", "gather/raw", ".3f"),
)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--scenarios", type=int, help="groups (default 16)")
    parser.add_argument("--group-size", type=int, help="rollouts in a group (default 8)")
    options = parser.parse_args()
    options.repeats = options.repeats or (1 if options.quick else 5)
    options.scenarios = options.scenarios or (2 if options.quick else 16)
    options.group_size = options.group_size or (2 if options.quick else 8)
    machine = Machine()
    with quiet_output():
        folder = model_folder(options)
        figures = asyncio.run(gather_and_replay(options, folder))
    text = (
        f"tool_lookup on {figures['model']}, {figures['dtype']}\n{table(figures['rows'], COLUMNS)}\n"
        f"gather runs at {figures['gather_over_raw']:.3f} of the raw engine's rate"
    )
    report(machine, figures, text, only_json=options.json)


if __name__ == "__main__":
    main()
