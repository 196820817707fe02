"""What is an episode of 2048? The options, the turns and their limit, reward, credit and metrics."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from artnb import Scenario, Trajectory
from artnb_environments import make_scenarios, require, require_one_of, variant_of
from artnb_environments.game_2048.game import Game, max_tile, merges_of_moves, tile_sum

metrics = ("win", "turns", "max_tile", "illegal", "invalid", "score")

presets: dict[str, dict[str, Any]] = {
    "tile16": {"board": 4, "win_tile": 16, "max_turns": 15},
    "3x3-32": {"board": 3, "win_tile": 32, "max_turns": 60, "rules": "art"},
    "4x4-128": {"board": 4, "win_tile": 128, "max_turns": 200, "rules": "art"},
}
"""tile16 and 3x3-32 suit a small model on a CPU, 4x4-128 a larger one on a GPU."""


@dataclass(frozen=True)
class Variant:
    """The options of this environment."""

    board: int = 4
    """Cells on a side."""
    win_tile: int = 16
    """The game is won when a tile of this size is made."""
    max_turns: int = 15
    """The game ends after so many turns; lost turns count."""
    rules: str = "classic"
    """``classic`` or ``art``; see game.Game."""
    board_style: str = "digits"
    """``digits``: rows of bare numbers; ``exponents``: one character a cell, its power of two;
    ``cells``: rows like ``2|_|4``."""
    move_style: str = "tag"
    """``tag``: <move>left</move>; ``word``: left."""
    examples: int = 2
    """Worked turns in the prompt, 0 to 8."""
    history: str = "last"
    """``last``: each turn sees only the current board; ``full``: the whole game so far."""
    hint: str = "none"
    """``legal`` lists the legal moves below the board; ``merges`` (True means this one) those that merge,
    each with its number of pairs, or the legal ones where none does: part of the player's thinking."""
    illegal: str = "lost_turn"
    """A move that changes nothing: ``lost_turn``, or ``end`` of the game."""
    invalid: str = "end"
    """A reply that is not a move: ``end`` of the game, ``lost_turn``, or ``retry``: ask again, once."""
    reward_style: str = "share"
    """``share``: 1 for a win, else 0.5 * min(1, sum of tiles / (2 * win_tile)); ``art``: ART's formula."""
    credit: str = "none"
    """A credit for each turn. ``merges`` (True means this one): the merges that the move made, -1 for a
    move lost; ``relative``: the same, minus the mean over the moves that were legal on that board, so
    that a board where every move is as good as any other teaches nothing."""
    max_tokens: int | None = None
    """Longest reply; None: 10 for tag, 4 for word."""

    def __post_init__(self) -> None:
        if isinstance(self.hint, bool):
            object.__setattr__(self, "hint", "merges" if self.hint else "none")
        if isinstance(self.credit, bool):
            object.__setattr__(self, "credit", "merges" if self.credit else "none")
        require(3 <= self.board <= 8, f"board must be 3 to 8 cells on a side, got {self.board}")
        is_power = self.win_tile >= 8 and math.log2(self.win_tile).is_integer()
        require(is_power, f"win_tile must be a power of two from 8 on, got {self.win_tile}")
        require(self.max_turns >= 1, f"max_turns must be 1 or more, got {self.max_turns}")
        require(0 <= self.examples <= 8, f"examples must be 0 to 8, got {self.examples}")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens must be 1 or more, or None")
        require_one_of("rules", self.rules, ("classic", "art"))
        require_one_of("board_style", self.board_style, ("digits", "exponents", "cells"))
        require_one_of("move_style", self.move_style, ("tag", "word"))
        require_one_of("credit", self.credit, ("none", "merges", "relative"))
        require_one_of("history", self.history, ("last", "full"))
        require_one_of("hint", self.hint, ("none", "legal", "merges"))
        require_one_of("illegal", self.illegal, ("lost_turn", "end"))
        require_one_of("invalid", self.invalid, ("end", "lost_turn", "retry"))
        require_one_of("reward_style", self.reward_style, ("share", "art"))


def scenarios(split: str, n: int, seed: int = 0, **variant: Any) -> list[Scenario]:
    """Games; the scenario's seed decides every tile that appears."""
    return make_scenarios("game_2048", split, n, seed, Variant(**variant))


class Episode:
    """One game under a variant's limits: whoever plays it calls ``play`` or ``fumble`` each turn."""

    def __init__(self, scenario: Scenario) -> None:
        self.variant = variant_of(scenario, Variant)
        self.game = Game(scenario.seed, self.variant.board, self.variant.rules)
        self.turns = self.illegal = self.invalid = 0
        self.ended_by = ""
        """Why the game is over: won, stuck, turns, illegal or invalid; empty while it goes on."""
        self.boards = [self.game.board]
        """The board before each turn, and the last one."""
        self.moves: list[str] = []
        """The move of each turn, ``""`` for a reply that was none."""

    def play(self, move: str) -> float:
        """Make a move; returns the turn's credit."""
        credit = self._credit(move)
        moved = self.game.move(move)
        self.illegal += not moved
        self._end_turn(move, "illegal" if not moved and self.variant.illegal == "end" else "")
        return credit

    def fumble(self) -> float:
        """Take a reply that is not a move as this turn; returns the turn's credit."""
        credit = self._credit("")
        self.invalid += 1
        self._end_turn("", "" if self.variant.invalid == "lost_turn" else "invalid")
        return credit

    def _credit(self, move: str) -> float:
        merges = merges_of_moves(self.game.board)
        credit = float(merges.get(move, -1))
        if self.variant.credit == "relative" and merges:
            credit -= statistics.fmean(merges.values())
        return credit

    def _end_turn(self, move: str, ended_by: str) -> None:
        self.turns += 1
        self.moves.append(move)
        self.boards.append(self.game.board)
        self.ended_by = (
            ("won" if self.is_won else "")
            or ended_by
            or ("stuck" if self.game.is_over() else "")
            or ("turns" if self.turns >= self.variant.max_turns else "")
        )

    @property
    def is_won(self) -> bool:
        return max_tile(self.game.board) >= self.variant.win_tile

    @property
    def reward(self) -> float:
        if self.variant.reward_style == "art":
            return self._art_reward()
        if self.is_won:
            return 1.0
        return 0.5 * min(1.0, tile_sum(self.game.board) / (2 * self.variant.win_tile))

    def _art_reward(self) -> float:
        """2 for a win, -1 for a reply that is no move, else the logarithms of largest tile and sum."""
        if self.ended_by == "invalid":
            return -1.0
        if self.is_won:
            return 2.0
        win, cells = self.variant.win_tile, self.variant.board**2
        largest = (math.log2(max_tile(self.game.board)) - 1) / (math.log2(win) - 1)
        total = (math.log2(tile_sum(self.game.board)) - 1) / (math.log2(win * cells) - 1)
        return largest + 0.2 * total

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Write reward, metrics and the boards onto the episode's trajectory."""
        trajectory.reward = self.reward
        trajectory.metrics |= {
            "win": float(self.is_won),
            "turns": float(self.turns),
            "max_tile": float(max_tile(self.game.board)),
            "illegal": float(self.illegal),
            "invalid": float(self.invalid),
            "score": float(self.game.score),
        }
        trajectory.metadata |= {
            "boards": [[list(row) for row in board] for board in self.boards],
            "moves": list(self.moves),
            "ended_by": self.ended_by,
        }
        return trajectory
