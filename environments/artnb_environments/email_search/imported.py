"""What is asked of an imported mailbox? Questions of a file, each checked against the mails it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from artnb import ConfigurationError
from artnb_environments import SPLITS
from artnb_environments.email_search.importers import name_of
from artnb_environments.email_search.questions import DONT_KNOW
from artnb_environments.email_search.reward import is_day, values_in
from artnb_environments.email_search.store import MailStore
from artnb_environments.email_search.world import Person

TYPES = ("money", "date", "int", "code", "place", "person", "phrase")
_MOST_NAMES = 500


class Mailbox:
    """An imported mailbox that is open."""

    def __init__(self, path: str) -> None:
        self.store = MailStore.open(path)
        self._owners = self.store.owners
        self.names = lru_cache(maxsize=256)(self._names)

    @property
    def inboxes(self) -> list[str]:
        return list(self._owners)

    def owner(self, inbox: str) -> Person:
        return self._owners[inbox]

    def _names(self, inbox: str) -> list[str]:
        """Who writes most in an inbox, by their addresses: the possible answers to a who."""
        query = (
            "SELECT from_address FROM emails WHERE inbox = ? GROUP BY from_address "
            "ORDER BY count(*) DESC LIMIT ?"
        )
        names = [name_of(address) for (address,) in self.store.rows(query, (inbox, _MOST_NAMES))]
        return list(dict.fromkeys(name for name in names if " " in name))


def open_mailbox(path: str) -> Mailbox:
    """The mailbox of a file, opened once while the file stays as it is. Raises ConfigurationError."""
    file = Path(path).expanduser()
    changed = file.stat().st_mtime_ns if file.is_file() else 0
    return _open(str(file), changed)


@lru_cache(maxsize=4)
def _open(path: str, _: int) -> Mailbox:
    return Mailbox(path)


def read_questions(path: str, mailbox: str) -> list[dict[str, Any]]:
    """The questions of a file on a mailbox, as tasks with ``id`` and ``split``. Raises ConfigurationError.

    A line holds ``question``, ``answer``, ``sources`` (ids of the mailbox, or message ids of the mails),
    ``day``, ``inbox``, ``split`` and perhaps ``id``, ``answer_type`` and ``hints``. The names of OpenPipe's
    ``enron_emails_sample_questions`` are understood, too.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigurationError(f"there are no questions at {file}: write_questions makes some")
    changed = file.stat().st_mtime_ns
    return [dict(task) for task in _read_questions(str(file), changed, open_mailbox(mailbox))]


@lru_cache(maxsize=8)
def _read_questions(path: str, _: int, mailbox: Mailbox) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            task = as_task(json.loads(line), mailbox)
        except (ValueError, KeyError, TypeError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ConfigurationError(f"line {number} of {path} is no question: {why}") from error
        found[task["id"]] = task
    return list(found.values())


def as_task(record: Mapping[str, Any], mailbox: Mailbox) -> dict[str, Any]:
    """A line of a file of questions as a task. Raises ValueError, KeyError or TypeError where it is none."""
    inbox = str(record["inbox"] if "inbox" in record else record["inbox_address"])
    inbox = next((name for name in mailbox.inboxes if inbox in (name, mailbox.owner(name).address)), inbox)
    if inbox not in mailbox.inboxes:
        raise ValueError(f"the mailbox has no inbox {inbox!r}")
    sources = record["sources"] if "sources" in record else record["message_ids"]
    if not isinstance(sources, list):
        raise TypeError("sources must be a list")
    known = [_id_of(str(source), inbox, mailbox.store) for source in sources]
    answer, question = str(record["answer"]).strip(), str(record["question"]).strip()
    day = str(record["day"] if "day" in record else record["query_date"])[:10]
    split = str(record.get("split", "test"))
    if not answer or not question or not is_day(day) or split not in SPLITS:
        raise ValueError("it needs a question, an answer, a day as YYYY-MM-DD, and a split")
    kind = str(record.get("answer_type", "phrase"))
    return {
        "id": str(record.get("id", f"{inbox}/{question}")),
        "split": split,
        "inbox": inbox,
        "question": question,
        "day": day,
        "answer": answer if known else DONT_KNOW,
        "answer_type": kind if is_of_type(kind, answer, mailbox.names(inbox)) else "phrase",
        "sources": known,
        "parts": [],
        "hints": [str(hint) for hint in record.get("hints", [])],
        "world": -1,
        "level_found": 0,
    }


def is_of_type(kind: str, answer: str, names: list[str]) -> bool:
    """Whether an answer holds exactly one value of a type, so that typed match can tell it from others."""
    return kind in TYPES and len(values_in(kind, answer, names)) == 1


def _id_of(source: str, inbox: str, store: MailStore) -> str:
    query = "SELECT message_id FROM emails WHERE inbox = ? AND (message_id = ? OR original_id = ?)"
    for (found,) in store.rows(query, (inbox, source, source.strip("<> "))):
        return str(found)
    raise ValueError(f"inbox {inbox!r} has no mail {source!r}")
