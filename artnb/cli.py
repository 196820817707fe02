"""What can be asked from a shell? A diagnosis, the runs, a report, a clean notebook, a new environment."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from artnb.errors import ArtnbError
from artnb.places import run_root
from artnb.ui.snapshot import is_step, is_supervised, reward_of, seconds_text
from artnb.ui.text import table_text


def list_runs(root: Path) -> list[dict[str, Any]]:
    """The runs under a folder: steps, the supervised among them, last reward, and who is writing."""
    return [_run_row(path.parent) for path in sorted(root.glob("*/run.json"))]


def _run_row(path: Path) -> dict[str, Any]:
    from artnb.store import RunFolder
    from artnb.store.owner import read_owner

    folder = RunFolder(path)
    steps = [record for record in folder.metrics() if is_step(record)]
    supervised = [record for record in steps if is_supervised(record)]
    reinforced = [record for record in steps if not is_supervised(record)]
    owner = read_owner(path / "owner.json")
    state = "free"
    if owner is not None:
        age = max(0.0, time.time() - float(owner.get("heartbeat", 0.0)))
        state = f"process {owner.get('pid')}, heartbeat {seconds_text(age)} ago"
    return {
        "run": folder.name,
        "steps": folder.trained_steps,
        "supervised": len(supervised),
        "last sft loss": supervised[-1].get("loss") if supervised else None,
        "last reward": reward_of(reinforced[-1]) if reinforced else None,
        "state": state,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["demo"]:
        from artnb.demo import main as demo

        return demo(given[1:])
    parser = argparse.ArgumentParser(prog="artnb", description="Reinforcement learning in one notebook.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what is in the way on this machine, and what mends it")
    doctor.add_argument("--json", action="store_true", help="the same as one JSON object")
    runs = commands.add_parser("runs", help="list the runs of a folder")
    runs.add_argument("root", nargs="?", type=Path, default=None)
    report = commands.add_parser("report", help="write a run's report.html and print its path")
    report.add_argument("run", type=Path, help="the run's folder")
    report.add_argument("-o", "--output", type=Path, default=None, help="where to write it")
    clean = commands.add_parser("clean-notebook", help="take widget state out of saved notebooks")
    clean.add_argument("notebooks", nargs="+", type=Path, metavar="notebook")
    new = commands.add_parser("new-env", help="begin an environment: a package that works, to be changed")
    new.add_argument("name")
    new.add_argument("--folder", type=Path, default=None, help="default: ./NAME")
    commands.add_parser("demo", help="run a notebook: artnb demo quickstart -p steps 4")
    options = parser.parse_args(given)
    try:
        return _answer(options)
    except (ArtnbError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _doctor(*, as_json: bool) -> int:
    from artnb.doctor import doctor

    diagnosis = doctor()
    print(json.dumps(diagnosis.to_dict(), indent=2) if as_json else diagnosis)
    return int(diagnosis.has_problem)


def _answer(options: argparse.Namespace) -> int:
    if options.command == "doctor":
        return _doctor(as_json=options.json)
    if options.command == "report":
        from artnb.store import Run

        Run.read(options.run.resolve().name, options.run.resolve().parent).report(options.output)
        return 0
    if options.command == "clean-notebook":
        from artnb.clean import clean_notebook

        for notebook in options.notebooks:
            print(clean_notebook(notebook))
        return 0
    if options.command == "new-env":
        from artnb.new_env import new_environment

        place = new_environment(options.name, options.folder)
        print(f"{place} holds a working environment. Next:")
        quoted = shlex.quote(str(place))
        print(f"  pip install -e {shlex.quote(f'{place}[test]')} && python -m pytest {quoted}")
        print(f"  python -c \"import artnb; print(artnb.load_environment('{options.name}'))\"")
        return 0
    root = options.root or Path(run_root())
    found = list_runs(root)
    if not found:
        print(f"no runs in {root.resolve()}")
        return 1
    print(table_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
