"""What is a judge asked for? A form: its instructions, its answer's schema, and how the answer is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from artnb.judging.answers import Score, parse_criteria, parse_scores
from artnb.judging.prompt import (
    DEFAULT_RUBRIC,
    criteria_schema,
    criteria_task,
    scores_schema,
    scores_task,
)


class Form(Protocol):
    """One way to ask about the attempts of a group."""

    @property
    def task(self) -> str:
        """The system message."""
        ...

    def schema(self, names: Sequence[str]) -> dict[str, Any]:
        """JSON schema of the answer for attempts of these ids."""
        ...

    def parse(self, text: str, names: Sequence[str]) -> Mapping[str, Score]:
        """The score of every id. Raises InvalidAnswer."""
        ...


@dataclass(frozen=True)
class Relative:
    """Attempts at one task are compared and get one score each (RULER's form)."""

    rubric: str = DEFAULT_RUBRIC

    @property
    def task(self) -> str:
        return scores_task(self.rubric)

    def schema(self, names: Sequence[str]) -> dict[str, Any]:
        return scores_schema(names)

    def parse(self, text: str, names: Sequence[str]) -> Mapping[str, Score]:
        return parse_scores(text, names)


@dataclass(frozen=True)
class Criteria:
    """Every attempt is held against the same questions; a score has one part a question, and their mean."""

    questions: Mapping[str, str]
    """Name -> question."""

    @property
    def task(self) -> str:
        return criteria_task(dict(zip(self._keys, self.questions.values(), strict=True)))

    def schema(self, names: Sequence[str]) -> dict[str, Any]:
        return criteria_schema(names, self._keys)

    def parse(self, text: str, names: Sequence[str]) -> Mapping[str, Score]:
        known = dict(zip(self._keys, self.questions, strict=True))
        found = parse_criteria(text, names, self._keys)
        return {
            name: Score(s.value, s.explanation, {known[key]: value for key, value in s.parts.items()})
            for name, s in found.items()
        }

    @property
    def _keys(self) -> list[str]:
        """Short names that a judge copies without mistakes."""
        return [f"q{number}" for number in range(1, len(self.questions) + 1)]
