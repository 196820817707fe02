"""Does the shop answer, pay and roll out as its README says, with tags and with real tool calls?"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import ScriptedModel

from artnb.backends.fake import FakeBackend
from artnb.client import async_client
from artnb.completions import ChatApp
from artnb.environments import load_environment
from artnb.errors import ConfigurationError
from artnb.rendering import make_renderer
from artnb.types import Scenario, Trajectory
from artnb_environments.tool_lookup.rollout import prompt
from artnb_environments.tool_lookup.tools import EXAMPLES, ITEMS


def one(**variant: Any) -> Scenario:
    return load_environment("tool_lookup", **variant).scenarios("test", 1)[0]


async def play(scenario: Scenario, reply: Callable[[dict[str, Any]], Any], **options: Any) -> Trajectory:
    model = ScriptedModel(reply, **options)
    return (await load_environment("tool_lookup").rollout(model, scenario)).finish()


def test_items_of_train_validation_test_and_examples_are_disjoint_single_words() -> None:
    lists = [*ITEMS.values(), [item for item, _ in EXAMPLES]]
    everything = [item for items in lists for item in items]
    assert len(everything) == len(set(everything))
    assert all(re.fullmatch("[a-z]+", item) for item in everything)


def test_scenarios_take_their_items_from_the_split_and_draw_prices_anew() -> None:
    environment = load_environment("tool_lookup")
    for split, items in ITEMS.items():
        drawn = environment.scenarios(split, 200)
        assert {s.task["item"] for s in drawn} == set(items)
        prices = {s.task["price"] for s in drawn if s.task["item"] == items[0]}
        assert len(prices) > 3 and prices <= set(range(10, 100))


@pytest.mark.parametrize("style", ["tags", "tools"])
@pytest.mark.parametrize("examples", [0, 1, 2, 4])
def test_all_of_the_prompt_but_the_question_is_the_same_everywhere(style: str, examples: int) -> None:
    environment = load_environment("tool_lookup", style=style, examples=examples)
    prompts = [prompt(s) for s in environment.scenarios("train", 30) + environment.scenarios("test", 30)]
    assert len({json.dumps(p[:-1]) for p in prompts}) == 1
    assert len({p[-1]["content"] for p in prompts}) > 20
    assert len(prompts[0]) == 2 + 4 * examples


def test_baselines_score_what_the_readme_says() -> None:
    environment = load_environment("tool_lookup")
    scenarios = environment.scenarios("test", 400)
    mean = {name: sum(map(play, scenarios)) / 400 for name, play in environment.baselines.items()}
    assert mean["oracle"] == 1.0
    assert 0.19 < mean["random"] < 0.24


REPLIES = [
    ("I do not know", "", 0.0),
    ("<answer>41</answer>", "", 0.0),
    ("<call></call>", "", 0.0),
    ("<call>two words</call>", "", 0.0),
    ("<call>sofa</call>", "", 0.2),
    ("<call>{item}</call>", "no idea", 0.5),
    ("<call>{item}</call>", "<answer>{item}</answer>", 0.5),
    ("<call>{item}</call>", "<answer>9</answer>", 0.7),
    ("<call>{item}</call>", "<answer>{price}</answer>", 1.0),
    ("<call>{item}", "<answer>{price}", 1.0),
    (" <call> {item} </call>", "\n<answer>{price}</answer>\n", 1.0),
]


@pytest.mark.parametrize(("first", "second", "reward"), REPLIES)
async def test_each_step_reached_pays(first: str, second: str, reward: float) -> None:
    scenario = one()
    replies = iter([first.format(**scenario.task), second.format(**scenario.task)])
    trajectory = await play(scenario, lambda _: next(replies))
    assert trajectory.reward == reward
    assert trajectory.metrics == {
        "correct": float(reward == 1.0),
        "called": float(reward >= 0.2),
        "right_item": float(reward >= 0.5),
        "answered": float(reward >= 0.7),
    }
    assert len(trajectory.turns) == (2 if reward >= 0.5 else 1)
    assert not trajectory.additional_histories


async def test_the_result_reaches_the_model_in_the_next_user_turn() -> None:
    def read(request: dict[str, Any]) -> str:
        assert request["stop"] == ["</call>", "</answer>"] and request["max_tokens"] == 16
        assert "tools" not in request
        last = request["messages"][-1]
        assert last["role"] == "user"
        price = re.search(r": (\d+)$", last["content"])
        item = re.search(r"the (\w+)\?", last["content"])
        return f"<answer>{price[1]}</answer>" if price else f"<call>{item[1] if item else ''}</call>"

    trajectory = await play(one(), read)
    assert trajectory.reward == 1.0
    assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))) == trajectory


async def test_a_reply_cut_off_at_the_token_limit_is_not_an_answer() -> None:
    scenario = one()
    trajectory = await play(scenario, lambda _: f"<call>{scenario.task['item']}", finish_reason="length")
    assert trajectory.reward == 0.0


async def test_a_real_tool_call_gets_a_tool_message_back() -> None:
    scenario = one(style="tools")

    def call_then_answer(request: dict[str, Any]) -> Any:
        assert request["tools"][0]["function"]["name"] == "price"
        last = request["messages"][-1]
        if last["role"] == "user":
            return [("price", json.dumps({"item": scenario.task["item"]}))]
        assert last["role"] == "tool" and last["tool_call_id"] == "call_0"
        return f"<answer>{last['content'].split(': ')[1]}</answer>"

    trajectory = await play(scenario, call_then_answer)
    assert trajectory.reward == 1.0 and trajectory.tools
    assert [m["role"] for m in trajectory.messages()[-4:]] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("calls", "reward"),
    [
        ([("price", '{"item": "sofa"}')], 0.2),
        ([("price", "not json")], 0.0),
        ([("price", '["item"]')], 0.0),
        ([("price", '{"item": 3}')], 0.0),
        ([("cost", '{"item": "sofa"}')], 0.0),
        ([("price", '{"item": "sofa"}')] * 2, 0.0),
        ("<call>sofa</call>", 0.0),
    ],
)
async def test_a_malformed_tool_call_is_no_call(calls: Any, reward: float) -> None:
    assert (await play(one(style="tools"), lambda _: calls)).reward == reward


def test_options_that_cannot_work_are_refused() -> None:
    for wrong in ({"style": "xml"}, {"examples": 5}, {"max_tokens": 0}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            load_environment("tool_lookup", **wrong)


def talk_to(backend: FakeBackend) -> Any:
    app = ChatApp(backend, make_renderer(backend.tokenizer), model_name="fake")
    return SimpleNamespace(name="fake", client=async_client(app), run=None, policy_version=0)


async def test_the_second_turn_extends_the_tokens_of_the_first() -> None:
    scenario = one(max_tokens=40)  # the fake tokenizer's tokens are bytes

    def shopkeeper(prompt: str, version: int) -> str:
        price = re.search(r": (\d+)<\|im_end\|>\n<\|im_start\|>assistant\n$", prompt)
        return f"<answer>{price[1]}</answer>" if price else f"<call>{scenario.task['item']}</call>"

    model = talk_to(FakeBackend(script=shopkeeper))
    trajectory = (await load_environment("tool_lookup").rollout(model, scenario)).finish()
    first, second = trajectory.turns
    assert trajectory.reward == 1.0
    assert second.prompt_ids[: len(first.ids)] == first.ids
