"""Which calls did this rollout make? A context variable keeps them, whatever framework made them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from artnb.prompt_memory import PromptMemory, same_message
from artnb.types import History, Item, Message, Trajectory, Turn

_current: ContextVar[Recorder | None] = ContextVar("artnb_recorder", default=None)
_listener: ContextVar[Callable[[int], object] | None] = ContextVar("artnb_listener", default=None)


@dataclass(frozen=True)
class Call:
    """One completed choice of a chat completion."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    turn: Turn
    policy: str = "current"


@dataclass
class Recorder:
    """The calls made inside one rollout, in the order in which they finished."""

    calls: list[Call] = field(default_factory=list)
    memory: PromptMemory = field(default_factory=PromptMemory, repr=False)
    """Exact tokens of this rollout's own conversations."""

    def add(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        turn: Turn,
        *,
        policy: str = "current",
    ) -> None:
        self.calls.append(Call(list(messages), tools or None, turn, policy))

    def history(self) -> tuple[list[Item], list[History]]:
        """The first conversation, and the others: branches, compactions, sub-agents, further choices.

        A call continues the longest conversation that its messages extend. When some calls went to
        the current policy, only those count: calls to ``@base`` or a checkpoint were an opponent's
        or a judge's, not moves to learn from.
        """
        branches = _branches(self.calls)
        if not branches:
            return [], []
        return branches[0].messages_and_choices, branches[1:]

    def fill(self, trajectory: Trajectory) -> None:
        """Give the recorded calls to a trajectory that holds no turn of its own.

        Messages that the rollout added by hand after the last recorded turn are kept.
        """
        branches = _branches(self.calls)
        if not branches or trajectory.turns:
            return
        main, tail = _main_branch(branches, trajectory.messages())
        trajectory.messages_and_choices = [*main.messages_and_choices, *tail]
        trajectory.additional_histories += [branch for branch in branches if branch is not main]
        if trajectory.tools is None:
            trajectory.tools = main.tools


def _branches(calls: Sequence[Call]) -> list[History]:
    own = [call for call in calls if call.policy == "current"] or calls
    branches: list[History] = []
    for call in own:
        extended = [b for b in branches if b.tools == call.tools and _extends(call.messages, b.messages())]
        if extended:
            branch = max(reversed(extended), key=lambda b: len(b.messages_and_choices))
        else:
            branch = History(tools=call.tools)
            branches.append(branch)
        branch.messages_and_choices += call.messages[len(branch.messages_and_choices) :]
        branch.messages_and_choices.append(call.turn)
    return branches


def _main_branch(branches: list[History], written: list[Message]) -> tuple[History, list[Message]]:
    """The branch that hand-written messages repeat, with what they add; else the first one."""
    for branch in sorted(branches, key=lambda b: -len(b.messages_and_choices)):
        conversation = branch.messages()
        if _extends(written, conversation):
            return branch, written[len(conversation) :]
    return branches[0], []


def _extends(longer: Sequence[Message], shorter: Sequence[Message]) -> bool:
    return len(longer) >= len(shorter) and all(map(same_message, longer, shorter))


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record the calls that this block and the tasks it starts make through artnb's client.

    Tasks and ``asyncio.to_thread`` calls started inside inherit the recorder; siblings do not see it.
    """
    recorder = Recorder()
    token = _current.set(recorder)
    try:
        yield recorder
    finally:
        _current.reset(token)


@contextlib.contextmanager
def listening(on_token: Callable[[int], object]) -> Iterator[None]:
    """Hear each token that calls of this block sample, as it is sampled: see ``SampleRequest.on_token``.

    Calls with ``n`` above 1 are not told of: their choices come mixed.
    """
    token = _listener.set(on_token)
    try:
        yield
    finally:
        _listener.reset(token)


def current_listener() -> Callable[[int], object] | None:
    """What ``listening`` was given here, None outside of it."""
    return _listener.get()


def current_recorder() -> Recorder | None:
    """The recorder of the rollout that is running here, None outside ``recording()``."""
    return _current.get()


def record(
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    turn: Turn,
    *,
    policy: str = "current",
) -> None:
    """Add a completed choice to the current recorder; does nothing outside ``recording()``."""
    recorder = _current.get()
    if recorder is not None:
        recorder.add(messages, tools, turn, policy=policy)
