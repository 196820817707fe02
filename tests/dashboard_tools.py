"""What stands in for the two ends of a dashboard's wire, and what does a step of a FakeBackend look like?"""

from __future__ import annotations

import json
from typing import Any

from steps import play

import artnb as nb
from artnb.dashboard.view import View

HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)</script>'


async def train(model: nb.Model, steps: int) -> None:
    for _ in range(steps):
        await nb.train_step(model, await play(model))


def whole(run: Any) -> View:
    view = View(run)
    view.look_at_everything()
    return view


class Browser:
    """What the front end does with messages, in Python."""

    def __init__(self) -> None:
        self.seq: int | None = None
        self.head: Any = None
        self.tables: dict[str, dict[str, Any]] = {}

    def take(self, message: dict[str, Any]) -> bool:
        message = json.loads(json.dumps(message))
        if message["reset"]:
            self.tables = {}
        elif self.seq is None or message["seq"] != self.seq + 1:
            return False
        self.seq, self.head = message["seq"], message.get("head", self.head)
        for name, new in message["tables"].items():
            self.tables.setdefault(name, {}).update(new)
        return True
