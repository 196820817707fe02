"""What does the player see and say? The prompt, the board as text, one request a turn, reading the move."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

from artnb import Dialogue, History, Scenario, Trajectory, Turn
from artnb_environments import read_tagged
from artnb_environments.game_2048.baselines import greedy_moves
from artnb_environments.game_2048.episode import Episode, Variant
from artnb_environments.game_2048.game import MOVES, Board, Game, legal_moves, merges_of_moves

SYSTEM = {
    "tag": "You play 2048. Reply with one move: <move>left</move>, <move>right</move>, "
    "<move>up</move> or <move>down</move>.",
    "word": "You play 2048. Reply with one word: left, right, up or down.",
}
BOARD_NOTE = {"digits": "", "exponents": " Each character is a cell: its power of two.", "cells": ""}
HINT_NOTE = {
    "none": "",
    "legal": " Below the board stand the legal moves.",
    "merges": " Below the board stand the moves that merge, each with its pairs.",
}
REMINDER = {
    "tag": "That was not a move. Reply with one move, for example <move>left</move>.",
    "word": "That was not a move. Reply with one word: left, right, up or down.",
}
STOP = {"tag": ["</move>"], "word": ["\n"]}
MAX_TOKENS = {"tag": 10, "word": 4}
EXAMPLE_MOVES = ("left", "down", "up", "right")
POWER_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


def board_text(board: Board, style: str) -> str:
    """The board as a few characters a row."""
    if style == "cells":
        return "\n".join("|".join(str(tile or "_") for tile in row) for row in board)
    if style == "exponents":
        return "\n".join("".join(POWER_CHARACTERS[max(t.bit_length() - 1, 0)] for t in row) for row in board)
    return "\n".join("".join(map(str, row)) for row in board)


def hint_text(board: Board, hint: str) -> str:
    """The line below the board, if any."""
    if hint == "none":
        return ""
    merges = merges_of_moves(board)
    if hint == "legal":
        return "\n" + " ".join(merges)
    merging = {move: pairs for move, pairs in merges.items() if pairs}
    # no blank before the number: a token less a move
    return "\n" + " ".join(f"{move}{pairs}" for move, pairs in (merging or merges).items())


def user_message(board: Board, variant: Variant) -> dict[str, Any]:
    text = board_text(board, variant.board_style) + hint_text(board, variant.hint)
    return {"role": "user", "content": text}


def opening(variant: Variant) -> list[dict[str, Any]]:
    """System message and worked turns: the same, byte for byte, in every game of a variant."""
    notes = BOARD_NOTE[variant.board_style] + HINT_NOTE[variant.hint]
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM[variant.move_style] + notes}]
    for number in range(variant.examples):
        move = EXAMPLE_MOVES[number % len(EXAMPLE_MOVES)]
        board = example_board(number, move, variant.board, variant.rules)
        reply = f"<move>{move}</move>" if variant.move_style == "tag" else move
        messages += [user_message(board, variant), {"role": "assistant", "content": reply}]
    return messages


@lru_cache(maxsize=256)
def example_board(number: int, move: str, size: int, rules: str) -> Board:
    """A board after 2 * number random moves where ``move`` merges more than moves across it do.

    Its seeds are negative; no scenario has such a seed.
    """
    for attempt in range(1, 10_000):
        seed = -(number * 10_000 + attempt)
        game, draw = Game(seed, size, rules), random.Random(seed)
        for _ in range(2 * number):
            if not game.is_over():
                game.move(draw.choice(legal_moves(game.board)))
        best = greedy_moves(game.board)
        if not game.is_over() and move in best and len(best) <= 2:
            return game.board
    raise AssertionError(f"no example board of size {size} for {move}")


async def rollout(model: Any, scenario: Scenario) -> Trajectory:
    """Play one game.

    With ``history="last"`` every turn is a conversation of its own (opening, current board, move):
    the first is the trajectory's main history, each later one an additional history. All share the
    reward; each is a row to train on, and the opening is the common prefix of all rows.
    """
    episode = Episode(scenario)
    histories: list[History] = []
    while not episode.ended_by:
        if not histories or episode.variant.history == "last":
            histories.append(History([*opening(episode.variant)]))
        await _take_turn(model, episode, histories[-1])
    main, *others = histories
    trajectory = Trajectory(main.messages_and_choices, additional_histories=others, scenario_id=scenario.id)
    return episode.score(trajectory)


async def _take_turn(model: Any, episode: Episode, history: History) -> None:
    """Show the board, ask for a move, play it."""
    variant, items = episode.variant, history.messages_and_choices
    items.append(user_message(episode.game.board, variant))
    turn = await _ask(model, history, variant)
    move = read_move(turn, variant)
    if move is None and variant.invalid == "retry":
        episode.invalid += 1
        items.append(_credited(turn, -1.0, variant))
        items.append({"role": "user", "content": REMINDER[variant.move_style]})
        turn = await _ask(model, history, variant)
        move = read_move(turn, variant)
    credit = episode.fumble() if move is None else episode.play(move)
    items.append(_credited(turn, credit, variant))


def dialogue(scenario: Scenario) -> Dialogue:
    """The same game for a person who watches; every move is answered with the board after it."""
    episode = Episode(scenario)
    variant = episode.variant

    def respond(turn: Turn) -> list[dict[str, Any]]:
        if episode.ended_by:
            return []
        move = read_move(turn, variant)
        _ = episode.fumble() if move is None else episode.play(move)
        return [] if episode.ended_by else [user_message(episode.game.board, variant)]

    return Dialogue(
        [*opening(variant), user_message(episode.game.board, variant)],
        respond,
        options=_options(variant),
        forgets=variant.history == "last",
        score=episode.score,
    )


def _options(variant: Variant) -> dict[str, Any]:
    """Of every request."""
    longest = variant.max_tokens or MAX_TOKENS[variant.move_style]
    return {"max_tokens": longest, "stop": STOP[variant.move_style]}


async def _ask(model: Any, history: History, variant: Variant) -> Turn:
    response = await model.client.chat.completions.create(
        model=model.name, messages=history.messages(), **_options(variant)
    )
    return Turn.from_choice(response.choices[0])


def read_move(turn: Turn, variant: Variant) -> str | None:
    """The move that a reply names, or None when it is anything but one move."""
    text = turn.message["content"]
    if variant.move_style == "tag":
        return read_tagged(text, "move", "|".join(MOVES), cut_off=turn.finish_reason == "length")
    word = (text or "").strip().rstrip(".").lower()
    return word if word in MOVES else None


def _credited(turn: Turn, credit: float, variant: Variant) -> Turn:
    return turn.with_credit(credit) if variant.credit != "none" else turn
