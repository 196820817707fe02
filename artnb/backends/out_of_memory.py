"""What if a step does not fit into memory? It is taken again in smaller pieces, with the same gradient."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from artnb.errors import OutOfMemory
from artnb.logprobs import CHUNK
from artnb.packing import PackedBatch
from artnb.types import Sample

SMALLEST_CHUNK = 16
"""Fewer positions at a time save nothing that counts: a chunk's logits are smaller than the row then."""

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
    """How finely a step is cut: this decides how sums are rounded, and nothing else about them."""

    microbatch_tokens: int = sys.maxsize
    """Packed tokens in one forward and backward, where TrainConfig does not ask for fewer."""
    chunk: int = CHUNK
    """Positions whose logits are held at once."""
    compared_rows: int = 4
    """Rows that are compared packed and alone before the first step."""

    def smaller(self, batch: PackedBatch | None) -> Pieces | None:
        """Pieces in which what did not fit takes less memory; None where there are none."""
        if batch is None:
            if self.compared_rows > 2:
                return replace(self, compared_rows=2)
            return replace(self, microbatch_tokens=1)  # rows by themselves need no comparison
        if len(batch.rows_R) > 1:
            return replace(self, microbatch_tokens=max(1, batch.tokens // 2))
        chunk = min(self.chunk, len(batch.target_S)) // 2
        return replace(self, chunk=chunk) if chunk >= SMALLEST_CHUNK else None


def hopeless(
    problem: DoesNotFit, samples: Sequence[Sample], tried: Sequence[Pieces], microbatch_tokens: int
) -> OutOfMemory:
    """What to tell a user of a row that does not fit even alone.

    tried: the pieces of each attempt. microbatch_tokens: of TrainConfig.
    """
    assert problem.batch is not None, "a comparison that does not fit is left out"
    row = samples[int(problem.batch.rows_R[0])]
    limits = dict.fromkeys(min(microbatch_tokens, pieces.microbatch_tokens) for pieces in tried)
    chunks = dict.fromkeys(pieces.chunk for pieces in tried)
    return OutOfMemory(
        f"trajectory {row.trajectory_id!r} of group {row.group} does not fit into memory: a row of "
        f"{len(row.ids_T)} tokens, {row.sampled_tokens} of them sampled, trained on by itself. Tried: "
        f"micro-batches of {_listed(limits)} tokens, logits of {_listed(chunks)} positions at a time. "
        "Shorter rows need less: lower max_tokens, shorten prompts or what tools return, or leave this "
        "trajectory out. So does a model made with trainer_kwargs={'gradient_checkpointing': True} or, "
        "with Unsloth, {'load_in_4bit': True}. A lower microbatch_tokens helps only where other rows take "
        f"part in a micro-batch, which they did not. ({problem})"
    )


def _listed(values: dict[int, None]) -> str:
    return ", ".join(map(str, values))
