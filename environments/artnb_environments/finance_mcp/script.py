"""What would a good model write and judge about these tools? Scripts for a judge on loopback without a key.

They stand in for a large model in the notebook ``finance_mcp``: one writes tasks for the server's tools, the
other knows the prices and scores attempts.
"""

from __future__ import annotations

import itertools
import json
import re
from functools import lru_cache
from typing import Any

from artnb_environments.finance_mcp.questions import Question, draw_question, is_right

_WRITTEN = 200
"""Questions that the script knows."""
_SEED = 3 * 10**9
"""Far from the seeds of any split's scenarios, which are drawn."""


@lru_cache(maxsize=1)
def known() -> dict[str, Question]:
    """Text -> question, of all that the script can write."""
    drawn = [draw_question("train", _SEED + n, "close") for n in range(_WRITTEN)]
    return {str(question["question"]): question for question in drawn}


def write_tasks(request: str) -> str:
    """The answer of a model that was asked for tasks: as many of each difficulty as it was asked for."""
    tasks = (task for task in known() if task not in request)
    wanted = re.findall(r"(\d+) of difficulty (\d)", request.rsplit("Write ", 1)[-1])
    written = [
        {"task": task, "difficulty": int(level)}
        for count, level in wanted
        for task in itertools.islice(tasks, int(count))
    ]
    return json.dumps({"tasks": written})


def judge_attempts(context: list[dict[str, Any]], attempts: dict[str, list[dict[str, Any]]]) -> str:
    """The answer of a judge who knows the prices: a score for each attempt at the context's question."""
    question = known()[str(context[-1]["content"])]
    scores = []
    for name, entries in attempts.items():
        score, why = score_of(question, [str(one.get("content", "")) for one in entries])
        scores.append({"id": name, "explanation": why, "score": score})
    return json.dumps({"scores": scores})


def score_of(question: Question, said: list[str]) -> tuple[float, str]:
    """Score and reason of what was said after a question: 1 right, 0.5 the right call, 0.2 a call, else 0."""
    ((tool, given),) = question["plan"]
    answer = re.fullmatch(r"\s*<answer>\s*([^<]*?)\s*(?:</answer>)?\s*", said[-1]) if said else None
    if answer is not None and is_right(answer[1], question):
        return 1.0, "right"
    if any(re.match(rf"\s*<call>\s*{tool} {' '.join(given.values())}", text) for text in said):
        return 0.5, "the right call, but not the right answer"
    if any(re.match(r"\s*<call>\s*\w+", text) for text in said):
        return 0.2, "a call, but not the one that answers"
    return 0.0, "no call of a tool"
