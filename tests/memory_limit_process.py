"""Is a step that really does not fit taken in smaller pieces? Under a limit of the system; prints JSON."""

from __future__ import annotations

import json
import resource
import sys
import warnings
from pathlib import Path

import torch
from reference_models import row
from test_trainer import Gradients, gradients, make_trainer, relative_error

from artnb.backends.out_of_memory import Pieces, ShortenedRowWarning
from artnb.backends.trainer import Trainer
from artnb.config import TrainConfig
from artnb.errors import OutOfMemory
from artnb.types import Sample

ROWS, PROMPT, REPLY = 8, 40, 40
CONFIG = TrainConfig(share_prefixes=False)


def kilobytes() -> int:
    """Of this process's address space now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmSize:"))


def limit_to(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (size * 1024, resource.RLIM_INFINITY))


def needed_by(trainer: Trainer, rows: list[Sample], size: int) -> int:
    """Kilobytes above ``size`` with which a step just fits whole.

    Found by trying limits: a watch beside the step misses its peak or sees what other threads reserve.
    """

    def fits(needed: int) -> bool:
        trainer.pieces = Pieces()
        limit_to(size + needed)
        _, sizes = trainer.forward_backward(rows, CONFIG, denominator=7.0)
        trainer.optimizer.zero_grad(set_to_none=True)
        return bool(sizes["out_of_memory_retries"] == 0)

    enough = 1 << 15
    while not fits(enough):
        enough *= 2
    too_little = enough // 2
    while enough - too_little > enough // 32:
        middle = (enough + too_little) // 2
        enough, too_little = (middle, too_little) if fits(middle) else (enough, middle)
    trainer.pieces = Pieces()
    return enough


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    trainer = make_trainer(folder)
    mask = [False] * PROMPT + [True] * REPLY
    rows = [
        row([3 + (7 * i * (t + 1)) % 250 for t in range(PROMPT + REPLY)], mask, name=str(i))
        for i in range(ROWS)
    ]
    gradients(trainer, rows[:2], CONFIG)  # what only a first step allocates
    expected: Gradients = gradients(trainer, rows, CONFIG)
    trainer.optimizer.zero_grad(set_to_none=True)
    size = kilobytes()
    whole = needed_by(trainer, rows, size)

    limit_to(size + whole * 3 // 4)
    _, sizes = trainer.forward_backward(rows, CONFIG, denominator=7.0)
    found = {name: p.grad for name, p in trainer.parameters.items() if p.grad is not None}
    report = {
        "needed_mb": whole // 1024,
        "error": relative_error(found, expected),
        "first": sizes,
        "next": trainer.forward_backward(rows, CONFIG, denominator=7.0)[1],
    }
    trainer.optimizer.zero_grad(set_to_none=True)

    ids, length = rows[0].ids_T[:1] * 4 + rows[0].ids_T * 8, 8 * (PROMPT + REPLY)
    long = row(ids, [False] * 4 + [True] * length, name="long")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ShortenedRowWarning)
        _, report["shortened"] = trainer.forward_backward([*rows, long], CONFIG, denominator=7.0)
    report["warning"] = str(caught[-1].message)
    found = {name: p.grad for name, p in trainer.parameters.items() if p.grad is not None}
    kept = 4 + length - int(report["shortened"]["tokens_dropped"])
    trainer.optimizer.zero_grad(set_to_none=True)
    by_hand = row(ids[:kept], [False] * 4 + [True] * (kept - 4), name="long")
    report["of_the_rest"] = relative_error(found, gradients(trainer, [*rows, by_hand], CONFIG))
    trainer.optimizer.zero_grad(set_to_none=True)

    late = row(ids, [False] * length + [True] * 4, name="late")
    try:
        trainer.forward_backward([*rows, late], CONFIG, denominator=7.0)
    except OutOfMemory as error:
        report["message"] = str(error)
    report["untouched"] = all(p.grad is None for p in trainer.parameters.values())
    report["after"] = relative_error(gradients(trainer, rows, CONFIG), expected)
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
