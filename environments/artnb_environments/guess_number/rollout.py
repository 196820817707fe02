"""What does the agent see and say? The prompt, worked games, one guess a turn."""

from __future__ import annotations

from typing import Any

from artnb import Dialogue, Scenario, Turn, rollout_of
from artnb_environments import variant_of
from artnb_environments.guess_number.game import Game, Variant
from artnb_environments.replies import Form

_EXAMPLE_PLACES = (0.35, 0.9, 0.6, 0.2)
"""Where in the range the numbers of the worked games lie."""


def form_of(variant: Variant) -> Form:
    return Form(variant.style, "guess", "number", "[0-9]{1,6}", "Guess the number.")


def opening(variant: Variant) -> list[dict[str, Any]]:
    """System and worked games: the same, byte for byte, in every game of a variant."""
    form = form_of(variant)
    text = (
        f"Guess a number from 1 to {variant.highest} in {variant.max_turns} turns; you are told higher or "
        f"lower. Reply with a number, for example {form.written(variant.highest // 2)}."
    )
    messages: list[dict[str, Any]] = [{"role": "system", "content": text}]
    for number, place in enumerate(_EXAMPLE_PLACES[: variant.examples]):
        messages += _worked(variant, form, number, max(1, round(place * variant.highest)))
    return messages


def _worked(variant: Variant, form: Form, number: int, hidden: int) -> list[dict[str, Any]]:
    """A game that halves the range until it is right."""
    game = Game(variant, hidden)
    messages = [{"role": "user", "content": question(variant)}]
    while not game.ended_by:
        guess = (game.low + game.high) // 2
        messages.append(form.reply(guess, 100 * number + game.turns))
        messages += form.answer(messages[-1], game.guess(guess))
    return messages


def question(variant: Variant) -> str:
    return f"A new number, 1 to {variant.highest}."


def dialogue(scenario: Scenario) -> Dialogue:
    """Guess after guess, until it is right or the turns are used up."""
    variant, game = variant_of(scenario, Variant), Game.of(scenario)
    form = form_of(variant)

    def respond(turn: Turn) -> list[dict[str, Any]]:
        if game.ended_by:
            return []
        read = form.read(turn)
        told = game.guess(None if read is None else int(read))
        return [] if game.ended_by else form.answer(turn.message, told)

    return Dialogue(
        [*opening(variant), {"role": "user", "content": question(variant)}],
        respond,
        tools=form.tools,
        options=form.options(variant.max_tokens, 4),
        score=game.score,
    )


rollout = rollout_of(dialogue)
