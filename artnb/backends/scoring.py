"""How likely are rows that another policy sampled to a trainer's model? Logprobs without a gradient."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from artnb.backends.out_of_memory import Pieces, noticing
from artnb.backends.trainer import Trainer
from artnb.config import TrainConfig
from artnb.types import Sample


@torch.no_grad()
def score_rows(
    trainer: Trainer,
    samples: Sequence[Sample],
    config: TrainConfig,
    *,
    base: bool = False,
    cancelled: threading.Event | None = None,
) -> list[tuple[float, ...]]:
    """Logprobs of each row's sampled tokens, in order, at the row's temperature.

    base: with what is trained switched off. Rows are packed as in a training step, where packing is true,
    and in smaller pieces where memory runs out. ``cancelled`` is looked at before each batch; once it is
    set, the rest is left empty. Raises OutOfMemory for a row that does not fit by itself.
    """

    def attempt(pieces: Pieces) -> list[tuple[float, ...]]:
        found: list[tuple[float, ...]] = [()] * len(samples)
        for batch in trainer.batches(samples, config, pieces):
            if cancelled is not None and cancelled.is_set():
                break
            with noticing(batch):
                logprobs = trainer.logprobs(batch, chunk=pieces.chunk)[0].float().cpu().numpy()
            for row, index in enumerate(batch.rows_R.tolist()):
                found[index] = tuple(logprobs[batch.row_S == row].tolist())
        return found

    with trainer.as_base() if base else nullcontext():
        return trainer.in_pieces(attempt, samples, config)[0]
