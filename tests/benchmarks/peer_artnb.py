"""How long does the same step take in artnb, by itself in a process? Run by ``train_step.py --peer``.

Reads a job file and prints one JSON line, as ``peer_trl.py`` does for TRL. A step is forward, backward,
update and the publication to the engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import on_compute_thread, quiet_output, reset_peak_memory, rows_of
from peer_common import PeakMemory, write_gradient

from artnb import LoraConfig, TrainConfig
from artnb.backends.local import LocalBackend
from artnb.backends.stack import choose, prepare
from artnb.batch import loss_denominator


async def run(job: dict[str, Any]) -> dict[str, Any]:
    lora = LoraConfig(rank=job["rank"], alpha=job["alpha"])
    backend = LocalBackend(job["model"], lora, dtype=job["dtype"], trainer=job["trainer"])
    samples = rows_of(job["prompt"], job["completions"])
    seconds = []
    try:
        await backend.load_adapter(Path(job["adapter"]))
        # TRL's step at a ratio of 1 is this one, but for its size
        plain = TrainConfig(loss="reinforce", learning_rate=1e-5)
        metrics = await backend.forward_backward(samples, plain, loss_denominator=1.0)
        gradients = {name: p.grad for name, p in backend.trainer.parameters.items()}
        write_gradient(job["gradient"], gradients)
        await on_compute_thread(backend, lambda: backend.trainer.optimizer.zero_grad(set_to_none=True))
        await on_compute_thread(backend, reset_peak_memory)
        watch = PeakMemory()
        config = TrainConfig(learning_rate=1e-5)
        for step in range(job["steps"]):
            started = time.perf_counter()
            denominator = loss_denominator(samples, config)
            await backend.forward_backward(samples, config, loss_denominator=denominator)
            await backend.optim_step(config)
            await backend.publish_weights(step + 1)
            seconds.append(time.perf_counter() - started)
        peak = watch.stop()
    finally:
        await backend.close()
    return {"seconds": seconds, "peak_memory": peak, "entropy": metrics["entropy"]}


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    with quiet_output():
        prepare(choose(trainer=job["trainer"]))  # Unsloth has to come before transformers
        answer = asyncio.run(run(job))
    print(json.dumps(answer))
