"""What did the trainer make of each sampled token? One file a step: its logprobs, advantages and weights.

``tokens/step_000012.safetensors`` is about the trajectories that step 12 trained on. It is written beside
and renamed into place when the step is finished, so that a step that was undone leaves none behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from artnb.errors import ArtnbError, require
from artnb.store.checkpoints import step_name
from artnb.store.journal import describe_disk_error, fsync, fsync_folder

if TYPE_CHECKING:
    import numpy as np

_FOLDER = "tokens"
_BESIDE = re.compile(r"\.step_(\d{6,})\.[0-9a-f]+\.tmp")


@dataclass(frozen=True, eq=False)
class TokenRecord:
    """One trained trajectory, a number for each of its sampled tokens: float32 arrays (T,).

    T counts the tokens of ``trajectory.turns``, turn by turn. NaN stands where a token was not trained on:
    its turn cannot carry a loss, its row was not drawn, or its end did not fit into memory.
    """

    trainer_logprobs: np.ndarray
    """Natural logs, at the turn's temperature, in the first forward over the token in the step."""
    advantages: np.ndarray
    weights: np.ndarray
    """Loss weights before the division by the step's sum; 0 where ``TrainConfig.mask`` left a token out."""
    entropies: np.ndarray | None = None
    """Of the policy's distribution over the vocabulary at the token, in nats; None if not measured."""

    def __post_init__(self) -> None:
        import numpy as np

        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, values in arrays.items():
            if values is not None:
                object.__setattr__(self, name, np.ascontiguousarray(values, dtype=np.float32))
        if len({values.shape for values in self.arrays().values()}) != 1 or self.weights.ndim != 1:
            raise ValueError("the arrays of a token record must all have the shape (T,)")

    def arrays(self) -> dict[str, np.ndarray]:
        """The fields that are there, by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: values for name, values in found.items() if values is not None}


def read_token_records(run_path: str | Path, step: int) -> Mapping[str, TokenRecord]:
    """The records of a step by trajectory id; empty where it has none.

    Of a step that was rolled back and not repeated yet they are what it was. Raises ArtnbError for a
    damaged file, MissingDependency where the package safetensors is not installed.
    """
    path = _path(run_path, step)
    if not path.is_file():
        return {}
    safetensors = require("safetensors", extra="cpu", why="to read what a step recorded of its tokens")
    names = [f.name for f in fields(TokenRecord)]
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            ids, stored = json.loads(file.metadata()["trajectories"]), set(file.keys())
            found = [
                {n: file.get_tensor(f"{i}/{n}") for n in names if f"{i}/{n}" in stored}
                for i in range(len(ids))
            ]
        return {str(one): TokenRecord(**arrays) for one, arrays in zip(ids, found, strict=True)}
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise ArtnbError(f"{path} is damaged: {error}. The run does not need it; remove it.") from error


def write_token_records(run_path: str | Path, step: int, records: Mapping[str, TokenRecord]) -> None:
    """Replace the records of a step as a whole; without any, it has no file afterwards.

    Raises OSError when the disk refuses, MissingDependency where safetensors is not installed.
    """
    with PendingRecords(Path(run_path), step, records) as pending:
        pending.commit()


class PendingRecords:
    """Records that become a step's when it is finished, or never. Leaving the context drops the rest."""

    def __init__(self, run_path: Path, step: int, records: Mapping[str, TokenRecord]) -> None:
        self.path, self.records = _path(run_path, step), records
        mark = uuid.uuid4().hex[:12]
        self.beside = self.path.with_name(f".{step_name(step)}.{mark}.tmp")
        self._is_written = False

    def write(self) -> None:
        """Put them on disk beside their place, which is slow; afterwards only the rename is missing.

        A file of a step that is repeated without records is removed already here.
        """
        if self._is_written:
            return
        try:
            if self.records:
                self._write()
            else:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            raise describe_disk_error(error, str(self.path)) from error
        self._is_written = True

    def _write(self) -> None:
        safetensors = require(
            "safetensors.numpy", extra="cpu", why="to record what a step made of its tokens"
        )
        tensors = {
            f"{i}/{name}": values
            for i, record in enumerate(self.records.values())
            for name, values in record.arrays().items()
        }
        content = safetensors.save(tensors, {"trajectories": json.dumps(list(self.records))})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.beside, "wb") as file:
            file.write(content)
            file.flush()
            fsync(file.fileno())

    def commit(self) -> None:
        """Rename them into place."""
        self.write()
        if self.records:
            os.replace(self.beside, self.path)
            fsync_folder(self.path.parent)

    def __enter__(self) -> PendingRecords:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # the next opening clears it away
            self.beside.unlink(missing_ok=True)


def finish_leftovers(run_path: Path, finished_steps: int) -> None:
    """After a kill: records of the last finished step get their place, those of an unfinished one go."""
    folder = run_path / _FOLDER
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        named = _BESIDE.fullmatch(path.name)
        if named is None:
            continue
        if int(named[1]) == finished_steps - 1:
            os.replace(path, _path(run_path, int(named[1])))
        else:
            path.unlink(missing_ok=True)


def _path(run_path: str | Path, step: int) -> Path:
    return Path(run_path) / _FOLDER / f"{step_name(step)}.safetensors"
