"""How does a kernel without vLLM sample? Continuous batching over transformers' own modules.

The engine works on one thread that it may share with a trainer. Between decode steps requests join
and leave; prompts that share a prefix compute it once; a finished turn's keys and values wait for
the next turn.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import torch

from artnb.backends import sampler
from artnb.backends.attention import NAME, AttentionPlan
from artnb.backends.base import SampleRequest, SampleResult
from artnb.backends.decoder import Weights, make_decoder
from artnb.backends.engine_loop import EngineLoop, fail
from artnb.backends.kv_cache import BatchPlan, Block, BlockPlan, KVCache, Slot
from artnb.backends.prefixes import shared_prefixes
from artnb.errors import ConfigurationError, NonFiniteLogits, RequestError


@dataclass(eq=False)
class _Running:
    request: SampleRequest
    future: Future[SampleResult]
    submitted: float
    policy: str
    random: random.Random
    slot: Slot | None = None
    pending: list[int] = field(default_factory=list)
    """Tokens that the model has to read before it can sample the next one."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    started: float = 0.0


class TorchEngine(EngineLoop[_Running]):
    """Samples from one set of merged weights at a time.

    model: a causal language model loaded with ``attn_implementation="artnb"``. Its parameters are
    shared; only linear layers get packed copies. provider: returns the linear weights of a policy
    by layer name and the policy's version; called when requests ask for another policy than the one
    served. compute: an executor with one thread, on which every step runs; the constructor must run
    there too.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        provider: Callable[[str], tuple[Weights, int]],
        compute: Executor,
        *,
        max_running: int = 128,
        prefill_tokens: int = 2048,
        kv_bytes: int = 3 << 30,
        seed: int = 0,
    ) -> None:
        super().__init__(compute, provider)
        sizes = {"max_running": max_running, "prefill_tokens": prefill_tokens, "kv_bytes": kv_bytes}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigurationError(f"{name} must be >= 1, got {size}")
        self.decoder = make_decoder(model)
        config = model.config.get_text_config()
        assert config._attn_implementation == NAME
        self.max_context = int(config.max_position_embeddings)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache = KVCache(
            config.num_hidden_layers,
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim,
            model.dtype,
            slots=max_running,
            budget_bytes=kv_bytes,
        )
        self.max_context = min(self.max_context, self.cache.max_tokens)
        self.tokenizer = tokenizer
        self.prefill_tokens = prefill_tokens
        self.random = random.Random(seed)
        self.counters = {"prompt_tokens": 0, "computed_prompt_tokens": 0, "sampled_tokens": 0, "steps": 0}
        self._running: list[_Running] = []
        self._recent: deque[tuple[int, ...]] = deque(maxlen=64)

    # ---- called from any thread -------------------------------------------------------------

    def submit(self, request: SampleRequest, *, policy: str = "current") -> Future[SampleResult]:
        """Queue a request. Cancelling the future frees its slot before the next decode step."""
        self._check(request)
        future: Future[SampleResult] = Future()
        if request.structured is not None:
            raise RequestError("the torch engine cannot force a form on a completion; the vLLM engine can")
        seed = request.sampling.seed
        source = random.Random(seed) if seed is not None else self.random
        running = _Running(request, future, time.time(), policy, source, pending=list(request.prompt_ids))
        self._post(lambda: self._waiting.append(running))
        return future

    # ---- on the compute thread --------------------------------------------------------------

    def load(self, weights: Weights, policy: str, version: int) -> bool:
        """Serve these linear weights; drops every cached key. True when any of them changed."""
        self.served = ""  # should an exchange stop half way, the next request loads its policy anew
        changed = self.decoder.load(weights)
        self.cache.clear()
        self._recent.clear()
        self.served, self.version = policy, version
        return changed

    def holds(self, weights: Weights) -> list[str]:
        """Names among these layers whose weight is not, bit for bit, the one served."""
        return self.decoder.holds(weights)

    def score(self, ids: Sequence[int]) -> torch.Tensor:
        """Logprobs (T - 1,) of each token after the first under the served weights, temperature 1."""
        block = Block(tuple(ids))
        with torch.inference_mode():
            hidden = self._forward(list(ids), torch.arange(len(ids)), BlockPlan(block, 0))
            logprobs = self.decoder.logits(hidden[:-1]).float().log_softmax(-1)
            return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    def _futures(self) -> Iterator[Future[Any]]:
        return (r.future for r in (*self._running, *self._waiting))

    def _recover(self, error: Exception) -> None:
        """After a step that failed: what it had begun to write into the cache is erased."""
        for running in list(self._running):
            fail(running.future, RequestError(f"the engine failed: {error}"), error)
            self._end(running, keep=False)

    def _release(self) -> None:
        self._running.clear()
        self._waiting.clear()
        del self.decoder, self.cache

    def _wait_for_more(self) -> None:
        """Give the others of a crowd a moment to arrive: prompts that come together share prefixes."""
        for _ in range(100):
            waiting = len(self._waiting)
            if self._commands or waiting in (0, len(self.cache.slots)):
                break
            time.sleep(0.003)
            self._receive()
            if len(self._waiting) == waiting:
                break

    def _step(self) -> None:
        if not self._running:
            self._wait_for_more()
        if self._closed:  # while it waited
            return
        with torch.inference_mode():
            self._take_step()

    def _take_step(self) -> None:
        for gone in [r for r in self._running if r.future.cancelled()]:
            self._end(gone, keep=bool(gone.ids))
        # a request that lost its slot half way goes on under the policy it began with
        paused = any(r.ids for r in self._waiting)
        if self._commands and not self._running and not paused:
            return self._obey()
        if paused or not self._commands:
            self._admit(only_paused=bool(self._commands))
        if not self._running:
            return
        batch, budget = [], self.prefill_tokens
        for running in sorted(self._running, key=lambda r: len(r.pending)):
            tokens = running.pending[: max(1, budget)]
            budget -= len(tokens)
            batch.append((running, tokens))
            if budget <= 0:
                break
        self._make_room(max(len(r.slot.tokens) + len(t) for r, t in batch if r.slot))
        # making room takes slots away and moves others; a budget used up may leave a prompt one token
        batch = sorted(((r, t) for r, t in batch if r.slot), key=_by_slot)
        if not batch:
            return
        for running, tokens in batch:
            assert running.slot is not None
            running.slot.tokens += tokens
            del running.pending[: len(tokens)]
        plan = BatchPlan(self.cache, [(r.slot, len(t)) for r, t in batch if r.slot])
        hidden = self._forward([t for _, tokens in batch for t in tokens], plan.positions_N, plan)
        ends = torch.tensor([len(t) for _, t in batch]).cumsum(0) - 1
        ready = [i for i, (r, _) in enumerate(batch) if not r.pending]
        self.counters["steps"] += 1
        if ready:
            self._sample([batch[i][0] for i in ready], hidden[ends[ready]])

    def _forward(self, ids: list[int], positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        return self.decoder.forward(torch.tensor(ids), positions, plan)

    # ---- admission --------------------------------------------------------------------------

    def _admit(self, *, only_paused: bool) -> None:
        if not self._may_admit(is_idle=not self._running):
            return
        free = len(self.cache.slots) - len(self._running)
        candidates = [r for r in self._served_waiting() if r.ids or not only_paused][:free]
        if not candidates:
            return
        self._leave_queue(candidates)
        self._running += candidates
        idle = self.cache.idle_by_sequence()
        lengths = sorted({len(tokens) for tokens in idle}, reverse=True)
        self._share_prefixes(candidates, idle, lengths)
        now = time.time()
        for running in candidates:
            prompt = running.request.prompt_ids
            known = (*prompt, *running.ids)
            continued = _continued(known, idle, lengths)
            block = continued.block if continued else self.cache.find_block(known)
            running.slot = self.cache.take(block, reuse=continued)
            running.pending = list(known[running.slot.length :])
            running.started = running.started or now
            self._recent.append(prompt)
            self.counters["prompt_tokens"] += len(known)
            self.counters["computed_prompt_tokens"] += len(running.pending)
        self.cache.compact()

    def _share_prefixes(
        self, candidates: list[_Running], idle: dict[tuple[int, ...], Slot], lengths: list[int]
    ) -> None:
        prompts = [r.request.prompt_ids for r in candidates]
        fresh = [prompt for prompt in prompts if _continued(prompt, idle, lengths) is None]
        if not fresh:
            return
        # prompts seen a moment ago tell that a lone newcomer belongs to a crowd
        prompts = fresh + [p for p in self._recent if p not in fresh] if len(fresh) < 8 else fresh
        blocks = [self.cache.find_block(p) for p in prompts]
        known = [len(b.tokens) if b else 0 for b in blocks]
        for tokens in shared_prefixes(prompts, known):
            if not any(prompt[: len(tokens)] == tokens for prompt in fresh):
                continue  # only earlier prompts share it
            parent = self.cache.find_block((*tokens, -1))
            if parent is None or len(parent.tokens) < len(tokens):
                self._compute_block(tokens, parent)

    def _compute_block(self, tokens: tuple[int, ...], parent: Block | None) -> None:
        block = Block(tokens)
        done = 0
        if parent:
            block.keys, block.values = list(parent.keys), list(parent.values)
            done = len(parent.tokens)
        while done < len(tokens):
            part = list(tokens[done : done + self.prefill_tokens])
            self._forward(part, torch.arange(done, done + len(part)), BlockPlan(block, done))
            done += len(part)
            self.counters["computed_prompt_tokens"] += len(part)
        self.cache.add_block(block)

    def _make_room(self, tokens: int) -> None:
        if tokens <= self.cache.capacity:
            return
        capacity = self.cache.capacity
        while capacity < tokens:
            capacity *= 2
        capacity = min(capacity, max(tokens, self.cache.max_tokens))
        while self.cache.slots_at(capacity) < len(self._running):
            # longer sequences leave fewer slots: the newest ones go on later
            last = max(self._running, key=lambda r: r.started)
            self._running.remove(last)
            assert last.slot is not None
            self.cache.release(last.slot, forget=True)
            last.slot = None
            self._waiting.appendleft(last)
        self.cache.resize(capacity)

    # ---- sampling ---------------------------------------------------------------------------

    def _sample(self, ready: list[_Running], hidden: torch.Tensor) -> None:
        samplings = [r.request.sampling for r in ready]
        uniform = [r.random.random() for r in ready]
        drawn = sampler.draw(self.decoder.logits(hidden), samplings, uniform)
        ids, chosen, logits, log_total = drawn
        for row, running in enumerate(ready):
            if not math.isfinite(chosen[row]):
                name = running.request.request_id or "(unnamed)"
                fail(running.future, NonFiniteLogits(f"request {name}: the model produced NaN or inf logits"))
                self._end(running, keep=False)
                continue
            self.counters["sampled_tokens"] += 1
            running.ids.append(ids[row])
            running.logprobs.append(chosen[row])
            if running.request.on_token is not None:
                running.request.on_token(ids[row])
            if count := running.request.top_logprobs:
                best = (logits[row] - log_total[row]).topk(count)
                running.top.append(tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
            reason = self._finish_reason(running)
            if reason is None:
                running.pending.append(ids[row])
            else:
                self._finish(running, reason)

    def _finish_reason(self, running: _Running) -> str | None:
        request, ids = running.request, running.ids
        if ids[-1] in request.stop_ids:
            return "stop"
        stops = request.sampling.stop
        if stops:
            # one token may carry the end of a stop string and more text after it
            longest = max(len(stop.encode()) for stop in stops)  # a token holds at least one byte
            tail = self.tokenizer.decode(ids[-(longest + 4) :])
            if any(stop in tail for stop in stops):
                return "stop"
        return "length" if len(ids) >= request.sampling.max_tokens else None

    def _finish(self, running: _Running, reason: str) -> None:
        result = SampleResult(
            completion_ids=tuple(running.ids),
            logprobs=tuple(running.logprobs),
            finish_reason=reason,
            policy_version=self.version,
            top_logprobs=tuple(running.top),
            queued=running.started - running.submitted,
            seconds=time.time() - running.submitted,
        )
        self._end(running, keep=True)
        if running.future.set_running_or_notify_cancel():
            running.future.set_result(result)

    def _end(self, running: _Running, *, keep: bool) -> None:
        """Free the slot. ``keep`` its content for a next turn, unless it may be wrong."""
        self._running.remove(running)
        if running.slot is not None:
            self.cache.release(running.slot, forget=not keep)
            if not keep:
                self.cache.erase(running.slot)


def _continued(prompt: tuple[int, ...], idle: dict[tuple[int, ...], Slot], lengths: list[int]) -> Slot | None:
    """The idle slot whose whole sequence the prompt continues: the next turn of a conversation."""
    for length in lengths:
        slot = idle.get(prompt[:length]) if length < len(prompt) else None
        if slot is not None and not slot.busy and slot.length == length:
            return slot
    return None


def _by_slot(entry: tuple[_Running, list[int]]) -> tuple[int, int]:
    """Decoding rows first, in the order of their slots."""
    running, tokens = entry
    return len(tokens), running.slot.row if running.slot else 0
