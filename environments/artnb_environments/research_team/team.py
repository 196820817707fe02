"""Who is at work on a question? A root and the agents below it: what each may do, holds and is paid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from artnb import Scenario, Trajectory, Turn
from artnb_environments import variant_of
from artnb_environments.research_team.documents import Variant, draw_library

Message = dict[str, Any]
"""One chat message."""
metrics = ("right", "answered", "agents", "depth", "turns", "bad_calls", "over_budget", "tokens")


class Team:
    """One episode: the reports, every agent so far, and the tokens that they have used."""

    def __init__(self, scenario: Scenario) -> None:
        self.variant = variant_of(scenario, Variant)
        self.scenario_id = scenario.id
        self.library = draw_library(scenario.seed, self.variant)
        self.tokens = 0
        self.agents: list[Agent] = []
        self.answer: tuple[int, ...] | None = None

    @property
    def is_out_of_tokens(self) -> bool:
        return self.tokens > self.variant.token_budget

    def agent(
        self, parent: Agent | None, instruction: str, document: int = -1, parts: range = range(0)
    ) -> Agent:
        """A new agent; the first is the root. Raises ValueError when there are as many as may be."""
        if len(self.agents) >= self.variant.max_agents:
            raise ValueError("there are no more agents")
        depth = parent.depth + 1 if parent else 1
        trajectory = Trajectory(scenario_id=self.scenario_id)
        trajectory.parent_id = parent.trajectory.id if parent else None
        trajectory.seat = "root" if parent is None else f"report {document + 1}, depth {depth}"
        found = Agent(self, len(self.agents), parent, depth, instruction, document, parts, trajectory)
        self.agents.append(found)
        return found

    @property
    def reward(self) -> float:
        """The share of the values asked for that the root answered right."""
        truth = self.library.truth
        if self.answer is None or len(self.answer) != len(truth):
            return 0.0
        return sum(told == true for told, true in zip(self.answer, truth, strict=True)) / len(truth)

    def trajectories(self) -> list[Trajectory]:
        """One for each agent that said something, the root first, each with its reward."""
        for agent in self.agents:
            agent.score()
        return [agent.trajectory for agent in self.agents if agent.turns or not agent.number]


@dataclass
class Agent:
    """One agent: its task, its conversation, and how much of its context it has used."""

    team: Team
    number: int
    parent: Agent | None
    depth: int
    instruction: str
    document: int
    """The report that it reads, from 0; -1 for the root."""
    parts: range
    """Its parts, from 0."""
    trajectory: Trajectory
    next_part: int = field(init=False)
    report: str | None = None
    """What it told its caller last."""
    turns: int = 0
    bad_calls: int = 0
    held: int = 0
    """Characters that it was told and said after its opening."""
    ended_by: str = ""
    """report, answer, context, turns, tokens or invalid; empty while it is at work."""

    def __post_init__(self) -> None:
        self.next_part = self.parts.start

    @property
    def variant(self) -> Variant:
        return self.team.variant

    @property
    def items(self) -> list[Any]:
        return self.trajectory.messages_and_choices

    @property
    def may_delegate(self) -> bool:
        """The root always; below it while the depth allows, and there is more than one part to share."""
        return self.depth < self.variant.max_depth and (not self.number or len(self.parts) > 1)

    def hears(self, messages: list[Message]) -> None:
        """Add what the environment says; too much of it ends the agent."""
        self.items.extend(messages)
        self.held += sum(len(str(message.get("content") or "")) for message in messages)
        if self.held > self.variant.context_budget:
            self.ended_by = "context"

    def says(self, turn: Turn) -> None:
        """Add a reply, and count its tokens: four characters each where the engine told none."""
        read = sum(len(str(m.get("content") or "")) for m in self.trajectory.messages())
        self.items.append(turn)
        message = turn.message
        calls = [call["function"] for call in message.get("tool_calls") or []]
        written = len(str(message.get("content") or "")) + sum(
            len(str(call["name"])) + len(str(call["arguments"])) for call in calls
        )
        self.held += written
        self.team.tokens += len(turn.ids) or (read + written) // 4
        self.turns += 1
        if self.team.is_out_of_tokens:
            self.ended_by = "tokens"
        elif self.held > self.variant.context_budget:
            self.ended_by = "context"

    def below(self) -> Iterator[Agent]:
        """The agents that it called, and those that they called."""
        for agent in self.team.agents:
            caller = agent.parent
            while caller is not None and caller is not self:
                caller = caller.parent
            if caller is self:
                yield agent

    @property
    def own_score(self) -> float:
        """Whether its last report tells the value in its parts and no other number; where the value is in
        none of them, whether it tells no number."""
        if self.report is None:
            return 0.0
        document = self.team.library.documents[self.document]
        numbers = set(re.findall(r"[0-9]+", self.report))
        return float(numbers == ({str(document.value)} if document.place in self.parts else set()))

    def score(self) -> None:
        """Write reward, metrics and what ``render`` shows onto the agent's trajectory."""
        team, shared = self.team, self.team.reward
        own, weight = (shared, 0.0) if not self.number else (self.own_score, self.variant.own_weight)
        below = list(self.below())
        trajectory = self.trajectory
        trajectory.reward = (1 - weight) * shared + weight * own
        trajectory.metrics |= {
            "right": own,
            "answered": float((team.answer if not self.number else self.report) is not None),
            "agents": float(len(below)),
            "depth": float(max((agent.depth for agent in below), default=self.depth)),
            "turns": float(self.turns),
            "bad_calls": float(self.bad_calls),
            "over_budget": float(sum(a.ended_by in ("context", "tokens") for a in [self, *below])),
            "tokens": float(sum(len(turn.ids) for turn in trajectory.turns) if self.number else team.tokens),
        }
        trajectory.metadata |= {
            "agent": self.number,
            "parent": None if self.parent is None else self.parent.number,
            "depth": self.depth,
            "document": self.document + 1,
            "parts": [part + 1 for part in self.parts],
            "instruction": self.instruction,
            "report": self.report,
            "ended_by": self.ended_by,
            "shared_reward": shared,
            "own_score": own,
            "truth": list(team.library.truth),
            "answer": None if team.answer is None else list(team.answer),
        }
