"""Does one rollout play every dialogue: plain, forgetful, with an environment that has to be awaited?"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import artnb as nb


def counting(*, forgets: bool = False, awaited: bool = False) -> Any:
    """Three moves; the environment numbers its answers."""

    def dialogue(scenario: nb.Scenario) -> nb.Dialogue:
        moves: list[str] = []

        def respond(turn: nb.Turn) -> list[dict[str, Any]]:
            moves.append(turn.message["content"])
            return [] if len(moves) == 3 else [{"role": "user", "content": f"answer {len(moves)}"}]

        async def later(turn: nb.Turn) -> list[dict[str, Any]]:
            await asyncio.sleep(0)
            return respond(turn)

        def score(trajectory: nb.Trajectory) -> None:
            trajectory.reward = float(len(moves))

        messages = [{"role": "system", "content": "count"}, {"role": "user", "content": scenario.id}]
        options = {"max_tokens": 7}
        return nb.Dialogue(messages, later if awaited else respond, None, options, forgets, score)

    return dialogue


def model_of(folder: Path) -> nb.Model:
    return nb.Model(run="dialogue", root=folder, backend=nb.FakeBackend(script=["a", "b", "c"]))


@pytest.mark.parametrize("awaited", [False, True])
async def test_moves_and_answers_alternate_until_nothing_is_said(tmp_path: Path, awaited: bool):
    with model_of(tmp_path) as model:
        trajectory = await nb.rollout_of(counting(awaited=awaited))(model, nb.Scenario("start"))
    said = [message["content"] for message in trajectory.messages()]
    assert said == ["count", "start", "a", "answer 1", "b", "answer 2", "c"]
    assert trajectory.reward == 3.0 and trajectory.scenario_id == "start"
    assert {request.sampling.max_tokens for request in model.backend.requests} == {7}


async def test_a_dialogue_that_forgets_gives_one_history_a_move(tmp_path: Path):
    with model_of(tmp_path) as model:
        trajectory = await nb.rollout_of(counting(forgets=True))(model, nb.Scenario("start"))
    histories = [trajectory.messages(), *(h.messages() for h in trajectory.additional_histories)]
    assert [[m["content"] for m in history] for history in histories] == [
        ["count", "start", "a"],
        ["count", "answer 1", "b"],
        ["count", "answer 2", "c"],
    ]


async def test_what_the_environment_raises_reaches_the_caller(tmp_path: Path):
    def broken(scenario: nb.Scenario) -> nb.Dialogue:
        def respond(turn: nb.Turn) -> Any:
            raise KeyError("no such shop")

        return nb.Dialogue([{"role": "user", "content": "?"}], respond)

    with model_of(tmp_path) as model, pytest.raises(KeyError, match="no such shop"):
        await nb.rollout_of(broken)(model, nb.Scenario("start"))
