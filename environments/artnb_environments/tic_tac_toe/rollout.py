"""What does the player see and say? The prompt, the board as text, one cell a turn."""

from __future__ import annotations

from typing import Any

from artnb import Dialogue, Scenario, Turn, rollout_of
from artnb_environments.replies import Form
from artnb_environments.tic_tac_toe.episode import Game, Variant

_EXAMPLES = (
    ("X", "XX..OO...", "3"),
    ("O", "X...X....", "9"),
    ("X", ".........", "5"),
    ("O", "X..O...XX", "7"),
    ("X", "O..XX..O.", "6"),
    ("O", "..X.X.O..", "1"),
    ("X", "OX.OX....", "8"),
    ("O", "..O.X.OXX", "2"),
)
"""Boards on which one cell wins or blocks, and the empty one; some could not come about in a game."""


def form_of(variant: Variant) -> Form:
    return Form(variant.style, "play", "cell", "[1-9]", "Put your mark in a free cell, 1 to 9.")


def board_text(board: str) -> str:
    """Three rows: marks, and the digits of free cells."""
    cells = [mark if mark != "." else f"{cell + 1}" for cell, mark in enumerate(board)]
    return "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))


def shown(board: str, mark: str) -> str:
    return f"{board_text(board)}\n{mark} to move"


def opening(variant: Variant) -> list[dict[str, Any]]:
    """System and worked moves: the same, byte for byte, in every game of a variant."""
    form = form_of(variant)
    text = (
        "You play tic-tac-toe. Digits are free cells; three marks in a line win. Reply with the digit of a "
        f"free cell, for example {form.written(5)}."
    )
    messages: list[dict[str, Any]] = [{"role": "system", "content": text}]
    for number, (mark, board, digit) in enumerate(_EXAMPLES[: variant.examples]):
        messages += [{"role": "user", "content": shown(board, mark)}, form.reply(digit, number)]
        if variant.style == "tools":
            messages += form.answer(messages[-1], "played")
    return messages


def observation(game: Game, was_move: bool = True) -> str:
    """What the player to move is told."""
    note = "" if was_move else "That was no free cell.\n"
    return note + shown(game.board, game.to_move)


def dialogue(scenario: Scenario) -> Dialogue:
    """A game against the scripted opponent of the variant."""
    game, mark = Game.of(scenario), str(scenario.task["mark"])
    variant = game.variant
    form = form_of(variant)
    forgets = variant.history == "last"

    def opponent_plays() -> None:
        while not game.ended_by and game.to_move != mark:
            game.play_scripted(variant.opponent)

    def respond(turn: Turn) -> list[dict[str, Any]]:
        if game.ended_by:
            return []
        was_move = game.take(form.read(turn))
        opponent_plays()
        if game.ended_by:
            return []
        text = observation(game, was_move)
        return [{"role": "user", "content": text}] if forgets else form.answer(turn.message, text)

    opponent_plays()
    return Dialogue(
        [*opening(variant), {"role": "user", "content": observation(game)}],
        respond,
        tools=form.tools,
        options=options_of(variant),
        forgets=forgets,
        score=lambda trajectory: game.score(trajectory, mark),
    )


def options_of(variant: Variant) -> dict[str, Any]:
    """Of every request."""
    return form_of(variant).options(variant.max_tokens, 2)


rollout = rollout_of(dialogue)
