"""How does an OpenAI chat request reach the engine, and its tokens come back?

The app knows no network: ``client.py`` calls it in process, ``serve.py`` puts it on a loopback port.
Every choice carries the exact turn (prompt ids, sampled ids, logprobs, policy version).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from artnb.backends.base import Backend, SampleRequest, SampleResult
from artnb.chat_request import ChatError, ChatRequest, read_request
from artnb.config import SamplingConfig
from artnb.errors import CheckpointError, NonFiniteLogits, PromptTooLong, RequestError
from artnb.prompt_memory import PromptMemory, conversation_keys, next_key
from artnb.recording import current_listener, current_recorder, record
from artnb.rendering import Renderer
from artnb.secrets import redact
from artnb.turnstile import take_turn
from artnb.types import Message, Turn

__all__ = ["ChatApp", "ChatError", "Reply"]

_log = logging.getLogger(__name__)
_CHECKPOINT = re.compile(r"step_\d{6,}")
_PIECE = 32
"""Characters of content in one streamed chunk."""


@dataclass(frozen=True)
class Reply:
    """An HTTP answer without the HTTP: a JSON body, or the chunks of a stream."""

    status: int
    body: dict[str, Any] = field(default_factory=dict)
    chunks: tuple[dict[str, Any], ...] | None = None

    @property
    def content_type(self) -> str:
        return "application/json" if self.chunks is None else "text/event-stream"

    def encode(self) -> bytes:
        if self.chunks is None:
            return json.dumps(self.body).encode()
        return b"".join(self.events())

    def events(self) -> Iterator[bytes]:
        """The stream as server-sent events."""
        for chunk in self.chunks or ():
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


@dataclass(frozen=True)
class _Prompt:
    """What a request's messages became."""

    ids: tuple[int, ...]
    messages: tuple[Message, ...]
    """The request's messages, the model's own ones as it produced them (thinking included)."""
    key: bytes


class ChatApp:
    """OpenAI's chat completions over a backend.

    Model names: ``model_name`` is the current policy, ``model_name@base`` the untrained model,
    ``model_name@step_000012`` a saved checkpoint. May be called from several event loops at once if
    the backend's ``sample`` may.
    """

    def __init__(
        self,
        backend: Backend,
        renderer: Renderer,
        *,
        model_name: str,
        sampling: SamplingConfig | None = None,
    ) -> None:
        self.backend = backend
        self.renderer = renderer
        self.model_name = model_name
        self.sampling = sampling or SamplingConfig()
        self.memory = PromptMemory()
        self._first_prompts: dict[bytes, tuple[int, ...]] = {}

    async def completions(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a chat.completions request. Raises ChatError with OpenAI's status and code."""
        return await self._complete(read_request(body, self.sampling))

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The same answer as chat.completion.chunk objects.

        The engine returns whole turns, so the pieces come together once the turn is complete. The
        last chunk of a choice carries its turn.
        """
        request = read_request(body, self.sampling)
        for chunk in _chunks(await self._complete(request), request.include_usage):
            yield chunk

    def models(self) -> dict[str, Any]:
        """What GET /v1/models answers; any saved checkpoint can be asked for too."""
        version = self.backend.policy_version
        known = [(self.model_name, version), (f"{self.model_name}@base", -1)]
        entries = [
            {"id": name, "object": "model", "created": 0, "owned_by": "artnb", "policy_version": number}
            for name, number in known
        ]
        return {"object": "list", "data": entries}

    async def reply(self, method: str, path: str, content: bytes) -> Reply:
        """Route one HTTP request; mistakes and failures become OpenAI error bodies."""
        try:
            return await self._route(method, path, content)
        except ChatError as error:
            return Reply(error.status, error.body())
        except RequestError as error:
            return Reply(400, ChatError(400, str(error)).body())
        except Exception as error:  # the caller gets an answer, the log gets the traceback
            _log.error("a chat completion failed: %s", redact(traceback.format_exc()))
            failure = ChatError(500, f"{type(error).__name__}: {error}")
            return Reply(500, failure.body())

    async def _route(self, method: str, path: str, content: bytes) -> Reply:
        match method, path.rstrip("/"):
            case "POST", "/v1/chat/completions":
                try:
                    body = json.loads(content)
                except ValueError as error:
                    raise ChatError(400, f"the request body is not JSON: {error}") from error
                if not isinstance(body, dict):
                    raise ChatError(400, "the request body must be a JSON object")
                request = read_request(body, self.sampling)
                completion = await self._complete(request)
                if request.stream:
                    return Reply(200, chunks=tuple(_chunks(completion, request.include_usage)))
                return Reply(200, completion)
            case "GET", "/v1/models":
                return Reply(200, self.models())
            case "GET", model if model.startswith("/v1/models/"):
                name = model.removeprefix("/v1/models/")
                self._policy(name)
                return Reply(200, {"id": name, "object": "model", "created": 0, "owned_by": "artnb"})
        raise ChatError(404, f"no route {method} {path}: only chat completions and models are served")

    async def _complete(self, request: ChatRequest) -> dict[str, Any]:
        policy = self._policy(request.model)
        prompt = self._prompt(request)
        sampling = self._fit(request, len(prompt.ids))
        samples = [self._sample(request, prompt.ids, sampling, policy, i) for i in range(request.n)]
        results = [await samples[0]] if request.n == 1 else await _together(samples)
        await take_turn()  # the answers of a batch come all at once
        choices = [
            self._choice(request, index, prompt, result, policy) for index, result in enumerate(results)
        ]
        completion_tokens = sum(len(result.completion_ids) for result, *_ in results)
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": len(prompt.ids),
                "completion_tokens": completion_tokens,
                "total_tokens": len(prompt.ids) + completion_tokens,
            },
        }

    def _policy(self, name: str) -> str:
        base, _, policy = name.partition("@")
        if base == self.model_name and (policy in ("", "base") or _CHECKPOINT.fullmatch(policy)):
            return policy or "current"
        raise self._unknown_model(name)

    def _unknown_model(self, name: str) -> ChatError:
        known = f"{self.model_name}, {self.model_name}@base, {self.model_name}@step_NNNNNN (a checkpoint)"
        return ChatError(
            404, f"model {name!r} does not exist here; known: {known}", param="model", code="model_not_found"
        )

    def _prompt(self, request: ChatRequest) -> _Prompt:
        """The next prompt: the rollout's own tokens extended where possible, else rendered afresh."""
        messages = tuple(request.messages)
        keys = conversation_keys(messages, request.tools, self.renderer.scope)
        recorder = current_recorder()
        for memory in (recorder.memory, self.memory) if recorder else (self.memory,):
            found = memory.find(keys)
            if found is not None:
                turn, new = found.turn, messages[len(found.messages) :]
                bridged = self.renderer.bridge(
                    turn.prompt_ids, turn.completion_ids, found.messages, new, request.tools
                )
                if bridged is not None:
                    return _Prompt(bridged, found.messages + new, keys[-1])
        if any(message["role"] == "assistant" for message in messages):
            return _Prompt(self.renderer.render(messages, request.tools), messages, keys[-1])
        return _Prompt(self._first_prompt(request, keys[-1]), messages, keys[-1])

    def _first_prompt(self, request: ChatRequest, key: bytes) -> tuple[int, ...]:
        """Prompts without an earlier answer repeat within a group, so the last ones are kept."""
        prompt_ids = self._first_prompts.get(key)
        if prompt_ids is None:
            prompt_ids = self.renderer.render(request.messages, request.tools)
            if len(self._first_prompts) >= 1024:
                self._first_prompts.clear()
            self._first_prompts[key] = prompt_ids
        return prompt_ids

    def _fit(self, request: ChatRequest, prompt_tokens: int) -> SamplingConfig:
        limit, asked = self.backend.max_context, request.sampling.max_tokens
        room = limit - prompt_tokens
        if request.fits_context and 1 <= room < asked:
            return request.sampling.replace(max_tokens=room)
        if room < asked:
            asked = 1 if request.fits_context else asked
            raise _too_long(
                f"the context holds {limit} tokens; the prompt has {prompt_tokens} and {asked} more were "
                "asked for. Shorten the messages or lower max_tokens."
            )
        return request.sampling

    async def _sample(
        self,
        request: ChatRequest,
        prompt_ids: tuple[int, ...],
        sampling: SamplingConfig,
        policy: str,
        index: int,
    ) -> tuple[SampleResult, SamplingConfig, float]:
        if index and sampling.seed is not None:
            sampling = sampling.replace(seed=sampling.seed + index)
        sample = SampleRequest(
            prompt_ids,
            sampling,
            stop_ids=self.renderer.stop_ids,
            top_logprobs=request.top_logprobs,
            request_id=uuid.uuid4().hex[:12],
            structured=request.structured,
            on_token=current_listener() if request.n == 1 else None,
        )
        started = time.time()
        try:
            return await self.backend.sample(sample, policy=policy), sampling, started
        except PromptTooLong as error:
            raise _too_long(str(error)) from error
        except NonFiniteLogits as error:
            raise ChatError(500, str(error), code="non_finite_logits") from error
        except CheckpointError as error:
            raise self._unknown_model(request.model) from error

    def _choice(
        self,
        request: ChatRequest,
        index: int,
        prompt: _Prompt,
        sampled: tuple[SampleResult, SamplingConfig, float],
        policy: str,
    ) -> dict[str, Any]:
        result, sampling, started = sampled
        tools = request.tools if request.calls_allowed else None
        parsed = self.renderer.parse(result.completion_ids, tools, prompt_ids=prompt.ids, stop=sampling.stop)
        message = parsed.message
        if parsed.tool_call_error:
            message["tool_call_error"] = parsed.tool_call_error
        called = bool(message.get("tool_calls")) and result.finish_reason == "stop"
        turn = Turn(
            prompt_ids=prompt.ids,
            completion_ids=result.completion_ids,
            logprobs=result.logprobs,
            policy_version=result.policy_version,
            finish_reason="tool_calls" if called else result.finish_reason,
            message=message,
            sampling=_sampling_json(sampling, request.structured),
            timing={"started": started, "queued": result.queued, "seconds": result.seconds},
        )
        self._keep(request, prompt, turn, policy)
        return {
            "index": index,
            "message": message,
            "finish_reason": turn.finish_reason,
            "logprobs": {"content": self._logprobs(result)} if request.logprobs else None,
            "artnb": turn.to_json(),
            "prompt_token_ids": prompt.ids,
            "token_ids": turn.completion_ids,
            "policy_version": turn.policy_version,
        }

    def _keep(self, request: ChatRequest, prompt: _Prompt, turn: Turn, policy: str) -> None:
        key = next_key(prompt.key, turn.message)
        conversation = (*prompt.messages, turn.message)
        self.memory.remember(key, conversation, turn)
        recorder = current_recorder()
        if recorder is not None:
            recorder.memory.remember(key, conversation, turn)
            record(request.messages, request.tools, turn, policy=policy)

    def _logprobs(self, result: SampleResult) -> list[dict[str, Any]]:
        alternatives = result.top_logprobs or ((),) * len(result.completion_ids)
        return [
            {
                **self._token_json(token, logprob),
                "top_logprobs": [self._token_json(other, value) for other, value in others],
            }
            for token, logprob, others in zip(
                result.completion_ids, result.logprobs, alternatives, strict=True
            )
        ]

    def _token_json(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.backend.tokenizer.decode([token])
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


def _too_long(message: str) -> ChatError:
    return ChatError(400, message, param="messages", code="context_length_exceeded")


async def _together(samples: Sequence[Any]) -> list[Any]:
    """Await all; when one fails or the caller is cancelled, cancel and await the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(sample) for sample in samples]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


def _sampling_json(sampling: SamplingConfig, structured: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        **({"structured": structured} if structured else {}),
    }


def _chunks(completion: Mapping[str, Any], include_usage: bool) -> Iterator[dict[str, Any]]:
    head = {key: completion[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"

    def chunk(index: int, delta: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": None, **more}
        return {**head, "choices": [choice]}

    for choice in completion["choices"]:
        index, message = choice["index"], choice["message"]
        yield chunk(index, {"role": "assistant", "content": ""})
        for key in ("reasoning_content", "content"):
            text = message.get(key) or ""
            for start in range(0, len(text), _PIECE):
                yield chunk(index, {key: text[start : start + _PIECE]})
        for number, call in enumerate(message.get("tool_calls") or ()):
            yield chunk(index, {"tool_calls": [{"index": number, **call}]})
        last = {k: v for k, v in choice.items() if k not in ("index", "message")}
        yield chunk(index, {}, **last)
    if include_usage:
        yield {**head, "choices": [], "usage": completion["usage"]}
