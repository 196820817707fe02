"""What do the benchmarks share? Options, the machine's limits, and how figures are printed.

Every benchmark prints a table and, last, one JSON line; with ``--json`` the line alone. Ratios
compare what was measured in one run, because the machine's speed changes from run to run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BUSY = 0.5
"""A load average above this, before the benchmark starts, means that others use the cores."""
Row = Mapping[str, Any]
Column = tuple[str, str, str]
"""Key in the row, heading, format (``.1f``)."""


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark of the engine or the trainer has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or id of a model; default: the bundled one")
    parser.add_argument("--repeats", type=int, help="the median of so many is reported (default 3)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run, not how fast")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    return parser


class Machine:
    """Where and beside whom a benchmark ran: made first, read last."""

    def __init__(self) -> None:
        self.load = os.getloadavg()[0]
        self._started = time.monotonic()
        self._busy, self._own = _busy_seconds(), _own_seconds()

    def to_json(self) -> dict[str, Any]:
        import torch

        seconds = time.monotonic() - self._started
        busy, others = _busy_seconds(), None
        if busy is not None and self._busy is not None:
            others = max(0.0, (busy - self._busy) - (_own_seconds() - self._own)) / seconds
        return {
            "load_before": self.load,
            "cores_used_by_others": others,
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "seconds": seconds,
        }


def _busy_seconds() -> float | None:
    """Seconds that all cores together have worked since the start of the system; None if unknown."""
    with contextlib.suppress(OSError):
        first = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        user, nice, system, _, _, irq, soft, *_ = map(float, first)
        return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
    return None


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def matmul_limit(dtype: Any, *, size: int = 2048, repeats: int = 8) -> float:
    """Floating-point operations a second of a large square matrix product, on this thread.

    The best of several products: the limit is what the cores can do undisturbed.
    """
    import torch

    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    torch.mm(a, b)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


async def on_compute_thread(backend: Any, work: Callable[[], Any]) -> Any:
    """Run something beside the model on its own thread: two OpenMP pools would slow each other down."""
    return await asyncio.wrap_future(backend.engine.call(work))


def rows_of(prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> list[Any]:
    """Rows of one group: completions of a common prompt, with advantages of mean zero."""
    from artnb.types import Sample

    middle = (len(completions) - 1) / 2
    rows = []
    for row, completion in enumerate(completions):
        ids = (*prompt, *completion)
        is_sampled = (False,) * len(prompt) + (True,) * len(completion)

        def spread(value: float, is_sampled: tuple[bool, ...] = is_sampled) -> tuple[float, ...]:
            return tuple(value if sampled else 0.0 for sampled in is_sampled)

        rows.append(
            Sample(
                ids,
                is_sampled,
                spread(-1.0),
                spread(row - middle),
                spread(1.0),
                trajectory_id=f"row {row}",
                group=0,
            )
        )
    return rows


def model_folder(options: argparse.Namespace) -> str:
    from artnb.bundled import bundled_model

    return options.model or str(bundled_model())


def products(backend: Any) -> tuple[int, int]:
    """Multiply-adds of one token in the decoder's linear layers, and in the output matrix."""
    trainer = backend.trainer
    decoder = sum(layer.base.numel() for layer in trainer.layers)
    return decoder, trainer.model.get_output_embeddings().weight.numel()


def attention_products(backend: Any, segments: Sequence[tuple[int, int, int]]) -> int:
    """Multiply-adds of a forward's attention: queries with keys, and probabilities with values, causal."""
    config = backend.trainer.model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ends: list[int] = []
    pairs = 0
    for _, length, parent in segments:
        before = ends[parent] if parent >= 0 else 0
        ends.append(before + length)
        pairs += length * before + length * (length + 1) // 2
    return 2 * config.num_hidden_layers * config.num_attention_heads * head_dim * pairs


def reset_peak_memory() -> int | None:
    """Give free memory back and start a new peak; returns the resident bytes now (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    return None


def peak_memory() -> int | None:
    """Most resident bytes since ``reset_peak_memory``."""
    with contextlib.suppress(OSError):
        return _status("VmHWM")
    return None


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, f"/proc/self/status has a {name} line"
    return int(found.group(1)) * 1024


def run_peer(python: str, script: str, job: Row, *, timeout: float = 1800) -> dict[str, Any]:
    """Run a peer's script in its own interpreter; its last line of output is its JSON answer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.json")
        path.write_text(json.dumps(job))
        command = [python, str(HERE / script), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=folder)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        last = "\n".join(done.stderr.splitlines()[-12:])
        raise SystemExit(f"{script} failed under {python} (exit {done.returncode}):\n{last}")
    return json.loads(lines[-1])


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Rows as aligned text; a missing value is a dash, a column without any value is left out."""
    shown = [c for c in columns if any(row.get(c[0]) is not None for row in rows)]
    cells = [[heading for _, heading, _ in shown]]
    for row in rows:
        cells.append(["-" if row.get(k) is None else format(row[k], form) for k, _, form in shown])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = [form.endswith("s") for _, _, form in shown]
    lines = []
    for line in cells:
        parts = (c.ljust(w) if s else c.rjust(w) for c, w, s in zip(line, widths, left, strict=True))
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def report(machine: Machine, figures: dict[str, Any], text: str, *, only_json: bool) -> None:
    """Print the tables and the JSON line."""
    figures["machine"] = about = machine.to_json()
    if not only_json:
        print(text)
        others = about["cores_used_by_others"]
        shared = "" if others is None else f", others used {others:.2f} cores meanwhile"
        print(f"load average before {machine.load:.2f}{shared}; {about['threads']} threads")
    if machine.load > BUSY:
        print(
            f"WARNING: the load average was {machine.load:.2f} at the start (> {BUSY}): the machine is busy "
            "and these figures are not worth keeping",
            file=sys.stderr,
        )
    print(json.dumps(figures))


@contextlib.contextmanager
def quiet_output() -> Any:
    """What libraries print goes to stderr, so that stdout holds figures only."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
