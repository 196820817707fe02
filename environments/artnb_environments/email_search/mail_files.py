"""Where do the messages of a mailbox lie? Folders, mbox files and tables, read one after the other."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from artnb import ConfigurationError, MissingDependency
from artnb_environments.email_search.mail_text import (
    Message,
    addresses_of,
    clean,
    read_date,
    read_message,
    text_of_html,
)

FORMATS = ("files", "maildir", "mbox", "csv", "parquet")
_PIECE = 64 * 1024
"""Bytes of a line that are held at once; some attachments are one line."""
LONGEST_FIELD = 32 * 1024 * 1024
"""Characters of a table's field; a row with a longer one ends the reading."""
_BATCH = 128

_COLUMNS = {
    "original_id": ("message_id", "message-id", "messageid", "id"),
    "date": ("date", "sent", "sent_at", "timestamp", "datetime"),
    "subject": ("subject", "title"),
    "from_address": ("from", "from_address", "sender", "from_addr", "x-from"),
    "to": ("to", "to_address", "to_addresses", "recipients", "recipient", "to_addr"),
    "cc": ("cc", "cc_addresses"),
    "body": ("body", "content", "text", "message_body", "plain", "body_plain"),
    "html": ("html", "body_html"),
    "folder": ("file_name", "file", "folder", "path", "filename", "labels"),
    "raw": ("message", "raw", "eml"),
}
"""What tables call the parts of a mail, lower case, the likeliest first."""


@dataclass(frozen=True)
class Found:
    """A place where a message should be: what was read there, or why nothing was."""

    place: str
    message: Message | None
    folder: str = ""
    problem: str = ""
    done: int = 0
    """Of ``Source.total``."""


@dataclass(frozen=True)
class Source:
    """A mailbox on disk."""

    path: Path
    format: str
    total: int
    """Files, or bytes, or rows."""
    unit: str
    read: Callable[[], Iterator[Found]]


def open_source(path: str | Path, format: str | None = None) -> Source:
    """The mailbox at a path. Raises ConfigurationError where there is none of that format."""
    path = Path(path).expanduser()
    if not path.exists():
        raise ConfigurationError(f"there is no mailbox at {path}")
    format = format or _guess(path)
    if format not in FORMATS:
        raise ConfigurationError(f"format must be one of {', '.join(FORMATS)}; got {format!r}")
    if path.is_dir() != (format in ("files", "maildir")):
        raise ConfigurationError(f"{path} is a {'folder' if path.is_dir() else 'file'}: no {format}")
    if format in ("files", "maildir"):
        files = list(_files(path, format == "maildir"))
        return Source(path, format, len(files), "files", lambda: _read_files(path, files, format))
    if format == "parquet":
        table = _parquet(path)
        return Source(path, format, table.metadata.num_rows, "rows", lambda: _read_parquet(path, table))
    read = _read_mbox if format == "mbox" else _read_csv
    return Source(path, format, max(1, path.stat().st_size), "bytes", lambda: read(path))


def _guess(path: Path) -> str:
    if path.is_dir():
        is_maildir = any((folder / "cur").is_dir() for folder in (path, *path.iterdir()) if folder.is_dir())
        return "maildir" if is_maildir else "files"
    return {".csv": "csv", ".parquet": "parquet"}.get(path.suffix.lower(), "mbox")


# ---- folders ----------------------------------------------------------------------------------------


def _files(root: Path, is_maildir: bool) -> Iterator[Path]:
    """Regular files, sorted; no link is followed out of the mailbox."""
    for folder, inner, names in os.walk(root):
        inner.sort()
        if is_maildir and os.path.basename(folder) not in ("cur", "new"):
            continue
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file() and not file.is_symlink():
                yield file


def _read_files(root: Path, files: list[Path], format: str) -> Iterator[Found]:
    for number, file in enumerate(files, 1):
        place = str(file.relative_to(root))
        folder = str(file.parent.relative_to(root))
        if format == "maildir":
            folder = str(file.parent.parent.relative_to(root)).lstrip(".") or "INBOX"
            if "T" in file.name.rpartition(":2,")[2] and ":2," in file.name:
                yield Found(place, None, folder, "marked as deleted", number)
                continue
        try:
            with file.open("rb") as stream:
                message = read_message(_lines(stream))
            yield Found(place, message, folder, done=number)
        except (OSError, ValueError) as error:
            yield Found(place, None, folder, _why(error), number)


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    while line := stream.readline(_PIECE):
        yield line


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error.strerror}" if isinstance(error, OSError) else str(error)


# ---- mbox -------------------------------------------------------------------------------------------


def _read_mbox(path: Path) -> Iterator[Found]:
    """Messages begin at "From " after an empty line, or at the start; ">From " in a text is one "From "."""
    with path.open("rb") as stream:
        lines = _Mbox(stream)
        if not lines.starts():
            raise ConfigurationError(f'{path} is no mbox: it does not begin with "From "')
        number = 0
        while (received := lines.next_message()) is not None:
            number += 1
            place = f"message {number}"
            try:
                message: Message | None = read_message(lines.message(), received=received)
                problem = ""
            except ValueError as error:
                message, problem = None, str(error)
            for _ in lines.message():  # what was not read of it
                pass
            folder = ", ".join(message.labels) if message else ""
            yield Found(place, message, folder, problem, stream.tell())


class _Mbox:
    """The lines of an mbox, one message at a time."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._ahead = stream.readline(_PIECE)
        while self._ahead and not self._ahead.strip():
            self._ahead = stream.readline(_PIECE)
        self._is_start = self.starts()
        self._is_after_empty = True

    def starts(self) -> bool:
        return self._ahead.startswith(b"From ")

    def next_message(self) -> str | None:
        """The date of the "From " line at which a message begins; None at the end."""
        if not self._ahead:
            return None
        words = self._ahead.decode("ascii", "replace").split()
        self._advance()
        self._is_start = False
        return " ".join(words[2:])

    def message(self) -> Iterator[bytes]:
        """The lines that are left of the message."""
        while self._ahead and not self._is_start:
            line = self._ahead
            self._advance()
            yield line[1:] if line.lstrip(b">").startswith(b"From ") and line[:1] == b">" else line

    def _advance(self) -> None:
        was_empty = not self._ahead.strip() and self._ahead.endswith(b"\n")
        self._ahead = self._stream.readline(_PIECE)
        self._is_start = was_empty and self.starts()


# ---- tables -----------------------------------------------------------------------------------------


def _read_csv(path: Path) -> Iterator[Found]:
    former = csv.field_size_limit(LONGEST_FIELD)
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
            read = _Counted(stream)
            rows = csv.reader(read)
            names = next(rows, [])
            columns = _columns(names, path)
            number = 1
            while True:
                number += 1
                try:
                    row = next(rows, None)
                except csv.Error as error:
                    yield Found(f"row {number}", None, problem=f"{error}; the rest was not read")
                    return
                if row is None:
                    return
                given = dict(zip(columns, row, strict=False))
                yield _of_row(f"row {number}", {k: v for k, v in given.items() if k}, read.bytes)
    finally:
        csv.field_size_limit(former)


class _Counted:
    """Lines of a text file, counted in characters, about bytes."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.bytes = stream, 0

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> str:
        line: str = next(self._stream)
        self.bytes += len(line)
        return line


def _parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        why = 'pyarrow is needed to read a parquet file. Install it with: pip install "artnb[parquet]"'
        raise MissingDependency(why) from error
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise ConfigurationError(f"{path} is no parquet file: {str(error)[:200]}") from error


def _read_parquet(path: Path, table: Any) -> Iterator[Found]:
    names = table.schema_arrow.names
    columns = _columns(names, path)
    wanted = [name for name, column in zip(names, columns, strict=True) if column]
    number = 0
    for batch in table.iter_batches(batch_size=_BATCH, columns=wanted):
        for row in batch.to_pylist():
            number += 1
            given = {column: row[name] for name, column in zip(names, columns, strict=True) if column}
            yield _of_row(f"row {number}", given, number)


def _columns(names: list[str], path: Path) -> list[str]:
    """What each column holds, in our words; empty for those that are not read."""
    lower = [str(name).strip().lower() for name in names]
    found = [""] * len(lower)
    for ours, theirs in _COLUMNS.items():
        at = next(
            (lower.index(name) for name in theirs if name in lower and not found[lower.index(name)]), -1
        )
        if at >= 0:
            found[at] = ours
    if "raw" not in found and not {"body", "html"} & set(found):
        raise ConfigurationError(
            f"{path} has no column for the text of a mail (body, content, text, message); it has "
            f"{', '.join(map(str, names[:20])) or 'none'}"
        )
    return found


def _of_row(place: str, row: Mapping[str, Any], done: int) -> Found:
    folder = _joined(row.get("folder"))
    if "raw" in row and not row.get("body"):
        raw = str(row["raw"] or "").encode("utf-8", "surrogateescape")
        try:
            return Found(place, read_message(raw.splitlines(keepends=True)), folder, done=done)
        except ValueError as error:
            return Found(place, None, folder, str(error), done)
    body = _text(row.get("body"))
    message = Message(
        original_id=_text(row.get("original_id")).strip("<> ")[:500],
        date=read_date(_text(row.get("date"))),
        subject=" ".join(_text(row.get("subject")).split()),
        to=tuple(addresses_of([_joined(row.get("to"))])),
        cc=tuple(addresses_of([_joined(row.get("cc"))])),
        body=body or text_of_html(_text(row.get("html"))),
    )
    message.from_address = next(iter(addresses_of([_text(row.get("from_address"))])), "")
    if not any((message.body, message.subject, message.from_address)):
        return Found(place, None, folder, "an empty message", done)
    if not message.date:
        message.notes.add("date that cannot be read")
    if not body:
        message.notes.add("text taken out of HTML" if message.body else "no body")
    return Found(place, message, folder, done=done)


def _text(value: Any) -> str:
    """A field as text; bytes that were no UTF-8 are read as Windows text."""
    text = "" if value is None or value != value else str(value)
    if any(0xDC80 <= ord(c) <= 0xDCFF for c in text):
        text = text.encode("utf-8", "surrogateescape" if _is_round(text) else "replace").decode(
            "cp1252", "replace"
        )
    return clean(text)


def _is_round(text: str) -> bool:
    return not any(0xD800 <= ord(c) < 0xDC80 or 0xDCFF < ord(c) <= 0xDFFF for c in text)


def _joined(value: Any) -> str:
    """A field that may be a list."""
    return ", ".join(map(_text, value)) if isinstance(value, list | tuple) else _text(value)
