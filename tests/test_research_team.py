"""Do agents that call agents keep their budgets, and is each of them recorded, linked and paid as stated?"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hostile import PAYLOADS, problems
from hostile_agents import ARGUMENTS, TEXTS, HostileAgent
from likelihood import likelihood
from scripted import ScriptedModel
from steps import open_model

import artnb as nb
from artnb.batch import to_samples
from artnb.browser.source import source_of
from artnb.config import TrainConfig
from artnb.environments import load_environment
from artnb.errors import ConfigurationError
from artnb.types import Scenario, Trajectory
from artnb_environments import research_team
from artnb_environments.research_team import documents
from artnb_environments.research_team.baselines import oracle_episode
from artnb_environments.research_team.documents import Variant, draw_library


def one(n: int = 0, split: str = "test", **variant: Any) -> Scenario:
    return load_environment("research_team", **variant).scenarios(split, n + 1)[n]


def library(scenario: Scenario) -> documents.Library:
    return draw_library(scenario.seed, Variant(**scenario.task))


async def play(scenario: Scenario, *replies: Any) -> tuple[list[Trajectory], list[dict[str, Any]]]:
    """An episode in which all agents together say ``replies``; also the requests."""
    left = iter(replies)
    model = ScriptedModel(lambda _: next(left))
    trajectories = await research_team.rollout(model, scenario)
    assert next(left, None) is None, "every reply was asked for"
    return [trajectory.finish() for trajectory in trajectories], model.requests


def call(*words: object) -> str:
    return f"<call>{' '.join(map(str, words))}</call>"


# ---- what there is to read ----------------------------------------------------------------------


@pytest.mark.parametrize("preset", [None, "small"])
def test_a_report_is_longer_than_a_context_and_tells_the_value_once(preset: str | None) -> None:
    environment = load_environment("research_team", preset=preset)
    options = environment.variant
    places = set()
    for scenario in environment.scenarios("test", 60):
        found = library(scenario)
        for document in found.documents:
            assert sum(map(len, document.parts)) > options["context_budget"]
            assert all(options["part_length"] - 70 < len(p) <= options["part_length"] for p in document.parts)
            told = [re.findall(rf"The {found.item} cost (\d+)\.", part) for part in document.parts]
            assert [n for n, values in enumerate(told) if values] == [document.place]
            assert told[document.place] == [str(document.value)]
            others = re.findall(r"The ([a-z ]+) cost \d+\.", " ".join(document.parts))
            assert len(others) == 2 * len(document.parts) + 1
            places.add(document.place)
        assert len({document.town for document in found.documents}) == len(found.documents)
    assert places == set(range(options["parts"]))


def test_baselines_leave_headroom_and_the_oracle_gets_all() -> None:
    for preset, n in ((None, 150), ("small", 300)):
        environment = load_environment("research_team", preset=preset)
        heldout = environment.scenarios("test", n)
        found = {name: nb.evaluate_baseline(environment, name, heldout) for name in environment.policies}
        assert found["random"].mean_reward < 0.04
        assert abs(found["truncating"].mean_reward - 0.5) < 0.1, "the head is half of a report"
        assert set(found["oracle"].rewards) == {1.0} and found["oracle"].metrics["over_budget"] == 0
        assert found["verbatim"].mean_reward < 0.04 and found["verbatim"].metrics["over_budget"] >= 1
        assert found["oracle"].metrics["depth"] == 3


def test_the_card_says_what_was_measured() -> None:
    for preset, column in ((None, 0), ("small", 1)):
        environment = load_environment("research_team", preset=preset)
        heldout = environment.scenarios("test", 250)
        for name in environment.policies:
            found = nb.evaluate_baseline(environment, name, heldout)
            row = next(line for line in research_team.card.splitlines() if line.startswith(f"| `{name}`"))
            said = [float(number) for number in re.findall(r"(?<![\d.])\d?\.\d+", row)]
            assert said[3 * column : 3 * column + 3] == pytest.approx(
                [found.mean_reward, found.low, found.high], abs=0.0011
            )


# ---- agents and their links ---------------------------------------------------------------------


async def test_every_agent_is_a_trajectory_that_names_its_caller() -> None:
    scenario = one(documents=1, examples=0)
    (document,) = library(scenario).documents
    low = document.place < 3
    first, second = ("7 is not it, none", f"{document.value}") if not low else (f"{document.value}", "none")
    found, requests = await play(
        scenario,
        *(call("delegate", 1, "find it"), call("share", 1, 3, "look"), call("read"), call("report", first)),
        *(call("share", 4, 6, "look there"), call("report", second), call("report", document.value)),
        call("answer", document.value),
    )
    root, reader, left, right = found
    assert [t.parent_id for t in found] == [None, root.id, reader.id, reader.id]
    assert [t.seat for t in found] == ["root", "report 1, depth 2", *["report 1, depth 3"] * 2]
    assert [t.metadata["parent"] for t in found] == [None, 0, 1, 1]
    assert [t.metadata["instruction"] for t in found][1:] == ["find it", "look", "look there"]
    assert [t.metadata["parts"] for t in found][1:] == [[1, 2, 3, 4, 5, 6], [1, 2, 3], [4, 5, 6]]
    assert [len(t.turns) for t in found] == [2, 3, 2, 1] and len({t.id for t in found}) == 4
    assert root.metrics["agents"] == 3 and root.metrics["depth"] == 3 and reader.metrics["agents"] == 2
    assert root.messages()[-2]["content"] == f"Agent 1: {document.value}"
    assert reader.messages()[-2]["content"] == f"Agent 3: {second}"
    assert left.messages()[-2]["content"] == f"Part 1: {document.parts[0]}"
    assert all(t.scenario_id == scenario.id for t in found)
    told = [request["messages"][-1]["content"] for request in requests]
    assert document.parts[0] not in "".join(text for n, text in enumerate(told) if n != 3), (
        "in one context only"
    )
    # rewards: shared with the root, and the agent's own
    assert root.reward == 1.0 and reader.reward == 1.0
    assert (left.reward, right.reward) == ((1.0, 1.0) if low else (0.5, 1.0)), "a number too many is not it"
    for trajectory in found:
        assert set(trajectory.metrics) == set(research_team.metrics)
        assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))) == trajectory


@pytest.mark.parametrize(
    ("report", "answer", "root", "reader"),
    [
        ("{0}", "{0}", 1.0, 1.0),
        ("{0}", "5", 0.0, 0.25),
        ("{0} or 5", "{0}", 1.0, 0.75),
        ("none", "5", 0.0, 0.0),
    ],
)
async def test_a_sub_agent_is_paid_for_the_answer_and_for_its_own_report(
    report: str, answer: str, root: float, reader: float
) -> None:
    scenario = one(documents=1, own_weight=0.25)
    value = library(scenario).documents[0].value
    replies = [
        call("delegate", 1, "x"),
        call("report", report.format(value)),
        call("answer", answer.format(value)),
    ]
    found, _ = await play(scenario, *replies)
    assert [t.reward for t in found] == [root, reader]


async def test_no_number_is_the_right_report_of_parts_without_the_value() -> None:
    scenario = next(s for s in (one(n, documents=1) for n in range(20)) if library(s).documents[0].place > 2)
    head = (call("delegate", 1, "x"), call("share", 1, 3, "x"))
    found, _ = await play(
        scenario, *head, call("report", "nothing here"), call("report", 5), call("answer", 5)
    )
    assert [t.metadata["own_score"] for t in found] == [0.0, 0.0, 1.0]


async def test_the_root_can_ask_an_agent_again() -> None:
    scenario = one(documents=1)
    value = library(scenario).documents[0].value
    found, requests = await play(
        scenario,
        *(call("ask", 1, "who?"), call("delegate", 1, "x"), call("report", "5"), call("ask", 1, "sure?")),
        *(call("report", value), call("answer", value)),
    )
    root, reader = found
    assert root.messages()[-6]["content"] == "Error: there is no such agent that reported to you"
    assert requests[4]["messages"][-1]["content"] == "sure?" and len(reader.turns) == 2
    assert reader.metadata["own_score"] == 1.0, "its last report counts"
    assert root.metrics["bad_calls"] == 1 and root.reward == 1.0


async def test_agents_make_calls_of_the_api_when_asked() -> None:
    scenario = one(documents=1, style="tools")
    value = library(scenario).documents[0].value
    found, requests = await play(
        scenario,
        [("delegate", '{"report": 1, "task": "find"}')],
        [("read", "{}"), ("read", "{}")],
        [("report", json.dumps({"text": f"{value}"}))],
        [("ask", '{"agent": 1, "question": "sure?"}')],
        [("report", json.dumps({"text": f"{value}"}))],
        [("answer", json.dumps({"values": f"{value}"}))],
    )
    assert [t.reward for t in found] == [1.0, 1.0]
    names = [[tool["function"]["name"] for tool in request["tools"]] for request in requests]
    assert names[0] == ["delegate", "ask", "answer"] and names[1] == ["read", "share", "report"]
    assert [tool["function"]["name"] for tool in found[1].tools or []] == names[1]
    asked = requests[4]["messages"][-1]
    assert (asked["role"], asked["content"]) == ("tool", "sure?"), "the report's call has a result of its own"


# ---- budgets ------------------------------------------------------------------------------------


async def test_an_agent_that_holds_too_much_is_ended_and_its_caller_is_told() -> None:
    scenario = one(documents=1, context_budget=2000)
    found, _ = await play(scenario, call("delegate", 1, "x"), *[call("read")] * 4, call("answer", 5))
    root, reader = found
    assert reader.metadata["ended_by"] == "context" and len(reader.turns) == 4
    assert root.messages()[-2]["content"] == "Agent 1 ended without a report (context)."
    assert reader.metrics["over_budget"] == 1 and root.metrics["over_budget"] == 1
    assert root.metadata["ended_by"] == "answer"


async def test_reports_word_for_word_overflow_the_root() -> None:
    scenario = one(documents=3)
    head = (call("delegate", 1, "x"), call("report", "y" * 1300), call("delegate", 2, "x"))
    found, _ = await play(scenario, *head, call("report", "y" * 1300))
    assert found[0].metadata["ended_by"] == "context" and found[0].reward == 0.0
    assert found[0].metrics["answered"] == 0 and found[0].metrics["over_budget"] == 1


async def test_the_depth_of_agents_has_a_limit() -> None:
    scenario = one(documents=1)
    found, requests = await play(
        scenario,
        *(
            call("delegate", 1, "x"),
            call("share", 1, 4, "x"),
            call("share", 1, 2, "x"),
            call("report", "none"),
        ),
        *(call("report", "none"), call("answer", 5)),
    )
    assert [t.metadata["depth"] for t in found] == [1, 2, 3]
    assert "<call>share" in requests[1]["messages"][0]["content"]
    assert "<call>share" not in requests[2]["messages"][0]["content"]
    assert requests[3]["messages"][-1]["content"] == "Error: there is no call 'share': read, report"


async def test_tokens_of_all_agents_together_have_a_limit() -> None:
    scenario = one(documents=1, token_budget=20)  # a scripted turn has 7
    found, requests = await play(scenario, call("delegate", 1, "x"), call("read"), call("read"))
    assert len(requests) == 3 and [t.metadata["ended_by"] for t in found] == ["tokens", "tokens"]
    assert found[0].metrics["tokens"] == 21 and found[1].metrics["tokens"] == 14
    assert [t.reward for t in found] == [0.0, 0.0]


async def test_agents_and_turns_have_a_limit() -> None:
    scenario = one(documents=1, max_agents=2, max_turns=3)
    head = (call("delegate", 1, "x"), call("report", "none"), call("delegate", 1, "x"))
    found, requests = await play(scenario, *head, "no call")
    assert requests[3]["messages"][-1]["content"] == "Error: there are no more agents"
    assert [t.metadata["ended_by"] for t in found] == ["turns", "report"]
    assert found[0].metrics["bad_calls"] == 2


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("hello", "reply with one call: delegate, ask, answer"),
        (call("delegate", 1), "delegate takes report, task"),
        (call("delegate", "one", "x"), "delegate takes report, task: a number"),
        (call("delegate", 4, "x"), "report must be 1 to 3"),
        (call("delegate", 0, "x"), "report must be 1 to 3"),
        (call("read"), "there is no call 'read': delegate, ask, answer"),
        (call("answer", "forty"), "answer with 3 numbers, with commas between"),
        (call("answer"), "answer takes values"),
    ],
)
async def test_a_call_that_cannot_be_made_is_told_why(said: str, told: str) -> None:
    _, requests = await play(one(), said, call("answer", "1, 2, 3"))
    assert requests[1]["messages"][-1]["content"] == f"Error: {told}"
    ended, _ = await play(one(invalid="end"), said)
    assert ended[0].metadata["ended_by"] == "invalid" and ended[0].reward == 0.0


@pytest.mark.parametrize("style", ["tags", "tools"])
async def test_hostile_agents_get_rewards_in_the_card_s_range_and_every_metric(style: str) -> None:
    environment = load_environment("research_team", style=style)
    assert "Reward range: 0 to 1." in environment.card
    below = call("delegate", 1, "x") if style == "tags" else [("delegate", '{"report": 1, "task": "x"}')]
    kinds: dict[str, list[Any]] = {kind: [text] for kind, text in TEXTS.items()}
    for name in ("delegate", "share", "report", "answer", "ask"):
        kinds[f"calls of {name}"] = [[(name, one)] for one in ARGUMENTS]
        kinds[f"tags of {name}"] = [
            call(name, *words) for words in ((), ("1",), ("1", "2"), ("9" * 9, "é", "<b>"))
        ]
    for kind, replies in kinds.items():
        for first in ([], [below]):
            agent = HostileAgent([*first, *replies])
            for trajectory in await environment.rollout(agent, one(style=style)):
                assert trajectory.reward is not None and 0 <= trajectory.reward <= 1, kind
                assert set(trajectory.metrics) == set(environment.metrics), kind
                assert environment.render is not None and not problems(environment.render(trajectory)), kind
                assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))) == trajectory, kind


def test_a_rendered_agent_is_safe() -> None:
    for text in PAYLOADS.values():
        told = dict.fromkeys(
            ("agent", "parent", "depth", "document", "parts", "report", "truth", "ended_by"), text
        )
        items = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        page = research_team.render(Trajectory(items, metadata=told | {"instruction": text}))
        assert not problems(page)


@pytest.mark.parametrize(
    "wrong",
    [{"context_budget": 3600}, {"context_budget": 500}, {"documents": 13}, {"max_depth": 1}, {"examples": 3}],
)
def test_a_value_that_cannot_work_is_refused_at_loading(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        load_environment("research_team", **wrong)


# ---- learning -----------------------------------------------------------------------------------


async def with_oracle(model: Any, environment: Any, n: int) -> tuple[nb.Groups, list[Trajectory]]:
    """Groups by seat: of attempts of the model's, and the oracle's episodes."""
    scenarios = environment.scenarios("train", n)
    groups = await nb.gather(environment.rollout, scenarios, model=model, group_size=2, progress=False)
    assert not any(group.exceptions for group in groups)
    by_seat = {(group.scenario_id, group.seat): group for group in groups}
    oracle = [t for scenario in scenarios for t in await oracle_episode(model, scenario)]
    for trajectory in oracle:
        assert trajectory.reward == 1.0
        seat = (trajectory.scenario_id, trajectory.seat)
        if seat not in by_seat:
            groups.append(by_seat.setdefault(seat, nb.TrajectoryGroup([], *seat)))
        by_seat[seat].trajectories.append(trajectory)
    return groups, oracle


async def steps_towards_the_oracle(model: Any, environment: Any, **options: Any) -> list[float]:
    found: list[float] = []
    for _ in range(2):
        groups, oracle = await with_oracle(model, environment, 1)
        found += [] if found else [await likelihood(model, (t for t in oracle if t.seat == "root"))]
        result = await nb.train_step(model, groups, loss="reinforce", **options)
        assert result.metrics["grad_norm"] > 0
        found.append(await likelihood(model, (t for t in oracle if t.seat == "root")))
    return found


async def test_the_oracle_among_a_groups_attempts_is_what_steps_move_towards(
    tiny_model: Path, tmp_path: Path, one_thread: None
) -> None:
    environment = load_environment("research_team", preset="small", examples=0, max_turns=3, max_tokens=8)
    with open_model(tiny_model, tmp_path) as model:
        found = await steps_towards_the_oracle(model, environment, learning_rate=3e-3)
    assert all(after > before + 0.005 for before, after in pairwise(found)), found


async def test_every_agents_turns_are_trained_on_in_the_group_of_its_seat(tmp_path: Path) -> None:
    scenario = load_environment("research_team", preset="small").scenarios("train", 1)[0]
    said = iter([call("delegate", 1, "x"), call("report", "none"), call("answer", 7)] * 2)
    backend = nb.FakeBackend(script=lambda prompt, version: next(said), max_context=10**5)
    with nb.Model(run="team", root=tmp_path, backend=backend) as model:
        groups = await nb.gather(
            research_team.rollout, [scenario], model=model, group_size=2, concurrency=1, progress=False
        )
        assert [(group.seat, len(group)) for group in groups] == [("root", 2), ("report 1, depth 2", 2)]
        for group in groups:
            group.trajectories[0].reward = 1.0
        samples, *_ = to_samples(groups, TrainConfig(), step=0)
        turns = [turn for t in groups.trajectories for turn in t.turns]
        assert sum(s.sampled_tokens for s in samples) == sum(len(turn.completion_ids) for turn in turns)
        assert {sample.group for sample in samples} == {0, 1}
        kept = [t for t in groups.trajectories if t.parent_id]
        assert {t.parent_id for t in kept} == {t.id for t in groups[0]}
        result = await nb.train_step(model, groups)
        assert result.metrics["trajectories"] == 4
        root, reader = groups[0][0], next(t for t in kept if t.parent_id == groups[0][0].id)
        source = source_of(model.run, environment=load_environment("research_team"))
        assert [child["id"] for child in source.trajectory(root.id)["children"]] == [reader.id]
        shown = source.trajectory(reader.id)
        assert shown["parent"] == {"id": root.id, "known": True}
        assert "called by agent 0, depth 2" in shown["rendered"] and shown["render_error"] is None
        alone = await research_team.rollout_root(ScriptedModel(lambda _: call("answer", 7)), scenario)
        assert alone.seat == "root"


@pytest.mark.slow
async def test_the_bundled_model_moves_towards_the_oracle(bundled: Path, tmp_path: Path) -> None:
    environment = load_environment("research_team", preset="small", max_turns=3, max_tokens=24)
    with nb.Model(bundled, "team", root=tmp_path) as model:
        found = await steps_towards_the_oracle(model, environment, learning_rate=2e-4)
    assert found[0] < found[1] < found[2], found
