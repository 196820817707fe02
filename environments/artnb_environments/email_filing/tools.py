"""What can an agent do with the mails, and how well were they filed? The tools, and one episode's state."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from artnb import Scenario, Trajectory
from artnb_environments.email_filing.rules import FIXED, Rules, Special, inbox_of, is_conflict, kinds_of
from artnb_environments.email_search.world import Mail

metrics = (
    *("correct", "wrong", "unfiled", "all_right", "conflicts_right", "turns", "calls", "extra_calls"),
    *("bad_calls", "tokens_read", "tokens_written", "seconds"),
)
PAGE = 10
"""Mails of a page of the list."""
WRONG, EXTRA, ALL_RIGHT = 0.5, 0.02, 0.2
LOWEST, HIGHEST = -1.0, 1.0 + ALL_RIGHT
_MOST_FOLDERS, _LONGEST_NAME = 40, 40


def _tool(tool: str, description: str, /, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": tool, "description": description, "parameters": parameters},
    }


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


TOOLS = [
    _tool("list_inbox", "Mails to file: id, date, sender, subject.", page={"type": "integer", "minimum": 1}),
    _tool("read_email", "One whole mail.", id=_text("id from the list")),
    _tool("move_email", "Files a mail.", id=_text("id from the list"), folder=_text("name of a folder")),
    _tool("create_folder", "Makes a folder that is missing.", name=_text("its name")),
    _tool("done", "Ends the task."),
]


class Episode:
    """Mails, folders, and where each mail was put. Needs no model."""

    def __init__(self, scenario: Scenario) -> None:
        task = scenario.task
        self.task = task
        self.rules = rules_of(scenario)
        place = (scenario.split, task["world"], task["inbox"])
        by_id = {mail.id: mail for mail in inbox_of(*place).mails}
        self.owner = inbox_of(*place).owner
        self.mails: dict[str, Mail] = {name: by_id[name] for name in task["ids"]}
        self.right: dict[str, str] = dict(zip(task["ids"], task["right"], strict=True))
        kinds = kinds_of(*place)
        self.torn = {n for n, mail in self.mails.items() if is_conflict(self.rules, mail, kinds.get(n))}
        self.folders = list(self.rules.folders)
        self.missing = self.folders.pop() if task["style"] == "tools" and self.rules.specials else None
        self.put: dict[str, str] = {}
        self.turns = self.calls = self.bad_calls = 0
        self.named_nothing = False
        self.done = False
        self.max_turns = task["max_turns"] or 3 * len(self.mails) + 8

    # ---- calls ----------------------------------------------------------------------------------

    def call(self, name: str, arguments: str) -> str:
        """The result of a tool call, as the agent reads it; a call that cannot be made gives "Error: ..."."""
        if self.done:
            return "Error: the task has ended"
        self.turns += 1
        self.calls += 1
        try:
            return self._made(name, arguments)
        except ValueError as error:
            return self._refused(str(error))

    def no_call(self) -> str:
        """A turn that is no call."""
        self.turns += 1
        return self._refused("call one of the tools")

    def _refused(self, why: str) -> str:
        self.bad_calls += 1
        self.done = self.task["invalid"] == "end"
        return f"Error: {why}"

    def _made(self, name: str, arguments: str) -> str:
        made: dict[str, Callable[..., str]] = {
            "list_inbox": self._list,
            "read_email": self._read,
            "move_email": self._move,
            "create_folder": self._create,
            "done": self._done,
        }
        if name not in made:
            raise ValueError(f"there is no tool {name[:50]!r}; there are {', '.join(made)}")
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError("the arguments are no JSON") from error
        (schema,) = (tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == name)
        known = schema["properties"]
        if not isinstance(given, dict) or set(given) != set(known):
            raise ValueError(f"{name} takes {', '.join(known) or 'no arguments'}")
        for argument, value in given.items():
            kind = int if known[argument]["type"] == "integer" else str
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{argument} must be of type {known[argument]['type']}")
        return made[name](**given)

    def _list(self, page: int) -> str:
        pages = -(-len(self.mails) // PAGE)
        if not 1 <= page <= pages:
            raise ValueError(f"page must be 1 to {pages}")
        shown = list(self.mails.values())[(page - 1) * PAGE : page * PAGE]
        lines = [f"{m.id} | {m.date[:10]} | {m.from_address} | {m.subject}" for m in shown]
        return "\n".join([*lines, f"page {page} of {pages}"])

    def _read(self, id: str) -> str:
        return told(self._mail(id))

    def _mail(self, name: str) -> Mail:
        mail = self.mails.get(name.strip())
        if mail is None:
            raise ValueError("there is no mail with this id")
        return mail

    def _move(self, id: str, folder: str) -> str:
        mail = self._mail(id)
        name = self._folder(folder)
        if name is None:
            raise ValueError(
                f"there is no folder {folder[:_LONGEST_NAME]!r}; there are {', '.join(self.folders)}"
            )
        self.put[mail.id] = name
        return f"{mail.id} is in {name}"

    def _folder(self, name: str) -> str | None:
        return next((folder for folder in self.folders if folder.lower() == name.strip().lower()), None)

    def _create(self, name: str) -> str:
        name = " ".join(name.split())
        if not 1 <= len(name) <= _LONGEST_NAME or self._folder(name) is not None:
            raise ValueError(f"a folder needs a new name of 1 to {_LONGEST_NAME} characters")
        if len(self.folders) >= _MOST_FOLDERS:
            raise ValueError(f"there are {_MOST_FOLDERS} folders already")
        self.folders.append(name)
        return f"there is a folder {name} now"

    def _done(self) -> str:
        self.done = True
        return "thank you"

    def answer(self, text: str) -> None:
        """The one reply of the word style: a folder's name and nothing else."""
        self.turns = self.calls = 1
        self.done = True
        (mail,) = self.mails
        folder = self._folder(text.strip().rstrip("."))
        if folder is None:
            self.bad_calls, self.named_nothing = 1, True
        else:
            self.put[mail] = folder

    # ---- score ----------------------------------------------------------------------------------

    @property
    def needed_calls(self) -> int:
        """Of an agent that lists, reads and moves each mail, makes the folder that it needs, and ends."""
        if self.task["style"] == "word":
            return 1
        pages = -(-len(self.mails) // PAGE)
        return pages + 2 * len(self.mails) + (self.missing in self.right.values()) + 1

    @property
    def achieved(self) -> dict[str, float]:
        """The metrics that the episode knows; shares are of the mails."""
        n = len(self.mails)
        right = {name for name, folder in self.put.items() if folder == self.right[name]}
        return {
            "correct": len(right) / n,
            "wrong": (len(self.put) - len(right)) / n,
            "unfiled": (n - len(self.put)) / n,
            "all_right": float(len(right) == n),
            "conflicts_right": len(right & self.torn) / len(self.torn) if self.torn else 1.0,
            "turns": float(self.turns),
            "calls": float(self.calls),
            "extra_calls": float(max(0, self.turns - self.needed_calls)),
            "bad_calls": float(self.bad_calls),
        }

    @property
    def reward(self) -> float:
        """Right moves less half of the wrong, less 0.02 an extra call; 0.2 more when all is right."""
        if self.named_nothing:
            return LOWEST
        got = self.achieved
        value = (
            got["correct"] - WRONG * got["wrong"] - EXTRA * got["extra_calls"] + ALL_RIGHT * got["all_right"]
        )
        return min(HIGHEST, max(LOWEST, value))

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Write reward, metrics and what ``render`` shows onto the episode's trajectory."""
        took = sum(t.timing.get("queued", 0.0) + t.timing.get("seconds", 0.0) for t in trajectory.turns)
        more = {
            "tokens_read": float(sum(len(turn.prompt_ids) for turn in trajectory.turns)),
            "tokens_written": float(trajectory.completion_tokens),
            "seconds": float(took),
        }
        trajectory.reward = round(self.reward, 6)
        trajectory.metrics |= self.achieved | more
        trajectory.metadata |= {
            "rules": self.rules.lines,
            "filed": [[mail.subject, self.put.get(n), self.right[n]] for n, mail in self.mails.items()],
        }
        return trajectory


def rules_of(scenario: Scenario) -> Rules:
    """The rules of a scenario."""
    task = scenario.task
    if task["fixed_rules"]:
        return FIXED
    specials = tuple(Special(*one) for one in task["special_rules"])
    return Rules(
        scenario.split, tuple(task["topic_kinds"]), specials, task["topics"] == 7, task["rules_seed"]
    )


def told(mail: Mail) -> str:
    """A mail as the agent reads it."""
    cc = f"\ncc: {', '.join(mail.cc)}" if mail.cc else ""
    head = f"id: {mail.id}\ndate: {mail.date}\nfrom: {mail.from_address}\nto: {', '.join(mail.to)}{cc}"
    return f"{head}\nsubject: {mail.subject}\n\n{mail.body}"
