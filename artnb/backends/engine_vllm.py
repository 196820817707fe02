"""How does vLLM sample in this kernel? Stepped on the one compute thread that it shares with a trainer.

vLLM runs without a process of its own, so that requests join and leave between its steps, a policy
is exchanged while none runs, and the trainer's tensors reach it without a copy on the way.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from artnb.backends.base import SampleRequest, SampleResult
from artnb.backends.decoder import Weights
from artnb.backends.engine_loop import EngineLoop, fail
from artnb.backends.vllm_process import (
    alone,
    opened,
    quiet,
    set_environment,
    shut_down,
    starting,
    undisturbed,
)
from artnb.backends.vllm_seeds import spare_generators
from artnb.backends.vllm_weights import Adapter, BaseWeights, VllmWeights, as_folder, checksum
from artnb.errors import ConfigurationError, NonFiniteLogits, PromptTooLong, RequestError, require

Publish = Literal["lora", "merged"]
_FORMS = {"json_schema": "json", "regex": "regex", "choice": "choice"}
"""Our names of structured outputs and vLLM's."""


@dataclass(eq=False)
class _Running:
    request: SampleRequest
    future: Future[SampleResult]
    submitted: float
    policy: str
    started: float = 0.0
    told: int = 0  # tokens that on_token has heard of

    def tell(self, ids: Sequence[int]) -> None:
        """Report what is new in the tokens sampled so far."""
        if on_token := self.request.on_token:
            _ = [on_token(token) for token in ids[self.told :]]
        self.told = len(ids)


class VllmEngine(EngineLoop[_Running]):
    """Samples from one policy at a time, as TorchEngine does.

    model_folder: what vLLM loads, a folder or a Hugging Face id. provider: returns a policy's linear
    weights by layer name (``publish="merged"``) or its Adapter (``"lora"``) and its version; called
    when requests ask for another policy than the one served. compute: an executor with one thread,
    on which every step runs; the constructor must run there too. publish: None merges on a CPU,
    where an active adapter is slow, and serves adapters up to ``lora_rank`` elsewhere. llm: an
    engine that exists (an LLM or LLMEngine of vLLM's, as Unsloth makes with
    ``fast_inference=True``); it is closed with this one. engine_kwargs go to vLLM's EngineArgs.
    Raises ConfigurationError.
    """

    def __init__(
        self,
        model_folder: str | Path,
        tokenizer: Any,
        provider: Callable[[str], tuple[Weights | Adapter, int]],
        compute: Executor,
        *,
        max_running: int = 128,
        max_context: int | None = None,
        kv_bytes: int = 1 << 30,
        seed: int = 0,
        dtype: torch.dtype | str | None = None,
        publish: Publish | None = None,
        lora_rank: int = 16,
        llm: Any = None,
        **engine_kwargs: Any,
    ) -> None:
        super().__init__(compute, provider)
        for name, size in {"max_running": max_running, "kv_bytes": kv_bytes}.items():
            if size < 1:
                raise ConfigurationError(f"{name} must be >= 1, got {size}")
        on_cpu = _is_on_cpu()
        self.publish: Publish = publish or ("merged" if on_cpu and llm is None else "lora")
        if lora_rank > _RANKS[-1]:
            raise ConfigurationError(f"vLLM serves adapters up to rank {_RANKS[-1]}, not {lora_rank}")
        options: dict[str, Any] = {
            "model": str(model_folder),
            "dtype": str(dtype or "auto").removeprefix("torch."),
            "max_model_len": max_context or -1,  # -1: as long as model and cache allow
            "max_num_seqs": max_running,
            "kv_cache_memory_bytes": kv_bytes,
            "seed": seed,
            "enforce_eager": on_cpu,
            # prompt tokens that a step reads: longer prompts are read in parts
            "max_num_batched_tokens": max(2048, max_running),
            "enable_lora": self.publish == "lora",
            "max_lora_rank": next(rank for rank in _RANKS if rank >= lora_rank),
            **_DEFAULTS,
            **engine_kwargs,
        }
        self.llm = _make(options) if llm is None else _given(llm, engine_kwargs)
        opened(self.llm)
        if problem := _problem(self.publish, self.llm.vllm_config):
            if llm is None:
                shut_down(self.llm)
            raise ConfigurationError(problem)
        if on_cpu:
            spare_generators(self._runner)
        config = self.llm.vllm_config.model_config
        self.max_context, self._logprobs_mode = int(config.max_model_len), config.logprobs_mode
        self.max_running = min(max_running, self.llm.vllm_config.scheduler_config.max_num_seqs)
        self.tokenizer = tokenizer
        self.random = random.Random(seed)
        self.counters = {"prompt_tokens": 0, "computed_prompt_tokens": 0, "sampled_tokens": 0, "steps": 0}
        self._weights = VllmWeights(self._runner.get_model(), config.dtype, BaseWeights(str(model_folder)))
        self._held: dict[str, int] | None = {}
        """Checksums of the layers that were ever exchanged; None: unknown after a failure."""
        self._loaded: set[str] = set()
        """Layers that ever held something else than the base model's weights."""
        self._adapter: Any = None
        """vLLM's LoRARequest for the adapter served."""
        self._factors: dict[str, int] = {}
        """Checksums of its tensors."""
        self._number = 0
        self._asleep = False
        self._running: dict[str, _Running] = {}
        """Requests that vLLM has, by the id it knows them under."""

    @property
    def _runner(self) -> Any:
        return self.llm.model_executor.driver_worker.model_runner

    # ---- called from any thread -------------------------------------------------------------

    def submit(self, request: SampleRequest, *, policy: str = "current") -> Future[SampleResult]:
        """Queue a request. Cancelling the future aborts it in vLLM before the next step."""
        self._check(request)
        future: Future[SampleResult] = Future()
        running = _Running(request, future, time.time(), policy)
        self._post(lambda: self._waiting.append(running))
        return future

    def _check(self, request: SampleRequest) -> None:
        super()._check(request)
        sampling = request.sampling
        if 0 < sampling.temperature < 0.01:
            raise RequestError("vLLM samples at temperature 0 or at 0.01 and more")
        mode = self._logprobs_mode
        if mode != _DEFAULTS["logprobs_mode"] and (sampling.temperature not in (0, 1) or sampling.truncates):
            raise RequestError(
                f"this vLLM engine reports {mode}, which are those of temperature 1 without truncation only; "
                "make it with logprobs_mode='processed_logprobs'"
            )

    # ---- policies, on the compute thread ----------------------------------------------------

    def load(self, weights: Weights | Adapter, policy: str, version: int) -> bool:
        """Serve linear weights by layer name (others are the base model's), or an adapter over the
        base model; drops every cached key. True when what is served changed."""
        if self.publish == "lora" and not isinstance(weights, Adapter):
            raise ConfigurationError(
                "with publish='lora' vLLM's weights stay the base model's: give an Adapter"
            )
        self.served = ""  # should an exchange stop half way, the next request loads its policy anew
        self.wake()
        with quiet(), alone:
            if isinstance(weights, Adapter):
                changed = self._load_merged({}) | self._load_adapter(weights, policy)
            else:
                changed = self._load_adapter(Adapter({}, 1, 1.0), policy) | self._load_merged(weights)
            self._drop_prefixes()
        self.served, self.version = policy, version
        return changed

    def holds(self, weights: Weights | Adapter) -> list[str]:
        """Names among these layers that vLLM does not serve bit for bit.

        An adapter's factors are compared as they lie in vLLM's active slot, matrices that can be
        read as a whole; of matrices that the CPU build keeps in an order of its own, 32 columns
        drawn anew each time.
        """
        if not isinstance(weights, Adapter):
            with alone:
                return self._weights.wrong(weights)
        if weights.changes_nothing and self._adapter is None:
            return []
        number = self._adapter.lora_int_id if self._adapter else 0
        return self._weights.wrong_factors(weights, self._runner.lora_manager._adapter_manager, number)

    def score(self, ids: Sequence[int]) -> torch.Tensor:
        """Logprobs (T - 1,) of each token after the first under the served weights, temperature 1."""
        if len(ids) >= self.max_context:
            raise PromptTooLong(f"{len(ids)} tokens and one more do not fit a context of {self.max_context}")
        self.wake()
        name = self._add(ids, temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        while True:
            for output in self._advance():
                if output.request_id == name:
                    rows = output.prompt_logprobs
                    return torch.tensor([rows.logprobs[start] for start in rows.start_indices[1:]])

    @property
    def sleeps(self) -> bool:
        """Whether ``sleep`` frees anything: on a GPU, where vLLM was made with enable_sleep_mode."""
        config = self.llm.vllm_config
        return config.device_config.device_type != "cpu" and bool(config.model_config.enable_sleep_mode)

    def sleep(self) -> bool:
        """Free the cache, and keep the weights where they are, until ``wake`` or the next request.

        False, and nothing done, where there is nothing to free. A vLLM without
        ``release_kv_cache_memory`` can free its cache only together with its weights, which then wait in
        the host's memory. Call it through ``call``: no request may be running.
        """
        if not self.sleeps:
            return False
        if not self._asleep:
            self._advance()  # vLLM forgets finished requests in the step after their last
            self._drop_prefixes()
            if hasattr(self.llm, "release_kv_cache_memory"):
                self.llm.sleep(level=0)  # takes no step meanwhile
                self.llm.release_kv_cache_memory()
            else:
                self.llm.sleep(level=1)
            self._asleep = True
        return True

    def wake(self) -> bool:
        """Undo ``sleep``; False when the engine was awake."""
        if not self._asleep:
            return False
        self.llm.wake_up()
        self._asleep = False
        return True

    def _load_merged(self, weights: Weights) -> bool:
        """Exchange matrices where their checksums differ from those of what is held."""
        base = [layer for layer in self._loaded if layer not in weights]
        full = {**weights, **{layer: self._weights.base_of(layer) for layer in base}}
        sums = {layer: checksum(weight.to(self._weights.dtype)) for layer, weight in full.items()}
        held = self._held
        if held is not None:
            unknown = [layer for layer in full if layer not in held]
            before = {**held, **{layer: checksum(self._weights.base_of(layer)) for layer in unknown}}
            if sums == before:
                return False
        self._held = None
        self._loaded |= weights.keys()
        tensors = self._weights.complete(full)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        self._weights.pack_head(full)
        self._held = sums
        return True

    def _load_adapter(self, adapter: Adapter, policy: str) -> bool:
        """Exchange the adapter, which vLLM reads from a folder."""
        from vllm.lora.request import LoRARequest

        sums = {} if adapter.changes_nothing else {n: checksum(t) for n, t in adapter.tensors.items()}
        changed, self._factors = sums != self._factors, sums
        if self._adapter is not None:
            self.llm.remove_lora(self._adapter.lora_int_id)
            self._adapter = None
        if not sums:
            return changed
        self._number += 1  # vLLM and its prefix cache know an adapter by number and name: never twice
        with as_folder(adapter) as folder:
            request = LoRARequest(f"{policy}-{self._number}", self._number, folder)
            if not self.llm.add_lora(request):
                raise RuntimeError(f"vLLM did not take adapter {request.lora_name}")
        self._adapter = request
        return changed

    def _drop_prefixes(self) -> None:
        """Forget every cached key; a step that is still in flight may hold blocks for a moment."""
        for _ in range(8):
            if self.llm.reset_prefix_cache():
                return
            self._advance()
        raise RuntimeError("vLLM keeps blocks of its cache in use although no request is running")

    # ---- steps, on the compute thread -------------------------------------------------------

    def _step(self) -> None:
        gone = [name for name, running in self._running.items() if running.future.cancelled()]
        if gone:
            self.llm.abort_request(gone)
            for name in gone:
                del self._running[name]
        if self._commands and not self._running:
            return self._obey()
        if not self._commands:
            self._admit()
        if self._running:
            self._advance()

    def _admit(self) -> None:
        if not self._may_admit(is_idle=not self._running):
            return
        chosen = self._served_waiting()[: self.max_running - len(self._running)]
        if not chosen:
            return
        self.wake()
        self._leave_queue(chosen)
        for running in chosen:
            self._start(running)

    def _start(self, running: _Running) -> None:
        request, sampling = running.request, running.request.sampling
        seed = sampling.seed
        if seed is None and sampling.temperature > 0:
            seed = self.random.getrandbits(62)
        running.started = time.time()
        try:
            form = _form(request.structured)
            name = self._add(
                request.prompt_ids,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=seed,
                max_tokens=sampling.max_tokens,
                stop=list(sampling.stop),
                include_stop_str_in_output=True,
                detokenize=bool(sampling.stop),
                skip_special_tokens=False,
                spaces_between_special_tokens=False,
                stop_token_ids=list(request.stop_ids),
                ignore_eos=form is None,  # a form that is complete leaves no other token
                structured_outputs=form,
                logprobs=request.top_logprobs,
                is_watched=request.on_token is not None,
            )
        except Exception as error:  # vLLM's own errors have no base of their own
            fail(running.future, RequestError(f"vLLM refuses the request: {error}"), error)
            return
        self._running[name] = running
        self.counters["prompt_tokens"] += len(request.prompt_ids)

    def _add(self, ids: Sequence[int], *, is_watched: bool = False, **sampling: Any) -> str:
        """Hand a prompt to vLLM, to tell of it at every step or at its end; returns the request's name."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._number += 1
        name = str(self._number)
        kind = RequestOutputKind.CUMULATIVE if is_watched else RequestOutputKind.FINAL_ONLY
        told: dict[str, Any] = {"output_kind": kind, "flat_logprobs": True, "detokenize": False}
        params = SamplingParams(**told | sampling)
        self.llm.add_request(name, tokens_input(list(ids)), params, lora_request=self._adapter)
        return name

    def _advance(self) -> list[Any]:
        """One step of vLLM's; finishes the requests that it finished."""
        with alone:
            outputs = self.llm.step()
        self.counters["steps"] += 1
        for output in outputs:
            if running := self._running.get(output.request_id):
                running.tell(output.outputs[0].token_ids)
                if output.finished:
                    del self._running[output.request_id]
                    self._finish(running, output)
        return outputs

    def _finish(self, running: _Running, output: Any) -> None:
        completion, request = output.outputs[0], running.request
        ids, rows = tuple(completion.token_ids), completion.logprobs
        starts = rows.start_indices[: len(ids)]
        logprobs = tuple(rows.logprobs[start] for start in starts)
        cached = output.num_cached_tokens or 0
        self.counters["computed_prompt_tokens"] += len(request.prompt_ids) - cached
        self.counters["sampled_tokens"] += len(ids)
        if not all(map(math.isfinite, logprobs)):
            name = request.request_id or "(unnamed)"
            fail(running.future, NonFiniteLogits(f"request {name}: the model produced NaN or inf logits"))
            return
        if completion.finish_reason not in ("stop", "length"):
            fail(running.future, RequestError(f"vLLM ended the request with {completion.finish_reason!r}"))
            return
        top = []
        if request.top_logprobs:
            for start in starts:  # the sampled token comes first, then the best ones
                best = slice(start + 1, start + 1 + request.top_logprobs)
                top.append(tuple(zip(rows.token_ids[best], rows.logprobs[best], strict=True)))
        result = SampleResult(
            completion_ids=ids,
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            policy_version=self.version,
            top_logprobs=tuple(top),
            queued=running.started - running.submitted,
            seconds=time.time() - running.submitted,
        )
        if running.future.set_running_or_notify_cancel():
            running.future.set_result(result)

    def _recover(self, error: Exception) -> None:
        """After a step that failed: what it had begun to write into the cache is forgotten."""
        names = list(self._running)
        for running in self._running.values():
            fail(running.future, RequestError(f"the engine failed: {error}"), error)
        self._running.clear()
        self.llm.abort_request(names)
        self.llm.reset_prefix_cache()

    def _futures(self) -> Iterator[Future[Any]]:
        return (r.future for r in (*self._running.values(), *self._waiting))

    def _release(self) -> None:
        self._running.clear()
        self._waiting.clear()
        shut_down(self.llm)
        del self.llm, self._weights
        gc.collect()


_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of the room that vLLM has for adapters."""
_DEFAULTS: dict[str, Any] = {
    "enable_prefix_caching": True,
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",  # the model folder's sampling defaults are not ours
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
    # small models fill the space that JSON allows between its tokens up to the length limit
    "structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True},
}


def _is_on_cpu() -> bool:
    """Whether this vLLM was built for CPUs."""
    set_environment()
    with starting():
        require("vllm", extra="gpu", why="to sample with vLLM in this kernel")
        from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _make(options: dict[str, Any]) -> Any:
    with starting():
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown := sorted(options.keys() - known):
        raise ConfigurationError(f"engine_kwargs: vLLM's EngineArgs have no {', '.join(unknown)}")
    with starting(), undisturbed(), alone:
        try:
            return LLMEngine.from_engine_args(EngineArgs(**options))
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigurationError(f"vLLM cannot be made: {error}") from error


def _problem(publish: Publish, config: Any) -> str:
    """Why an engine cannot be served policies in this form; empty when it can."""
    if publish == "lora" and config.lora_config is None:
        return "publish='lora' needs a vLLM engine made with enable_lora=True"
    if publish == "merged" and config.model_config.quantization is not None:
        return "merged weights cannot replace quantized ones; use publish='lora'"
    return ""


def _given(llm: Any, engine_kwargs: Mapping[str, Any]) -> Any:
    if engine_kwargs:
        raise ConfigurationError(f"engine_kwargs come too late for an engine that exists: {[*engine_kwargs]}")
    engine = getattr(llm, "llm_engine", llm)
    if not hasattr(engine, "model_executor"):
        raise ConfigurationError(
            "the vLLM engine must run in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0)"
        )
    return engine


def _form(structured: Mapping[str, Any] | None) -> Any:
    """vLLM's parameters for a structured output. Raises ValueError."""
    if structured is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    if len(structured) != 1 or not structured.keys() <= _FORMS.keys():
        raise ValueError(
            f"structured takes one of {', '.join(_FORMS)}, got {', '.join(structured) or 'none'}"
        )
    ((name, value),) = structured.items()
    return StructuredOutputsParams(**{_FORMS[name]: value})
