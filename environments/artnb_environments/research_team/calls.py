"""What can an agent do? Its tools, how a call is read, and what is wrong with one that cannot be made."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from artnb import Turn
from artnb_environments import read_tagged
from artnb_environments.research_team.team import Agent, Message

_INTEGER, _TEXT = {"type": "integer"}, {"type": "string"}
_ABOUT: dict[str, tuple[str, dict[str, dict[str, str]]]] = {
    "delegate": ("Have a new agent read a report; gives its report.", {"report": _INTEGER, "task": _TEXT}),
    "ask": ("Ask an agent that reported once more.", {"agent": _INTEGER, "question": _TEXT}),
    "answer": ("Ends the task: the values in the order of the reports.", {"values": _TEXT}),
    "read": ("Your next part.", {}),
    "share": (
        "Have a new agent read some of your parts; gives its report.",
        {"first": _INTEGER, "last": _INTEGER, "task": _TEXT},
    ),
    "report": ("Tell your caller what you found; ends your work.", {"text": _TEXT}),
}
ROOT, BELOW = ("delegate", "ask", "answer"), ("read", "share", "report")
_LONGEST = 4_000


class Call(NamedTuple):
    """One call: numbers as int, texts as str, in the order of the tool's arguments."""

    name: str
    arguments: tuple[Any, ...]


def tools_of(agent: Agent) -> list[str]:
    """Names of the tools that an agent has."""
    if not agent.number:
        return list(ROOT)
    return [name for name in BELOW if name != "share" or agent.may_delegate]


def schemas(names: list[str]) -> list[dict[str, Any]]:
    """The tools for the API."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": _ABOUT[name][0],
                "parameters": {
                    "type": "object",
                    "properties": _ABOUT[name][1],
                    "required": list(_ABOUT[name][1]),
                },
            },
        }
        for name in names
    ]


def described(names: list[str]) -> str:
    """The tools for a prompt: ``<call>delegate report task</call>`` and what each does."""
    lines = []
    for name in names:
        about, arguments = _ABOUT[name]
        lines.append(f"<call>{' '.join([name, *arguments])}</call> {about}")
    return "\n".join(lines)


def written(style: str, name: str, *arguments: Any, number: int = 0) -> dict[str, Any]:
    """The assistant's message with a call."""
    if style == "tags":
        return {"role": "assistant", "content": f"<call>{' '.join(map(str, (name, *arguments)))}</call>"}
    kinds = _ABOUT[name][1]
    given = {
        key: value if kinds[key] is _INTEGER else str(value)
        for key, value in zip(kinds, arguments, strict=True)
    }
    function = {"name": name, "arguments": json.dumps(given)}
    call = {"id": f"example_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def read_call(turn: Turn, style: str, names: list[str]) -> Call:
    """The call of a reply. Raises ValueError with what the agent is told instead."""
    if style == "tools":
        return _read_made(turn.message.get("tool_calls") or [], names)
    text = turn.message.get("content") or ""
    is_cut = turn.finish_reason == "length"
    said = None
    if len(text) <= _LONGEST:
        said = read_tagged(text, "call", r"[^\s<>](?:[^<>]*[^\s<>])?", cut_off=is_cut, keep_case=True)
    if said is None:
        raise ValueError(f"reply with one call: {', '.join(names)}")
    name, _, rest = said.partition(" ")
    wanted = list(_known(name, names).values())
    words = rest.split(None, max(0, len(wanted) - 1)) if rest.strip() else []
    if len(words) != len(wanted):
        raise ValueError(_takes(name))
    return Call(name, tuple(_value(name, kind, word) for kind, word in zip(wanted, words, strict=True)))


def _read_made(calls: list[dict[str, Any]], names: list[str]) -> Call:
    if len(calls) != 1:
        raise ValueError(f"make one call a turn: {', '.join(names)}")
    name, arguments = str(calls[0]["function"]["name"]), str(calls[0]["function"]["arguments"] or "{}")
    wanted = _known(name, names)
    try:
        given = json.loads(arguments) if len(arguments) <= _LONGEST else None
    except (ValueError, RecursionError) as error:  # a thousand brackets are no arguments either
        raise ValueError("the arguments are no JSON") from error
    if not isinstance(given, dict) or set(given) != set(wanted):
        raise ValueError(_takes(name))
    return Call(name, tuple(_value(name, kind, given[key]) for key, kind in wanted.items()))


def _known(name: str, names: list[str]) -> dict[str, dict[str, str]]:
    if name not in names:
        raise ValueError(f"there is no call {name[:40]!r}: {', '.join(names)}")
    return _ABOUT[name][1]


def _takes(name: str) -> str:
    return f"{name} takes {', '.join(_ABOUT[name][1]) or 'nothing'}"


def _value(name: str, kind: dict[str, str], value: Any) -> int | str:
    if kind is _INTEGER:
        if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,4}", str(value)[:10]):
            raise ValueError(f"{_takes(name)}: a number")
        return int(value)
    if not isinstance(value, str):
        raise ValueError(f"{_takes(name)}: a text")
    return value


def results(turn: Turn, text: str) -> list[Message]:
    """What an agent hears after a reply: a result for each of its calls, or a user's turn."""
    calls = turn.message.get("tool_calls") or []
    if not calls:
        return [{"role": "user", "content": text}]
    texts = [text] + ["not made: one call a turn"] * (len(calls) - 1)
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": one}
        for call, one in zip(calls, texts, strict=True)
    ]
