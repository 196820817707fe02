"""The tool_lookup loop on Unsloth and vLLM, in a process of its own; prints its held-out mean rewards.

    python tests/stack_learning.py FOLDER [STEPS] [HELD_OUT]

Fewer steps or held-out items than the test's show whether it runs, not whether it learns.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import artnb as nb


async def main(folder: Path, steps: int = 14, held_out: int = 64) -> None:
    environment = nb.load_environment("tool_lookup")
    unseen = environment.scenarios("test", n=held_out)
    with nb.Model(run="tool", root=folder, trainer="unsloth", engine="vllm") as model:
        about = model.describe()
        before = await nb.evaluate(environment.rollout, unseen, model=model)
        for step in model.run.steps(steps):
            scenarios = environment.scenarios("train", n=8, seed=step)
            groups = await nb.gather(environment.rollout, scenarios, model=model)
            await nb.train_step(model, groups, learning_rate=1e-3)
        after = await nb.evaluate(environment.rollout, unseen, model=model)
        report = {
            "stack": [about["trainer"], about["engine"]],
            "trained": model.policy_version,
            "before": [before.mean_reward, before.n],
            "after": [after.mean_reward, after.n],
        }
    print(json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
