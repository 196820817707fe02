"""How long does a GRPO step of TRL on Unsloth's CPU backend take? Run by ``train_step.py --peer``.

Needs unsloth and trl and nothing of artnb: it reads a job file and prints one JSON line. TRL's
``rollout_func`` hands the trainer a fixed batch, so that a trainer step is a training step alone.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class PeakMemory:
    """Most bytes resident while it watches, above what was resident at its start."""

    def __init__(self) -> None:
        self._base = self._peak = _resident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self._peak = max(self._peak, _resident())

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return self._peak - self._base


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(job: dict[str, Any], folder: str) -> dict[str, Any]:
    import unsloth  # before the packages that it changes

    # isort: split
    import datasets
    import torch
    import transformers
    import trl

    prompt_length, length, group = job["prompt"], job["completion"], job["group"]
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        job["model"], max_seq_length=prompt_length + length + 8, load_in_4bit=False
    )
    model = unsloth.FastLanguageModel.get_peft_model(
        model,
        r=job["rank"],
        lora_alpha=job["alpha"],
        target_modules=LINEAR,
        use_gradient_checkpointing=False,
    )
    draw, tokens = Random(0), range(5, model.config.vocab_size - 5)
    prompt = draw.choices(tokens, k=prompt_length)
    completions = [draw.choices(tokens, k=length) for _ in range(group)]

    def fixed_batch(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        count = len(prompts)
        return {
            "prompt_ids": [prompt] * count,
            "completion_ids": completions[:count],
            "logprobs": [[-1.0] * length] * count,
        }

    def rewards(completions: list[Any], **_: Any) -> list[float | None]:
        return [float(i) for i in range(len(completions))]

    trainer = trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=rewards,
        rollout_func=fixed_batch,
        train_dataset=datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}]}] * group),
        args=trl.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=job["dtype"] == "bfloat16",
            per_device_train_batch_size=group,
            num_generations=group,
            max_completion_length=length,
            max_steps=job["steps"],
            learning_rate=1e-5,
            beta=0.0,
            optim="adamw_torch_fused",
            gradient_checkpointing=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
        ),
    )
    ends = [time.perf_counter()]

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    trainer.add_callback(Clock())
    watch = PeakMemory()
    ends[0] = time.perf_counter()
    trainer.train()
    return {
        "seconds": [end - start for start, end in pairwise(ends)],
        "peak_memory": watch.stop(),
        "threads": torch.get_num_threads(),
        "versions": {m.__name__: m.__version__ for m in (unsloth, trl, torch, transformers)},
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as output:
        answer = run(json.loads(Path(sys.argv[1]).read_text()), output)
    print(json.dumps(answer))
