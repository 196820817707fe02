"""How is a checkpoint written so that it is there as a whole or not at all?

It is written into a hidden folder beside, ``state.json`` last with the size and SHA-256 of every file,
synced and renamed into place. A folder without a complete ``state.json`` is never listed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artnb.errors import CheckpointError, ConfigurationError
from artnb.store.codec import decode, encode
from artnb.store.journal import fsync, fsync_folder
from artnb.store.versions import package_version

_STATE = "state.json"
_NAME = re.compile(r"step_(\d{6,})")
_ASIDE = "rolled_back"
"""Folder beside the checkpoints for those of steps that were undone."""
_LEFTOVER = re.compile(r"\.(step_\d{6,})\.[0-9a-f]+\.(tmp|old)")


def step_name(step: int) -> str:
    """The name of a step in a run folder.

    >>> step_name(12)
    'step_000012'
    """
    return f"step_{step:06d}"


@dataclass(frozen=True)
class Checkpoint:
    """The policy after ``step`` training steps, on disk."""

    step: int
    path: Path
    state: Mapping[str, Any]
    """What the caller stored: policy version, data cursor, random states..."""
    files: Mapping[str, Mapping[str, Any]]
    """Relative path -> ``bytes`` and ``sha256``."""

    @property
    def name(self) -> str:
        return self.path.name

    def verify(self) -> None:
        """Raise CheckpointError when a file differs from what was written."""
        for name, expected in self.files.items():
            file = self.path / name
            if not file.is_file() or _sha256(file) != expected["sha256"]:
                raise CheckpointError(
                    f"checkpoint {self.path} is damaged: {name} is not what was written. "
                    "Remove that folder to resume from the checkpoint before it."
                )


@contextlib.contextmanager
def writing_checkpoint(folder: Path, step: int, state: Mapping[str, Any]) -> Iterator[Path]:
    """Yield an empty folder to fill; afterwards it has become ``folder/step_<step>``.

    When the body raises, nothing is left behind and earlier checkpoints are as they were. The body may
    call ``seal``, which is slow, in a thread.
    """
    name = step_name(step)
    mark = uuid.uuid4().hex[:12]
    beside, old, final = folder / f".{name}.{mark}.tmp", folder / f".{name}.{mark}.old", folder / name
    try:
        beside.mkdir(parents=True)
        yield beside
        if not (beside / _STATE).exists():
            seal(beside, step, state)
        if final.exists():
            os.rename(final, old)
        os.rename(beside, final)
        fsync_folder(folder)
    except BaseException as error:
        shutil.rmtree(beside, ignore_errors=True)
        if old.exists() and not final.exists():
            os.rename(old, final)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"cannot write checkpoint {final}: {error.strerror or error}. "
                "Earlier checkpoints are intact; free space, or choose another root="
            ) from error
        raise
    shutil.rmtree(old, ignore_errors=True)


def seal(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Sync every file and say in ``state.json`` what they must be; after it only the rename is missing."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        _fsync(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    written = {"artnb": package_version("artnb"), "created": time.time(), "files": files}
    text = encode({"step": step, "state": dict(state), "written": written})
    with open(folder / _STATE, "w", encoding="utf-8") as file:
        file.write(json.dumps(json.loads(text), indent=1))
        file.flush()
        fsync(file.fileno())
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        fsync_folder(path)


def _fsync(path: Path) -> None:
    with open(path, "rb+") as file:
        fsync(file.fileno())


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint in this folder, or None when it is not complete."""
    named = _NAME.fullmatch(path.name)
    if named is None:
        return None
    try:
        record = decode((path / _STATE).read_bytes())
        files = record["written"]["files"]
        if any((path / name).stat().st_size != expected["bytes"] for name, expected in files.items()):
            return None
        return Checkpoint(int(named[1]), path, {"step": record["step"], **record["state"]}, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # missing or foreign content: whatever it is, it cannot be resumed from


def _step_folders(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    named = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(name[1]), path) for name, path in named if name is not None)


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint, by the names of their folders alone: none is opened."""
    return [step for step, _ in _step_folders(folder)]


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints, the oldest first."""
    found = (read_checkpoint(path) for _, path in _step_folders(folder))
    return [checkpoint for checkpoint in found if checkpoint is not None]


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint."""
    found = (read_checkpoint(path) for _, path in reversed(_step_folders(folder)))
    return next((checkpoint for checkpoint in found if checkpoint is not None), None)


def incomplete_after(folder: Path, step: int) -> list[str]:
    """Names of later folders that look like checkpoints and cannot be resumed from."""
    return [path.name for number, path in _step_folders(folder) if number > step]


def clean_leftovers(folder: Path) -> list[str]:
    """Finish what a killed writer left half-way; returns the names that were removed or put back."""
    if not folder.is_dir():
        return []
    cleaned = []
    for path in sorted(folder.iterdir()):
        leftover = _LEFTOVER.fullmatch(path.name)
        if leftover is None:
            continue
        final = folder / leftover[1]
        if leftover[2] == "old" and not final.exists():
            os.rename(path, final)
        else:
            shutil.rmtree(path, ignore_errors=True)
        cleaned.append(path.name)
    return cleaned + clean_leftovers(folder / _ASIDE)


def remove(folder: Path, step: int) -> None:
    """Remove one checkpoint as a whole."""
    doomed = folder / f".{step_name(step)}.{uuid.uuid4().hex[:12]}.tmp"
    os.rename(folder / step_name(step), doomed)  # from here on it is not listed, also when we are killed
    shutil.rmtree(doomed, ignore_errors=True)


def set_aside(folder: Path, after: int) -> None:
    """Move the checkpoints of steps later than ``after`` into ``rolled_back/``, the newest first.

    Wherever a kill ends this, the latest checkpoint that is left is one to go on from.
    """
    aside = folder / _ASIDE
    for step, path in reversed(_step_folders(folder)):
        if step <= after:
            break
        aside.mkdir(exist_ok=True)
        if (aside / path.name).exists():
            remove(aside, step)
        os.rename(path, aside / path.name)
        fsync_folder(folder)


def prune(folder: Path, keep_last: int, keep: Sequence[int] = (), every: int | None = None) -> list[Path]:
    """Remove all but the newest ``keep_last`` checkpoints, the steps in ``keep`` and each ``every``-th step;
    and all but the newest ``keep_last`` of those that were set aside."""
    if keep_last < 1:
        raise ConfigurationError(f"keep_last must be >= 1, so that a run can resume; got {keep_last}")
    removed = []
    for checkpoint in list_checkpoints(folder)[:-keep_last]:
        if checkpoint.step in keep or (every and checkpoint.step % every == 0):
            continue
        remove(folder, checkpoint.step)
        removed.append(checkpoint.path)
    for checkpoint in list_checkpoints(folder / _ASIDE)[:-keep_last]:
        remove(folder / _ASIDE, checkpoint.step)
    return removed
