"""How does one rollout serve every environment? An episode is a dialogue: the agent moves, the
environment answers, until it says nothing more."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from artnb.types import History, Message, Scenario, Trajectory, Turn

Item = Message | Turn


@dataclass
class Dialogue:
    """One episode, move by move: what ``rollout_of`` plays, and what a person follows in ``artnb.chat``."""

    messages: list[Message]
    """What the agent reads before its first move."""
    respond: Callable[[Turn], list[Message] | Awaitable[list[Message]]]
    """What the environment says to a move: results of its tool calls, the next observation. Nothing when
    the episode has ended (in ``artnb.chat``: or when it is the person's turn)."""
    tools: list[dict[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of every request, as the rollout makes it: ``max_tokens``, ``stop``."""
    forgets: bool = False
    """True when the agent sees, of all that the environment has said, the latest answer only: each answer
    then begins a conversation anew, from all ``messages`` but the last."""
    score: Callable[[Trajectory], object] | None = None
    """Writes reward and metrics, as they stand, onto the trajectory."""

    async def move(self, histories: list[list[Item]], turn: Turn) -> list[Message]:
        """Add a move, and what the environment answers, to the conversations of the episode, of which the
        last is under way. Returns the answer. The move stays when ``respond`` raises."""
        histories[-1].append(turn)
        answer = self.respond(turn)
        told = list(await answer if inspect.isawaitable(answer) else answer)
        if told and self.forgets:
            histories.append([*self.messages[:-1]])
        histories[-1] += told
        return told


def rollout_of(
    dialogue: Callable[[Scenario], Dialogue],
) -> Callable[[Any, Scenario], Awaitable[Trajectory]]:
    """The rollout of an environment that is written as a dialogue.

    ``rollout = rollout_of(dialogue)`` gives ``await rollout(model, scenario) -> Trajectory``. It makes one
    request a move, with the dialogue's tools and options, until ``respond`` returns nothing. A dialogue
    that ``forgets`` gives one history for each move; the first is the trajectory's main history.
    """

    async def rollout(model: Any, scenario: Scenario) -> Trajectory:
        """Play one episode."""
        episode = dialogue(scenario)
        histories: list[list[Item]] = [[*episode.messages]]
        told = episode.messages
        while told:
            turn = await request_move(model, histories[-1], episode.tools, episode.options)
            told = await episode.move(histories, turn)
        first, *later = histories
        trajectory = Trajectory(
            first,
            tools=episode.tools,
            additional_histories=[History(history, episode.tools) for history in later],
            scenario_id=scenario.id,
        )
        if episode.score:
            episode.score(trajectory)
        return trajectory

    return rollout


async def request_move(
    model: Any, history: list[Item], tools: list[dict[str, Any]] | None, options: Mapping[str, Any]
) -> Turn:
    """One request of the agent's next move after ``history``."""
    offered = {"tools": tools} if tools else {}
    response = await model.client.chat.completions.create(
        model=model.name, messages=History(list(history)).messages(), **offered, **options
    )
    return Turn.from_choice(response.choices[0])
