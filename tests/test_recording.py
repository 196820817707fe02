"""Which calls belong to a rollout, and what history they make."""

import asyncio

from artnb.recording import Recorder, current_recorder, record, recording
from artnb.types import Trajectory, Turn

TOOLS = [{"type": "function", "function": {"name": "price"}}]


def user(text):
    return {"role": "user", "content": text}


def turn(text, version=0):
    return Turn((1, 2), (3,), (-0.1,), version, "stop", {"role": "assistant", "content": text})


def test_a_call_that_extends_the_conversation_continues_it():
    recorder = Recorder()
    one, two = turn("one"), turn("two")
    recorder.add([user("a")], None, one)
    recorder.add([user("a"), {"role": "assistant", "content": "one "}, user("b")], None, two)
    assert recorder.history() == ([user("a"), one, user("b"), two], [])


def test_another_conversation_is_an_additional_history():
    recorder = Recorder()
    one, two, three = turn("one"), turn("two"), turn("three")
    recorder.add([user("a")], None, one)
    recorder.add([user("summarise")], None, two)
    recorder.add([user("a"), one.message, user("b")], None, three)
    main, others = recorder.history()
    assert main == [user("a"), one, user("b"), three]
    assert [history.messages_and_choices for history in others] == [[user("summarise"), two]]


def test_other_tools_open_another_history():
    recorder = Recorder()
    recorder.add([user("a")], TOOLS, turn("one"))
    recorder.add([user("a"), turn("one").message, user("b")], None, turn("two"))
    _, others = recorder.history()
    assert len(others) == 1 and others[0].tools is None


def test_several_choices_branch_and_the_chosen_one_goes_on():
    recorder = Recorder()
    left, right, after = turn("left"), turn("right"), turn("after")
    recorder.add([user("a")], None, left)
    recorder.add([user("a")], None, right)
    recorder.add([user("a"), right.message, user("b")], None, after)
    main, others = recorder.history()
    assert main == [user("a"), left]
    assert others[0].messages_and_choices == [user("a"), right, user("b"), after]


def test_calls_to_another_policy_are_left_out_beside_the_current_one():
    recorder = Recorder()
    recorder.add([user("a")], None, turn("opponent", -1), policy="base")
    recorder.add([user("b")], None, turn("own"))
    assert [t.message["content"] for t in recorder.history()[0] if isinstance(t, Turn)] == ["own"]
    assert recorder.history()[1] == []


def test_calls_to_another_policy_alone_are_the_history():
    recorder = Recorder()
    recorder.add([user("a")], None, turn("base", -1), policy="base")
    assert len(recorder.history()[0]) == 2


def test_fill_gives_an_empty_trajectory_the_recorded_calls():
    recorder = Recorder()
    recorder.add([user("a")], TOOLS, turn("one"))
    trajectory = Trajectory(reward=1.0)
    recorder.fill(trajectory)
    assert trajectory.turns == [turn("one")] and trajectory.tools == TOOLS and trajectory.reward == 1.0


def test_fill_replaces_hand_written_messages_by_their_turns_and_keeps_what_follows():
    recorder = Recorder()
    one = turn("one")
    recorder.add([user("other")], None, turn("aside"))
    recorder.add([user("a")], None, one)
    trajectory = Trajectory([user("a"), {"role": "assistant", "content": "one"}, user("thanks")])
    recorder.fill(trajectory)
    assert trajectory.messages_and_choices == [user("a"), one, user("thanks")]
    assert len(trajectory.additional_histories) == 1


def test_fill_leaves_a_trajectory_with_turns_alone():
    recorder = Recorder()
    recorder.add([user("a")], None, turn("one"))
    trajectory = Trajectory([user("b"), turn("mine")])
    recorder.fill(trajectory)
    assert trajectory.messages_and_choices == [user("b"), turn("mine")]


def test_nothing_is_recorded_outside():
    record([user("a")], None, turn("one"))
    assert current_recorder() is None


async def test_tasks_and_threads_inherit_the_recorder_and_siblings_do_not_see_it():
    async def rollout(name):
        with recording() as recorder:
            await asyncio.sleep(0)
            record([user(name)], None, turn("own"))
            await asyncio.gather(*(nested(name) for _ in range(2)))
            await asyncio.to_thread(record, [user(name)], None, turn("thread"))
        return recorder

    async def nested(name):
        await asyncio.sleep(0)
        record([user(name)], None, turn("nested"))

    recorders = await asyncio.gather(rollout("a"), rollout("b"))
    for name, recorder in zip("ab", recorders, strict=True):
        assert len(recorder.calls) == 4
        assert all(call.messages == [user(name)] for call in recorder.calls)


def test_recordings_nest():
    with recording() as outer:
        with recording() as inner:
            record([user("a")], None, turn("one"))
        record([user("b")], None, turn("two"))
    assert len(inner.calls) == len(outer.calls) == 1
