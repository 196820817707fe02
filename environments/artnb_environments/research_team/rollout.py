"""What do the agents see and say? Each its own prompt and budget; a call of one is the work of another."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from artnb import History, Scenario, Trajectory, Turn
from artnb_environments.research_team import calls
from artnb_environments.research_team.calls import Call
from artnb_environments.research_team.documents import Variant, fact
from artnb_environments.research_team.team import Agent, Message, Team

Say = Callable[[Agent], Awaitable[Turn]]
"""Where an agent's next reply comes from."""

_ROOT = "You lead a team and answer a question about reports that you cannot read yourself."
_READER = "You read parts of a report for your caller. A part that does not tell a value says nothing of it."
STOP = ["</call>"]


def question(item: str) -> str:
    return f"What did the {item} cost?"


def system(agent: Agent) -> str:
    names, variant = calls.tools_of(agent), agent.variant
    budget = f" You can hold {variant.context_budget} characters. One call a turn"
    told = f":\n{calls.described(names)}" if variant.style == "tags" else "."
    return (_READER if agent.number else _ROOT) + budget + told


def opening(agent: Agent) -> list[Message]:
    """System, worked examples, and the task. All but the task is the same in every episode
    of a variant, for agents with the same tools."""
    messages = [{"role": "system", "content": system(agent)}]
    for number in range(agent.variant.examples):
        messages += _worked(agent, number)
    return [*messages, {"role": "user", "content": task(agent)}]


def task(agent: Agent) -> str:
    if not agent.number:
        library = agent.team.library
        reports = ", ".join(f"{n + 1} {d.town}" for n, d in enumerate(library.documents))
        return f"{question(library.item)} Reports: {reports}."
    town = agent.team.library.documents[agent.document].town
    first, last = agent.parts.start + 1, agent.parts.stop
    return f"Report of {town}, parts {first} to {last}. Task: {agent.instruction}"


_EXAMPLES = (("ferry", "Oslin", 31, 2), ("bell tower", "Pernick", 84, 1))
"""Item, town, value and the part that tells it; items and towns that occur in no scenario."""


def _worked(agent: Agent, number: int) -> list[Message]:
    """One short example."""
    item, town, value, place = _EXAMPLES[number]
    told = f"Report of {town}, parts 1 to 2. Task: {question(item)}"
    nothing = (("read",), "Part 1: A resident asked about the drains once more.")
    steps: list[tuple[tuple[Any, ...], str]] = [
        *[nothing] * (place - 1),
        (("read",), f"Part {place}: {fact(item, value)}"),
        (("report", value), "thank you"),
    ]
    if not agent.number:
        told = f"{question(item)} Reports: 1 {town}."
        steps = [(("delegate", 1, question(item)), f"Agent 1: {value}"), (("answer", value), "thank you")]
    messages: list[Message] = [{"role": "user", "content": told}]
    for place, (call, result) in enumerate(steps):
        said = calls.written(agent.variant.style, *call, number=10 * number + place)
        messages += [said, *calls.results(Turn((), (), (), 0, "stop", said), result)]
    is_text = agent.variant.style == "tags"
    return messages[:-1] if is_text else messages  # a call needs its result before the next user's turn


async def rollout(model: Any, scenario: Scenario) -> list[Trajectory]:
    """Play one episode: a trajectory for every agent that said something, the root's first.

    ``seat`` is ``root``, or the report and the depth, so that ``gather`` compares like with like;
    ``parent_id`` names the trajectory of the agent that called.
    """

    async def say(agent: Agent) -> Turn:
        tools = agent.trajectory.tools
        offered = {"tools": tools} if tools else {}
        messages = History(list(agent.items)).messages()
        response = await model.client.chat.completions.create(
            model=model.name, messages=messages, **offered, **options_of(agent.variant)
        )
        return Turn.from_choice(response.choices[0])

    return await play(scenario, say)


async def rollout_root(model: Any, scenario: Scenario) -> Trajectory:
    """The same, and the root's trajectory alone: for ``evaluate``, whose means are over all it is given."""
    root, *_ = await rollout(model, scenario)
    return root


def options_of(variant: Variant) -> dict[str, Any]:
    """Of every request."""
    if variant.style == "tags":
        return {"max_tokens": variant.max_tokens or 64, "stop": STOP}
    return {"max_tokens": variant.max_tokens or 128}


async def play(scenario: Scenario, say: Say) -> list[Trajectory]:
    """One episode of agents whose replies come from ``say``."""
    team = Team(scenario)
    root = team.agent(None, question(team.library.item))
    await _begin(root, say)
    return team.trajectories()


async def _begin(agent: Agent, say: Say) -> None:
    """Give a new agent its opening, and let it work."""
    if agent.variant.style == "tools":
        agent.trajectory.tools = calls.schemas(calls.tools_of(agent))
    agent.items.extend(opening(agent))
    await _work(agent, say)


async def _work(agent: Agent, say: Say) -> None:
    """Reply after reply until the agent reports, answers, or is ended."""
    while not agent.ended_by:
        if agent.turns >= agent.variant.max_turns:
            agent.ended_by = "turns"
            return
        turn = await say(agent)
        agent.says(turn)
        if agent.ended_by:
            return
        try:
            call = calls.read_call(turn, agent.variant.style, calls.tools_of(agent))
            text = await _make(agent, call, say)
        except ValueError as error:
            agent.bad_calls += 1
            text = f"Error: {error}"
            if agent.variant.invalid == "end":
                agent.ended_by = "invalid"
        if not agent.ended_by and agent.team.is_out_of_tokens:  # the agents below have used them up
            agent.ended_by = "tokens"
        if not agent.ended_by:
            agent.hears(calls.results(turn, text))


async def _make(agent: Agent, call: Call, say: Say) -> str:
    """Make a call; returns what the agent is told. Raises ValueError for one that cannot be made."""
    team, name, given = agent.team, call.name, call.arguments
    if name == "read":
        return _read(agent)
    if name == "report":
        agent.report, agent.ended_by = given[0], "report"
        return ""
    if name == "answer":
        agent.team.answer = _values(given[0], len(team.library.documents))
        agent.ended_by = "answer"
        return ""
    if name == "ask":
        return await _ask(agent, given[0], given[1], say)
    if name == "delegate":
        number, instruction = given
        if not 1 <= number <= len(team.library.documents):
            raise ValueError(f"report must be 1 to {len(team.library.documents)}")
        below = team.agent(agent, instruction, number - 1, range(team.variant.parts))
    else:
        first, last, instruction = given
        if not agent.parts.start < first <= last <= agent.parts.stop:
            raise ValueError(f"parts must be within {agent.parts.start + 1} to {agent.parts.stop}")
        below = team.agent(agent, instruction, agent.document, range(first - 1, last))
    await _begin(below, say)
    return _outcome(below)


def _read(agent: Agent) -> str:
    if agent.next_part >= agent.parts.stop:
        return "There is no further part."
    part = agent.next_part
    agent.next_part += 1
    return f"Part {part + 1}: {agent.team.library.documents[agent.document].parts[part]}"


async def _ask(agent: Agent, number: int, asked: str, say: Say) -> str:
    """Let an agent that reported go on with its conversation."""
    below = next((one for one in agent.team.agents if one.number == number and one.parent is agent), None)
    if below is None or below.ended_by != "report":
        raise ValueError("there is no such agent that reported to you")
    last = below.trajectory.turns[-1]
    below.ended_by = ""
    below.hears(calls.results(last, asked))
    await _work(below, say)
    return _outcome(below)


def _outcome(below: Agent) -> str:
    if below.ended_by != "report":
        return f"Agent {below.number} ended without a report ({below.ended_by})."
    return f"Agent {below.number}: {below.report}"


def _values(text: str, expected: int) -> tuple[int, ...]:
    if not re.fullmatch(r"-?[0-9]{1,9}(?:[, ]{1,3}-?[0-9]{1,9}){0,30}", text.strip()):
        raise ValueError(f"answer with {expected} numbers, with commas between")
    return tuple(map(int, re.findall(r"-?[0-9]+", text)))
