"""Talking to a policy: answers, the environment's part, what is kept, and a view that says no more."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from steps import group, open_fake, open_model, play

import artnb as nb
from artnb.dashboard.view import View
from artnb.store import Run
from artnb.talk import Talk
from artnb.talk import screen as screens
from artnb.types import Trajectory

HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)</script>\u202e'
TAGS = nb.load_environment("tool_lookup", max_tokens=80)
TOOLS = nb.load_environment("tool_lookup", style="tools", max_tokens=400)


def fake(root: Path, script: Any = None, delay: float = 0.0, **options: Any) -> nb.Model:
    return open_fake(root, backend=nb.FakeBackend(script=script, delay=delay, max_context=20_000), **options)


def shopkeeper(prompt: str, version: int) -> str:
    """Asks for the price of the item in the last question, and repeats it."""
    question = prompt.rpartition("How much is the ")[2]
    item, told = (
        question.partition("?")[0],
        re.search(r": (\d+)<\|im_end\|>\n<\|im_start\|>assistant\n$", question),
    )
    return f"<answer>{told[1]}</answer>" if told else f"<call>{item}</call>"


def kept(model: nb.Model) -> list[Trajectory]:
    return list(model.run.trajectories(split="chat"))


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited in vain")


# ---- answers ------------------------------------------------------------------------------------


async def test_an_answer_carries_text_exact_tokens_and_policy(tmp_path: Path):
    with fake(tmp_path, ["hello", "again"]) as model:
        talk = nb.chat(model, system="Be brief.", temperature=0.5, max_tokens=30)
        first, second = await talk.say("hi"), await talk.say("more")
        assert (str(first), second.text, len(first.turns)) == ("hello", "again", 1)
        one, two = talk.trajectory.turns
        assert two.prompt_ids[: len(one.ids)] == one.ids and one.policy_version == 0
        assert one.sampling["temperature"] == 0.5 and one.sampling["max_tokens"] == 30
        assert [m["role"] for m in talk.trajectory.messages()] == ["system", *["user", "assistant"] * 2]
        assert "hello" in repr(first) and nb.last() is second


async def test_chats_of_the_same_words_keep_tokens_of_their_own(tmp_path: Path):
    with fake(tmp_path, ["é", "€", "more"]) as model:  # cut after a byte, both read as the same character
        one, other = (nb.chat(model, max_tokens=1) for _ in range(2))
        assert (await one.say("hi")).text == (await other.say("hi")).text == "\ufffd"
        assert one.trajectory.turns[0].completion_ids != other.trajectory.turns[0].completion_ids
        one.choose(max_tokens=30)
        await one.say("and?")
        first, second = one.trajectory.turns
        assert second.prompt_ids[: len(first.ids)] == first.ids


async def test_a_conversation_is_kept_after_each_answer_and_counted_once(tmp_path: Path):
    with fake(tmp_path, ["a", "b", "c"]) as model:
        talk = nb.chat(model)
        await talk.say("1")
        assert [t.messages() for t in kept(model)] == [talk.trajectory.messages()]
        await talk.say("2")
        assert [t.to_json() for t in kept(model)] == [talk.trajectory.to_json()]
        talk.reset()
        assert not talk.trajectory.turns
        await talk.say("3")
        assert [len(t.turns) for t in kept(model)] == [2, 1]
        assert [s.attempt for s in model.run.stored(split="chat")] == [0, 1]
    with fake(tmp_path) as model:  # also in a later process
        assert [len(t.turns) for t in kept(model)] == [2, 1]


async def test_a_chat_is_neither_training_nor_evaluation(tmp_path: Path):
    with fake(tmp_path, shopkeeper) as model:
        talk = nb.chat(model, TAGS)
        await talk.say()
        assert talk.trajectory.reward == 1.0
        view = View(model.run)
        while view.look():
            pass
        assert view.tables["rollouts"] == {} and view.tables["checks"] == {}
        assert not list(model.run.trajectories(split="train"))


async def test_it_talks_to_the_base_and_to_checkpoints(tmp_path: Path):
    with fake(tmp_path, lambda prompt, version: f"I am {version}") as model:
        for version in range(2):
            await nb.train_step(model, [group(0.0, 1.0, version=version)])
        talk = nb.chat(model, policy="base")
        said = [await talk.say("who?")]
        for policy in ("step_000001", "current"):
            talk.choose(policy=policy)
            said.append(await talk.say("and you?"))
        assert [reply.text for reply in said] == ["I am -1", "I am 1", "I am 2"]
        assert [turn.policy_version for turn in kept(model)[0].turns] == [-1, 1, 2]
        with pytest.raises(nb.ConfigurationError, match="step_000002"):
            talk.choose(policy="step_000009")
        assert talk.policy == "current"


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_moves": 0},
        {"temperature": "x"},
        {"policy": None},
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, wrong: dict[str, Any]):
    with fake(tmp_path) as model, pytest.raises(nb.ConfigurationError, match=next(iter(wrong))):
        nb.chat(model, **wrong)


def test_what_cannot_be_talked_to_is_refused(tmp_path: Path):
    with pytest.raises(nb.ConfigurationError, match="needs a Model"):
        nb.chat("demo")
    with fake(tmp_path) as model:
        silent = nb.Environment("mute", {}, rollout=play, make_scenarios=lambda *_, **__: [])
        with pytest.raises(nb.ConfigurationError, match=r"mute has no dialogue\(scenario\)"):
            nb.chat(model, silent)
        with pytest.raises(nb.ConfigurationError, match="leave out system"):
            nb.chat(model, TAGS, system="x")


# ---- the environment's part ---------------------------------------------------------------------


def plain(trajectory: Trajectory) -> str:
    """The messages, with the ids of calls left out: they are drawn anew."""
    return re.sub(r"call_\w+", "call", json.dumps(trajectory.messages()))


def caller(prompt: str, version: int) -> str:
    """The shopkeeper's way with real tool calls."""
    asked = prompt.rpartition("How much is the ")[2]
    if told := re.search(r"<tool_response>\n.*: (\d+)\n", asked):
        return f"<answer>{told[1]}</answer>"
    call = {"name": "price", "arguments": {"item": asked.partition("?")[0]}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(("environment", "agent"), [(TAGS, shopkeeper), (TOOLS, caller)])
async def test_the_environment_answers_calls_and_rewards_as_in_its_rollout(
    tmp_path: Path, environment: nb.Environment, agent: Any
):
    with fake(tmp_path, agent) as model:
        talk = nb.chat(model, environment)
        reply = await talk.say()  # its own question
        scenario = talk.scenarios[0]
        rolled = (await environment.rollout(model, scenario)).finish()
        assert reply.text == f"<answer>{scenario.task['price']}" and len(reply.turns) == 2
        assert rolled.reward == 1.0 and plain(talk.trajectory) == plain(rolled)
        assert (talk.trajectory.reward, talk.trajectory.metrics) == (rolled.reward, rolled.metrics)
        assert talk.trajectory.scenario_id == scenario.id


async def test_a_person_asks_instead_of_the_environment(tmp_path: Path):
    with fake(tmp_path, shopkeeper) as model:
        talk = nb.chat(model, TAGS, max_moves=2)
        opening = len(talk.conversation.messages)
        reply = await talk.say("How much is the moon?")
        said = [(m["role"], m["content"]) for m in talk.trajectory.messages()][opening - 1 :]
        assert said[:3] == [
            ("user", "How much is the moon?"),  # in place of the environment's question
            ("assistant", "<call>moon"),
            ("user", "moon: not sold here"),
        ]
        assert len(reply.turns) == 2 and talk.conversation.awaits_move  # it would have asked for ever
        assert len((await talk.say()).turns) == 2


async def test_tool_calls_are_run_and_their_results_fed_back(tmp_path: Path):
    calls = []

    def agent(prompt: str, version: int) -> str:
        if calls:
            return "It is <answer>7"
        calls.append(prompt)
        wanted = [("price", {"item": "moon"}), ("price", {"thing": 1}), ("cost", {})]
        return "".join(
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
            for name, arguments in wanted
        )

    with fake(tmp_path, agent) as model:
        talk = nb.chat(model, TOOLS)
        reply = await talk.say("What does the moon cost?")
        asked, *told, said = reply.items
        names = [call["id"] for call in asked.message["tool_calls"]]
        assert [m["tool_call_id"] for m in told] == names and len(names) == 3
        assert [m["content"] for m in told] == ["moon: not sold here", *["this call cannot be read"] * 2]
        assert asked.finish_reason == "tool_calls" and "7" in said.message["content"]
        assert talk.trajectory.tools == TOOLS.dialogue(talk.scenarios[0]).tools
        page = reply._repr_html_()
        assert "price({" in page and "not sold here" in page


async def test_a_game_is_played_move_by_move_as_in_its_rollout(tmp_path: Path):
    game = nb.load_environment("game_2048", max_turns=4, max_tokens=30)
    with fake(tmp_path, ["<move>left</move>", "<move>up</move>"]) as model:
        talk = nb.chat(model, game)
        await talk.say()
        rolled = (await game.rollout(model, talk.scenarios[0])).finish()
        made = talk.trajectory
        assert made.messages() == rolled.messages() and made.metrics == rolled.metrics
        assert [h.messages() for h in made.additional_histories] == [
            h.messages() for h in rolled.additional_histories
        ]
        assert len(made.turns) == 4 and made.metadata["ended_by"] == "turns"
        drawn = talk.conversation.entries()
        assert sum(entry["is_opening"] for entry in drawn) == len(game.dialogue(talk.scenarios[0]).messages)
        assert [e["role"] for e in drawn if not e["is_opening"]] == ["assistant", *["user", "assistant"] * 3]


async def test_an_environment_that_fails_leaves_the_moves_and_the_chat(tmp_path: Path):
    def broken(scenario: nb.Scenario) -> nb.Dialogue:
        def respond(turn: nb.Turn) -> Any:
            raise KeyError("no such shop")

        return nb.Dialogue([{"role": "user", "content": "?"}], respond)

    with fake(tmp_path, ["one", "two"]) as model:
        environment = nb.Environment("shop", {}, play, lambda *_, **__: [nb.Scenario("a")], dialogue=broken)
        talk = nb.chat(model, environment)
        with pytest.raises(KeyError):
            await talk.say()
        assert [turn.message["content"] for turn in kept(model)[0].turns] == ["one"]
        assert not talk.is_busy and talk.status == "ready"


# ---- ending early, and together with other work -------------------------------------------------


async def test_stop_takes_an_unanswered_message_back(tmp_path: Path):
    with fake(tmp_path, ["a" * 100, "b"], delay=20.0) as model:
        talk = nb.chat(model)
        saying = asyncio.create_task(talk.say("hi"))
        await until(lambda: len(talk.pending) >= 2)
        assert set(talk.pending) == {"a"} and talk.status == "answering"
        with pytest.raises(nb.ConfigurationError, match="answering already"):
            await talk.say("and?")
        talk.stop()
        with pytest.raises(nb.Stopped) as caught:
            await saying
        assert not isinstance(caught.value, nb.Interrupted) and caught.value.partial.items == ()
        assert talk.conversation.messages == [] and not kept(model) and talk.taken_back == "hi"
        assert (model.backend.cancelled, model.backend.active, talk.pending) == (1, 0, "")
        model.backend.delay = 0.0
        assert (await talk.say("hi again")).text == "b"


async def test_an_interrupt_keeps_finished_moves_and_the_next_cell_goes_on(tmp_path: Path):
    def slow_second(prompt: str, version: int) -> str:
        number = len(model.backend.requests)
        model.backend.delay = 20.0 if number == 2 else 0.0
        return {1: "<call>moon</call>", 2: "x" * 50, 3: "<answer>7</answer>"}[number]

    with fake(tmp_path, slow_second) as model:
        talk = nb.chat(model, TAGS)
        saying = asyncio.create_task(talk.say())
        await until(lambda: talk.pending.startswith("x"))
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(nb.Interrupted, match="partial") as caught:
            await saying
        assert [turn.message["content"] for turn in caught.value.partial.turns] == ["<call>moon"]
        assert [len(t.turns) for t in kept(model)] == [1] and talk.conversation.awaits_move
        assert (await talk.say()).text == "<answer>7"
        assert [len(t.turns) for t in kept(model)] == [2]


async def test_a_cancelled_cell_is_cancelled(tmp_path: Path):
    with fake(tmp_path, delay=20.0) as model:
        talk = nb.chat(model)
        saying = asyncio.create_task(talk.say("hi"))
        await until(lambda: model.backend.active)
        saying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saying
        assert not talk.is_busy and model.backend.active == 0


async def test_it_waits_for_the_end_of_a_training_step_and_says_so(tmp_path: Path):
    released = asyncio.Event()

    class Slow(nb.FakeBackend):
        async def optim_step(self, config: nb.TrainConfig) -> dict[str, float]:
            await released.wait()
            return await super().optim_step(config)

    with open_fake(tmp_path, backend=Slow()) as model:
        training = asyncio.create_task(nb.train_step(model, [group(0.0, 1.0)]))
        await asyncio.sleep(0.05)
        talk = nb.chat(model)
        saying = asyncio.create_task(talk.say("hi"))
        await until(lambda: "training step" in talk.status)
        await asyncio.sleep(0.2)
        assert not model.backend.requests
        released.set()
        assert (await saying).turns[0].policy_version == 1
        await training


async def test_several_chats_and_a_training_loop_do_not_disturb_each_other(tmp_path: Path):
    with fake(tmp_path, lambda prompt, version: f"{prompt.count('user')} {version}", delay=0.005) as model:
        talks = [nb.chat(model, policy=policy) for policy in ("current", "current", "base")]

        async def chatter(talk: Talk, number: int) -> list[str]:
            return [(await talk.say(f"{number}/{turn}")).text for turn in range(6)]

        async def loop() -> None:
            for _ in model.run.steps(5):
                groups = await play(model)
                assert all(t.messages()[0]["content"].startswith("say") for t in groups.trajectories)
                await nb.train_step(model, groups)

        *said, _ = await asyncio.gather(*(chatter(t, n) for n, t in enumerate(talks)), loop())
        assert model.run.step == 5 and len(list(model.run.trajectories(split="train"))) == 5 * 12
        assert [one.split()[0] for one in said[0]] == [str(n) for n in range(1, 7)]
        assert {one.split()[1] for one in said[2]} == {"-1"}
        for number, one in enumerate(sorted(kept(model), key=lambda t: t.messages()[0]["content"])):
            asked = [m["content"] for m in one.messages() if m["role"] == "user"]
            assert asked == [f"{number}/{turn}" for turn in range(6)]


# ---- the real engine ----------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
async def test_a_real_model_streams_stops_and_goes_on(tiny_model: Path, tmp_path: Path):
    with open_model(tiny_model, tmp_path) as model:
        state = model.backend.engine.random.getstate()
        said = [await nb.chat(model, seed=5, max_tokens=12).say("hi") for _ in range(2)]
        assert said[0].turns[0].completion_ids == said[1].turns[0].completion_ids
        assert model.backend.engine.random.getstate() == state  # training samples as it would have
        talk = nb.chat(model, max_tokens=1500, seed=1)
        saying = asyncio.create_task(talk.say("tell me more"))
        await until(lambda: len(talk._heard) >= 3)
        talk.stop()
        with pytest.raises(nb.Stopped):
            await saying
        await nb.train_step(model, await play(model), learning_rate=1e-2)
        talk.choose(max_tokens=8)
        texts = [await talk.say("once"), await talk.say("twice")]
        one, two = (reply.turns[0] for reply in texts)
        assert two.prompt_ids[: len(one.ids)] == one.ids and one.policy_version == 1
        talk.choose(policy="base")
        assert (await talk.say("and you?")).turns[0].policy_version == -1
        assert [len(t.turns) for t in kept(model)] == [1, 1, 3]


# ---- the view -----------------------------------------------------------------------------------


class Wire:
    """The end of the wire that is in the kernel."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.closed = False

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(json.loads(json.dumps(message)))

    def close(self) -> None:
        self.closed = True

    @property
    def head(self) -> dict[str, Any]:
        return [m["head"] for m in self.sent if "head" in m][-1]

    @property
    def texts(self) -> list[str]:
        entries: dict[str, Any] = {}
        for message in self.sent:
            entries = ({} if message["reset"] else entries) | message["tables"].get("entries", {})
        return [entry["text"] for entry in entries.values()]


async def shown(talk: Talk, monkeypatch: Any) -> Wire:
    wire = Wire()
    monkeypatch.setattr(screens, "SEND_SECONDS", 0.01)
    talk.screen.widget, talk.screen._loop = wire, asyncio.get_running_loop()
    talk.screen._hear(None, {"type": "ready", "view": "v"})
    await until(lambda: wire.sent)
    return wire


async def test_a_page_speaks_hears_stops_and_begins_anew(tmp_path: Path, monkeypatch: Any):
    with fake(tmp_path, [f"hello {HOSTILE}", "z" * 100], delay=0.0) as model:
        talk = nb.chat(model)
        wire = await shown(talk, monkeypatch)
        assert wire.sent[0]["reset"] and wire.head["status"] == "ready" and wire.texts == []
        hear = talk.screen._hear
        hear(None, {"type": "say", "text": "hi"})
        await until(lambda: wire.texts == ["hi", f"hello {HOSTILE}"] and wire.head["status"] == "ready")
        model.backend.delay = 20.0
        hear(None, {"type": "say", "text": "and?"})
        await until(lambda: wire.head["pending"].startswith("z"))
        hear(None, {"type": "say", "text": "twice"})
        await until(lambda: "answering already" in wire.head["answer"])
        hear(None, {"type": "stop"})
        await until(lambda: wire.head["answer"].startswith("Stopped"))
        assert wire.head["taken_back"] == "and?" and len(wire.texts) == 2
        hear(None, {"type": "reset"})
        await until(lambda: wire.texts == [])
        assert [len(t.turns) for t in kept(model)] == [1]
        talk.screen._plan()
        talk.screen.close()
        assert wire.closed and talk.screen._timer is None
        again = await shown(talk, monkeypatch)  # a chat that was closed draws when it is shown again
        hear(None, {"type": "say", "text": "are you there?"})
        await until(lambda: again.texts[:1] == ["are you there?"])
        talk.close()


async def test_a_page_chooses_and_is_told_what_cannot_be(tmp_path: Path, monkeypatch: Any):
    with fake(tmp_path, shopkeeper) as model:
        talk = nb.chat(model, TAGS)
        wire = await shown(talk, monkeypatch)
        assert wire.head["can_go_on"] and len(wire.head["scenarios"]) == 8
        hear = talk.screen._hear
        hear(None, {"type": "choose", "policy": "base"})
        hear(None, {"type": "choose", "temperature": 0.25})
        hear(None, {"type": "reset", "scenario": 3})
        await until(lambda: wire.head["scenario"] == 3)
        hear(None, {"type": "say", "text": None})
        await until(lambda: "reward 1" in wire.head["facts"])
        assert talk.trajectory.scenario_id == talk.scenarios[3].id
        assert talk.trajectory.turns[0].policy_version == -1
        assert talk.trajectory.turns[0].sampling["temperature"] == 0.25
        for content, words in [
            ({"type": "choose", "policy": "step_9"}, "no policy 'step_9'"),
            ({"type": "choose", "max_tokens": 0}, "max_tokens must be"),
            ({"type": "choose", "max_tokens": [1]}, "cannot be"),
            ({"type": "reset", "scenario": 99}, "scenario must be"),
            ({"type": "say", "text": "x" * 100_001}, "100,000 characters"),
            ({"type": "say", "text": "x" * 30_000}, "PromptTooLong|context holds"),
        ]:
            hear(None, content)
            await until(lambda words=words: re.search(words, wire.head["answer"]))
        hear(None, "nonsense")
        hear(None, {"type": "rm"})
        await until(lambda: wire.head["answer"] == "")


async def test_the_static_copy_escapes_and_stays(tmp_path: Path, monkeypatch: Any):
    with fake(tmp_path, [HOSTILE]) as model:
        talk = nb.chat(model, system=HOSTILE)
        reply = await talk.say(HOSTILE)
        for page in (reply._repr_html_(), talk._repr_html_()):
            assert "<img" not in page and "<script" not in page and "\u202e" not in page
            assert "&lt;img" in page
        wire = await shown(talk, monkeypatch)
        assert talk._repr_html_().startswith("<details")  # beside the live view
        talk.screen._views.clear()
        talk.screen._fall_back()
        assert "did not show the chat" in talk._repr_html_() and "await talk.say" in talk._repr_html_()
        assert wire.sent


def test_in_a_terminal_it_prints_one_line(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.setenv("ARTNB_UI", "text")
    with fake(tmp_path) as model:
        nb.chat(model)._ipython_display_()
        assert "await talk.say(text)" in capsys.readouterr().out


async def test_another_process_reads_it_while_it_goes_on(tmp_path: Path):
    with fake(tmp_path, ["a", "b"]) as model:
        talk = nb.chat(model)
        for text in ("1", "2"):
            await talk.say(text)
        (read,) = Run.read("demo", tmp_path).trajectories(split="chat")
        assert read.to_json() == talk.trajectory.to_json()
