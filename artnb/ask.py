"""What does a model answer? Many requests to one model, behind an endpoint or in this kernel."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from artnb.errors import ConfigurationError
from artnb.judging.answers import json_values
from artnb.judging.referee import JudgeError, JudgeRefused, Referee
from artnb.judging.referees import referees
from artnb.ui.display import Progress


@dataclass(frozen=True)
class Answer:
    """What came back on one request."""

    text: str = ""
    problem: str = ""
    """Why there is no text; empty when all went well."""
    input_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    """From the first try to the answer."""

    @property
    def values(self) -> list[Any]:
        """The JSON objects and arrays of the text, whatever stands around them."""
        return list(json_values(self.text))


async def ask(
    requests: Sequence[list[dict[str, str]]],
    *,
    model: Any = None,
    generator: str | Referee | None = None,
    schema: Mapping[str, Any] | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    options: Mapping[str, Any] | None = None,
    max_tokens: int = 2048,
    timeout: float = 120.0,
    at_once: int = 8,
    progress: bool = True,
) -> list[Answer]:
    """Send each list of messages to a model and return the answers in the same order.

    generator: as ``judge`` of ``artnb.judge``: a model behind an endpoint, or None for ``model`` in this
    kernel, without its adapter. schema: of the JSON that is wanted, for endpoints that take one. at_once:
    requests under way. timeout: seconds for a try; a busy endpoint is asked again.

    A request without an answer has its reason in ``problem``. Raises ConfigurationError, and an ArtnbError
    where every request would fail: a wrong key, an unknown model.
    """
    if at_once < 1:
        raise ConfigurationError(f"at_once must be 1 or more, got {at_once}")
    (asked,) = referees(
        generator,
        model,
        base_url=base_url,
        api_key=api_key,
        price=None,
        options=options or {},
        context=None,
        max_tokens=max_tokens,
        timeout=timeout,
    )
    room, done = asyncio.Semaphore(at_once), 0

    async def one(messages: list[dict[str, str]], bar: Progress) -> Answer:
        nonlocal done
        async with room:
            try:
                reply = await asked.ask(messages, schema)
                found = Answer(reply.text, "", reply.input_tokens, reply.output_tokens, reply.seconds)
            except JudgeRefused:
                raise
            except JudgeError as error:
                found = Answer(problem=str(error))
        done += 1
        bar.update(done)
        return found

    with Progress(len(requests), f"ask {asked.name}", enabled=progress) as bar:
        try:
            async with asyncio.TaskGroup() as tasks:
                waiting = [tasks.create_task(one(messages, bar)) for messages in requests]
        except* JudgeRefused as refused:
            raise refused.exceptions[0] from None
        finally:
            if asked.is_ours:
                await asked.client.close()
    return [task.result() for task in waiting]
