"""How good is a team without a model? Guesses, heads of reports alone, whole reports handed up, an oracle."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Coroutine
from typing import Any

from artnb import ConfigurationError, Scenario, Trajectory, Turn
from artnb_environments.research_team import calls
from artnb_environments.research_team.documents import fact
from artnb_environments.research_team.rollout import STOP, play, question
from artnb_environments.research_team.team import Agent
from artnb_environments.said import said_turn

Move = tuple[Any, ...]
"""A call's name and arguments."""
Policy = Callable[[Agent, random.Random], Move]
_OF_A_READ = 30
"""Characters around a part: the call, and the part's number."""
NONE = "none"


def guess(agent: Agent, draw: random.Random) -> Move:
    """Numbers from 10 to 99 at once."""
    return "answer", ", ".join(f"{draw.randint(10, 99)}" for _ in agent.team.library.documents)


def truncating(agent: Agent, draw: random.Random) -> Move:
    """Reads of each report what one agent can hold, and guesses the rest."""
    return _lead(agent, draw) if not agent.number else _read_on(agent, agent.parts[: _fitting(agent)])


def verbatim(agent: Agent, draw: random.Random) -> Move:
    """Has every report handed up word for word, which no agent can hold."""
    if not agent.number:
        return _lead(agent, draw)
    if agent.may_delegate:
        reports = [below.report or NONE for below in _called(agent)]
        part = agent.parts.start + len(reports) + 1
        if part <= agent.parts.stop:
            return "share", part, part, agent.instruction
        return "report", " ".join(reports)
    if agent.next_part < agent.parts.stop:
        return ("read",)
    return "report", " ".join(_texts(agent))


def oracle(agent: Agent, draw: random.Random) -> Move:
    """Shares what one agent cannot hold, and reports the value alone."""
    if not agent.number:
        return _lead(agent, draw)
    size = _fitting(agent)
    if len(agent.parts) <= size or not agent.may_delegate:
        return _read_on(agent, agent.parts)
    reports = [below.report or NONE for below in _called(agent)]
    found = next((report for report in reports if report != NONE), None)
    first = agent.parts.start + size * len(reports) + 1
    if found is None and first <= agent.parts.stop:
        return "share", first, min(first + size - 1, agent.parts.stop), agent.instruction
    return "report", found or NONE


def _lead(agent: Agent, draw: random.Random) -> Move:
    """Delegate report after report, then answer with what was reported, or a guess."""
    reports = [below.report for below in _called(agent)]
    if len(reports) < len(agent.team.library.documents):
        return "delegate", len(reports) + 1, question(agent.team.library.item)
    values = [report if re.fullmatch("[0-9]+", report or "") else draw.randint(10, 99) for report in reports]
    return "answer", ", ".join(map(str, values))


def _read_on(agent: Agent, parts: range) -> Move:
    """Read until the value is told, and report it."""
    wanted = re.escape(fact(agent.team.library.item, 0)).replace("0", "([0-9]+)")
    found = re.search(wanted, " ".join(_texts(agent)))
    if found:
        return "report", found.group(1)
    return ("read",) if agent.next_part < parts.stop else ("report", NONE)


def _fitting(agent: Agent) -> int:
    """How many parts an agent can hold."""
    variant = agent.variant
    return max(1, (variant.context_budget - 100) // (variant.part_length + _OF_A_READ))


def _called(agent: Agent) -> list[Agent]:
    return [one for one in agent.team.agents if one.parent is agent]


def _texts(agent: Agent) -> list[str]:
    """The parts that an agent has read."""
    return list(agent.team.library.documents[agent.document].parts[agent.parts.start : agent.next_part])


def _player(policy: Policy) -> Callable[[Scenario], Trajectory]:
    def player(scenario: Scenario) -> Trajectory:
        draw = random.Random(f"baseline/{scenario.seed}")

        async def say(agent: Agent) -> Turn:
            message = calls.written(agent.variant.style, *policy(agent, draw), number=agent.turns)
            return Turn((), (), (), 0, "stop", message)

        root = _finished(play(scenario, say))[0]
        root.messages_and_choices = [
            item.message if isinstance(item, Turn) else item for item in root.messages_and_choices
        ]
        return root

    return player


def _finished(episode: Coroutine[Any, Any, list[Trajectory]]) -> list[Trajectory]:
    """The outcome of an episode whose agents never wait: no event loop is needed."""
    try:
        episode.send(None)
    except StopIteration as ended:
        trajectories: list[Trajectory] = ended.value
        return trajectories
    raise AssertionError("a scripted agent waits for nothing")


baselines: dict[str, Callable[[Scenario], Trajectory]] = {
    "random": _player(guess),
    "truncating": _player(truncating),
    "verbatim": _player(verbatim),
    "oracle": _player(oracle),
}


async def oracle_episode(model: Any, scenario: Scenario) -> list[Trajectory]:
    """The oracle's episode as if ``model`` had sampled it, for the style ``tags``: one trajectory an agent.

    Add each to the group of its seat and train with ``loss="reinforce"``. Raises ConfigurationError for the
    style ``tools``.
    """
    if scenario.task["style"] != "tags":
        raise ConfigurationError("the oracle writes text: load_environment(..., style='tags')")
    draw = random.Random(f"oracle/{scenario.seed}")

    async def say(agent: Agent) -> Turn:
        text = calls.written("tags", *oracle(agent, draw))["content"]
        return said_turn(model, agent.items, str(text), STOP)

    trajectories = await play(scenario, say)
    for trajectory in trajectories:
        trajectory.metadata["played_by"] = "script"
    return [trajectory.finish() for trajectory in trajectories]
