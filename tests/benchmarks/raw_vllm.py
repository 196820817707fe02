"""What does vLLM alone do on the very engine that artnb samples with?

``vllm.LLM`` is put around the engine of a LocalBackend, so that ``generate`` runs in the same process,
on the same thread and cache, with the same settings; only artnb's part is left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from common import median, on_compute_thread


class RawVllm:
    """``LLM.generate`` for token ids, without artnb on the way. backend: a LocalBackend(engine="vllm")."""

    def __init__(self, backend: Any, folder: str) -> None:
        import vllm
        from vllm.v1.engine import llm_engine

        LLMEngine: Any = llm_engine.LLMEngine
        self.backend, self.version = backend, vllm.__version__
        make = LLMEngine.__dict__["from_engine_args"]
        try:  # its constructor would load the model a second time
            LLMEngine.from_engine_args = lambda *_, **__: backend.engine.llm
            self.llm: Any = vllm.LLM(folder)
        finally:
            LLMEngine.from_engine_args = make

    async def sample(self, ids: Sequence[Sequence[int]], tokens: int) -> None:
        await on_compute_thread(self.backend, partial(self._generate, ids, tokens))

    def _generate(self, ids: Sequence[Sequence[int]], tokens: int) -> None:
        import vllm

        sampling = vllm.SamplingParams(
            temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False
        )
        prompts: Any = [{"prompt_token_ids": list(each)} for each in ids]
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        assert all(len(each.outputs[0].token_ids) == tokens for each in outputs)


async def publication_seconds(backend: Any, repeats: int) -> float:
    """Median seconds from a trained policy to one that is served, checked and proved, all layers new."""
    seconds = []
    for version in range(1, repeats + 2):  # the first one warms up
        await on_compute_thread(backend, partial(_train_a_little, backend.trainer))
        started = time.perf_counter()
        published = await backend.publish_weights(version)
        seconds.append(time.perf_counter() - started)
        assert published.changed, "every layer's weights are new"
    return median(seconds[1:])


@torch.no_grad()
def _train_a_little(trainer: Any) -> None:
    for parameter in trainer.parameters.values():
        parameter.add_(torch.randn_like(parameter), alpha=1e-3)
    trainer.merge()
