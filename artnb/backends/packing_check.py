"""Do packed rows get the logprobs that each gets alone? Asked of real rows, before they are trained on.

An attention that ignores who belongs to whom raises nothing and trains on: every row then reads its
neighbours. Which attention runs is decided by packages below us, per device and version, so it is
measured instead of believed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from artnb.packing import PackedBatch, pack
from artnb.types import Sample

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest mean |difference| in nats of a row's logprobs that rounding explains, by the model's dtype.

Measured on SmolLM2-135M: rounding 1e-5 (float32), 0.01 (float16) and 0.04 to 0.11 (bfloat16); rows that
read a sibling 0.8 to 1.1, rows that read a stranger 0.9 to 1.0, transformers' own attention 3."""


class PackingWarning(UserWarning):
    """Rows are computed one by one, because packed ones would read each other."""


@dataclass(frozen=True)
class PackingCheck:
    """What one comparison found."""

    error: float
    """Mean |logprob(packed) - logprob(alone)| in nats over the sampled tokens of the worst row."""
    tolerance: float
    rows: int

    @property
    def is_true(self) -> bool:
        return self.error <= self.tolerance  # a NaN is not

    def __str__(self) -> str:
        return (
            f"packed and unpacked logprobs of {self.rows} rows differ by {self.error:.3g} nats a token "
            f"(tolerance {self.tolerance:g}): this attention lets packed rows read each other. Rows are "
            "computed one by one from here on, which is slower and right."
        )


def check_packing(
    samples: Sequence[Sample],
    logprobs: Callable[[PackedBatch], torch.Tensor],
    dtype: torch.dtype,
    *,
    most_rows: int = 4,
) -> PackingCheck | None:
    """Compare a few rows packed, with shared prefixes and without, with each of them alone.

    ``logprobs`` gives those (S,) of a batch's sampled tokens. None where no two rows differ, so that
    there is nothing to compare.
    """
    rows = [dataclasses.replace(row, temperature=1.0) for row in _telling(samples, most_rows)]
    if len(rows) < 2:
        return None
    errors = []
    with torch.no_grad():
        alone = [logprobs(pack([row], max_tokens=1)[0]) for row in rows]
        for share in (True, False):
            (together,) = pack(rows, max_tokens=sum(len(r.ids_T) for r in rows), share_prefixes=share)
            packed = logprobs(together)
            for place, index in enumerate(together.rows_R):
                own = packed[torch.from_numpy(together.row_S == place).to(packed.device)]
                errors.append(float((own - alone[index]).abs().mean()))
    return PackingCheck(float(np.max(errors)), TOLERANCE[dtype], len(rows))


def _telling(samples: Sequence[Sample], most: int) -> list[Sample]:
    """The two rows that share most, and those that share least: siblings and strangers."""
    rows = sorted({sample.ids_T: sample for sample in samples}.values(), key=lambda sample: sample.ids_T)
    if len(rows) < 2:
        return rows
    closest = max(range(len(rows) - 1), key=lambda i: _shared(rows[i].ids_T, rows[i + 1].ids_T))
    pair, others = rows[closest : closest + 2], rows[:closest] + rows[closest + 2 :]
    step = max(1, (len(others) - 1) // max(1, most - 3))
    return pair + others[::step][: most - 2]


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(np.array(first[:length]) != np.array(second[:length]))
    return int(differs[0]) if len(differs) else length
