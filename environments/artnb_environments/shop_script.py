"""What would a good model write and judge about the shop? Scripts for a judge on loopback that needs no key.

They stand in for a large model in the notebook ``zero_data``: one writes tasks for the shop's tools, the
other knows the goods and scores attempts by a ladder.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

from artnb_environments.shop_server import GOODS

_KEPT_OUT = ("kite", "ring", "drum", "sofa")
"""Goods of the worked examples."""
QUESTIONS = {"price": "How much is the {}?", "stock": "How many pieces of {} are left?"}


def example(tool: str, item: str) -> list[dict[str, str]]:
    """A worked episode in the text form of calls."""
    price, left = GOODS[item]
    result, answer = (f"{item}: {price}", price) if tool == "price" else (f"{item}: {left} left", left)
    return [
        {"role": "user", "content": QUESTIONS[tool].format(item)},
        {"role": "assistant", "content": f"<call>{tool} {item}</call>"},
        {"role": "user", "content": result},
        {"role": "assistant", "content": f"<answer>{answer}</answer>"},
    ]


def write_tasks(request: str) -> str:
    """The answer of a model that was asked for tasks: as many of each difficulty as it was asked for."""
    pairs = [(tool, item) for item in GOODS for tool in QUESTIONS if item not in _KEPT_OUT]
    random.Random(0).shuffle(pairs)
    tasks = (task for task in (QUESTIONS[tool].format(item) for tool, item in pairs) if task not in request)
    last = request.rsplit("Write ", 1)[-1]
    wanted = [(int(level), int(n)) for n, level in re.findall(r"(\d+) of difficulty (\d)", last)]
    written = [
        {"task": task, "difficulty": level} for level, n in wanted for task in itertools.islice(tasks, n)
    ]
    return json.dumps({"tasks": written})


def judge_attempts(context: list[dict[str, Any]], attempts: dict[str, list[dict[str, Any]]]) -> str:
    """The answer of a judge who knows the goods: a score for each attempt at the context's question."""
    question = str(context[-1]["content"])
    scores = [
        {"id": name, "explanation": why, "score": score}
        for name, entries in attempts.items()
        for score, why in [score_of(question, [str(one.get("content", "")) for one in entries])]
    ]
    return json.dumps({"scores": scores})


def score_of(question: str, said: list[str]) -> tuple[float, str]:
    """Score and reason of what was said after a question: 1 right, 0.7 answered, 0.5 right call, 0.2 a call.

    >>> score_of("How much is the rope?", ["<call>price rope"])
    (0.5, 'the right call and no answer')
    """
    tool, item = _asked(question)
    right = GOODS[item][0 if tool == "price" else 1]
    calls = re.findall(r"<call>\s*(\w+ \w+)", said[0]) if said else []
    answer = re.fullmatch(r"\s*<answer>\s*(\d+)\s*(?:</answer>)?\s*", said[-1]) if said else None
    if not calls:
        return 0.0, "no call of a tool"
    if calls != [f"{tool} {item}"]:
        return 0.2, "a call, but not the one that answers"
    if answer is None:
        return 0.5, "the right call and no answer"
    return (1.0, "right") if int(answer[1]) == right else (0.7, "answered, but not what the tool said")


def _asked(question: str) -> tuple[str, str]:
    for tool, form in QUESTIONS.items():
        found = re.fullmatch(re.escape(form).replace(r"\{\}", r"(\w+)"), question)
        if found is not None and found[1] in GOODS:
            return tool, found[1]
    raise ValueError(f"the scripted judge does not know the question {question!r}")
