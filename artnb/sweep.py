"""How does a notebook run over a grid of parameters? One papermill run a point, and a table to compare them.

Every point is a process of its own with a run of its own, so the model is loaded for each; the table says how
long that took. What is finished is skipped when the sweep is started again, what was cut off is resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from artnb.errors import ConfigurationError, Interrupted, RunFailed, require
from artnb.report import outcome
from artnb.session import remember, session
from artnb.store import RunFolder
from artnb.store.folder import run_path
from artnb.store.journal import write_atomically
from artnb.ui.curve import curve_svg, sparkline
from artnb.ui.display import Live, log
from artnb.ui.html import esc, table_html, visible
from artnb.ui.snapshot import is_step, number_text, reward_of, seconds_text
from artnb.ui.text import table_text

_LOOK_SECONDS = 0.25
_GRACE_SECONDS = 20.0
"""How long an interrupted notebook may take to give its run back."""
_FRONT_END = ("JPY_SESSION_NAME", "VSCODE_PID", "COLAB_", "KAGGLE_KERNEL_RUN_TYPE")
"""Environment variables that would tell the child that somebody sits before it."""
_LONGEST_ERROR, _LONGEST_NAME = 300, 90
_OWN = ("run_name", "out_dir")
_MAY_CHANGE = {"steps", "out_dir"}
"""Parameters that an earlier run of a point may differ in: it takes more steps, or was moved."""


@dataclass(repr=False)
class SweepPoint:
    """One set of parameters: its notebook, its run, and how it ended."""

    name: str
    """Name of its run, and of its notebook beside it."""
    values: dict[str, Any]
    """The parameters that the sweep varies."""
    run: RunFolder
    notebook: Path
    status: str = "waiting"
    """``waiting``, ``running``, ``complete``, ``failed`` or ``interrupted``."""
    error: str = ""
    seconds: float | None = None
    """Of its whole notebook: the kernel's start, loading the model and evaluations included."""
    note: str = ""

    def __repr__(self) -> str:
        return f"SweepPoint({_label(self)}: {self.status}{f', {self.error}' if self.error else ''})"

    @property
    def rewards(self) -> list[tuple[int, float]]:
        """(step, mean reward) of every scored step."""
        pairs = [(record["step"], reward_of(record)) for record in self.run.metrics() if is_step(record)]
        return [(step, reward) for step, reward in pairs if reward is not None]

    @property
    def load_seconds(self) -> float | None:
        """How long loading the model took; the last time, of a point that was resumed."""
        loads = [e.get("load_seconds") for e in self.run.events() if e.get("kind") == "model"]
        return loads[-1] if loads else None

    def row(self) -> dict[str, Any]:
        """Its figures as one row of a table."""
        rewards = [reward for _, reward in self.rewards]
        after = (((self.run.result() or {}).get("evaluation") or {}).get("after")) or {}
        return {
            **{name: _cell(value) for name, value in self.values.items()},
            "status": self.status,
            "steps": self.run.trained_steps,
            "first reward": rewards[0] if rewards else None,
            "last reward": rewards[-1] if rewards else None,
            "best": max(rewards, default=None),
            "after": after.get("mean_reward"),
            "95% low": after.get("low"),
            "95% high": after.get("high"),
            "loading s": self.load_seconds,
            "seconds": self.seconds,
            "note": "; ".join(filter(None, [self.error, self.note])),
        }


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else str(value)


@dataclass(repr=False)
class Sweep:
    """What ``sweep`` returns: its points side by side, as a table with their reward curves."""

    name: str
    path: Path
    points: list[SweepPoint] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """A row a point, numbered as its curve is; columns in which nothing stands are left out."""
        rows = [{"point": number, **point.row()} for number, point in enumerate(self.points, 1)]
        varied = dict.fromkeys(name for point in self.points for name in point.values)
        names = dict.fromkeys(["point", *varied, *(name for row in rows for name in row)])
        kept = [n for n in names if any(row.get(n) not in (None, "") for row in rows)]
        return [{name: row.get(name) for name in kept} for row in rows]

    @property
    def best(self) -> SweepPoint | None:
        """The finished point with the highest reward: of its evaluation after training, or its last step."""
        finished = [p for p in self.points if p.status == "complete" and _score(p) is not None]
        return max(finished, key=lambda point: _score(point) or 0.0, default=None)

    @property
    def loading(self) -> str:
        """What loading the model for every point took, in a sentence."""
        loads = [s for point in self.points if (s := point.load_seconds) is not None]
        if not loads:
            return "The model is loaded anew for every point."
        mean = seconds_text(sum(loads) / len(loads))
        return f"The model is loaded anew for every point: {mean} each, {seconds_text(sum(loads))} in all."

    def curves(self) -> str:
        """The points' mean rewards over their steps, as an SVG string."""
        drawn = []
        for number, point in enumerate(self.points, 1):
            values = ", ".join(str(_cell(value)) for value in point.values.values())
            drawn.append({"name": f"{number}: {values}", "points": point.rewards})
        kept = [one for one in drawn if one["points"]]
        return curve_svg(kept) if kept else ""

    def assert_ok(self) -> None:
        """Raise RunFailed unless every point is complete: in a notebook's last cell, for its exit code."""
        left = [f"{p.name} {p.status}{f' ({p.error})' if p.error else ''}" for p in self.points]
        bad = [text for text, p in zip(left, self.points, strict=True) if p.status != "complete"]
        if bad:
            raise RunFailed(
                f"{len(bad)} of {len(self.points)} points of sweep {self.name!r} did not complete: "
                f"{'; '.join(bad)}. retry_failed=True runs the failed ones again."
            )

    def _repr_html_(self) -> str:
        head = f"<div><b>{esc(self.name)}</b> {esc(self._progress())}</div>"
        return f"<div>{head}{self.curves()}{table_html(self.rows())}<small>{esc(self.loading)}</small></div>"

    def __repr__(self) -> str:
        lines = [f"{_label(p)} {sparkline([r for _, r in p.rewards])}".rstrip() for p in self.points]
        head = f"{self.name}: {self._progress()}"
        return visible("\n".join([head, table_text(self.rows()), *lines, self.loading]))

    def _progress(self) -> str:
        counts = {
            s: sum(p.status == s for p in self.points) for s in dict.fromkeys(p.status for p in self.points)
        }
        return ", ".join(f"{count} {status}" for status, count in counts.items())


def _label(point: SweepPoint) -> str:
    return ", ".join(f"{name}={_cell(value)}" for name, value in point.values.items())


def _score(point: SweepPoint) -> float | None:
    row = point.row()
    return row["after"] if row["after"] is not None else row["last reward"]


async def sweep(
    notebook: str,
    grid: Mapping[str, Sequence[Any]] | Iterable[Mapping[str, Any]],
    *,
    name: str = "sweep",
    root: str | Path | None = None,
    parameters: Mapping[str, Any] | None = None,
    retry_failed: bool = False,
    timeout: float | None = None,
    progress: bool = True,
) -> Sweep:
    """Run a notebook once for each point of a grid, one after the other, and compare what came out.

    notebook: its name in ``notebooks/``, or the path of an .ipynb file with a parameters cell that takes
    ``run_name`` and ``out_dir``. grid: values by parameter, of which every combination is run, or a list of
    points. parameters: what all points share. root: the folder in which the sweep gets a folder ``name``
    (None for ``run_root()``); there each point has its executed notebook, its log, its outcome and its run.

    Started again, finished points are skipped, one that was cut off resumes its run, and a failed one stays
    in the table with its error unless ``retry_failed``. timeout: seconds a point may take. After ■ the point
    under way is ended, and Interrupted has the Sweep so far on ``.partial``.

    Raises ConfigurationError, before anything runs, for a name that is no parameter of the notebook, and for
    points that this sweep ran with other values of ``parameters`` than ``steps``.
    """
    from artnb.demo import find_notebook

    source = find_notebook(str(notebook))
    fixed = dict(parameters or {})
    points = _points(grid)
    _check_names(source, [*fixed, *(n for values in points for n in values)])
    folder = run_path(name, root)
    if (folder / "run.json").exists():
        raise ConfigurationError(f"{folder} is a run, not a sweep: choose another name=")
    folder.mkdir(parents=True, exist_ok=True)
    found = Sweep(name, folder, [_point(folder, values) for values in points])
    if len({point.name for point in found.points}) < len(points):
        raise ConfigurationError("the grid holds the same point twice")
    work = _Work(found, source, fixed, timeout, Live(f"sweep {name}", enabled=progress))
    work.check_earlier()
    async with session(work.interrupt) as watch:
        for point in found.points:
            if not watch.interrupted and not work.is_done(point, retry_failed):
                await work.run(point, watch)
    if watch.interrupted:
        work.live.finish(found._repr_html_(), repr(found))
        done = sum(p.status in ("complete", "failed") for p in found.points)
        message = f"the sweep was interrupted: {done} of {len(points)} points are finished, on .partial"
        raise Interrupted(f"{message}. Run the cell again to go on.", partial=remember(found))
    words = f"{name}: {found._progress()}"  # what is returned shows the rest
    work.live.finish(esc(words), words)
    return remember(found)


def _points(grid: Mapping[str, Sequence[Any]] | Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(grid, Mapping):
        for parameter, values in grid.items():
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise ConfigurationError(f"grid[{parameter!r}] must be a list of values, got {values!r}")
        points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    else:
        points = [dict(point) for point in grid]
    if not points or not all(points):
        raise ConfigurationError("the grid is empty: name at least one parameter with at least one value")
    if taken := sorted({parameter for point in points for parameter in point if parameter in _OWN}):
        raise ConfigurationError(f"{' and '.join(taken)} are the sweep's own: it gives every point a run")
    return points


def _check_names(source: Path, names: Iterable[str]) -> None:
    papermill = require("papermill", extra="notebook", why="to run a notebook for every point")
    known = list(papermill.inspect_notebook(str(source)))
    for name in (*_OWN, *names):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else f"; it has: {', '.join(known) or 'none'}"
            raise ConfigurationError(f"{source.name} has no parameter {name!r}{meant}")


def _point(folder: Path, values: dict[str, Any]) -> SweepPoint:
    text = ",".join(f"{name}={value}" for name, value in values.items())
    safe = re.sub(r"[^\w.=,+-]", "_", text).strip(".")
    if safe != text or len(safe) > _LONGEST_NAME:
        digest = hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:8]
        safe = f"{safe[: _LONGEST_NAME - 9]}-{digest}"
    return SweepPoint(safe, values, RunFolder(folder / safe), folder / f"{safe}.ipynb")


class _Work:
    """A sweep that is being run."""

    def __init__(
        self, found: Sweep, source: Path, fixed: dict[str, Any], timeout: float | None, live: Live
    ) -> None:
        self.found, self.source, self.fixed, self.timeout, self.live = found, source, fixed, timeout, live
        self._woken = asyncio.Event()
        self._code = hashlib.sha256(_code_of(source).encode()).hexdigest()[:16]

    def interrupt(self) -> None:
        self._woken.set()

    def check_earlier(self) -> None:
        """Raise when a point's run was made with other parameters; more steps only make it go on."""
        for point in self.found.points:
            earlier = (self._record(point) or {}).get("parameters", {})
            given = self._plain_parameters(point)
            changed = sorted(n for n in {*earlier, *given} - _MAY_CHANGE if earlier.get(n) != given.get(n))
            if earlier and changed:
                raise ConfigurationError(
                    f"sweep {self.found.name!r} ran {point.name} with other values of {', '.join(changed)}. "
                    "Choose another name=, or remove its folder."
                )

    def is_done(self, point: SweepPoint, retry_failed: bool) -> bool:
        """True when an earlier call finished this very point; its outcome is put on it."""
        record = self._record(point)
        if record is None or record["status"] == "running":  # new, or cut off
            return False
        if record["parameters"].get("steps") != self._plain_parameters(point).get("steps"):
            return False
        if record["status"] != "complete" and retry_failed:
            return False
        point.status, point.error, point.seconds = record["status"], record["error"], record["seconds"]
        point.note = "" if record["code"] == self._code else "the notebook has changed since"
        return True

    async def run(self, point: SweepPoint, watch: Any) -> None:
        """Run one point to its end; ■ ends it early."""
        import yaml  # papermill needs it as well

        started = time.monotonic()
        point.status = "running"
        given = self._file(point, "yaml")
        given.write_text(yaml.safe_dump(self._parameters(point)), encoding="utf-8")
        self._write(point, None)
        command = [
            *(sys.executable, "-m", "papermill", str(self.source), str(point.notebook), "-f", str(given)),
            *("-k", "python3", "--cwd", str(self.found.path), "--no-progress-bar", "--log-output"),
        ]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_FRONT_END)}
        environment["ARTNB_UI"] = "html"
        with open(self._file(point, "log"), "wb") as output:
            child = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                is_late = await self._wait(child, started, watch)
            finally:
                await asyncio.shield(asyncio.to_thread(_end, child))
        point.seconds = round(time.monotonic() - started, 1)
        if watch.interrupted:
            point.status = "interrupted"
            return
        self._judge(point, child.returncode, is_late)

    async def _wait(self, child: subprocess.Popen[bytes], started: float, watch: Any) -> bool:
        """Wait for the child's end, ■ or the time limit; True for the last."""
        while child.poll() is None and not watch.interrupted:
            if self.timeout is not None and time.monotonic() - started > self.timeout:
                return True
            if self.live.is_due:
                self.live.update(self.found._repr_html_(), f"{self.found.name}: {self.found._progress()}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), _LOOK_SECONDS)
        return False

    def _judge(self, point: SweepPoint, code: int | None, is_late: bool) -> None:
        """Write down how a point ended, by its exit code and its run's journal."""
        told = outcome(point.run.events(), point.run.trained_steps)
        if is_late:
            point.error = f"took longer than {self.timeout:g} s"
        elif code != 0:
            point.error = _error_in(point.notebook) or f"its notebook ended with exit code {code}"
        elif told["status"] != "complete":
            point.error = f"its run is {told['status']} after {told['steps']} of {told['steps_asked']} steps"
        else:
            point.error = ""
        point.status = "failed" if point.error else "complete"
        self._write(point, code)
        rewards = [reward for _, reward in point.rewards]
        last = f", last reward {number_text(rewards[-1])}" if rewards else ""
        why = f": {point.error}" if point.error else ""
        log(f"{point.name}: {point.status}{last}, {seconds_text(point.seconds or 0.0)}{why}")

    def _write(self, point: SweepPoint, code: int | None) -> None:
        record = {
            **{"parameters": self._plain_parameters(point), "status": point.status, "error": point.error},
            **{"seconds": point.seconds, "exit_code": code, "code": self._code},
        }
        write_atomically(self._file(point, "json"), json.dumps(record, indent=1) + "\n")

    def _record(self, point: SweepPoint) -> dict[str, Any] | None:
        path = self._file(point, "json")
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def _plain_parameters(self, point: SweepPoint) -> dict[str, Any]:
        return json.loads(json.dumps(self._parameters(point), default=str))

    def _parameters(self, point: SweepPoint) -> dict[str, Any]:
        own = {"run_name": point.name, "out_dir": str(self.found.path)}
        given = {**self.fixed, **point.values, **own}
        base = given.get("base")
        if isinstance(base, str) and Path(base).exists():
            given["base"] = str(Path(base).resolve())  # the child works in another folder
        return given

    def _file(self, point: SweepPoint, ending: str) -> Path:
        return self.found.path / f"{point.name}.{ending}"


def _code_of(notebook: Path) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8")).get("cells", [])
    return "\n".join("".join(cell.get("source", "")) for cell in cells if cell.get("cell_type") == "code")


def _error_in(notebook: Path) -> str:
    """The error of the cell that failed, or nothing."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError):  # killed before papermill had written it
        return ""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    errors = [output for output in outputs if output.get("output_type") == "error"]
    if not errors:
        return ""
    text = f"{errors[-1].get('ename')}: {errors[-1].get('evalue')}"
    return text if len(text) <= _LONGEST_ERROR else text[:_LONGEST_ERROR] + "…"


def _end(child: subprocess.Popen[bytes]) -> None:
    """Let a notebook that still runs give its run back, and kill it when it does not."""
    if child.poll() is not None:
        return
    child.send_signal(signal.SIGINT)
    try:
        child.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()  # its kernel ends by itself when its parent is gone
        child.wait()
