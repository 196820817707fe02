"""Rows as flat arrays in which a prefix that several rows share is stored, and computed, once.

The rows, sorted by their tokens, form a trie; its branches are the segments of a batch. A token of
a segment attends to the earlier tokens of its own segment and to all of its ancestors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import NamedTuple

import numpy as np

from artnb.types import Sample

MIN_SHARED = 16
"""A branching point is worth a segment of its own when it saves at least so many tokens."""


class Segment(NamedTuple):
    """A run of tokens in the flat order."""

    start: int
    length: int
    parent: int
    """Index of the segment that comes before it in its rows, or -1; always below its own index."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Rows for one forward and backward. N packed tokens, S sampled tokens, R rows."""

    ids_N: np.ndarray
    """int64; only tokens whose hidden state some sampled token needs."""
    positions_N: np.ndarray
    """int64; place of the token in its row."""
    segments: tuple[Segment, ...]
    """In flat order without gaps; children of one parent follow each other."""
    source_S: np.ndarray
    """int64 index into N: the token whose hidden state predicts the sampled token. Ordered by row,
    then by place in the row; two rows may have the same source."""
    target_S: np.ndarray
    """int64 ids of the sampled tokens."""
    logprobs_S: np.ndarray
    """float32, the engine's."""
    advantages_S: np.ndarray
    weights_S: np.ndarray
    temperature_S: np.ndarray
    row_S: np.ndarray
    """int64 index into R."""
    rows_R: np.ndarray
    """int64 index of the row among the samples that were given to ``pack``."""
    row_tokens: int
    """Tokens of the rows had nothing been shared."""
    padded_tokens: int
    """Tokens of a rectangle that holds the rows side by side: R times the longest."""

    @property
    def tokens(self) -> int:
        return len(self.ids_N)


def pack(samples: Sequence[Sample], *, max_tokens: int, share_prefixes: bool = True) -> list[PackedBatch]:
    """Pack rows into batches of at most ``max_tokens`` packed tokens.

    A row that is longer gets a batch of its own. Each row must start with context and sample at
    least one token.
    """
    if not samples:
        return []
    inputs = [_inputs(sample) for sample in samples]
    # Big-endian bytes sort like the token sequences themselves.
    order = sorted(range(len(inputs)), key=lambda i: inputs[i].astype(">u4").tobytes())
    rows = [inputs[i] for i in order]
    lengths = np.array([len(row) for row in rows])
    shared = _worth_sharing(_common_prefixes(rows)) if share_prefixes else np.zeros_like(lengths)
    return [
        _batch(samples, order[first:end], rows[first:end], shared[first:end])
        for first, end in _cut(lengths, shared, max_tokens)
    ]


def _inputs(sample: Sample) -> np.ndarray:
    """The row's tokens before its last sampled one: the others predict nothing that has a loss."""
    is_sampled = sample.is_sampled_T
    if True not in is_sampled or is_sampled[0]:
        raise ValueError(
            f"a row of trajectory {sample.trajectory_id!r} must start with context and hold a sampled token"
        )
    last = len(is_sampled) - 1 - is_sampled[::-1].index(True)
    return np.array(sample.ids_T[:last], dtype=np.int64)


def _common_prefixes(rows: Sequence[np.ndarray]) -> np.ndarray:
    """How many tokens each row shares with the row before it; 0 for the first."""
    common = np.zeros(len(rows), dtype=np.int64)
    for index, (before, row) in enumerate(pairwise(rows), start=1):
        length = min(len(before), len(row))
        differs = before[:length] != row[:length]
        place = int(differs.argmax()) if length else 0
        common[index] = place if length and differs[place] else length
    return common


def _worth_sharing(common: np.ndarray) -> np.ndarray:
    """Lower the common prefixes of sorted rows to the branching points worth a segment."""
    shared = np.zeros_like(common)
    branches = [(0, len(common), 0)]  # rows first..end, of which `depth` tokens are in a segment already
    while branches:
        first, end, depth = branches.pop()
        if end - first < 2:
            continue
        fork = int(common[first + 1 : end].min())
        cuts = first + 1 + np.flatnonzero(common[first + 1 : end] == fork)
        if (fork - depth) * len(cuts) >= MIN_SHARED:
            depth = fork
        shared[cuts] = depth
        branches += [(a, b, depth) for a, b in pairwise([first, *cuts.tolist(), end])]
    return shared


def _cut(lengths: np.ndarray, shared: np.ndarray, max_tokens: int) -> list[tuple[int, int]]:
    """Cut the sorted rows into batches so that the fewest tokens are computed twice.

    A cut before a row costs the prefix it shares with the row before; opening a batch at all counts
    as max_tokens / 16 tokens, which keeps the batches full.
    """
    count = len(lengths)
    added = np.concatenate([[0], np.cumsum(lengths - shared)])
    cost, start = np.zeros(count + 1), np.zeros(count + 1, dtype=np.int64)
    first = 0
    for end in range(1, count + 1):
        while first < end - 1 and shared[first] + added[end] - added[first] > max_tokens:
            first += 1
        costs = cost[first:end] + shared[first:end]
        best = int(costs.argmin())
        start[end], cost[end] = first + best, costs[best] + max_tokens / 16
    cuts = [count]
    while cuts[-1] > 0:
        cuts.append(int(start[cuts[-1]]))
    return list(pairwise(reversed(cuts)))


def _batch(
    samples: Sequence[Sample], order: Sequence[int], rows: Sequence[np.ndarray], shared: np.ndarray
) -> PackedBatch:
    segments, paths, firsts = _segments([len(row) for row in rows], shared)
    ids, positions = [], []
    for segment, (row, depth) in zip(segments, firsts, strict=True):
        ids.append(rows[row][depth : depth + segment.length])
        positions.append(np.arange(depth, depth + segment.length))
    chosen = [samples[i] for i in order]
    sampled = [np.flatnonzero(np.array(sample.is_sampled_T)) for sample in chosen]
    counts = [len(places) for places in sampled]

    def of_sampled(name: str, dtype: type) -> np.ndarray:
        values = (compress(getattr(sample, name), sample.is_sampled_T) for sample in chosen)
        return np.concatenate([np.fromiter(v, dtype, count) for v, count in zip(values, counts, strict=True)])

    return PackedBatch(
        ids_N=np.concatenate(ids),
        positions_N=np.concatenate(positions),
        segments=tuple(segments),
        source_S=np.concatenate([_flat(p - 1, path) for p, path in zip(sampled, paths, strict=True)]),
        target_S=of_sampled("ids_T", np.int64),
        logprobs_S=of_sampled("logprobs_T", np.float32),
        advantages_S=of_sampled("advantages_T", np.float32),
        weights_S=of_sampled("weights_T", np.float32),
        temperature_S=np.repeat([s.temperature for s in chosen], counts).astype(np.float32),
        row_S=np.repeat(np.arange(len(chosen)), counts),
        rows_R=np.array(order, dtype=np.int64),
        row_tokens=sum(map(len, rows)),
        padded_tokens=len(rows) * max(map(len, rows)),
    )


_Path = list[tuple[int, int]]
"""For each segment of a row: place in the row of its first token, and flat index of that token."""


def _segments(
    lengths: Sequence[int], shared: np.ndarray
) -> tuple[list[Segment], list[_Path], list[tuple[int, int]]]:
    """The trie of some sorted rows, level by level, so that children of one parent are neighbours.

    Returns the segments, the path of each row through them, and for each segment a row that holds
    it with the place where it starts in that row.
    """
    segments: list[Segment] = []
    firsts: list[tuple[int, int]] = []
    paths: list[_Path] = [[] for _ in lengths]
    size = 0
    branches = deque([(0, len(lengths), 0, -1)])
    while branches:
        first, end, depth, parent = branches.popleft()
        cuts = first + 1 + np.flatnonzero(shared[first + 1 : end] == depth)
        for a, b in pairwise([first, *cuts.tolist(), end]):
            stop = lengths[a] if b - a == 1 else int(shared[a + 1 : b].min())
            if b - a > 1:
                branches.append((a, b, stop, len(segments)))
            if stop > depth:  # otherwise the row ends where its parent does
                segments.append(Segment(size, stop - depth, parent))
                firsts.append((a, depth))
                for path in paths[a:b]:
                    path.append((depth, size))
                size += stop - depth
    return segments, paths, firsts


def _flat(places: np.ndarray, path: _Path) -> np.ndarray:
    """Flat indices of places in a row."""
    depths, starts = np.array(path).T
    segment = np.searchsorted(depths, places, side="right") - 1
    return starts[segment] + places - depths[segment]
