"""How does one's own mail get into the store? Imported from disk to a file on this machine, never further.

    report = import_mailbox("~/takeout/All mail.mbox", "mail.sqlite")
    env = artnb.load_environment("email_search", mailbox="mail.sqlite", questions="questions.jsonl")

Read are Enron's maildir and any other folder of message files, Maildir, mbox (Gmail's takeout, too), CSV and
parquet (Enron's, too). Attachments are passed over while reading, so memory stays small whatever their size.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from artnb import ConfigurationError, Progress, esc
from artnb_environments.email_search.mail_files import Found, Source, open_source
from artnb_environments.email_search.mail_text import Message, clean
from artnb_environments.email_search.store import MailStore
from artnb_environments.email_search.world import Mail, Person

INBOX = "mailbox"
"""Name of the inbox where a source holds one person's mail."""
_BATCH = 500
_MOST_PLACES = 3
_ENRON = re.compile(r"(?:.*maildir/)?([a-z][\w'-]*-[a-z])/(.+?)/\d+\.?$")
"""``allen-p/_sent_mail/17.``: whose mail, in which folder."""


@dataclass
class ImportReport:
    """What an import read, what it passed over and why."""

    source: str
    format: str
    path: str
    read: int = 0
    """Messages that were there."""
    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Why a message was not kept -> how many."""
    noted: Counter[str] = field(default_factory=Counter)
    """What had to be guessed, cut or left out of messages that were kept -> how many."""
    places: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Reason -> the first places where it occurred."""
    inboxes: dict[str, int] = field(default_factory=dict)
    """Inbox -> mails."""
    owners: dict[str, str] = field(default_factory=dict)
    """Inbox -> the address of whom it belongs to."""
    left_out: int = 0
    """Bytes of attachments and of what was cut."""
    seconds: float = 0.0

    def rows(self) -> list[dict[str, Any]]:
        """One row for each reason, the frequent ones first."""
        return [
            {"what": what, "why": why, "messages": count, "for example": "; ".join(self.places[why])}
            for what, counts in (("skipped", self.skipped), ("kept, but", self.noted))
            for why, count in counts.most_common()
        ]

    @property
    def _head(self) -> str:
        megabytes = self.left_out / 1e6
        return (
            f"{self.source} ({self.format}) → {self.path}: {self.read:,} messages read, "
            f"{self.kept:,} kept in {len(self.inboxes)} {'inbox' if len(self.inboxes) == 1 else 'inboxes'}, "
            f"{self.skipped.total():,} skipped, {megabytes:,.1f} MB left out, {self.seconds:.1f} s"
        )

    def __repr__(self) -> str:
        lines = [f"  {row['what']} {row['messages']:,} × {row['why']}" for row in self.rows()]
        return "\n".join([self._head, *lines])

    def _repr_html_(self) -> str:
        rows = "".join(
            "<tr>"
            + "".join(f'<td style="text-align:left">{esc(value)}</td>' for value in row.values())
            + "</tr>"
            for row in self.rows()
        )
        names = "".join(f"<th>{name}</th>" for name in ("", "why", "messages", "for example"))
        table = f"<table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
        note = "<small>Read on this machine; nothing was sent anywhere.</small>"
        return f"<div><div>{esc(self._head)}</div>{table}{note}</div>"


def import_mailbox(
    source: str | Path,
    path: str | Path,
    *,
    format: str | None = None,
    owner: str | None = None,
    longest_body: int = 5000,
    skip_labels: Sequence[str] = ("Spam", "Trash"),
    replace: bool = False,
    progress: bool = True,
) -> ImportReport:
    """Import mail from ``source`` into the mailbox file ``path``, which only this user may read.

    format: ``files`` (a folder of messages, Enron's included), ``maildir``, ``mbox``, ``csv``, ``parquet``;
        None tells it by the name. owner: the address whose mail it is; None takes what the mails suggest.
    longest_body: characters of a body that are kept. skip_labels: Gmail's labels and folders to pass over.
    replace: overwrite a file that is there.

    Messages that are the same in sender, date, subject and text are kept once for each inbox. The file
    appears when all is done; until then ``path`` is as it was. Raises ConfigurationError.
    """
    target = Path(path).expanduser()
    if target.exists() and not replace:
        raise ConfigurationError(f"{target} is there already: choose another path or pass replace=True")
    if longest_body < 1:
        raise ConfigurationError(f"longest_body must be 1 or more, got {longest_body}")
    opened = open_source(source, format)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    os.close(os.open(partial, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600))
    importing = _Import(opened, partial, ImportReport(str(opened.path), opened.format, str(target)))
    try:
        importing.run(longest_body, {label.lower() for label in skip_labels}, owner, progress)
        os.replace(partial, target)
    finally:
        importing.store.close()
        for left in (partial, Path(f"{partial}-journal")):
            left.unlink(missing_ok=True)
    return importing.report


class _Import:
    """One import under way."""

    def __init__(self, source: Source, path: Path, report: ImportReport) -> None:
        self.source, self.report = source, report
        self.store = MailStore(path=str(path))
        self.store.rows("PRAGMA synchronous = OFF")  # the file has no name of its own before all is in it
        self.mails: list[Mail] = []
        self.details: list[tuple[str, str]] = []
        self.digests: set[bytes] = set()
        self.ids: set[int] = set()
        self.senders: dict[str, Counter[str]] = defaultdict(Counter)
        self.parties: dict[str, Counter[str]] = defaultdict(Counter)
        self.names: dict[str, str] = {}

    def run(self, longest: int, skipped: set[str], owner: str | None, progress: bool) -> None:
        started, report = time.monotonic(), self.report
        unit, scale = ("MB", 1_000_000) if self.source.unit == "bytes" else (self.source.unit, 1)
        with Progress(max(1, self.source.total // scale), f"import, {unit}", enabled=progress) as bar:
            for found in self.source.read():
                report.read += 1
                self._take(found, longest, skipped)
                bar.update(found.done // scale)
            bar.update(max(1, self.source.total // scale))
        self._write()
        self.store.index()
        owners = {inbox: self._owner(inbox, owner) for inbox in report.inboxes}
        self.store.set_owners(owners)
        report.owners = {inbox: person.address for inbox, person in owners.items()}
        report.seconds = time.monotonic() - started

    def _take(self, found: Found, longest: int, skipped: set[str]) -> None:
        message, report = found.message, self.report
        if message is None:
            self._note(report.skipped, found.problem, found.place)
            return
        inbox, labels = _filed(found)
        if names := [name for name in labels if name.lower() in skipped]:
            self._note(report.skipped, f"in {names[0]}", found.place)
            return
        if len(message.body) > longest:
            message.notes.add("body cut")
            report.left_out += len(message.body) - longest
            message.body = message.body[:longest]
        content = (inbox, message.date, message.from_address, message.subject, message.body)
        digest = hashlib.blake2b(repr(content).encode("utf-8", "replace"), digest_size=16).digest()
        if digest in self.digests:
            self._note(report.skipped, "a copy of another message", found.place)
            return
        self.digests.add(digest)
        if message.original_id:
            if (known := hash(message.original_id)) in self.ids:
                message.notes.add("message id that another message has, too")
            self.ids.add(known)
        for note in message.notes:
            self._note(report.noted, note, found.place)
        report.left_out += message.left_out
        self._keep(inbox, labels, message)

    def _keep(self, inbox: str, labels: Sequence[str], message: Message) -> None:
        report = self.report
        texts = (message.subject, message.from_address, message.body)
        subject, sender, body = map(clean, texts)
        # The first seven-digit number: ids say nothing but the order of reading, and none is part of another.
        mail_id = f"m{1_000_000 + report.kept}"
        self.mails.append(Mail(mail_id, inbox, message.date, subject, sender, message.to, message.cc, body))
        self.details.append((clean(", ".join(labels))[:500], clean(message.original_id)))
        report.kept += 1
        report.inboxes[inbox] = report.inboxes.get(inbox, 0) + 1
        if any("sent" in label.lower() for label in labels):
            self.senders[inbox][sender] += 1
        self.parties[inbox].update({sender, *message.to, *message.cc} - {""})
        if message.from_name and len(self.names) < 200_000:
            self.names.setdefault(sender, clean(message.from_name))
        if len(self.mails) >= _BATCH:
            self._write()

    def _write(self) -> None:
        self.store.add(self.mails, self.details)
        self.mails, self.details = [], []

    def _note(self, counts: Counter[str], why: str, place: str) -> None:
        counts[why] += 1
        if len(self.report.places[why]) < _MOST_PLACES:
            self.report.places[why].append(place[-100:])

    def _owner(self, inbox: str, given: str | None) -> Person:
        """Who writes what is in the folders of sent mail; else who takes part in most mails."""
        likely = (self.senders[inbox] or self.parties[inbox]).most_common(1)
        address = given.strip().lower() if given and inbox == INBOX else likely[0][0] if likely else inbox
        return Person(self.names.get(address) or name_of(address), address)


def _filed(found: Found) -> tuple[str, tuple[str, ...]]:
    """Inbox and labels of a message: of Enron's folders the first is a person."""
    assert found.message is not None
    if enron := _ENRON.match(found.folder) or _ENRON.match(found.place):
        return enron[1], (enron[2],)
    labels = found.message.labels or tuple(part for part in found.folder.split("/") if part not in ("", "."))
    return INBOX, labels


def name_of(address: str) -> str:
    """A person's name as the address tells it.

    >>> name_of("greta.tobin@example.com")
    'Greta Tobin'
    """
    words = re.findall(r"[^\W\d_]+", address.partition("@")[0])
    return " ".join(word.capitalize() for word in words) or address
