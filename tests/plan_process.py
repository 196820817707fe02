"""What does a process hold that loads a model, samples and trains once? Prints plan and reality as JSON."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from typing import Any

import torch
from reference_models import request, row

from artnb.backends.local import LocalBackend
from artnb.config import LoraConfig, TrainConfig
from artnb.measure import measure, plan_model

TEXT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "


async def step(backend: LocalBackend, use: dict[str, int]) -> dict[str, int]:
    """Sample a group's trajectories and train on them; returns what is held with gradients at hand."""
    config = TrainConfig(microbatch_tokens=use["microbatch_tokens"], learning_rate=1e-3)
    own, size = use["context"] - use["prompt"], use["group_size"]
    text = itertools.cycle(backend.tokenizer(TEXT, add_special_tokens=False).input_ids)
    prompts = [list(itertools.islice(text, use["prompt"] + 1))[1:] for _ in range(use["groups"])]
    asked = [request(tuple(prompt), max_tokens=4) for prompt in prompts for _ in range(size)]
    await asyncio.gather(*(backend.sample(each) for each in asked))
    undo = await backend.snapshot()
    rows = [
        row(
            prompt + list(itertools.islice(text, own + 1))[1:],
            [False] * len(prompt) + [True] * own,
            name=f"{number}",
        )
        for prompt in prompts
        for number in range(size)
    ]
    await backend.forward_backward(rows, config, loss_denominator=len(rows) * own)
    held = measure(backend)
    await backend.optim_step(config)
    await backend.publish_weights(backend.policy_version + 1)
    del undo
    return held


async def main(folder: str, use: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    options = ("dtype", "engine", "trainer", "engine_kwargs", "trainer_kwargs")
    made = {name: use.pop(name) for name in options if name in use}
    backend = LocalBackend(folder, LoraConfig(rank=use.pop("rank")), **made)
    for _ in range(use.pop("steps")):  # from the second one on, undoing takes the optimizer's moments too
        held = await step(backend, use)
    compared = plan_model(backend, **use)
    print(json.dumps({**compared.to_dict(), "during": held, "text": repr(compared)}))
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
