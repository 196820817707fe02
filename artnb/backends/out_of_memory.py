"""What if a step does not fit into memory? It is taken again in smaller pieces, with the same gradient.

Only where a row does not fit by itself, its end is left out, which is said and counted. The gradient
of the tokens that stay is what it was: they do not see what comes after them, and what their loss is
divided by counts the whole row.
"""

from __future__ import annotations

import gc
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from artnb.errors import OutOfMemory
from artnb.packing import PackedBatch
from artnb.sizes import CHUNK
from artnb.types import Sample

SMALLEST_CHUNK = 16
"""Fewer positions at a time save nothing that counts: a chunk's logits are smaller than the row then."""
SHORTEST_ROW = 256
"""Tokens that a row keeps at least: where so few do not fit, it is not the row that is too long."""
GROW_AFTER = 20
"""Calls in a row that fitted before pieces of twice the size are tried: what took the memory may be gone."""

_SIGNS = (
    "can't allocate memory",  # torch on Linux and macOS
    "not enough memory",  # torch on Windows
    "std::bad_alloc",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for an allocation that failed, on a GPU or in the host's memory.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes do not match"))
    (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


class ShortenedRowWarning(UserWarning):
    """Ends of trajectories were left out of a step, because the rows do not fit into memory."""


class DoesNotFit(Exception):
    """Memory ran out over this batch; None: while packed rows were compared with single ones."""

    def __init__(self, batch: PackedBatch | None, message: str) -> None:
        super().__init__(message)
        self.batch = batch


@contextmanager
def noticing(batch: PackedBatch | None) -> Iterator[None]:
    """Raise DoesNotFit where memory runs out, and let go of all that was computed until then."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = str(error) or type(error).__name__
        traceback.clear_frames(error.__traceback__)  # their tensors would live as long as the error
        error.__traceback__ = None
        raise DoesNotFit(batch, message) from None


def free_memory(device: torch.device) -> None:
    """Give back what nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Pieces:
    """How finely a step is cut. All but ``row_tokens`` decides how sums are rounded, and nothing else."""

    microbatch_tokens: int = sys.maxsize
    """Packed tokens in one forward and backward, where TrainConfig does not ask for fewer."""
    chunk: int = CHUNK
    """Positions whose logits are held at once."""
    compared_rows: int = 4
    """Rows that are compared packed and alone before the first step."""
    row_tokens: int = sys.maxsize
    """Tokens of a row that are computed; its first sampled token is always among those with a loss."""

    def smaller(self, batch: PackedBatch | None) -> Pieces | None:
        """Pieces in which what did not fit takes less memory; None where there are none."""
        if batch is None:
            if self.compared_rows > 2:
                return replace(self, compared_rows=2)
            return replace(self, microbatch_tokens=1)  # rows by themselves need no comparison
        if len(batch.rows_R) > 1:
            return replace(self, microbatch_tokens=max(1, batch.tokens // 2))
        chunk = min(self.chunk, len(batch.target_S)) // 2
        if chunk >= SMALLEST_CHUNK:
            return replace(self, chunk=chunk)
        first_sampled = int(batch.source_S[0]) + 1
        length = max(batch.tokens * 3 // 4, first_sampled, SHORTEST_ROW)
        return replace(self, row_tokens=length) if length < batch.tokens else None

    def larger(self) -> Pieces:
        """Pieces of twice the size, up to those of a model that never ran out of memory."""
        return replace(
            self,
            microbatch_tokens=min(2 * self.microbatch_tokens, sys.maxsize),
            chunk=min(2 * self.chunk, CHUNK),
            row_tokens=min(2 * self.row_tokens, sys.maxsize),
        )


@dataclass
class Shortened:
    """Rows, some of them without their ends."""

    rows: list[Sample]
    places: list[int]
    """Which of them were shortened."""
    tokens_dropped: int
    """Sampled tokens that were left out."""

    def tell(self, samples: Sequence[Sample]) -> None:
        """Warn of what was left out of these rows."""
        lost = [
            f"trajectory {samples[i].trajectory_id!r} of group {samples[i].group} keeps "
            f"{self.rows[i].sampled_tokens} of {samples[i].sampled_tokens} sampled tokens"
            for i in self.places
        ]
        if lost:
            more = f", and {len(lost) - 5} more" if len(lost) > 5 else ""
            warnings.warn(
                f"memory is too small for {len(lost)} of {len(samples)} rows. Their ends were left out of "
                f"this step: {'; '.join(lost[:5])}{more}. {_ADVICE} {_TO_LEARN}.",
                ShortenedRowWarning,
                stacklevel=2,
            )


def shorten(samples: Sequence[Sample], row_tokens: int) -> Shortened:
    """Leave out the ends of rows of which more than ``row_tokens`` tokens would be computed.

    A row keeps its first sampled token, however far in it is.
    """
    rows, places = list(samples), []
    for i, row in enumerate(samples):
        if row_tokens >= len(row.ids_T) or not row.sampled_tokens:
            continue
        # the last sampled token is a target, and no input
        end = max(row_tokens, row.is_sampled_T.index(True)) + 1
        if True in row.is_sampled_T[end:]:
            rows[i] = replace(
                row,
                ids_T=row.ids_T[:end],
                is_sampled_T=row.is_sampled_T[:end],
                logprobs_T=row.logprobs_T[:end],
                advantages_T=row.advantages_T[:end],
                weights_T=row.weights_T[:end],
            )
            places.append(i)
    dropped = sum(samples[i].sampled_tokens - rows[i].sampled_tokens for i in places)
    return Shortened(rows, places, dropped)


_ADVICE = (
    "Shorter rows need less: lower max_tokens, shorten prompts or what tools return, or leave "
    "trajectories out. So does a model made with"
)
_TO_LEARN = "trainer_kwargs={'gradient_checkpointing': True} or, with Unsloth, {'load_in_4bit': True}"
_TO_READ = "Unsloth and trainer_kwargs={'load_in_4bit': True}"


def hopeless(
    problem: DoesNotFit,
    samples: Sequence[Sample],
    tried: Sequence[Pieces],
    microbatch_tokens: int,
    *,
    learns: bool = True,
) -> OutOfMemory:
    """What to tell a user of a row that does not fit even alone.

    tried: the pieces of each attempt. microbatch_tokens: of TrainConfig. learns: False where the row was
    only to be read, for the logprobs of its tokens.
    """
    assert problem.batch is not None, "a comparison that does not fit is left out"
    row = samples[int(problem.batch.rows_R[0])]
    limits = dict.fromkeys(min(microbatch_tokens, pieces.microbatch_tokens) for pieces in tried)
    chunks = dict.fromkeys(pieces.chunk for pieces in tried)
    lengths = dict.fromkeys(pieces.row_tokens for pieces in tried if pieces.row_tokens < len(row.ids_T))
    shorter = f", its first {_listed(lengths)} tokens" if lengths and learns else ""
    what, leaner = ("trained on", _TO_LEARN) if learns else ("read for its logprobs", _TO_READ)
    return OutOfMemory(
        f"trajectory {row.trajectory_id!r} of group {row.group} does not fit into memory: a row of "
        f"{len(row.ids_T)} tokens, {row.sampled_tokens} of them sampled, {what} by itself. Tried: "
        f"micro-batches of {_listed(limits)} tokens, logits of {_listed(chunks)} positions at a "
        f"time{shorter}. {_ADVICE} {leaner}. A lower microbatch_tokens helps only where other rows take "
        f"part in a micro-batch, which they did not. ({problem})"
    )


def _listed(values: dict[int, None]) -> str:
    return ", ".join(map(str, values))
