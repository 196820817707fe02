"""The nouns of a run: scenario, turn, trajectory, group, sample. Plain data that round-trips through JSON."""

from __future__ import annotations

import dataclasses
import math
import time
import traceback as traceback_module
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from artnb.secrets import redact

Message = dict[str, Any]
"""One OpenAI-style chat message: role, content, and perhaps tool_calls, tool_call_id, name."""


@dataclass(frozen=True)
class Scenario:
    """One starting point of an environment: the same scenario always starts the same episode."""

    id: str
    """Unique inside its environment, for example ``game_2048/train/17``."""
    split: str = "train"
    seed: int = 0
    task: Mapping[str, Any] = field(default_factory=dict)
    """What the environment needs to start the episode; JSON values only."""

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "split": self.split, "seed": self.seed, "task": dict(self.task)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Scenario:
        return cls(**record)


@dataclass(frozen=True)
class Failure:
    """Why a rollout failed, kept as data on its trajectory; the values of known keys are taken out."""

    type: str
    message: str
    traceback: str = ""

    @classmethod
    def from_exception(cls, error: BaseException) -> Failure:
        lines = traceback_module.format_exception(type(error), error, error.__traceback__)
        return cls(type(error).__name__, redact(str(error)), redact("".join(lines)))


@dataclass(frozen=True)
class Turn:
    """One move of a model, with the exact tokens that the engine read and sampled.

    ``logprobs`` are natural logarithms under the *processed* distribution (after temperature and
    truncation), one for each sampled id.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: int
    """Version of the weights that sampled this turn: k after k training steps, -1 for the base."""
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    message: Message
    """The assistant message as parsed from the sampled tokens."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """temperature, top_p, top_k, min_p, seed, max_tokens as the engine applied them."""
    timing: Mapping[str, float] = field(default_factory=dict)
    """``started`` (Unix seconds), ``queued`` and ``seconds`` (durations in seconds)."""
    credit: float | None = None
    """Optional reward of this turn alone; see TrainConfig.credit_weight."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", tuple(self.prompt_ids))
        object.__setattr__(self, "completion_ids", tuple(self.completion_ids))
        object.__setattr__(self, "logprobs", tuple(self.logprobs))
        if len(self.completion_ids) != len(self.logprobs):
            raise ValueError(
                f"a turn needs one logprob for each sampled token, got {len(self.logprobs)} "
                f"logprobs for {len(self.completion_ids)} tokens"
            )

    @property
    def ids(self) -> tuple[int, ...]:
        """Everything the model had read once it finished this turn."""
        return self.prompt_ids + self.completion_ids

    def with_credit(self, credit: float) -> Turn:
        return dataclasses.replace(self, credit=credit)

    @classmethod
    def from_choice(cls, choice: Any) -> Turn:
        """Read the turn that artnb's client attached to an OpenAI ``Choice``.

        Raises ValueError when the choice did not come from artnb's client.
        """
        record = (getattr(choice, "model_extra", None) or {}).get("artnb")
        if record is None:
            raise ValueError(
                "this Choice has no token ids: it was not sampled through model.client. "
                "Append its message as a dict instead; it is then context and carries no loss."
            )
        return cls.from_json(record)

    def to_json(self, previous: Turn | None = None) -> dict[str, Any]:
        """JSON form; with ``previous`` the shared beginning of the prompt is stored as its length."""
        record: dict[str, Any] = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "prompt_ids"
        }
        record["completion_ids"] = list(self.completion_ids)
        record["logprobs"] = list(self.logprobs)
        record["sampling"], record["timing"] = dict(self.sampling), dict(self.timing)
        if previous is not None and self.prompt_ids[: len(previous.ids)] == previous.ids:
            record["extends_previous"] = True
            record["prompt_ids"] = list(self.prompt_ids[len(previous.ids) :])
        else:
            record["prompt_ids"] = list(self.prompt_ids)
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any], previous: Turn | None = None) -> Turn:
        values = dict(record)
        if values.pop("extends_previous", False):
            assert previous is not None, "a turn that extends the previous one needs it to be read"
            values["prompt_ids"] = previous.ids + tuple(values["prompt_ids"])
        return cls(**values)


Item = Message | Turn | Any
"""An entry of ``messages_and_choices``: a dict, a Turn, or an OpenAI Choice from artnb's client."""


def _as_item(item: Item) -> Message | Turn:
    return item if isinstance(item, (dict, Turn)) else Turn.from_choice(item)


def _messages(items: Sequence[Item]) -> list[Message]:
    return [i.message if isinstance(i, Turn) else i for i in map(_as_item, items)]


def _turns(items: Sequence[Item]) -> list[Turn]:
    return [i for i in map(_as_item, items) if isinstance(i, Turn)]


def _items_to_json(items: Sequence[Item]) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    previous: Turn | None = None
    for item in map(_as_item, items):
        if isinstance(item, Turn):
            records.append({"turn": item.to_json(previous)})
            previous = item
        else:
            records.append({"message": item})
    return records


def _items_from_json(records: Sequence[Mapping[str, Any]]) -> list[Item]:
    items: list[Item] = []
    previous: Turn | None = None
    for record in records:
        if "turn" in record:
            previous = Turn.from_json(record["turn"], previous)
            items.append(previous)
        else:
            items.append(record["message"])
    return items


@dataclass
class History:
    """A compaction or branch of one agent's conversation that shares its trajectory's reward."""

    messages_and_choices: list[Item] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None

    def messages(self) -> list[Message]:
        """The conversation as plain chat messages, ready for the next request."""
        return _messages(self.messages_and_choices)

    @property
    def turns(self) -> list[Turn]:
        """The model's moves of this history, in order."""
        return _turns(self.messages_and_choices)

    def to_json(self) -> dict[str, Any]:
        return {"messages_and_choices": _items_to_json(self.messages_and_choices), "tools": self.tools}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> History:
        return cls(_items_from_json(record["messages_and_choices"]), record.get("tools"))


@dataclass
class Trajectory:
    """One episode: messages and the model's turns, a reward, and everything worth keeping.

    Open for changes until ``gather`` returns. ``reward`` is None when nobody scored it; 0.0 means
    that somebody did.
    """

    messages_and_choices: list[Item] = field(default_factory=list)
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    additional_histories: list[History] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    error: Failure | None = None
    scenario_id: str = ""
    seat: str = ""
    """Which agent of a multi-agent episode this is; members of a group share a seat."""
    parent_id: str | None = None
    """The trajectory of the agent that called this one."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    started: float = field(default_factory=time.time)
    """Unix seconds."""
    seconds: float | None = None

    def log(self, text: str) -> None:
        """Keep a line of text with this trajectory."""
        self.logs.append(text)

    def messages(self) -> list[Message]:
        """The main conversation as plain chat messages, ready for the next request."""
        return _messages(self.messages_and_choices)

    @property
    def turns(self) -> list[Turn]:
        """Every move of the model, the main history first."""
        turns = _turns(self.messages_and_choices)
        for history in self.additional_histories:
            turns += history.turns
        return turns

    @property
    def is_scored(self) -> bool:
        return self.error is None and self.reward is not None and math.isfinite(self.reward)

    @property
    def completion_tokens(self) -> int:
        return sum(len(turn.completion_ids) for turn in self.turns)

    def finish(self) -> Trajectory:
        """Close the episode: choices become turns, the duration is set. ``gather`` calls it."""
        self.messages_and_choices = [_as_item(i) for i in self.messages_and_choices]
        for history in self.additional_histories:
            history.messages_and_choices = [_as_item(i) for i in history.messages_and_choices]
        if self.seconds is None:
            self.seconds = time.time() - self.started
        return self

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict from which ``from_json`` restores an equal trajectory."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        record["messages_and_choices"] = _items_to_json(self.messages_and_choices)
        record["additional_histories"] = [h.to_json() for h in self.additional_histories]
        record["error"] = dataclasses.asdict(self.error) if self.error else None
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Trajectory:
        values = dict(record)
        values["messages_and_choices"] = _items_from_json(values["messages_and_choices"])
        values["additional_histories"] = [
            History.from_json(h) for h in values.get("additional_histories", [])
        ]
        values["error"] = Failure(**values["error"]) if values.get("error") else None
        return cls(**values)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from artnb.ui.text import trajectory_text

        printer.text(trajectory_text(self))

    def _repr_html_(self) -> str:
        from artnb.ui.html import trajectory_html

        return trajectory_html(self)


BEFORE_OVERRIDE = "reward_before_override"
"""Key of a trajectory's metadata: the reward that a person changed."""

RUN_OF_GATHER: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""Id of a gather -> the run that it wrote to: where overrides of its groups are recorded."""


def override_reward(trajectory: Trajectory, reward: float | None) -> None:
    """Give a trajectory a person's reward and keep the one before it; None gives that back."""
    before = trajectory.metadata.pop(BEFORE_OVERRIDE, trajectory.reward)
    if reward is not None:
        trajectory.metadata[BEFORE_OVERRIDE] = before
    trajectory.reward = before if reward is None else float(reward)


@dataclass
class TrajectoryGroup:
    """Attempts at one scenario that are compared with each other."""

    trajectories: list[Trajectory] = field(default_factory=list)
    scenario_id: str = ""
    seat: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __getitem__(self, index: int) -> Trajectory:
        return self.trajectories[index]

    def override(self, index: int, reward: float | None, why: str) -> None:
        """A person's reward for the trajectory at ``index``, with a reason; None takes it back.

        It counts in the next step, and stands in the journal of the run that gathered the group in this
        process. Raises ValueError for a reward that is no finite number, or no reason; ArtnbError when that
        run was closed.
        """
        if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
            raise ValueError(f"a reward is a finite number, got {reward!r}")
        if not why.strip():
            raise ValueError("say why: the reason is kept with the reward")
        trajectory = self.trajectories[index]
        if (run := RUN_OF_GATHER.get(str(self.metadata.get("gather_id")))) is not None:
            run.record_event("override", trajectory=trajectory.id, value=reward, reason=why, step=run.step)
        override_reward(trajectory, reward)

    @property
    def exceptions(self) -> list[Failure]:
        """The failures of the group's failed rollouts."""
        return [t.error for t in self.trajectories if t.error]

    @property
    def rewards(self) -> list[float | None]:
        return [t.reward if t.error is None else None for t in self.trajectories]

    def to_json(self) -> dict[str, Any]:
        return {
            "scenario_id": self.scenario_id,
            "seat": self.seat,
            "metadata": self.metadata,
            "trajectories": [t.to_json() for t in self.trajectories],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TrajectoryGroup:
        values = dict(record)
        values["trajectories"] = [Trajectory.from_json(t) for t in values["trajectories"]]
        return cls(**values)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from artnb.ui.text import groups_text

        printer.text(groups_text([self]))

    def _repr_html_(self) -> str:
        from artnb.ui.html import groups_html

        return groups_html([self])


class Groups(list[TrajectoryGroup]):
    """What ``gather`` returns: a list of groups whose repr is worth reading."""

    status: str = "complete"
    """``complete``, ``interrupted``, ``stopped`` or ``timeout``."""
    seconds: float = 0.0
    judging: Any = None
    """Facts about the call of ``judge`` that scored them."""

    @property
    def trajectories(self) -> list[Trajectory]:
        return [t for group in self for t in group]

    def __repr__(self) -> str:
        scored = [t.reward for t in self.trajectories if t.is_scored]
        mean = f"{sum(scored) / len(scored):.3f}" if scored else "not scored"  # type: ignore[arg-type]
        failed = sum(t.error is not None for t in self.trajectories)
        return (
            f"Groups({len(self)} groups, {len(self.trajectories)} trajectories, {failed} failed, "
            f"mean reward {mean}, {self.status}, {self.seconds:.1f} s)"
        )

    def _repr_html_(self) -> str:
        from artnb.ui.html import groups_html

        return groups_html(self)


@dataclass(frozen=True)
class Sample:
    """One row to train on: tokens in the order the model saw them, with a loss on sampled ones.

    All tuples have length T. At context tokens ``is_sampled`` is False and the other values are 0.
    """

    ids_T: tuple[int, ...]
    is_sampled_T: tuple[bool, ...]
    logprobs_T: tuple[float, ...]
    """Engine logprobs at sampling time."""
    advantages_T: tuple[float, ...]
    weights_T: tuple[float, ...]
    """Loss weight of each sampled token, 1.0 unless rows of one trajectory share a weight."""
    trajectory_id: str
    group: int
    """Index of the group in the step."""
    temperature: float = 1.0
    turns: tuple[tuple[int, ...], ...] = ()
    """For each turn that has a loss here, in order: its places in ``trajectory.turns``, more than one where
    several histories hold it. Empty for rows that no gathered trajectory stands behind."""

    @property
    def sampled_tokens(self) -> int:
        return sum(self.is_sampled_T)
