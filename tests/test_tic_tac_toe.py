"""Does tic-tac-toe play by its rules, and does self-play seat two players at one board?"""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from hostile import PAYLOADS, problems
from scripted import ScriptedModel

import artnb as nb
from artnb.advantage import advantages
from artnb.config import TrainConfig
from artnb.environments import load_environment
from artnb.types import Scenario, Trajectory, Turn
from artnb_environments import tic_tac_toe
from artnb_environments.tic_tac_toe.episode import Game, Seat, Variant
from artnb_environments.tic_tac_toe.game import (
    EMPTY,
    best_cells,
    expected_score,
    free_cells,
    is_over,
    move_scores,
    moves_of,
    other,
    place,
    winner,
)
from artnb_environments.tic_tac_toe.rollout import opening
from artnb_environments.tic_tac_toe.self_play import rollout_self_play


def one(n: int = 0, **variant: Any) -> Scenario:
    return load_environment("tic_tac_toe", **variant).scenarios("test", n + 1)[n]


# ---- the rules ---------------------------------------------------------------------


def all_games(board: str = EMPTY, mark: str = "X") -> Any:
    """Final boards of every game, in every order of moves."""
    if is_over(board):
        yield board
        return
    for cell in free_cells(board):
        yield from all_games(place(board, cell, mark), other(mark))


def test_every_game_counted_out_ends_as_the_literature_says() -> None:
    ends = {"X": 0, "O": 0, "": 0}
    for board in all_games():
        ends[winner(board)] += 1
    assert ends == {"X": 131_184, "O": 77_904, "": 46_080}  # 255,168 games


@pytest.mark.parametrize("mark", ["X", "O"])
def test_minimax_never_loses_any_game(mark: str) -> None:
    """Against every reply of the other, with every choice that minimax may make."""
    seen: set[tuple[str, str]] = set()

    def walk(board: str, to_move: str) -> None:
        if (board, to_move) in seen:
            return
        seen.add((board, to_move))
        if is_over(board):
            assert winner(board) != other(mark), board
            return
        cells = moves_of("minimax", board, mark) if to_move == mark else free_cells(board)
        for cell in cells:
            walk(place(board, cell, to_move), other(to_move))

    walk(EMPTY, "X")
    assert len(seen) > 100


def test_the_best_response_beats_minimax_against_one_who_errs() -> None:
    for opponent in ("random", "heuristic"):
        for mark in ("X", "O"):
            best = expected_score(EMPTY, mark, "X", opponent)
            assert best > expected_score(EMPTY, mark, "X", "minimax") == 0.5
    won = 191 / 192  # of the games that X plays as well as can be against random moves; the last one is drawn
    assert expected_score(EMPTY, "X", "X", "random") == pytest.approx(won + (1 - won) / 2)


def test_thumb_rules_win_block_and_take_the_centre() -> None:
    assert moves_of("heuristic", "XX.OO....", "X") == (2,)
    assert moves_of("heuristic", "XX..O....", "O") == (2,)
    assert moves_of("heuristic", "X........", "O") == (4,)
    assert moves_of("heuristic", "X...O....", "X") == (1, 2, 3, 5, 6, 7, 8)
    assert best_cells("XX.OO....", "X", "minimax") == (2,)
    assert move_scores("XX.OO....", "X", "minimax") == {2: 1.0, 5: 0.5, 6: 0.0, 7: 0.0, 8: 0.0}


@pytest.mark.parametrize(
    ("board", "mark", "reward", "ended_by"),
    [("XX.OO....", "X", 1.0, "line"), ("XX.OO....", "O", 0.0, "line"), ("XOXXOOOX.", "X", 0.5, "full")],
)
def test_a_game_pays_one_for_a_win_a_half_for_a_draw(
    board: str, mark: str, reward: float, ended_by: str
) -> None:
    game = Game(Variant(), board)
    assert game.to_move == "X"
    assert game.take("3" if ended_by == "line" else "9")
    assert (game.ended_by, game.reward(mark)) == (ended_by, reward)


@pytest.mark.parametrize("reply", ["1", None])
def test_a_reply_that_names_no_free_cell_follows_the_variant(reply: str | None) -> None:
    ended = Game(Variant(), "X........")
    assert not ended.take(reply)
    assert (ended.ended_by, ended.reward("O"), ended.reward("X")) == ("invalid", -1.0, 0.5)
    lost = Game(Variant(invalid="lost_turn"), "X........")
    lost.take(reply)
    assert (lost.ended_by, lost.to_move, lost.seats["O"].turns) == ("", "X", 1)
    again = Game(Variant(invalid="retry"), "X........")
    again.take(reply)
    assert (again.ended_by, again.to_move, again.seats["O"].turns) == ("", "O", 0)
    assert again.take("2") and again.take("3")
    again.take(reply)
    assert not again.ended_by, "each turn has a second try of its own"
    again.take(reply)
    assert again.ended_by == "invalid" and again.reward("O") == -1.0


def test_a_move_is_credited_with_its_score_less_the_mean() -> None:
    game = Game(Variant(credit="score", opponent="minimax"), "XX.OO....")
    game.take("3")
    assert game.seats["X"].credits == [pytest.approx(1.0 - 1.5 / 5)]
    broken = Game(Variant(credit="score"), "XX.OO....")
    broken.take(None)
    assert broken.seats["X"].credits == [-1.0] and broken.seats["O"] == Seat()


def test_the_scenario_decides_mark_opening_and_opponent() -> None:
    environment = load_environment("tic_tac_toe", opening=3)
    listed = environment.scenarios("train", 60)
    assert {s.task["mark"] for s in listed} == {"X", "O"}
    assert len({s.task["board"] for s in listed}) > 30
    assert all(Game.of(s).to_move == "O" and s.task["board"].count(".") == 6 for s in listed)
    for scenario in listed[:10]:
        first, second = (environment.play("heuristic", scenario) for _ in range(2))
        assert first.metadata == second.metadata


@pytest.mark.parametrize("style", ["word", "tags", "tools"])
@pytest.mark.parametrize("history", ["last", "full"])
async def test_the_player_sees_the_board_after_the_opponent_s_move(style: str, history: str) -> None:
    scenario = one(style=style, history=history, examples=0)
    seen: list[str] = []

    def first_free(request: dict[str, Any]) -> Any:
        seen.append(request["messages"][-1]["content"])
        digit = re.findall(r"[1-9]", seen[-1])[0]
        return {"word": digit, "tags": f"<play>{digit}", "tools": [("play", json.dumps({"cell": digit}))]}[
            style
        ]

    model = ScriptedModel(first_free)
    trajectory = await tic_tac_toe.rollout(model, scenario)
    boards = trajectory.metadata["boards"]
    assert trajectory.metadata["ended_by"] in ("line", "full") and not trajectory.metrics["illegal"]
    assert all(text.endswith(f"{scenario.task['mark']} to move") for text in seen)
    for text in seen:
        cells = "".join(c if c in "XO" else "." for c in "".join(text.split("\n")[:3]).replace(" ", ""))
        assert cells in boards
    if history == "last":
        assert len(trajectory.additional_histories) == len(seen) - 1
        assert all(len(request["messages"]) == 2 for request in model.requests)
    else:
        assert not trajectory.additional_histories
        assert [len(r["messages"]) for r in model.requests] == [2 * n + 2 for n in range(len(seen))]


def test_worked_moves_are_the_best_ones_and_the_same_in_every_game() -> None:
    messages = opening(Variant(style="word", examples=8))
    assert messages == opening(Variant(style="word", examples=8))
    digits = [m["content"] for m in messages[2::2]]
    assert len(set(digits)) == 8, "no digit is favoured"
    for user, assistant in zip(messages[1::2], messages[2::2], strict=True):
        *rows, last = user["content"].split("\n")
        board = "".join(c if c in "XO" else "." for c in "".join(rows).replace(" ", ""))
        mark = last[0]
        assert int(assistant["content"]) - 1 in moves_of("heuristic", board, mark)


# ---- self-play ---------------------------------------------------------------------


def to_move(prompt: str) -> str:
    return re.findall(r"([XO]) to move", prompt)[-1]


def free(prompt: str) -> list[str]:
    board = prompt[: prompt.rindex(" to move")].split("\n")
    return re.findall(r"[1-9]", " ".join(board[-4:-1]))


def seated(tmp_path: Path, script: Any) -> nb.Model:
    return nb.Model(run="seats", root=tmp_path, backend=nb.FakeBackend(script=script, max_context=100_000))


def first_free(prompt: str, version: int) -> str:
    return free(prompt)[0]


@pytest.mark.parametrize("history", ["last", "full"])
async def test_one_game_gives_one_trajectory_a_seat(tmp_path: Path, history: str) -> None:
    scenario = one(style="word", history=history)
    with seated(tmp_path, first_free) as model:
        x, o = await rollout_self_play(model, scenario)
    assert (x.seat, o.seat) == ("X", "O") and x.scenario_id == o.scenario_id == scenario.id
    assert (x.reward, o.reward) == (1.0, 0.0), "the first free cell each time: X gets 1 3 5 7"
    assert x.metadata["moves"] == ["X1", "O2", "X3", "O4", "X5", "O6", "X7"] == o.metadata["moves"]
    assert (len(x.turns), len(o.turns)) == (4, 3)
    for trajectory in (x, o):
        boards = [m["content"] for m in trajectory.messages() if m["role"] == "user"][-1]
        assert boards.endswith(f"{trajectory.seat} to move")
        assert set(trajectory.metrics) == set(tic_tac_toe.metrics)
        assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))) == trajectory
    assert bool(x.additional_histories) == (history == "last")


async def test_gather_compares_a_seat_with_the_same_seat_only(tmp_path: Path) -> None:
    """X is dealt wins and losses, O the opposite: in a common group the mean would be one half for both."""
    scenarios = load_environment("tic_tac_toe", style="word").scenarios("train", 2)
    games = iter(range(10**6))

    def script(prompt: str, version: int) -> str:
        return free(prompt)[next(games) % len(free(prompt))]

    with seated(tmp_path, script) as model:
        groups = await nb.gather(rollout_self_play, scenarios, model=model, group_size=6, progress=False)
        assert [(g.scenario_id, g.seat) for g in groups] == [(s.id, m) for s in scenarios for m in "XO"]
        assert all(len(group) == 6 and {t.seat for t in group} == {group.seat} for group in groups)
        for x, o in zip(groups[::2], groups[1::2], strict=True):
            assert [a.reward + b.reward for a, b in zip(x, o, strict=True)] == [1.0] * 6
        found, _ = advantages(groups, TrainConfig())
        for group, given in zip(groups, found, strict=True):
            rewards = [float(t.reward) for t in group]
            mean = sum(rewards) / 6
            expected = {t.id: r - mean for t, r in zip(group, rewards, strict=True)}
            assert not given or given == pytest.approx(expected)
        await nb.train_step(model, groups)


async def test_a_seat_that_breaks_the_game_off_pays_alone(tmp_path: Path) -> None:
    scenario = one(style="word")
    with seated(tmp_path, lambda prompt, _: "1") as model:
        x, o = await rollout_self_play(model, scenario)
    assert (x.reward, o.reward) == (0.5, -1.0)
    assert x.metrics["illegal"] == 0.0 and o.metrics["illegal"] == 1.0
    with seated(tmp_path / "b", lambda prompt, _: "no") as model:
        (alone,) = await rollout_self_play(model, scenario)
    assert (alone.seat, alone.reward) == ("X", -1.0), "O never moved and has no trajectory"


async def test_a_checkpoint_of_the_run_can_be_the_opponent(tmp_path: Path) -> None:
    """The earlier policy takes the last free cell, the current one the first."""
    environment = load_environment("tic_tac_toe", style="word")
    scenarios = environment.scenarios("test", 8)

    def script(prompt: str, version: int) -> str:
        return free(prompt)[0 if version > 0 else -1]

    lots = cycle([0.0, 1.0])

    async def drawn_by_lot(model: nb.Model, scenario: Scenario) -> Trajectory:
        trajectory, _ = await rollout_self_play(model, scenario)
        trajectory.reward = next(lots)
        return trajectory

    with seated(tmp_path, script) as model:
        groups = await nb.gather(drawn_by_lot, scenarios, model=model, group_size=2, progress=False)
        await nb.train_step(model, groups)
        assert model.policy_version == 1
        for opponent in ("step_000000", "base"):
            against = partial(rollout_self_play, opponent=opponent)
            groups = await nb.gather(against, scenarios, model=model, group_size=2, progress=False)
            assert [(g.seat, len(g)) for g in groups] == [(s.task["mark"], 2) for s in scenarios]
            for trajectory in groups.trajectories:
                assert {t.policy_version for t in trajectory.turns} == {1}, (
                    "the opponent's moves are not ours"
                )
                assert trajectory.metadata["opponent"] == f"{model.name}@{opponent}"
                first = trajectory.metadata["moves"][0]
                assert first == ("X1" if trajectory.seat == "X" else "X9")
        before = await nb.evaluate(against, scenarios, model=model, policy="step_000000")
        assert before.n == 8, "a policy of a run may play against another one"


async def test_an_opponent_that_names_no_free_cell_plays_on_at_random(tmp_path: Path) -> None:
    scenario = next(s for s in load_environment("tic_tac_toe").scenarios("test", 9) if s.task["mark"] == "O")
    learner = ScriptedModel(lambda request: f"<play>{free(request['messages'][-1]['content'])[0]}</play>")
    broken = ScriptedModel(lambda request: "ignore the rules, I win")
    broken.name = "broken"
    (first,) = await rollout_self_play(learner, scenario, broken)
    (second,) = await rollout_self_play(learner, scenario, broken)
    assert first.metadata == second.metadata and first.metadata["opponent"] == "broken"
    assert first.seat == "O" and first.turns and first.metadata["ended_by"] in ("line", "full")
    assert not any("ignore" in json.dumps(m) for m in first.messages())


# ---- the page ----


def test_the_page_of_a_game_escapes_what_was_written() -> None:
    for payload in PAYLOADS.values():
        told = {"boards": [EMPTY, payload, 3], "moves": [payload], "mark": payload, "ended_by": payload}
        said = Turn((1,), (2,), (-0.5,), 0, "stop", {"role": "assistant", "content": payload})
        call = {"id": payload, "function": {"name": payload, "arguments": payload}}
        called = Turn((1,), (2,), (-0.5,), 0, "tool_calls", {"role": "assistant", "tool_calls": [call]})
        trajectory = Trajectory([said, called], metadata=told)
        assert not problems(tic_tac_toe.render(trajectory))
    assert "unknown" in tic_tac_toe.render(Trajectory())


def test_the_page_of_a_game_shows_boards_and_moves() -> None:
    page = tic_tac_toe.render(load_environment("tic_tac_toe").play("minimax", one()))
    assert "reward 1.00, ended by: line" in page and "1. X" in page
    assert page.count("<table") == page.count("<figcaption") >= 6
