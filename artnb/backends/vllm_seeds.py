"""How does a seeded request keep its draws while vLLM reads its prompt in parts? No part draws from its seed.

Each part ends in a token that vLLM samples and throws away, and for which it moves the request's
generator back by an offset. Generators of a CPU have none, so that vLLM fails there.
"""

from __future__ import annotations

from typing import Any


def spare_generators(runner: Any) -> None:
    """Hide from vLLM's model runner the generators of prompts that are read in part, while it samples.

    What is thrown away is then drawn from torch's own state, and there is nothing to take back. vLLM's
    second model runner, which draws without generators, stays as it is.
    """
    if not hasattr(runner, "discard_request_mask"):
        return
    sample = runner.sample_tokens

    def sample_tokens(*arguments: Any, **options: Any) -> Any:
        batch = runner.input_batch
        in_part = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        hidden = {row: batch.generators.pop(row) for row in in_part if row in batch.generators}
        try:
            return sample(*arguments, **options)
        finally:
            batch.generators.update(hidden)

    runner.sample_tokens = sample_tokens
