"""Who holds the model in this kernel, and in which thread does what run?

The event loop only waits. One compute thread loads, samples and trains: OpenMP keeps a pool of
threads for each thread that ever ran a parallel kernel, and lets them all sleep at every barrier as
soon as there are more of them than cores, which costs a third of the speed.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from artnb.backends import stack as stacks
from artnb.backends.adapter_files import read_json
from artnb.backends.base import Publication, SampleRequest, SampleResult, StepStats
from artnb.backends.decoder import Weights
from artnb.backends.quiet import import_tqdm, without_remarks
from artnb.backends.scoring import score_rows
from artnb.backends.token_values import token_values
from artnb.backends.trainer import Policy, Trainer
from artnb.backends.vllm_weights import Adapter
from artnb.config import LoraConfig, TrainConfig
from artnb.errors import CheckpointError, ConfigurationError, PublicationError, RequestError, require
from artnb.loss import summarize
from artnb.types import Sample

log = logging.getLogger(__name__)
T = TypeVar("T")

_PROBE = (
    "The quick brown fox jumps over the lazy dog. 3 + 4 = 7. <call>apple</call> "
    "left, right, up, down: a short probe on which engine and trainer must agree."
)
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Largest mean |logprob(engine) - logprob(trainer)| on the probe that counts as agreement."""


class LocalBackend:
    """One base model, a LoRA adapter or all weights to train, a trainer and an engine in this process.

    base: a Hugging Face id or a folder that transformers loads. dtype: ``bfloat16``, ``float16`` or
    ``float32``; None takes bf16 where this machine multiplies it natively. engine, trainer, and their
    options: see ``stack``. checkpoint: finds the folder of a checkpoint name, for
    ``sample(policy="step_000012")``. memory_bytes: what may be used; a model whose weights are all to be
    trained (``trainer_kwargs={"full_finetuning": True}``) and would need more is refused unloaded.
    """

    def __init__(
        self,
        base: str | Path,
        lora: LoraConfig,
        *,
        base_name: str | None = None,
        dtype: str | None = None,
        engine: str | None = None,
        trainer: str | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
        trainer_kwargs: Mapping[str, Any] | None = None,
        checkpoint: Callable[[str], Path] | None = None,
        memory_bytes: int | None = None,
        seed: int = 0,
    ) -> None:
        import_tqdm()
        self.stack = stacks.choose(trainer, engine)
        self.trains_all = stacks.trains_all(self.stack, lora, trainer_kwargs or {}, engine_kwargs or {})
        stacks.prepare(self.stack)
        with without_remarks():
            require("transformers", extra="cpu", why="to run a model in this kernel")
            require("peft", extra="cpu", why="to train an adapter")
        _tune_malloc()
        self.base_model = base_name or str(base)
        self.lora = lora
        self.dtype = _dtype(dtype, self.stack.device)
        if self.trains_all and memory_bytes is not None:
            stacks.check_full_fits(base, self.dtype, trainer_kwargs or {}, memory_bytes)
        self.checkpoint = checkpoint
        self._version = 0
        self._closed = False
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="artnb-compute")
        try:
            self._compute.submit(
                self._load, base, dict(engine_kwargs or {}), dict(trainer_kwargs or {}), seed
            ).result()
        except BaseException:
            self._compute.shutdown()
            raise

    def _load(
        self, base: str | Path, engine_kwargs: dict[str, Any], trainer_kwargs: dict[str, Any], seed: int
    ) -> None:
        import transformers

        self.tokenizer = transformers.AutoTokenizer.from_pretrained(base)
        self.tokenizer.clean_up_tokenization_spaces = False  # text is what the tokens say
        model = stacks.load_model(self.stack, base, self.dtype, self.lora, trainer_kwargs, engine_kwargs)
        self.engine = stacks.make_engine(
            self.stack,
            base,
            model,
            self.tokenizer,
            self._policy,
            self._compute,
            lora=None if self.trains_all else self.lora,
            seed=seed,
            options=engine_kwargs,
            trainer_options=trainer_kwargs,
        )
        self._trainer: Trainer | None = stacks.make_trainer(self.stack, model, self.lora, trainer_kwargs)
        self.max_context = self.engine.max_context
        self._published = self.trainer.policy()
        probe = self.tokenizer(_PROBE, add_special_tokens=False).input_ids
        self._probe: list[int] = list(probe)[:64]
        trainable = sum(p.numel() for p in self.trainer.parameters.values())
        parameters = sum(p.numel() for p in model.parameters())
        self._sizes = {"trainable_parameters": trainable, "parameters": parameters}

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise RequestError("the model is closed; run the cell that makes the Model again")
        return self._trainer

    @property
    def policy_version(self) -> int:
        return self._version

    # ---- sampling -----------------------------------------------------------------------------

    async def sample(self, request: SampleRequest, *, policy: str = "current") -> SampleResult:
        if policy not in ("current", "base"):
            self._checkpoint_folder(policy)
        return await asyncio.wrap_future(self.engine.submit(request, policy=policy))

    def _checkpoint_folder(self, name: str) -> Path:
        folder = self.checkpoint(name) if self.checkpoint else None
        if folder is None or not folder.is_dir():
            raise CheckpointError(f"there is no checkpoint {name!r} to sample from")
        return folder

    def _policy(self, name: str) -> tuple[Weights | Adapter, int]:
        """What the engine has to load for a policy, and its version; runs on the compute thread."""
        if name == "base":
            return self._base(), -1
        if name == "current":
            # not the trainer's own: an update may be under way that is not published yet
            return self._effective(self._published), self._version
        folder = self._checkpoint_folder(name)
        weights = self._effective(self.trainer.policy_of(folder))
        return weights, int(read_json(folder / "backend.json")["policy_version"])

    def _base(self) -> Weights | Adapter:
        if self._serves_adapters:
            return Adapter({}, self.lora.rank, self.lora.alpha)
        return self.trainer.base_weights()

    def _effective(self, policy: Policy) -> Weights | Adapter:
        """A policy as the engine takes it: an adapter, or merged into the base weights."""
        if not self._serves_adapters:
            return self.trainer.weights_from(policy)
        tensors: dict[str, torch.Tensor] = {}
        for name, (a, b) in policy.items():
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        return Adapter(tensors, self.lora.rank, self.lora.alpha)

    @property
    def _serves_adapters(self) -> bool:
        return getattr(self.engine, "publish", "merged") == "lora"

    # ---- training -----------------------------------------------------------------------------

    async def forward_backward(
        self, samples: Sequence[Sample], config: TrainConfig, *, loss_denominator: float
    ) -> dict[str, float]:
        if getattr(self.engine, "sleeps", False):  # until the next request: both do not fit at once
            await self._engine_call(self.engine.sleep)
        cancelled = threading.Event()
        work = partial(
            self.trainer.forward_backward,
            samples,
            config,
            denominator=loss_denominator,
            cancelled=cancelled,
        )
        try:
            statistics, sizes = await self._in_compute(work)
        except asyncio.CancelledError:
            cancelled.set()  # the thread stops at the next micro-batch
            raise
        measured = StepStats(summarize(statistics, config) | sizes)
        measured.tokens = token_values(statistics, len(samples))
        return measured

    async def score(
        self, samples: Sequence[Sample], config: TrainConfig, *, base: bool = False
    ) -> list[tuple[float, ...]]:
        """Logprobs of each row's sampled tokens, in order, at the row's temperature: the trained policy's,
        or the base's."""
        if getattr(self.engine, "sleeps", False):
            await self._engine_call(self.engine.sleep)
        cancelled = threading.Event()
        work = partial(score_rows, self.trainer, samples, config, base=base, cancelled=cancelled)
        try:
            return await self._in_compute(work)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def optim_step(self, config: TrainConfig) -> dict[str, float]:
        return await self._in_compute(partial(self.trainer.optim_step, config))

    async def snapshot(self) -> Any:
        return await self._in_compute(self.trainer.snapshot), self._version

    async def restore(self, snapshot: Any) -> None:
        trained, version = snapshot
        await self._in_compute(partial(self.trainer.restore, trained))
        self._version, self._published = version, self.trainer.policy()
        await self._engine_call(partial(self._serve_trained, version))

    async def publish_weights(self, policy_version: int) -> Publication:
        return await self._engine_call(partial(self._publish, policy_version))

    def _publish(self, policy_version: int) -> Publication:
        """In one go between two requests, so that nothing is sampled or exchanged before the proof."""
        started = time.perf_counter()
        changed = self._serve_trained(policy_version)
        gap = (self.engine.score(self._probe).float() - self.trainer.score(self._probe).float()).abs()
        tolerance = _TOLERANCE[self.dtype]
        if not gap.mean() <= tolerance:
            self.engine.served = ""  # the next request gets what was published before
            raise PublicationError(
                f"after publishing version {policy_version}, engine and trainer differ by "
                f"{gap.mean():.3f} in mean logprob on the probe (tolerance {tolerance})"
            )
        self._version = policy_version
        self._published = self.trainer.policy()
        return Publication(
            policy_version=policy_version,
            seconds=time.perf_counter() - started,
            probe_mean=float(gap.mean()),
            probe_max=float(gap.max()),
            tolerance=tolerance,
            rounding_lost=self.trainer.rounding_lost,
            changed=changed,
        )

    def _serve_trained(self, version: int) -> bool:
        """Load the trainer's policy into the engine and compare what it then holds, bit by bit."""
        trained = (
            self._effective(self.trainer.policy()) if self._serves_adapters else self.trainer.merged_weights()
        )
        changed = self.engine.load(trained, "current", version)
        if wrong := self.engine.holds(trained):
            self.engine.served = ""
            raise PublicationError(f"the engine does not hold what was published: {', '.join(wrong[:3])}")
        return changed

    async def _in_compute(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._compute.submit(work))

    async def _engine_call(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self.engine.call(work))

    # ---- saving -------------------------------------------------------------------------------

    async def save(self, folder: Path) -> None:
        await self._in_compute(partial(self.trainer.save, folder))
        version, internal, gauss = self.engine.random.getstate()
        record = {"policy_version": self._version, "engine_random": [version, list(internal), gauss]}
        (folder / "backend.json").write_text(json.dumps(record))

    async def load(self, folder: Path, *, policy_version: int) -> None:
        record = read_json(folder / "backend.json")
        try:
            version, internal, gauss = record["engine_random"]
            drawn = (version, tuple(internal), gauss)
            random.Random().setstate(drawn)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / 'backend.json'} holds no random state: {error!r}") from error
        await self._in_compute(partial(self.trainer.load, folder))
        self.engine.random.setstate(drawn)
        await self.publish_weights(policy_version)

    async def load_adapter(self, folder: Path) -> None:
        """Start from another run's adapter, with a fresh optimizer, as this run's version 0."""
        await self._in_compute(partial(self.trainer.load, folder, optimizer=False))
        await self.publish_weights(0)

    def describe(self) -> dict[str, Any]:
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        template = self.tokenizer.chat_template or ""
        digest = hashlib.sha256(repr((vocabulary, template)).encode()).hexdigest()[:16]
        lora = self.lora
        adapter = {"rank": lora.rank, "alpha": lora.alpha, "targets": lora.peft_targets}
        return {
            "identity": {
                "base_model": self.base_model,
                "tokenizer": digest,
                "adapter": None if self.trains_all else adapter,
            },
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.stack.device,
            "engine": self.stack.engine,
            "trainer": self.stack.trainer,
            "threads": torch.get_num_threads(),
            **self._sizes,
        }

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.engine.close()
        await asyncio.to_thread(self._compute.shutdown)
        if self._trainer is not None:  # the frames of an error that the kernel keeps may hold it
            vars(self._trainer).clear()
        self._trainer, self._published = None, {}


def _dtype(name: str | None, device: str) -> torch.dtype:
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name is None and device == "cuda":  # cards before Ampere emulate bf16
        return torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
    if name is None:
        return torch.bfloat16 if multiplies_bfloat16() else torch.float32
    if name not in known:
        raise ConfigurationError(f"dtype must be one of {', '.join(known)} or None, got {name!r}")
    return known[name]


def multiplies_bfloat16() -> bool:
    """True where this CPU has bf16 products; elsewhere they are emulated, many times slower than fp32."""
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def _tune_malloc() -> None:
    """Keep freed memory in the process: giving large tensors back to the system after every use
    costs more than the arithmetic on them. Affects glibc only."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library, which has its own ways
        log.debug("mallopt is not available here")
        return
    trim_threshold, top_pad, mmap_threshold, arena_max = -1, -2, -3, -8
    mallopt(arena_max, 1)  # other arenas are too small for large tensors
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, (1 << 31) - 1)
    mallopt(top_pad, 64 << 20)
