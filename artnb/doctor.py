"""Can this machine train a model, and which command mends what is in the way?"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from artnb import compatibility, devices, servers
from artnb.bundled import BUNDLED, cache_root
from artnb.compatibility import Facts, Finding
from artnb.devices import Gpu, GpuProcess
from artnb.errors import ArtnbError
from artnb.memory import cpu_bytes, cpu_total
from artnb.places import host
from artnb.report import machine
from artnb.ui.display import front_end
from artnb.ui.html import facts_html, table_html, visible
from artnb.ui.text import table_text

SECRETS = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY"),
    *("OPENROUTER_API_KEY", "GEMINI_API_KEY", "TINKER_API_KEY", "KAGGLE_KEY"),
)
"""Environment variables that hold keys. Only whether they are set is ever looked at."""

_GIB = 2**30
_ORDER = {"problem": 0, "warning": 1, "ok": 2}


@dataclass(frozen=True)
class Diagnosis:
    """What doctor found; a notebook shows it as tables, a terminal as text."""

    facts: Mapping[str, Mapping[str, str]]
    """Section -> name -> value."""
    findings: Sequence[Finding]
    """Problems first. Empty when nothing is in the way."""

    @property
    def has_problem(self) -> bool:
        """True when something will not work; warnings alone do not count."""
        return any(finding.severity == "problem" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "facts": {section: dict(values) for section, values in self.facts.items()},
            "findings": [asdict(finding) for finding in self.findings],
            "has_problem": self.has_problem,
        }

    @property
    def _verdict(self) -> str:
        counts = {name: sum(f.severity == name for f in self.findings) for name in ("problem", "warning")}
        told = [f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count]
        return ", ".join(told) or "nothing is in the way"

    def __repr__(self) -> str:
        lines = [f"artnb doctor: {self._verdict}"]
        for finding in self.findings:
            lines.append(f"  {finding.severity}: {finding.what}")
            lines += [f"    fix: {finding.fix}"] if finding.fix else []
        for section, values in self.facts.items():
            rows = [{"what": f"  {name}", "here": value} for name, value in values.items()]
            lines += [section, *table_text(rows, ["what", "here"]).splitlines()[1:]]
        return visible("\n".join(lines))

    def _repr_html_(self) -> str:
        rows = [{"": f.severity, "what": f.what, "what mends it": f.fix} for f in self.findings]
        head = f"<div><b>artnb doctor: {self._verdict}</b></div>"
        tables = [
            f"<details><summary>{section}</summary>{facts_html(values)}</details>"
            for section, values in self.facts.items()
        ]
        return f"<div>{head}{table_html(rows) if rows else ''}{''.join(tables)}</div>"


def doctor() -> Diagnosis:
    """Look at this machine: packages, processor, GPU, memory, disk, notebook, keys (names only).

    Takes some seconds: torch and its companions are imported in a child process, so that a broken one
    is reported and not raised. Nothing is changed.
    """
    installed = compatibility.installed()
    failed, torch = compatibility.probe(list(installed))
    facts = Facts(
        installed=installed,
        requirements=compatibility.requirements(list(installed)),
        loaded=compatibility.loaded(),
        failed=failed,
        torch=torch,
        gpus=devices.gpus(),
        processes=devices.gpu_processes(),
        family=(os.getpid(),),
        own_bytes=devices.own_bytes(),
    )
    environments = servers.find(installed)
    disks = free_space()
    memory = cpu_bytes()
    found = [
        *compatibility.apply_rules(facts),
        *compatibility.broken_imports(facts),
        *compatibility.violated(facts),
        *missing_models(facts),
        *servers.findings(environments),
        *tight_places(disks, memory),
        *kaggle_without_internet(),
    ]
    sections = {
        "Python": {
            "version": platform.python_version(),
            "system": platform.platform(),
            "shown by": front_end(),
        },
        "notebook": servers.facts(environments),
        "packages": dict(installed),
        "processor": _processor(torch, memory),
        "GPU": _gpu_facts(facts.gpus, facts.processes),
        "disk": {place: f"{free / _GIB:.1f} GiB free" for place, free in disks.items()},
        "model": {"bundled": _bundled_state(), "suits this machine": _suiting_base()},
        "keys": _keys(os.environ),
    }
    return Diagnosis(sections, sorted(found, key=lambda finding: _ORDER[finding.severity]))


def _processor(torch: Mapping[str, Any], memory: int) -> dict[str, str]:
    total = cpu_total()
    here = {"model": str(machine()["cpu"]), "cores usable": str(devices.cores())}
    if torch:
        native = [name for name in ("amx", "avx512_bf16") if torch[name]]
        here["bf16"] = f"native ({', '.join(native)})" if native else "emulated: fp32 is used"
        here["torch threads"] = str(torch["threads"])
    here["memory"] = f"{memory / _GIB:.1f} GiB available" + (f" of {total / _GIB:.1f}" if total else "")
    return here


def _gpu_facts(gpus: Sequence[Gpu], processes: Sequence[GpuProcess]) -> dict[str, str]:
    if not gpus:
        return {"NVIDIA": "none"}
    facts = {}
    for gpu in gpus:
        kind = "bf16" if gpu.has_bfloat16 else "no bf16: float16 is used"
        facts[f"{gpu.index}: {gpu.name}"] = (
            f"{gpu.free / _GIB:.1f} of {gpu.total / _GIB:.1f} GiB free, driver {gpu.driver}, "
            f"compute capability {'.'.join(map(str, gpu.capability))}, {kind}"
        )
        for process in (p for p in processes if p.gpu == gpu.uuid):
            size = "unknown size" if process.used is None else f"{process.used / _GIB:.1f} GiB"
            whose = ", this process" if process.pid == os.getpid() else ""
            facts[f"{gpu.index}: process {process.pid}"] = f"{process.name}, {size}{whose}"
    return facts


def _bundled_state() -> str:
    cached = sorted(p for p in cache_root().glob(f"{BUNDLED}*") if (p / "config.json").is_file())
    return f"ready in {cached[-1]}" if cached else "not there yet; the first Model() fetches it"


def _suiting_base() -> str:
    try:
        return devices.choose_base().why
    except ArtnbError as error:  # no way to fetch one, or no transformers to plan it with
        return str(error)


def _keys(environment: Mapping[str, str]) -> dict[str, str]:
    """Names of the keys that are set. Colab's and Kaggle's own stores are not opened."""
    found = [name for name in SECRETS if environment.get(name)]
    if (devices.hub_cache().parent / "token").is_file():
        found.append("Hugging Face token file")
    if Path("~/.netrc").expanduser().is_file():
        found.append("~/.netrc (not read)")
    unread = "not opened" if host(environment) else ""
    return {"set": ", ".join(found) or "none"} | ({"secrets of Colab or Kaggle": unread} if unread else {})


def free_space() -> dict[str, int]:
    """Free bytes of the places that training writes to."""
    places = {"this folder": Path.cwd(), "temporary files": Path("/tmp"), "models": devices.hub_cache()}
    places["/dev/shm"] = Path("/dev/shm")
    free = {}
    for name, path in places.items():
        if name != "/dev/shm" or path.exists():
            free[name] = devices.free_at(path)
    return free


def missing_models(facts: Facts) -> Iterator[Finding]:
    """Without torch and transformers there are only the client, gather and FakeBackend."""
    absent = [name for name in ("torch", "transformers", "peft") if not facts.has(name)]
    if absent:
        extra = "gpu" if facts.gpus else "cpu"
        yield Finding("warning", f"no models: {', '.join(absent)} missing", f'pip install "artnb[{extra}]"')


def tight_places(disks: Mapping[str, int], memory: int) -> Iterator[Finding]:
    """Findings for little memory and full disks."""
    if memory < 2 * _GIB:
        what = f"{memory / _GIB:.1f} GiB of memory are left; the bundled model needs about 2 to train"
        yield Finding("warning", what, "stop other kernels and programs")
    wanted = {"this folder": 1.0, "models": 8.0, "/dev/shm": 1.0}
    fixes = {
        "this folder": "pass a root for runs on a larger disk: Model(root=...)",
        "models": "set HF_HOME to a folder on a larger disk before Python starts",
        "/dev/shm": "start the container with --shm-size=8g",
    }
    for place, least in wanted.items():
        if place in disks and disks[place] < least * _GIB:
            what = f"{place} has {disks[place] / _GIB:.2f} GiB left, {least:.0f} GiB are wanted"
            yield Finding("warning", what, fixes[place])


def kaggle_without_internet() -> Iterator[Finding]:
    """On Kaggle, and only there, try to reach the hub: notebooks start without internet."""
    if host() == "Kaggle" and not devices.hub_answers():
        yield Finding(
            "warning",
            "this notebook has no internet: no package and no model can be fetched",
            "Settings > Internet, or attach the model (Add Input > Models): Model(base='/kaggle/input/...')",
        )
