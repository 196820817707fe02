"""Which checks does a reward need again and again? Each function here makes one, worth 0 to 1.

They go into ``Reward`` and into ``Rubric``, with weights; what each one gave is a metric of its own.

>>> from artnb.types import Scenario
>>> right = exact("answer")
>>> reply = Trajectory([{"role": "assistant", "content": "  Paris. "}])
>>> right(reply, Scenario(id="capital", task={"answer": "paris"}))
1.0
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from artnb.errors import ConfigurationError, require
from artnb.types import Trajectory

Criterion = Callable[..., float]
"""Takes (trajectory, scenario) and returns a number from 0 to 1."""

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+(?:[eE][-+]?\d+)?")


def last_text(trajectory: Trajectory) -> str:
    """The text of the last assistant message that has one; empty when there is none."""
    for message in reversed(trajectory.messages()):
        content = message.get("content")
        if message.get("role") == "assistant" and content:
            return content if isinstance(content, str) else _texts(content)
    return ""


def _texts(parts: Any) -> str:
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def exact(key: str | None = None, *, text: str | None = None, normalise: bool = True) -> Criterion:
    """The last reply equals ``scenario.task[key]``, or ``text``.

    normalise: compare without case, punctuation, articles and surplus blanks, as question answering does.
    """
    expected = _expected(key, text)
    tidy = normalised if normalise else str

    def exact_match(trajectory: Trajectory, scenario: Any = None) -> float:
        return float(tidy(last_text(trajectory)) == tidy(str(expected(scenario))))

    return exact_match


def matches(pattern: str, *, flags: int = re.IGNORECASE) -> Criterion:
    """The last reply holds this regular expression."""
    compiled = re.compile(pattern, flags)

    def regex(trajectory: Trajectory, scenario: Any = None) -> float:
        return float(compiled.search(last_text(trajectory)) is not None)

    return regex


def numeric(
    key: str | None = None, *, value: float | None = None, tolerance: float = 1e-6, relative: float = 0.0
) -> Criterion:
    """The last number of the last reply is within ``tolerance + relative * |expected|`` of the expected one.

    Thousands may be set off by commas.
    """
    expected = _expected(key, value)

    def number(trajectory: Trajectory, scenario: Any = None) -> float:
        wanted = float(expected(scenario))
        found = _NUMBER.findall(last_text(trajectory))
        if not found:
            return 0.0
        given = float(found[-1].replace(",", ""))
        return float(abs(given - wanted) <= tolerance + relative * abs(wanted))

    return number


def valid_json(schema: Mapping[str, Any] | None = None) -> Criterion:
    """The last reply is JSON, and of this JSON schema; needs the package jsonschema for one."""
    validator = None
    if schema is not None:
        jsonschema = require("jsonschema", extra="notebook", why="to check replies against a schema")
        jsonschema.Draft202012Validator.check_schema(schema)
        validator = jsonschema.Draft202012Validator(schema)

    def json_schema(trajectory: Trajectory, scenario: Any = None) -> float:
        try:
            value = json.loads(last_text(trajectory))
        except (ValueError, RecursionError):
            return 0.0
        return float(validator is None or validator.is_valid(value))

    return json_schema


def few_tool_calls(full: int, none: int) -> Criterion:
    """1 with up to ``full`` tool calls, falling to 0 at ``none``."""
    return _ramp("tool_calls", full, none, _tool_calls)


def few_turns(full: int, none: int) -> Criterion:
    """1 with up to ``full`` turns of the model, falling to 0 at ``none``."""
    return _ramp("turns", full, none, lambda trajectory: len(trajectory.turns))


def short(full: int, none: int) -> Criterion:
    """1 with up to ``full`` sampled tokens, falling to 0 at ``none``: the soft overlong penalty of DAPO
    (arXiv 2503.14476, equation 13) on a scale from 0 to 1."""
    return _ramp("length", full, none, lambda trajectory: trajectory.completion_tokens)


def quick(full: float, none: float) -> Criterion:
    """1 when the rollout took up to ``full`` seconds, falling to 0 at ``none``."""
    return _ramp("latency", full, none, lambda trajectory: trajectory.seconds or 0.0)


def cheap(full: float, none: float, *, price: tuple[float, float]) -> Criterion:
    """1 when tokens cost up to ``full`` dollars, falling to 0 at ``none``.

    price: dollars for a million tokens read and written; what is read again counts again.
    """

    def dollars(trajectory: Trajectory) -> float:
        read = sum(len(turn.prompt_ids) for turn in trajectory.turns)
        return (read * price[0] + trajectory.completion_tokens * price[1]) / 1e6

    return _ramp("cost", full, none, dollars)


def normalised(text: str) -> str:
    """Without case, punctuation, articles and surplus blanks.

    >>> normalised(" The  Eiffel-Tower! ")
    'eiffel tower'
    """
    kept = unicodedata.normalize("NFKC", text).casefold()
    kept = "".join(" " if unicodedata.category(c)[0] in "PZC" else c for c in kept)
    return " ".join(word for word in kept.split() if word not in ("a", "an", "the"))


def _ramp(name: str, full: float, none: float, measure: Callable[[Trajectory], float]) -> Criterion:
    if not (math.isfinite(full) and math.isfinite(none) and 0 <= full < none):
        raise ConfigurationError(f"{name} needs 0 <= full < none, got full={full!r}, none={none!r}")

    def criterion(trajectory: Trajectory, scenario: Any = None) -> float:
        return min(1.0, max(0.0, (none - measure(trajectory)) / (none - full)))

    criterion.__name__ = name
    return criterion


def _tool_calls(trajectory: Trajectory) -> int:
    return sum(len(message.get("tool_calls") or []) for message in trajectory.messages())


def _expected(key: str | None, value: Any) -> Callable[[Any], Any]:
    if (key is None) == (value is None):
        raise ConfigurationError(
            "say what is expected: a key of scenario.task, or the value itself; not both"
        )
    if key is None:
        return lambda scenario: value

    def look_up(scenario: Any) -> Any:
        task = getattr(scenario, "task", None)
        if not isinstance(task, Mapping) or key not in task:
            raise ConfigurationError(f"this criterion needs scenario.task[{key!r}]; the scenario has none")
        return task[key]

    return look_up
