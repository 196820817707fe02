"""What came out of a run? ``result.json`` in its folder, and a comparison that a person can read."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from artnb.secrets import redact
from artnb.store.codec import encode
from artnb.ui.html import table_html
from artnb.ui.snapshot import is_step, is_supervised, reward_of
from artnb.ui.text import table_text

_PACKAGES = ("artnb", "torch", "transformers", "peft", "openai", "numpy", "vllm", "unsloth")
_STARTED = time.monotonic()
"""When ``import artnb`` loaded this module."""
RESULT_TYPE = "application/vnd.artnb.result+json"
"""The record as an output of a cell: programs find it in a saved notebook, front ends pass over it."""
_LONGEST_ERROR = 2000


@dataclass(frozen=True)
class Report:
    """The record in ``result.json``, with a repr worth reading."""

    path: Path
    record: dict[str, Any] = field(repr=False)
    metrics: tuple[str, ...] = ()
    """Metrics of the evaluations that the table shows beside the reward."""

    def _rows(self) -> list[dict[str, Any]]:
        evaluation = self.record["evaluation"]
        named = {k: evaluation[k] for k in ("before", "after") if evaluation[k]}
        named |= {f"baseline {name}": value for name, value in evaluation["baselines"].items()}
        return [
            {
                "evaluation": name,
                "mean reward": value["mean_reward"],
                "95% low": value["low"],
                "95% high": value["high"],
                "n": value["n"],
                **{name: value.get("metrics", {}).get(name) for name in self.metrics},
            }
            for name, value in named.items()
        ]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Beside HTML and text, which the front end asks for by themselves."""
        return {RESULT_TYPE: json.loads(encode(self.record))}

    def _repr_html_(self) -> str:
        return table_html(self._rows())

    def __repr__(self) -> str:
        return table_text(self._rows())


def report(
    run: Any,
    *,
    notebook: str,
    before: Any = None,
    after: Any = None,
    baselines: Mapping[str, Any] | None = None,
    parameters: Any = None,
    metrics: Sequence[str] = (),
) -> Report:
    """Write the run's ``result.json``: rewards by step, evaluations, versions and machine.

    A supervised step has no reward: it is None in ``reward_by_step``, and ``supervised_steps`` has its
    loss and ``nll``, the mean negative log-likelihood of its tokens.

    before, after and the baselines are Evaluations; metrics names those of their metrics to show.
    ``seconds`` counts from ``import artnb``; ``artnb.demo`` replaces it by the time of the whole
    command. ``status`` is ``complete`` when the loop took all the steps that ``run.steps`` was asked for,
    else ``stopped``, ``interrupted`` or ``incomplete``. A run that is closed without a report gets a result
    of its own, without evaluations.
    """
    record = {
        "notebook": notebook,
        **progress(run),
        "evaluation": {
            "before": _evaluation(before),
            "after": _evaluation(after),
            "baselines": {name: _evaluation(value) for name, value in (baselines or {}).items()},
        },
        "parameters": dict(vars(parameters)) if parameters is not None else {},
        "run": run.name,
        "versions": versions(),
        "machine": machine(),
    }
    return Report(Path(run.write_result(record)), record, tuple(metrics))


def unreported(run: Any) -> dict[str, Any]:
    """The record for a run that was stopped or failed before its notebook could report."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    record = {
        "notebook": None,
        **progress(run),
        "evaluation": {"before": None, "after": None, "baselines": {}},
        "parameters": {},
        "run": run.name,
        "versions": versions(),
    }
    if record["status"] != "complete" and error is not None:
        record["last_error"] = f"{type(error).__name__}: {redact(str(error))[:_LONGEST_ERROR]}"
    return record


def progress(run: Any) -> dict[str, Any]:
    """How far a run came: its status, and the rewards of its steps."""
    steps = [r for r in run.metrics() if is_step(r)]
    trained = max((r["step"] + 1 for r in steps), default=0)
    return {
        **outcome(run.events(), trained),
        "seconds": round(time.monotonic() - _STARTED, 1),
        "reward_by_step": [reward_of(r) for r in steps],
        "supervised_steps": [
            {name: r.get(name) for name in ("step", "loss", "nll")} for r in steps if is_supervised(r)
        ],
    }


def outcome(events: Sequence[Mapping[str, Any]], trained: int) -> dict[str, Any]:
    """Did the loop take its steps? ``status``, ``steps`` taken and ``steps_asked`` for, from the journal.

    >>> outcome([{"kind": "loop", "total": 3}, {"kind": "stopped", "reason": "STOP file"}], 2)
    {'status': 'stopped', 'steps': 2, 'steps_asked': 3}
    """
    total, ended = None, "incomplete"
    for event in events:
        kind = event.get("kind")
        if kind == "loop":
            total, ended = int(event["total"]), "incomplete"
        elif kind == "stopped":
            ended = "stopped"
        elif kind == "gather" and event.get("split") == "train" and ended != "stopped":
            ended = "interrupted" if event.get("status") == "interrupted" else "incomplete"
    is_complete = trained >= total if total is not None else trained > 0
    return {"status": "complete" if is_complete else ended, "steps": trained, "steps_asked": total}


def _evaluation(evaluation: Any) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    record = {name: getattr(evaluation, name) for name in ("mean_reward", "low", "high", "n")}
    extra = getattr(evaluation, "metrics", None)
    return record | ({"metrics": dict(extra)} if extra else {})


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result; absent ones are left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Processor, cores, memory and GPU of this machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": _memory_gb(),
        "gpu": gpu_name(),
        "system": platform.platform(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return platform.machine()


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):  # not POSIX
        return None


def gpu_name() -> str | None:
    """Name of the first CUDA device, None without one; loads torch only if it is loaded already."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(answer.stdout.splitlines()), None)
