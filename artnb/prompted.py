"""How does a model that nobody trains here play? Any chat endpoint, in place of this kernel's model."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from artnb.dialogue import Dialogue
from artnb.types import Scenario, Trajectory, Turn

Rollout = Callable[[Any, Scenario], Awaitable[Trajectory]]


def prompted(dialogue: Callable[[Scenario], Dialogue], client: Any, name: str, **options: Any) -> Rollout:
    """A rollout in which ``name`` behind ``client`` (an ``openai.AsyncOpenAI``) plays a dialogue's episodes.

    ``await nb.evaluate(prompted(env.dialogue, client, "gpt-4.1-mini"), heldout, model=model)`` measures it on
    the same scenarios as ``model``, which is not asked. Its replies are plain messages: nothing of them can
    be trained on. The metrics ``tokens_read``, ``tokens_written`` and ``seconds`` are the endpoint's counts
    and the time that its answers took. options: further fields of every request; None leaves one out that the
    dialogue sets.
    """

    async def rollout(_: Any, scenario: Scenario) -> Trajectory:
        episode = dialogue(scenario)
        history: list[Any] = [*episode.messages]
        asked = {k: v for k, v in {**episode.options, **options}.items() if v is not None}
        asked |= {"tools": episode.tools} if episode.tools else {}
        read = written = 0
        seconds, told = 0.0, episode.messages
        while told:
            started = time.monotonic()
            answer = await client.chat.completions.create(model=name, messages=history, **asked)
            seconds += time.monotonic() - started
            read += getattr(answer.usage, "prompt_tokens", 0) or 0
            written += getattr(answer.usage, "completion_tokens", 0) or 0
            choice = answer.choices[0]
            message = choice.message.model_dump(exclude_none=True)
            message.setdefault("content", "")
            histories = [history]
            told = await episode.move(
                histories, Turn((), (), (), -1, choice.finish_reason or "stop", message)
            )
            history = histories[-1]
            history[:] = [item.message if isinstance(item, Turn) else item for item in history]
        trajectory = Trajectory(history, tools=episode.tools, scenario_id=scenario.id)
        if episode.score:
            episode.score(trajectory)
        figures = {"tokens_read": read, "tokens_written": written, "seconds": seconds}
        trajectory.metrics |= {key: float(value) for key, value in figures.items()}
        return trajectory

    return rollout
