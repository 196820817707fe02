"""Are a ledger's balances right, and is each of an episode's contexts recorded, and trained on, exactly?"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hostile import PAYLOADS, problems
from likelihood import likelihood
from scripted import ScriptedModel
from steps import open_model

import artnb as nb
from artnb.batch import to_samples
from artnb.config import TrainConfig
from artnb.environments import load_environment
from artnb.errors import ConfigurationError
from artnb.types import Scenario, Trajectory
from artnb_environments import long_ledger
from artnb_environments.long_ledger.episode import Episode
from artnb_environments.long_ledger.rollout import exact_replies


def one(n: int = 0, split: str = "test", **variant: Any) -> Scenario:
    return load_environment("long_ledger", **variant).scenarios(split, n + 1)[n]


def in_turn(*replies: Any) -> ScriptedModel:
    left = iter(replies)
    return ScriptedModel(lambda _: next(left))


async def play(scenario: Scenario, model: ScriptedModel) -> Trajectory:
    return (await long_ledger.rollout(model, scenario)).finish()


# ---- the ledger ---------------------------------------------------------------------------------


class Clerk:
    """An independent bookkeeper: reads the words of the parts, as an agent gets them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.amounts: list[int] = []

    def reads(self, text: str) -> list[int] | None:
        """The balances asked about, once they are asked about."""
        for line in text.split("\n"):
            words = re.findall(r"[A-Za-z]+|\d+", line)
            if line.startswith("opening:"):
                self.names, self.amounts = words[1::2], [int(word) for word in words[2::2]]
            elif words[0] == "set":
                self.amounts[self.names.index(words[1])] = int(words[3])
            elif words[0] == "add":
                self.amounts[self.names.index(words[3])] += int(words[1])
            elif words[0] == "subtract":
                self.amounts[self.names.index(words[3])] -= int(words[1])
            elif words[0] == "swap":
                i, j = self.names.index(words[1]), self.names.index(words[3])
                self.amounts[i], self.amounts[j] = self.amounts[j], self.amounts[i]
            elif words[0] == "What":
                return [self.amounts[self.names.index(word)] for word in words[5:]]
            assert min(self.amounts, default=0) >= 0
        return None


@pytest.mark.parametrize("kinds", ["all", "set"])
async def test_an_independent_bookkeeper_who_sees_all_parts_is_always_right(kinds: str) -> None:
    seen = set[str]()
    for scenario in load_environment("long_ledger", kinds=kinds, examples=0).scenarios("test", 60):
        clerk = Clerk()

        def reply(request: dict[str, Any], clerk: Clerk = clerk) -> str:
            text = request["messages"][-1]["content"]
            seen.update(re.findall(r"^(set|add|subtract|swap) ", text, re.MULTILINE))
            told = clerk.reads("\n".join(line for line in text.split("\n") if "notes" not in line.lower()))
            return "none" if told is None else ", ".join(map(str, told))

        assert (await play(scenario, ScriptedModel(reply))).reward == 1.0
    assert seen == ({"set", "add", "subtract", "swap"} if kinds == "all" else {"set"})


def test_the_last_part_alone_leaves_headroom_and_exact_notes_get_all() -> None:
    environment = load_environment("long_ledger")
    heldout = environment.scenarios("test", 300)
    found = {name: nb.evaluate_baseline(environment, name, heldout) for name in environment.policies}
    assert found["random"].mean_reward < 0.03
    assert abs(found["last_part"].mean_reward - 0.29) < 0.045
    assert set(found["oracle"].rewards) == {1.0} and found["oracle"].metrics["notes_right"] == 1
    assert found["oracle"].metrics["notes_length"] < environment.variant["notes_limit"] / 2


def test_the_card_says_what_was_measured() -> None:
    for preset, column in ((None, 0), ("small", 1)):
        environment = load_environment("long_ledger", preset=preset)
        heldout = environment.scenarios("test", 500)
        for name in environment.policies:
            found = nb.evaluate_baseline(environment, name, heldout)
            row = next(line for line in long_ledger.card.splitlines() if line.startswith(f"| `{name}`"))
            said = [float(number) for number in re.findall(r"(?<![\d.])\d?\.\d+", row)]
            assert said[3 * column : 3 * column + 3] == pytest.approx(
                [found.mean_reward, found.low, found.high], abs=0.0011
            )


# ---- contexts -----------------------------------------------------------------------------------


async def test_only_the_part_and_the_agents_own_notes_stay() -> None:
    scenario = one(notes_limit=20)
    model = in_turn(*['Mind A 1; B 2 & "c"'] * 4, "Z" * 50, "1, 2, 3")
    trajectory = await play(scenario, model)
    requests = [request["messages"] for request in model.requests]
    assert len(requests) == 6 and len(trajectory.additional_histories) == 5
    starts = {json.dumps(messages[:-1]) for messages in requests}
    assert len(starts) == 1, "system and examples are the same in every context"
    parts = trajectory.metadata["parts"]
    for number, messages in enumerate(requests):
        lines = messages[-1]["content"].split("\n")
        assert lines[-1 - len(parts[number]) : -1] == parts[number]
        assert messages[-1]["content"].count("Part ") == 1
    assert requests[1][-1]["content"].startswith('Your notes: Mind A 1; B 2 & "c"\nPart 2 of 6\n')
    assert requests[5][-1]["content"].startswith("Your notes: " + "Z" * 20 + "\nPart 6 of 6\n")
    histories = [trajectory.messages(), *(h.messages() for h in trajectory.additional_histories)]
    assert [messages[:-1] for messages in histories] == requests
    assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))) == trajectory


async def test_with_the_full_history_everything_stays_in_one_conversation() -> None:
    scenario = one(history="full", examples=0)
    model = in_turn(*exact_replies(Episode.of(scenario)))
    trajectory = await play(scenario, model)
    assert trajectory.reward == 1.0 and not trajectory.additional_histories
    assert len(model.requests[-1]["messages"]) == 1 + 6 + 5
    assert "Your notes" not in json.dumps(model.requests)


async def test_every_context_is_a_row_of_exactly_the_tokens_that_were_read_and_sampled(
    tiny_model: Path, tmp_path: Path, one_thread: None
) -> None:
    environment = load_environment("long_ledger", chunks=3, accounts=4, entries=3, examples=0, max_tokens=6)
    with open_model(tiny_model, tmp_path) as model:
        scenarios = environment.scenarios("train", 2)
        groups = await nb.gather(environment.rollout, scenarios, model=model, group_size=2, progress=False)
        for group in groups:
            group.trajectories[0].reward, group.trajectories[1].reward = 1.0, 0.0
        samples, dropped, notes, *_ = to_samples(groups, TrainConfig(), step=0)
        assert notes["turns"] == len(samples) == 4 * 3 and not dropped
        for trajectory in groups.trajectories:
            own = [sample for sample in samples if sample.trajectory_id == trajectory.id]
            histories = [trajectory, *trajectory.additional_histories]
            assert len(own) == len(histories) == 3
            shared = {
                a for s in own for a, is_own in zip(s.advantages_T, s.is_sampled_T, strict=True) if is_own
            }
            assert len(shared) == 1, "one reward, one advantage"
            for sample, history in zip(own, histories, strict=True):
                (turn,) = [item for item in history.messages_and_choices if isinstance(item, nb.Turn)]
                assert sample.ids_T == turn.ids
                assert sum(sample.is_sampled_T) == len(turn.completion_ids) > 0
                assert turn.prompt_ids == tuple(model.app.renderer.render(history.messages()[:-1]))
        first, second = (history.turns[0].prompt_ids for history in histories[:2])
        assert second[: len(first)] != first, "what was compressed away is no prefix"
        result = await nb.train_step(model, groups, learning_rate=1e-3)
        assert result.metrics["grad_norm"] > 0
        sampled = sum(len(turn.completion_ids) for t in groups.trajectories for turn in t.turns)
        assert {"samples": 12, "tokens": sampled}.items() <= result.metrics.items()


# ---- replies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("invalid", "ended_by", "turns"),
    [("lost_turn", "answer", 6), ("end", "invalid", 1), ("retry", "invalid", 2)],
)
async def test_a_reply_that_is_no_notes_follows_the_variant(invalid: str, ended_by: str, turns: int) -> None:
    scenario = one(invalid=invalid)
    exact = exact_replies(Episode.of(scenario))
    trajectory = await play(scenario, in_turn("", "" if invalid == "retry" else exact[1], *exact[2:]))
    assert trajectory.metadata["ended_by"] == ended_by and trajectory.metrics["turns"] == turns
    assert trajectory.reward == (1.0 if invalid == "lost_turn" else 0.0)


async def test_a_part_is_told_again_once_when_asked() -> None:
    scenario = one(invalid="retry", chunks=2, examples=0)
    exact = exact_replies(Episode.of(scenario))
    model = in_turn("", exact[0], "I think 3", exact[1])
    trajectory = await play(scenario, model)
    assert trajectory.reward == 1.0 and trajectory.metrics["invalid"] == 2
    asked = [request["messages"][-1]["content"] for request in model.requests]
    assert asked[1] == "That was not in the form asked for.\n" + asked[0]
    assert asked[3] == "That was not in the form asked for.\n" + asked[2]


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        *[("{0}, {1}, {2}", 1.0), ("{0} {1} {2}.", 1.0), ("{0}, {2}, {1}", 1 / 3), ("{0}, {1}", 0.0)],
        *[("?", 0.0), ("{0}, {1}, {2}, {2}", 0.0), ("A {0}, B {1}, C {2}", 0.0)],
    ],
)
async def test_the_answer_is_paid_by_the_share_of_right_balances(said: str, reward: float) -> None:
    scenario = next(s for s in (one(n) for n in range(20)) if len(set(Episode.of(s).ledger.truth)) == 3)
    truth = Episode.of(scenario).ledger.truth
    trajectory = await play(scenario, in_turn(*["x"] * 5, said.format(*truth)))
    assert trajectory.reward == pytest.approx(reward)


@pytest.mark.parametrize("history", ["compact", "full"])
async def test_notes_and_answer_can_be_calls(history: str) -> None:
    scenario = one(style="tools", history=history)
    *notes, answer = exact_replies(Episode.of(scenario))
    said = [[("write_notes", json.dumps({"notes": text}))] for text in notes]
    model = in_turn(*said, [("answer", json.dumps({"balances": answer}))])
    trajectory = await play(scenario, model)
    assert trajectory.reward == 1.0 and trajectory.metrics["notes_right"] == 1.0
    assert [tool["function"]["name"] for tool in model.requests[0]["tools"]] == ["write_notes", "answer"]
    wrong_tool = await play(scenario, in_turn(*[[("answer", '{"balances": "1"}')]] * 6))
    assert wrong_tool.metrics["invalid"] == 5


async def test_credit_tells_good_notes_from_bad_ones() -> None:
    scenario = one(chunks=4, accounts=4, credit="notes", examples=0)
    episode = Episode.of(scenario)
    exact = exact_replies(episode)
    half = ", ".join(exact[1].split(", ")[:2])
    trajectory = await play(scenario, in_turn(exact[0], half, "", exact[3]))
    assert [turn.credit for turn in trajectory.turns] == [1.0, 0.5, -1.0, 1.0]
    assert trajectory.metrics["notes_right"] == 0.5


def test_a_rendered_episode_is_safe() -> None:
    for text in PAYLOADS.values():
        told = {
            "parts": [[text], [text]],
            "notes": [text],
            "asked": [text],
            "answer": [text],
            "ended_by": text,
        }
        assert not problems(long_ledger.render(Trajectory(metadata=told)))
    page = long_ledger.render(load_environment("long_ledger").play("oracle", one()))
    assert page.count("<tr>") == 7 and "swap" in page and "reward 1.00" in page


@pytest.mark.parametrize(
    "wrong",
    [{"accounts": 1}, {"chunks": 1}, {"asked": 13}, {"kinds": "add"}, {"history": "last"}, {"examples": 5}],
)
def test_a_value_that_cannot_work_is_refused_at_loading(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        load_environment("long_ledger", **wrong)


# ---- learning -----------------------------------------------------------------------------------


async def steps_towards_the_oracle(model: Any, environment: Any, steps: int, **options: Any) -> list[float]:
    """The oracle's likelihood before the first step and after each; its episodes are in the groups."""
    scenarios, found = environment.scenarios("train", 1), []
    for _ in range(steps):
        groups = await nb.gather(environment.rollout, scenarios, model=model, group_size=2, progress=False)
        for group, scenario in zip(groups, scenarios, strict=True):
            assert not group.exceptions and max(group.rewards) < 1.0
            group.trajectories.append(await long_ledger.oracle_episode(model, scenario))
            assert group.rewards[-1] == 1.0
        oracle = [group[-1] for group in groups]
        found += [] if found else [await likelihood(model, oracle)]
        result = await nb.train_step(model, groups, loss="reinforce", **options)
        assert result.metrics["grad_norm"] > 0
        found.append(await likelihood(model, oracle))
    return found


async def test_the_oracle_among_a_groups_attempts_is_what_steps_move_towards(
    tiny_model: Path, tmp_path: Path, one_thread: None
) -> None:
    environment = load_environment("long_ledger", preset="small", examples=0, max_tokens=8)
    with open_model(tiny_model, tmp_path) as model:
        found = await steps_towards_the_oracle(model, environment, 2, learning_rate=3e-3)
    assert all(after > before + 0.005 for before, after in pairwise(found)), found


@pytest.mark.slow
async def test_the_bundled_model_moves_towards_the_oracle(bundled: Path, tmp_path: Path) -> None:
    environment = load_environment("long_ledger", preset="small", max_tokens=24)
    with nb.Model(bundled, "ledger", root=tmp_path) as model:
        found = await steps_towards_the_oracle(model, environment, 2, learning_rate=2e-4)
    assert found[0] < found[1] < found[2], found


async def test_the_oracle_writes_no_calls(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="word"):
        await long_ledger.oracle_episode(None, one(style="tools"))
