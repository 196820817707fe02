"""What does the agent see and say? Prompt, worked examples, and how its calls reach the MCP server."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from artnb import Dialogue, Scenario, ToolServer, Turn, rollout_of
from artnb_environments import variant_of
from artnb_environments.finance_mcp.episode import (
    COMPLETE,
    COMPLETE_TASK,
    BadCall,
    Episode,
    read_arguments,
)
from artnb_environments.finance_mcp.server import make_server
from artnb_environments.finance_mcp.tools import INSTRUCTIONS
from artnb_environments.finance_mcp.variant import Variant

SYSTEM = {
    "tools": "You answer a question about stocks with the tools you have. End with complete_task: the answer "
    "and nothing else, and a sentence on how you found it.",
    "text": "You answer questions about stocks. Write <call>tool arguments</call>. Then answer with "
    "<answer>value</answer>. Tools: {tools}.",
}
STOP = ["</call>", "</answer>"]
_RARE = ("interval", "series_type", "outputsize")
MOST_CALLS = 8
"""Calls of one reply that are made."""
_EXAMPLES = (
    ("At what price did XYZ close on 2011-07-06? Answer with a number.", "get_stock_quote",
     {"symbol": "XYZ", "date": "2011-07-06"},
     "XYZ 2011-07-06: close 61.37, open 60.9, high 61.8, low 60.44, volume 5120300, previous close 61.02, "
     "change 0.35 (0.57 %)", "61.37"),
    ("At what price did QRS close on 2008-10-21? Answer with a number.", "get_stock_quote",
     {"symbol": "QRS", "date": "2008-10-21"},
     "QRS 2008-10-21: close 18.94, open 19.75, high 19.8, low 18.7, volume 20448100, previous close 19.9, "
     "change -0.96 (-4.82 %)", "18.94"),
)  # fmt: skip
_SERVERS: dict[tuple[asyncio.AbstractEventLoop, str, int], ToolServer] = {}
"""The servers in use, one for each event loop, transport and page size: all episodes share them."""


@lru_cache(maxsize=1)
def definitions() -> dict[str, dict[str, Any]]:
    """Name -> OpenAI definition of the server's tools and of ``complete_task``. Raises MissingDependency."""

    async def listed() -> list[dict[str, Any]]:
        async with ToolServer(make_server()) as server:
            return server.tools

    with ThreadPoolExecutor(1) as thread:  # a notebook's own loop is running
        tools = [*thread.submit(asyncio.run, listed()).result(), COMPLETE_TASK]
    return {tool["function"]["name"]: tool for tool in tools}


async def server_of(transport: str, page: int = 20_000) -> ToolServer:
    """The server that this loop's episodes share, opened. Raises ToolServerError."""
    for known in [key for key in _SERVERS if key[0].is_closed()]:
        del _SERVERS[known]
    key = (asyncio.get_running_loop(), transport, page)
    if key not in _SERVERS:
        command = [sys.executable, "-m", "artnb_environments.finance_mcp.server"]
        _SERVERS[key] = ToolServer(command if transport == "stdio" else make_server(), page=page)
    if not _SERVERS[key].tools:
        await _SERVERS[key].open()
    return _SERVERS[key]


def prompt(scenario: Scenario) -> list[dict[str, Any]]:
    """System, worked examples, question. All but the question is the same in every scenario."""
    variant = variant_of(scenario, Variant)
    system = f"{SYSTEM[variant.style]} {INSTRUCTIONS}" if variant.style == "tools" else _text_system()
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for number, example in enumerate(_EXAMPLES[: variant.examples]):
        messages += _worked(variant.style, number, *example)
    return [*messages, {"role": "user", "content": scenario.task["question"]}]


def _text_system() -> str:
    """The tools with their arguments in order, but for the rarely used ones at the end."""
    tools = []
    for name, tool in definitions().items():
        parameters = tool["function"]["parameters"]
        wanted = [one for one in parameters["properties"] if one not in _RARE]
        tools += [" ".join([name, *wanted])] * (name not in (COMPLETE, "read_more"))
    return SYSTEM["text"].format(tools="; ".join(tools))


def _worked(
    style: str, number: int, question: str, tool: str, given: dict[str, Any], told: str, answer: str
) -> list[dict[str, Any]]:
    if style == "text":
        texts = (
            question,
            f"<call>{tool} {' '.join(given.values())}</call>",
            told,
            f"<answer>{answer}</answer>",
        )
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    last = {"answer": answer, "summary": f"The quote of {given['date']} has the close."}
    for index, (name, arguments, result) in enumerate(((tool, given, told), (COMPLETE, last, "done"))):
        call_id, function = f"example_{number}_{index}", {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": call_id, "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": result},
        ]
    return messages


def dialogue(scenario: Scenario) -> Dialogue:
    """Calls and what the market answers, until ``complete_task``, a malformed call or the last turn."""
    variant, episode = variant_of(scenario, Variant), Episode(scenario)
    is_text = variant.style == "text"

    async def respond(turn: Turn) -> list[dict[str, Any]]:
        episode.turns += 1
        answer = await (_answer_text if is_text else _answer_calls)(episode, turn, variant)
        if episode.turns >= variant.max_turns and not episode.done:
            episode.end()
        return [] if episode.done else answer

    options: dict[str, Any] = {"max_tokens": variant.max_tokens or (48 if is_text else 256)}
    return Dialogue(
        prompt(scenario),
        respond,
        tools=None if is_text else [*definitions().values()],
        options=options | ({"stop": STOP} if is_text else {}),
        score=episode.score,
    )


rollout = rollout_of(dialogue)


async def _answer_calls(episode: Episode, turn: Turn, variant: Variant) -> list[dict[str, Any]]:
    """What each call of a reply told."""
    calls = turn.message.get("tool_calls") or []
    if not calls:
        return [{"role": "user", "content": episode.refuse(BadCall("call one of the tools"))}]
    told = []
    for number, call in enumerate(calls):
        name, arguments = str(call["function"]["name"]), str(call["function"]["arguments"] or "")
        is_made = number < MOST_CALLS and not episode.done
        text = await _call(episode, variant, name, arguments) if is_made else "Error: not made"
        told.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return told


async def _call(episode: Episode, variant: Variant, name: str, arguments: str) -> str:
    try:
        given = read_arguments(name, arguments, definitions())
    except BadCall as error:
        return episode.refuse(error)
    if name == COMPLETE:
        episode.complete(**given)
        return "done"
    result = await (await server_of(variant.transport, variant.page)).result(name, given)
    episode.note(name, result.text, result.is_error)
    return result.text


async def _answer_text(episode: Episode, turn: Turn, variant: Variant) -> list[dict[str, Any]]:
    """One ``<call>tool arguments</call>`` or ``<answer>value</answer>``."""
    text, cut_off = turn.message.get("content") or "", turn.finish_reason == "length"
    end = "</{}>" if cut_off else "(?:</{}>)?"
    call = re.fullmatch(rf"\s*<call>\s*(\w+)\s*([^<]*?)\s*{end.format('call')}\s*", text)
    answer = re.fullmatch(rf"\s*<answer>\s*([^<]+?)\s*{end.format('answer')}\s*", text)
    if answer is not None:
        told = await _call(episode, variant, COMPLETE, json.dumps({"answer": answer[1]}))
    elif call is not None:
        parameters = definitions().get(call[1], COMPLETE_TASK)["function"]["parameters"]
        told = await _call(episode, variant, call[1], ToolServer.arguments_of(call[2], parameters))
    else:
        told = episode.refuse(BadCall("write <call>tool arguments</call> or <answer>value</answer>"))
    return [{"role": "user", "content": told}]
