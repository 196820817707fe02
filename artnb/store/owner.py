"""Who writes this run? One process at a time, said by ``owner.json`` in its folder.

The file is created exclusively and its ``heartbeat`` (Unix seconds) is renewed by a daemon thread. An
owner that stopped beating, or whose process is gone from this machine, is replaced. There are no file
locks, so this works on network mounts; a process that lost its run learns it at its next write.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from artnb.errors import RunInUse
from artnb.store.journal import fsync, write_atomically

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0


class Owner:
    """This process's claim on a run folder. ``claim`` takes it, ``check`` defends it, ``release`` ends it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "owner.json"
        self.id = uuid.uuid4().hex
        self._opened = time.time()
        self._replaced_id: str | None = None
        self._lost_to: dict[str, Any] | None = None
        self._checked = 0.0
        self._released = threading.Event()
        self._lock = threading.Lock()

    def claim(self, *, takeover: bool = False) -> dict[str, Any] | None:
        """Become the owner; returns the previous owner that was replaced, if there was one."""
        replaced = None
        for _ in range(5):  # each round ends in a claim, an error, or another process having been quicker
            if self._create():
                break
            found = self._read()
            if found is None:
                continue
            if not takeover and not is_stale(found):
                raise RunInUse(_in_use_message(self.path.parent.name, found))
            if self._set_aside(found):
                replaced = found
        else:
            raise RunInUse(
                f"run {self.path.parent.name!r} is being opened by several processes at once. Try again."
            )
        self._replaced_id = replaced.get("id") if replaced else None
        self._checked = time.time()
        threading.Thread(target=self._beat, name="artnb-heartbeat", daemon=True).start()
        return replaced

    @property
    def is_lost(self) -> bool:
        """True once another process has taken the run."""
        return self._lost_to is not None

    def check(self) -> None:
        """Raise RunInUse when another process has taken this run."""
        if self._lost_to is None and time.time() - self._checked > 2 * HEARTBEAT_SECONDS:
            self._renew()  # the heartbeat did not run: the machine slept, or the process was stopped
        if self._lost_to is not None:
            raise RunInUse(
                f"run {self.path.parent.name!r} was taken over by {_who(self._lost_to)}; this process may no "
                "longer write it. Close this model, or open the run again with takeover=True."
            )

    def release(self) -> None:
        """Give the run back. Idempotent."""
        if self._released.is_set():
            return
        self._released.set()
        with self._lock:
            found = self._read()
            if found is not None and found.get("id") == self.id:
                self.path.unlink(missing_ok=True)

    def _record(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "process_started": process_started(os.getpid()),
            "opened": self._opened,
            "heartbeat": time.time(),
        }

    def _create(self) -> bool:
        """Put the file there, with its content at once: one that a kill left empty would lock the run."""
        beside = self.path.with_name(f".owner.{self.id[:8]}.new.tmp")
        try:
            self._write(beside)
            os.link(beside, self.path)
        except FileExistsError:
            return False
        except OSError:  # some mounts know no links
            return self._create_exclusively()
        finally:
            with contextlib.suppress(OSError):  # the next opening clears it away
                beside.unlink(missing_ok=True)
        return True

    def _create_exclusively(self) -> bool:
        try:
            self._write(self.path)
        except FileExistsError:
            return False
        return True

    def _write(self, path: Path) -> None:
        with open(path, "x", encoding="utf-8") as file:
            file.write(json.dumps(self._record(), indent=1))
            file.flush()
            fsync(file.fileno())

    def _read(self) -> dict[str, Any] | None:
        return read_owner(self.path)

    def _set_aside(self, expected: dict[str, Any]) -> bool:
        """Remove the old owner's file, unless another process has replaced it meanwhile."""
        aside = self.path.with_name(f".owner.{self.id[:8]}.tmp")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return False
        moved = read_owner(aside)
        if moved is not None and moved.get("id") != expected.get("id"):
            if not self.path.exists():
                os.rename(aside, self.path)
            return False
        aside.unlink(missing_ok=True)
        return True

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            self._renew()
            if self._lost_to is not None:
                return

    def _renew(self) -> None:
        # A mount that is away for a moment is no reason to stop: the next beat tries again.
        with self._lock, contextlib.suppress(OSError):
            if self._released.is_set() or not self.path.parent.is_dir():
                return
            found = self._read()
            if found is not None and found.get("id") not in (self.id, self._replaced_id):
                self._lost_to = found
                return
            write_atomically(self.path, json.dumps(self._record(), indent=1))
            self._checked = time.time()


def read_owner(path: Path) -> dict[str, Any] | None:
    """The owner's record; of a file that is still being written, its age alone."""
    try:
        text = path.read_text(encoding="utf-8")
        modified = path.stat().st_mtime
    except FileNotFoundError:
        return None
    try:
        record = json.loads(text)
    except ValueError:
        record = None
    return record if isinstance(record, dict) else {"heartbeat": modified}


def refuse_if_in_use(folder: Path) -> None:
    """Raise RunInUse when another live process writes the run in this folder; claims nothing."""
    found = read_owner(folder / "owner.json")
    if found is None or is_stale(found):
        return
    if (found.get("pid"), found.get("host")) != (os.getpid(), socket.gethostname()):
        raise RunInUse(_in_use_message(folder.name, found))


def is_stale(owner: dict[str, Any]) -> bool:
    """True when nobody can be writing under this claim any more."""
    if time.time() - float(owner.get("heartbeat") or 0) > STALE_SECONDS:
        return True
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int) or os.name != "posix":
        return False
    if not _is_alive(pid):
        return True
    started, recorded = process_started(pid), owner.get("process_started")
    return started is not None and recorded is not None and started != recorded


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _process_state(pid) != "Z"


def _stat_fields(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _process_state(pid: int) -> str | None:
    fields = _stat_fields(pid)
    return fields[0] if fields else None


def process_started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (Linux); tells a reused pid from the old one."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and len(fields) > 19 else None


def _who(owner: dict[str, Any]) -> str:
    where = "" if owner.get("host") == socket.gethostname() else f" on {owner.get('host', 'another machine')}"
    age = max(0, round(time.time() - float(owner.get("heartbeat") or 0)))
    return f"process {owner.get('pid', 'unknown')}{where} (heartbeat {age} s ago)"


def _in_use_message(name: str, owner: dict[str, Any]) -> str:
    return (
        f"run {name!r} is being written by {_who(owner)}. "
        "Stop it, choose another run name, or pass takeover=True."
    )
