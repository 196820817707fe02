"""What can an agent do in the mailbox, and how far has it come? The tools, and one episode's state."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from artnb import Scenario, Trajectory
from artnb_environments.email_search import semantic
from artnb_environments.email_search.imported import open_mailbox
from artnb_environments.email_search.reward import is_correct, is_day, ladder, precision_recall, says_unknown
from artnb_environments.email_search.store import Hit, MailStore
from artnb_environments.email_search.world import cast_of, make_inbox

metrics = (
    *("correct", "source_precision", "source_recall", "found", "read", "read_nothing", "answered"),
    *("dont_know", "turns", "calls", "bad_calls", "bad_call_rate", "questions_to_user"),
    *("tokens_read", "tokens_written", "seconds", "level"),
)
MOST_RESULTS = 10
MOST_KEYWORDS = 20
MOST_SOURCES = 20
USER_COST = 0.05


def _tool(name: str, description: str, required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _texts(description: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}, "description": description}


SEARCH = _tool(
    "search_emails",
    "Mails of the user's inbox that hold all of the keywords, newest first: id, date, sender, snippet.",
    ["keywords"],
    keywords=_texts("words or phrases that must all occur in subject or body"),
    from_addr=_text("sender's address"),
    to_addr=_text("address of a recipient"),
    sent_after=_text("YYYY-MM-DD, this day included"),
    sent_before=_text("YYYY-MM-DD, this day excluded"),
    max_results={"type": "integer", "minimum": 1, "maximum": MOST_RESULTS},
)
SEARCH_BY_MEANING = json.loads(json.dumps(SEARCH))
SEARCH_BY_MEANING["function"]["description"] = (
    "Mails of the user's inbox that mean what the words say, best first: id, date, sender, first words."
)
SEARCH_BY_MEANING["function"]["parameters"]["properties"]["keywords"]["description"] = (
    "words that describe what the mail says; it may use others"
)
READ = _tool("read_email", "One whole mail.", ["message_id"], message_id=_text("id from a search"))
ANSWER = _tool(
    "return_final_answer",
    'Ends the task. Answer "I don\'t know" with no sources when the mails do not tell.',
    ["answer", "sources"],
    answer=_text("short and complete"),
    sources=_texts("ids of the mails that the answer stands in"),
)
ASK = _tool("ask_user", "Ask the user back; each question has a price.", ["question"], question=_text("one"))


@lru_cache(maxsize=80)
def store_of(split: str, world: int, number: int, messages: int, distractors: float) -> MailStore:
    """The inbox as a searchable store, made once."""
    return MailStore(make_inbox(split, world, number, messages, distractors).mails)


class BadCall(Exception):
    """A call that cannot be made; ``outcome`` is its rung of the ladder."""

    def __init__(self, outcome: str, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome


class Episode:
    """One question: what was found and read, and how it ended. Needs no model."""

    def __init__(self, scenario: Scenario) -> None:
        task = scenario.task
        self.task = task
        by_words = task["search"] == "keywords"
        self.tools = [SEARCH if by_words else SEARCH_BY_MEANING, READ, ANSWER]
        self.tools += [ASK] if task["ask_user"] else []
        if task["mailbox"] is None:
            which = (task["world"], task["inbox"], task["messages"], task["distractors"])
            self.store = store_of(scenario.split, *which)
            cast = cast_of(scenario.split, task["world"])
            self.owner = cast[task["inbox"]]
            self.inbox = self.owner.address
            self.names = [person.name for person in cast]
        else:
            mailbox = open_mailbox(task["mailbox"])
            self.store, self.inbox = mailbox.store, task["inbox"]
            self.owner, self.names = mailbox.owner(self.inbox), mailbox.names(self.inbox)
        self.found: set[str] = set()
        self.read: set[str] = set()
        self.read_nothing = False
        self.turns = self.calls = self.bad_calls = self.asked = 0
        self.outcome = "none"
        self.answer: str | None = None
        self.sources: list[str] = []
        self.done = False

    # ---- calls ----------------------------------------------------------------------------------

    def call(self, name: str, arguments: str) -> str:
        """The result of a tool call, as the agent reads it; a call that cannot be made gives "Error: ..."."""
        if self.done:
            return "Error: the task has ended"
        self.calls += 1
        self.turns += 1
        try:
            return self._made(name, arguments)
        except BadCall as error:
            return self.refuse(error.outcome, str(error))

    def no_call(self, text: str) -> str:
        """A turn that is no call; ``text`` says what to do."""
        self.turns += 1
        return self.refuse("unreadable", text)

    def refuse(self, outcome: str, text: str) -> str:
        """Count a call that cannot be made; with ``invalid="end"`` it ends the episode."""
        self.bad_calls += 1
        self.outcome = outcome
        self.done = self.task["invalid"] == "end"
        return f"Error: {text}"

    def _made(self, name: str, arguments: str) -> str:
        made: dict[str, Callable[[dict[str, Any]], str]] = {
            "search_emails": self._search,
            "read_email": self._read,
            "return_final_answer": self._answer,
            "ask_user": self._ask,
        }
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}
        if name not in tools:
            raise BadCall("unknown_tool", f"there is no tool {name[:50]!r}; there are {', '.join(tools)}")
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise BadCall("unreadable", "the arguments are no JSON") from error
        if not isinstance(given, dict):
            raise BadCall("bad_arguments", "the arguments must be a JSON object")
        given = {key: value for key, value in given.items() if value is not None}
        _check(tools[name], given)
        text = made[name](given)
        self.outcome = "none" if not self.done else self.outcome
        return text

    def _search(self, given: dict[str, Any]) -> str:
        for name in ("sent_after", "sent_before"):
            if name in given and not is_day(given[name]):
                raise BadCall("bad_arguments", f"{name} must be a day as YYYY-MM-DD")
        if not 1 <= given.get("max_results", 1) <= MOST_RESULTS:
            raise BadCall("bad_arguments", f"max_results must be 1 to {MOST_RESULTS}")
        if not 1 <= len(given["keywords"]) <= MOST_KEYWORDS:
            raise BadCall("bad_arguments", f"keywords must be 1 to {MOST_KEYWORDS} words")
        hits = self._hits(**given, until=self.task["day"])
        self.found |= {hit.message_id for hit in hits}
        lines = [
            f"{h.message_id} | {h.date[:10]} | {h.from_address} | {h.subject} | {h.snippet}" for h in hits
        ]
        return "\n".join(" ".join(line.split()) for line in lines) or "no mail found"

    def _hits(self, keywords: list[str], **filters: Any) -> list[Hit]:
        how = self.task["search"]
        if how == "keywords":
            return self.store.search(self.inbox, keywords, **filters)
        embedder = self.task["embedder"]
        return semantic.search(self.store, self.inbox, keywords, how=how, embedder=embedder, **filters)

    def _read(self, given: dict[str, Any]) -> str:
        mail = self.store.read(self.inbox, given["message_id"].strip(), until=self.task["day"])
        if mail is None:
            self.read_nothing = True
            return "there is no mail with this id"
        self.read.add(mail.id)
        cc = f"\ncc: {', '.join(mail.cc)}" if mail.cc else ""
        head = f"id: {mail.id}\ndate: {mail.date}\nfrom: {mail.from_address}\nto: {', '.join(mail.to)}{cc}"
        return f"{head}\nsubject: {mail.subject}\n\n{mail.body}"

    def _answer(self, given: dict[str, Any]) -> str:
        if len(given["sources"]) > MOST_SOURCES:
            raise BadCall("bad_arguments", f"name at most {MOST_SOURCES} sources")
        self.answer, self.sources = given["answer"], [source.strip() for source in given["sources"]]
        task = self.task
        context = "; ".join([task["question"], *task["parts"]])
        is_right = is_correct(self.answer, task["answer"], task["answer_type"], context, self.names)
        self.outcome = "correct" if is_right else "none" if self.dont_know else "wrong"
        self.done = True
        return "thank you"

    def _ask(self, given: dict[str, Any]) -> str:
        hints = self.task["hints"]
        self.asked += 1
        return str(hints[self.asked - 1]) if self.asked <= len(hints) else "That is all I remember."

    # ---- score ----------------------------------------------------------------------------------

    @property
    def dont_know(self) -> bool:
        return self.answer is not None and says_unknown(self.answer)

    @property
    def achieved(self) -> dict[str, float]:
        """The metrics that the episode knows, each but the counts 0 to 1."""
        needed = set(self.task["sources"])
        precision, recall = precision_recall(self.sources, needed) if self.answer is not None else (0.0, 0.0)
        return {
            "correct": float(self.outcome == "correct"),
            "source_precision": precision,
            "source_recall": recall,
            "found": len(self.found & needed) / len(needed) if needed else 1.0,
            "read": len(self.read & needed) / len(needed) if needed else 1.0,
            "read_nothing": float(self.read_nothing),
            "answered": float(self.answer is not None),
            "dont_know": float(self.dont_know),
            "turns": float(self.turns),
            "calls": float(self.calls),
            "bad_calls": float(self.bad_calls),
            "bad_call_rate": self.bad_calls / max(1, self.turns),
            "questions_to_user": float(self.asked),
            "level": float(self.task["level_found"]),
        }

    @property
    def reward(self) -> float:
        return self.reward_of(self.outcome)

    def reward_of(self, outcome: str) -> float:
        """What the episode is worth if this was its outcome."""
        got, needed = self.achieved, self.task["sources"]
        precision, recall = got["source_precision"], got["source_recall"]
        is_exact = self.answer is not None and precision == recall == 1.0
        # Where there is nothing to find, having found it is no merit.
        partial = 0.1 * (
            (bool(needed) and got["found"] == 1.0)
            + (bool(needed) and got["read"] == 1.0)
            + (bool(self.read) and not self.read_nothing)
            + is_exact
        )
        return (
            ladder(
                outcome,
                partial=partial,
                source_f1=2 * precision * recall / (precision + recall) if precision + recall else 0.0,
                given=len(set(self.sources)),
                needed=len(needed),
                turns_left=max(0.0, 1 - self.calls / self.task["max_turns"]),
            )
            - USER_COST * self.asked
        )

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Write reward, metrics and what ``render`` shows onto the episode's trajectory."""
        trajectory.reward = round(self.reward, 6)
        turns = trajectory.turns
        took = sum(turn.timing.get("queued", 0.0) + turn.timing.get("seconds", 0.0) for turn in turns)
        trajectory.metrics |= self.achieved | {
            "tokens_read": float(sum(len(turn.prompt_ids) for turn in turns)),
            "tokens_written": float(trajectory.completion_tokens),
            "seconds": float(took),
        }
        trajectory.metadata |= {
            "question": self.task["question"],
            "day": self.task["day"],
            "truth": self.task["answer"],
            "true_sources": ", ".join(self.task["sources"]),
            "answer": self.answer,
            "sources": ", ".join(self.sources),
            "outcome": self.outcome,
            "reward_if_right": round(self.reward_of("correct"), 6),
        }
        return trajectory


def _check(parameters: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse arguments that are missing, unknown or of another type."""
    known = parameters["properties"]
    if unknown := [name for name in given if name not in known]:
        raise BadCall("bad_arguments", f"unknown argument {unknown[0][:50]!r}; there are {', '.join(known)}")
    if missing := [name for name in parameters["required"] if name not in given]:
        raise BadCall("bad_arguments", f"{missing[0]} is missing")
    for name, value in given.items():
        if not _is(known[name]["type"], value):
            raise BadCall("bad_arguments", f"{name} must be of type {known[name]['type']}")


def _is(kind: str, value: Any) -> bool:
    if kind == "array":
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str)
