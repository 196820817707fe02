"""How fast does vLLM's CPU build do the engine benchmark's work? Run by ``engine.py --vllm``.

Needs vLLM and nothing of artnb: it reads a job file and prints one JSON line. Prefix caching is on,
no adapter is active, and the sampled tokens' logprobs are asked for, as training needs them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def run(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    import vllm

    model = vllm.LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=2048,
        max_num_seqs=256,
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    rates = []
    for cell in job["cells"]:
        sampling = vllm.SamplingParams(
            temperature=1.0, max_tokens=cell["sampled"], ignore_eos=True, logprobs=0, detokenize=False
        )
        seconds = []
        for rounds in cell["repeats"]:
            started = time.perf_counter()
            for prompts in rounds:
                outputs = model.generate(
                    [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
                )
                assert all(len(o.outputs[0].token_ids) == cell["sampled"] for o in outputs)
            seconds.append(time.perf_counter() - started)
        turns = sum(len(prompts) for prompts in cell["repeats"][0])
        rates.append(turns / statistics.median(seconds[1:]))
    return {
        "turns_per_second": rates,
        "version": vllm.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    print(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
