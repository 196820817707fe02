"""What makes an attempt good? Several weighted criteria, each code or a question to the judge.

>>> from artnb.criteria import short
>>> rubric = Rubric(short(50, 200), cites=("Does the answer name its source?", 2.0))
>>> rubric.questions
{'cites': 'Does the answer name its source?'}
>>> rubric.total({"length": 0.5, "cites": 1.0})
0.8333333333333334
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from artnb.errors import ConfigurationError
from artnb.judging.forms import Criteria
from artnb.rewards import RewardFunction, call_reward
from artnb.types import Trajectory

Entry = str | RewardFunction
_LONGEST_NAME = 60
FLOOR = 0.1
"""Share of its weight that a criterion keeps when everybody meets it."""


class Rubric:
    """Weighted criteria; the score is their weighted mean, and each one's part is kept.

    A criterion is a question to the judge, answered yes, no or 0 to 1, or a function of a trajectory (and
    its scenario) worth 0 to 1, such as those of ``artnb.criteria``; a pair (criterion, weight) weighs it. A
    keyword gives it a name. Give it to ``judge(groups, rubric=...)``; without questions no judge is asked.

    adaptive: a criterion counts the less the more attempts of the call already meet it, its weight times
        ``1 - mean`` but at least a tenth, and a group counts the more in the loss the lower its mean score.
        Off by default: scores of different steps are then on different scales.
    """

    def __init__(
        self,
        *criteria: Entry | tuple[Entry, float],
        adaptive: bool = False,
        **named: Entry | tuple[Entry, float],
    ) -> None:
        self.adaptive = adaptive
        self.questions: dict[str, str] = {}
        self.functions: dict[str, RewardFunction] = {}
        self.weights: dict[str, float] = {}
        for given in criteria:
            criterion, weight = _weighted(given)
            name = criterion if isinstance(criterion, str) else getattr(criterion, "__name__", "function")
            self._add(name.strip()[:_LONGEST_NAME], criterion, weight)
        for name, given in named.items():
            self._add(name, *_weighted(given))
        if not self.weights:
            raise ConfigurationError('a Rubric needs a criterion: Rubric("Is the answer polite?")')

    def _add(self, name: str, criterion: Entry, weight: float) -> None:
        if name in self.weights:
            raise ConfigurationError(f"two criteria are called {name!r}: name one, Rubric(other=criterion)")
        self.weights[name] = weight
        if isinstance(criterion, str):
            self.questions[name] = criterion.strip()
        else:
            self.functions[name] = criterion

    @property
    def form(self) -> Criteria | None:
        """What to ask a judge; None when there is nothing to ask."""
        return Criteria(self.questions) if self.questions else None

    async def measure(self, trajectory: Trajectory, scenario: Any = None) -> dict[str, float]:
        """What the functions give this trajectory. Raises ConfigurationError outside 0 to 1."""
        values = {}
        for name, function in self.functions.items():
            value = await call_reward(function, trajectory, scenario)
            if not 0 <= value <= 1:  # false for NaN too
                raise ConfigurationError(f"criterion {name!r} gave {value!r}, not a number from 0 to 1")
            values[name] = value
        return values

    def total(self, parts: Mapping[str, float], weights: Mapping[str, float] | None = None) -> float:
        """The weighted mean of these parts, from 0 to 1."""
        weights = weights or self.weights
        return sum(weights[name] * parts[name] for name in weights) / sum(weights.values())

    def adapted(self, everybody: Iterable[Mapping[str, float]]) -> dict[str, float]:
        """The weights for a call in which attempts got these parts; the given ones unless ``adaptive``."""
        listed = list(everybody)
        if not self.adaptive or not listed:
            return dict(self.weights)
        means = {name: math.fsum(parts[name] for parts in listed) / len(listed) for name in self.weights}
        return {name: weight * max(FLOOR, 1 - means[name]) for name, weight in self.weights.items()}

    def group_weights(self, means: Sequence[float]) -> list[float]:
        """How much groups of these mean scores count in the loss: 1 on average, all 1 unless ``adaptive``."""
        if not self.adaptive or not means:
            return [1.0] * len(means)
        raw = [max(FLOOR, 1 - mean) for mean in means]
        return [one * len(raw) / math.fsum(raw) for one in raw]

    def __repr__(self) -> str:
        listed = ", ".join(f"{weight:g} * {name}" for name, weight in self.weights.items())
        return f"Rubric({listed}{', adaptive' if self.adaptive else ''})"


def _weighted(given: Entry | tuple[Entry, float]) -> tuple[Entry, float]:
    criterion, weight = given if isinstance(given, tuple) else (given, 1.0)
    is_question = isinstance(criterion, str) and bool(criterion.strip())
    is_weight = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not (is_question or callable(criterion)) or not is_weight or not 0 < weight < math.inf:
        raise ConfigurationError(
            f"a criterion is a question, a function, or a pair of one and its weight > 0; got {given!r}"
        )
    return criterion, float(weight)
