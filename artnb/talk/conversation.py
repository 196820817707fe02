"""What was said so far, by whom, and what does the environment say to it?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from artnb.dialogue import Dialogue, Item
from artnb.prompt_memory import PromptMemory
from artnb.types import History, Message, Trajectory, Turn
from artnb.ui.snapshot import trajectory_snapshot


class Conversation:
    """Messages and moves in order. Without a dialogue it begins empty, or with a system message."""

    def __init__(
        self,
        dialogue: Dialogue | None = None,
        *,
        system: str | None = None,
        scenario_id: str = "",
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        begin: list[Item] = [{"role": "system", "content": system}] if system else []
        self.dialogue = dialogue
        self.histories: list[list[Item]] = [begin if dialogue is None else [*dialogue.messages]]
        """One, or with a dialogue that forgets one for each move."""
        self.memory = PromptMemory()
        """The exact tokens of its moves."""
        self._opening = len(self.histories[0])
        self._scenario_id = scenario_id
        self._metadata = dict(metadata or {})
        self._started = time.time()

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        return self.dialogue.tools if self.dialogue else None

    @property
    def messages(self) -> list[Message]:
        """What the next request holds."""
        return History(list(self.histories[-1])).messages()

    @property
    def awaits_move(self) -> bool:
        """True when it is the model's turn although nobody says anything new."""
        last = self.histories[-1][-1:]
        return bool(last) and isinstance(last[0], dict) and last[0]["role"] in ("user", "tool")

    def copy(self) -> list[list[Item]]:
        """What ``histories`` may be set back to."""
        return [[*history] for history in self.histories]

    def say(self, text: str) -> None:
        """Add a person's message. It takes the place of one that has no answer yet: most chat templates
        refuse two messages of a user in a row."""
        history = self.histories[-1]
        if self.awaits_move and history[-1]["role"] == "user":  # type: ignore[index]
            history.pop()
        history.append({"role": "user", "content": text})

    async def move(self, turn: Turn) -> list[Message]:
        """Add the model's move and what the environment says to it; returns the latter."""
        if self.dialogue is None:
            self.histories[-1].append(turn)
            return []
        return await self.dialogue.move(self.histories, turn)

    def items(self) -> list[Item]:
        """Everything once, what every history begins with included."""
        first, *later = self.histories
        return [*first, *(item for history in later for item in history[self._opening - 1 :])]

    def entries(self) -> list[dict[str, Any]]:
        """The same as plain dicts for a screen."""
        items = self.items()
        drawn = entries_of(items)
        for index, entry in enumerate(drawn):
            entry["is_opening"] = index < self._opening
        return drawn

    def trajectory(self) -> Trajectory:
        """The conversation as it stands, with the environment's reward if it gives one."""
        first, *later = self.histories
        trajectory = Trajectory(
            [*first],
            metadata=dict(self._metadata),
            tools=self.tools,
            additional_histories=[History([*history], self.tools) for history in later],
            scenario_id=self._scenario_id,
            started=self._started,
        )
        trajectory.seconds = sum(turn.timing.get("seconds", 0.0) for turn in trajectory.turns)
        if self.dialogue and self.dialogue.score and trajectory.turns:
            self.dialogue.score(trajectory)
        return trajectory.finish()


def entries_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Messages and moves as plain dicts; one of a call that cannot be read says so."""
    entries = trajectory_snapshot(Trajectory([*items]))["histories"][0]
    for item, entry in zip(items, entries, strict=True):
        message = item.message if isinstance(item, Turn) else item
        if message.get("tool_call_error"):
            entry["problem"] = str(message["tool_call_error"])[:2000]
    return entries
