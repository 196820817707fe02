"""How does an OpenAI chat request reach the engine, and its tokens come back?

The app knows no network: ``client.py`` calls it in process, ``serve.py`` puts it on a loopback port.
Every choice carries the exact turn (prompt ids, sampled ids, logprobs, policy version).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
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
from artnb.streaming import Chunks, Spelling, Tokens
from artnb.turnstile import take_turn
from artnb.types import Message, Turn

__all__ = ["ChatApp", "ChatError", "Reply"]

_log = logging.getLogger(__name__)
_CHECKPOINT = re.compile(r"step_\d{6,}")
_PAUSE_SECONDS, _MOST_SHARE = 0.03, 0.1
"""Between two chunks of a stream, at least; and of the time, for reading what was sampled so far."""

Hear = Callable[[int, int], object]
"""Called with a choice's index and a token of it, on the engine's thread."""


@dataclass(frozen=True)
class Reply:
    """An HTTP answer without the HTTP: a JSON body, or the chunks of a stream."""

    status: int
    body: dict[str, Any] = field(default_factory=dict)
    chunks: AsyncGenerator[dict[str, Any]] | None = None

    @property
    def content_type(self) -> str:
        return "application/json" if self.chunks is None else "text/event-stream"

    def encode(self) -> bytes:
        """The body."""
        return json.dumps(self.body).encode()

    async def events(self) -> AsyncGenerator[bytes]:
        """The stream as server-sent events; closing them ends the sampling."""
        assert self.chunks is not None
        async with contextlib.aclosing(self.chunks):
            async for chunk in self.chunks:
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
        """The same answer as chat.completion.chunk objects, as it is sampled.

        What may still become a tool call, a stop string or markup waits until that is known. The last
        chunk of a choice carries its turn, with the exact tokens. Closing the iterator ends the sampling.
        """
        async with contextlib.aclosing(self._stream(read_request(body, self.sampling))) as chunks:
            async for chunk in chunks:
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
        except Exception as error:
            failure = _failure(error)
            return Reply(failure.status, failure.body())

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
                if request.stream:
                    return await _begun(self._stream(request))
                return Reply(200, await self._complete(request))
            case "GET", "/v1/models":
                return Reply(200, self.models())
            case "GET", model if model.startswith("/v1/models/"):
                name = model.removeprefix("/v1/models/")
                self._policy(name)
                return Reply(200, {"id": name, "object": "model", "created": 0, "owned_by": "artnb"})
        raise ChatError(404, f"no route {method} {path}: only chat completions and models are served")

    async def _stream(self, request: ChatRequest) -> AsyncGenerator[dict[str, Any]]:
        prompt, tokens = self._prompt(request), Tokens(request.n)
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": request.model}
        chunks, stop = Chunks(head), request.sampling.stop
        has_tools = bool(request.tools) and request.calls_allowed

        def parse(ids: Sequence[int]) -> Message:
            return self.renderer.parse(ids, None, prompt_ids=prompt.ids, stop=stop).message

        texts = [Spelling(parse, stop=stop, has_tools=has_tools) for _ in range(request.n)]
        answer = asyncio.create_task(self._complete(request, prompt, tokens.hear))
        answer.add_done_callback(lambda _: tokens.wake())
        try:
            while not answer.done():
                await tokens.news()
                started = time.perf_counter()
                for index, ids in enumerate(tokens.ids if not answer.done() else ()):
                    for chunk in chunks.of(index, texts[index].more(tuple(ids))):
                        yield chunk
                spent = time.perf_counter() - started
                await asyncio.wait({answer}, timeout=max(_PAUSE_SECONDS, spent / _MOST_SHARE))
            completion = await answer
            for choice in completion["choices"]:
                for chunk in chunks.of(choice["index"], texts[choice["index"]].rest(choice["message"])):
                    yield chunk
                yield chunks.last(choice)
            if request.include_usage:
                yield chunks.usage(completion["usage"])
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    async def _complete(
        self, request: ChatRequest, prompt: _Prompt | None = None, hear: Hear | None = None
    ) -> dict[str, Any]:
        policy = self._policy(request.model)
        prompt = prompt or self._prompt(request)
        sampling = self._fit(request, len(prompt.ids))
        samples = [self._sample(request, prompt.ids, sampling, policy, i, hear) for i in range(request.n)]
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
        hear: Hear | None,
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
            on_token=_listener(request, index, hear),
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


def _listener(request: ChatRequest, index: int, hear: Hear | None) -> Callable[[int], object] | None:
    """Who hears the tokens of a choice: its stream, and what ``listening`` was given."""
    listener = current_listener() if request.n == 1 else None
    if hear is None:
        return listener

    def both(token: int) -> None:
        hear(index, token)
        if listener is not None:
            listener(token)

    return both


async def _begun(chunks: AsyncGenerator[dict[str, Any]]) -> Reply:
    """A stream once its first chunk is there: what goes wrong before is an error with a status."""
    first = await anext(chunks)

    async def rest() -> AsyncGenerator[dict[str, Any]]:
        async with contextlib.aclosing(chunks):
            try:
                yield first
                async for chunk in chunks:
                    yield chunk
            except Exception as error:  # the status has been sent: clients raise what such a chunk says
                yield _failure(error).body()

    return Reply(200, chunks=rest())


def _failure(error: Exception) -> ChatError:
    """What the caller is told; of what was no mistake of theirs the log gets the traceback."""
    if isinstance(error, ChatError):
        return error
    if isinstance(error, RequestError):
        return ChatError(400, str(error))
    _log.error("a chat completion failed: %s", redact("".join(traceback.format_exception(error))))
    return ChatError(500, f"{type(error).__name__}: {error}")


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
