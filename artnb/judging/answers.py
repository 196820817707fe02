"""What did the judge say? Text becomes one score for each id, or a complaint that the judge can act on.

Repairs form only: prose and fences around the JSON, another name of a key, a number written as a string. A
wrong id, a missing or repeated one, or a score outside 0..1 is never guessed at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_IDS = ("id", "trajectory_id", "attempt_id", "attempt")
_SCORES = ("score", "value", "rating")
_EXPLANATIONS = ("explanation", "reason", "reasoning", "why")
_MOST_COMPLAINTS = 6


class InvalidAnswer(ValueError):
    """The judge's answer cannot be used; the message says to the judge what is wrong."""


@dataclass(frozen=True)
class Score:
    """What the judge gave one attempt."""

    value: float
    explanation: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What each criterion gave, where the form asks for several."""


def parse_scores(text: str | None, names: Sequence[str]) -> dict[str, Score]:
    """Read the score of each of these ids out of an answer.

    >>> parse_scores('Sure! {"scores": [{"id": "BCDF", "explanation": "good", "score": 0.75}]}', ["BCDF"])
    {'BCDF': Score(value=0.75, explanation='good', parts={})}

    Raises InvalidAnswer.
    """
    return _first_valid(text, _entries, lambda given: _checked(given, names))


def parse_criteria(text: str | None, names: Sequence[str], keys: Sequence[str]) -> dict[str, Score]:
    """Read an answer to each of the questions ``keys`` for each of these ids; a score is their mean.

    Yes and no count as 1 and 0. Raises InvalidAnswer.
    """

    def checked(entries: Sequence[tuple[Any, Any, Any]]) -> dict[str, Score]:
        parts: dict[str, dict[str, float]] = {}
        wrong, means = [], []
        for name, answers, explanation in entries:
            pairs = answers if isinstance(answers, _Pairs) else _Pairs()
            given = {key: _number(_yes_or_no(value)) for key, value in pairs}
            bad = [key for key in keys if (v := given.get(key)) is None or not 0 <= v <= 1]
            repeated = len(given) < len(pairs)
            if bad or repeated:
                what = "a question twice" if repeated else f"no number from 0 to 1 for {', '.join(bad)}"
                wrong.append(f"{str(name)[:40]} has {what}")
            parts[str(name)] = {key: given.get(key) or 0.0 for key in keys}
            means.append((name, sum(parts[str(name)].values()) / len(keys), explanation))
        scores = _checked(means, names)
        if wrong:
            raise InvalidAnswer("; ".join(wrong[:_MOST_COMPLAINTS]))
        return {name: Score(s.value, s.explanation, parts[name]) for name, s in scores.items()}

    return _first_valid(text, lambda value: _entries(value, ("answers", "criteria")), checked)


def _first_valid(
    text: str | None,
    entries_of: Callable[[Any], list[tuple[Any, Any, Any]] | None],
    check: Callable[[Sequence[tuple[Any, Any, Any]]], dict[str, Score]],
) -> dict[str, Score]:
    """What the first usable JSON value of a text says."""
    if not text or not text.strip():
        raise InvalidAnswer("it is empty")
    complaint = InvalidAnswer("it holds no JSON with scores")
    for value in json_values(text, _Pairs):
        entries = entries_of(value)
        if entries is None:
            continue
        try:
            return check(entries)
        except InvalidAnswer as error:  # another value of the text may be the answer
            complaint = error
    raise complaint


def json_values(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] = dict) -> Iterator[Any]:
    """JSON objects and arrays of a text, outer ones only; ``pairs`` makes something of an object's pairs."""
    decoder = json.JSONDecoder(object_pairs_hook=pairs)
    at = 0
    while (at := min((i for c in "{[" if (i := text.find(c, at)) >= 0), default=-1)) >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        yield value


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as pairs: one whose key stands twice must be noticed."""


def _entries(value: Any, fields: Sequence[str] = _SCORES) -> list[tuple[Any, Any, Any]] | None:
    """(id, value of one of ``fields``, explanation) of each entry; None when this is no list of scores."""
    if isinstance(value, _Pairs):
        inner = next((v for key, v in value if key == "scores"), None)
        if inner is not None:
            return _entries(inner, fields)
        if _get(value, _IDS) is not None and _get(value, fields) is not None:
            return [_entry(value, fields)]
        plain = [(key, v if not isinstance(v, _Pairs) else _get(v, fields), v) for key, v in value]
        return [(key, score, _words(v)) for key, score, v in plain] if plain else None
    if isinstance(value, list) and value and all(isinstance(one, _Pairs) for one in value):
        return [_entry(one, fields) for one in value]
    return None


def _entry(pairs: _Pairs, fields: Sequence[str]) -> tuple[Any, Any, Any]:
    return _get(pairs, _IDS), _get(pairs, fields), _words(pairs)


def _words(value: Any) -> str:
    said = _get(value, _EXPLANATIONS) if isinstance(value, _Pairs) else None
    return said if isinstance(said, str) else ""


def _get(pairs: _Pairs, names: Sequence[str]) -> Any:
    return next((value for name in names for key, value in pairs if key == name), None)


def _checked(entries: Sequence[tuple[Any, Any, Any]], names: Sequence[str]) -> dict[str, Score]:
    found: dict[str, Score] = {}
    wrong = []
    for given, score, explanation in entries:
        name = str(given)
        if name not in names:
            wrong.append(f"there is no attempt {name[:40]!r}")
            continue
        if name in found:
            wrong.append(f"{name} stands there twice")
            continue
        value = _number(score)
        if value is None or not 0 <= value <= 1:
            wrong.append(f"the score of {name} is {str(score)[:40]}, no number from 0 to 1")
        found[name] = Score(math.nan if value is None else value, explanation)
    missing = [name for name in names if name not in found]
    if missing:
        wrong.append(f"no score for {', '.join(missing)}")
    if wrong:
        raise InvalidAnswer("; ".join(wrong[:_MOST_COMPLAINTS]))
    return {name: found[name] for name in names}


def _yes_or_no(value: Any) -> Any:
    said = value.strip().lower() if isinstance(value, str) else value
    return (
        {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}.get(said, value)
        if isinstance(said, str)
        else (float(said) if isinstance(said, bool) else value)
    )


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value.strip())
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
