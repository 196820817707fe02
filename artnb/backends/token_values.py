"""Which of a step's token statistics belong to which row? They come by micro-batch, and are kept by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from artnb.backends.base import TokenValues

_NAMES = {"logprobs": "logprob", "entropies": "entropy", "is_masked": "masked"}
"""Field of TokenValues -> name in the statistics of ``loss.token_loss``."""


def token_values(statistics: Sequence[Mapping[str, torch.Tensor]], rows: int) -> list[TokenValues] | None:
    """One for each of ``rows`` rows, from micro-batches whose statistics say the ``row`` of each token (S,);
    None where they do not. Tokens of a row are in order and in one micro-batch."""
    if not statistics or "row" not in statistics[0]:
        return None
    row = torch.cat([part["row"] for part in statistics]).numpy()
    order = np.argsort(row, kind="stable")
    cuts = np.searchsorted(row[order], np.arange(1, rows))
    by_field = {
        field: np.split(torch.cat([part[name] for part in statistics]).cpu().numpy()[order], cuts)
        for field, name in _NAMES.items()
        if name in statistics[0]
    }
    return [TokenValues(**{field: parts[i] for field, parts in by_field.items()}) for i in range(rows)]
