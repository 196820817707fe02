"""How far has an agent come with a question, and what is that worth? One episode's state, without a model."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from artnb import Scenario, Trajectory
from artnb_environments.finance_mcp.questions import is_right
from artnb_environments.finance_mcp.tools import ask

metrics = (
    *("correct", "answered", "right_tool", "right_arguments", "calls", "calls_over_oracle"),
    *("tool_errors", "malformed", "turns", "unseen", "seconds", "tokens_read", "tokens_written"),
)
COMPLETE = "complete_task"
COMPLETE_TASK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": COMPLETE,
        "description": "Ends the task.",
        "parameters": {
            "type": "object",
            "properties": {
                "answer": {"type": "string", "description": "what was asked for and nothing else"},
                "summary": {"type": "string", "description": "one sentence on how it was found"},
            },
            "required": ["answer"],
        },
    },
}
FEW_CALLS, MALFORMED = 0.1, -0.2
_TYPES: dict[str, type] = {"string": str, "integer": int}
"""The types that the tools' arguments have."""


class BadCall(Exception):
    """A reply that is no call, or a call that its tool's schema does not allow; the agent reads why."""


class Episode:
    """One question: which calls were made, what they told, and the answer."""

    def __init__(self, scenario: Scenario) -> None:
        self.task = scenario.task
        self.plan: list[tuple[str, str]] = [(name, ask(name, **given)) for name, given in self.task["plan"]]
        """The oracle's calls, each with what it tells: the right arguments are those that give the same."""
        self.made: list[tuple[str, str]] = []
        self.turns = self.tool_errors = self.malformed = 0
        self.answer: str | None = None
        self.summary = ""
        self.done = False
        self._started = time.monotonic()
        self._seconds: float | None = None

    def refuse(self, error: BadCall) -> str:
        """Count a reply or a call that could not be made; with ``invalid="end"`` it ends the episode."""
        self.malformed += 1
        if self.task["invalid"] == "end":
            self.end()
        return f"Error: {error}"

    def note(self, name: str, told: str, is_error: bool) -> None:
        """Take down a call that was made."""
        self.made.append((name, told))
        self.tool_errors += is_error

    def complete(self, answer: str, summary: str = "") -> None:
        """Take the final answer."""
        self.answer, self.summary = answer, summary
        self.end()

    def end(self) -> None:
        self.done = True
        self._seconds = time.monotonic() - self._started

    # ---- score ----------------------------------------------------------------------------------

    @property
    def correct(self) -> bool:
        return self.answer is not None and is_right(self.answer, self.task)

    @property
    def right_tool(self) -> float:
        """Share of the oracle's calls whose tool was called."""
        called = {name for name, _ in self.made}
        return sum(name in called for name, _ in self.plan) / len(self.plan)

    @property
    def right_arguments(self) -> float:
        """Share of the oracle's calls that were made, or others that told the same."""
        return sum(call in self.made for call in self.plan) / len(self.plan)

    @property
    def reward(self) -> float:
        """1 for the right answer, 0.1 more for few calls, 0.2 less where a call was malformed."""
        reward = float(self.correct)
        if self.correct and 1 <= len(self.made) < 2 * len(self.plan):
            reward += FEW_CALLS
        elif not self.correct:
            reward += self.task["partial"] * (self.right_tool + self.right_arguments) / 2
        return round(reward + MALFORMED * bool(self.malformed), 6)

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Write reward and metrics, as they stand, onto the trajectory."""
        seconds = time.monotonic() - self._started if self._seconds is None else self._seconds
        values = {
            "correct": self.correct,
            "answered": self.answer is not None,
            "right_tool": self.right_tool,
            "right_arguments": self.right_arguments,
            "calls": len(self.made),
            "calls_over_oracle": len(self.made) / len(self.plan),
            "tool_errors": self.tool_errors,
            "malformed": self.malformed,
            "turns": self.turns,
            "unseen": self.task["unseen"],
            "seconds": seconds,
            "tokens_read": sum(len(turn.prompt_ids) for turn in trajectory.turns),
            "tokens_written": trajectory.completion_tokens,
        }
        trajectory.reward = self.reward
        trajectory.metrics |= {name: float(value) for name, value in values.items()}
        trajectory.metadata |= {
            "topic": self.task["topic"],
            "answer": self.answer,
            "summary": self.summary,
        }
        return trajectory


def read_arguments(name: str, arguments: str, tools: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The arguments of a call as its tool's schema has them. Raises BadCall.

    tools: name -> OpenAI definition.
    """
    if name not in tools:
        raise BadCall(f"there is no tool {name[:50]!r}; there are {', '.join(tools)}")
    try:
        given = json.loads(arguments or "{}")
        json.dumps(given, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadCall("the arguments are no JSON") from error
    if not isinstance(given, dict):
        raise BadCall("the arguments must be a JSON object")
    given = {key: value for key, value in given.items() if value is not None}
    parameters = tools[name]["function"]["parameters"]
    if missing := [key for key in parameters.get("required", ()) if key not in given]:
        raise BadCall(f"{name} needs {', '.join(missing)}")
    for key, value in given.items():
        if key not in parameters["properties"]:
            raise BadCall(f"{name} has no argument {key[:50]!r}")
        _check_value(key, value, parameters["properties"][key])
    return given


def _check_value(key: str, value: Any, schema: Mapping[str, Any]) -> None:
    kinds = [schema.get("type"), *(one.get("type") for one in schema.get("anyOf", ()))]
    kind = next(one for one in kinds if one is not None)
    if isinstance(value, bool) or not isinstance(value, _TYPES[kind]):
        raise BadCall(f"{key} must be of type {kind}")
    if value not in schema.get("enum", [value]):
        raise BadCall(f"{key} must be one of {', '.join(map(str, schema['enum']))}")
