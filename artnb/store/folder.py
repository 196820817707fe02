"""What can be read in a run's folder, by anyone, while a process may be writing it?

run.json                          name, created, what it was made with
metrics.jsonl                     one line a training step or evaluation
events.jsonl                      openings, rollbacks, gathers, warnings, notes
trajectories/step_000012.jsonl    every rollout gathered while the run stood at step 12
trajectories/index/               a short row for each of them; made again when it is gone
tokens/step_000012.safetensors    what the trainer made of each sampled token in step 12
checkpoints/step_000012/          the policy after 12 steps
result.json  STOP  owner.json     the outcome; touch STOP to end a loop; who is writing now
report.html                       a page about all of it, when somebody asked for one
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artnb.errors import CheckpointError, ConfigurationError
from artnb.places import run_root
from artnb.store import checkpoints as checkpoint_files
from artnb.store.checkpoints import Checkpoint
from artnb.store.codec import decode
from artnb.store.controls import Target
from artnb.store.journal import Journal
from artnb.store.scores import Scores
from artnb.store.timeline import Timeline
from artnb.store.trajectories import Stored, TrajectoryFolder
from artnb.types import Trajectory

if TYPE_CHECKING:
    import pandas

STEP_KINDS = ("train", "sft")
"""Kinds of metrics records that finish a step of the run: each made a policy of its own."""


def run_path(name: str, root: str | Path | None = None) -> Path:
    """Where a run lies; root: None for ``run_root()``.

    A name that would leave ``root`` or not survive a file system is refused.
    """
    problem = None
    if not isinstance(name, str) or not name.strip():
        problem = "it is empty"
    elif any(c in '/\\:*?"<>|' for c in name):
        problem = 'it holds one of / \\ : * ? " < > |'
    elif not name.isprintable():
        problem = "it holds invisible characters"
    elif name.startswith(".") or name != name.strip() or name.endswith("."):
        problem = "it starts or ends with a dot or a space"
    elif len(name.encode()) > 120:
        problem = "it is longer than 120 bytes"
    if problem:
        raise ConfigurationError(f"{name!r} cannot name a run: {problem}. Choose a name such as 'my-2048'.")
    return Path(run_root() if root is None else root).expanduser().resolve() / name


class RunFolder:
    """The reading side of a run. Nothing here writes."""

    best_metric = "reward_mean"
    """What ``best_checkpoint`` goes by; see ``Model``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self._metrics = Journal(path / "metrics.jsonl")
        self._events = Journal(path / "events.jsonl")
        self._trajectories = TrajectoryFolder(path / "trajectories")

    def description(self) -> dict[str, Any]:
        """What run.json says."""
        return decode((self.path / "run.json").read_bytes())

    def result(self) -> dict[str, Any] | None:
        """What result.json says, or None before there is one."""
        path = self.path / "result.json"
        return decode(path.read_bytes()) if path.is_file() else None

    @property
    def trained_steps(self) -> int:
        """Training steps whose metrics count."""
        return max((r["step"] + 1 for r in self.metrics() if r.get("kind") in STEP_KINDS), default=0)

    def metrics(self, *, include_rolled_back: bool = False) -> list[dict[str, Any]]:
        """Every metrics record that counts, in order; or all, each with ``rolled_back`` True or False."""
        timeline, records = self._timeline(), []
        for record in self._metrics.read():
            counts = timeline.counts(record, is_training=record.get("kind") in STEP_KINDS)
            record.pop("session", None)
            if include_rolled_back:
                records.append({**record, "rolled_back": not counts})
            elif counts:
                records.append(record)
        return records

    def events(self) -> list[dict[str, Any]]:
        """Every event, in order."""
        return list(self._events.read())

    def stored(self, step: int | None = None, split: str | None = None) -> Iterator[Stored]:
        """Trajectories that count with how they were gathered, one at a time, oldest step first.

        They have the scores that a judge or a person gave them since.
        """
        events = self.events()
        scores = Scores.of(events)
        for record in self._trajectories.records(Timeline.of(events), step):
            if split is None or record["split"] == split:
                found = Stored.from_json(record)
                scores.apply(found.trajectory)
                yield found

    def trajectories(self, step: int | None = None, split: str | None = None) -> Iterator[Trajectory]:
        """Trajectories that count, one at a time, oldest step first; None means all."""
        return (one.trajectory for one in self.stored(step, split))

    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, the oldest first."""
        return checkpoint_files.list_checkpoints(self.path / "checkpoints")

    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest complete checkpoint."""
        return checkpoint_files.latest_checkpoint(self.path / "checkpoints")

    def start(self) -> Checkpoint | None:
        """The policy before the first step, kept apart from the checkpoints; None before that step."""
        return checkpoint_files.latest_checkpoint(self.path / "start")

    def known_steps(self) -> list[int]:
        """Steps that can be gone back to, by the names of their folders alone."""
        folders = self.path / "start", self.path / "checkpoints"
        return sorted({step for folder in folders for step in checkpoint_files.checkpoint_steps(folder)})

    def best_checkpoint(self, metric: str | None = None) -> Checkpoint | None:
        """The checkpoint whose policy was best by a metric, which is the run's own if None.

        metric: of the steps that sampled from it, by name (``reward_mean``), or ``evaluation``, the mean
        reward of the latest complete evaluation of it; with a ``-`` before it the lowest is best. Of several
        the latest checkpoint; None before one was measured.
        """
        ranks = self.ranks(metric)
        known = [one for one in self.checkpoints() if one.step in ranks]
        return max(known, key=lambda one: (ranks[one.step], one.step), default=None)

    def checkpoint(self, to: Target) -> Checkpoint:
        """The complete checkpoint that a number of steps or "best" means. Raises CheckpointError."""
        if to != "best" and (not isinstance(to, int) or isinstance(to, bool)):
            raise ConfigurationError(f"a checkpoint is that of a step or 'best'; got {to!r}")
        known = self.checkpoints()
        found = self.best_checkpoint() if to == "best" else next((c for c in known if c.step == to), None)
        if to == 0 and found is None:
            found = self.start()
        if found is not None:
            return found
        there = ", ".join(str(one.step) for one in known) or "none yet"
        unranked = f"no checkpoint whose policy was measured ({self.best_metric})"
        what = unranked if to == "best" else f"no checkpoint of step {to}"
        raise CheckpointError(f"run {self.name!r} has {what}; complete ones: {there} (keep_checkpoints)")

    def fork(self, step: Target, name: str) -> RunFolder:
        """Branch off a new run from the checkpoint of ``step``, or the best one: ``Model(run=name)`` goes on
        from there, with all that counts up to it as its history and ``lineage`` in its run.json.

        Both runs have their own files afterwards. Raises CheckpointError, naming the checkpoints there are,
        and ConfigurationError when there is a run of that name.
        """
        from artnb.store.fork import fork

        return fork(self, self.checkpoint(step), name)

    def ranks(self, metric: str | None = None) -> dict[int, float]:
        """How good each step's policy was by a metric of ``best_checkpoint``: the higher the better."""
        chosen, timeline = metric or self.best_metric, self._timeline()
        events = (e for e in self._events.read() if timeline.counts(e, is_training=False))
        records = events if chosen.removeprefix("-") == "evaluation" else iter(self.metrics())
        return {r["step"]: rank for r in records if (rank := reward_to_rank(r, chosen)) is not None}

    def figure(self, metrics: Sequence[str] | None = None, **options: Any) -> Any:
        """The run's curves as a plotly figure; options as for ``artnb.dashboard.figure.figure``."""
        from artnb.dashboard.figure import figure

        return figure(self, metrics, **options)

    def figure_widget(self, metrics: Sequence[str] | None = None, **options: Any) -> Any:
        """The figure as a live plotly widget, which adds 5 MB to a saved notebook; refused in batch."""
        from artnb.dashboard.figure import figure_widget

        return figure_widget(self, metrics, **options)

    def png(self, metrics: Sequence[str] | None = None, **options: Any) -> bytes:
        """The run's curves as a PNG, drawn by matplotlib; options as for ``artnb.dashboard.png.run_png``."""
        from artnb.dashboard.png import run_png

        return run_png(self, metrics, **options)

    def metrics_frame(self) -> pandas.DataFrame:
        """metrics() as a table."""
        from artnb.store.frames import metrics_frame

        return metrics_frame(self)

    def trajectories_frame(self) -> pandas.DataFrame:
        """One row a trajectory, without its text."""
        from artnb.store.frames import trajectories_frame

        return trajectories_frame(self)

    def export_parquet(self, path: str | Path) -> Path:
        """Write every trajectory, its lossless JSON included, to one parquet file."""
        from artnb.store.frames import export_parquet

        return export_parquet(self, Path(path))

    def report(self, path: str | Path | None = None, *, environment: Any = None) -> Path:
        """Write one self-contained page about the run, print where it is, and return its path.

        Curves, evaluations with intervals, settings, the environment's card, best and worst trajectories,
        alarms, events, costs, versions: without scripts, everything escaped, nothing loaded from elsewhere,
        under 1 MB. path: None for ``report.html`` in the run's folder. environment: the Environment whose
        card and options to show; None finds the installed one that the scenarios name.
        """
        from artnb.report_html import write_report

        return write_report(self, path, environment)

    def assert_ok(
        self, steps: int | None = None, *, alarms: Iterable[str] = (), min_reward: float | None = None
    ) -> None:
        """Raise RunFailed unless the run came out as asked: in a notebook's last cell, for its exit code.

        steps: training steps it must have taken; None takes what ``run.steps`` was last asked for. alarms:
        kinds that its latest steps may not give reason for, or "any", or "serious". min_reward: what the
        evaluation ``after`` in result.json must have reached, or the last step where there is none. Raises
        ConfigurationError for an unknown kind of alarm.
        """
        from artnb.outcome import assert_ok

        assert_ok(self, steps, alarms, min_reward)

    def timeline(self) -> Timeline:
        """Which of its records count."""
        return self._timeline()

    def trajectory_steps(self) -> list[int]:
        """Steps that have a file of trajectories, in order."""
        return self._trajectories.steps()

    def records(self, step: int) -> Iterator[dict[str, Any]]:
        """The lines of a step's trajectories that count, as they were written."""
        return self._trajectories.records(self._timeline(), step)

    def _timeline(self) -> Timeline:
        return Timeline.of(self._events.read())

    def _repr_html_(self) -> str:
        from artnb.store.frames import run_html

        return run_html(self)


def reward_to_rank(record: Mapping[str, Any], metric: str = "reward_mean") -> float | None:
    """What a metric of ``best_checkpoint`` says of a step's policy, the higher the better; None for a record
    that says nothing of it.

    Step k samples from the policy after k steps, which is checkpoint k.
    """
    name = metric.removeprefix("-")
    if name == "evaluation":
        is_of_it = (record.get("kind"), record.get("policy")) == ("evaluation", "current")
        value = record.get("mean_reward") if is_of_it and record.get("status") == "complete" else None
    else:
        value = record.get(name) if record.get("kind") == "train" else None
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return -float(value) if metric.startswith("-") else float(value)


def differences(recorded: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What two identities disagree about, in words.

    >>> differences({"base_model": "a", "adapter": {"rank": 8}}, {"base_model": "a", "adapter": {"rank": 16}})
    ['adapter.rank 8 (now 16)']
    """
    found = []
    for name in [*recorded, *(n for n in given if n not in recorded)]:
        old, new = recorded.get(name), given.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append(f"{prefix}{name} {old!r} (now {new!r})")
    return found
