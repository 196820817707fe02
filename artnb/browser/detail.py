"""What does one trajectory look like, turn by turn? Plain values from the JSON that was stored.

Reads what is there: fields may be missing or of any type, and texts of any length are cut with a count.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from artnb.browser.plain import Cutter, mapping, number, pretty, sequence, text
from artnb.ui.snapshot import content_text

LONGEST_TEXT, LONGEST_ALL = 40_000, 1_200_000
"""Characters of one text, and of all texts of a trajectory."""
_MOST_ENTRIES, _MOST_CALLS, _MOST_IMAGES, _MOST_TOOLS, _MOST_LOGS = 600, 64, 16, 64, 500
_MOST_HISTORIES, _MOST_VALUES = 40, 200
_MOST_IMAGE, _MOST_IMAGES_BYTES = 2_000_000, 6_000_000
_DATA_URL = re.compile(r"data:(image/(?:png|jpeg|gif|webp));base64,", re.IGNORECASE)
_MAGIC = {"png": b"\x89PNG", "jpeg": b"\xff\xd8\xff", "gif": b"GIF8", "webp": b"RIFF"}
_KNOWN_PARTS = ("text", "image_url", "input_audio", "image", "audio", "output_text", "input_text")


def detail(record: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the record of a trajectory says by itself: see ``Source.trajectory``."""
    trajectory = mapping(record.get("trajectory"))
    cut = Cutter(LONGEST_TEXT, LONGEST_ALL)
    metrics = list(mapping(trajectory.get("metrics")).items())[:_MOST_VALUES]
    metadata = mapping(trajectory.get("metadata"))
    reward = trajectory.get("reward")
    found = {
        "reward": number(reward),
        "reward_text": "not scored" if reward is None else cut(str(reward), 100),
        "parts": {text(n)[7:100]: _shown(v) for n, v in metrics if str(n).startswith("reward/")},
        "metrics": {text(n)[:100]: _shown(v) for n, v in metrics if not str(n).startswith("reward/")},
        "judge": _judge(metadata, mapping(record.get("group_metadata")), cut),
        "error": _error(trajectory.get("error"), cut),
        "timings": _timings(trajectory),
        "tools": [_tool(tool, cut) for tool in sequence(trajectory.get("tools"))[:_MOST_TOOLS]],
        "histories": histories(trajectory, cut),
        "logs": _logs(trajectory, cut),
        "metadata": cut(pretty(metadata), 100_000),
        "gathered": {
            name: cut(record.get(name), 200) for name in ("split", "gather_id", "attempt", "session")
        },
    }
    return found | {"cut": cut.cut}


def histories(trajectory: Mapping[str, Any], cut: Cutter) -> list[dict[str, Any]]:
    """The main conversation and the others, each as a list of entries."""
    found, first_turn = [], 0
    given = [trajectory, *map(mapping, sequence(trajectory.get("additional_histories")))]
    for index, history in enumerate(given):
        items = [mapping(item) for item in sequence(history.get("messages_and_choices"))]
        turns = sum("turn" in item for item in items)
        if index < _MOST_HISTORIES:
            entries, hidden = _entries(items, first_turn, cut)
            kind = "main" if index == 0 else "additional"
            title = "conversation" if index == 0 else f"history {index + 1} of {len(given)}"
            about = {"title": title, "kind": kind, "turns": turns, "entries": entries, "hidden": hidden}
            found.append(about)
        first_turn += turns
    return found


def _entries(
    items: list[Mapping[str, Any]], first_turn: int, cut: Cutter
) -> tuple[list[dict[str, Any]], int]:
    """The first and the last entries of a conversation, and how many between them are left out."""
    hidden = max(0, len(items) - _MOST_ENTRIES)
    head = _MOST_ENTRIES - _MOST_ENTRIES // 4 if hidden else len(items)
    entries, turn, images = list[dict[str, Any]](), first_turn, _Images()
    for index, item in enumerate(items):
        is_shown = index < head or index >= head + hidden
        if is_shown:
            entries.append(_entry(index, item, turn if "turn" in item else None, cut, images))
        turn += "turn" in item
    _pair(entries)
    return entries, hidden


def _entry(
    index: int, item: Mapping[str, Any], turn: int | None, cut: Cutter, images: _Images
) -> dict[str, Any]:
    sampled = mapping(item.get("turn"))
    message = mapping(sampled.get("message") if turn is not None else item.get("message"))
    before, content = cut.cut, message.get("content")
    entry: dict[str, Any] = {
        "index": index,
        "role": cut(message.get("role") or "?", 40),
        "name": cut(message.get("name"), 100) or None,
        "text": cut(_text_of(content)),
        "reasoning": cut(content_text(message.get("reasoning_content") or message.get("reasoning"))),
        "calls": [_call(call, cut) for call in sequence(message.get("tool_calls"))[:_MOST_CALLS]],
        "result_of": cut(message.get("tool_call_id"), 200) or None,
        "images": [images.shown(part) for part in _media(content)],
        "unparsed": cut(message.get("tool_call_error"), 2000) or None,
        "sampled": turn is not None,
        "turn": turn,
    }
    logprobs = [v for p in sequence(sampled.get("logprobs")) if (v := number(p)) is not None]
    timing = mapping(sampled.get("timing"))
    entry |= {
        "tokens": len(sequence(sampled.get("completion_ids"))) if turn is not None else None,
        "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
        "version": number(sampled.get("policy_version")),
        "finish_reason": cut(sampled.get("finish_reason"), 40) or None,
        "seconds": number(timing.get("seconds")),
        "queued": number(timing.get("queued")),
        "credit": number(sampled.get("credit")),
        "sampling": {cut(n, 40): _shown(v) for n, v in list(mapping(sampled.get("sampling")).items())[:20]},
    }
    return entry | {"cut": cut.cut - before}


def _pair(entries: list[dict[str, Any]]) -> None:
    """Tell calls which entry answers them. Results without an id answer the calls before them in order."""
    open_calls: list[dict[str, Any]] = []
    for entry in entries:
        open_calls += entry["calls"]
        if entry["role"] not in ("tool", "function"):
            continue
        wanted = entry["result_of"]
        fits = [call for call in open_calls if wanted is None or call["id"] == wanted]
        if fits:
            fits[0]["result"] = entry["index"]
            entry["result_of"] = fits[0]["id"]
            open_calls = [call for call in open_calls if call is not fits[0]]


def _call(call: Any, cut: Cutter) -> dict[str, Any]:
    function = mapping(mapping(call).get("function"))
    arguments = function.get("arguments")
    raw = arguments if isinstance(arguments, str) else pretty(arguments)
    error, shown = None, raw
    try:
        value = json.loads(raw) if isinstance(arguments, str) and len(raw) < 1_000_000 else arguments
        shown = pretty(value) if isinstance(value, dict) else raw
        error = None if isinstance(value, dict) else "the arguments are not a JSON object"
    except (ValueError, RecursionError) as problem:
        error = f"the arguments are not JSON: {problem}"
    if not isinstance(function.get("name"), str):
        error = "the call has no name"
    return {
        "id": cut(mapping(call).get("id"), 200) or None,
        "name": cut(function.get("name") or "?", 200),
        "arguments": cut(shown),
        "raw": cut(raw) if shown != raw else cut(raw, 2000),
        "parsed": error is None,
        "error": cut(error, 500) if error else None,
        "result": None,
    }


def _text_of(content: Any) -> str:
    """The text of a message; of its parts, those that are no pictures or sounds."""
    if not isinstance(content, (list, tuple)):
        return content_text(content)
    return "\n".join(_part_text(part) for part in content if not _is_media(part))


def _part_text(part: Any) -> str:
    if isinstance(part, Mapping) and "text" in part:
        return str(part["text"])
    return part if isinstance(part, str) else pretty(part, 5000)


def _is_media(part: Any) -> bool:
    return isinstance(part, Mapping) and "text" not in part and str(part.get("type")) in _KNOWN_PARTS


def _media(content: Any) -> Iterable[Mapping[str, Any]]:
    parts = [part for part in sequence(content) if _is_media(part)]
    return parts[:_MOST_IMAGES]


class _Images:
    """Pictures and sounds as far as they are safe and small enough to be shown."""

    def __init__(self) -> None:
        self._left = _MOST_IMAGES_BYTES

    def shown(self, part: Mapping[str, Any]) -> dict[str, Any]:
        audio = part.get("input_audio") or part.get("audio")
        if audio is not None or "audio" in str(part.get("type")):
            data = mapping(audio).get("data")
            form = text(mapping(audio).get("format") or "?")[:20]
            size = len(data) * 3 // 4 if isinstance(data, str) else 0
            return {"kind": "audio", "source": "", "mime": f"audio/{form}", "bytes": size, "shown": False}
        given = part.get("image_url", part.get("image"))
        url = given if isinstance(given, str) else mapping(given).get("url")
        url = url if isinstance(url, str) else ""
        if not url.startswith("data:"):
            return {"kind": "url", "source": text(url[:2000]), "mime": "", "bytes": 0, "shown": False}
        return self._data(url)

    def _data(self, url: str) -> dict[str, Any]:
        match = _DATA_URL.match(url)
        about = {"kind": "data", "source": "", "mime": text(url[5:60].partition(";")[0]), "shown": False}
        size = max(0, len(url) - (match.end() if match else 5)) * 3 // 4
        if match and len(url) <= min(_MOST_IMAGE, self._left) and _is_picture(url[match.end() :], match[1]):
            self._left -= len(url)
            about |= {"source": url, "mime": match[1].lower(), "shown": True}
        return about | {"bytes": size}


def _is_picture(data: str, mime: str) -> bool:
    """True when the data are what their type says; an SVG, which can run scripts, never is."""
    with_padding = data[:64] + "=" * (-len(data[:64]) % 4)
    try:
        head = base64.b64decode(with_padding, validate=True)
        return data.isascii() and re.fullmatch(r"[A-Za-z0-9+/=]*", data) is not None and _begins(head, mime)
    except (binascii.Error, ValueError):
        return False


def _begins(head: bytes, mime: str) -> bool:
    return head.startswith(_MAGIC[mime.lower().partition("/")[2]])


def _judge(metadata: Mapping[str, Any], group: Mapping[str, Any], cut: Cutter) -> dict[str, Any] | None:
    """What a judge said: score, explanation and whatever else was kept; its raw answers are the group's."""
    told = metadata.get("judge")
    if told is None:
        return None
    if not isinstance(told, Mapping):
        return {"explanation": cut(told), "score": None, "raw": None}
    known = ("score", "explanation", "raw", "spread")
    opinions = sequence(mapping(group.get("judge")).get("opinions"))[:20]
    raw = told.get("raw") or "\n\n".join(content_text(mapping(one).get("raw")) for one in opinions)
    more = {name: value for name, value in list(told.items())[:_MOST_VALUES] if name not in known}
    return {
        "score": number(told.get("score")),
        "explanation": cut(told.get("explanation")),
        "spread": number(told.get("spread")),
        "raw": cut(raw) or None,
        "explanations": [cut(one) for one in sequence(told.get("explanations"))[:20]],
        "judges": [cut(one, 200) for one in sequence(told.get("judges"))[:20]],
        "own_reward": number(told.get("own_reward")),
        "more": cut(pretty(more), 20_000) if more else None,
    }


def _error(error: Any, cut: Cutter) -> dict[str, str] | None:
    if error is None:
        return None
    given = mapping(error)
    return {
        "type": cut(given.get("type") or "Error", 200),
        "message": cut(given.get("message") if given else error, 20_000),
        "traceback": cut(given.get("traceback"), 60_000),
    }


def _logs(trajectory: Mapping[str, Any], cut: Cutter) -> list[str]:
    logs = sequence(trajectory.get("logs"))
    shown = [cut(line, 10_000) for line in logs[:_MOST_LOGS]]
    return [*shown, f"… {len(logs) - _MOST_LOGS:,} more lines"] if len(logs) > _MOST_LOGS else shown


def _tool(tool: Any, cut: Cutter) -> dict[str, Any]:
    function = mapping(mapping(tool).get("function")) or mapping(tool)
    return {
        "name": cut(function.get("name") or "?", 200),
        "description": cut(function.get("description"), 5000),
        "parameters": cut(pretty(function.get("parameters")), 20_000),
    }


def _timings(trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """How long the episode took, and how much of it the engine: waiting, and sampling."""
    every = [trajectory, *map(mapping, sequence(trajectory.get("additional_histories")))]
    items = [mapping(item) for history in every for item in sequence(history.get("messages_and_choices"))]
    timings = [mapping(mapping(item["turn"]).get("timing")) for item in items if "turn" in item]
    queued, sampling = (sum(number(t.get(name)) or 0.0 for t in timings) for name in ("queued", "seconds"))
    seconds = number(trajectory.get("seconds"))
    return {
        "started": number(trajectory.get("started")),
        "seconds": seconds,
        "queued": queued if timings else None,
        "sampling": sampling if timings else None,
        "elsewhere": max(0.0, seconds - sampling) if timings and seconds is not None else None,
    }


def _shown(value: Any) -> Any:
    """A number, or a short text for whatever else it is."""
    found = number(value)
    return found if found is not None and not isinstance(value, bool) else text(str(value)[:200])
