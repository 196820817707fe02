"""How likely are rows that another policy sampled to a trainer's model? Logprobs without a gradient."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from artnb.backends.trainer import Trainer
from artnb.config import TrainConfig
from artnb.packing import pack
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

    base: with what is trained switched off. Rows are packed as in a training step, where packing is true.
    ``cancelled`` is looked at before each batch; once it is set, the rest is left empty.
    """
    found: list[tuple[float, ...]] = [()] * len(samples)
    with trainer.as_base() if base else nullcontext():
        check = trainer.packing or trainer.verify_packing(samples)
        packs = check is None or check.is_true
        most = min(config.microbatch_tokens, trainer.pieces.microbatch_tokens) if packs else 1
        for batch in pack(samples, max_tokens=most, share_prefixes=packs and config.share_prefixes):
            if cancelled is not None and cancelled.is_set():
                break
            logprobs = trainer.logprobs(batch, chunk=trainer.pieces.chunk)[0].float().cpu().numpy()
            for row, index in enumerate(batch.rows_R.tolist()):
                found[index] = tuple(logprobs[batch.row_S == row].tolist())
    return found
