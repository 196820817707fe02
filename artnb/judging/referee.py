"""How is a judge asked? One chat completion at a time, patient with busy endpoints, clear about wrong keys.

A referee is any OpenAI-compatible endpoint, or the model in this kernel with its adapter off.
"""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from artnb.errors import ArtnbError, ConfigurationError
from artnb.secrets import redact

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the second try of a busy endpoint, and at most between two tries."""
LONGEST_RETRY_AFTER = 300.0
"""An endpoint that asks for more patience than this is not waited for."""
_CHARACTERS_A_TOKEN = 2.5
"""Of an unknown tokenizer, on the safe side for English."""
_MARGIN = 256
"""Tokens of the chat template that nobody counts."""


class JudgeError(ArtnbError):
    """A judge cannot be asked this question; others may be."""


class JudgeRefused(JudgeError):
    """Asking again is useless for every question: a wrong key, an unknown model."""


@dataclass(frozen=True)
class Reply:
    """What the judge answered, and what it took."""

    text: str
    finish_reason: str = "stop"
    input_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    tries: int = 1


@dataclass
class Referee:
    """A judge that can be asked.

    name: stands in results. model: what the request names. client: an ``openai.AsyncOpenAI``.
    context: tokens it can read and write. options: further fields of the request.
    price: dollars for a million tokens read and written, None when nobody said.
    """

    name: str
    model: str
    client: Any
    context: int = 32_768
    max_tokens: int = 2048
    timeout: float = 120.0
    tries: int = 5
    price: tuple[float, float] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    """What decides its answers beside the request: the endpoint, the weights. Part of the cache's key."""
    count_tokens: Callable[[str], int] | None = None
    is_ours: bool = False
    """Made for one call of ``judge``, which closes its client."""
    takes_schema: bool = True
    limit_field: str = "max_tokens"
    """Newer endpoints call it ``max_completion_tokens``, and say so."""

    def fits(self, text: str) -> bool:
        """Whether a request of this text leaves room for the answer."""
        room = self.context - self.max_tokens - _MARGIN
        count = self.count_tokens(text) if self.count_tokens else len(text) / _CHARACTERS_A_TOKEN
        return count <= room

    def cost(self, input_tokens: float, output_tokens: float) -> float | None:
        """Dollars, None without a price."""
        if self.price is None:
            return None
        return (input_tokens * self.price[0] + output_tokens * self.price[1]) / 1e6

    def body(
        self, messages: list[dict[str, str]], schema: Mapping[str, Any] | None, max_tokens: int
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": messages, self.limit_field: max_tokens}
        if schema is not None and self.takes_schema:
            held = {"name": "answer", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": held}
        return body | dict(self.options)

    async def ask(
        self,
        messages: list[dict[str, str]],
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> Reply:
        """One answer. Waits and asks again where the endpoint is busy or does not answer in time.

        Raises JudgeRefused (wrong key, unknown model), JudgeError (no answer after ``tries``).
        """
        started, problem = time.monotonic(), ""
        tries = 0
        while tries < self.tries:
            tries += 1
            try:
                async with asyncio.timeout(self.timeout):  # of httpx only a silence has an end
                    body = self.body(messages, schema, max_tokens or self.max_tokens)
                    completion = await self.client.chat.completions.create(**body)
                reply = _reply(completion)
            except Exception as error:
                if self._learns_from(error, schema):
                    tries -= 1
                    continue
                problem = _words(error, self.timeout)
                pause = _pause(error, tries)
                if pause is None:
                    raise _fatal(error, self.name, problem) from error
                if tries < self.tries:
                    await asyncio.sleep(pause)
                continue
            seconds = time.monotonic() - started
            return Reply(*reply, seconds=seconds, tries=tries)
        raise JudgeError(f"judge {self.name} gave no answer in {tries} tries; the last time: {problem}")

    def _learns_from(self, error: Exception, schema: Any) -> bool:
        """Endpoints say with 400 or 422 which field they do not take; they are asked without it."""
        if _status(error) not in (400, 422):
            return False
        said = str(error).lower()
        if "max_completion_tokens" in said and self.limit_field == "max_tokens":
            self.limit_field = "max_completion_tokens"
            return True
        if schema is not None and self.takes_schema:  # each says it in other words: try without
            self.takes_schema = False
            return True
        return False


def _reply(completion: Any) -> tuple[str, str, int, int]:
    choices = getattr(completion, "choices", None)
    if not choices:
        said = redact(str(completion))[:100]
        raise _NoCompletion(f"the endpoint's answer is no chat completion: {said!r}")
    choice, usage = choices[0], getattr(completion, "usage", None)
    refusal = getattr(choice.message, "refusal", None)
    text = choice.message.content or (f"I refuse: {refusal}" if refusal else "")
    counts = [int(getattr(usage, name, 0) or 0) for name in ("prompt_tokens", "completion_tokens")]
    return text, str(choice.finish_reason or "stop"), counts[0], counts[1]


class _NoCompletion(Exception):
    pass


def _status(error: Exception) -> int | None:
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def _pause(error: Exception, tries: int) -> float | None:
    """Seconds before another try, None when another one is useless."""
    status = _status(error)
    if status is not None and status not in (408, 409, 425, 429) and status < 500:
        return None
    if status is None and isinstance(error, ConfigurationError | TypeError | AttributeError):
        return None
    asked = _retry_after(error)
    if asked is not None:
        return None if asked > LONGEST_RETRY_AFTER else asked
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (tries - 1)) * random.uniform(0.75, 1.25)


def _retry_after(error: Exception) -> float | None:
    """Seconds that the endpoint asked to wait: ``retry-after-ms``, seconds, or a date."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    try:
        if (milliseconds := headers.get("retry-after-ms")) is not None:
            return max(0.0, float(milliseconds) / 1000)
        if (said := headers.get("retry-after")) is None:
            return None
        try:
            return max(0.0, float(said))
        except ValueError:
            return max(0.0, email.utils.parsedate_to_datetime(said).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):  # not a number and no date: our own patience
        return None


def _words(error: Exception, timeout: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout:g} s"
    status = _status(error)
    kind = f"status {status}" if status is not None else type(error).__name__
    said = redact(" ".join(str(error).split()))  # some endpoints repeat the headers that they got
    return f"{kind}: {said[:300]}"


def _fatal(error: Exception, name: str, problem: str) -> JudgeError:
    status = _status(error)
    if status in (401, 403):
        return JudgeRefused(f"judge {name} does not accept the key: {problem}")
    if status == 404:
        return JudgeRefused(f"judge {name} is not there: {problem}. Check the model's name and base_url")
    return JudgeError(f"judge {name}: {problem}")
