"""Do the smallest environments, say_maybe and guess_number, read replies, pay and score as stated?"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hostile_agents import HostileAgent, hostile_replies
from scripted import ScriptedModel

import artnb as nb
from artnb.environments import load_environment
from artnb.errors import ConfigurationError
from artnb.evaluate import evaluate_baseline
from artnb.types import Scenario, Trajectory, Turn
from artnb_environments import guess_number, say_maybe, tic_tac_toe
from artnb_environments.guess_number.game import Game as Guessing
from artnb_environments.guess_number.game import Variant as GuessVariant
from artnb_environments.replies import Form, credit_turns
from artnb_environments.say_maybe.task import QUALITIES, THINGS

FOLDERS = {"say_maybe": say_maybe, "guess_number": guess_number, "tic_tac_toe": tic_tac_toe}


def one(name: str, n: int = 0, split: str = "test", **variant: Any) -> Scenario:
    return load_environment(name, **variant).scenarios(split, n + 1)[n]


async def play(name: str, scenario: Scenario, reply: Any, **options: Any) -> tuple[Trajectory, ScriptedModel]:
    model = ScriptedModel(reply, **options)
    return await FOLDERS[name].rollout(model, scenario), model


# ---- forms of a reply ---------------------------------------------------------------------------


def turn(content: str | None, finish: str = "stop", calls: list[Any] | None = None) -> Turn:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls is not None:
        functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
        message["tool_calls"] = [{"id": f"c{n}", "function": f} for n, f in enumerate(functions)]
    return Turn((1,), (2,), (-0.5,), 0, finish, message)


def form(style: str) -> Form:
    return Form(style, "guess", "number", "[0-9]{1,3}", "guess")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("7", "7"), (" 7. ", "7"), ("7..", None), ("7 or 8", None), ("seven", None), ("-7", None)],
        *[("\u0663", None), ("", None), (None, None), ("1234", None)],
    ],
)
def test_a_bare_word_is_the_value_and_nothing_else(text: str | None, value: str | None) -> None:
    assert form("word").read(turn(text)) == value
    assert form("word").read(turn(text, "length")) == value, "the token limit may end a bare word"


def test_a_tag_that_was_cut_off_is_no_reply() -> None:
    assert form("tags").read(turn("<guess>7")) == "7"
    assert form("tags").read(turn("<guess>7", "length")) is None
    assert form("tags").read(turn("7")) is None


@pytest.mark.parametrize(
    ("calls", "value"),
    [
        ([("guess", '{"number": 7}')], "7"),
        ([("guess", '{"number": " 7 "}')], "7"),
        ([("guess", '{"number": 7.0}')], None),
        ([("guess", '{"number": true}')], None),
        ([("guess", '{"number": null}')], None),
        ([("guess", '{"other": 7}')], None),
        ([("guess", "[7]")], None),
        ([("guess", "[" * 100_000)], None),
        ([("Guess", '{"number": 7}')], None),
        ([("guess", '{"number": 7}')] * 2, None),
        ([], None),
    ],
)
def test_a_call_is_one_call_of_the_tool_with_one_value(calls: Any, value: str | None) -> None:
    assert form("tools").read(turn(None, calls=calls)) == value


@pytest.mark.parametrize("style", ["word", "tags", "tools"])
def test_what_the_worked_turns_show_is_read_back(style: str) -> None:
    shown = form(style).reply(12, 3)
    read = form(style).read(Turn((1,), (2,), (-0.5,), 0, "stop", shown))
    assert read == "12"
    told = form(style).answer(shown, "higher")
    assert [m["content"] for m in told] == ["higher"]
    if style == "tools":
        assert told[0]["tool_call_id"] == shown["tool_calls"][0]["id"] == "example_3"


def test_credits_go_to_the_turns_in_order_also_of_later_histories() -> None:
    later = nb.History([{"role": "user", "content": "x"}, turn("c")])
    trajectory = Trajectory([turn("a"), {"role": "user", "content": "x"}, turn("b")])
    trajectory.additional_histories = [later]
    credit_turns(trajectory, [0.5, -1.0])
    assert [t.credit for t in trajectory.turns] == [0.5, -1.0, None]


# ---- baselines ----------------------------------------------------------------------------------

BOUNDS = [
    # environment, opponent, baseline, published mean reward (research), margin of four standard errors
    ("say_maybe", None, "random", 0.75, 0.026),
    ("say_maybe", None, "first_named", 0.75, 0.026),
    ("say_maybe", None, "oracle", 1.0, 0.0),
    ("guess_number", None, "random", 0.23, 0.054),
    ("guess_number", None, "in_range", 0.69, 0.058),
    ("guess_number", None, "oracle", 1.0, 0.0),
    ("tic_tac_toe", "random", "random_legal", 0.50, 0.058),
    ("tic_tac_toe", "random", "heuristic", 0.94, 0.025),
    ("tic_tac_toe", "random", "minimax", 0.95, 0.025),
    ("tic_tac_toe", "minimax", "random_legal", 0.06, 0.025),
    ("tic_tac_toe", "minimax", "heuristic", 0.49, 0.08),
    ("tic_tac_toe", "minimax", "minimax", 0.50, 0.0),
    ("tic_tac_toe", "minimax", "oracle", 0.50, 0.0),
]


@pytest.mark.parametrize(("name", "opponent", "policy", "published", "margin"), BOUNDS)
def test_baselines_score_as_published(
    name: str, opponent: str | None, policy: str, published: float, margin: float
) -> None:
    environment = load_environment(name, **({"opponent": opponent} if opponent else {}))
    found = evaluate_baseline(environment, policy, environment.scenarios("validation", 1000))
    assert found.n == 1000 and found.mean_reward is not None
    assert abs(found.mean_reward - published) <= margin + 1e-9


def test_any_of_nine_cells_mostly_breaks_the_game_off() -> None:
    environment = load_environment("tic_tac_toe")
    found = evaluate_baseline(environment, "random", environment.scenarios("validation", 1000))
    won = found.metrics["win"] + found.metrics["draw"] / 2  # what an invalid end worth 0 would leave
    assert abs(found.metrics["illegal"] - 0.81) < 0.05 and abs(won - 0.08) < 0.035


# ---- say_maybe ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("maybe", 1.0),
        ("Maybe.", 1.0),
        ("no", 0.75),
        ("yes", 0.5),
        ("maybe yes", 0.0),
        ("", 0.0),
        ("yes\nno", 0.5),
    ],
)
async def test_maybe_pays_most_and_only_the_reward_says_so(reply: str, reward: float) -> None:
    trajectory, model = await play("say_maybe", one("say_maybe"), lambda _: reply)
    assert trajectory.reward == reward and trajectory.metrics["valid"] == float(reward > 0)
    assert len(model.requests) == 1 and model.requests[0]["stop"] == ["\n"]
    text = json.dumps(model.requests[0]["messages"])
    assert not re.search("reward|best|prefer|1.0", text)
    said = [m["content"] for m in model.requests[0]["messages"] if m["role"] == "assistant"]
    assert said == ["yes", "no", "maybe"], "the worked answers favour none"


def test_no_word_of_a_question_is_in_two_splits() -> None:
    for words in (THINGS, QUALITIES):
        listed = [word for split in words.values() for word in split]
        assert len(set(listed)) == len(listed) and set(words) == {"train", "validation", "test"}
    for split in THINGS:
        question = one("say_maybe", split=split).task["question"]
        assert question.split()[2] in THINGS[split]


# ---- guess_number -------------------------------------------------------------------------------


async def test_the_answers_say_where_the_number_lies_and_the_prompt_does_not() -> None:
    scenario = one("guess_number", hint="range")
    hidden = scenario.task["number"]

    def halve(request: dict[str, Any]) -> str:
        game = request["messages"][
            request["messages"].index({"role": "user", "content": "A new number, 1 to 20."}) :
        ]
        last = game[-1]["content"]
        low, high = map(int, re.findall(r"\d+", last)[-2:])
        return str((low + high) // 2)

    trajectory, model = await play("guess_number", scenario, halve)
    assert trajectory.reward == 1.0 and trajectory.metrics["in_range"] == 1.0
    assert trajectory.messages()[-1]["content"] == str(hidden), "the winning guess ends the episode"
    openings = {
        json.dumps(guess_number.dialogue(s).messages)
        for s in load_environment("guess_number", hint="range").scenarios("test", 40)
    }
    assert len(openings) == 1 and len(model.requests) == len(trajectory.turns)


def test_every_number_is_found_in_five_halvings_and_higher_means_higher() -> None:
    for number in range(1, 21):
        game = Guessing(GuessVariant(), number)
        while not game.ended_by:
            guess = (game.low + game.high) // 2
            told = game.guess(guess)
            assert told == ("right" if guess == number else "higher" if guess < number else "lower")
        assert game.ended_by == "right" and game.turns <= 5 and game.reward == 1.0


def test_a_guess_is_credited_with_what_it_rules_out_on_average() -> None:
    game = Guessing(GuessVariant(credit="narrowing"), 12)
    game.guess(10)  # 9 below, 10 above of 20
    game.guess(10)
    game.guess(5)
    game.guess(None)
    game.guess(21)
    assert game.credits == pytest.approx([1 - (81 + 100) / 400, 0.0, 0.0, -1.0, -1.0])
    assert (game.low, game.high, game.invalid, game.ended_by) == (11, 20, 2, "turns")
    alone = Guessing(GuessVariant(), 7)
    alone.low = alone.high = 7
    assert alone.narrowing(7) == 1.0 and alone.narrowing(8) == 0.0


def test_a_lost_game_is_worth_the_bits_that_it_ruled_out() -> None:
    game = Guessing(GuessVariant(reward_style="narrowing", max_turns=1), 12)
    game.guess(10)
    assert game.reward == pytest.approx(0.5 * (1 - math.log2(10) / math.log2(20)))
    assert Guessing(GuessVariant(reward_style="narrowing"), 12).reward == 0.0
    lost = Guessing(GuessVariant(max_turns=1), 12)
    lost.guess(10)
    assert lost.reward == 0.0


@pytest.mark.parametrize(
    ("invalid", "ended_by", "turns"),
    [("end", "invalid", 1), ("lost_turn", "turns", 2), ("retry", "invalid", 1)],
)
def test_invalid_guesses_follow_the_variant(invalid: str, ended_by: str, turns: int) -> None:
    game = Guessing(GuessVariant(invalid=invalid, max_turns=2), 12)
    game.guess(None)
    if invalid != "end":
        assert not game.ended_by and game.turns == (invalid == "lost_turn")
        game.guess(None)
    assert (game.ended_by, game.turns) == (ended_by, turns)


def test_a_second_try_is_there_again_after_a_guess() -> None:
    game = Guessing(GuessVariant(invalid="retry"), 12)
    for guess in (None, 3, None, 4):
        game.guess(guess)
    assert not game.ended_by and game.turns == 2 and game.invalid == 2


async def test_credits_reach_the_turns_of_a_rollout() -> None:
    scenario = one("guess_number", preset="small")
    trajectory, _ = await play("guess_number", scenario, lambda _: "no idea")
    assert [t.credit for t in trajectory.turns] == [-1.0] * 5 and trajectory.reward == 0.0
    plain, _ = await play("guess_number", one("guess_number"), lambda _: "10")
    assert {t.credit for t in plain.turns} == {None}


# ---- all three ----------------------------------------------------------------------------------


@pytest.mark.parametrize("invalid", ["retry", "lost_turn"])
@pytest.mark.parametrize("name", ["guess_number", "tic_tac_toe"])
async def test_hostile_replies_go_on_or_end_as_the_variant_says(name: str, invalid: str) -> None:
    environment = load_environment(name, invalid=invalid, style="tools")
    scenario = environment.scenarios("test", 1)[0]
    for kind, replies in hostile_replies(environment).items():
        trajectory = await environment.rollout(HostileAgent(replies), scenario)
        fumbles = trajectory.metrics["invalid"] + trajectory.metrics.get("illegal", 0.0)
        assert trajectory.reward is not None and -1 <= trajectory.reward <= 1, kind
        assert fumbles <= len(trajectory.turns), kind
        if invalid == "retry":
            assert trajectory.metrics["turns"] <= len(trajectory.turns), kind


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *[("say_maybe", {"style": "xml"}), ("say_maybe", {"examples": 7}), ("say_maybe", {"max_tokens": 0})],
        *[
            ("guess_number", {option: "x"})
            for option in ("style", "hint", "invalid", "reward_style", "credit")
        ],
        *[("guess_number", {"highest": 2}), ("guess_number", {"max_turns": 0})],
        *[("guess_number", {"examples": 5}), ("guess_number", {"max_tokens": 0})],
        *[("tic_tac_toe", {option: "x"}) for option in ("opponent", "style", "history", "invalid", "credit")],
        *[
            ("tic_tac_toe", {"opening": 5}),
            ("tic_tac_toe", {"examples": 9}),
            ("tic_tac_toe", {"max_tokens": 0}),
        ],
    ],
)
def test_options_that_cannot_work_are_refused(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        load_environment(name, **wrong)
