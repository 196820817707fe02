"""What does the agent see and say? The prompt, two requests, and how the replies are read."""

from __future__ import annotations

import json
from typing import Any

from artnb import Dialogue, Scenario, Trajectory, Turn
from artnb_environments import read_tagged, variant_of
from artnb_environments.tool_lookup.tools import EXAMPLES, Lookup, Variant, question, result

SYSTEM = {
    "tags": "You sell goods. To see a price write <call>item</call>. "
    "Then answer with <answer>price</answer>.",
    "tools": "You sell goods. To see a price call the tool. Then answer with <answer>price</answer>.",
}
PRICE_TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of an item in this shop.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string", "description": "one word, for example kite"}},
            "required": ["item"],
        },
    },
}
STOP = ["</call>", "</answer>"]


def prompt(scenario: Scenario) -> list[dict[str, Any]]:
    """System, worked examples, question. All but the question is the same in every scenario."""
    variant = variant_of(scenario, Variant)
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM[variant.style]}]
    for number, (item, price) in enumerate(EXAMPLES[: variant.examples]):
        messages.append({"role": "user", "content": question(item)})
        messages += _worked_call(variant.style, f"example_{number}", item, result(item, price))
        messages.append({"role": "assistant", "content": f"<answer>{price}</answer>"})
    return [*messages, {"role": "user", "content": Lookup(scenario).question}]


def _worked_call(style: str, call_id: str, item: str, told: str) -> list[dict[str, Any]]:
    if style == "tags":
        return [
            {"role": "assistant", "content": f"<call>{item}</call>"},
            {"role": "user", "content": told},
        ]
    function = {"name": "price", "arguments": json.dumps({"item": item})}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": told},
    ]


async def rollout(model: Any, scenario: Scenario) -> Trajectory:
    """Ask for the price of one item: a call, its result, an answer."""
    variant = variant_of(scenario, Variant)
    shop = Lookup(scenario)
    tools = [PRICE_TOOL] if variant.style == "tools" else None
    trajectory = Trajectory(list(prompt(scenario)), tools=tools, scenario_id=scenario.id)

    turn = await _ask(model, trajectory, variant)
    item, call_id = read_tool_call(turn.message) if tools else (_read(turn, "call", r"\w+"), None)
    told = shop.call(item)
    if told is not None:
        role = {"role": "tool", "tool_call_id": call_id} if tools else {"role": "user"}
        trajectory.messages_and_choices.append({**role, "content": told})
        turn = await _ask(model, trajectory, variant)
        shop.answer(_read(turn, "answer", r"\d+"))
    return shop.score(trajectory)


def dialogue(scenario: Scenario) -> Dialogue:
    """The same episode for a person who asks for prices; the shop answers every call."""
    variant = variant_of(scenario, Variant)
    shop = Lookup(scenario)
    is_tool = variant.style == "tools"

    def respond(turn: Turn) -> list[dict[str, Any]]:
        if calls := turn.message.get("tool_calls"):
            items = [(read_tool_call({"tool_calls": [call]})[0], call["id"]) for call in calls]
            return [{"role": "tool", "tool_call_id": name, "content": told(item)} for item, name in items]
        if not is_tool and (item := _read(turn, "call", r"\w+")) is not None:
            return [{"role": "user", "content": told(item)}]
        shop.answer(_read(turn, "answer", r"\d+"))
        return []

    def told(item: str | None) -> str:
        return shop.call(item) or (f"{item}: not sold here" if item else "this call cannot be read")

    return Dialogue(
        prompt(scenario),
        respond,
        tools=[PRICE_TOOL] if is_tool else None,
        options=_options(variant),
        score=shop.score,
    )


def _options(variant: Variant) -> dict[str, Any]:
    """Of every request."""
    is_tool = variant.style == "tools"
    longest = variant.max_tokens or (64 if is_tool else 16)
    return {"max_tokens": longest, "stop": STOP[1:] if is_tool else STOP}


async def _ask(model: Any, trajectory: Trajectory, variant: Variant) -> Turn:
    """One request with the conversation so far; the turn joins the trajectory."""
    tools = {"tools": trajectory.tools} if trajectory.tools else {}
    response = await model.client.chat.completions.create(
        model=model.name, messages=trajectory.messages(), **_options(variant), **tools
    )
    turn = Turn.from_choice(response.choices[0])
    trajectory.messages_and_choices.append(turn)
    return turn


def _read(turn: Turn, tag: str, pattern: str) -> str | None:
    cut_off = turn.finish_reason == "length"
    return read_tagged(turn.message["content"], tag, pattern, cut_off=cut_off)


def read_tool_call(message: dict[str, Any]) -> tuple[str | None, str | None]:
    """Item and call id of exactly one well-formed call of ``price``, else (None, None)."""
    calls = message.get("tool_calls") or []
    if len(calls) != 1 or calls[0]["function"]["name"] != "price":
        return None, None
    try:
        arguments = json.loads(calls[0]["function"]["arguments"])
    except (ValueError, RecursionError):  # a thousand brackets are no arguments either
        return None, None
    item = arguments.get("item") if isinstance(arguments, dict) else None
    return (item.strip().lower(), calls[0]["id"]) if isinstance(item, str) else (None, None)
