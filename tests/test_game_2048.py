"""Does 2048 play by its rules, score as stated, and roll out as a model would see it?"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_2048 import Plain2048
from scripted import ScriptedModel

from artnb.environments import load_environment
from artnb.errors import ConfigurationError
from artnb.types import Scenario, Trajectory
from artnb_environments.game_2048.baselines import greedy_moves
from artnb_environments.game_2048.episode import Episode, Variant
from artnb_environments.game_2048.game import (
    MOVES,
    Board,
    Game,
    count_empty,
    legal_moves,
    mirror,
    shift,
    slide,
    tile_sum,
    transpose,
)
from artnb_environments.game_2048.rollout import board_text, hint_text, opening

tiles = st.sampled_from([0, 0, 2, 2, 4, 8, 16])
boards = st.integers(3, 5).flatmap(
    lambda n: st.lists(st.lists(tiles, min_size=n, max_size=n).map(tuple), min_size=n, max_size=n).map(tuple)
)
moves = st.sampled_from(MOVES)


def naive_slide(row: list[int]) -> list[int]:
    """An independent way to slide: push one tile after the other as far as it goes."""
    cells, frozen = [0] * len(row), set()
    for tile in row:
        if not tile:
            continue
        end = next((i for i, cell in enumerate(cells) if not cell), len(cells))
        if end and cells[end - 1] == tile and end - 1 not in frozen:
            cells[end - 1] *= 2
            frozen.add(end - 1)
        else:
            cells[end] = tile
    return cells


@pytest.mark.parametrize(
    ("row", "after", "points"),
    [
        ((2, 2, 2, 2), (4, 4, 0, 0), 8),
        ((2, 2, 4, 0), (4, 4, 0, 0), 4),
        ((0, 2, 0, 2), (4, 0, 0, 0), 4),
        ((4, 2, 2, 0), (4, 4, 0, 0), 4),
        ((2, 2, 2, 0), (4, 2, 0, 0), 4),
        ((2, 4, 2, 4), (2, 4, 2, 4), 0),
    ],
)
def test_a_tile_merges_once_a_move(row: tuple[int, ...], after: tuple[int, ...], points: int) -> None:
    assert slide(row) == (after, points)


@given(boards, moves)
def test_a_shift_agrees_with_an_independent_slide(board: Board, move: str) -> None:
    grid = [list(row) for row in board]
    if move in ("up", "down"):
        grid = [list(column) for column in zip(*grid, strict=True)]
    if move in ("right", "down"):
        grid = [naive_slide(row[::-1])[::-1] for row in grid]
    else:
        grid = [naive_slide(row) for row in grid]
    if move in ("up", "down"):
        grid = [list(column) for column in zip(*grid, strict=True)]
    assert [list(row) for row in shift(board, move)[0]] == grid


@given(boards, moves)
def test_a_shift_keeps_the_sum_of_tiles(board: Board, move: str) -> None:
    assert tile_sum(shift(board, move)[0]) == tile_sum(board)


@given(boards)
def test_moves_are_each_others_mirror_images(board: Board) -> None:
    assert shift(transpose(board), "up")[0] == transpose(shift(board, "left")[0])
    assert shift(transpose(board), "down")[0] == transpose(shift(board, "right")[0])
    assert shift(mirror(board), "right")[0] == mirror(shift(board, "left")[0])


@given(st.integers(), st.lists(moves, max_size=60), st.integers(3, 5))
def test_a_game_spawns_one_tile_after_a_change_and_none_otherwise(
    seed: int, plan: list[str], size: int
) -> None:
    game = Game(seed, size)
    for move in plan:
        before, after = game.board, shift(game.board, move)[0]
        changed = game.move(move)
        assert changed == (after != before)
        assert tile_sum(game.board) - tile_sum(before) in ((2, 4) if changed else (0,))
        assert (
            sum(x != y for a, b in zip(game.board, after, strict=True) for x, y in zip(a, b, strict=True))
            == changed
        )


@given(st.integers(), st.lists(moves, max_size=40), st.sampled_from(["classic", "art"]))
def test_the_same_seed_and_moves_give_the_same_game(seed: int, plan: list[str], rules: str) -> None:
    first, second = Game(seed, 4, rules), Game(seed, 4, rules)
    for move in plan:
        first.move(move)
        second.move(move)
    assert first.board == second.board and first.score == second.score


def test_nine_in_ten_spawned_tiles_are_twos() -> None:
    counts = Counter(tile for seed in range(2000) for row in Game(seed).board for tile in row if tile)
    assert set(counts) == {2, 4}
    assert 0.88 < counts[2] / counts.total() < 0.92


def test_classic_rules_end_a_game_only_when_no_move_is_left() -> None:
    game = Game(0, 3)
    game.board = ((2, 4, 2), (4, 2, 4), (2, 4, 4))
    assert not game.is_over() and legal_moves(game.board) == ["left", "right", "up", "down"]
    game.board = ((2, 4, 2), (4, 2, 4), (2, 4, 2))
    assert game.is_over()


def test_art_rules_spawn_after_every_move_and_end_at_a_full_board() -> None:
    game = Game(0, 3, "art")
    game.board = ((2, 0, 0), (0, 0, 0), (0, 0, 0))
    assert not game.move("left") and count_empty(game.board) == 7
    game.board = ((2, 4, 2), (4, 2, 4), (2, 4, 4))
    assert game.is_over()


def compare_with_the_plain_implementation(games: int, rules: str) -> None:
    """Random games on 3x3 and 4x4 boards, every board, score and end of them."""
    for seed in range(games):
        size, draw = 3 + seed % 2, random.Random(f"moves {seed}")
        game, plain = Game(seed, size, rules), Plain2048(seed, size, rules)
        moves = 0
        while not plain.is_over():
            move = draw.choice(MOVES)
            could = [one for one in MOVES if plain.slid(one)[0] != plain.cells] if moves % 8 == 0 else None
            assert could is None or legal_moves(game.board) == could
            assert not game.is_over() and game.move(move) == plain.move(move)
            assert [tile for row in game.board for tile in row] == plain.cells and game.score == plain.score
            moves += 1
        assert game.is_over() and moves > 5


@pytest.mark.parametrize("rules", ["classic", "art"])
def test_random_games_are_those_of_an_independent_implementation(rules: str) -> None:
    compare_with_the_plain_implementation(300, rules)


@pytest.mark.slow
@pytest.mark.parametrize("rules", ["classic", "art"])
def test_ten_thousand_random_games_are_those_of_an_independent_implementation(rules: str) -> None:
    compare_with_the_plain_implementation(10_000, rules)


def scenario(n: int = 0, **variant: Any) -> Scenario:
    return load_environment("game_2048", **variant).scenarios("test", n + 1)[n]


def test_the_reward_is_one_for_a_win_and_the_share_of_tiles_otherwise() -> None:
    episode = Episode(scenario())
    episode.game.board = ((8, 4, 4, 0), (0,) * 4, (0,) * 4, (0,) * 4)
    assert episode.reward == 0.5 * 16 / 32
    episode.game.board = ((8, 8, 8, 8), (8, 4, 4, 0), (0,) * 4, (0,) * 4)
    assert episode.reward == 0.5
    episode.game.board = ((16, 0, 0, 0), (0,) * 4, (0,) * 4, (0,) * 4)
    assert episode.is_won and episode.reward == 1.0


def test_art_s_reward_is_two_minus_one_or_logarithms() -> None:
    episode = Episode(scenario(reward_style="art", win_tile=128))
    episode.game.board = ((32, 16, 8, 8), (0,) * 4, (0,) * 4, (0,) * 4)
    assert episode.reward == pytest.approx((5 - 1) / (7 - 1) + 0.2 * (6 - 1) / (11 - 1))
    episode.fumble()
    assert episode.ended_by == "invalid" and episode.reward == -1.0
    episode = Episode(scenario(reward_style="art"))
    episode.game.board = ((8, 8, 0, 0), (0,) * 4, (0,) * 4, (0,) * 4)
    episode.play("left")
    assert episode.ended_by == "won" and episode.reward == 2.0


def test_a_turn_s_credit_is_its_merges_and_minus_one_for_a_lost_turn() -> None:
    episode = Episode(scenario(win_tile=64, max_turns=99))
    episode.game.board = ((2, 2, 4, 4), (8, 8, 0, 0), (2, 0, 0, 0), (0,) * 4)
    assert episode.play("left") == 3.0
    episode.game.board = ((2, 0, 0, 0), (0,) * 4, (0,) * 4, (0,) * 4)
    assert episode.play("left") == -1.0 and episode.illegal == 1 and not episode.ended_by
    assert episode.play("right") == 0.0
    assert episode.fumble() == -1.0 and episode.ended_by == "invalid"


def test_relative_credit_compares_a_move_with_the_mean_of_the_legal_ones() -> None:
    episode = Episode(scenario(credit="relative", win_tile=64, max_turns=99))
    board = ((2, 2, 4, 4), (0,) * 4, (0,) * 4, (0,) * 4)  # left and right merge two pairs, down none
    for move, credit in (("left", 2 - 4 / 3), ("down", 0 - 4 / 3), ("up", -1 - 4 / 3)):
        episode.game.board = board
        assert episode.play(move) == pytest.approx(credit)
    lone = ((2, 0, 0, 0), (0,) * 4, (0,) * 4, (0,) * 4)
    episode.game.board = lone
    assert episode.play("right") == 0.0, "where no move merges, any legal one is as good"
    episode.game.board = lone
    assert episode.fumble() == -1.0


def test_illegal_and_invalid_moves_follow_the_variant() -> None:
    episode = Episode(scenario(illegal="end"))
    episode.game.board = ((2, 0, 0, 0), (0,) * 4, (0,) * 4, (0,) * 4)
    episode.play("left")
    assert episode.ended_by == "illegal"
    episode = Episode(scenario(invalid="lost_turn", max_turns=2))
    episode.fumble()
    assert not episode.ended_by
    episode.fumble()
    assert episode.ended_by == "turns" and episode.invalid == 2 and episode.turns == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"board": 2},
        {"win_tile": 48},
        {"max_turns": 0},
        {"rules": "house"},
        {"board_style": "emoji"},
        {"hint": "answer"},
        {"examples": 9},
        {"history": "some"},
    ],
)
def test_a_value_that_cannot_work_is_refused_at_loading(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        load_environment("game_2048", **wrong)


def test_boards_are_written_in_three_styles() -> None:
    board: Board = ((0, 2, 4), (16, 0, 0), (1024, 8, 0))
    assert board_text(board, "digits") == "024\n1600\n102480"
    assert board_text(board, "exponents") == "012\n400\na30"
    assert board_text(board, "cells") == "_|2|4\n16|_|_\n1024|8|_"


@pytest.mark.parametrize(
    "variant", [{}, {"board": 3, "rules": "art", "examples": 8}, {"hint": True, "board": 8}]
)
def test_the_opening_is_the_same_in_every_game_and_its_moves_are_greedy(variant: dict[str, Any]) -> None:
    first = opening(Variant(**variant))
    assert first == opening(Variant(**variant))
    assert len(first) == 1 + 2 * Variant(**variant).examples
    if variant.get("board", 4) == 3:
        return
    for user, assistant in zip(first[1::2], first[2::2], strict=True):
        rows = user["content"].split("\n")[: Variant(**variant).board]
        shown = tuple(tuple(map(int, row)) for row in rows)
        assert assistant["content"] in [f"<move>{move}</move>" for move in greedy_moves(shown)]


def test_hints_say_what_the_moves_do() -> None:
    board: Board = ((2, 2, 0), (0, 0, 0), (0, 0, 0))
    assert hint_text(board, "none") == ""
    assert hint_text(board, "legal") == "\nleft right down"
    assert hint_text(board, "merges") == "\nleft1 right1"
    alone = ((2, 0, 0), (0, 0, 0), (0, 0, 0))
    assert hint_text(alone, "merges") == "\nright0 down0"


PUBLISHED = [
    # preset, policy, games, published share of wins
    ("tile16", "random", 400, 0.55),
    ("tile16", "random_legal", 400, 0.65),
    ("tile16", "greedy", 400, 0.91),
    ("3x3-32", "random", 400, 0.10),
    ("3x3-32", "corner", 400, 0.48),
    ("3x3-32", "greedy", 400, 0.62),
    ("4x4-128", "random", 200, 0.13),
    ("4x4-128", "random_legal", 200, 0.24),
    ("4x4-128", "corner", 200, 0.55),
    ("4x4-128", "greedy", 200, 0.81),
]


@pytest.mark.parametrize(("preset", "policy", "games", "published"), PUBLISHED)
def test_baselines_win_as_often_as_published(preset: str, policy: str, games: int, published: float) -> None:
    environment = load_environment("game_2048", preset=preset)
    wins = sum(environment.play(policy, one).metrics["win"] for one in environment.scenarios("test", games))
    tolerance = 3.5 * math.sqrt(published * (1 - published) / games) + 0.02
    assert abs(wins / games - published) < tolerance


CLASSIC = [("random", 0.56), ("random_legal", 0.59), ("corner", 0.86), ("greedy", 0.89)]


@pytest.mark.parametrize(("policy", "published"), CLASSIC)
def test_baselines_win_as_often_as_published_by_the_classic_rules(policy: str, published: float) -> None:
    environment = load_environment("game_2048", preset="4x4-128", rules="classic", max_turns=1000)
    wins = sum(environment.play(policy, one).metrics["win"] for one in environment.scenarios("test", 150))
    tolerance = 3.5 * math.sqrt(published * (1 - published) / 150) + 0.02
    assert abs(wins / 150 - published) < tolerance


@pytest.mark.slow
def test_expectimax_wins_as_often_as_the_published_search_of_two_plies() -> None:
    environment = load_environment("game_2048", preset="4x4-128")
    wins = [environment.play("expectimax", one).metrics["win"] for one in environment.scenarios("test", 40)]
    assert sum(wins) >= 39, "published: 1.00"


def test_the_presets_are_those_of_the_card() -> None:
    shape = {
        preset: [
            load_environment("game_2048", preset=preset).variant[k] for k in ("board", "win_tile", "rules")
        ]
        for preset in ("tile16", "3x3-32", "4x4-128")
    }
    assert shape == {"tile16": [4, 16, "classic"], "3x3-32": [3, 32, "art"], "4x4-128": [4, 128, "art"]}


def test_expectimax_plays_better_than_greedy() -> None:
    environment = load_environment("game_2048")
    games = environment.scenarios("validation", 40)
    score = {p: sum(environment.baselines[p](g) for g in games) for p in ("greedy", "expectimax")}
    assert score["expectimax"] > score["greedy"] and score["expectimax"] >= 39


def legal_player(request: dict[str, Any]) -> str:
    """Reads the board that it is shown and answers a legal move."""
    rows = request["messages"][-1]["content"].split("\n")
    board = tuple(tuple(map(int, row)) for row in rows)
    return f"<move>{random.Random(str(board)).choice(legal_moves(board))}"


async def test_each_turn_is_a_conversation_of_its_own_by_default() -> None:
    game = scenario(win_tile=2048, max_turns=6, board_style="digits")
    model = ScriptedModel(legal_player)
    trajectory = (await load_environment("game_2048").rollout(model, game)).finish()
    histories = [
        trajectory.messages_and_choices,
        *(h.messages_and_choices for h in trajectory.additional_histories),
    ]
    assert len(trajectory.turns) == len(histories) == 6
    assert trajectory.metrics["turns"] == 6 and trajectory.metrics["illegal"] == 0
    starts = [json.dumps(history[:-2]) for history in histories]
    assert len(set(starts)) == 1, "all turns share system and examples"
    assert trajectory.reward == 0.5 * min(1.0, sum(map(sum, trajectory.metadata["boards"][-1])) / 4096)
    assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))) == trajectory
    request = model.requests[0]
    assert request["stop"] == ["</move>"] and request["max_tokens"] == 10 and request["model"] == "scripted"


async def test_the_whole_game_is_one_conversation_when_asked() -> None:
    game = scenario(win_tile=2048, max_turns=6, history="full", examples=1)
    model = ScriptedModel(legal_player)
    trajectory = (await load_environment("game_2048").rollout(model, game)).finish()
    assert not trajectory.additional_histories and len(trajectory.turns) == 6
    assert len(trajectory.messages()) == 3 + 12
    assert model.requests[-1]["messages"] == trajectory.messages()[:-1]


async def test_a_scenario_alone_reproduces_the_game() -> None:
    stored = Scenario.from_json(json.loads(json.dumps(scenario(board=3, win_tile=32, hint=True).to_json())))
    rollout = load_environment("game_2048").rollout
    played = [await rollout(ScriptedModel(lambda _: "<move>left</move>"), stored) for _ in range(2)]
    assert played[0].metadata["boards"] == played[1].metadata["boards"]
    assert len(played[0].metadata["boards"][0]) == 3


@pytest.mark.parametrize("credit", [True, False])
async def test_turns_carry_credit_only_when_asked(credit: bool) -> None:
    game = scenario(credit=credit, invalid="lost_turn", max_turns=3)
    replies = iter(["<move>up</move>", "nonsense", "<move>up"])
    trajectory = await load_environment("game_2048").rollout(ScriptedModel(lambda _: next(replies)), game)
    credits_of_turns = [turn.credit for turn in trajectory.turns]
    if credit:
        assert credits_of_turns[1] == -1.0 and None not in credits_of_turns
    else:
        assert credits_of_turns == [None] * 3


@pytest.mark.parametrize(
    "reply",
    ["", "left", "<move>north</move>", "<move>left <move>up</move>", "I move <move>left</move>", "<move>"],
)
async def test_a_reply_that_is_not_one_move_ends_the_game(reply: str) -> None:
    trajectory = await load_environment("game_2048").rollout(ScriptedModel(lambda _: reply), scenario())
    assert trajectory.metadata["ended_by"] == "invalid" and trajectory.metrics["invalid"] == 1
    assert 0 < trajectory.reward < 0.2


async def test_a_reply_cut_off_at_the_token_limit_needs_its_closing_tag() -> None:
    rollout = load_environment("game_2048").rollout
    cut = await rollout(ScriptedModel(lambda _: "<move>left", finish_reason="length"), scenario())
    assert cut.metadata["ended_by"] == "invalid"


async def test_retry_tells_the_model_and_asks_once_more() -> None:
    replies = iter(["hm", "<move>left</move>", "hm", "hm"])
    game = scenario(invalid="retry", win_tile=2048)
    model = ScriptedModel(lambda _: next(replies))
    trajectory = await load_environment("game_2048").rollout(model, game)
    assert trajectory.metadata["ended_by"] == "invalid"
    assert trajectory.metrics["turns"] == 2 and trajectory.metrics["invalid"] == 3
    assert "not a move" in model.requests[1]["messages"][-1]["content"]
    assert len(trajectory.turns) == 4 and len(trajectory.additional_histories) == 1


async def test_one_word_moves_are_read() -> None:
    replies = iter(["Left.", " up\n"] * 20)
    game = scenario(move_style="word", board_style="cells", win_tile=2048, max_turns=4)
    model = ScriptedModel(lambda _: next(replies))
    trajectory = await load_environment("game_2048").rollout(model, game)
    assert trajectory.metrics["invalid"] == 0 and trajectory.metrics["turns"] == 4
    assert "<move>" not in json.dumps(model.requests[0]["messages"])


async def test_a_rendered_game_shows_boards_and_escapes_what_the_model_wrote() -> None:
    environment = load_environment("game_2048")
    model = ScriptedModel(lambda _: "<script>alert(1)</script>")
    trajectory = (await environment.rollout(model, scenario())).finish()
    assert environment.render is not None
    page = environment.render(trajectory)
    assert "&lt;script&gt;" in page and "<script" not in page
    assert page.count("<table") == 2
    hostile = Trajectory(metadata={"boards": [[["<img src=x>", 2]]], "moves": ["<b>"], "ended_by": "<i>"})
    assert "<img" not in environment.render(hostile) and "<b>" not in environment.render(hostile)
    greedy = environment.render(environment.play("greedy", scenario()))
    assert greedy.count("<figure") == 1 + environment.play("greedy", scenario()).metrics["turns"]
