"""How fast is a training step, how much memory does it take, and what does sharing prefixes gain?

One group of completions of a common prompt, as token ids: forward, backward and update of a LoRA
adapter of rank 16 on all linear layers, with and without computing the prompt once. Tokens a second
count every row in full, so that both ways are measured against the same work.

    python tests/benchmarks/train_step.py [--trainer peft|unsloth] [--shapes] [--peer] [--quick] [--json]

``--shapes`` adds 32 completions of 32 tokens on 128, and 16 of ragged lengths up to 256 on 256.
``--peer`` adds 8 completions of 256 tokens on a 512-token prompt, and runs them on three stacks, each in
a process of its own and from the same adapter: artnb on peft, artnb on Unsloth, and TRL's GRPOTrainer on
Unsloth's CPU backend. ``--peer-python`` names an interpreter that has them (``make test`` installs all).
The share of the limit counts the model's own operations: linear layers, and causal attention once.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
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
    attention_products,
    matmul_limit,
    median,
    model_folder,
    on_compute_thread,
    peak_memory,
    products,
    quiet_output,
    report,
    reset_peak_memory,
    rows_of,
    run_peer,
    table,
)

from artnb import LoraConfig, TrainConfig
from artnb.backends.local import LocalBackend
from artnb.backends.stack import choose, prepare
from artnb.batch import loss_denominator
from artnb.packing import pack
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

    def draw(self, vocabulary: int, seed: int) -> tuple[list[int], list[list[int]]]:
        """A prompt and its completions, random tokens."""
        source, tokens = Random(seed), range(5, vocabulary - 5)
        prompt = source.choices(tokens, k=self.prompt)
        return prompt, [source.choices(tokens, k=length) for length in self.lengths]

    def samples(self, vocabulary: int, seed: int) -> list[Sample]:
        return rows_of(*self.draw(vocabulary, seed))


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
    attention = {
        share: sum(
            attention_products(bench.backend, batch.segments)
            for batch in pack(samples, max_tokens=config.microbatch_tokens, share_prefixes=share)
        )
        for share, config in configs.items()
    }
    rows = []
    for share in configs:
        time_taken, sampled = median(seconds[share]), shape.sampled_tokens
        # forward and the gradient of the inputs: two products each; weights of the base get none
        linear = 4 * (decoder * packed[share] + head * sampled)
        # attention: two products forward, four backward; what is computed a second time counts once
        operations = linear + 6 * attention[share]
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
                "linear_share_of_limit": linear / time_taken / limit,
            }
        )
    return rows


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
            figures["stacks_shape"] = str(peer_shape)
            figures["stacks"] = await stacks(bench, options, folder, peer_shape)
    finally:
        await bench.backend.close()
    if options.peer:
        peft, theirs = (figures["stacks"][name] for name in ("artnb, peft", "TRL, Unsloth"))
        figures["speedup_vs_trl_unsloth"] = theirs["seconds"] / peft["seconds"]
        figures["memory_ratio_vs_trl_unsloth"] = peft["peak_memory_gib"] / theirs["peak_memory_gib"]
    return figures


async def stacks(
    bench: Bench, options: argparse.Namespace, folder: str, shape: Shape
) -> dict[str, dict[str, Any]]:
    """The same rows, adapter and dtype in three stacks, each in a process of its own, one after another.

    Gradients are compared in float32 on fewer tokens: in bfloat16 the rounding of the weights alone turns
    the gradient of random tokens, whose advantages cancel, far away.
    """
    answers: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as place:
        await on_compute_thread(bench.backend, partial(_write_adapter, bench.backend.trainer, Path(place)))
        about = {"model": folder, "rank": LORA.rank, "alpha": LORA.alpha, "adapter": place}
        for name, script, trainer in STACKS:
            jobs = {
                "speed": (shape, bench.backend.describe()["dtype"], options.repeats + 1),
                "gradient": (EXACT, "float32", 1),
            }
            for kind, (rows, dtype, steps) in jobs.items():
                prompt, completions = rows.draw(bench.vocabulary, seed=0)
                job = {"prompt": prompt, "completions": completions, "dtype": dtype, "steps": steps}
                job |= {"trainer": trainer, "gradient": str(Path(place, trainer))}
                answer = run_peer(options.peer_python, script, about | job)
                if kind == "speed":
                    answers[name] = answer
                else:
                    answers[name]["entropy"] = answer["entropy"]
            cosine = _cosine(Path(place, trainer), Path(place, STACKS[0][2]))
            answers[name]["gradient_cosine"] = cosine
    return {name: _in_short(answer) for name, answer in answers.items()}


EXACT = Shape(128, 64, 4)
"""Rows whose gradients are compared."""
STACKS = (
    ("artnb, peft", "peer_artnb.py", "peft"),
    ("artnb, Unsloth", "peer_artnb.py", "unsloth"),
    ("TRL, Unsloth", "peer_trl.py", "trl"),
)


def _write_adapter(trainer: Any, folder: Path) -> None:
    """An adapter that has learned something: a new one's B is zero, and so is the gradient of its A."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in trainer.layers:
            layer.b.copy_(0.01 * torch.randn(layer.b.shape, generator=generator))
    trainer.merge()
    trainer.save(folder)


def _cosine(path: Path, reference: Path) -> float:
    from safetensors.torch import load_file

    ours, theirs = load_file(path), load_file(reference)
    assert ours.keys() == theirs.keys(), "the same factors have a gradient"
    product = sum(float((ours[n].double() * theirs[n].double()).sum()) for n in ours)
    sizes = [sum(float(t.double().square().sum()) for t in g.values()) ** 0.5 for g in (ours, theirs)]
    return product / (sizes[0] * sizes[1])


def _in_short(answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "seconds": median(answer["seconds"][1:]),
        "first_seconds": answer["seconds"][0],
        "peak_memory_gib": answer["peak_memory"] / GIB,
        "entropy": answer["entropy"],
        "gradient_cosine": answer["gradient_cosine"],
        "versions": answer.get("versions"),
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
    ("linear_share_of_limit", "linear layers", ".1%"),
)
STACK_COLUMNS = (
    ("stack", "stack", "s"),
    ("seconds", "seconds", ".2f"),
    ("first_seconds", "first", ".2f"),
    ("peak_memory_gib", "GiB above", ".2f"),
    ("entropy", "entropy", ".4f"),
    ("gradient_cosine", "gradient cosine", ".5f"),
)


def describe(figures: dict[str, Any]) -> str:
    lines = [
        f"{figures['model']}, {figures['dtype']}, trainer {figures['trainer']}, "
        f"LoRA rank {figures['lora_rank']}; matrix products reach {figures['matmul_tflops']:.2f} TFLOP/s",
        table(figures["rows"], COLUMNS),
        f"sharing the prompt: {figures['prefix_sharing_gain']:.2f} times as fast",
    ]
    if stacks := figures.get("stacks"):
        lines += [
            f"{figures['stacks_shape']}, step and publication, each stack in its own process:",
            table([{"stack": name, **row} for name, row in stacks.items()], STACK_COLUMNS),
            f"TRL on Unsloth takes {figures['speedup_vs_trl_unsloth']:.2f} times as long as artnb on peft, "
            f"which needs {figures['memory_ratio_vs_trl_unsloth']:.2f} of its memory",
        ]
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
