"""Which environments are installed, and how is one loaded? By folder name, from the packages that the
entry-point group ``artnb.environments`` names.

An environment is a subpackage with these names:

``scenarios(split, n, seed=0, **variant) -> list[Scenario]``
    Starting points; ``train``, ``validation`` and ``test`` have none in common.
``async rollout(model, scenario) -> Trajectory``
    Plays one episode. Everything it needs stands in ``scenario.task``.
``Variant`` (optional)
    A frozen dataclass with a default for every option, checked in ``__post_init__``.
``presets`` (optional)
    Named dicts of options.
``baselines`` (optional)
    Functions of a scenario that play without a model and return a reward or a Trajectory.
``metrics``, ``card``, ``render`` (optional)
    Names of the metrics that every trajectory carries, the README text (it names every option, metric and
    baseline in backquotes, and says ``Reward range: 0 to 1``), and ``render(trajectory) -> str``, HTML for
    the browser; every text of others passes through ``artnb.esc``.
``dialogue(scenario) -> Dialogue`` (optional)
    An episode move by move: what the agent reads first, and what the environment answers it.
    ``artnb.chat`` plays it with a person, and ``rollout = artnb.rollout_of(dialogue)`` is all the rollout
    that most environments need.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from artnb.dialogue import Dialogue
from artnb.errors import ConfigurationError
from artnb.types import Scenario, Trajectory

ENTRY_POINT_GROUP = "artnb.environments"


@dataclass(frozen=True)
class Environment:
    """One environment with its variant bound: scenarios, a rollout, and scores to compare with."""

    name: str
    variant: Mapping[str, Any]
    """Every option of the environment with its value."""
    rollout: Callable[[Any, Scenario], Awaitable[Any]]
    """``await rollout(model, scenario)`` plays one episode; hand it to ``gather`` or ``evaluate``."""
    make_scenarios: Callable[..., list[Scenario]] = field(repr=False)
    """The environment's own function, without the variant; see ``scenarios``."""
    policies: Mapping[str, Callable[[Scenario], float | Trajectory]] = field(default_factory=dict)
    """The baselines as the environment wrote them; see ``play`` and ``baselines``."""
    metrics: tuple[str, ...] = ()
    card: str = ""
    """The environment's README: the task, the options, and what a good score is."""
    render: Callable[[Trajectory], str] | None = None
    dialogue: Callable[[Scenario], Dialogue] | None = None
    """An episode move by move, for ``artnb.chat``; None where the environment offers none."""

    def scenarios(self, split: str, n: int, seed: int = 0) -> list[Scenario]:
        """The first ``n`` scenarios of a split; the same arguments always give the same list."""
        return self.make_scenarios(split, n, seed=seed, **self.variant)

    def play(self, baseline: str, scenario: Scenario) -> Trajectory:
        """One episode of a baseline, without a model."""
        outcome = _pick(self.policies, baseline, f"baseline of {self.name}")(scenario)
        if isinstance(outcome, Trajectory):
            return outcome
        return Trajectory(reward=float(outcome), scenario_id=scenario.id)

    @property
    def baselines(self) -> dict[str, Callable[[Scenario], float]]:
        """Name -> function of a scenario that returns the baseline's reward."""

        def rewards_of(name: str) -> Callable[[Scenario], float]:
            return lambda scenario: float(self.play(name, scenario).reward or 0.0)

        return {name: rewards_of(name) for name in self.policies}

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.variant.items())
        return f"Environment({self.name}: {options}; baselines: {', '.join(self.policies) or 'none'})"


def available_environments() -> list[str]:
    """Names that ``load_environment`` knows. Nothing is imported to find them."""
    return sorted(_modules())


def load_environment(name: str, *, preset: str | None = None, **variant: Any) -> Environment:
    """Load an environment, with options of its own.

    ``load_environment("game_2048", preset="3x3-32", history="full")`` starts from a preset and
    changes one option. An unknown name, preset or option is an error that lists the known ones.
    """
    module = importlib.import_module(_pick(_modules(), name, "environment"))
    presets = getattr(module, "presets", {})
    options = dict(_pick(presets, preset, f"preset of {name}")) if preset is not None else {}
    return Environment(
        name=name,
        variant=_complete_variant(name, module, options | variant),
        rollout=module.rollout,
        make_scenarios=module.scenarios,
        policies=dict(getattr(module, "baselines", {})),
        metrics=tuple(getattr(module, "metrics", ())),
        card=getattr(module, "card", ""),
        render=getattr(module, "render", None),
        dialogue=getattr(module, "dialogue", None),
    )


def _modules() -> dict[str, str]:
    """Environment name -> the module that holds it; no package takes the name of a bundled one."""
    modules: dict[str, str] = {}
    found_points = entry_points(group=ENTRY_POINT_GROUP)
    for entry_point in sorted(found_points, key=lambda e: (e.name != "bundled", e.name)):
        spec = importlib.util.find_spec(entry_point.module)
        for found in pkgutil.iter_modules((spec and spec.submodule_search_locations) or []):
            if found.ispkg and not found.name.startswith("_"):
                modules.setdefault(found.name, f"{entry_point.module}.{found.name}")
    return modules


def _complete_variant(name: str, module: ModuleType, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the environment's defaults filled in; its ``Variant`` checks the values."""
    if not hasattr(module, "Variant"):
        for option in options:
            _pick({}, option, f"option of {name}")
        return {}
    known = [option.name for option in dataclasses.fields(module.Variant)]
    for option in options:
        _pick(dict.fromkeys(known), option, f"option of {name}")
    return dataclasses.asdict(module.Variant(**options))


def _pick(known: Mapping[str, Any], name: str, what: str) -> Any:
    if name in known:
        return known[name]
    raise ConfigurationError(f"unknown {what}: {name!r}.{_nearest(name, known)} {_list(known)}")


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def _list(known: Iterable[str]) -> str:
    names = ", ".join(known)
    return f"There are: {names}." if names else "There are none."
