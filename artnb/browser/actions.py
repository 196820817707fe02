"""What can be done with trajectories that are found: copied, exported, sampled anew?"""

from __future__ import annotations

import json
import random
import shlex
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from artnb.browser.plain import mapping, pretty, sequence
from artnb.errors import ConfigurationError
from artnb.store.codec import encode
from artnb.store.journal import replacing
from artnb.store.scores import BEFORE_OVERRIDE
from artnb.store.trajectories import Stored
from artnb.types import Message, Trajectory, Turn

KINDS = ("jsonl", "parquet", "sft")
REPLAY = "replay"
"""The split under which replayed turns are recorded: no step trains on it."""
_CHAT = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
_SENT = ("temperature", "top_p", "max_tokens", "seed", "stop")


def messages_of(trajectory: Mapping[str, Any], history: int = 0) -> list[Message]:
    """The chat messages of one history as they were stored. Raises ConfigurationError."""
    every = [trajectory, *map(mapping, sequence(trajectory.get("additional_histories")))]
    if not 0 <= history < len(every):
        raise ConfigurationError(f"there are {len(every)} histories, and no number {history}")
    items = map(mapping, sequence(every[history].get("messages_and_choices")))
    found = (mapping(i["turn"]).get("message") if "turn" in i else i.get("message") for i in items)
    return [dict(mapping(message)) for message in found]


def chat_messages(trajectory: Mapping[str, Any], history: int = 0) -> list[Message]:
    """Messages with the fields that chat servers and ``sft_step`` take."""
    return [
        {"role": message.get("role"), "content": message.get("content")}
        | {name: message[name] for name in _CHAT if message.get(name) is not None}
        for message in messages_of(trajectory, history)
    ]


def messages_text(trajectory: Mapping[str, Any], history: int) -> str:
    """The messages as JSON for people."""
    return pretty(chat_messages(trajectory, history), longest=1 << 31)


def json_line(trajectory: Mapping[str, Any]) -> str:
    """The trajectory as one line of strict JSON; lone surrogates and NaN come back from it."""
    return encode(trajectory)


def place_of_turn(trajectory: Mapping[str, Any], turn: int) -> tuple[int, int]:
    """History and index of the entry of turn ``turn``, counted over all histories, -1 the last.

    Raises ConfigurationError.
    """
    every = [trajectory, *map(mapping, sequence(trajectory.get("additional_histories")))]
    places = [
        (number, index)
        for number, history in enumerate(every)
        for index, item in enumerate(sequence(history.get("messages_and_choices")))
        if "turn" in mapping(item)
    ]
    if not -len(places) <= turn < len(places):
        raise ConfigurationError(f"this trajectory has {len(places)} turns, and no turn {turn}")
    return places[turn]


def request_of(trajectory: Mapping[str, Any], turn: int) -> dict[str, Any]:
    """The body of the chat completion that this turn answered. Raises ConfigurationError."""
    history, index = place_of_turn(trajectory, turn)
    every = [trajectory, *map(mapping, sequence(trajectory.get("additional_histories")))]
    sampled = mapping(mapping(sequence(every[history].get("messages_and_choices"))[index]).get("turn"))
    sampling = mapping(sampled.get("sampling"))
    body: dict[str, Any] = {"messages": chat_messages(trajectory, history)[:index]}
    if tools := sequence(every[history].get("tools")):
        body["tools"] = tools
    return body | {name: sampling[name] for name in _SENT if sampling.get(name) not in (None, [], "")}


def curl_text(trajectory: Mapping[str, Any], turn: int, address: str, model: str) -> str:
    """A shell command that asks a server for this turn. The key stands in no text: the shell puts it in."""
    body = {"model": model, **request_of(trajectory, turn)}
    try:
        data = json.dumps(body, default=repr, allow_nan=False)  # ASCII: what a terminal shows is what is sent
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"this turn's request is no JSON: {error}") from error
    url = f"{address.rstrip('/')}/chat/completions"
    return (
        f"curl {shlex.quote(url)} \\\n  -H 'Content-Type: application/json' \\\n"
        f'  -H "Authorization: Bearer $OPENAI_API_KEY" \\\n  -d {shlex.quote(data)}'
    )


def rescored(record: Mapping[str, Any], judged: Mapping[str, Any] | None, override: Any) -> dict[str, Any]:
    """A stored record with the scores that its trajectory has now: see store/scores.py."""
    trajectory = dict(mapping(record.get("trajectory")))
    if judged is not None:
        trajectory["metrics"] = {
            **mapping(trajectory.get("metrics")),
            **mapping(judged.get("metrics")),
        }
        trajectory["reward"] = judged.get("reward")
        if judged.get("judge") is not None:
            trajectory["metadata"] = {**mapping(trajectory.get("metadata")), "judge": judged["judge"]}
    if override is not None:
        metadata = mapping(trajectory.get("metadata"))
        if BEFORE_OVERRIDE not in metadata:
            trajectory["metadata"] = {**metadata, BEFORE_OVERRIDE: trajectory.get("reward")}
        trajectory["reward"] = override
    return {**record, "trajectory": trajectory}


# ---- export -----------------------------------------------------------------------------------------


def export(records: Iterable[Mapping[str, Any]], kind: str, path: Path) -> dict[str, Any]:
    """Write records, one in memory at a time, beside the file and then in its place; see ``Source``."""
    if kind not in KINDS:
        raise ConfigurationError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    path = path.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    left_out: dict[str, int] = {}
    with replacing(path) as beside:
        if kind == "parquet":
            count = _write_parquet(records, beside, left_out)
        else:
            line = _jsonl_line if kind == "jsonl" else _sft_line
            count = _write_lines(records, beside, line, left_out)
    return {"path": str(path), "kind": kind, "count": count, "left_out": left_out}


def _write_lines(
    records: Iterable[Mapping[str, Any]],
    path: Path,
    line_of: Callable[[Mapping[str, Any]], str | None],
    left_out: dict[str, int],
) -> int:
    count = 0
    with open(path, "w", encoding="ascii") as file:
        for record in records:
            line = line_of(record)
            if line is None:
                left_out["failed, or without a reply"] = left_out.get("failed, or without a reply", 0) + 1
                continue
            file.write(f"{line}\n")
            count += 1
    return count


def _jsonl_line(record: Mapping[str, Any]) -> str:
    about = {name: value for name, value in record.items() if name != "trajectory"}
    return encode({**about, "trajectory": record["trajectory"]})


def _sft_line(record: Mapping[str, Any]) -> str | None:
    """What ``sft_step`` and other trainers read: messages and tools, in plain JSON."""
    trajectory = mapping(record.get("trajectory"))
    messages = chat_messages(trajectory)
    if trajectory.get("error") is not None or not any(m.get("role") == "assistant" for m in messages):
        return None
    example: dict[str, Any] = {"messages": messages}
    if trajectory.get("tools"):
        example["tools"] = trajectory["tools"]
    return json.dumps(example, default=repr)


def _write_parquet(records: Iterable[Mapping[str, Any]], path: Path, left_out: dict[str, int]) -> int:
    from artnb.store.frames import write_parquet

    def readable() -> Iterator[Stored]:
        for record in records:
            try:
                yield Stored.from_json(record)
            except (TypeError, ValueError, KeyError, AttributeError):
                left_out["not readable"] = left_out.get("not readable", 0) + 1

    return write_parquet(readable(), path)


# ---- replay -----------------------------------------------------------------------------------------


async def replay(model: Any, record: Mapping[str, Any], turn: int) -> Trajectory:
    """Sample one turn anew with the model's current policy, from the messages that stood before it.

    The prompt is rendered as the client would: from the exact tokens where the model knows the conversation.
    Recorded under split ``replay`` in the model's run. Raises ConfigurationError, RequestError.
    """
    from artnb.recording import recording

    trajectory = mapping(record.get("trajectory"))
    body = request_of(trajectory, turn)
    # another seed, or it says the same again; one of its own, so that the engine's random state, which a
    # training run may be repeated by, stays
    body["seed"] = random.SystemRandom().getrandbits(31)
    started = time.time()
    with recording():
        answer = await model.client.chat.completions.create(model=model.name, **body)
    new = Trajectory(
        messages_and_choices=[*body["messages"], Turn.from_choice(answer.choices[0])],
        tools=body.get("tools"),
        scenario_id=str(trajectory.get("scenario_id") or ""),
        seat=str(trajectory.get("seat") or ""),
        parent_id=str(trajectory.get("id")),
        metadata={"replay_of": trajectory.get("id"), "turn": turn},
        started=started,
    ).finish()
    run = getattr(model, "run", None)
    if run is not None:
        stored = {"split": REPLAY, "gather_id": f"replay-{uuid.uuid4().hex[:8]}", "attempt": 0}
        run.append_trajectory(new, step=run.step, **stored)
        run.sync()
    return new
