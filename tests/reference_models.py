"""What should the engine and the trainer compute? The same with transformers alone, one row at a time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from artnb.backends import attention
from artnb.backends.base import SampleRequest, SampleResult
from artnb.backends.engine_torch import TorchEngine
from artnb.config import SamplingConfig
from artnb.types import Sample

Weights = Mapping[str, torch.Tensor]


def load(folder: Path, *, dtype: torch.dtype = torch.float32, implementation: str = "eager") -> Any:
    """A frozen model of transformers; ``implementation="artnb"`` for an engine or a trainer."""
    attention.register()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=implementation
    )
    return model.requires_grad_(False).eval()


def linear_weights(model: Any) -> dict[str, torch.Tensor]:
    """Linear layers' weights by name, but for the output layer, as a policy of the engine has them."""
    return {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }


@torch.no_grad()
def logprobs_of(model: Any, prompt: tuple[int, ...], completion: tuple[int, ...]) -> torch.Tensor:
    """Logprobs (T, V) from which each token of the completion was drawn, at temperature 1."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


def error_of(model: Any, request: SampleRequest, result: SampleResult) -> float:
    """Largest |logprob(engine) - logprob(transformers)| over a completion; without truncation only."""
    rows = logprobs_of(model, request.prompt_ids, result.completion_ids)
    rows = (rows / (request.sampling.temperature or 1.0)).log_softmax(-1)
    expected = rows.gather(1, torch.tensor(result.completion_ids)[:, None])[:, 0]
    return float((expected - torch.tensor(result.logprobs)).abs().max())


class Stepper(Executor):
    """A compute thread under the test's thumb: work runs when the test says so, in order."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], Any]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        self.queue.append(partial(fn, *args, **options))
        return Future()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if self.queue:
                self.queue.popleft()()

    def run(self, limit: int = 20_000) -> None:
        """Until nothing is left to do."""
        for _ in range(limit):
            if not self.queue:
                return
            self.queue.popleft()()
        raise AssertionError(f"the engine still works after {limit} steps")


class ByHand:
    """Beside an engine's class: requests whose steps are taken by hand, on ``stepper``."""

    stepper: Stepper
    submit: Callable[..., Future[SampleResult]]

    def ask(
        self, prompt: tuple[int, ...], *, policy: str = "current", **options: Any
    ) -> Future[SampleResult]:
        return self.submit(request(prompt, **options), policy=policy)

    def answers(self, *requests: SampleRequest) -> list[SampleResult]:
        futures = [self.submit(each) for each in requests]
        self.stepper.run()
        return [future.result(timeout=0) for future in futures]


class Engine(ByHand, TorchEngine):
    """An engine that takes steps by hand, serving the policies it is given."""

    def __init__(
        self, model: Any, tokenizer: Any, policies: Mapping[str, tuple[Weights, int]], **options: Any
    ):
        self.stepper = Stepper()
        super().__init__(model, tokenizer, policies.__getitem__, self.stepper, **options)


def prompts(count: int, longest: int = 60, seed: int = 0) -> list[tuple[int, ...]]:
    """Distinct random prompts."""
    source = random.Random(seed)
    return [tuple(source.choices(range(3, 259), k=source.randint(1, longest))) for _ in range(count)]


def request(
    prompt: tuple[int, ...],
    *,
    stop_ids: tuple[int, ...] = (),
    top_logprobs: int = 0,
    request_id: str = "",
    **sampling: Any,
) -> SampleRequest:
    return SampleRequest(
        tuple(prompt),
        SamplingConfig(**{"max_tokens": 8, **sampling}),
        stop_ids=stop_ids,
        top_logprobs=top_logprobs,
        request_id=request_id,
    )


def row(
    ids: list[int],
    sampled: list[bool],
    *,
    advantage: float = 1.0,
    logprob: float = -2.0,
    weight: float = 1.0,
    temperature: float = 1.0,
    name: str = "t",
) -> Sample:
    """A row to train on whose sampled tokens have one advantage and one sampling logprob."""

    def spread(value: float) -> tuple[float, ...]:
        return tuple([value if is_sampled else 0.0 for is_sampled in sampled])

    return Sample(
        tuple(ids),
        tuple(sampled),
        spread(logprob),
        spread(advantage),
        spread(weight),
        trajectory_id=name,
        group=0,
        temperature=temperature,
    )
