"""What can be tried without a model? A complete backend that makes its answers up, in a millisecond.

Tests, examples and the screens use it. It needs neither torch nor transformers: its tokenizer is one
token a byte with a ChatML template, its replies are scripted or drawn from a seed, and training moves
nothing but the version number.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from artnb.backends.base import Publication, SampleRequest, SampleResult
from artnb.config import TrainConfig
from artnb.errors import CheckpointError, PromptTooLong
from artnb.types import Sample

Script = Sequence[str] | Callable[[str, int], str]
"""Replies in turn, over and over; or a function of the prompt's text and the policy version."""

_WORDS = ("the", "fox", "went", "up", "and", "found", "an", "open", "door", "so", "it", "sat", "down")
_FILE = "fake.json"


class FakeTokenizer:
    """One token a byte, and the two markers of ChatML; speaks as much of transformers as artnb uses.

    >>> tokenizer = FakeTokenizer()
    >>> tokenizer.decode(tokenizer.encode("<|im_start|>é"))
    '<|im_start|>é'
    """

    name_or_path = "fake"
    all_special_tokens = ("<|im_start|>", "<|im_end|>")
    added_tokens_decoder: Mapping[int, str] = {256: "<|im_start|>", 257: "<|im_end|>"}
    bos_token_id, eos_token_id, pad_token_id = None, 257, 257
    eos_token = pad_token = "<|im_end|>"
    model_max_length = 4096
    chat_template = "<|im_start|>{role}\n{content}<|im_end|>\n"
    """For people; ``apply_chat_template`` needs no jinja."""

    def __len__(self) -> int:
        return 258

    @property
    def vocab_size(self) -> int:
        return len(self)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        for piece in re.split(r"(<\|im_start\|>|<\|im_end\|>)", text):
            if piece in self.all_special_tokens:
                ids.append(256 + self.all_special_tokens.index(piece))
            else:
                ids.extend(piece.encode())
        return ids

    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        parts: list[bytes] = []
        for i in [ids] if isinstance(ids, int) else ids:
            if i < 256:
                parts.append(bytes([i]))
            elif not skip_special_tokens:
                parts.append(self.added_tokens_decoder[i].encode())
        return b"".join(parts).decode(errors="replace")

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return next((i for i, name in self.added_tokens_decoder.items() if name == token), None)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **_: Any,
    ) -> str | list[int]:
        text = "".join(self.chat_template.format(**m) for m in messages)
        if add_generation_prompt:
            text += "<|im_start|>assistant\n"
        return self.encode(text) if tokenize else text


class FakeBackend:
    """A Backend (see base.py) without a model.

    A script that raises makes the request fail with that error; one without an end marker ends its
    reply where max_tokens or a stop string says.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        script: Script | None = None,
        delay: float = 0.0,
        *,
        seed: int = 0,
        max_context: int = 4096,
        base_model: str = "fake",
    ) -> None:
        self.tokenizer = tokenizer or FakeTokenizer()
        self.base_model = base_model
        self.max_context = max_context
        self.delay = delay
        """Seconds from a request to its reply."""
        self.requests: list[SampleRequest] = []
        """Every request that was accepted, in order."""
        self.active = 0
        """Requests being answered now."""
        self.cancelled = 0
        self.closed = False
        self._script = script
        self._seed = seed
        self._version = 0
        self._served = {0}
        self._gradient_rows = 0
        self._steps = 0
        self._published_steps = 0

    @property
    def policy_version(self) -> int:
        return self._version

    async def sample(self, request: SampleRequest, *, policy: str = "current") -> SampleResult:
        version = self._version_of(policy)
        asked = len(request.prompt_ids) + request.sampling.max_tokens
        if asked > self.max_context:
            raise PromptTooLong(
                f"the context holds {self.max_context} tokens, {asked} were asked for (prompt and completion)"
            )
        started = time.perf_counter()
        number = len(self.requests)
        self.requests.append(request)
        self.active += 1
        rng = random.Random(self._seed_of(request, number))
        try:
            await asyncio.sleep(self.delay if request.on_token is None else 0)
            completion_ids, finish_reason = self._reply(request, version, number, rng)
            await self._tell(request, completion_ids)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1
        logprobs = tuple(-rng.random() for _ in completion_ids)
        return SampleResult(
            completion_ids,
            logprobs,
            finish_reason,
            version,
            top_logprobs=self._alternatives(completion_ids, logprobs, request.top_logprobs),
            seconds=time.perf_counter() - started,
        )

    async def _tell(self, request: SampleRequest, ids: Sequence[int]) -> None:
        """Spread the delay of a request that is watched over its tokens."""
        if request.on_token is not None:
            for token in ids:
                request.on_token(token)
                await asyncio.sleep(self.delay / len(ids))

    def _version_of(self, policy: str) -> int:
        if policy in ("current", "base"):
            return self._version if policy == "current" else -1
        name = re.fullmatch(r"step_(\d+)", policy)
        if name is None or int(name[1]) not in self._served:
            raise CheckpointError(f"there is no checkpoint {policy!r}")
        return int(name[1])

    def _seed_of(self, request: SampleRequest, number: int) -> str:
        sampling = request.sampling
        alone = sampling.seed is not None or sampling.temperature == 0
        return f"{self._seed}/{sampling.seed}/{'' if alone else number}/{hash(request.prompt_ids)}"

    def _reply(
        self, request: SampleRequest, version: int, number: int, rng: random.Random
    ) -> tuple[tuple[int, ...], str]:
        if self._script is None:
            text = " ".join(rng.choices(_WORDS, k=rng.randint(1, 6)))
        elif callable(self._script):
            text = self._script(self.tokenizer.decode(list(request.prompt_ids)), version)
        else:
            text = self._script[number % len(self._script)]
        stops = [p + len(s) for s in request.sampling.stop if (p := text.find(s)) >= 0]
        ids = self.tokenizer.encode(text[: min(stops)] if stops else text, add_special_tokens=False)
        if not stops:
            ids = [*ids, *request.stop_ids[:1]]
        limit = request.sampling.max_tokens
        return tuple(ids[:limit]), "stop" if len(ids) <= limit else "length"

    def _alternatives(
        self, ids: Sequence[int], logprobs: Sequence[float], count: int
    ) -> tuple[tuple[tuple[int, float], ...], ...]:
        if not count:
            return ()
        return tuple(
            ((i, logprob), *(((i + k) % len(self.tokenizer), logprob - k) for k in range(1, count)))
            for i, logprob in zip(ids, logprobs, strict=True)
        )

    async def forward_backward(
        self, samples: Sequence[Sample], config: TrainConfig, *, loss_denominator: float
    ) -> dict[str, float]:
        self._gradient_rows += len(samples)
        gained = sum(a * w for row in samples for a, w in zip(row.advantages_T, row.weights_T, strict=True))
        tokens = sum(row.sampled_tokens for row in samples)
        return {"loss": -gained / loss_denominator, "tokens": float(tokens)}

    async def optim_step(self, config: TrainConfig) -> dict[str, float]:
        rows, self._gradient_rows = self._gradient_rows, 0
        self._steps += rows > 0
        return {"grad_norm": float(rows > 0)}

    async def publish_weights(self, policy_version: int) -> Publication:
        changed = self._steps != self._published_steps
        self._version, self._published_steps = policy_version, self._steps
        self._served.add(policy_version)
        return Publication(
            policy_version,
            seconds=0.0,
            probe_mean=0.0,
            probe_max=0.0,
            tolerance=0.0,
            rounding_lost=0.0,
            changed=changed,
        )

    async def snapshot(self) -> Any:
        return self._steps, self._published_steps, self._version

    async def restore(self, snapshot: Any) -> None:
        self._steps, self._published_steps, self._version = snapshot
        self._gradient_rows = 0

    async def save(self, folder: Path) -> None:
        state = {"base_model": self.base_model, "optimizer_steps": self._steps}
        (folder / _FILE).write_text(json.dumps(state), encoding="utf-8")

    async def load(self, folder: Path, *, policy_version: int) -> None:
        self._steps = _saved_steps(folder)
        self._version, self._published_steps = policy_version, self._steps
        self._served.add(policy_version)

    async def load_adapter(self, folder: Path) -> None:
        _saved_steps(folder)
        self._steps = self._published_steps = self._version = 0

    def describe(self) -> dict[str, Any]:
        return {
            "identity": {
                "base_model": self.base_model,
                "tokenizer": self.tokenizer.name_or_path,
                "adapter": {},
            },
            "engine": "fake",
            "device": "none",
            "dtype": "none",
        }

    async def close(self) -> None:
        self.closed = True


def _saved_steps(folder: Path) -> int:
    try:
        return int(json.loads((folder / _FILE).read_text(encoding="utf-8"))["optimizer_steps"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} holds no checkpoint of FakeBackend: {error}") from error
