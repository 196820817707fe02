"""Which prefixes of the waiting prompts are worth computing once? Plain tuples in, lengths out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

MIN_SAVED = 48
"""Prompt tokens that a shared block must save before it is made."""


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix.

    >>> common_length((1, 2, 3), (1, 2, 4, 5))
    2
    """
    low, high = 0, min(len(a), len(b))
    while low < high:  # tuple slices compare at C speed, so halving beats a Python loop
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def shared_prefixes(prompts: Sequence[tuple[int, ...]], known: Sequence[int]) -> list[tuple[int, ...]]:
    """Prefixes to compute once, shorter ones first: each extends those before it that begin it.

    ``known`` says how many tokens of each prompt an existing block covers already. A prefix never
    covers a whole prompt: its last token must run to predict the next one.

    >>> shared_prefixes([(1,) * 60 + (2,), (1,) * 60 + (3,)], [0, 0]) == [(1,) * 60]
    True
    >>> shared_prefixes([(1, 2), (1, 3)], [0, 0])
    []
    """
    order = sorted(range(len(prompts)), key=lambda i: prompts[i][:-1])
    ranked = [prompts[i][:-1] for i in order]
    covered = [known[i] for i in order]
    with_next = [common_length(a, b) for a, b in itertools.pairwise(ranked)]
    chosen: list[tuple[int, ...]] = []
    forks = [(0, len(ranked), 0)]  # prompts low..high, of which `floor` tokens are computed once already
    while forks:
        low, high, floor = forks.pop()
        if high - low < 2:
            continue
        depth = min(with_next[low : high - 1])
        cuts = [low, *(i + 1 for i in range(low, high - 1) if with_next[i] == depth), high]
        branches = list(itertools.pairwise(cuts))
        floor = max([floor, *(k for k in covered[low:high] if k <= depth)])
        needy = sum(any(k < depth for k in covered[a:b]) for a, b in branches)
        if (depth - floor) * (needy - 1) >= MIN_SAVED:
            chosen.append(ranked[low][:depth])
            floor = depth
        forks += [(a, b, floor) for a, b in branches]
    return sorted(chosen, key=len)
