"""Settings change between steps, by hand or by a rule, and the journal says which and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from steps import SCENARIOS, open_fake, play

import artnb as nb


def more_at_the_hard_ones(run: nb.Run) -> Mapping[str, Any] | None:
    """Twice as many attempts at scenarios that earned less than half in the step before."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for one in run.trajectories(run.step - 1, "train"):
        rewards[one.scenario_id].append(one.reward)
    return {"group_sizes": {name: 8 for name, own in rewards.items() if fmean(own) < 0.5}}


async def play_as(model: Any, scenario: nb.Scenario) -> nb.Trajectory:
    """One scenario is hard until step 2."""
    turn = nb.Turn((1,), (2, 3), (-0.5, -0.5), model.policy_version, "stop", {"role": "assistant"})
    hard = scenario.id == "say two" and model.run.step < 2
    return nb.Trajectory([turn], reward=0.1 if hard else 0.9)


async def test_hard_scenarios_get_more_samples_by_a_rule(tmp_path: Path):
    sizes = []
    with open_fake(tmp_path) as model:
        for _ in model.run.steps(4, rules=[more_at_the_hard_ones]):
            groups = await nb.gather(play_as, SCENARIOS, model=model, group_size=4, progress=False)
            sizes.append([len(one) for one in groups])
            await nb.train_step(model, groups)
        assert sizes == [[4, 4, 4], [4, 8, 4], [4, 8, 4], [4, 4, 4]]
        asked = [e for e in model.run.events() if e["kind"] == "control"]
        assert [(e["step"], e["value"], e["by"]) for e in asked] == [
            (1, {"say two": 8}, "more_at_the_hard_ones"),
            (3, None, "more_at_the_hard_ones"),
        ]


async def test_a_rule_changes_settings_once_each_time(tmp_path: Path):
    used, sizes = [], []

    class Seen(nb.FakeBackend):
        async def optim_step(self, config: nb.TrainConfig) -> dict[str, float]:
            used.append(config.learning_rate)
            return await super().optim_step(config)

    def halve(run: nb.Run) -> dict[str, Any]:
        return {"learning_rate": 1e-4 if run.step < 2 else 5e-5, "group_size": 2 + run.step // 2}

    with open_fake(tmp_path, backend=Seen()) as model:
        for _ in model.run.steps(4, rules=[halve, lambda run: None]):
            groups = await play(model)
            sizes.append(len(groups[0]))
            for group in groups:
                for number, one in enumerate(group):
                    one.reward = float(number)
            await nb.train_step(model, groups)
        assert used == [1e-4, 1e-4, 5e-5, 5e-5] and sizes == [2, 2, 3, 3]
        assert len([e for e in model.run.events() if e["kind"] == "control"]) == 4
    with open_fake(tmp_path) as model:  # a new process goes on with what was set
        assert model.run.controls.settings == {"learning_rate": 5e-5, "group_size": 3}


async def test_sizes_by_hand_are_for_training_only(tmp_path: Path):
    with open_fake(tmp_path) as model:
        model.run.ask("group_sizes", {"say one": 6})
        assert [len(one) for one in await play(model)] == [6, 4, 4]
        assert [len(one) for one in await play(model, split="test")] == [4, 4, 4]
        model.run.ask("group_sizes", None)
        assert [len(one) for one in await play(model)] == [4, 4, 4]


async def test_what_a_rule_may_not_ask_for_stops_the_loop(tmp_path: Path):
    with open_fake(tmp_path) as model:
        for wrong, message in (
            ({"learning_rate": -1}, "must be a number > 0"),
            ({"colour": "red"}, "can be asked for"),
            ({"group_sizes": {"a": 0}}, "whole number >= 1"),
            ({"group_sizes": 3}, "numbers by scenario id"),
        ):
            with pytest.raises(nb.ConfigurationError, match=message):
                next(model.run.steps(3, rules=[lambda run, wrong=wrong: wrong]))
        assert not [e for e in model.run.events() if e["kind"] == "control"]
