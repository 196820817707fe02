"""How does a notebook run from one command? Papermill executes it; the terminal follows along.

    python -m artnb.demo quickstart -p steps 4

The executed notebook, its HTML and the run folder stay under ``out/``; the last line printed is
the path of ``result.json``.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from artnb.errors import ArtnbError, ConfigurationError, require
from artnb.store import RunFolder
from artnb.store.journal import write_atomically
from artnb.ui.snapshot import is_step, seconds_text
from artnb.ui.text import step_line, table_text

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class DemoFailed(ArtnbError):
    """A cell of the notebook failed; the message holds its error and the partial notebook's path."""


def notebooks_folder() -> Path:
    """Where the checkout keeps its notebooks. Raises ConfigurationError in an installed wheel."""
    folder = Path(__file__).resolve().parent.parent / "notebooks"
    if not folder.is_dir():
        raise ConfigurationError(
            "the notebooks are not part of the installed package: they lie in the folder notebooks/ of a "
            "checkout of artnb. Run this from a checkout (make demo), or pass the path of an .ipynb file."
        )
    return folder


def find_notebook(name: str) -> Path:
    """Path of a notebook given by name or by path."""
    path = Path(name)
    if path.suffix == ".ipynb" and path.is_file():
        return path.resolve()
    folder = notebooks_folder()
    found = folder / f"{path.stem}.ipynb"
    if not found.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.ipynb")))
        raise ConfigurationError(f"no notebook {name!r} in {folder}; there are: {known}")
    return found


def run_demo(notebook: str, overrides: Mapping[str, Any] | None = None, out: Path = Path("out")) -> Path:
    """Run a notebook and return the path of its ``result.json``. Raises DemoFailed."""
    started = time.monotonic()
    source = find_notebook(notebook)
    folder = (out / f"{source.stem}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    given: dict[str, Any] = {"run_name": folder.name, "out_dir": str(folder), **(overrides or {})}
    for name in ("out_dir", "base"):  # the kernel works in another folder than this shell
        if given.get(name) and (name == "out_dir" or Path(given[name]).exists()):
            given[name] = str(Path(given[name]).resolve())
    run = RunFolder(Path(given["out_dir"]) / str(given["run_name"]))
    executed = folder / f"{source.stem}.ipynb"
    print(f"Running {source.name} on this machine; everything it writes goes to {folder}", flush=True)
    with _Follower(run) as follower:
        _execute(source, executed, given, follower)
    html = _export(executed)
    _print_summary(_complete_result(run, time.monotonic() - started))
    written = {"notebook": executed, "html": html, "run": run.path, "report": run.path / "report.html"}
    for label, path in written.items():
        if path.exists():
            print(f"{label:>10}  {path}")
    return run.path / "result.json"


def _execute(source: Path, executed: Path, given: dict[str, Any], follower: _Follower) -> None:
    papermill = require("papermill", extra="notebook", why="to run a notebook from the command line")
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    _register_engine(follower)
    logging.getLogger("papermill").setLevel(logging.ERROR)
    try:
        papermill.execute_notebook(
            str(source),
            str(executed),
            parameters=given,
            engine_name="artnb",
            kernel_name="python3",
            progress_bar=False,
            cwd=str(executed.parent),
            extra_arguments=["--log-level=ERROR"],  # the kernel's own notes are not the notebook's
        )
    except papermill.PapermillExecutionError as error:
        trace = _ANSI.sub("", "\n".join(error.traceback))
        raise DemoFailed(
            f"a cell failed: {error.ename}: {error.evalue}\n{trace}\nThe partial notebook is {executed}"
        ) from error
    except (DeadKernelError, CellTimeoutError) as error:
        raise DemoFailed(f"{type(error).__name__}: {error}\nThe partial notebook is {executed}") from error


def _register_engine(follower: _Follower) -> None:
    """Give papermill an engine that says which cell it is at."""
    from papermill.engines import NBClientEngine, papermill_engines

    class SpeakingEngine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> None:
            start_cell = nb_man.cell_start
            titles, started = _titles(nb_man.nb.cells), time.monotonic()

            def cell_start(cell: Any, cell_index: int | None = None, **more: Any) -> None:
                if cell_index in titles:
                    follower.catch_up()
                    seconds = seconds_text(time.monotonic() - started)
                    print(f"[{cell_index + 1:>2}/{len(nb_man.nb.cells)}] {seconds:>9}  {titles[cell_index]}")
                    sys.stdout.flush()
                start_cell(cell, cell_index, **more)

            nb_man.cell_start = cell_start
            super().execute_managed_notebook(nb_man, kernel_name, **options)

    papermill_engines.register("artnb", SpeakingEngine)


def _titles(cells: Sequence[Any]) -> dict[int, str]:
    """What each code cell is about: the first line of the markdown above it, else its own."""
    titles: dict[int, str] = {}
    above = ""
    for index, cell in enumerate(cells):
        lines = [line.strip() for line in cell.source.splitlines() if line.strip()]
        first = lines[0] if lines else ""
        if cell.cell_type == "markdown":
            above = first.lstrip("# ")
        elif "injected-parameters" in cell.metadata.get("tags", []):
            titles[index] = "the parameters from the command line"
        elif cell.cell_type == "code" and first:
            titles[index] = (above or first.lstrip("# "))[:90]
            above = ""
    return titles


class _Follower:
    """Prints each training step while the notebook runs, read from the run folder."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._printed = 0
        self._lock = threading.Lock()

    def __enter__(self) -> _Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=5)

    def _follow(self) -> None:
        while not self._ended.wait(0.5):
            self.catch_up()
        self.catch_up()

    def catch_up(self) -> None:
        """Print the steps that were not printed yet."""
        with self._lock:
            steps = [record for record in self.run.metrics() if is_step(record)]
            for record in steps[self._printed :]:
                print(f"{'':>18}{step_line(record)}", flush=True)
            self._printed = len(steps)


def _export(executed: Path) -> Path:
    nbconvert = require("nbconvert", extra="notebook", why="to export the notebook as HTML")
    body, _ = nbconvert.HTMLExporter().from_filename(str(executed))
    path = executed.with_suffix(".html")
    path.write_text(body, encoding="utf-8")
    return path


def _complete_result(run: RunFolder, seconds: float) -> dict[str, Any]:
    """Put the time of the whole command into the run's result."""
    record = run.result()
    path = run.path / "result.json"
    if record is None:
        raise DemoFailed(f"the notebook finished but its last cell wrote no {path}")
    record["seconds"] = round(seconds, 1)
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    return record


def _print_summary(record: Mapping[str, Any]) -> None:
    rewards = record["reward_by_step"]
    highest = max([r for r in rewards if r is not None] + [1e-9])
    rows = [
        {"step": i, "mean reward": r, " ": "█" * round(max(0.0, r or 0.0) / highest * 30)}
        for i, r in enumerate(rewards)
    ]
    print(f"\n{table_text(rows)}\n")
    evaluation = record["evaluation"]
    named = {name: evaluation.get(name) for name in ("before", "after")}
    named |= {f"baseline {name}": value for name, value in evaluation.get("baselines", {}).items()}
    columns = {"mean_reward": "mean reward", "low": "95% low", "high": "95% high", "n": "n"}
    rows = [
        {"held-out": name, **{title: value.get(key) for key, title in columns.items()}}
        for name, value in named.items()
        if value
    ]
    print(f"{table_text(rows)}\n\nTotal: {seconds_text(record['seconds'])}")


def _typed(text: str) -> Any:
    """A command line value as papermill would read it.

    >>> _typed("8"), _typed("1e-3"), _typed("None"), _typed("quickstart")
    (8, 0.001, None, 'quickstart')
    """
    words = {"None": None, "null": None, "True": True, "true": True, "False": False, "false": False}
    if text in words:
        return words[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m artnb.demo", description="Run a notebook of artnb.")
    parser.add_argument("notebook", nargs="?", default="quickstart", help="its name, or an .ipynb file")
    parser.add_argument(
        "-p",
        "--parameter",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="set a parameter of the notebook",
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for everything written")
    options = parser.parse_args(arguments)
    overrides = {name: _typed(value) for name, value in options.parameter}
    try:
        result = run_demo(options.notebook, overrides, options.out)
    except ArtnbError as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
