"""Who writes a run, and how does it go on after a kill?

``Run.open`` claims the folder, sets torn lines and half-written checkpoints aside, finds the latest
checkpoint and marks what came after it as undone. The folder's content is described in folder.py.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from artnb.errors import ArtnbError, ConfigurationError, RunMismatch
from artnb.store import checkpoints as checkpoint_files
from artnb.store.codec import decode, encode
from artnb.store.controls import Controls
from artnb.store.folder import STEP_KINDS, RunFolder, differences, reward_to_rank, run_path
from artnb.store.journal import clear_beside, describe_disk_error, write_atomically
from artnb.store.loop import Loop
from artnb.store.owner import Owner
from artnb.store.token_records import PendingRecords, TokenRecord, finish_leftovers
from artnb.store.trajectories import PROCESS, Stored
from artnb.store.versions import package_version, versions
from artnb.types import Trajectory

_REMEMBERED_STEPS, _KEPT_STEPS = 200, 4
"""Steps whose data are known: to this process, to a checkpoint."""
_live: dict[Path, Run] = {}
_live_lock = threading.RLock()


def live_run(path: Path) -> Run | None:
    """The run that this process holds in this folder, None when it holds none there."""
    with _live_lock:
        run = _live.get(path)
        return None if run is None or run._owner.is_lost else run


class Run(Loop, RunFolder):
    """A training run on disk. ``Run.open`` creates or resumes it; ``close`` gives it back."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.step = 0
        self.cursor = {}
        self._owner = Owner(path)
        self._session = 0
        self._is_closed = False
        self.has_earlier_rollouts = False
        """True when an earlier process left rollouts of the present step or later ones."""
        self._reused: set[str] = set()
        self._begun_anew = 0
        """Session of the latest rollback that a person asked for."""
        self._best: tuple[float, int] | None = None
        """The best step by ``best_metric`` of those that have a checkpoint, and its rank."""
        self.controls = Controls()
        self._opened_at = 0
        self._told_at: int | None = None
        """Step at which this process last wrote result.json."""
        self._configured: dict[str, Any] = {}
        self._learned: dict[int, frozenset[str]] = {}
        """Names of what the latest steps trained on, by step."""
        self.on_step: list[Callable[[], object]] = []
        """Called after each finished step, in the thread that wrote its metrics."""
        self.listeners: list[Callable[[str, Any], object]] = []
        """Called with what has just been written, in the thread that wrote it: ``("rollouts", attempt)``, the
        members of one attempt, ``("metrics", record)`` and ``("event", event)``. They return at once."""

    step: int
    """Training steps finished so far, skipped ones included."""
    cursor: dict[str, Any]
    """Where you are in your own data, JSON values only: kept with every checkpoint and back on resume.
    Scenarios drawn by the step's number need none."""
    controls: Controls
    """What a person asked of the loop; see ``ask``."""

    @classmethod
    def open(
        cls,
        name: str,
        root: str | Path | None = None,
        *,
        identity: Mapping[str, Any] | None = None,
        takeover: bool = False,
    ) -> Run:
        """Create a run, or resume it where its latest checkpoint stands.

        Opening a run that this process already holds returns the same object. ``identity`` names the
        base model, tokenizer and adapter; a run on disk made with others raises RunMismatch. A run that
        another process is writing raises RunInUse, unless ``takeover`` seizes it.
        """
        path = run_path(name, root)
        with _live_lock:
            live = _live.get(path)
            if live is not None and live._owner.is_lost:
                live.close()
            elif live is not None:
                live._check_identity(identity)
                return live
            run = cls(path)
            try:
                run._check_folder()
                replaced = run._owner.claim(takeover=takeover)
            except OSError as error:
                raise describe_disk_error(error, str(path)) from error
            try:
                run._check_identity(identity)
                run._resume(identity, replaced)
            except BaseException:
                run.close()
                raise
            _live[path] = run
            atexit.register(run.close)
        return run

    @staticmethod
    def live(name: str, root: str | Path | None = None) -> Run | None:
        """The run of this name that this process is writing, or None."""
        with _live_lock:
            return _live.get(run_path(name, root))

    @staticmethod
    def read(name: str, root: str | Path | None = None) -> RunFolder:
        """Look at a run without claiming it; another process may be writing it."""
        folder = RunFolder(run_path(name, root))
        if not (folder.path / "run.json").is_file():
            raise ConfigurationError(f"there is no run at {folder.path}")
        return folder

    # Opening

    def _check_folder(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / "run.json").exists():
            return
        foreign = sorted(p.name for p in self.path.iterdir() if p.name[0] != "." and p.name != "owner.json")
        if foreign:
            raise ConfigurationError(
                f"{self.path} is not a run: it has no run.json, but holds {', '.join(foreign[:3])}. "
                "Choose another run name or root="
            )

    def _check_identity(self, identity: Mapping[str, Any] | None) -> None:
        if identity is None or not (self.path / "run.json").exists():
            return
        recorded = self.description().get("identity")
        changed = differences(recorded, decode(encode(identity))) if recorded else []
        if changed:
            raise RunMismatch(
                f"run {self.name!r} was made with {'; '.join(changed)}. "
                "Choose another run name, or open it with what made it."
            )

    def _resume(self, identity: Mapping[str, Any] | None, replaced_owner: Mapping[str, Any] | None) -> None:
        clear_beside(self.path)
        torn = [self._events.repair(), self._metrics.repair()]
        self._session = self._timeline().session + 1
        events = list(self._events.read())
        self.controls = Controls.of(events)
        asked = (int(e.get("session") or 0) for e in events if e["kind"] == "rolled_back" and e.get("asked"))
        self._begun_anew = max(asked, default=0)
        self._describe(identity)
        folder = self.path / "checkpoints"
        cleaned = checkpoint_files.clean_leftovers(folder)
        checkpoint_files.clean_leftovers(self.path / "start")
        latest = self.latest_checkpoint()
        self.step = latest.step if latest else 0
        finish_leftovers(self.path, self.step)
        self.cursor = dict((latest.state.get("cursor") if latest else None) or {})
        self._opened_at = self.step
        torn += self._trajectories.repair(self.step)
        self.record_event("opened", step=self.step, process=PROCESS, versions=versions())
        if replaced_owner is not None:
            self.record_event("took_over", owner=replaced_owner)
        for file in filter(None, torn):
            self._warn(f"an unfinished last line was moved to {file}")
        for name in cleaned:
            self._warn(f"{name}, left by a killed checkpoint writer, was cleared away")
        for name in checkpoint_files.incomplete_after(folder, self.step):
            self._warn(f"checkpoint {name} is incomplete and is not used")
        self._undo_later_work()
        self._rank()
        metrics = latest.state.get("metrics") if latest else None
        if metrics and self.trained_steps < self.step:  # killed right after the checkpoint was there
            self._metrics.append({"time": time.time(), **metrics, "session": self._session})

    def _describe(self, identity: Mapping[str, Any] | None) -> None:
        if not (self.path / "run.json").exists():
            description = {"name": self.name, "created": time.time(), "artnb": package_version("artnb")}
        else:
            description = self.description()
            if description.get("identity") or not identity:
                return
        description |= {"identity": dict(identity or {}), "versions": versions()}
        self._write_file("run.json", description)

    def _undo_later_work(self) -> None:
        """What a killed process did after its last checkpoint will be done again: mark it."""
        timeline, trained = self._timeline(), self.trained_steps
        steps = [step for step in self._trajectories.steps() if step >= self.step]
        self.has_earlier_rollouts = bool(steps)
        has_later_rollouts = any(
            step > self.step or record["split"] == "train"
            for step in steps
            for record in self._trajectories.records(timeline, step)
        )
        if trained > self.step or has_later_rollouts:
            self.record_event("rolled_back", **{"from": max(trained, self.step), "to": self.step})

    def _rank(self) -> None:
        """Find the best step anew."""
        ranked = [(rank, step) for step, rank in self.ranks().items() if step > 0]
        self._best = max(ranked, default=None)

    def _rank_step(self, record: Mapping[str, Any]) -> None:
        rank = reward_to_rank(record, self.best_metric)
        if rank is not None and record["step"] > 0 and (self._best is None or rank >= self._best[0]):
            self._best = rank, record["step"]

    def rank_by(self, metric: str) -> None:
        """Choose what the best checkpoint is best in; see ``best_checkpoint``."""
        if metric != self.best_metric:
            self.best_metric = metric
            self._rank()

    def _warn(self, message: str) -> None:
        self.record_event("warning", message=message)

    # Training

    def roll_back(self, to: int) -> None:
        """Mark everything after the policy of step ``to`` as undone and go on from there.

        Later checkpoints are set aside in ``checkpoints/rolled_back``. Nothing is loaded: to take the model
        along use ``Model.rollback``.
        """
        self.check_writable()
        before = self.step
        checkpoint_files.set_aside(self.path / "checkpoints", to)  # first: a kill between leaves it resumable
        self._session += 1
        self._begun_anew, self.has_earlier_rollouts = self._session, False
        self.record_event("rolled_back", **{"from": before, "to": to, "asked": True})
        self.step = to
        self._learned = {step: names for step, names in self._learned.items() if step < to}
        self._rank()

    def learned_before(self, names: Set[str]) -> int:
        """How many of these trajectories or examples an earlier step was trained on."""
        return len(names & frozenset().union(*self._learned.values()))

    def remember_learned(self, step: int, names: Set[str]) -> None:
        """Keep what a step was trained on, for ``learned_before``."""
        self._learned[step] = frozenset(names)
        self._learned.pop(step - _REMEMBERED_STEPS, None)

    def lately_learned(self, step: int, names: Set[str]) -> dict[str, list[str]]:
        """What a checkpoint after ``step`` keeps for ``recall_learned``: older rollouts are stale anyway."""
        latest = {known: self._learned[known] for known in sorted(self._learned)[1 - _KEPT_STEPS :]}
        return {str(known): sorted(those) for known, those in (latest | {step: names}).items()}

    def recall_learned(self, kept: Mapping[str, Sequence[str]]) -> None:
        """Take up what a checkpoint kept."""
        self._learned = {int(step): frozenset(names) for step, names in kept.items()}

    # Records

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl; one of a kind in ``STEP_KINDS`` finishes its step."""
        is_training = record.get("kind") in STEP_KINDS
        if is_training and record.get("step") != self.step:
            raise ConfigurationError(
                f"run {self.name!r} stands at step {self.step}, but metrics of training step "
                f"{record.get('step')} were given. A step is recorded once, in order."
            )
        self.check_writable()
        line = {"time": time.time(), **record, "session": self._session}
        self._metrics.append(line)
        self._tell("metrics", line)
        if is_training:
            self._rank_step(record)
            self.step += 1
            for tell in self.on_step:
                tell()

    def record_event(self, kind: str, **fields: Any) -> None:
        """Append a line to events.jsonl."""
        self.check_writable()
        event = {"kind": kind, "time": time.time(), **fields, "session": self._session}
        self._events.append(event)
        self.controls.add(event)
        if kind == "evaluation":
            self._rank_step(event)
        self._tell("event", event)

    def _tell(self, kind: str, record: Any) -> None:
        for listener in list(self.listeners):
            listener(kind, record)

    def record_configuration(self, settings: Mapping[str, Any]) -> None:
        """Keep the settings of a training step, as an event of what changed since the one before."""
        changed = {n: v for n, v in settings.items() if n not in self._configured or self._configured[n] != v}
        if changed:
            self.record_event("configured", step=self.step, train=changed)
            self._configured |= changed

    def append_trajectory(
        self,
        trajectory: Trajectory,
        *,
        step: int,
        split: str,
        gather_id: str,
        attempt: int,
        group_metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Append a finished rollout to its step's file."""
        self.append_attempt(
            [Stored(step, split, gather_id, attempt, trajectory, group_metadata=group_metadata)]
        )

    def append_attempt(self, stored: Sequence[Stored]) -> None:
        """Append all trajectories of one attempt with one write."""
        self.check_writable()
        self._trajectories.append(stored, session=self._session)
        self._tell("rollouts", stored)

    def reusable(self, step: int, split: str) -> list[Stored]:
        """Rollouts that an earlier process finished at this step and nobody has reused yet."""
        if not self.has_earlier_rollouts:
            return []
        found = self._trajectories.from_earlier_processes(step, split)
        # what a person went back from is not to be repeated
        fresh = (one for one in found if one.session >= self._begun_anew)
        return [one for one in fresh if one.trajectory.id not in self._reused]

    def reuse(self, trajectories: Sequence[Trajectory], gather_id: str) -> None:
        """Let rollouts of an earlier process count again, as part of this gather."""
        names = [t.id for t in trajectories]
        self._reused.update(names)
        self.record_event("reused", step=self.step, gather_id=gather_id, trajectories=names)

    def write_result(self, record: Mapping[str, Any]) -> Path:
        """Write the outcome to result.json."""
        written = self._write_file("result.json", record)
        self._told_at = self.step
        return written

    def _leave_result(self) -> None:
        """A run that ends before its notebook reported it still says how far it came."""
        has_moved = self.step != self._opened_at
        is_told = self._told_at == self.step if has_moved else (self.path / "result.json").exists()
        if is_told or not (has_moved or self._has_begun) or self._owner.is_lost:
            return
        from artnb.report import unreported

        try:
            self.write_result(unreported(self))
        except (ArtnbError, OSError) as error:  # closing goes on: the run must be given back
            warnings.warn(f"the outcome of run {self.name!r} could not be written: {error}", stacklevel=3)

    def _write_file(self, name: str, record: Mapping[str, Any]) -> Path:
        self.check_writable()
        return write_atomically(self.path / name, json.dumps(json.loads(encode(record)), indent=1) + "\n")

    # Checkpoints

    @contextlib.contextmanager
    def writing_checkpoint(self, step: int, state: Mapping[str, Any]) -> Iterator[Path]:
        """Yield an empty folder to fill; afterwards it is the checkpoint of ``step``."""
        self.check_writable()
        with checkpoint_files.writing_checkpoint(self.path / "checkpoints", step, state) as folder:
            yield folder
            self.check_writable()

    @contextlib.contextmanager
    def writing_start(self, state: Mapping[str, Any]) -> Iterator[Path]:
        """Yield an empty folder to fill with the policy before the first step; see ``start``."""
        self.check_writable()
        with checkpoint_files.writing_checkpoint(self.path / "start", 0, state) as folder:
            yield folder

    def save_checkpoint(self, step: int, write: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """Let ``write`` fill a folder that becomes the checkpoint of ``step`` as a whole or not at all."""
        with self.writing_checkpoint(step, state) as folder:
            write(folder)
        return self.path / "checkpoints" / checkpoint_files.step_name(step)

    @contextlib.contextmanager
    def finishing_step(
        self,
        metrics: Mapping[str, Any],
        state: Mapping[str, Any],
        tokens: Mapping[str, TokenRecord] | None = None,
    ) -> Iterator[tuple[Path, Callable[[], None]]]:
        """Yield a folder for the policy after this step, and a slow function that seals it once filled.

        Afterwards the step's checkpoint, its records of ``tokens`` and its line of metrics are on disk, all
        or none, and ``step`` has moved on. Inside the block ``metrics`` may still grow; their ``kind`` is
        ``train`` unless they say another of ``STEP_KINDS``.
        """
        about = {"kind": metrics.get("kind", "train"), "step": self.step}
        step, kept = self.step, {**state, "cursor": self.cursor, "metrics": {**metrics, **about}}
        with PendingRecords(self.path, step, tokens or {}) as pending:
            with self.writing_checkpoint(step + 1, kept) as folder:

                def seal() -> None:
                    checkpoint_files.seal(folder, step + 1, kept)
                    pending.write()

                yield folder, seal
                pending.write()  # where nobody sealed
            try:
                pending.commit()
                self.append_metrics({**metrics, **about})
            except BaseException:
                pending.path.unlink(missing_ok=True)
                checkpoint_files.remove(self.path / "checkpoints", step + 1)
                raise

    def prune_checkpoints(
        self, keep_last: int, keep: Sequence[int] = (), *, every: int | None = None
    ) -> list[Path]:
        """Remove all but the newest ``keep_last`` checkpoints, the best one, the steps in ``keep`` and each
        ``every``-th step."""
        self.check_writable()
        best = [] if self._best is None else [self._best[1]]
        return checkpoint_files.prune(self.path / "checkpoints", keep_last, [*keep, *best], every)

    # Closing

    def sync(self) -> None:
        """Let go of open files; some network mounts upload them only then."""
        self._trajectories.close()

    def close(self) -> None:
        """Give the run back, so that another process may write it. Reading still works. Idempotent."""
        if self._is_closed:
            return
        try:
            self._leave_result()
        finally:
            self._is_closed = True
            self.sync()
            self._owner.release()
            atexit.unregister(self.close)
            if _live.get(self.path) is self:
                del _live[self.path]

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_writable(self) -> None:
        """Raise ArtnbError when this run is closed, RunInUse when another process has taken it."""
        if self._is_closed:
            raise ArtnbError(f"run {self.name!r} is closed. Run the cell that makes its model again.")
        self._owner.check()

    def __repr__(self) -> str:
        return f"Run({self.name!r}, step {self.step}, {str(self.path)!r})"
