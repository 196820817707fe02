"""How do several parts become one reward? A weighted sum, each part normalised in its group if asked for."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence


def blend(
    parts: Sequence[Mapping[str, float]], weights: Mapping[str, float], *, normalise: bool = False
) -> list[float | None]:
    """The reward of each trajectory of a group from its parts; None where a part with a weight is missing.

    >>> blend([{"judge": 1.0, "own": 0.0}, {"judge": 0.5, "own": 1.0}], {"judge": 0.5, "own": 0.5})
    [0.5, 0.75]

    With ``normalise`` each part is centred on its mean and divided by its population standard deviation in
    the group before it is weighed (GDPO, arXiv 2601.05242); a part that is equal everywhere counts nothing.
    """
    needed = [name for name, weight in weights.items() if weight]
    whole = [all(name in one for name in needed) for one in parts]
    scale: dict[str, tuple[float, float]] = {}
    for name in needed if normalise else ():
        values = [one[name] for one, is_whole in zip(parts, whole, strict=True) if is_whole]
        if values:
            scale[name] = statistics.fmean(values), statistics.pstdev(values)

    def value(name: str, raw: float) -> float:
        mean, deviation = scale.get(name, (0.0, 1.0))
        return (raw - mean) / deviation if deviation > 1e-9 else 0.0

    return [
        sum(weights[name] * value(name, one[name]) for name in needed) if is_whole else None
        for one, is_whole in zip(parts, whole, strict=True)
    ]
