"""How long does a GRPO step of TRL on Unsloth's CPU backend take? Run by ``train_step.py --peer``.

Needs unsloth and trl and nothing of artnb: it reads a job file and prints one JSON line. TRL's
``rollout_func`` hands the trainer a fixed batch, so that a trainer step is a training step alone. It
starts from the adapter in the job, and leaves the gradient of the first step behind.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from peer_common import PeakMemory, write_gradient

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def run(job: dict[str, Any], folder: str) -> dict[str, Any]:
    import unsloth  # before the packages that it changes

    # isort: split
    import datasets
    import peft
    import safetensors.torch
    import torch
    import transformers
    import trl

    prompt, completions = job["prompt"], job["completions"]
    prompt_length, length, group = len(prompt), max(map(len, completions)), len(completions)
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        job["model"],
        max_seq_length=prompt_length + length + 8,
        dtype=getattr(torch, job["dtype"]),
        load_in_4bit=False,
    )
    model = unsloth.FastLanguageModel.get_peft_model(
        model,
        r=job["rank"],
        lora_alpha=job["alpha"],
        target_modules=LINEAR,
        use_gradient_checkpointing=False,
    )
    adapter = safetensors.torch.load_file(Path(job["adapter"], "adapter_model.safetensors"))
    unknown = peft.set_peft_model_state_dict(model, adapter).unexpected_keys
    assert not unknown, f"not the same adapter: {unknown}"

    def fixed_batch(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        count = len(prompts)
        return {
            "prompt_ids": [prompt] * count,
            "completion_ids": completions[:count],
            "logprobs": [[-1.0] * len(ids) for ids in completions[:count]],
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

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            if len(ends) == 1:
                write_gradient(job["gradient"], _gradients(model))

    trainer.add_callback(Clock())
    watch = PeakMemory()
    ends[0] = time.perf_counter()
    trainer.train()
    return {
        "seconds": [end - start for start, end in pairwise(ends)],
        "peak_memory": watch.stop(),
        "entropy": trainer.state.log_history[0]["entropy"],
        "threads": torch.get_num_threads(),
        "versions": {m.__name__: m.__version__ for m in (unsloth, trl, torch, transformers)},
    }


def _gradients(model: Any) -> dict[str, Any]:
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        name.removeprefix("base_model.model.").replace(".default.", "."): gradient
        for name, gradient in named.items()
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as output:
        answer = run(json.loads(Path(sys.argv[1]).read_text()), output)
    print(json.dumps(answer))
