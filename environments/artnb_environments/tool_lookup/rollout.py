"""What does the agent see and say? The prompt, two requests, and how the replies are read."""

from __future__ import annotations

import json
from typing import Any

from artnb import Scenario, Trajectory
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

    choice = await _ask(model, trajectory, variant)
    item, call_id = read_tool_call(choice) if tools else (_read(choice, "call", r"\w+"), None)
    told = shop.call(item)
    if told is not None:
        role = {"role": "tool", "tool_call_id": call_id} if tools else {"role": "user"}
        trajectory.messages_and_choices.append({**role, "content": told})
        choice = await _ask(model, trajectory, variant)
        shop.answer(_read(choice, "answer", r"\d+"))
    return shop.score(trajectory)


async def _ask(model: Any, trajectory: Trajectory, variant: Variant) -> Any:
    """One request with the conversation so far; the choice joins the trajectory."""
    tools = {"tools": trajectory.tools} if trajectory.tools else {}
    response = await model.client.chat.completions.create(
        model=model.name,
        messages=trajectory.messages(),
        max_tokens=variant.max_tokens or (64 if tools else 16),
        stop=STOP[1:] if tools else STOP,
        **tools,
    )
    trajectory.messages_and_choices.append(response.choices[0])
    return response.choices[0]


def _read(choice: Any, tag: str, pattern: str) -> str | None:
    cut_off = choice.finish_reason == "length"
    return read_tagged(choice.message.content, tag, pattern, cut_off=cut_off)


def read_tool_call(choice: Any) -> tuple[str | None, str | None]:
    """Item and call id of exactly one well-formed call of ``price``, else (None, None)."""
    calls = choice.message.tool_calls or []
    if len(calls) != 1 or calls[0].function.name != "price":
        return None, None
    try:
        arguments = json.loads(calls[0].function.arguments)
    except ValueError:
        return None, None
    item = arguments.get("item") if isinstance(arguments, dict) else None
    return (item.strip().lower(), calls[0].id) if isinstance(item, str) else (None, None)
