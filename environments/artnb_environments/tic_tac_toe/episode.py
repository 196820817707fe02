"""What is an episode? The options, one game of two seats, the opponent's moves, rewards and credit."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field
from typing import Any

from artnb import Scenario, Trajectory
from artnb_environments import make_scenarios, require, require_one_of, variant_of
from artnb_environments.replies import STYLES, credit_turns
from artnb_environments.tic_tac_toe.game import (
    EMPTY,
    OPPONENTS,
    free_cells,
    is_over,
    move_scores,
    moves_of,
    other,
    place,
    winner,
)

MARKS = ("X", "O")
MOST_OPENING = 4
"""So many marks cannot end a game."""
MOST_EXAMPLES = 8
metrics = ("win", "draw", "loss", "turns", "illegal", "invalid")
presets: dict[str, dict[str, Any]] = {
    "small": {"style": "word", "examples": 8, "credit": "score", "max_tokens": 1},
}
"""For a small model: a digit a move, and a turn's credit says how good the move was."""


@dataclass(frozen=True)
class Variant:
    """The options of this environment."""

    opponent: str = "random"
    """``random``, ``heuristic`` (wins, else blocks, else the centre, else any) or ``minimax``."""
    style: str = "tags"
    """``tags``: <play>5</play>; ``word``: 5; ``tools``: a tool call of the API."""
    examples: int = 2
    """Worked moves in the prompt, 0 to 8."""
    history: str = "last"
    """``last``: each turn sees the current board only; ``full``: the whole game so far."""
    opening: int = 0
    """Marks that stand at random when the game begins, 0 to 4."""
    invalid: str = "end"
    """A reply that names no free cell: the ``end``, a ``lost_turn``, or ``retry``: asked once more."""
    credit: str = "none"
    """``score``: each turn's credit is what its cell scores on average with best play after it, less the mean
    over the free cells; -1 for a reply that names none."""
    max_tokens: int | None = None
    """Longest reply; None: 10 for tags, 2 for a word, 64 for tools."""

    def __post_init__(self) -> None:
        require_one_of("opponent", self.opponent, OPPONENTS)
        require_one_of("style", self.style, STYLES)
        require_one_of("history", self.history, ("last", "full"))
        require_one_of("invalid", self.invalid, ("end", "lost_turn", "retry"))
        require_one_of("credit", self.credit, ("none", "score"))
        require(
            0 <= self.examples <= MOST_EXAMPLES, f"examples must be 0 to {MOST_EXAMPLES}, got {self.examples}"
        )
        require(0 <= self.opening <= MOST_OPENING, f"opening must be 0 to 4, got {self.opening}")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens must be 1 or more, or None")


def scenarios(split: str, n: int, seed: int = 0, **variant: Any) -> list[Scenario]:
    """Games; the scenario's seed decides the agent's mark, the opening and the opponent's choices."""
    chosen = Variant(**variant)

    def start(game_seed: int) -> dict[str, Any]:
        draw = random.Random(f"start/{game_seed}")
        mark, board = draw.choice(MARKS), EMPTY
        for number in range(chosen.opening):
            board = place(board, draw.choice(free_cells(board)), MARKS[number % 2])
        return {"mark": mark, "board": board}

    return make_scenarios("tic_tac_toe", split, n, seed, chosen, start)


@dataclass
class Seat:
    """What one player has done."""

    turns: int = 0
    """Replies that were taken as this player's turn."""
    illegal: int = 0
    """Replies that named a cell which was taken."""
    invalid: int = 0
    """Replies that could not be read."""
    credits: list[float] = field(default_factory=list)
    """Of each reply."""


class Game:
    """One game, X first: who is to move plays a cell, or nothing, until ``ended_by`` says why it is over."""

    def __init__(self, variant: Variant, board: str = EMPTY, seed: int = 0) -> None:
        self.variant, self.board = variant, board
        self.to_move = MARKS[(9 - board.count(".")) % 2]
        self.seats = {mark: Seat() for mark in MARKS}
        self.forfeited = ""
        """The mark whose reply ended the game, if one did."""
        self.ended_by = ""
        """line, full or invalid; empty while it goes on."""
        self.boards, self.moves = [board], list[str]()
        """The board before each move, and the last one; a move is like X5, or X for a turn lost."""
        self._asked_again = False
        self._draw = random.Random(f"opponent/{seed}")

    @classmethod
    def of(cls, scenario: Scenario) -> Game:
        return cls(variant_of(scenario, Variant), str(scenario.task["board"]), scenario.seed)

    def take(self, digit: str | None) -> bool:
        """Take a reply of the player to move, 1 to 9 or None; returns whether a mark was made."""
        mark, seat = self.to_move, self.seats[self.to_move]
        cell = None if digit is None else int(digit) - 1
        is_move = cell is not None and self.board[cell] == "."
        seat.credits.append(self._credit(cell if is_move else None, mark))
        if cell is not None and is_move:
            self.play(cell)
            return True
        if digit is None:
            seat.invalid += 1
        else:
            seat.illegal += 1
        if self.variant.invalid == "retry" and not self._asked_again:
            self._asked_again = True
            return False
        if self.variant.invalid != "lost_turn":
            self.forfeited, self.ended_by = mark, "invalid"
        self._end_turn(mark)
        return False

    def play(self, cell: int) -> None:
        """Make a mark in a free cell, 0 to 8."""
        mark = self.to_move
        self.board = place(self.board, cell, mark)
        if is_over(self.board):
            self.ended_by = "line" if winner(self.board) else "full"
        self._end_turn(f"{mark}{cell + 1}")

    def play_scripted(self, player: str) -> None:
        """A scripted player's move for who is to move."""
        self.play(self._draw.choice(moves_of(player, self.board, self.to_move)))

    def drawn_cell(self) -> str:
        """The digit of a free cell, drawn from the scenario's seed."""
        return f"{self._draw.choice(free_cells(self.board)) + 1}"

    def _end_turn(self, move: str) -> None:
        self.seats[self.to_move].turns += 1
        self._asked_again = False
        self.moves.append(move)
        self.boards.append(self.board)
        self.to_move = other(self.to_move)

    def _credit(self, cell: int | None, mark: str) -> float:
        if cell is None or self.variant.credit == "none":
            return -1.0
        scores = move_scores(self.board, mark, self.variant.opponent)
        return scores[cell] - statistics.fmean(scores.values())

    def reward(self, mark: str) -> float:
        """1 for a win, 0.5 for a draw or when the other broke the game off, 0 for a loss, -1 for breaking it
        off oneself."""
        if self.forfeited:
            return -1.0 if self.forfeited == mark else 0.5
        return {mark: 1.0, "": 0.5}.get(winner(self.board), 0.0)

    def score(self, trajectory: Trajectory, mark: str) -> Trajectory:
        """Write one player's reward and metrics, and the game, onto the trajectory."""
        won, seat = winner(self.board), self.seats[mark]
        trajectory.reward = self.reward(mark)
        trajectory.metrics |= {
            "win": float(won == mark),
            "draw": float(self.ended_by == "full"),
            "loss": float(won == other(mark)),
            "turns": float(seat.turns),
            "illegal": float(seat.illegal),
            "invalid": float(seat.invalid),
        }
        trajectory.metadata |= {
            "mark": mark,
            "boards": list(self.boards),
            "moves": list(self.moves),
            "ended_by": self.ended_by,
        }
        if self.variant.credit != "none":
            credit_turns(trajectory, seat.credits)
        return trajectory
