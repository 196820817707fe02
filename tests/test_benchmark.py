"""Do all contenders play the same scenarios, and are their figures right?"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hostile import PAYLOADS, problems
from steps import open_fake

import artnb as nb


def dialogue(scenario: nb.Scenario) -> nb.Dialogue:
    """One move: the answer must be the scenario's."""
    said: list[str] = []

    def respond(turn: nb.Turn) -> list[dict[str, Any]]:
        said.append(str(turn.message["content"]))
        return []

    def score(trajectory: nb.Trajectory) -> None:
        trajectory.reward = float(said == [scenario.task["answer"]])
        trajectory.metrics = {"correct": trajectory.reward}

    return nb.Dialogue(
        [{"role": "user", "content": scenario.id}], respond, score=score, options={"max_tokens": 4}
    )


def scenarios(split: str, n: int, seed: int = 0) -> list[nb.Scenario]:
    return [nb.Scenario(f"{split}/{i}", split, i, {"answer": "ab"[i % 2]}) for i in range(n)]


def baseline(answer: str) -> Any:
    def play(scenario: nb.Scenario) -> nb.Trajectory:
        right = float(answer == scenario.task["answer"])
        items = [{"role": "user", "content": scenario.id}, {"role": "assistant", "content": answer}]
        return nb.Trajectory(items, reward=right, metrics={"correct": right})

    return play


def oracle(scenario: nb.Scenario) -> nb.Trajectory:
    return baseline(scenario.task["answer"])(scenario)


ENVIRONMENT = nb.Environment(
    "letters",
    {},
    nb.rollout_of(dialogue),
    scenarios,
    policies={"always a": baseline("a"), "oracle": oracle},
    metrics=("correct",),
    dialogue=dialogue,
)


def answering(root: Path, answer: str, **options: Any) -> nb.Model:
    return open_fake(root, backend=nb.FakeBackend(script=lambda prompt, version: answer), **options)


async def test_policies_baselines_and_endpoints_play_the_same_scenarios(tmp_path: Path):
    with answering(tmp_path, "a") as model, answering(tmp_path, "b", run="large") as large:
        server = large.serve()
        found = await nb.benchmark(
            ["current", "base", "always a", "oracle", "large"],
            ENVIRONMENT,
            model=model,
            n=9,
            price={"large": (2.0, 8.0)},
            base_url=server.url,
            api_key=server.api_key,
            progress=False,
        )
        (event,) = [e for e in model.run.events() if e["kind"] == "benchmark"]
    assert [c.name for c in found.contenders] == ["current", "base", "always a", "oracle", "large"]
    assert [c.kind for c in found.contenders] == ["policy", "policy", "baseline", "baseline", "endpoint"]
    means = pytest.approx([5 / 9, 5 / 9, 5 / 9, 1, 4 / 9])
    assert [c.evaluation.mean_reward for c in found.contenders] == means
    assert {(c.evaluation.n, c.completed, c.turns) for c in found.contenders} == {(9, 1.0, 1.0)}
    assert found["current"].difference is None and found["always a"].difference.mean == 0
    # oracle less current: four ones among nine; Student's interval by hand
    assert str(found["oracle"].difference) == "0.444 [0.039, 0.850]"
    assert found["large"].difference.mean == pytest.approx(-1 / 9)
    assert str(found["large"].success) == "0.444 [0.189, 0.733]"  # Wilson's
    read, written = found["large"].tokens_read, found["large"].tokens_written
    assert read > 0 and written == found["current"].tokens_written and read == found["current"].tokens_read
    assert found["large"].dollars == pytest.approx((read * 2 + written * 8) / 1000)
    assert found["current"].dollars is None and found["oracle"].tokens_read is None
    assert event["rows"] == json.loads(json.dumps(found.to_json()["rows"]))
    assert "large" in repr(found) and "0.444 [0.189, 0.733]" in found._repr_html_()
    frame = found.frame()
    assert frame.loc["oracle", "against the first_mean"] == pytest.approx(4 / 9)
    assert list(found.figure().data[0].x) == means
    assert nb.last() is found


async def test_who_fails_is_shown_with_the_reason_and_the_others_go_on(tmp_path: Path):
    with answering(tmp_path, "a") as model, answering(tmp_path, "b", run="large") as large:
        server = large.serve()
        server.close()
        found = await nb.benchmark(
            ["current", "large", "oracle"],
            ENVIRONMENT,
            model=model,
            n=4,
            base_url=server.url,
            api_key="wrong-key-12345",
            options={"timeout": 5},
            progress=False,
        )
    assert "APIConnectionError" in found["large"].failure and found["large"].evaluation.n == 0
    assert found["oracle"].evaluation.mean_reward == 1.0 and found.status == "complete"
    assert "wrong-key-12345" not in repr(found)


async def test_an_interrupt_keeps_what_is_finished(tmp_path: Path):
    slow = nb.FakeBackend(script=lambda prompt, version: "a", delay=30.0)
    with answering(tmp_path, "a") as model, open_fake(tmp_path, run="slow", backend=slow) as late:
        late_rollout = nb.rollout_of(dialogue)

        async def rollout(player: Any, scenario: nb.Scenario) -> nb.Trajectory:
            if player is late and scenario.seed == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return await late_rollout(player, scenario)

        environment = nb.Environment("letters", {}, rollout, scenarios, metrics=("correct",))
        with pytest.raises(nb.Interrupted) as caught:
            await nb.benchmark([model, late], environment, n=3, progress=False)
    partial = caught.value.partial
    assert [c.name for c in partial.contenders] == ["demo", "slow"] and partial.status == "interrupted"
    assert partial["demo"].evaluation.n == 3 and partial["slow"].evaluation.n == 0


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([], "at least one"),
        (["current"], "pass model="),
        (["oracle", "oracle"], "given twice"),
        ([7], "got int"),
        (["oracel"], "none of current, base, step_NNNNNN, always a, oracle; .*needs a key"),
    ],
)
async def test_what_cannot_be_is_refused_before_anything_is_played(
    models: list[Any], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(nb.ConfigurationError, match=message):
        await nb.benchmark(models, ENVIRONMENT, progress=False)


@pytest.mark.parametrize("kind", sorted(PAYLOADS))
async def test_names_are_shown_as_text(kind: str):
    name = PAYLOADS[kind]
    environment = nb.Environment(name, {}, nb.rollout_of(dialogue), scenarios, policies={name: oracle})
    found = await nb.benchmark([name], environment, n=2, progress=False)
    assert not problems(found._repr_html_())
    repr(found)
