"""What can be asked from a shell? ``artnb doctor``, ``artnb runs`` and ``artnb demo``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from artnb.errors import ArtnbError
from artnb.report import machine, versions
from artnb.ui.snapshot import reward_of, seconds_text
from artnb.ui.text import table_text


def doctor() -> list[dict[str, Any]]:
    """Facts about this machine that decide what artnb can do here."""
    facts: dict[str, Any] = {**versions(), **machine(), **_torch_facts(), "bundled model": _bundled_state()}
    return [{"what": name, "here": "none" if value is None else str(value)} for name, value in facts.items()]


def _torch_facts() -> dict[str, Any]:
    try:
        import torch
    except ModuleNotFoundError:
        return {"torch": 'not installed; pip install "artnb[cpu]" brings it'}
    is_native = bool({"amx_bf16", "avx512_bf16", "bf16"} & set(_cpu_flags()))
    return {
        "torch threads": torch.get_num_threads(),
        "bf16 on this CPU": "native" if is_native else "emulated: fp32 is used",
        "CUDA": torch.version.cuda if torch.cuda.is_available() else "not available",
    }


def _cpu_flags() -> Iterable[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return []
    found = (line for line in lines if line.lower().startswith(("flags", "features")))
    return next(found, ":").split(":", 1)[1].split()


def _bundled_state() -> str:
    from artnb.bundled import BUNDLED, cache_root

    cached = sorted(p for p in cache_root().glob(f"{BUNDLED}*") if (p / "config.json").is_file())
    return f"ready in {cached[-1]}" if cached else "not there yet; the first Model() fetches it"


def list_runs(root: Path) -> list[dict[str, Any]]:
    """The runs under a folder: steps, last reward, and whether somebody is writing."""
    return [_run_row(path.parent) for path in sorted(root.glob("*/run.json"))]


def _run_row(path: Path) -> dict[str, Any]:
    from artnb.store import RunFolder
    from artnb.store.owner import read_owner

    folder = RunFolder(path)
    steps = [record for record in folder.metrics() if record.get("kind") == "train"]
    owner = read_owner(path / "owner.json")
    state = "free"
    if owner is not None:
        age = max(0.0, time.time() - float(owner.get("heartbeat", 0.0)))
        state = f"process {owner.get('pid')}, heartbeat {seconds_text(age)} ago"
    return {
        "run": folder.name,
        "steps": folder.trained_steps,
        "last reward": reward_of(steps[-1]) if steps else None,
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
    commands.add_parser("doctor", help="versions, processor, GPU and the bundled model")
    runs = commands.add_parser("runs", help="list the runs of a folder")
    runs.add_argument("root", nargs="?", type=Path, default=Path("runs"))
    commands.add_parser("demo", help="run a notebook: artnb demo quickstart -p steps 4")
    options = parser.parse_args(given)
    try:
        return _answer(options)
    except ArtnbError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _answer(options: argparse.Namespace) -> int:
    if options.command == "doctor":
        print(table_text(doctor()))
        return 0
    found = list_runs(options.root)
    if not found:
        print(f"no runs in {options.root.resolve()}")
        return 1
    print(table_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
