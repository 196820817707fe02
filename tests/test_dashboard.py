"""What the dashboard shows of a run, what it warns of, and how it reaches a browser and comes back."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from dashboard_tools import Browser, train, whole
from steps import SCENARIOS, group, open_fake, play, rollout

import artnb as nb
from artnb.dashboard import alarms as rules
from artnb.dashboard.alarms import alarms
from artnb.dashboard.protocol import MOST_BYTES, Stream
from artnb.dashboard.rows import check_points, rollout_row, step_row
from artnb.dashboard.view import View
from artnb.store import Run
from artnb.store.journal import Tail


def brief(reward: float | None, scenario: str = "a", **more: Any) -> dict[str, Any]:
    told = {"id": f"{scenario}{reward}", "seat": "", "metrics": {}, "turns": 2, "tokens": 10, "failed": False}
    about = {"split": "train", "gather_id": "g", "version": 0, "scenario_id": scenario, "reward": reward}
    return {**told, **about, **more}


def rows(count: int = 6, **series: Any) -> list[dict[str, Any]]:
    """Steps whose metrics are constants or lists."""
    return [
        {"step": i, "values": {n: v[i] if isinstance(v, list) else v for n, v in series.items()}}
        for i in range(count)
    ]


def kinds(found: list[Any]) -> list[str]:
    return [alarm.kind for alarm in found]


# ---- alarms -------------------------------------------------------------------------------------


def test_a_reward_that_falls_back_is_a_collapse():
    risen = [0.1, 0.2, 0.1, 0.2, 0.1, 0.8, 0.9, 0.8, 0.9, 0.8]
    assert "collapse" not in kinds(alarms(rows(10, reward_mean=risen)))
    fallen = [*risen, 0.2, 0.1, 0.2, 0.1, 0.2]
    found = alarms(rows(15, reward_mean=fallen))
    assert kinds(found)[0] == "collapse" and found[0].level == "serious"
    assert "0.84" in found[0].text and "0.16" in found[0].text


def test_noise_is_no_collapse():
    assert not alarms(rows(20, reward_mean=[0.5 + 0.2 * (-1) ** i for i in range(20)]))


@pytest.mark.parametrize(
    ("name", "fine", "wrong", "kind"),
    [
        ("kl_k3", rules.MOST_KL, rules.MOST_KL + 0.01, "drift"),
        ("effective_sample_size", rules.LEAST_SAMPLE_SIZE, rules.LEAST_SAMPLE_SIZE - 0.01, "drift"),
        ("logprob_gap_mean", rules.GAP, rules.GAP + 0.01, "engine and trainer disagree"),
        ("staleness", float(rules.OLDEST), rules.OLDEST + 1.0, "staleness"),
        ("truncated", rules.MOST_TRUNCATED, rules.MOST_TRUNCATED + 0.01, "cut off"),
        ("groups_equal", rules.SILENT_SHARE - 0.01, rules.SILENT_SHARE, "no signal"),
    ],
)
def test_a_threshold_is_where_it_says(name: str, fine: float, wrong: float, kind: str):
    assert kinds(alarms(rows(**{name: fine}))) == []
    assert kinds(alarms(rows(**{name: wrong}))) == [kind]


def test_it_warns_of_entropy_gradients_failures_and_silence():
    assert kinds(alarms(rows(entropy=[2.0, 2.0, 2.0, 0.1, 0.1, 0.1]))) == ["entropy collapse"]
    assert kinds(alarms(rows(grad_norm=[1.0, 1.0, 1.0, 1.0, 1.0, 11.0]))) == ["gradient"]
    assert kinds(alarms(rows(failed=3.0, trajectories=10.0))) == ["failures"]
    assert kinds(alarms(rows(seconds=200.0), quiet_seconds=999.0)) == []
    assert kinds(alarms(rows(seconds=200.0), quiet_seconds=1001.0)) == ["quiet"]
    skipped = [{**row, "skipped": "all rewards are equal"} for row in rows()]
    assert kinds(alarms(skipped)) == ["no signal"]
    assert alarms([]) == []


def test_it_warns_of_a_judge_in_trouble():
    scored = {"trajectories": 10.0, "failed": 0.0, "unscored": 2.0}
    assert kinds(alarms(rows(**scored))) == []
    assert kinds(alarms(rows(**scored | {"unscored": 3.0}))) == ["judge trouble"]
    assert kinds(alarms(rows(judge_requests=10.0, judge_invalid=4.0))) == ["judge trouble"]
    assert set(rules.KINDS) >= {"judge trouble"}


# ---- the view -----------------------------------------------------------------------------------


def test_a_step_keeps_its_finite_numbers():
    record = {
        "kind": "train",
        "step": 3,
        "time": 7.0,
        "reward_mean": 0.5,
        "loss": math.nan,
        "dropped": {"x": 1},
    }
    row = step_row(
        {**record, "failed": 1, "trajectories": 4, "seconds": 5.0, "seconds_train": 3.0}, best=0.75
    )
    assert row["step"] == 3 and row["time"] == 7.0
    assert row["values"] == {
        **{"reward_mean": 0.5, "failed": 1.0, "trajectories": 4.0, "seconds": 5.0, "seconds_train": 3.0},
        **{"reward_best": 0.75, "failed_share": 0.25, "seconds_other": 2.0},
    }


def test_the_band_is_the_mean_spread_within_groups():
    row = rollout_row(0, [brief(0.0), brief(1.0), brief(1.0, "b"), brief(1.0, "b")])
    assert row["values"]["band_low"] == 0.75 - 0.25 and row["values"]["band_high"] == 0.75 + 0.25
    assert row["values"]["groups_equal"] == 0.5 and row["values"]["groups_solved"] == 0.5
    assert row["values"]["rollout_turns"] == 2 and row["values"]["rollout_tokens"] == 10


def test_a_group_teaches_is_solved_or_neither():
    row = rollout_row(
        0,
        [
            *(brief(0.0, "none"), brief(0.0, "none"), brief(1.0, "all"), brief(1.0, "all")),
            *(brief(0.0, "some"), brief(1.0, "some"), brief(None, "lost", failed=True)),
        ],
    )
    marks = {cell["name"]: cell["mark"] for cell in row["cells"]}
    assert marks == {"none": "equal", "all": "solved", "some": "teaches", "lost": "unscored"}


def test_parts_of_the_reward_do_not_mix_with_metrics_of_the_step():
    parts = {"reward/right": 1.0, "loss": 9.0}
    row = rollout_row(0, [brief(1.0, metrics=parts), brief(0.0, metrics={"reward/right": 0.0})])
    assert row["values"]["reward/right"] == 0.5 and row["values"]["metric/loss"] == 9.0
    assert "loss" not in row["values"]


def test_an_evaluation_is_a_point_with_the_interval_of_evaluate():
    briefs = [brief(r, s, split="test") for s, r in [("a", 0.2), ("b", 0.4), ("c", 0.6)]]
    (point,) = check_points(4, briefs)
    same = nb.evaluate.__globals__["estimate"]([[0.2], [0.4], [0.6]])
    assert point["step"] == 4 and point["n"] == 3 and not point["is_base"]
    assert check_points(4, [one | {"version": -1} for one in briefs])[0]["is_base"]
    assert (point["mean"], point["low"], point["high"]) == pytest.approx((same.mean, same.low, same.high))


async def test_it_is_rebuilt_from_the_folder_alone(tmp_path: Path):
    with open_fake(tmp_path) as model:
        await train(model, 3)
        await nb.evaluate(rollout, SCENARIOS, model=model, attempts=2, progress=False)
        live, read = whole(model.run), whole(Run.read("demo", tmp_path))
        assert live.head["status"] == "running"
        assert (live.tables, live.head) == (read.tables, read.head)
    ended = whole(Run.read("demo", tmp_path))
    assert ended.head["status"] == "ended" and ended.tables == live.tables
    assert [row["step"] for row in ended.rows] == [0, 1, 2]
    rewards = [record["reward_mean"] for record in Run.read("demo", tmp_path).metrics()]
    assert [row["values"]["reward_mean"] for row in ended.rows] == pytest.approx(rewards)
    assert ended.head["best"]["reward"] == pytest.approx(max(rewards))
    (check,) = ended.tables["checks"].values()
    assert check["step"] == 3 and check["low"] <= check["mean"] <= check["high"]


async def test_a_crashed_run_is_called_so(tmp_path: Path):
    with open_fake(tmp_path) as model:
        await train(model, 1)
        owner = json.loads((tmp_path / "demo" / "owner.json").read_text())
    (tmp_path / "demo" / "owner.json").write_text(json.dumps(owner | {"heartbeat": 0}))
    assert whole(Run.read("demo", tmp_path)).head["status"] == "crashed"


async def test_what_was_rolled_back_is_gone(tmp_path: Path):
    with open_fake(tmp_path) as model:
        view = View(model.run)
        await train(model, 3)
        view.look()
        assert len(view.tables["steps"]) == 3
        model.run.roll_back(1)
        view.look()
        assert list(view.tables["steps"]) == ["0"] and set(view.tables["rollouts"]) <= {"0", "1"}


def test_a_line_that_is_being_written_waits(tmp_path: Path):
    path = tmp_path / "lines.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"a":1}\n{"a"')
    assert tail.read() == [{"a": 1}]
    with open(path, "a") as file:
        file.write(':2}\nnot json\n{"a":3}\n')
    assert tail.read() == [{"a": 2}, {"a": 3}]
    assert tail.read() == []


async def test_steps_that_came_between_two_looks_are_all_read(tmp_path: Path):
    with open_fake(tmp_path) as model:
        view = View(model.run)
        view.look_at_everything()
        for _ in model.run.steps(7):
            await train(model, 1)
        view.look_at_everything()
        assert list(view.tables["rollouts"]) == [str(step) for step in range(7)]
        assert all("band_low" in row["values"] for row in view.rows)
        assert view.head["status"] == "idle"
        await train(model, 1)
        view.look_at_everything()
        assert view.head["status"] == "running"


async def test_a_look_costs_what_is_new(tmp_path: Path):
    with open_fake(tmp_path) as model:
        view, stream = View(model.run), Stream()
        await train(model, 5)
        view.look_at_everything()
        assert set(view.take_new()["steps"]) == {"0", "1", "2", "3", "4"}
        stream.everything(view.head, view.tables)
        await train(model, 1)
        view.look()
        (message,) = stream.news(view.head, view.take_new())
        assert set(message["tables"]["steps"]) == {"5"}
        assert stream.news(view.head, view.take_new()) == []
        model.rollback(3)
        view.look_at_everything()
        assert view.take_new() is None and [row["step"] for row in view.rows] == [0, 1, 2]
        best = max(view.rows, key=lambda row: (row["values"]["reward_mean"], row["step"]))
        assert view.head["best"]["step"] == best["step"] and view.head["checkpoints"][-1] == 3
        assert view.rows[-1]["values"]["reward_best"] == best["values"]["reward_mean"]


async def test_what_a_judge_said_later_counts(tmp_path: Path):
    with open_fake(tmp_path) as model:
        groups = await play(model)
        view = View(model.run)
        view.look_at_everything()
        scores = {t.id: {"reward": 0.25, "metrics": {"judge/share": 1.0}} for t in groups.trajectories}
        model.run.record_event("judged", step=0, scores=scores, unscored=[], spent={})
        view.look_at_everything()
        values = view.tables["rollouts"]["0"]["values"]
        assert values["band_low"] == values["band_high"] == 0.25 and values["metric/judge/share"] == 1.0


# ---- the messages -------------------------------------------------------------------------------


def test_only_what_changed_is_sent():
    stream, browser = Stream(), Browser()
    tables = {"steps": {"0": {"step": 0}, "1": {"step": 1}}}
    for message in stream.everything({"name": "x"}, tables):
        assert browser.take(message)
    assert stream.changes({"name": "x"}, tables) == []
    later = {"steps": {**tables["steps"], "1": {"step": 1, "values": {}}, "2": {"step": 2}}}
    (message,) = stream.changes({"name": "x"}, later)
    assert set(message["tables"]["steps"]) == {"1", "2"} and "head" not in message
    assert browser.take(message) and browser.tables == later
    (message,) = stream.changes({"name": "y"}, later)
    assert message["tables"] == {} and browser.take(message) and browser.head == {"name": "y"}


def test_a_lost_message_is_noticed_and_mended():
    stream, browser = Stream(), Browser()
    assert not browser.take(stream.changes({}, {"steps": {"0": {"step": 0}}})[0])  # knows nothing yet
    browser.take(stream.everything({}, {"steps": {"0": {"step": 0}}})[0])
    stream.changes({}, {"steps": {"0": {"step": 0}, "1": {"step": 1}}})  # lost
    three = {"steps": {str(i): {"step": i} for i in range(3)}}
    assert not browser.take(stream.changes({}, three)[0])
    assert all(browser.take(message) for message in stream.everything({}, three))
    assert browser.tables == three


def test_a_rollback_resets():
    stream, browser = Stream(), Browser()
    browser.take(stream.everything({}, {"steps": {"0": {"step": 0}, "1": {"step": 1}}})[0])
    (message,) = stream.changes({}, {"steps": {"0": {"step": 0}}})
    assert message["reset"] and browser.take(message) and browser.tables == {"steps": {"0": {"step": 0}}}


def test_messages_are_small_whatever_a_run_holds():
    values = {f"metric number {i}": 1 / (i + 1) for i in range(60)}
    steps = {str(i): {"step": i, "values": values} for i in range(2000)}
    widest = [brief(float(i % 2), "\U0001f600" * 500 + str(i)) for i in range(400)]
    tables = {"steps": steps, "rollouts": {"0": rollout_row(0, widest)}}
    messages, browser = Stream().everything({"name": "x"}, tables), Browser()
    assert len(messages) > 10
    assert max(len(json.dumps(message)) for message in messages) < 256_000
    assert MOST_BYTES < 256_000
    assert all(map(browser.take, messages)) and browser.tables == json.loads(json.dumps(tables))
    assert [message["more"] for message in messages] == [True] * (len(messages) - 1) + [False]


# ---- controls -----------------------------------------------------------------------------------


async def test_stop_ends_the_loop_after_its_step(tmp_path: Path):
    with open_fake(tmp_path) as model:
        done = []
        for step in model.run.steps(10):
            await train(model, 1)
            done.append(step)
            if step == 2:
                model.run.ask("stop")
        assert done == [0, 1, 2]
        assert list(model.run.steps(4)) == [3]  # asked once, stopped once
        assert [e["reason"] for e in model.run.events() if e["kind"] == "stopped"] == ["asked for"]


async def test_a_paused_run_gathers_only_when_it_goes_on(tmp_path: Path):
    with open_fake(tmp_path) as model:
        model.run.ask("pause")
        waiting = asyncio.create_task(play(model))
        await asyncio.sleep(0.3)
        assert not waiting.done() and not model.backend.requests
        model.run.ask("resume")
        assert len(await asyncio.wait_for(waiting, 10)) == 3


async def test_a_learning_rate_holds_from_the_next_step_until_it_is_given_back(tmp_path: Path):
    rates = []

    class Seen(nb.FakeBackend):
        async def optim_step(self, config: nb.TrainConfig) -> dict[str, float]:
            rates.append(config.learning_rate)
            return await super().optim_step(config)

    with open_fake(tmp_path, backend=Seen()) as model:
        for asked in (None, 3e-4, None):
            model.run.ask("learning_rate", asked)
            await nb.train_step(model, [group(0.0, 1.0, version=model.policy_version)], learning_rate=1e-5)
        model.run.ask("learning_rate", 2e-4)
        model.run.ask("pause")
    assert rates == [1e-5, 3e-4, 1e-5]
    with open_fake(tmp_path) as model:  # a resumed run keeps the rate and does not wait
        assert model.run.controls.settings == {"learning_rate": 2e-4} and not model.run.controls.paused


@pytest.mark.parametrize("value", [0, -1.0, math.nan, "1", True])
async def test_a_learning_rate_that_is_none_is_refused(tmp_path: Path, value: Any):
    with open_fake(tmp_path) as model, pytest.raises(nb.ConfigurationError, match="learning rate"):
        model.run.ask("learning_rate", value)
