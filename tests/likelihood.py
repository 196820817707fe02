"""How likely is what a trajectory's turns hold, under the policy that is trained?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from artnb.config import TrainConfig
from artnb.types import Sample, Trajectory


async def likelihood(model: Any, trajectories: Iterable[Trajectory]) -> float:
    """Mean logprob of a sampled token, in nats."""
    rows = []
    for number, turn in enumerate(turn for t in trajectories for turn in t.turns):
        own = (False,) * len(turn.prompt_ids) + (True,) * len(turn.completion_ids)
        zeros = (0.0,) * len(own)
        rows.append(Sample(turn.ids, own, zeros, zeros, zeros, f"row {number}", 0))
    scored = [value for row in await model.backend.score(rows, TrainConfig()) for value in row]
    return sum(scored) / len(scored)
