"""How fast is a training step, how much memory does it take, and what does sharing prefixes gain?

One group of completions of a common prompt, as token ids: forward, backward and update of a LoRA
adapter of rank 16 on all linear layers, with and without computing the prompt once. Tokens a second
count every row in full, so that both ways are measured against the same work.

    python tests/benchmarks/train_step.py [--trainer peft|unsloth] [--shapes] [--peer] [--quick] [--json]

``--shapes`` adds 32 completions of 32 tokens on 128, and 16 of ragged lengths up to 256 on 256.
``--peer`` adds 8 completions of 256 tokens on a 512-token prompt, and runs it also with TRL's
GRPOTrainer on Unsloth's CPU backend in a child process; ``--peer-python`` names an interpreter that has
them (``make test`` installs both). Both update the same adapter; ours also publishes it to the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import (
    Machine,
    arguments,
    matmul_limit,
    median,
    model_folder,
    on_compute_thread,
    peak_memory,
    products,
    quiet_output,
    report,
    reset_peak_memory,
    run_peer,
    table,
)

from artnb import LoraConfig, TrainConfig
from artnb.backends.local import LocalBackend
from artnb.backends.stack import choose, prepare
from artnb.batch import loss_denominator
from artnb.types import Sample

LORA = LoraConfig(rank=16, alpha=32.0)
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A group: completions of one prompt."""

    prompt: int
    completion: int
    group: int
    ragged: bool = False
    """Lengths fall evenly from ``completion`` to a quarter of it."""

    @property
    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.completion] * self.group
        least = self.completion // 4
        step = (self.completion - least) / max(1, self.group - 1)
        return [round(self.completion - step * row) for row in range(self.group)]

    @property
    def sampled_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def row_tokens(self) -> int:
        return self.group * self.prompt + self.sampled_tokens

    def __str__(self) -> str:
        return f"{self.group} x ({self.prompt}+{'<=' if self.ragged else ''}{self.completion})"

    def samples(self, vocabulary: int, seed: int) -> list[Sample]:
        """Rows of random tokens with advantages of mean zero."""
        draw = Random(seed)
        prompt = draw.choices(range(5, vocabulary - 5), k=self.prompt)
        return [
            self._sample(prompt + draw.choices(range(5, vocabulary - 5), k=length), row)
            for row, length in enumerate(self.lengths)
        ]

    def _sample(self, ids: list[int], row: int) -> Sample:
        def on_sampled(value: Any, otherwise: Any) -> tuple[Any, ...]:
            return (otherwise,) * self.prompt + (value,) * (len(ids) - self.prompt)

        advantage = row - (self.group - 1) / 2
        return Sample(
            ids_T=tuple(ids),
            is_sampled_T=on_sampled(True, False),
            logprobs_T=on_sampled(-1.0, 0.0),
            advantages_T=on_sampled(advantage, 0.0),
            weights_T=on_sampled(1.0, 0.0),
            trajectory_id=f"row {row}",
            group=0,
        )


class Bench:
    """A backend, and the step that is timed."""

    def __init__(self, folder: str, trainer: str) -> None:
        self.backend = LocalBackend(folder, LORA, trainer=trainer)
        self.vocabulary = len(self.backend.tokenizer)
        self.sizes: dict[str, float] = {}

    async def step(self, samples: list[Sample], config: TrainConfig) -> float:
        """Forward, backward and update; returns the seconds."""
        started = time.perf_counter()
        denominator = loss_denominator(samples, config)
        self.sizes = await self.backend.forward_backward(samples, config, loss_denominator=denominator)
        await self.backend.optim_step(config)
        return time.perf_counter() - started

    async def memory(self, samples: list[Sample], config: TrainConfig) -> int | None:
        """Bytes that a step needs above what is resident before it."""
        base = await on_compute_thread(self.backend, reset_peak_memory)
        await self.step(samples, config)
        peak = peak_memory()
        return None if base is None or peak is None else peak - base


async def compare(bench: Bench, shape: Shape, repeats: int, limit: float) -> list[dict[str, Any]]:
    """The shape with and without shared prefixes, alternating."""
    configs = {share: TrainConfig(share_prefixes=share, learning_rate=1e-5) for share in (True, False)}
    seconds: dict[bool, list[float]] = {share: [] for share in configs}
    memory: dict[bool, int | None] = {}
    packed: dict[bool, float] = {}
    for share, config in configs.items():  # warms up as well
        memory[share] = await bench.memory(shape.samples(bench.vocabulary, 0), config)
        packed[share] = bench.sizes["packed_tokens"]
    for repeat in range(repeats):
        samples = shape.samples(bench.vocabulary, repeat + 1)
        for share, config in configs.items():
            seconds[share].append(await bench.step(samples, config))
    decoder, head = products(bench.backend)
    rows = []
    for share in configs:
        time_taken, sampled = median(seconds[share]), shape.sampled_tokens
        # forward and the gradient of the inputs: two products each; weights of the base get none
        operations = 4 * (decoder * packed[share] + head * sampled)
        used = memory[share]
        rows.append(
            {
                "shape": str(shape),
                "share_prefixes": share,
                "prefixes": "shared" if share else "not shared",
                "seconds": time_taken,
                "row_tokens_per_second": shape.row_tokens / time_taken,
                "sampled_tokens_per_second": sampled / time_taken,
                "row_tokens": shape.row_tokens,
                "packed_tokens": packed[share],
                "peak_memory_gib": None if used is None else used / GIB,
                "share_of_limit": operations / time_taken / limit,
            }
        )
    return rows


async def whole_step(bench: Bench, shape: Shape, repeats: int) -> list[float]:
    """Seconds of step and publication together."""
    seconds = []
    for repeat in range(repeats):
        started = time.perf_counter()
        await bench.step(shape.samples(bench.vocabulary, repeat), TrainConfig(learning_rate=1e-5))
        await bench.backend.publish_weights(repeat + 1)
        seconds.append(time.perf_counter() - started)
    return seconds


async def train_everywhere(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    quick = options.quick
    shape = Shape(64, 16, 4) if quick else Shape(512, 128, 8)
    peer_shape = Shape(64, 32, 4) if quick else Shape(512, 256, 8)
    bench = Bench(folder, options.trainer)
    try:
        measure_limit = partial(matmul_limit, bench.backend.dtype, size=512 if quick else 2048)
        limit = await on_compute_thread(bench.backend, measure_limit)
        rows = await compare(bench, shape, options.repeats, limit)
        about = bench.backend.describe()
        figures: dict[str, Any] = {
            "benchmark": "train_step",
            "model": folder if options.model else "bundled",
            "dtype": about["dtype"],
            "trainer": about["trainer"],
            "lora_rank": LORA.rank,
            "matmul_tflops": limit / 1e12,
            "repeats": options.repeats,
            "rows": rows,
            "prefix_sharing_gain": rows[1]["seconds"] / rows[0]["seconds"],
        }
        if options.shapes:
            for more in (Shape(128, 32, 32), Shape(256, 256, 16, ragged=True)):
                rows += await compare(bench, more, options.repeats, limit)
        if options.peer:
            rows += await compare(bench, peer_shape, options.repeats, limit)
            ours = await whole_step(bench, peer_shape, options.repeats)
    finally:
        await bench.backend.close()
    if options.peer:
        peer = figures["peer"] = _beside_peer(options, folder, peer_shape, about["dtype"], ours)
        figures["speedup_vs_trl_unsloth"] = peer["speed_over_peer"]
        used = next(r for r in rows if r["shape"] == str(peer_shape) and r["share_prefixes"])[
            "peak_memory_gib"
        ]
        figures["memory_ratio_vs_trl_unsloth"] = None if used is None else used / peer["peer_peak_memory_gib"]
    return figures


def _beside_peer(
    options: argparse.Namespace, folder: str, shape: Shape, dtype: str, ours: list[float]
) -> dict[str, Any]:
    job = {
        "model": folder,
        "dtype": dtype,
        "rank": LORA.rank,
        "alpha": LORA.alpha,
        "prompt": shape.prompt,
        "completion": shape.completion,
        "group": shape.group,
        "steps": options.repeats + 1,  # the first one is slower and left out
    }
    answer = run_peer(options.peer_python, "peer_trl.py", job)
    theirs = median(answer["seconds"][1:])
    return {
        "shape": str(shape),
        "ours_seconds": median(ours),
        "peer_seconds": theirs,
        "speed_over_peer": theirs / median(ours),
        "peer_peak_memory_gib": answer["peak_memory"] / GIB,
        "peer_first_seconds": answer["seconds"][0],
        "versions": answer["versions"],
    }


COLUMNS = (
    ("shape", "group", "s"),
    ("prefixes", "prefixes", "s"),
    ("seconds", "seconds", ".2f"),
    ("row_tokens_per_second", "tokens/s", ".0f"),
    ("sampled_tokens_per_second", "sampled/s", ".0f"),
    ("row_tokens", "tokens", ".0f"),
    ("packed_tokens", "computed", ".0f"),
    ("peak_memory_gib", "GiB above", ".2f"),
    ("share_of_limit", "of limit", ".1%"),
)


def describe(figures: dict[str, Any]) -> str:
    lines = [
        f"{figures['model']}, {figures['dtype']}, trainer {figures['trainer']}, "
        f"LoRA rank {figures['lora_rank']}; matrix products reach {figures['matmul_tflops']:.2f} TFLOP/s",
        table(figures["rows"], COLUMNS),
        f"sharing the prompt: {figures['prefix_sharing_gain']:.2f} times as fast",
    ]
    if peer := figures.get("peer"):
        lines.append(
            f"{peer['shape']}: step and publication {peer['ours_seconds']:.2f} s; TRL on Unsloth "
            f"{peer['peer_seconds']:.2f} s ({peer['speed_over_peer']:.2f} times as long), "
            f"{peer['peer_peak_memory_gib']:.2f} GiB above its base"
        )
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--trainer", default="peft", choices=("peft", "unsloth"))
    parser.add_argument("--shapes", action="store_true", help="also many short rows, and ragged ones")
    parser.add_argument("--peer", action="store_true", help="compare with TRL on Unsloth's CPU backend")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has them")
    options = parser.parse_args()
    options.repeats = options.repeats or (1 if options.quick else 3)
    machine = Machine()
    with quiet_output():
        prepare(choose(trainer=options.trainer))  # Unsloth has to come before transformers
        folder = model_folder(options)
        figures = asyncio.run(train_everywhere(options, folder))
    report(machine, figures, describe(figures), only_json=options.json)


if __name__ == "__main__":
    main()
