"""What did a step make of each sampled token? The values of its rows, put together by trajectory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, compress
from typing import TYPE_CHECKING, Any

from artnb.batch import Rows
from artnb.store.token_records import TokenRecord
from artnb.types import Sample, Trajectory

if TYPE_CHECKING:
    import numpy as np

    from artnb.backends.base import TokenValues


def token_records(
    rows: Rows, values: Iterable[tuple[Sequence[Sample], Sequence[TokenValues] | None]]
) -> dict[str, TokenRecord]:
    """Records by trajectory id. values: the samples of each update, and what the backend says of them.

    Empty for examples, and for a backend that says nothing. Of trajectories with one id the first counts.
    """
    trajectories = {(index, t.id): t for index, group in enumerate(rows.groups) for t in group}
    found: dict[tuple[int, str], TokenRecord] = {}
    for samples, measured in values:
        for sample, of_row in zip(samples, measured or (), strict=measured is not None):
            if not sample.turns:
                continue
            key = sample.group, sample.trajectory_id
            if key not in found:
                found[key] = _blank(trajectories[key], has_entropies=of_row.entropies is not None)
            _fill(found[key], trajectories[key], sample, of_row)
    return {name: found[index, name] for index, name in sorted(found, reverse=True)}


def _blank(trajectory: Trajectory, *, has_entropies: bool) -> TokenRecord:
    import numpy as np

    def unknown() -> np.ndarray:
        return np.full(trajectory.completion_tokens, np.nan, np.float32)

    return TokenRecord(unknown(), unknown(), unknown(), unknown() if has_entropies else None)


def _fill(record: TokenRecord, trajectory: Trajectory, sample: Sample, of_row: TokenValues) -> None:
    """Write what is known of a row to the places of its turns."""
    import numpy as np

    lengths = [len(turn.completion_ids) for turn in trajectory.turns]
    starts = [0, *accumulate(lengths)]
    computed = len(of_row.logprobs)  # fewer than sampled where a row lost its end
    values: dict[str, Any] = {
        "trainer_logprobs": of_row.logprobs,
        "advantages": np.fromiter(compress(sample.advantages_T, sample.is_sampled_T), np.float32),
        "weights": np.fromiter(compress(sample.weights_T, sample.is_sampled_T), np.float32),
        "entropies": of_row.entropies,
    }
    if of_row.is_masked is not None:
        values["weights"][:computed][of_row.is_masked] = 0.0
    at = 0
    for places in sample.turns:
        end = min(at + lengths[places[0]], computed)
        for place in places:
            for name, array in record.arrays().items():
                array[starts[place] : starts[place] + end - at] = values[name][at:end]
        at = end
