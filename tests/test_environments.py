"""Does every environment keep the protocol: found, loaded, fair to its splits, unmoved by hostile agents?"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hostile import problems
from hostile_agents import HostileAgent, hostile_replies

import artnb_environments
from artnb import FakeBackend, Model, gather, train_step
from artnb.environments import Environment, available_environments, load_environment
from artnb.errors import ConfigurationError
from artnb.tool_calls import parse_hermes
from artnb.types import Scenario, Trajectory
from artnb_environments import read_tagged, split_seeds

FOLDERS = Path(artnb_environments.__path__[0])
NAMES = sorted(path.parent.name for path in FOLDERS.glob("*/__init__.py"))


def test_the_bundled_environments_are_found_from_their_folders() -> None:
    assert {"email_search", "game_2048", "tool_lookup"} <= set(NAMES) <= set(available_environments())


def test_an_unknown_name_lists_the_known_ones_and_suggests_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"'game2048'.*mean 'game_2048'.*game_2048, .*tool_lookup"):
        load_environment("game2048")


def test_an_unknown_option_names_the_allowed_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'boards'.*mean 'board'.*board, win_tile, max_turns"):
        load_environment("game_2048", boards=3)


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'4x4-256'.*tile16, 3x3-32, 4x4-128"):
        load_environment("game_2048", preset="4x4-256")


def test_an_option_given_beside_a_preset_wins() -> None:
    environment = load_environment("game_2048", preset="3x3-32", max_turns=7)
    assert (environment.variant["board"], environment.variant["max_turns"]) == (3, 7)


@pytest.mark.parametrize("name", NAMES)
def test_splits_are_disjoint_and_scenarios_reproducible(name: str) -> None:
    environment = load_environment(name)
    ids, seeds = set[str](), set[int]()
    for split in ("train", "validation", "test"):
        scenarios = [s for seed in range(3) for s in environment.scenarios(split, 40, seed=seed)]
        assert {s.split for s in scenarios} == {split}
        assert not ids & {s.id for s in scenarios} and not seeds & {s.seed for s in scenarios}
        ids |= {s.id for s in scenarios}
        seeds |= {s.seed for s in scenarios}
        assert environment.scenarios(split, 40) == scenarios[:40]
        assert environment.scenarios(split, 7) == scenarios[:7]
    assert len(ids) == 360


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_round_trips_through_json_and_holds_every_option(name: str) -> None:
    environment = load_environment(name, examples=1)
    scenario = environment.scenarios("test", 1)[0]
    assert Scenario.from_json(json.loads(json.dumps(scenario.to_json()))) == scenario
    assert environment.variant.items() <= scenario.task.items()
    assert scenario.id != load_environment(name).scenarios("test", 1)[0].id


@pytest.mark.parametrize("name", NAMES)
def test_baselines_repeat_themselves_and_carry_the_metrics(name: str) -> None:
    environment = load_environment(name)
    assert {"random"} < set(environment.baselines)
    for scenario in environment.scenarios("test", 3):
        for policy, reward in environment.baselines.items():
            trajectory = environment.play(policy, scenario)
            assert reward(scenario) == trajectory.reward
            assert set(trajectory.metrics) == set(environment.metrics)
            json.dumps(trajectory.to_json())


@pytest.mark.parametrize("name", NAMES)
def test_the_card_explains_every_option_metric_and_baseline(name: str) -> None:
    environment = load_environment(name)
    for word in [*environment.variant, *environment.metrics, *environment.policies]:
        assert f"`{word}`" in environment.card
    assert name in repr(environment)


def reward_range(environment: Environment) -> tuple[float, float]:
    """What the card says: ``Reward range: -1 to 1``."""
    found = re.search(r"[Rr]eward range: ([-−]?[\d.]+) to ([-−]?\d+(?:\.\d+)?)", environment.card)
    assert found, f"the card of {environment.name} does not say 'Reward range: A to B' of its default options"
    low, high = (float(text.replace("−", "-")) for text in found.groups())
    return low, high


@pytest.mark.parametrize("name", NAMES)
def test_baselines_stay_inside_the_card_s_range_and_an_oracle_reaches_its_top(name: str) -> None:
    environment = load_environment(name)
    low, high = reward_range(environment)
    rewards = {
        policy: [reward(scenario) for scenario in environment.scenarios("test", 12)]
        for policy, reward in environment.baselines.items()
    }
    assert all(low <= reward <= high for played in rewards.values() for reward in played)
    if "oracle" in rewards:
        assert max(rewards["oracle"]) >= low + 0.95 * (high - low)
        assert fmean(rewards["oracle"]) >= max(map(fmean, rewards.values())) - 1e-9


# ---- hostile agents -----------------------------------------------------------------------------


def _styles() -> Iterator[tuple[str, str, str]]:
    """Every environment with a dialogue, in every style of reply that it knows."""
    for name in NAMES:
        variant = load_environment(name).variant
        option = next((one for one in ("style", "move_style") if one in variant), "")
        for value in ("tags", "tag", "tools", "word", "text") if option else ("",):
            try:
                environment = load_environment(name, **({option: value} if option else {}))
            except ConfigurationError:
                continue
            if environment.dialogue is not None:
                yield name, option, value


@pytest.mark.parametrize(("name", "option", "value"), list(_styles()))
async def test_hostile_agents_get_a_reward_in_the_card_s_range_and_every_metric(
    name: str, option: str, value: str
) -> None:
    environment = load_environment(name, **({option: value} if option else {}))
    low, high = reward_range(environment)
    scenario = environment.scenarios("test", 1)[0]
    for kind, replies in hostile_replies(environment).items():
        for start in range(len(replies)):  # an episode may end with the first
            agent = HostileAgent(replies[start:] + replies[:start])
            trajectory = (await environment.rollout(agent, scenario)).finish()
            what = f"{kind}, from reply {start}"
            assert trajectory.reward is not None and low <= trajectory.reward <= high, what
            assert set(trajectory.metrics) == set(environment.metrics), what
            assert all(math.isfinite(number) for number in trajectory.metrics.values()), what
            assert trajectory.turns and _answered(trajectory), what
            assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))) == trajectory, what
            if environment.render is not None:
                assert not problems(environment.render(trajectory)), what


def _answered(trajectory: Trajectory) -> bool:
    """Whether each call of an answered turn has a result of its own, where there are tools."""
    for history in (trajectory, *trajectory.additional_histories):
        messages = history.messages() if history.tools else []
        for place, message in enumerate(messages[:-1]):
            asked = [call["id"] for call in message.get("tool_calls") or []]
            told = [m.get("tool_call_id") for m in messages[place + 1 : place + 1 + len(asked)]]
            if asked and asked != told:
                return False
    return True


def test_a_call_nested_too_deeply_is_a_call_that_cannot_be_read() -> None:
    for depth in (*range(900, 1100), 100_000):
        value = "[" * depth + "]" * depth
        for text in (
            f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>',
            f"<tool_call>{value}</tool_call>",
        ):
            read = parse_hermes(text)
            assert bool(read.calls) != bool(read.error)
    assert "not JSON" in (read.error or "")


@pytest.mark.parametrize("name", NAMES)
async def test_a_step_of_gather_and_train_goes_through(name: str, tmp_path: Path) -> None:
    environment = load_environment(name)
    backend = FakeBackend(max_context=10**6)
    with Model(run=name, root=tmp_path, backend=backend) as model:
        scenarios = environment.scenarios("train", 2)
        groups = await gather(environment.rollout, scenarios, model=model, group_size=3, progress=False)
        assert [len(group) for group in groups] == [3, 3]
        for trajectory in groups.trajectories:
            assert trajectory.error is None and trajectory.turns
            assert set(environment.metrics) <= set(trajectory.metrics)
        await train_step(model, groups)
        assert model.run.step == 1


def test_an_unknown_split_baseline_or_count_is_an_error() -> None:
    environment = load_environment("tool_lookup")
    with pytest.raises(ConfigurationError, match="train, validation, test"):
        environment.scenarios("dev", 1)
    with pytest.raises(ConfigurationError, match="0 or more"):
        environment.scenarios("test", -1)
    with pytest.raises(ConfigurationError, match=r"'oracel'.*mean 'oracle'"):
        environment.play("oracel", environment.scenarios("test", 1)[0])


def test_seeds_of_a_split_never_repeat() -> None:
    assert len(set(split_seeds("train", 5000))) == 5000


@pytest.mark.parametrize(
    ("text", "cut_off", "content"),
    [
        ("<move>left</move>", False, "left"),
        ("<MOVE>Left</MOVE>", False, "left"),
        ("<move>left", False, "left"),
        ("<move>left", True, None),
        ("<move>left</move>", True, "left"),
        ("<move>left</mov", False, None),
        ("so <move>left", False, None),
        ("<move>leftright", False, None),
        (None, False, None),
    ],
)
def test_a_tagged_reply_is_read_with_or_without_its_closing_tag(
    text: str | None, cut_off: bool, content: str | None
) -> None:
    assert read_tagged(text, "move", "left|right", cut_off=cut_off) == content


THIRD_PARTY = """
from artnb.types import Scenario, Trajectory

def scenarios(split, n, seed=0):
    return [Scenario(f"echo/{split}/{i}", split, i) for i in range(n)]

async def rollout(model, scenario):
    return Trajectory(reward=1.0)

baselines = {"half": lambda scenario: 0.5}
"""


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution that brings one environment and wants another's name."""
    for name in ("echo", "game_2048", "_shared"):
        (tmp_path / "other_environments" / name).mkdir(parents=True)
        (tmp_path / "other_environments" / name / "__init__.py").write_text(THIRD_PARTY)
    (tmp_path / "other_environments" / "__init__.py").write_text("raise RuntimeError('imported to list')")
    metadata = tmp_path / "other-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    points = "[artnb.environments]\nanother = other_environments\ngone = no_such_package\n"
    (metadata / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)


def test_other_packages_bring_environments_that_are_listed_without_importing(third_party: Any) -> None:
    names = available_environments()
    assert "echo" in names and "_shared" not in names
    assert "board" in load_environment("game_2048").variant, "a bundled name stays the bundled one's"


def test_an_environment_without_options_needs_only_scenarios_and_a_rollout(
    third_party: Any, tmp_path: Path
) -> None:
    (tmp_path / "other_environments" / "__init__.py").write_text("")
    environment = load_environment("echo")
    scenario = environment.scenarios("test", 2)[1]
    assert environment.baselines["half"](scenario) == 0.5
    assert environment.play("half", scenario).scenario_id == "echo/test/1"
    with pytest.raises(ConfigurationError, match="There are none"):
        load_environment("echo", size=3)
