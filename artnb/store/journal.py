"""How are records kept in a file that a kill at any moment cannot spoil?

One JSON object a line, appended with a single write. A line that a killed process left without its
end is moved to a ``.torn`` file beside, so the journal goes on with whole lines and nothing is lost.
No file locks: a run has one writing process (see owner.py), and inside it one lock for each file.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from artnb.store.codec import decode, encode

_CANNOT_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What some network mounts answer, which write through or when a file is closed."""


def describe_disk_error(error: OSError, what: str) -> OSError:
    """The same error with a message that says what was being written and what to do."""
    return type(error)(
        error.errno,
        f"cannot write {what}: {error.strerror or error}. What is already on disk is intact; "
        "free space, or choose another root=",
    )


def fsync(handle: int) -> None:
    """Make what was written durable, where the file system knows how."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def fsync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the file system knows how."""
    with contextlib.suppress(OSError):  # Windows and some network mounts cannot open or sync a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside this one; what was written there takes its place, or is gone after an error."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield beside
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one worth reporting
            beside.unlink(missing_ok=True)
        raise


def clear_beside(folder: Path) -> None:
    """Remove what killed writers of whole files left beside them in this folder."""
    for path in folder.glob(".*.tmp"):
        if path.is_file():
            path.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> Path:
    """Replace a small file as a whole: a reader sees the old text or the new, never a part."""
    try:
        with replacing(path) as beside, open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            fsync(file.fileno())
    except OSError as error:
        raise describe_disk_error(error, str(path)) from error
    fsync_folder(path.parent)
    return path


class Journal:
    """An append-only file of JSON lines. Any thread may append."""

    def __init__(self, path: Path, *, keep_open: bool = False) -> None:
        self.path = path
        self._keep_open = keep_open
        self._lock = threading.Lock()
        self._file: int | None = None

    def append(self, *records: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Write whole lines with one write, or none of them; returns where each begins and its length."""
        lines = [f"{encode(record)}\n".encode("ascii") for record in records]
        at = self.append_lines(b"".join(lines))
        ends = itertools.accumulate(map(len, lines), initial=at)
        return [(start, len(line)) for start, line in zip(ends, lines, strict=False)]

    def append_lines(self, lines: bytes) -> int:
        """Write lines that are encoded already, like ``append``; returns where they begin."""
        with self._lock:
            try:
                return self._write(lines)
            except OSError as error:
                raise describe_disk_error(error, str(self.path)) from error
            finally:
                if not self._keep_open:
                    self._close()

    def _write(self, lines: bytes) -> int:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
            self._file = os.open(self.path, flags, 0o644)
        before = os.fstat(self._file).st_size
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # else the next opening moves the torn line aside
                os.ftruncate(self._file, before)
            raise
        return before

    def read(self) -> Iterator[dict[str, Any]]:
        """Every whole line, in order. A line still being written, or spoilt by the disk, is passed over."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            for line in file:
                record = _parse(line)
                if record is not None:
                    yield record

    def repair(self) -> str | None:
        """Set an unfinished last line aside; returns the name of the file it went to."""
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                tail, start = _last_line(file, size)
        except FileNotFoundError:
            return None
        if not tail:
            return None
        if _parse(tail + b"\n") is not None:  # only its newline is missing
            self._append_raw(b"\n")
            return None
        torn = self.path.with_name(self.path.name + ".torn")
        with open(torn, "ab") as file:
            file.write(tail + b"\n")
            file.flush()
            fsync(file.fileno())
        try:
            os.truncate(self.path, start)
        except OSError:  # some mounts cannot: end the line instead, readers pass over it
            self._append_raw(b"\n")
        return torn.name

    def _append_raw(self, text: bytes) -> None:
        with open(self.path, "ab") as file:
            file.write(text)

    def close(self) -> None:
        """Let go of the file (some network mounts upload it only then). Appending opens it again."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Tail:
    """The whole lines that were added to a growing file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0

    def read(self) -> list[dict[str, Any]]:
        """Records since the last call. A line still being written waits, a spoilt one is passed over."""
        try:
            if self.path.stat().st_size <= self._at:
                return []
            with open(self.path, "rb") as file:
                file.seek(self._at)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        lines = whole.splitlines(keepends=True)
        return [record for line in lines if (record := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = decode(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _last_line(file: Any, size: int) -> tuple[bytes, int]:
    """What follows the last newline, and where it starts."""
    tail, start = b"", size
    while start > 0 and b"\n" not in tail:
        step = min(1 << 16, start)
        start -= step
        file.seek(start)
        tail = file.read(step) + tail
    if b"\n" in tail:
        cut = tail.rindex(b"\n") + 1
        return tail[cut:], start + cut
    return tail, start
