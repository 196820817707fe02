"""Do trackers hear of a whole run, fail at the start or never, and leave the run alone?"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kernel_tools import environment
from steps import SCENARIOS, attempt, open_fake, play, rollout
from weave_server import KEY, CompleteCall, WeaveServer, weave_server

import artnb as nb
from artnb.store.trajectories import Stored
from artnb.trackers import Unreachable, following
from artnb.trackers.weave_calls import Place, call_id, rollout_calls

PLACE = Place("team/project", "demo")
COMPLETE = "/traces/v2/team/project/calls/complete"


class Listening(nb.Tracker):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.started: list[dict[str, Any]] = []
        self.finished = 0

    def start(self, run):
        self.started.append(dict(run))

    def rollout(self, stored):
        self.heard.append(("rollout", stored))

    def step(self, metrics):
        self.heard.append(("step", metrics))

    def evaluation(self, record):
        self.heard.append(("evaluation", record))

    def event(self, event):
        self.heard.append(("event", event))

    def finish(self):
        self.finished += 1

    def of(self, kind: str) -> list[Any]:
        return [record for name, record in self.heard if name == kind]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_FIRST_DELAY", 0.02)
    monkeypatch.setattr(following, "_LINGER_SECONDS", 0.01)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)


@pytest.fixture
def server() -> Iterator[WeaveServer]:
    with weave_server() as server:
        yield server


def weave(server: WeaveServer, project: str = "team/project", **options: Any) -> nb.WeaveTracker:
    return nb.WeaveTracker(project, base_url=server.url, **{"api_key": KEY} | options)


def eventually(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)


async def whole_loop(model: nb.Model) -> None:
    """One step of training, and an evaluation."""
    await nb.train_step(model, await play(model))
    await nb.evaluate(rollout, SCENARIOS[:2], model=model, name="held out", progress=False)


def warnings_in(run: Any) -> list[str]:
    return [event["message"] for event in run.events() if event["kind"] == "warning"]


# What they hear


async def test_the_tracker_that_does_nothing_changes_nothing(tmp_path):
    with open_fake(tmp_path, trackers=[nb.Tracker()]) as model:
        await whole_loop(model)
        assert model.run.step == 1 and not warnings_in(model.run)


async def test_a_tracker_hears_what_the_run_folder_keeps_in_its_order(tmp_path):
    tracker = Listening()
    with open_fake(tmp_path, trackers=[tracker]) as model:
        await whole_loop(model)
        model.run.note("well done")
    assert tracker.started == [{"name": "demo", "path": str(tmp_path / "demo")}] and tracker.finished == 1
    run = nb.Run.read("demo", tmp_path)
    assert [s.trajectory.id for s in tracker.of("rollout")] == [t.id for t in run.trajectories()]
    assert [s.split for s in tracker.of("rollout")].count("test") == 2
    assert [m["reward_mean"] for m in tracker.of("step")] == [m["reward_mean"] for m in run.metrics()]
    (evaluation,) = tracker.of("evaluation")
    assert (evaluation["name"], evaluation["n"], evaluation["split"]) == ("held out", 2, "test")
    events = tracker.of("event")
    assert events[0]["kind"] == "following" and events[0]["name"] == "demo"
    recorded = [e for e in run.events() if e["kind"] not in ("opened", "evaluation")]
    assert [e["kind"] for e in events[1:]] == [e["kind"] for e in recorded]
    assert tracker.heard.index(("step", tracker.of("step")[0])) > 12


async def test_a_tracker_hears_the_reward_that_was_written_not_what_the_notebook_makes_of_it(tmp_path):
    tracker = Listening()
    gate = threading.Event()
    tracker.event = lambda event: gate.wait(10)  # type: ignore[method-assign]
    with open_fake(tmp_path, trackers=[tracker]) as model:
        groups = await play(model)
        written = {t.id: t.reward for t in groups.trajectories}
        for trajectory in groups.trajectories:
            trajectory.reward = 77.0
        gate.set()
    assert {s.trajectory.id: s.trajectory.reward for s in tracker.of("rollout")} == written


# Failing at the start


def test_a_tracker_that_cannot_start_stops_the_cell_before_anything_is_loaded(tmp_path):
    class Wrong(nb.Tracker):
        def start(self, run):
            raise nb.ConfigurationError("no such project")

    with pytest.raises(nb.ConfigurationError, match="no such project"):
        nb.Model("/no/such/model", "demo", root=tmp_path, trackers=[Wrong()])
    assert not list(tmp_path.iterdir())


def test_trackers_that_started_are_finished_when_the_model_cannot_be_made(tmp_path, monkeypatch):
    class Wrong(Listening):
        def start(self, run):
            raise nb.ConfigurationError("no such project")

    first, second = Listening(), Wrong()
    with pytest.raises(nb.ConfigurationError, match="no such project"):
        open_fake(tmp_path, trackers=[first, second])
    assert (first.finished, second.finished) == (1, 0)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch", None)
        with pytest.raises(nb.MissingDependency, match="torch"):
            nb.Model("/no/such/model", "demo", root=tmp_path, trackers=[first])
    assert (first.finished, first.heard) == (2, [])
    with open_fake(tmp_path, trackers=[first]):
        eventually(lambda: first.heard)


@pytest.mark.parametrize(
    ("trackers", "words"),
    [
        (nb.Tracker(), "must be a list"),
        (["weave"], "must be an artnb.Tracker, got str"),
        (None, "must be a list"),
    ],
)
def test_what_is_no_list_of_trackers_is_refused(tmp_path, trackers, words):
    with pytest.raises(nb.ConfigurationError, match=words):
        open_fake(tmp_path, trackers=trackers)


def test_one_tracker_follows_one_run(tmp_path):
    tracker = nb.Tracker()
    with pytest.raises(nb.ConfigurationError, match="given twice"):
        open_fake(tmp_path, trackers=[tracker, tracker])
    with open_fake(tmp_path, trackers=[tracker]) as model:
        with pytest.raises(nb.ConfigurationError, match=r"already follows the run at .*demo"):
            open_fake(tmp_path, run="other", trackers=[tracker])
        with pytest.raises(nb.ConfigurationError, match=r"follows the run at .*demo now"):
            nb.upload(model.run, tracker)
    open_fake(tmp_path, run="other", trackers=[tracker]).close()


# Failing later


async def test_a_tracker_that_fails_later_is_told_of_once_and_the_others_go_on(tmp_path):
    class Failing(Listening):
        def step(self, metrics):
            raise ValueError("what step?")

    bad, good = Failing(), Listening()
    with pytest.warns(UserWarning, match=r"Failing\(\) is switched off .*ValueError: what step\?") as told:
        with open_fake(tmp_path, trackers=[bad, good]) as model:
            await nb.train_step(model, await play(model))
            eventually(lambda: warnings_in(model.run))
            await nb.train_step(model, await play(model))
            assert "off" in repr(model)
    assert len(told) == 1 and len(warnings_in(nb.Run.read("demo", tmp_path))) == 1
    assert len(good.of("step")) == 2 and len(good.of("rollout")) == 24
    assert bad.finished == 1 and bad.follows is None


async def test_an_unreachable_service_is_asked_again_and_hears_everything_once(tmp_path):
    class Flaky(Listening):
        outages = 4

        def rollout(self, stored):
            if self.outages:
                self.outages -= 1
                raise Unreachable("no answer from there")
            super().rollout(stored)

    tracker = Flaky()
    with pytest.warns(
        UserWarning, match=r"cannot be reached: no answer from there\. The run goes on"
    ) as told:
        with open_fake(tmp_path, trackers=[tracker]) as model:
            await whole_loop(model)
            eventually(lambda: len(tracker.of("evaluation")) == 1)
    assert len(told) == 1
    run = nb.Run.read("demo", tmp_path)
    assert [s.trajectory.id for s in tracker.of("rollout")] == [t.id for t in run.trajectories()]


async def test_a_slow_tracker_holds_nothing_up_and_what_it_misses_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "_MOST_RECORDS", 5)
    gate = threading.Event()
    tracker = Listening()
    tracker.event = lambda event: gate.wait(20)  # type: ignore[method-assign]
    started = time.monotonic()
    with pytest.warns(UserWarning, match="7 records") as told:
        with open_fake(tmp_path, trackers=[tracker]) as model:
            eventually(lambda: model.trackers._lanes[0]._in_hand == 1 or model.trackers._lanes[0].unsent > 1)
            eventually(lambda: not model.trackers._lanes[0]._waiting)
            await nb.train_step(model, await play(model))
            assert time.monotonic() - started < 10 and "7 left out" in repr(model)
            gate.set()
            eventually(lambda: tracker.of("step"))
    assert len(tracker.of("rollout")) == 5  # and the step's record, which is never left out for a rollout
    for words in (
        "slower than the run: 7 records were left out so far",
        "7 records of this run were not sent",
    ):
        assert any(words in str(warning.message) for warning in told)


def test_tokens_that_wait_are_bounded_too(monkeypatch):
    monkeypatch.setattr(following, "_MOST_TOKENS", 100)
    gate = threading.Event()
    tracker = Listening()
    tracker.event = lambda event: gate.wait(10)  # type: ignore[method-assign]
    lane = following.Lane(tracker, lambda message: None)
    lane.put("event", {})
    eventually(lambda: not lane._waiting)
    for _ in range(3):
        lane.put("rollout", None, 40)
    assert (lane.unsent, lane.dropped) == (3, 1)
    gate.set()
    eventually(lambda: lane.unsent == 0)
    lane.put("rollout", None, 40)
    lane.close(time.monotonic() + 5)
    assert (lane.sent, lane.dropped) == (4, 1)


def test_closing_waits_no_longer_than_its_limit(tmp_path):
    gate = threading.Event()
    tracker = Listening()
    tracker.event = lambda event: gate.wait(20)  # type: ignore[method-assign]
    model = open_fake(tmp_path, trackers=[tracker])
    started = time.monotonic()
    with pytest.warns(UserWarning, match="records of this run were not sent"):
        model.trackers.finish(0.2)
    assert time.monotonic() - started < 3
    gate.set()
    eventually(lambda: tracker.finished)
    model.close()
    assert tracker.finished == 1


# Cells that are run again


async def test_running_the_cell_again_keeps_the_model_and_equal_trackers(tmp_path, server):
    backend = nb.FakeBackend()

    def cell(*trackers: nb.Tracker) -> nb.Model:
        return open_fake(tmp_path, backend=backend, trackers=trackers)

    with cell(weave(server)) as model:
        asked = len(server.requests)
        assert cell(weave(server)) is model
        eventually(lambda: server.calls)
        assert [path for path, _ in server.requests[asked:] if "graphql" in path] == []
        other = Listening()
        assert cell(other) is model and not backend.closed
        eventually(lambda: other.heard)
        calls = len(server.calls)
        await nb.train_step(model, await play(model))
        eventually(lambda: other.of("step"))
        assert len(server.calls) == calls
        with pytest.raises(nb.ConfigurationError, match="refuses the key"):
            cell(other, weave(server, api_key="wrong"))
        assert not backend.closed and other.finished == 0
        assert cell() is model and other.finished == 1


# Weave: what is sent


def tool_trajectory() -> nb.Trajectory:
    def turn(started: float, message: dict[str, Any], prompt: int, sampled: int) -> nb.Turn:
        return nb.Turn(
            (1,) * prompt,
            (2,) * sampled,
            (-0.5,) * sampled,
            3,
            "stop",
            {"role": "assistant"} | message,
            timing={"started": started, "seconds": 1.0},
        )

    calls = [
        {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"query": "inbox"}'}},
        {"id": "c2", "type": "function", "function": {"name": "read", "arguments": "{not JSON"}},
    ]
    question = {"role": "user", "content": "Where?"}
    found = {"role": "tool", "tool_call_id": "c1", "content": "2 letters"}
    return nb.Trajectory(
        [
            question,
            turn(100.0, {"content": None, "tool_calls": calls}, 10, 5),
            found,
            turn(104.0, {"content": "There."}, 18, 2),
        ],
        reward=0.75,
        metrics={"found": 1.0},
        tools=[{"type": "function", "function": {"name": "search"}}],
        scenario_id="mail/7",
        id="t1",
        started=99.0,
        seconds=8.0,
    )


def test_a_rollout_is_a_trace_with_turns_tools_and_reward():
    calls = rollout_calls(Stored(12, "train", "g1", 2, tool_trajectory()), PLACE)
    assert [call["op_name"] for call in calls] == [
        *("artnb.rollout", "artnb.turn", "artnb.tool", "artnb.tool", "artnb.turn")
    ]
    root, first, search, read, second = calls
    assert root["trace_id"] == root["id"] == call_id("rollout", "t1") and "parent_id" not in root
    assert {c["parent_id"] for c in calls[1:]} == {c["trace_id"] for c in calls} == {root["id"]}
    assert len({call["id"] for call in calls}) == 5
    assert root["output"]["reward"] == 0.75 and root["output"]["metrics"] == {"found": 1.0}
    assert root["output"]["choices"][0]["message"]["content"] == "There."
    assert [m["role"] for m in root["inputs"]["messages"]] == ["user", "assistant", "tool"]
    about = root["attributes"]["artnb"]
    assert (about["step"], about["attempt"], about["split"]) == (12, 2, "train")
    assert (about["scenario"], about["policy_version"], about["run"]) == ("mail/7", 3, "demo")
    assert first["inputs"]["messages"] == [{"role": "user", "content": "Where?"}]
    assert second["inputs"]["messages"] == [{"role": "tool", "tool_call_id": "c1", "content": "2 letters"}]
    assert search["inputs"] == {"name": "search", "arguments": {"query": "inbox"}}
    assert search["output"] == {"content": "2 letters"}
    assert read["inputs"]["arguments"] == "{not JSON" and read["output"]["answered"] is False
    assert first["started_at"].startswith("1970-01-01T00:01:40") and first["ended_at"].endswith("01:41+00:00")
    assert (search["started_at"], search["ended_at"]) == (first["ended_at"], second["started_at"])
    assert root["ended_at"] == "1970-01-01T00:01:47+00:00"
    usage = {"requests": 2, "prompt_tokens": 28, "completion_tokens": 7, "total_tokens": 35}
    assert root["summary"]["usage"] == {"demo": usage}


def test_turns_that_histories_share_are_shown_once():
    shared = tool_trajectory()
    old, new = attempt(None).turns[0], attempt(None, completion=3).turns[0]
    shared.messages_and_choices = [{"role": "user", "content": "summary"}, old, new]
    shared.additional_histories = [nb.History([{"role": "user", "content": "long"}, old])]
    calls = rollout_calls(Stored(0, "train", "g", 0, shared), PLACE)
    assert [call["op_name"] for call in calls] == ["artnb.rollout", "artnb.turn", "artnb.turn"]


def test_a_failed_rollout_says_why():
    failed = nb.Trajectory(error=nb.Failure("ValueError", "no board", "Traceback ..."))
    (call,) = rollout_calls(Stored(0, "train", "g", 0, failed), PLACE)
    assert json.loads(call["exception"]) == {
        "type": "ValueError",
        "message": "no board",
        "traceback": "Traceback ...",
    }
    assert call["output"]["reward"] is None and call["output"]["choices"] == []


async def test_a_whole_run_arrives(tmp_path, server):
    with open_fake(tmp_path, trackers=[weave(server)]) as model:
        await whole_loop(model)
        written = {t.id: t for t in model.run.trajectories()}
        scores = {t.id: {"reward": 0.5, "metrics": {}} for t in model.run.trajectories(split="train")}
        model.run.record_event("judged", step=1, scores=scores)
        run = model.run
    roots = {c["attributes"]["artnb"]["trajectory"]: c for c in server.by_op("artnb.rollout")}
    assert roots.keys() == written.keys() and len(roots) == 14
    for name, root in roots.items():
        assert root["output"]["reward"] == written[name].reward
        assert root["inputs"]["messages"] == [{"role": "user", "content": written[name].scenario_id}]
    turns = server.by_op("artnb.turn")
    assert sorted(c["parent_id"] for c in turns) == sorted(c["id"] for c in roots.values())
    (step,) = server.by_op("artnb.step")
    assert step["output"]["reward_mean"] == run.metrics()[0]["reward_mean"] and step["inputs"]["step"] == 0
    (evaluation,) = server.by_op("artnb.evaluation")
    assert evaluation["display_name"] == "held out" and evaluation["output"]["n"] == 2
    assert {c["parent_id"] for c in server.by_op("artnb.judge")} == {
        c["id"] for name, c in roots.items() if name in scores
    }
    events = [call["inputs"]["kind"] for call in server.by_op("artnb.event")]
    assert events[0] == "following" and "gather" in events
    assert len({call["id"] for call in server.calls}) == len(server.calls)


@pytest.mark.parametrize(
    "hostile",
    [
        float("nan"),
        float("-inf"),
        pytest.param(10**5000, id="large"),
        "lone \ud800 surrogate \x00 </script>",
        {"$float": "x", "a": {1, 2}},
        pytest.param(json.loads("[" * 300 + "]" * 300), id="deep"),
        object(),
    ],
)
def test_what_json_cannot_say_arrives_all_the_same(tmp_path, server, hostile):
    trajectory = attempt(0.0, metadata={"hostile": hostile}, metrics={"m": float("nan")})
    trajectory.started = float("inf")
    with open_fake(tmp_path, trackers=[weave(server)]) as model:
        model.run.append_trajectory(trajectory, step=0, split="train", gather_id="g", attempt=0)
    assert [c["output"]["metrics"] for c in server.by_op("artnb.rollout")] == [{"m": "nan"}]


# Weave: failing at the start


@pytest.mark.parametrize(
    ("project", "options", "words"),
    [
        ("team/project", {"api_key": "wrong-key-0123456789"}, r"refuses the key from api_key="),
        ("team/project", {"api_key": None}, r"has no key: set the environment variable WANDB_API_KEY"),
        ("team/project", {"api_key": "two\nlines"}, r"characters that no key has"),
        ("team/other", {}, r"no project 'other' of 'team' that this key may see.*create=True"),
        ("nobody/new", {"create": True}, r"no project 'new' of 'nobody'"),
    ],
)
def test_what_cannot_work_is_said_when_the_model_is_made(tmp_path, server, project, options, words):
    with pytest.raises(nb.ConfigurationError, match=words) as caught:
        nb.Model("/no/such/model", root=tmp_path, trackers=[weave(server, project, **options)])
    assert (options.get("api_key") or KEY) not in str(caught.value)
    assert not list(tmp_path.iterdir()) and not server.calls


@pytest.mark.parametrize("project", ["", "a/b/c", "/project", "team/", None])
def test_a_project_that_cannot_be_one_is_refused_at_once(project):
    with pytest.raises(nb.ConfigurationError, match="project must be"):
        nb.WeaveTracker(project)


@pytest.mark.parametrize("address", ["wandb.example.com", "ftp://x", "http://user:pass@host"])
def test_an_address_that_cannot_be_one_is_refused_at_once(address):
    with pytest.raises(nb.ConfigurationError, match="base_url must") as caught:
        nb.WeaveTracker("p", base_url=address)
    assert "pass@" not in str(caught.value)


def test_being_offline_at_the_start_is_said(tmp_path, server):
    server.go_offline()
    with pytest.raises(
        nb.ConfigurationError, match=r"cannot start: no answer from http://127\.0\.0\.1.*upload"
    ):
        open_fake(tmp_path, trackers=[weave(server)])


def test_a_missing_package_is_said(tmp_path, server, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(nb.MissingDependency, match=r'pip install "artnb\[weave\]"'):
        open_fake(tmp_path, trackers=[weave(server)])


def test_a_server_that_is_none_is_said(tmp_path, server):
    server.answer = lambda path, body: (200, "<html>hello</html>")  # type: ignore[method-assign]
    with pytest.raises(nb.ArtnbError, match=r"does not answer in JSON\. Is http.* a W&B server\?"):
        open_fake(tmp_path, trackers=[weave(server)])


def test_a_key_from_the_environment_a_default_entity_and_a_new_project_do(tmp_path, server, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", server.url + "/")
    with open_fake(tmp_path, trackers=[nb.WeaveTracker("new", create=True)]):
        assert "team/new" in server.projects
    assert {call["project_id"] for call in server.calls} == {"team/new"}


# Weave: failing later


async def test_a_key_that_is_withdrawn_switches_the_tracker_off_and_the_run_goes_on(tmp_path, server):
    with pytest.warns(UserWarning, match=r"switched off .*refuses the key") as told:
        with open_fake(tmp_path, trackers=[weave(server)]) as model:
            eventually(lambda: server.calls)
            server.keys.clear()
            await nb.train_step(model, await play(model))
            eventually(lambda: warnings_in(model.run))
            asked = len(server.requests)
            await nb.train_step(model, await play(model))
            assert model.run.step == 2 and len(server.requests) == asked
            server.keys.add(KEY)
            assert open_fake(tmp_path, backend=model.backend, trackers=[weave(server)]) is model
            model.run.note("back")
    assert len(told) == 1
    assert "note" in [call["inputs"]["kind"] for call in server.by_op("artnb.event")]


async def test_an_outage_is_waited_for_and_everything_arrives_once(tmp_path, server):
    with pytest.warns(UserWarning, match=r"cannot be reached: no answer from http://127\.0\.0\.1") as told:
        with open_fake(tmp_path, trackers=[weave(server)]) as model:
            eventually(lambda: server.calls)
            server.go_offline()
            await whole_loop(model)
            eventually(lambda: warnings_in(model.run))
            assert not server.by_op("artnb.step")
            server.go_online()
            eventually(lambda: server.by_op("artnb.evaluation"))
    assert len(told) == 1 and len(server.by_op("artnb.rollout")) == 14
    assert len({call["id"] for call in server.calls}) == len(server.calls)


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_an_answer_that_is_lost_makes_no_call_twice(tmp_path, server, status):
    lost = iter([status, status])
    server.fail_after = lambda path: next(lost, None) if path == COMPLETE else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with open_fake(tmp_path, trackers=[weave(server)]) as model:
            eventually(lambda: server.calls)
            await whole_loop(model)
    assert next(lost, None) is None
    assert len(server.by_op("artnb.rollout")) == 14
    assert len({call["id"] for call in server.calls}) == len(server.calls)


async def test_an_outage_that_lasts_is_said_at_the_end(tmp_path, server):
    with pytest.warns(UserWarning) as told:
        with open_fake(tmp_path, trackers=[weave(server)]) as model:
            eventually(lambda: server.calls)
            server.go_offline()
            await play(model)
            eventually(lambda: warnings_in(model.run))
            started = time.monotonic()
    assert time.monotonic() - started < 8
    assert any("records of this run were not sent" in str(warning.message) for warning in told)


def test_a_call_that_the_server_does_not_take_is_left_out_alone(tmp_path, server):
    server.rejects = lambda call: (
        call["inputs"].get("messages") == [{"role": "user", "content": "?"}]
        and (call["op_name"] == "artnb.rollout")
    )
    server.most_bytes = 20_000
    with pytest.warns(
        UserWarning, match=r"(does not take a call of \d+ bytes \(status 4\d\d: .*left out|did not take)"
    ) as told:
        with open_fake(tmp_path, trackers=[weave(server)]) as model:
            for number in range(40):
                large = nb.Trajectory([{"role": "user", "content": "x" * 100}] * 9, reward=float(number))
                one = attempt(1.0) if number in (17, 30) else large
                model.run.append_trajectory(one, step=0, split="train", gather_id="g", attempt=number)
    assert len(told) == 2 and "did not take 2 calls of this run" in str(told[1].message)
    rewards = [call["output"]["reward"] for call in server.by_op("artnb.rollout")]
    assert sorted(rewards) == [float(n) for n in range(40) if n not in (17, 30)]
    assert server.by_op("artnb.turn")  # the rest of the rejected trace


# Secrets


async def test_the_key_is_in_nothing_but_the_header(tmp_path, server, monkeypatch, caplog):
    monkeypatch.setenv("OTHER_SERVICE_TOKEN", "canary-of-another-service")
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []
    with pytest.warns(UserWarning) as told:
        with open_fake(tmp_path, trackers=[weave(server)]) as model:
            leak = attempt(1.0, metadata={"tool said": f"{KEY} and canary-of-another-service"})
            model.run.append_trajectory(leak, step=0, split="train", gather_id="g", attempt=0)
            eventually(lambda: server.by_op("artnb.rollout"))
            seen += [repr(model), model._repr_html_(), repr(model.trackers), repr(weave(server))]
            server.fail = lambda path: 400  # which repeats the key
            model.run.note("one more")
            eventually(lambda: warnings_in(model.run))
    seen += [str(warning.message) for warning in told] + [caplog.text]
    assert any("status 400" in text for text in seen)
    sent = json.dumps(server.calls)
    assert "[WANDB_API_KEY] and [OTHER_SERVICE_TOKEN]" in sent
    header = server.requests[-1][1].removeprefix("Basic ")
    events = (tmp_path / "demo" / "events.jsonl").read_text()
    for text in [*seen, sent, events, (tmp_path / "demo" / "run.json").read_text()]:
        assert KEY not in text and header not in text and "canary-of" not in text
    assert all(key == f"Basic {header}" for _, key in server.requests)


def test_an_answer_that_sends_elsewhere_is_not_followed(tmp_path, server):
    with weave_server() as elsewhere:
        handler = server._server.RequestHandlerClass  # type: ignore[union-attr]
        write = handler._write

        def redirect(self: Any, status: int, answer: Any) -> None:
            self.send_response(307)
            self.send_header("Location", elsewhere.url + self.path)
            self.end_headers()

        handler._write = redirect
        with pytest.raises(nb.ArtnbError, match="status 307"):
            open_fake(tmp_path, trackers=[weave(server)])
        handler._write = write
        assert not elsewhere.requests


# From a run folder


async def test_upload_sends_what_following_would_have_sent_and_nothing_twice(tmp_path, server):
    with open_fake(tmp_path, trackers=[weave(server)]) as model:
        await whole_loop(model)
    followed = {call["id"]: call for call in server.calls}
    run = nb.Run.read("demo", tmp_path)
    with weave_server() as empty:
        sent = nb.upload(run, weave(empty))
        assert (sent.rollouts, sent.steps, sent.evaluations) == (14, 1, 1)
        ours = {call["id"]: call for call in empty.calls}
        for op in ("artnb.rollout", "artnb.turn", "artnb.step", "artnb.evaluation"):
            assert {c["id"]: c for c in server.by_op(op)} == {c["id"]: c for c in empty.by_op(op)}
        lost = [name for name in ours if name in followed][3:9]
        empty.calls = [call for call in empty.calls if call["id"] not in lost]
        nb.upload(run, weave(empty))
        nb.upload(run, weave(empty))
        assert sorted(call["id"] for call in empty.calls) == sorted(ours)


def test_upload_says_when_the_service_stops_answering(tmp_path, server):
    with open_fake(tmp_path) as model:
        model.run.append_trajectory(attempt(1.0), step=0, split="train", gather_id="g", attempt=0)
    server.fail = lambda path: 503 if path == COMPLETE else None
    tracker = weave(server)
    with pytest.raises(Unreachable, match="answers with status 503"):
        nb.upload(model.run, tracker)
    server.fail = lambda path: None
    assert nb.upload(model.run, tracker).rollouts == 1


# Processes


def test_a_process_that_ends_without_closing_sends_what_waits(tmp_path, server):
    script = textwrap.dedent(
        """
        import sys
        import artnb as nb
        tracker = nb.WeaveTracker("team/project")
        model = nb.Model(run="demo", root=sys.argv[1], backend=nb.FakeBackend(), trackers=[tracker])
        async def rollout(model, scenario):
            return nb.Trajectory([{"role": "user", "content": scenario.id}], reward=1.0)
        scenarios = [nb.Scenario(id=str(i)) for i in range(5)]
        nb.run(nb.gather(rollout, scenarios, model=model, group_size=4, progress=False))
        loaded = {name.partition(".")[0] for name in sys.modules}
        assert not loaded & {"weave", "wandb", "torch", "sentry_sdk"}, loaded
        """
    )
    environment = os.environ | {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert len(server.by_op("artnb.rollout")) == 20


@pytest.mark.slow
async def test_the_weave_package_takes_what_we_send_and_reads_it_back(tmp_path, server, repository):
    bodies: list[bytes] = []
    complete = server._complete
    server._complete = lambda project, body: (bodies.append(body), complete(project, body))[1]  # type: ignore[method-assign]
    with open_fake(tmp_path, trackers=[weave(server)]) as model:
        await whole_loop(model)
        model.run.append_trajectory(tool_trajectory(), step=1, split="train", gather_id="g", attempt=0)
    ours = {call["id"]: call for call in server.calls}
    settings = {
        "WEAVE_PRINT_CALL_LINK": "false",
        "WANDB_ERROR_REPORTING": "false",
        "WEAVE_ENABLE_WAL": "false",
    }
    home = {"HOME": str(tmp_path), "WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
    done = subprocess.run(
        [environment("weave", ["weave==0.54.0"]), str(repository / "tests" / "weave_sdk_process.py")],
        env=os.environ | settings | home,
        input=json.dumps([json.loads(body) for body in bodies]),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout.split("READ ", 1)[1])
    assert answer["fields"] == {n: field.is_required() for n, field in CompleteCall.model_fields.items()}
    read = {call["id"]: call for call in answer["calls"]}
    theirs = [call for name, call in read.items() if name not in ours]
    assert len(theirs) == 1 and "add" in theirs[0]["op"] and theirs[0]["output"] == 3
    assert read.keys() - {theirs[0]["id"]} == ours.keys()
    for name, call in ours.items():
        assert (read[name]["op"], read[name]["parent"]) == (call["op_name"], call.get("parent_id"))
        assert read[name]["output"] == call["output"]
