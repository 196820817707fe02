"""What stands in for a model in tests of environments? A client that answers from a function."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from openai.types.chat import ChatCompletion

from artnb.types import Turn


class ScriptedModel:
    """A model whose replies come from ``reply(request)``: a text, or a list of (name, arguments) calls.

    Its choices carry the turn as those of artnb's client do. Like an engine it cuts the text before
    the first stop string.
    """

    def __init__(self, reply: Callable[[dict[str, Any]], Any], *, finish_reason: str = "stop") -> None:
        self.name = "scripted"
        self.run = None
        self.policy_version = 0
        self.requests: list[dict[str, Any]] = []
        self._reply, self._finish_reason = reply, finish_reason
        self.client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=self._create)))

    async def _create(self, **request: Any) -> ChatCompletion:
        self.requests.append(request)
        reply = self._reply(request)
        message: dict[str, Any] = {"role": "assistant", "content": reply}
        if not isinstance(reply, str):
            calls = [
                {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(reply)
            ]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        else:
            for stop in request.get("stop") or []:
                message["content"] = message["content"].split(stop)[0]
        turn = Turn(tuple(range(5)), (7, 8), (-0.5, -0.25), 0, self._finish_reason, message)
        choice = {
            "index": 0,
            "finish_reason": self._finish_reason,
            "message": message,
            "artnb": turn.to_json(),
        }
        return ChatCompletion.model_validate(
            {
                "id": "scripted",
                "created": 0,
                "model": request["model"],
                "object": "chat.completion",
                "choices": [choice],
            }
        )
