"""What is an episode of guessing? The options, the range that is left, the reward and a turn's credit."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from artnb import Scenario, Trajectory
from artnb_environments import make_scenarios, require, require_one_of, variant_of
from artnb_environments.replies import STYLES, credit_turns

metrics = ("win", "turns", "in_range", "invalid")
presets: dict[str, dict[str, Any]] = {
    "small": {
        "hint": "range",
        "reward_style": "narrowing",
        "credit": "narrowing",
        "examples": 3,
        "max_tokens": 2,
    },
}
"""For a small model: the range is told, and a turn's credit says how good a guess it was."""


@dataclass(frozen=True)
class Variant:
    """The options of this environment."""

    highest: int = 20
    """The number is from 1 to this, 3 to 999."""
    max_turns: int = 5
    """Guesses of a game; lost turns count."""
    style: str = "word"
    """``word``: 7; ``tags``: <guess>7</guess>; ``tools``: a tool call of the API."""
    examples: int = 2
    """Worked games in the prompt, 0 to 4."""
    hint: str = "none"
    """``range``: with higher or lower comes the range that is left: part of the agent's thinking."""
    invalid: str = "lost_turn"
    """A reply that is no number in the range: a ``lost_turn``, the ``end``, or ``retry``: asked again, once
    a turn, at no turn's cost."""
    reward_style: str = "win"
    """``win``: 1 for the number, else 0; ``narrowing``: 1 for the number, else half the share of the range,
    in bits, that the guesses ruled out."""
    credit: str = "none"
    """``narrowing``: each turn's credit is the share of what was possible that its guess rules out on
    average, -1 for an invalid one."""
    max_tokens: int | None = None
    """Longest reply; None: 4 for a word, 12 for tags, 64 for tools."""

    def __post_init__(self) -> None:
        require(3 <= self.highest <= 999, f"highest must be 3 to 999, got {self.highest}")
        require(self.max_turns >= 1, f"max_turns must be 1 or more, got {self.max_turns}")
        require(0 <= self.examples <= 4, f"examples must be 0 to 4, got {self.examples}")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens must be 1 or more, or None")
        require_one_of("style", self.style, STYLES)
        require_one_of("hint", self.hint, ("none", "range"))
        require_one_of("invalid", self.invalid, ("lost_turn", "end", "retry"))
        require_one_of("reward_style", self.reward_style, ("win", "narrowing"))
        require_one_of("credit", self.credit, ("none", "narrowing"))


def scenarios(split: str, n: int, seed: int = 0, **variant: Any) -> list[Scenario]:
    """Games; the number is drawn from the scenario's seed."""
    chosen = Variant(**variant)

    def start(game_seed: int) -> dict[str, Any]:
        return {"number": random.Random(game_seed).randint(1, chosen.highest)}

    return make_scenarios("guess_number", split, n, seed, chosen, start)


class Game:
    """One game: whoever plays it calls ``guess`` each turn, until ``ended_by`` says why it is over."""

    def __init__(self, variant: Variant, number: int) -> None:
        self.variant, self.number = variant, number
        self.low, self.high = 1, variant.highest
        """The numbers that are still possible."""
        self.turns = self.in_range = self.invalid = 0
        self.ended_by = ""
        """right, turns or invalid; empty while it goes on."""
        self.credits: list[float] = []
        """Of each reply."""
        self._asked_again = False

    @classmethod
    def of(cls, scenario: Scenario) -> Game:
        return cls(variant_of(scenario, Variant), int(scenario.task["number"]))

    def guess(self, number: int | None) -> str:
        """Take a guess, None for a reply that is none; returns what the agent is told."""
        if number is None or not 1 <= number <= self.variant.highest:
            return self._fumble()
        self._asked_again = False
        self.credits.append(self.narrowing(number))
        self.in_range += self.low <= number <= self.high
        if number < self.number:
            self.low, word = max(self.low, number + 1), "higher"
        elif number > self.number:
            self.high, word = min(self.high, number - 1), "lower"
        else:
            self.low = self.high = number
            word, self.ended_by = "right", "right"
        self._end_turn()
        return word if self.ended_by == "right" else f"{word}{self._hint}"

    def narrowing(self, number: int) -> float:
        """The share of the possible numbers that this guess rules out, on average over them."""
        possible = self.high - self.low + 1
        below = min(max(number - self.low, 0), possible)
        above = min(max(self.high - number, 0), possible)
        return 1.0 - (below**2 + above**2) / possible**2

    def _fumble(self) -> str:
        self.credits.append(-1.0)
        self.invalid += 1
        if self.variant.invalid == "end" or (self.variant.invalid == "retry" and self._asked_again):
            self.ended_by = "invalid"
        if self.variant.invalid == "retry" and not self._asked_again:
            self._asked_again = True
        else:
            self._end_turn()
        return f"say a number from 1 to {self.variant.highest}{self._hint}"

    def _end_turn(self) -> None:
        self.turns += 1
        if not self.ended_by and self.turns >= self.variant.max_turns:
            self.ended_by = "turns"

    @property
    def _hint(self) -> str:
        return f", {self.low} to {self.high}" if self.variant.hint == "range" else ""

    @property
    def reward(self) -> float:
        if self.ended_by == "right":
            return 1.0
        if self.variant.reward_style == "win":
            return 0.0
        left = self.high - self.low + 1
        return 0.5 * (1.0 - math.log2(left) / math.log2(self.variant.highest))

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Write reward, metrics, and the credits of the turns where asked for, onto the trajectory."""
        trajectory.reward = self.reward
        trajectory.metrics |= {
            "win": float(self.ended_by == "right"),
            "turns": float(self.turns),
            "in_range": self.in_range / max(1, len(self.credits)),
            "invalid": float(self.invalid),
        }
        trajectory.metadata |= {"number": self.number, "ended_by": self.ended_by}
        if self.variant.credit != "none":
            credit_turns(trajectory, self.credits)
        return trajectory
