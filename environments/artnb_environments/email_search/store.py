"""How is a mailbox searched? SQLite with FTS5: all keywords, filters, newest first, one inbox at a time.

The tables are those of OpenPipe's ART-E, with the inbox added; recipients are keyed by the message id. An
imported mailbox is the same database in a file, which also knows whose the inboxes are.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artnb import ConfigurationError
from artnb_environments.email_search.world import Mail, Person

SCHEMA = """
CREATE TABLE emails (id INTEGER PRIMARY KEY, message_id TEXT UNIQUE, inbox TEXT, subject TEXT,
    from_address TEXT, date TEXT, body TEXT, labels TEXT, original_id TEXT);
CREATE TABLE recipients (email_id TEXT, recipient_address TEXT, recipient_type TEXT);
CREATE TABLE inboxes (inbox TEXT PRIMARY KEY, name TEXT, address TEXT);
CREATE INDEX recipients_of ON recipients (email_id, recipient_type);
CREATE VIRTUAL TABLE emails_fts USING fts5 (subject, body, content='emails', content_rowid='id',
    tokenize='porter unicode61');
"""
SNIPPET_TOKENS = 15


@dataclass(frozen=True)
class Hit:
    message_id: str
    date: str
    from_address: str
    subject: str
    snippet: str


class MailStore:
    """Mails in one SQLite database, in memory unless ``path`` names a new file."""

    def __init__(self, mails: Iterable[Mail] = (), path: str = ":memory:") -> None:
        self._db = sqlite3.connect(path, check_same_thread=False)
        self._lock = threading.Lock()  # gather may run in another thread than the cell that made this
        self._db.executescript(SCHEMA)
        self.add(mails)
        self.index()

    @classmethod
    def open(cls, path: str | Path) -> MailStore:
        """An imported mailbox, to be read only. Raises ConfigurationError where the file is none."""
        path = Path(path).expanduser()
        if not path.is_file():
            raise ConfigurationError(f"there is no mailbox at {path}: import_mailbox makes one")
        store = cls.__new__(cls)
        store._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)
        store._lock = threading.Lock()
        try:
            store._db.execute("SELECT original_id, labels FROM emails LIMIT 1")
            store._db.execute("SELECT name FROM inboxes LIMIT 1")
        except sqlite3.DatabaseError as error:
            store.close()
            raise ConfigurationError(f"{path} is no mailbox of import_mailbox: {error}") from error
        return store

    def add(self, mails: Iterable[Mail], details: Iterable[tuple[str, str]] | None = None) -> None:
        """Add mails; they are found from the next ``index`` on. details: labels and original id of each."""
        mails = list(mails)
        told = list(details) if details is not None else [("", "")] * len(mails)
        with self._lock, self._db as db:
            db.executemany(
                "INSERT INTO emails (message_id, inbox, subject, from_address, date, body, labels, "
                "original_id) VALUES (?,?,?,?,?,?,?,?)",
                (
                    (m.id, m.inbox, m.subject, m.from_address, m.date, m.body, *more)
                    for m, more in zip(mails, told, strict=True)
                ),
            )
            db.executemany(
                "INSERT INTO recipients VALUES (?,?,?)",
                (
                    (m.id, address, kind)
                    for m in mails
                    for kind, addresses in (("to", m.to), ("cc", m.cc))
                    for address in addresses
                ),
            )

    def index(self) -> None:
        """Make the full-text index anew."""
        with self._lock, self._db as db:
            db.execute("INSERT INTO emails_fts(emails_fts) VALUES ('rebuild')")

    def set_owners(self, owners: dict[str, Person]) -> None:
        """Say whose the inboxes are."""
        rows = [(inbox, person.name, person.address) for inbox, person in owners.items()]
        with self._lock, self._db as db:
            db.executemany("INSERT OR REPLACE INTO inboxes VALUES (?,?,?)", rows)

    @property
    def owners(self) -> dict[str, Person]:
        """Whose the inboxes of an imported mailbox are."""
        return {inbox: Person(name, address) for inbox, name, address in self.rows("SELECT * FROM inboxes")}

    def rows(self, query: str, given: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query in SQL."""
        with self._lock:
            return self._db.execute(query, given).fetchall()

    def search(
        self,
        inbox: str,
        keywords: Sequence[str],
        *,
        from_addr: str | None = None,
        to_addr: str | None = None,
        sent_after: str | None = None,
        sent_before: str | None = None,
        until: str | None = None,
        max_results: int = 10,
        any_keyword: bool = False,
    ) -> list[Hit]:
        """Mails of ``inbox`` with every keyword, newest first.

        Dates are ``YYYY-MM-DD``; ``sent_after`` includes its day, ``sent_before`` and ``until`` exclude it.
        ``any_keyword``: mails with at least one, best by BM25 first. Keywords are words or phrases, never
        FTS5 syntax.
        """
        phrases = [phrase for keyword in keywords if (phrase := _phrase(keyword))]
        if not phrases:
            return []
        where, given = filters(inbox, from_addr, to_addr, sent_after, sent_before, until)
        conditions = ["emails_fts MATCH ?", where]
        given.insert(0, (" OR " if any_keyword else " AND ").join(phrases))
        order = "bm25(emails_fts), e.date DESC" if any_keyword else "e.date DESC"
        query = (
            "SELECT e.message_id, e.date, e.from_address, e.subject, "
            f"snippet(emails_fts, 1, '', '', '…', {SNIPPET_TOKENS}) "
            "FROM emails_fts JOIN emails e ON e.id = emails_fts.rowid "
            f"WHERE {' AND '.join(conditions)} ORDER BY {order} LIMIT {int(max_results)}"
        )
        return [Hit(*row) for row in self.rows(query, given)]

    def read(self, inbox: str, message_id: str, until: str | None = None) -> Mail | None:
        """One mail with its recipients, or None where the inbox holds none of this id before ``until``."""
        with self._lock:
            row = self._db.execute(
                "SELECT message_id, inbox, date, subject, from_address, body FROM emails "
                "WHERE message_id = ? AND inbox = ? AND date < ?",
                (_clean(message_id), inbox, until or "9999"),
            ).fetchone()
            if row is None:
                return None
            to, cc = (
                tuple(address for (address,) in self._db.execute(_RECIPIENTS, (row[0], kind)))
                for kind in ("to", "cc")
            )
        message, owner, date, subject, sender, body = row
        return Mail(message, owner, date, subject, sender, to, cc, body)

    def close(self) -> None:
        self._db.close()


def filters(
    inbox: str,
    from_addr: str | None = None,
    to_addr: str | None = None,
    sent_after: str | None = None,
    sent_before: str | None = None,
    until: str | None = None,
) -> tuple[str, list[str]]:
    """The condition on the table ``emails e`` that these filters are, and its values."""
    conditions, given = ["e.inbox = ?"], [inbox]
    for condition, value in (
        ("lower(e.from_address) = lower(?)", from_addr),
        (_TO, to_addr),
        ("e.date >= ?", sent_after),
        ("e.date < ?", sent_before),
        ("e.date < ?", until),
    ):
        if value is not None:
            conditions.append(condition)
            given.append(_clean(value))
    return " AND ".join(conditions), given


_TO = (
    "EXISTS (SELECT 1 FROM recipients r "
    "WHERE r.email_id = e.message_id AND lower(r.recipient_address) = lower(?))"
)
_RECIPIENTS = (
    "SELECT recipient_address FROM recipients WHERE email_id = ? AND recipient_type = ? ORDER BY rowid"
)


def _clean(text: str) -> str:
    """What SQLite takes: no NUL, no lone surrogate."""
    return text.replace("\0", " ").encode("utf-8", "replace").decode("utf-8")


def _phrase(keyword: str) -> str:
    """A keyword as an FTS5 string; empty where nothing in it is searched for.

    >>> _phrase('say "vests" OR')
    '"say ""vests"" OR"'
    """
    keyword = _clean(keyword).strip()
    return '"' + keyword.replace('"', '""') + '"' if any(c.isalnum() for c in keyword) else ""
