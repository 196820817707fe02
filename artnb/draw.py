"""Which rows does a step train on when there are more than it can afford?

Rows with large advantages move the policy most, so they are drawn more often and weigh less in
return: the expected gradient is that of all rows, its variance is smaller than under a uniform draw
of as many. Inclusion probabilities in proportion to size with weights 1 / probability are the
Horvitz-Thompson estimator (1952); walking along the rows with an even stride (systematic sampling)
also spreads the draw over the trajectories.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

UNIFORM_SHARE = 0.25
"""Part of the draw that ignores size, so that no row weighs more than 4 times its own weight."""


def draw(sizes: Sequence[float], count: int, generator: random.Random) -> list[tuple[int, float]]:
    """Draw ``count`` of the rows. Returns (index, weight), ascending; the mean weight is about 1.

    sizes: how much each row may move the policy, >= 0.

    >>> draw([1.0, 1.0, 1.0, 1.0], 2, random.Random(0))
    [(1, 1.0), (3, 1.0)]
    """
    if count >= len(sizes):
        return [(index, 1.0) for index in range(len(sizes))]
    chances = inclusion(sizes, count)
    reached, threshold = 0.0, generator.random()
    drawn: list[tuple[int, float]] = []
    for index, chance in enumerate(chances):
        reached += chance
        if reached > threshold and len(drawn) < count:
            drawn.append((index, count / len(sizes) / chance))
            threshold += 1.0
    return drawn


def inclusion(sizes: Sequence[float], count: int) -> list[float]:
    """Each row's probability to be among ``count`` drawn of more: they sum to ``count``, none exceeds 1.

    >>> inclusion([3.0, 1.0, 0.0, 0.0], 1)
    [0.625, 0.25, 0.0625, 0.0625]
    """
    total = math.fsum(sizes)
    even = 1.0 / len(sizes)
    shares = [UNIFORM_SHARE * even + (1 - UNIFORM_SHARE) * (s / total if total > 0 else even) for s in sizes]
    chances = [1.0] * len(sizes)
    rest = list(range(len(sizes)))
    while rest:  # a row that would be drawn more than once is drawn for sure; the others share what is left
        scale = (count - (len(sizes) - len(rest))) / math.fsum(shares[i] for i in rest)
        below = [i for i in rest if shares[i] * scale < 1.0]
        if len(below) == len(rest):
            break
        rest = below
    for index in rest:
        chances[index] = shares[index] * scale
    return chances
