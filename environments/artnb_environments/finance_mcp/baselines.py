"""How well do scripts play that need no model and no server? One guesses, one takes what is most likely, one
knows the calls."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import date as Date
from typing import Any

from artnb import Scenario, Trajectory
from artnb_environments.finance_mcp.episode import COMPLETE, Episode
from artnb_environments.finance_mcp.market import TODAY, stock
from artnb_environments.finance_mcp.tools import ask

_TRADED = 252 / 365.25
"""Trading days for a day of the calendar, on average."""


class _Player:
    """Asks the tools and writes down what a model would have said and read."""

    def __init__(self, scenario: Scenario) -> None:
        self.task = scenario.task
        self.episode = Episode(scenario)
        self.trajectory = Trajectory(scenario_id=scenario.id)
        self.trajectory.messages_and_choices.append({"role": "user", "content": scenario.task["question"]})

    def call(self, name: str, **arguments: Any) -> str:
        told = ask(name, **arguments)
        self.episode.turns += 1
        self.episode.note(name, told, told.startswith("Error"))
        self._say(name, arguments, told)
        return told

    def complete(self, answer: str, summary: str) -> Trajectory:
        self.episode.turns += 1
        self.episode.complete(answer, summary)
        self._say(COMPLETE, {"answer": answer, "summary": summary}, None)
        return self.episode.score(self.trajectory)

    def _say(self, name: str, arguments: dict[str, Any], told: str | None) -> None:
        call_id = f"call_{self.episode.turns}"
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": call_id, "type": "function", "function": function}
        said = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        if told is not None:
            said.append({"role": "tool", "tool_call_id": call_id, "content": told})
        self.trajectory.messages_and_choices += said


def _random(scenario: Scenario) -> Trajectory:
    """Asks nothing; any of the choices, any close of the stock, any day or number of the window."""
    player, draw = _Player(scenario), random.Random(f"guess {scenario.seed}")
    task, given = scenario.task, scenario.task["plan"][-1][1]
    found = stock(given["symbol"])
    if task["choices"]:
        answer = draw.choice(task["choices"])
    elif task["kind"] == "percent":
        answer = f"{draw.uniform(-30, 30):.2f}"
    elif task["kind"] == "number":
        answer = str(draw.choice(found.close))
    else:
        places = found.between(given["start"], given["end"])
        days = [found.days[place] for place in places]
        answer = draw.choice(days) if task["kind"] == "date" else str(draw.randint(1, _days(given)))
    return player.complete(answer, "A guess.")


def _heuristic(scenario: Scenario) -> Trajectory:
    """One call at most: today's close for any price, the likeliest label, the middle of what is possible."""
    player, task = _Player(scenario), scenario.task
    given = task["plan"][-1][1]
    if task["kind"] == "number":
        told = player.call("get_stock_quote", symbol=given["symbol"], date=TODAY)
        return player.complete(told.split("close ")[1].split(",")[0], "The last close.")
    likely = {
        "label": task["choices"][0] if task["choices"] else "",
        "symbol": min(task["choices"], default=""),
        "percent": "5",
        "date": given.get("end", ""),
        "count": str(round(_TRADED * _days(given))) if "start" in given else "",
    }
    return player.complete(likely[task["kind"]], "What is most likely.")


def _days(given: dict[str, str]) -> int:
    return (Date.fromisoformat(given["end"]) - Date.fromisoformat(given["start"])).days + 1


def _oracle(scenario: Scenario) -> Trajectory:
    """Makes the calls that find the answer and gives it."""
    player = _Player(scenario)
    for name, given in scenario.task["plan"]:
        player.call(name, **given)
    return player.complete(str(scenario.task["answer"]), "Read from the results.")


baselines: dict[str, Callable[[Scenario], Trajectory]] = {
    "random": _random,
    "heuristic": _heuristic,
    "oracle": _oracle,
}
