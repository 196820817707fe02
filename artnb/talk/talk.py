"""How does a message get its answer? The model moves, the environment answers its calls, until it is the
person's turn; then the whole conversation is written into the run."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from artnb.environments import Environment
from artnb.errors import ConfigurationError, Interrupted, Stopped
from artnb.interrupts import to_its_end
from artnb.recording import listening, recording
from artnb.session import remember, session
from artnb.store.trajectories import Stored
from artnb.talk.conversation import Conversation, Item, entries_of
from artnb.talk.screen import Screen
from artnb.types import Scenario, Trajectory, Turn
from artnb.ui.html import conversation_html, esc
from artnb.undo import is_under_way

SPLIT = "chat"
"""Of its trajectories in the run; no loop trains on them."""
_PAUSE_SECONDS = 0.1
_SCENARIOS = 8


@dataclass(frozen=True)
class Reply:
    """What came of one message: the model's moves, and what the environment said to them."""

    items: tuple[Item, ...]
    """Turns and messages in order."""
    policy: str

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The model's moves with their exact tokens."""
        return tuple(item for item in self.items if isinstance(item, Turn))

    @property
    def text(self) -> str:
        """What the model said last."""
        return str(self.turns[-1].message.get("content") or "") if self.turns else ""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        tokens = [len(turn.completion_ids) for turn in self.turns]
        return f"Reply({self.text!r}, tokens: {tokens}, policy {self.policy})"

    def _repr_html_(self) -> str:
        bubbles = conversation_html(entries_of(self.items)) or "<div>(nothing)</div>"
        return f"<div><div><small>answer of policy {esc(self.policy)}</small></div>{bubbles}</div>"


def chat(
    model: Any,
    env: Environment | None = None,
    *,
    policy: str = "current",
    scenarios: Sequence[Scenario] | None = None,
    system: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    max_moves: int = 32,
    seed: int | None = None,
) -> Talk:
    """Talk to a policy: in a live notebook in the view that this shows, anywhere by ``await talk.say(text)``.

    policy: ``current``, ``base``, or a checkpoint such as ``step_000012``. env: an environment with a
    ``dialogue``: the conversation begins as its episodes do, and it answers the model's moves and tool calls.
    scenarios: episodes to choose from; by default the first eight of its test split.
    system: a system message, without an environment. temperature, max_tokens: None takes the
    environment's own, or the model's. max_moves: after so many moves in a row it is the person's turn again,
    and ``await talk.say()`` goes on. seed: makes the answers repeatable.

    Every conversation is kept in the run under the split ``chat``, after each answer, with exact tokens.
    Raises ConfigurationError.
    """
    talk = Talk(
        model,
        env,
        policy=policy,
        scenarios=scenarios,
        system=system,
        temperature=temperature,
        max_tokens=max_tokens,
        max_moves=max_moves,
        seed=seed,
    )
    talk.screen.open()
    return talk


class Talk:
    """A conversation with a policy, and the next one after ``reset``; ``chat`` makes it."""

    def __init__(
        self,
        model: Any,
        env: Environment | None,
        *,
        policy: str,
        scenarios: Sequence[Scenario] | None,
        system: str | None,
        temperature: float | None,
        max_tokens: int | None,
        max_moves: int,
        seed: int | None,
    ) -> None:
        if not hasattr(model, "app") or not hasattr(model, "run"):
            raise ConfigurationError(f"chat needs a Model, got {type(model).__name__}")
        if env is None and scenarios is not None:
            raise ConfigurationError("scenarios belong to an environment: pass env as well")
        if env is not None and (problem := _problem(env, system)):
            raise ConfigurationError(problem)
        if isinstance(max_moves, bool) or not isinstance(max_moves, int) or max_moves < 1:
            raise ConfigurationError(f"max_moves must be a whole number >= 1, got {max_moves!r}")
        self.model, self.env, self.max_moves = model, env, max_moves
        self.scenarios = list(scenarios or (env.scenarios("test", _SCENARIOS) if env else ()))
        self.scenario = 0
        """Index of the present one."""
        self.policies = self._known_policies()
        self.policy = policy
        self.temperature, self.max_tokens = temperature, max_tokens
        self.choose(policy=policy, temperature=temperature, max_tokens=max_tokens)
        self.trajectory = Trajectory()
        """The conversation as it was written last."""
        self._system = system
        self._random = random.Random(seed)
        self._id = uuid.uuid4().hex[:12]
        self._number = -1
        self._saved = ""
        self.taken_back = ""
        """The latest message, if it was left without any answer."""
        self._heard: list[int] = []
        self._task: asyncio.Task[Reply] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waits_for = ""
        self.screen = Screen(self)
        self.reset()

    # ---- what a cell uses -----------------------------------------------------------------------

    async def say(self, text: str | None = None) -> Reply:
        """Say something and wait for the answer; without a text the model answers what stands there.

        A text takes the place of a message that has no answer yet, such as an environment's question. While a
        training step is under way the answer waits for its end. ■, or ``stop``, raises Interrupted or
        Stopped: finished moves stay in the conversation and are on ``partial``, an unfinished one is
        forgotten, and without any the message is taken back.

        Raises ConfigurationError, RequestError, and what the environment raises.
        """
        task = self.start(text)
        async with session(task.cancel) as watch:
            try:
                return remember(await task)
            except asyncio.CancelledError:
                await asyncio.wait([task])
                this = asyncio.current_task()
                if this is not None and this.cancelling() and not watch.interrupted:
                    raise
                kind = Interrupted if watch.interrupted else Stopped
                words = "interrupted" if watch.interrupted else "stopped"
                raise kind(
                    f"the answer was {words}; what was finished is on .partial", self._reply()
                ) from None

    def start(self, text: str | None = None) -> asyncio.Task[Reply]:
        """Begin an answer in a task of the running loop. Raises ConfigurationError."""
        if self.is_busy:
            raise ConfigurationError(
                "this chat is answering already; wait for it, stop it, or make another one"
            )
        if text is None and not self.conversation.awaits_move:
            raise ConfigurationError("there is nothing to answer yet: say something")
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._answer(text))
        self._task.add_done_callback(lambda _: self.screen.changed())
        self.screen.changed()
        return self._task

    def stop(self) -> None:
        """End the answer under way; any thread may."""
        if self._task is not None and self._loop is not None and not self._task.done():
            self._loop.call_soon_threadsafe(self._task.cancel)

    def reset(self, scenario: int | None = None) -> None:
        """Begin a new conversation, of another scenario (its index in ``scenarios``) if one is given.

        Raises ConfigurationError while an answer is under way.
        """
        if self.is_busy:
            raise ConfigurationError("stop the answer first")
        if scenario is not None and not 0 <= scenario < len(self.scenarios):
            raise ConfigurationError(f"scenario must be 0 to {len(self.scenarios) - 1}, got {scenario}")
        self.scenario = self.scenario if scenario is None else scenario
        self._number += 1
        self._saved = ""
        self._begun: list[Item] = []
        metadata: dict[str, Any] = {"chat": f"{self._id}/{self._number}"}
        if self.env is not None and self.env.dialogue is not None:
            one = self.scenarios[self.scenario]
            self.conversation = Conversation(self.env.dialogue(one), scenario_id=one.id, metadata=metadata)
        else:
            self.conversation = Conversation(system=self._system, scenario_id="chat", metadata=metadata)
        self.trajectory = self.conversation.trajectory()
        self.screen.changed()

    def choose(self, **changes: Any) -> None:
        """Set ``policy``, ``temperature`` or ``max_tokens`` from now on. Raises ConfigurationError."""
        kinds = {"policy": str, "temperature": (int, float), "max_tokens": int}
        for name, value in changes.items():
            if name not in kinds:
                raise ConfigurationError(f"unknown setting {name!r}; there are {', '.join(kinds)}")
            if value is None and name != "policy":
                continue
            if not isinstance(value, kinds[name]) or isinstance(value, bool):  # type: ignore[arg-type]
                raise ConfigurationError(f"{name} cannot be {value!r}")
            if name != "policy":
                self.model.sampling.replace(**{name: value})  # checks its range
            elif value not in self.policies:
                self.policies = self._known_policies()
                if value not in self.policies:
                    known = ", ".join(self.policies)
                    raise ConfigurationError(f"there is no policy {value!r} to talk to; there are {known}")
        vars(self).update(changes)

    @property
    def is_busy(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def status(self) -> str:
        """``ready``, or what is going on, in words."""
        if not self.is_busy:
            return "ready"
        if self._waits_for:
            return f"waiting: {self._waits_for}"
        return "answering" if self._heard else "waiting for the engine"

    @property
    def pending(self) -> str:
        """The move under way as far as it has come, special tokens left out."""
        heard = list(self._heard)
        return self.model.tokenizer.decode(heard, skip_special_tokens=True).rstrip("\ufffd") if heard else ""

    def options(self) -> dict[str, Any]:
        """What a request asks for beside the model's own sampling: what was chosen, or the environment's."""
        dialogue = self.conversation.dialogue
        chosen = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        asked = {name: value for name, value in chosen.items() if value is not None}
        return {**(dialogue.options if dialogue else {}), **asked}

    def look(self) -> None:
        """Notice checkpoints that have come or gone since the last look."""
        if self.model.run.step != self._seen_step:
            self.policies = self._known_policies()

    # ---- one answer -----------------------------------------------------------------------------

    async def _answer(self, text: str | None) -> Reply:
        said = self.conversation
        before, moves = said.copy(), 0
        if text is not None:
            said.say(text)
        self._begun, self.taken_back = said.items(), ""
        self.screen.changed()
        try:
            while moves < self.max_moves:
                turn = await self._move()
                moves += 1
                told = await said.move(turn)
                self.screen.changed()
                if not told:
                    break
        except BaseException:
            if not moves:
                said.histories, self.taken_back = before, text or ""
            raise
        finally:
            self._heard, self._waits_for = [], ""
            if moves:
                await to_its_end(self._save())
        return self._reply()

    async def _move(self) -> Turn:
        """One request, with the conversation's own tokens in the prompt."""
        said, self._heard = self.conversation, []
        while is_under_way(self.model.backend):
            self._waits_for = "a training step is under way"
            await asyncio.sleep(_PAUSE_SECONDS)
        self._waits_for = ""
        name = self.model.name if self.policy == "current" else f"{self.model.name}@{self.policy}"
        # a seed of its own: the engine's random state, which a training run may be repeated by, stays
        body = {"model": name, "messages": said.messages, "seed": self._random.getrandbits(31)}
        if said.tools:
            body["tools"] = said.tools
        with recording() as recorder, listening(self._heard.append):
            recorder.memory = said.memory
            completion = await self.model.app.completions({**body, **self.options()})
        return Turn.from_json(completion["choices"][0]["artnb"])

    def _reply(self) -> Reply:
        return Reply(tuple(self.conversation.items()[len(self._begun) :]), self.policy)

    async def _save(self) -> None:
        """Write the conversation, which takes the place of its shorter self."""
        run, trajectory, earlier = self.model.run, self.conversation.trajectory(), self._saved
        trajectory.metadata["policy"] = self.policy
        stored = Stored(run.step, SPLIT, self._id, self._number, trajectory)

        def write() -> None:
            run.append_attempt([stored])
            if earlier:
                run.record_event("replaced", trajectories=[earlier], by=trajectory.id)

        await asyncio.to_thread(write)
        self.trajectory, self._saved = trajectory, trajectory.id

    def _known_policies(self) -> list[str]:
        self._seen_step = self.model.run.step
        run = self.model.run
        found = [one.path.name for one in (run.start(), *run.checkpoints()) if one is not None]
        return ["current", "base", *dict.fromkeys(found)]

    # ---- on the screen --------------------------------------------------------------------------

    def close(self) -> None:
        """End the answer under way and the widget; the static copy and the conversation stay."""
        self.stop()
        self.screen.close()

    def _ipython_display_(self) -> None:
        self.screen.show()

    def _repr_html_(self) -> str:
        return self.screen.html()

    def __repr__(self) -> str:
        said = f"{len(self.trajectory.turns)} answers so far"
        return f"Talk(policy {self.policy}, {said}, {self.status}; `await talk.say(text)` goes on)"


def _problem(env: Any, system: str | None) -> str:
    """Why this environment cannot be talked in; empty when it can."""
    if getattr(env, "dialogue", None) is None:
        name = getattr(env, "name", type(env).__name__)
        return (
            f"{name} has no dialogue(scenario), which says what its agent reads and what answers it (see "
            "artnb/environments.py). chat(model) alone talks without it."
        )
    return "the environment brings its own system message: leave out system" if system else ""
