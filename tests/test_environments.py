"""Is every installed environment found, loaded with its variant, and fair to its held-out splits?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import artnb_environments
from artnb.environments import available_environments, load_environment
from artnb.errors import ConfigurationError
from artnb.types import Scenario
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
