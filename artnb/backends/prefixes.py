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
    """Prefixes to compute once, given how many tokens of each prompt are ``known`` already.

    A prefix never covers a whole prompt: its last token must run to predict the next one. Among
    nested candidates the set that saves most tokens wins.

    >>> shared_prefixes([(1,) * 60 + (2,), (1,) * 60 + (3,)], [0, 0]) == [(1,) * 60]
    True
    >>> shared_prefixes([(1, 2), (1, 3)], [0, 0])
    []
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    ranked = [prompts[i][:-1] for i in order]
    base = [known[i] for i in order]
    with_next = [common_length(a, b) for a, b in itertools.pairwise(ranked)]
    saved, chosen = _best(ranked, base, with_next, 0, len(ranked))
    return chosen if saved > 0 else []


def _best(
    prompts: list[tuple[int, ...]], known: list[int], with_next: list[int], low: int, high: int
) -> tuple[int, list[tuple[int, ...]]]:
    """Most tokens saved by sharing inside prompts[low:high], and the prefixes that do it."""
    if high - low < 2:
        return 0, []
    depth = min(with_next[low : high - 1])
    here = sum(max(0, depth - k) for k in known[low:high]) - max(0, depth - max(known[low:high]))
    cuts = [low, *(i + 1 for i in range(low, high - 1) if with_next[i] == depth), high]
    below, nested = 0, []
    if len(cuts) - 1 < high - low:  # some child has two members or more
        for a, b in itertools.pairwise(cuts):
            saved, chosen = _best(prompts, known, with_next, a, b)
            below += saved
            nested += chosen
    if here >= below:
        return (here, [prompts[low][:depth]]) if here >= MIN_SAVED else (0, [])
    return below, nested
