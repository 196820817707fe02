"""One turn of the loop on the stack that is named, in a process of its own; prints what it measured.

    python tests/stack_loop.py TRAINER ENGINE FOLDER

The first call in a folder gathers and keeps its groups; later calls train their first step on the same
groups, so that stacks can be compared. Each then gathers for itself and trains a second step.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import artnb as nb

KEPT = ("loss", "grad_norm", "entropy", "tokens", "logprob_gap_mean", "probe_gap_mean", "rows_unpacked")


async def main(trainer: str, engine: str, folder: Path) -> None:
    environment = nb.load_environment("tool_lookup")
    kept = folder / "groups.json"
    made_with = {"root": folder, "dtype": "float32", "trainer": trainer, "engine": engine}
    with nb.Model(run=f"{trainer}-{engine}", **made_with) as model:
        steps = []
        for step in range(2):
            if step == 0 and kept.is_file():
                groups = [
                    nb.TrajectoryGroup([nb.Trajectory.from_json(record) for record in group])
                    for group in json.loads(kept.read_text())
                ]
            else:
                scenarios = environment.scenarios("train", n=4, seed=step)
                groups = await nb.gather(environment.rollout, scenarios, model=model, group_size=8)
            if step == 0 and not kept.is_file():
                kept.write_text(json.dumps([[t.to_json() for t in group] for group in groups]))
            result = await nb.train_step(model, groups, learning_rate=1e-3)
            steps.append({name: result.metrics.get(name) for name in KEPT})
        about = model.describe()
        sampled = await nb.evaluate(environment.rollout, environment.scenarios("test", n=4), model=model)
        base = await nb.evaluate(
            environment.rollout, environment.scenarios("test", n=2), model=model, policy="base"
        )
    report = {
        "stack": [about["trainer"], about["engine"]],
        "steps": steps,
        "version": about["policy_version"],
        "evaluated": [sampled.n, base.n],
    }
    if engine == "vllm":  # whose process groups went with the first
        with nb.Model(run=f"{trainer}-{engine}", **made_with) as again:
            sampled = await nb.evaluate(environment.rollout, environment.scenarios("test", n=2), model=again)
            report["again"] = [again.policy_version, sampled.n]
    print(json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
