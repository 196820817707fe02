"""Plain data comes back equal: through the store's JSON and through pickle."""

import dataclasses
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artnb.store.codec import decode, encode
from artnb.types import Failure, Groups, History, Sample, Scenario, Trajectory, TrajectoryGroup, Turn

texts = st.text(
    st.characters(exclude_categories=()), max_size=12
)  # control characters and lone surrogates too
floats = st.floats(allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts | st.sampled_from(["$float", "$deep", "$object"]), json_values, max_size=3)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": texts | st.none()},
    optional={"tool_calls": st.lists(objects, max_size=2)},
)
ids = st.lists(st.integers(0, 200_000), max_size=6)
scenarios = st.builds(Scenario, texts, texts, st.integers(), objects)
failures = st.builds(Failure, texts, texts, texts)


@st.composite
def turns(draw, before=()):
    completion = draw(ids)
    prompt = draw(ids)
    extends = draw(st.booleans()) and before
    return Turn(
        prompt_ids=(*before[-1].ids, *prompt) if extends else tuple(prompt),
        completion_ids=tuple(completion),
        logprobs=tuple(draw(floats) for _ in completion),
        policy_version=draw(st.integers(-1, 1000)),
        finish_reason=draw(st.sampled_from(["stop", "length", "tool_calls"])),
        message=draw(messages),
        sampling=draw(objects),
        timing=draw(st.dictionaries(texts, floats, max_size=2)),
        credit=draw(st.none() | floats),
    )


@st.composite
def conversations(draw):
    items, before = [], []
    for is_turn in draw(st.lists(st.booleans(), max_size=4)):
        items.append(draw(turns(tuple(before))) if is_turn else draw(messages))
        before += [items[-1]] if is_turn else []
    return items


tools = st.none() | st.lists(objects, max_size=2)
histories = st.builds(History, conversations(), tools)
trajectories = st.builds(
    Trajectory,
    conversations(),
    st.none() | floats,
    st.dictionaries(texts, floats, max_size=3),
    objects,
    tools,
    st.lists(histories, max_size=2),
    st.lists(texts, max_size=2),
    st.none() | failures,
    texts,
    texts,
    st.none() | texts,
    texts,
    floats,
    st.none() | floats,
)
groups = st.builds(TrajectoryGroup, st.lists(trajectories, max_size=2), texts, texts, objects)


def round_trip(value):
    return type(value).from_json(decode(encode(value.to_json())))


@settings(max_examples=30, deadline=None)
@given(scenarios, turns(), histories, trajectories, groups)
def test_types_come_back_equal_from_json(scenario, turn, history, trajectory, group):
    for value in (scenario, turn, history, trajectory, group):
        assert round_trip(value) == value


@settings(max_examples=30, deadline=None)
@given(scenarios, failures, trajectories, groups)
def test_types_come_back_equal_from_pickle(scenario, failure, trajectory, group):
    for value in (scenario, failure, trajectory, group):
        assert pickle.loads(pickle.dumps(value)) == value


def test_a_sample_pickles_and_counts_its_sampled_tokens():
    sample = Sample((1, 2), (False, True), (0.0, -1.0), (0.0, 0.5), (0.0, 1.0), "t", 0)
    assert pickle.loads(pickle.dumps(sample)) == sample
    assert (
        Sample(
            **{
                k: tuple(v) if isinstance(v, list) else v
                for k, v in decode(encode(dataclasses.asdict(sample))).items()
            }
        )
        == sample
    )
    assert sample.sampled_tokens == 1


def test_groups_keep_their_status_through_pickle():
    found = Groups([TrajectoryGroup([Trajectory(reward=1.0, id="a", started=0.0)])])
    found.status, found.seconds = "interrupted", 2.0
    again = pickle.loads(pickle.dumps(found))
    assert again == found and (again.status, again.seconds) == ("interrupted", 2.0)
    assert "interrupted" in repr(again) and "1.000" in repr(again)


def test_non_finite_numbers_come_back_from_valid_json():
    trajectory = Trajectory(reward=math.nan, metrics={"up": math.inf, "down": -math.inf}, id="a")
    again = round_trip(trajectory)
    assert math.isnan(again.reward)
    assert again.metrics == {"up": math.inf, "down": -math.inf}
    assert not again.is_scored


def test_a_turn_stores_a_shared_beginning_once():
    first = Turn((1, 2, 3), (4, 5), (-0.1, -0.2), 0, "stop", {"role": "assistant", "content": "a"})
    second = Turn((*first.ids, 6, 7), (8,), (-0.3,), 0, "stop", {"role": "assistant", "content": "b"})
    record = Trajectory([first, {"role": "user", "content": "x"}, second]).to_json()
    assert record["messages_and_choices"][2]["turn"]["prompt_ids"] == [6, 7]
    assert Trajectory.from_json(record).turns == [first, second]


def test_a_turn_refuses_logprobs_that_do_not_fit():
    with pytest.raises(ValueError, match="2 logprobs for 1 tokens"):
        Turn((1,), (2,), (-1.0, -2.0), 0, "stop", {"role": "assistant", "content": ""})


def test_a_reward_of_zero_is_scored_and_none_is_not():
    assert Trajectory(reward=0.0).is_scored
    assert not Trajectory().is_scored
    assert not Trajectory(reward=1.0, error=Failure("ValueError", "no")).is_scored
