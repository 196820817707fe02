"""How does a rollout look as a Weave trace? A call for the episode, and below it one a turn, tool and score.

A call's id is a hash of what it tells of, so the same record is the same call whoever sends it and however
often. Weave draws a chat where a call's inputs have ``messages`` and its output has ``choices``.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from artnb.store.trajectories import Stored
from artnb.types import Message, Trajectory, Turn

Call = dict[str, Any]
"""One finished call as ``/v2/{entity}/{project}/calls/complete`` takes it."""

_DEEPEST = 60
_LONGEST_DISPLAY_NAME = 120
_LAST_SECOND = 4e9
"""In the year 2096; a record that says more is wrong about its time, and kept."""


@dataclass(frozen=True)
class Place:
    """Where calls go: ``project`` is ``entity/project``, ``run`` the name of the run."""

    project: str
    run: str


def call_id(*names: Any) -> str:
    """The id of what these names name: always the same.

    >>> call_id("rollout", "a1") == call_id("rollout", "a1") != call_id("rollout", "a2")
    True
    """
    digest = hashlib.sha256("\0".join(map(str, names)).encode("utf-8", "replace")).digest()
    return str(uuid.UUID(bytes=digest[:16], version=5))


def rollout_calls(stored: Stored, place: Place) -> list[Call]:
    """The trace of one trajectory, the episode's own call first."""
    trajectory = stored.trajectory
    seen: set[Any] = set()
    parts = [part for history in _histories(trajectory) for part in _parts(history, seen, stored, place)]
    ended = trajectory.started + (trajectory.seconds or 0.0)
    messages = trajectory.messages()
    about = {name: value for name, value in vars(stored).items() if name in _ABOUT}
    root = _call(
        "artnb.rollout",
        call_id("rollout", trajectory.id),
        place,
        started=trajectory.started,
        ended=ended,
        name=f"step {stored.step} {trajectory.scenario_id}",
        inputs=_given(model=place.run, messages=messages[:-1], tools=trajectory.tools),
        output=_choices(place, messages[-1] if messages else None, None)
        | {"reward": trajectory.reward, "metrics": trajectory.metrics, "logs": trajectory.logs},
        about=about
        | _given(
            trajectory=trajectory.id,
            scenario=trajectory.scenario_id,
            seat=trajectory.seat,
            parent=trajectory.parent_id,
            policy_version=max((turn.policy_version for turn in trajectory.turns), default=None),
            metadata=trajectory.metadata,
        ),
    )
    if trajectory.error:
        root["exception"] = json.dumps(plain(vars(trajectory.error)))
    usages = [part["summary"]["usage"][place.run] for part in parts if "usage" in part["summary"]]
    if usages:
        root["summary"]["usage"] = {place.run: {key: sum(u[key] for u in usages) for key in usages[0]}}
    for part in parts:
        part |= {"parent_id": root["id"], "trace_id": root["trace_id"]}
    return [root, *parts]


_ABOUT = ("step", "split", "gather_id", "attempt", "members")


def _histories(trajectory: Trajectory) -> list[tuple[int, Sequence[Any]]]:
    histories = [
        trajectory.messages_and_choices,
        *(h.messages_and_choices for h in trajectory.additional_histories),
    ]
    return list(enumerate(histories))


def _parts(
    history: tuple[int, Sequence[Any]], seen: set[Any], stored: Stored, place: Place
) -> Iterator[Call]:
    """Turns and tools of one history, in order. A turn shows what is new since the turn before.

    What was ``seen`` in an earlier history is left out of this one.
    """
    index, items = history
    trajectory = stored.trajectory
    clock = trajectory.started
    new: list[Message] = []
    number = 0
    for position, item in enumerate(items):
        if not isinstance(item, Turn):
            new.append(item)
            continue
        number += 1
        same = (len(item.prompt_ids), item.completion_ids, item.timing.get("started"))
        if same in seen:
            new = []
            continue
        seen.add(same)
        started = float(item.timing.get("started", clock))
        clock = started + float(item.timing.get("seconds", 0.0))
        yield _turn_call(item, (index, number), new, started, clock, trajectory, place)
        new = []
        answers = _messages_until_turn(items[position + 1 :])
        until = _next_start(items[position + 1 :], trajectory, clock)
        yield from _tool_calls(item, (index, number), answers, clock, until, trajectory, place)


def _turn_call(
    turn: Turn,
    at: tuple[int, int],
    new: list[Message],
    started: float,
    ended: float,
    trajectory: Trajectory,
    place: Place,
) -> Call:
    read, sampled = len(turn.prompt_ids), len(turn.completion_ids)
    call = _call(
        "artnb.turn",
        call_id("turn", trajectory.id, *at),
        place,
        started=started,
        ended=ended,
        name=f"turn {at[1]}" + (f" of history {at[0]}" if at[0] else ""),
        inputs={"model": place.run, "messages": new},
        output=_choices(place, turn.message, turn.finish_reason) | _given(credit=turn.credit),
        about=_given(
            policy_version=turn.policy_version,
            sampling=turn.sampling,
            mean_logprob=sum(turn.logprobs) / sampled if sampled else None,
            queued=turn.timing.get("queued"),
        ),
    )
    usage = {
        "requests": 1,
        "prompt_tokens": read,
        "completion_tokens": sampled,
        "total_tokens": read + sampled,
    }
    call["summary"]["usage"] = {place.run: usage}
    return call


def _tool_calls(
    turn: Turn,
    at: tuple[int, int],
    answers: Sequence[Message],
    started: float,
    ended: float,
    trajectory: Trajectory,
    place: Place,
) -> Iterator[Call]:
    """What a turn asked of tools, with the answers. Of their times only the turns around them are known."""
    for number, asked in enumerate(turn.message.get("tool_calls") or []):
        function = asked.get("function") or {}
        answer = next((m for m in answers if m.get("tool_call_id") == asked.get("id")), None)
        yield _call(
            "artnb.tool",
            call_id("tool", trajectory.id, *at, number),
            place,
            started=started,
            ended=ended,
            name=str(function.get("name")),
            inputs={"name": function.get("name"), "arguments": _arguments(function.get("arguments"))},
            output={"content": answer.get("content")} if answer else {"content": None, "answered": False},
            about={"tool_call_id": asked.get("id")},
        )


def _messages_until_turn(items: Sequence[Any]) -> list[Message]:
    end = next((i for i, item in enumerate(items) if isinstance(item, Turn)), len(items))
    return list(items[:end])


def _next_start(items: Sequence[Any], trajectory: Trajectory, clock: float) -> float:
    turn = next((item for item in items if isinstance(item, Turn)), None)
    end = turn.timing.get("started") if turn else trajectory.started + (trajectory.seconds or 0.0)
    return max(clock, float(end if end is not None else clock))


def _arguments(arguments: Any) -> Any:
    try:
        return json.loads(arguments)
    except (TypeError, ValueError, RecursionError):  # a model wrote them: shown as they are
        return arguments


def _choices(place: Place, message: Message | None, finish_reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return {"model": place.run, "choices": [choice] if message is not None else []}


def record_call(kind: str, record: Mapping[str, Any], place: Place) -> Call:
    """A step, an evaluation or an event as a call of its own, its figures in the output."""
    at = float(record.get("time") or 0.0)
    seconds = record.get("seconds")
    is_timed = isinstance(seconds, int | float) and math.isfinite(seconds) and seconds > 0
    what = record.get("kind") or kind
    return _call(
        f"artnb.{kind}",
        call_id(kind, place.run, record.get("step"), what, at),
        place,
        started=at - (float(seconds) if is_timed else 0.0),  # type: ignore[arg-type]
        ended=at,
        name=f"{kind} {record.get('step')}" if kind == "step" else str(record.get("name") or what),
        inputs=_given(step=record.get("step"), kind=what, policy_version=record.get("policy_version")),
        output={name: value for name, value in record.items() if name not in ("time", "session", "kind")},
        about=_given(step=record.get("step")),
    )


def score_calls(event: Mapping[str, Any], place: Place) -> list[Call]:
    """A judge's scores, each below the rollout that it scores."""
    at = float(event.get("time") or 0.0)
    return [
        _call(
            "artnb.judge",
            call_id("judge", trajectory, at),
            place,
            started=at,
            ended=at,
            name="judge",
            inputs={"trajectory": trajectory},
            output=score,
            about=_given(step=event.get("step")),
        )
        | {"parent_id": call_id("rollout", trajectory), "trace_id": call_id("rollout", trajectory)}
        for trajectory, score in event["scores"].items()
    ]


def _call(
    op: str,
    id: str,
    place: Place,
    *,
    started: float,
    ended: float,
    name: str,
    inputs: Mapping[str, Any],
    output: Any,
    about: Mapping[str, Any],
) -> Call:
    return {
        "project_id": place.project,
        "id": id,
        "trace_id": id,
        "op_name": op,
        "display_name": _text(name)[:_LONGEST_DISPLAY_NAME],
        "started_at": _time(started),
        "ended_at": _time(max(started, ended)),
        "attributes": {"artnb": plain({"run": place.run, **about})},
        "inputs": plain(inputs),
        "output": plain(output),
        "summary": {},
    }


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, "", {}, [])}


def _time(seconds: float) -> str:
    known = min(max(seconds, 0.0), _LAST_SECOND) if math.isfinite(seconds) else 0.0
    return datetime.fromtimestamp(known, UTC).isoformat()


def plain(value: Any, depth: int = 0) -> Any:
    """The value as strict JSON; numbers that JSON has no word for become text, as does what is no JSON.

    >>> plain({"reward": float("nan"), 1: (True, None)})
    {'reward': 'nan', '1': [True, None]}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if depth < _DEEPEST and isinstance(value, Mapping):
        return {_text(str(name)): plain(part, depth + 1) for name, part in value.items()}
    if depth < _DEEPEST and isinstance(value, list | tuple | set | frozenset):
        return [plain(part, depth + 1) for part in value]
    if hasattr(value, "tolist"):  # numpy
        return plain(value.tolist(), depth + 1)
    return "..." if depth >= _DEEPEST else _text(repr(value))


def _text(text: str) -> str:
    """Without lone surrogates, which no UTF-8 can say."""
    return text.encode("utf-8", "replace").decode()
