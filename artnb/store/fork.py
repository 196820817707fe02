"""How does one run branch off another? A new folder: one checkpoint, and the history that led to it.

What counts up to the checkpoint is copied, so that neither run can spoil the other; ``run.json`` of the new
run says in ``lineage`` which runs it came from, and at which steps it left them.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from artnb.errors import ConfigurationError
from artnb.store.checkpoints import Checkpoint, step_name
from artnb.store.codec import encode
from artnb.store.folder import STEP_KINDS, RunFolder, run_path
from artnb.store.journal import Journal, describe_disk_error, write_atomically
from artnb.store.timeline import is_after

_KEPT = ("configured", "evaluation", "gather", "judged", "override", "note", "judge_report")
"""Events about what is copied; openings, rollbacks and controls are the old run's own."""
_BEFORE = {"session": 0}
"""No opening and no rollback of the new run is older than this."""


def fork(source: RunFolder, checkpoint: Checkpoint, name: str) -> RunFolder:
    """Make the run ``name`` beside ``source``, standing at this checkpoint; see ``RunFolder.fork``."""
    checkpoint.verify()
    target = run_path(name, source.path.parent)
    if target.exists():
        raise ConfigurationError(f"there is a run at {target} already: choose another name")
    beside = target.with_name(f".{name}.{uuid.uuid4().hex[:8]}.fork")
    try:
        _write(source, checkpoint, name, beside)
        beside.rename(target)
    except BaseException as error:
        shutil.rmtree(beside, ignore_errors=True)
        if isinstance(error, OSError):
            raise describe_disk_error(error, str(target)) from error
        raise
    return RunFolder(target)


def _write(source: RunFolder, checkpoint: Checkpoint, name: str, folder: Path) -> None:
    step = checkpoint.step
    shutil.copytree(checkpoint.path, folder / "checkpoints" / checkpoint.name)
    for done in range(step):
        tokens = source.path / "tokens" / f"{step_name(done)}.safetensors"
        if tokens.is_file():
            (folder / "tokens").mkdir(exist_ok=True)
            shutil.copyfile(tokens, folder / "tokens" / tokens.name)
    _append(folder / "metrics.jsonl", _until(step, source.metrics()))
    origin = {"run": source.name, "step": step}
    told = {"kind": "forked", "time": time.time(), **origin}
    _append(folder / "events.jsonl", [*_events(source, step), told])
    for one in (s for s in source.trajectory_steps() if s <= step):
        records = (r for r in source.records(one) if not is_after(one, step, is_training=_is_training(r)))
        _append(folder / "trajectories" / f"{step_name(one)}.jsonl", records)
    description = source.description()
    lineage = [*description.get("lineage", []), origin]
    told = {**description, "name": name, "created": time.time(), "lineage": lineage}
    write_atomically(folder / "run.json", json.dumps(json.loads(encode(told)), indent=1) + "\n")


def _until(step: int, records: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for record in records:
        is_training = record.get("kind") in STEP_KINDS
        if not is_after(record.get("step", 0), step, is_training=is_training):
            yield record


def _events(source: RunFolder, step: int) -> Iterator[Mapping[str, Any]]:
    timeline = source.timeline()
    for event in source.events():
        is_training = event["kind"] == "configured" or event.get("split") == "train"
        is_late = is_after(event.get("step", 0), step, is_training=is_training)
        if event["kind"] in _KEPT and not is_late and timeline.counts(event, is_training=is_training):
            yield event


def _is_training(record: Mapping[str, Any]) -> bool:
    return record.get("split") == "train"


def _append(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write each record with a session before all others; a file only where there is one."""
    journal = Journal(path, keep_open=True)
    try:
        for record in records:
            journal.append({**record, **_BEFORE})
    finally:
        journal.close()
