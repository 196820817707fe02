"""Which learning rate does step k of n take? Warm-up, then a fall; a pure function of the step.

It holds no state, so a resumed loop, a re-run cell and a changed number of steps need nothing more.
"""

from __future__ import annotations

import math
from typing import Literal

from artnb.errors import ConfigurationError

Shape = Literal["constant", "linear", "cosine"]


def schedule(
    peak: float, step: int, steps: int, *, warmup: int = 0, shape: Shape = "linear", floor: float = 0.0
) -> float:
    """The learning rate of ``step`` (from 0) of ``steps``: rises over ``warmup`` steps, then falls.

    peak: the largest rate. warmup: the first steps get 1/(warmup + 1), 2/(warmup + 1), ... of it, since
    Adam's first updates are as long as its later ones and have seen next to nothing. shape: ``constant``,
    ``linear`` or ``cosine`` (arXiv 1608.03983, without restarts) from the end of the warm-up to the last
    step, which gets ``floor * peak``. Steps beyond the last keep the last one's rate.

    >>> [schedule(1.0, step, 5, floor=0.2) for step in range(5)]
    [1.0, 0.8, 0.6, 0.4, 0.2]
    >>> [schedule(1.0, step, 5, warmup=1, shape="constant") for step in range(3)]
    [0.5, 1.0, 1.0]

    Raises ConfigurationError for values out of range.
    """
    if peak <= 0 or not 0 <= floor <= 1:
        raise ConfigurationError(f"peak must be > 0 and floor in [0, 1], got {peak} and {floor}")
    if step < 0 or steps < 1 or warmup < 0:
        raise ConfigurationError(
            f"step and warmup must be >= 0 and steps >= 1, got {step}, {warmup} and {steps}"
        )
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    if shape == "constant":
        return peak
    if shape == "linear":
        kept = 1 - done
    elif shape == "cosine":
        kept = (1 + math.cos(math.pi * done)) / 2
    else:
        raise ConfigurationError(f"shape must be constant, linear or cosine, got {shape!r}")
    return round(peak * (floor + (1 - floor) * kept), 15)
