"""How does one begin an environment of one's own? With a small package that works, to be changed."""

from __future__ import annotations

import keyword
import re
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from string import Template

from artnb.environments import ENTRY_POINT_GROUP, available_environments
from artnb.errors import ConfigurationError

_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")

_PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "$dashed-environment"
version = "0.1.0"
description = "An environment for artnb"
requires-python = ">=3.11"
dependencies = ["artnb"]

[project.optional-dependencies]
test = ["pytest>=8.3", "pytest-asyncio>=1.0"]

# Every folder in the package that this names is an environment, by its folder's name.
[project.entry-points."artnb.environments"]
$name = "${name}_environments"

[tool.hatch.build.targets.wheel]
packages = ["${name}_environments"]

[tool.pytest.ini_options]
asyncio_mode = "auto"
asyncio_default_fixture_loop_scope = "function"
"""

_MODULE = '''\
"""Which of two numbers is larger? Change it into your own task."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from artnb import ConfigurationError, Dialogue, Scenario, Trajectory, Turn, rollout_of

card = (files(__package__) / "README.md").read_text()
metrics = ("right", "valid")
SYSTEM = "Answer with the larger number, and nothing else."
SPLITS = {"train": (0, 1), "validation": (2,), "test": (3,)}  # by the sum of the numbers, modulo 4


@dataclass(frozen=True)
class Variant:
    """The options of this environment."""

    digits: int = 2
    """Digits of the numbers, 1 to 9."""
    examples: int = 2
    """Worked questions in the prompt; they are never trained on."""
    max_tokens: int = 8
    """Longest reply."""

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 9:
            raise ConfigurationError(f"digits must be 1 to 9, got {self.digits}")


presets = {"hard": {"digits": 4, "examples": 0}}


def scenarios(split: str, n: int, seed: int = 0, **variant: Any) -> list[Scenario]:
    """Starting points; no split has a pair of another. The task holds everything that the rollout needs."""
    if split not in SPLITS:
        raise ConfigurationError(f"split must be {', '.join(SPLITS)}; got {split!r}")
    options = dataclasses.asdict(Variant(**variant))
    changed = ",".join(f"{o}={v}" for o, v in options.items() if v != getattr(Variant, o))
    made = []
    for number in range(n):
        name = f"$name({changed})/{split}/{seed}/{number}"
        draw = random.Random(name)
        pair = draw_pair(draw, options["digits"], split)
        made.append(Scenario(name, split, draw.randrange(2**32), {**options, "pair": pair}))
    return made


def draw_pair(draw: random.Random, digits: int, split: str) -> list[int]:
    """Two different numbers of a split."""
    while True:
        pair = draw.sample(range(10**digits), 2)
        if sum(pair) % 4 in SPLITS[split]:
            return pair


class Episode:
    """One question, whoever answers it."""

    def __init__(self, scenario: Scenario) -> None:
        self.pair = scenario.task["pair"]
        self.answer: int | None = None

    def read(self, text: str) -> None:
        """Take a reply; what is no number of at most nine digits counts as none."""
        words = text.strip().rstrip(".")
        self.answer = int(words) if words.isascii() and words.isdecimal() and len(words) <= 9 else None

    def score(self, trajectory: Trajectory) -> Trajectory:
        """1 for the larger number, 0.1 for the other one, else 0."""
        is_valid = self.answer in self.pair
        is_right = self.answer == max(self.pair)
        trajectory.reward = 1.0 if is_right else 0.1 if is_valid else 0.0
        trajectory.metrics = {"right": float(is_right), "valid": float(is_valid)}
        return trajectory


def question(pair: list[int]) -> str:
    return f"{pair[0]} or {pair[1]}?"


def dialogue(scenario: Scenario) -> Dialogue:
    """What the agent reads first, and what it is told after each move: here nothing, so one move is all."""
    episode = Episode(scenario)
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for number in range(scenario.task["examples"]):
        pair = draw_pair(random.Random(number), scenario.task["digits"], "train")
        messages.append({"role": "user", "content": question(pair)})
        messages.append({"role": "assistant", "content": str(max(pair))})
    messages.append({"role": "user", "content": question(episode.pair)})

    def respond(turn: Turn) -> list[dict[str, Any]]:
        episode.read(str(turn.message.get("content") or ""))
        return []  # the next observation would stand here

    options = {"max_tokens": scenario.task["max_tokens"]}
    return Dialogue(messages, respond, options=options, score=episode.score)


rollout = rollout_of(dialogue)


def _played(scenario: Scenario, text: str) -> Trajectory:
    episode = Episode(scenario)
    episode.read(text)
    reply = {"role": "assistant", "content": text}
    asked = {"role": "user", "content": question(episode.pair)}
    return episode.score(Trajectory([asked, reply], scenario_id=scenario.id))


def play_random(scenario: Scenario) -> Trajectory:
    """One of the two."""
    return _played(scenario, str(random.Random(scenario.seed).choice(scenario.task["pair"])))


def play_oracle(scenario: Scenario) -> Trajectory:
    """The larger one."""
    return _played(scenario, str(max(scenario.task["pair"])))


baselines = {"random": play_random, "oracle": play_oracle}
'''

_CARD = """\
# $name

Which of two numbers is larger? One reply: the number.

Reward range: 0 to 1. 1 for the larger number, 0.1 for the other one, 0 for anything else.
Metrics: `right`, `valid` (one of the two numbers).

Options: `digits` (2) of the numbers, `examples` (2) in the prompt, `max_tokens` (8) of a reply.

Baselines: `random` takes one of the two (0.55), `oracle` the larger one (1.0).

Data: none; the questions are drawn. The sum of the two numbers decides the split that a question is of.
"""

_TEST = '''\
"""Does the environment play, with and without a model?"""

from __future__ import annotations

from pathlib import Path

import artnb as nb
import pytest


@pytest.fixture
def environment() -> nb.Environment:
    return nb.load_environment("$name")


def test_splits_have_nothing_in_common(environment: nb.Environment) -> None:
    """By what is asked, not only by id: the other order of two numbers is the same question."""
    drawn = [environment.scenarios(split, 500) for split in ("train", "validation", "test")]
    asked = [{tuple(sorted(scenario.task["pair"])) for scenario in split} for split in drawn]
    assert sum(map(len, asked)) == len(set.union(*asked)) > 500
    assert drawn[0] == environment.scenarios("train", 500)


def test_baselines_leave_room(environment: nb.Environment) -> None:
    heldout = environment.scenarios("test", 200)
    assert nb.evaluate_baseline(environment, "oracle", heldout).mean_reward == 1.0
    found = nb.evaluate_baseline(environment, "random", heldout).mean_reward
    assert found is not None and 0.4 < found < 0.7


@pytest.mark.parametrize("text", ["", "7", "both", "9" * 5000, "\\ud83d", "<script>"])
async def test_any_reply_gets_a_reward(environment: nb.Environment, text: str, tmp_path: Path) -> None:
    backend = nb.FakeBackend(script=lambda prompt, version: text.encode("utf-8", "replace").decode())
    with nb.Model(run="$name", root=tmp_path, backend=backend) as model:
        trajectory = await environment.rollout(model, environment.scenarios("train", 1)[0])
    assert trajectory.reward is not None and 0 <= trajectory.reward <= 1
    assert set(trajectory.metrics) == set(environment.metrics)
'''

_FILES = {
    "pyproject.toml": _PYPROJECT,
    "${name}_environments/__init__.py": '"""Environments for artnb; each folder is one."""\n',
    "${name}_environments/$name/__init__.py": _MODULE,
    "${name}_environments/$name/README.md": _CARD,
    "tests/test_$name.py": _TEST,
}


def new_environment(name: str, folder: str | Path | None = None) -> Path:
    """Write a working package with one environment, to be changed into another; returns its folder.

    name: the environment's, lower-case letters, digits and ``_``. folder: where the package goes; None is
    ``./<name>``. Raises ConfigurationError for a name that cannot be or is taken, and for a folder that has
    something in it.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigurationError(
            f"an environment's name is lower-case letters, digits and _, a letter first; got {name!r}"
        )
    points = {entry_point.name for entry_point in entry_points(group=ENTRY_POINT_GROUP)}
    if name in available_environments() or name in points or find_spec(f"{name}_environments"):
        raise ConfigurationError(f"the name {name!r} is taken by something installed; take another")
    place = Path(name if folder is None else folder)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigurationError(f"{place} is there already and not empty")
    words = {"name": name, "dashed": name.replace("_", "-")}
    for path, text in _FILES.items():
        target = place / Template(path).substitute(words)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(text).safe_substitute(words), encoding="utf-8")
    return place
