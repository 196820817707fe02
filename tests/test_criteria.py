"""Ready-made criteria, each at its borders."""

from __future__ import annotations

import pytest

import artnb as nb
from artnb import criteria
from artnb.types import Scenario, Trajectory, Turn


def reply(text: str, **fields: object) -> Trajectory:
    return Trajectory([{"role": "user", "content": "Q"}, {"role": "assistant", "content": text, **fields}])


CAPITAL = Scenario("france", task={"answer": "Paris", "area": 643801})


@pytest.mark.parametrize(
    ("text", "worth"), [("Paris", 1), (" the PARIS. ", 1), ("Paris, France", 0), ("", 0), ("Ｐａｒｉｓ", 1)]
)
def test_exact(text, worth):
    assert criteria.exact("answer")(reply(text), CAPITAL) == worth


def test_exact_without_tidying():
    assert criteria.exact(text="Paris", normalise=False)(reply("paris")) == 0
    assert criteria.exact(text="Paris", normalise=False)(reply("Paris")) == 1


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("about 643,801 km2", 0),  # the last number is the 2
        ("It is 643,801", 1),
        ("643801.0", 1),
        ("between 1 and 6.43801e5", 1),
        ("650000", 1),
        ("700000", 0),
        ("many", 0),
        ("-643801", 0),
    ],
)
def test_numeric(text, worth):
    assert criteria.numeric("area", relative=0.01)(reply(text), CAPITAL) == worth


@pytest.mark.parametrize(
    ("text", "worth"), [('{"a": 1}', 1), ('{"a": "1"}', 0), ("{}", 0), ("[", 0), ("[" * 100_000, 0)]
)
def test_valid_json(text, worth):
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert criteria.valid_json(schema)(reply(text)) == worth


def test_a_schema_that_is_none_is_refused_early():
    with pytest.raises(Exception, match="is not valid under any of the given schemas"):
        criteria.valid_json({"type": "nothing"})


def test_matches_reads_the_last_reply_with_text():
    trajectory = reply("I cite [1]")
    trajectory.messages_and_choices.append({"role": "assistant", "content": None, "tool_calls": [{}]})
    assert criteria.matches(r"\[\d\]")(trajectory) == 1
    parts = reply("")
    parts.messages_and_choices[-1]["content"] = [{"type": "text", "text": "see [2]"}]
    assert criteria.matches(r"\[2\]")(parts) == 1


def played(tokens: int, prompt: int = 4) -> Trajectory:
    turn = Turn(
        tuple(range(prompt)),
        tuple(range(tokens)),
        (0.0,) * tokens,
        0,
        "stop",
        {"role": "assistant", "content": "x"},
    )
    return Trajectory([{"role": "user", "content": "Q"}, turn], seconds=3.0)


@pytest.mark.parametrize(("tokens", "worth"), [(0, 1.0), (10, 1.0), (15, 0.5), (20, 0.0), (100, 0.0)])
def test_short(tokens, worth):
    assert criteria.short(10, 20)(played(tokens)) == worth


def test_turns_calls_seconds_and_dollars():
    calls = reply("", tool_calls=[{"function": {"name": "look"}}] * 3)
    assert criteria.few_tool_calls(2, 4)(calls) == 0.5
    assert criteria.few_turns(0, 2)(played(1)) == 0.5
    assert criteria.quick(2, 4)(played(1)) == 0.5
    assert criteria.cheap(0, 1, price=(100_000, 0))(played(1, prompt=5)) == 0.5


@pytest.mark.parametrize("given", [(2, 2), (3, 1), (-1, 2), (0, float("inf"))])
def test_a_ramp_that_cannot_be_is_refused(given):
    with pytest.raises(nb.ConfigurationError, match="full"):
        criteria.short(*given)


def test_what_is_expected_must_be_said_once():
    for given in ({}, {"key": "answer", "text": "Paris"}):
        with pytest.raises(nb.ConfigurationError, match="expected"):
            criteria.exact(**given)
    with pytest.raises(nb.ConfigurationError, match=r"scenario.task\['colour'\]"):
        criteria.exact("colour")(reply("x"), CAPITAL)


async def test_they_are_rewards_with_names_of_their_own():
    reward = nb.Reward(criteria.exact("answer"), (criteria.short(10, 20), 0.5), criteria.few_turns(1, 2))
    trajectory = reply("Paris")
    assert await reward(trajectory, CAPITAL) == 2.5
    assert set(trajectory.metrics) == {"reward/exact_match", "reward/length", "reward/turns"}
