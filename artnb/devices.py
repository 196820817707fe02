"""What does this machine have, and which base model suits it?"""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artnb.errors import ConfigurationError
from artnb.memory import read_if_there
from artnb.places import host

_SMI = "nvidia-smi"
_GPU_FIELDS = "index,uuid,name,memory.total,memory.free,driver_version,compute_cap"
_PROCESS_FIELDS = "gpu_uuid,pid,process_name,used_memory"
_MIB, _GIB = 1 << 20, 1 << 30
_CONTEXT = 512 << 20
_GB = 10**9


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA card, as its driver tells."""

    index: int
    uuid: str
    name: str
    total: int
    """Bytes of memory."""
    free: int
    """Bytes that no process holds."""
    driver: str
    capability: tuple[int, int]
    """Compute capability; (0, 0) where the driver is too old to tell."""

    @property
    def has_bfloat16(self) -> bool:
        """Cards before Ampere, such as the T4, have none and use float16."""
        return self.capability >= (8, 0)


@dataclass(frozen=True)
class GpuProcess:
    """One process that holds memory of a card."""

    gpu: str
    """The card's uuid."""
    pid: int
    name: str
    used: int | None
    """Bytes; None where a container hides them."""


def gpus() -> list[Gpu]:
    """The NVIDIA cards of this machine; none where there is no driver. No CUDA context is made."""
    return parse_gpus(_ask(f"--query-gpu={_GPU_FIELDS}"))


def gpu_processes() -> list[GpuProcess]:
    """Processes that hold memory of a card. A container may show other process numbers, or none."""
    return parse_processes(_ask(f"--query-compute-apps={_PROCESS_FIELDS}"))


def _ask(query: str) -> str:
    command = [_SMI, query, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):  # no driver, or one that hangs: no card to work with
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def parse_gpus(text: str) -> list[Gpu]:
    """Lines of nvidia-smi's CSV as cards.

    >>> parse_gpus("0, GPU-1, Tesla T4, 15360, 15095, 550.54.15, 7.5")[0].has_bfloat16
    False
    """
    found = []
    for fields in _lines(text, _GPU_FIELDS):
        index, uuid, name, total, free, driver, capability = fields
        major, _, minor = capability.partition(".")
        known = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
        found.append(Gpu(int(index), uuid, name, int(total) * _MIB, int(free) * _MIB, driver, known))
    return found


def parse_processes(text: str) -> list[GpuProcess]:
    """Lines of nvidia-smi's CSV as processes.

    >>> parse_processes("GPU-1, 4711, /usr/bin/python3, [N/A]")
    [GpuProcess(gpu='GPU-1', pid=4711, name='/usr/bin/python3', used=None)]
    """
    return [
        GpuProcess(gpu, int(pid), name, int(used) * _MIB if used.isdigit() else None)
        for gpu, pid, name, used in _lines(text, _PROCESS_FIELDS)
    ]


def used_card(cards: Sequence[Gpu], environment: Mapping[str, str] = os.environ) -> Gpu | None:
    """The card that a model lives on: the first that ``CUDA_VISIBLE_DEVICES`` leaves to this process."""
    first = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    return next((c for c in cards if first and (first == str(c.index) or c.uuid.startswith(first))), None)


def held_by_others(
    card: Gpu, processes: Sequence[GpuProcess], family: Sequence[int], own: int = 0
) -> str | None:
    """Which other processes hold memory of a card, in words; None when there are none.

    family: numbers of this process and its children. own: bytes that they hold. Containers hide the
    processes of others: there, what is neither free nor ours says that there are some.
    """
    here = [process for process in processes if process.gpu == card.uuid]
    others = [process for process in here if process.pid not in family]
    if others:
        sizes = ("" if o.used is None else f", {o.used / _GIB:.1f} GiB" for o in others)
        return ", ".join(f"{o.pid} ({o.name}{size})" for o, size in zip(others, sizes, strict=True))
    hidden = card.total - card.free - own
    if here or hidden < _GIB:
        return None
    return f"one that this container does not show ({hidden / _GIB:.1f} GiB)"


def own_bytes() -> int:
    """Bytes of its card that this process holds: torch's, and a CUDA context."""
    torch = sys.modules.get("torch")
    return torch.cuda.memory_reserved() + _CONTEXT if torch and torch.cuda.is_initialized() else 0


def busy_card() -> str | None:
    """Who else holds memory of the card that a model would live on, and what to do; None if nobody."""
    card = used_card(gpus())
    who = card and held_by_others(card, gpu_processes(), (os.getpid(),), own_bytes())
    if not card or not who:
        return None
    return (
        f"GPU {card.index} ({card.name}) has {card.free / _GIB:.1f} of {card.total / _GIB:.1f} GiB free: "
        f"another process holds memory there: {who}. Shut that kernel down, or: kill PID"
    )


def _lines(text: str, fields: str) -> list[list[str]]:
    count = len(fields.split(","))
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines()]
    more = [(row, len(row) - count) for row in rows if len(row) >= count]  # commas in a process's name
    return [[*row[:2], ", ".join(row[2 : 3 + extra]), *row[3 + extra :]] for row, extra in more]


def cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Processor cores that this process may use: its affinity, within the quota of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = (read_if_there(cgroup / "cpu.max") or "max 100000").split()
    if quota == "max":
        quota = read_if_there(cgroup / "cpu" / "cpu.cfs_quota_us") or "max"
        period = read_if_there(cgroup / "cpu" / "cpu.cfs_period_us") or period
    limited = quota.isdigit() and int(quota) > 0  # -1 is no limit
    return max(1, min(allowed, math.ceil(int(quota) / int(period)))) if limited else allowed


_QWEN_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class BaseChoice:
    """The base model that suits a machine, and why."""

    name: str
    """A Hugging Face id, a folder, or the name of the bundled model."""
    load_in_4bit: bool
    why: str


def default_base(device: str | None = None, **about: Any) -> str:
    """The base model that suits a device; ``choose_base`` says why, and takes the same parameters.

    >>> default_base("cpu")
    'SmolLM2-135M-Instruct'
    """
    return choose_base(device, **about).name


def base_for(device: str, trainer: str) -> tuple[str, dict[str, Any]]:
    """The base of a Model that names none, and what its trainer is told so that it fits.

    device: ``cpu`` or ``cuda``. trainer: ``peft`` or ``unsloth``, which alone loads in 4 bit.
    """
    if device == "cpu":
        return choose_base("cpu").name, {}
    choice = choose_base()
    in_4bit = {"load_in_4bit": True} if choice.load_in_4bit and trainer == "unsloth" else {}
    return choice.name, {"gradient_checkpointing": True} | in_4bit


def choose_base(
    device: str | None = None,
    *,
    context: int = 4096,
    disk_free: int | None = None,
    is_online: Callable[[], bool] | None = None,
    attached: Path = Path("/kaggle/input"),
) -> BaseChoice:
    """The base model for a device: 3B on a T4, 7B where its plan fits, on a CPU the bundled model.

    device: ``cpu``, a GPU as in ``artnb.plan``, or None for this machine, where several cards count as
    one: a model lives on the first. context: tokens of the longest trajectory. disk_free: bytes for the
    download, as found where Hugging Face keeps models. is_online: whether a model can be fetched; asked
    on Kaggle, where a notebook may have no internet. attached: where Kaggle shows attached models.

    Raises ConfigurationError when the model would have to be fetched and there is no way to.
    """
    from artnb.bundled import BUNDLED

    device = device or this_device()
    if device == "cpu":
        return BaseChoice(BUNDLED, False, "the bundled model: a CPU trains no larger one in useful time")
    name, size, in_4bit = _largest(device, context)
    why = f"{name}{' in 4 bit' if in_4bit else ''} on {device}, trajectories of {context:,} tokens"
    if found := _attached(attached, name):
        return BaseChoice(str(found), in_4bit, f"{why}; attached to this notebook")
    if is_online is None:
        is_online = hub_answers if host() == "Kaggle" else lambda: True
    if not _is_cached(name) and not is_online():
        raise ConfigurationError(
            f"this notebook has no internet, so {name} cannot be fetched. Turn it on (Kaggle: Settings > "
            f'Internet), or attach the model (Add Input > Models > "{name}") and pass '
            f'base="{attached}/..." with the folder that holds its config.json'
        )
    return _by_disk(name, size, in_4bit, why, disk_free)


def _is_cached(name: str) -> bool:
    return any(hub_cache().glob(f"models--Qwen--{name}/snapshots/*/*.safetensors"))


def _by_disk(name: str, billions: float, in_4bit: bool, why: str, disk_free: int | None) -> BaseChoice:
    """Weights in 16 bits where they have room on the disk or lie there already, else those in 4 bits."""
    room = free_at(hub_cache()) if disk_free is None else disk_free
    needed = round(billions * 2 * _GB * 1.1)
    if room >= needed or _is_cached(name):
        return BaseChoice(f"Qwen/{name}", in_4bit, why)
    if in_4bit and room >= needed / 3:
        left = f"{why}; stored in 4 bit: the disk has {room / _GB:.0f} GB left"
        return BaseChoice(f"unsloth/{name}-bnb-4bit", True, left)
    raise ConfigurationError(
        f"{name} needs {needed / _GB:.0f} GB of disk; where Hugging Face keeps models, {room / _GB:.0f} are "
        "free. Free some, set HF_HOME to a larger disk (on Kaggle /tmp/hf is one), or pass a smaller base"
    )


def _largest(device: str, context: int) -> tuple[str, float, bool]:
    """Name, billions of parameters, and whether in 4 bit: 7B if its plan fits with room left, on cards
    of more than 20 GB if it fits at all, else 3B in 4 bit."""
    from artnb.memory import GPUS

    card = used_card(gpus())
    size: str | int = device if device in GPUS or card is None else card.total
    is_small = device in ("T4", "gpu-small")
    for in_4bit, spare in ((True, 0.1),) if is_small else ((False, 0.1), (True, 0.1), (True, 0.0)):
        if fits_7b(size, context, in_4bit=in_4bit, spare=spare):
            return "Qwen2.5-7B-Instruct", 7.6, in_4bit
    return "Qwen2.5-3B-Instruct", 3.1, True


def fits_7b(device: str | int, context: int, *, in_4bit: bool, spare: float = 0.1) -> bool:
    """Whether a 7B model's plan leaves this share of the card: GPU plans are computed, not measured."""
    from artnb.plan import plan

    planned = plan(_QWEN_7B, device, context=context, load_in_4bit=in_4bit, gradient_checkpointing=True)
    return planned.left >= spare * planned.setting.capacity


def this_device() -> str:
    """``cpu``, a card's name as ``artnb.plan`` knows it, or ``gpu`` or ``gpu-small`` (< 20 GB)."""
    from artnb.memory import GPUS

    card = used_card(gpus())
    return device_name(card, GPUS) if card else "cpu"


def device_name(card: Gpu, known: Mapping[str, int]) -> str:
    """A card as ``artnb.plan`` knows it: by its name, and of two sizes the nearer."""
    fitting = [name for name in known if name.split("-")[0] in card.name.replace("-", " ").split()]
    if fitting:
        return min(fitting, key=lambda name: abs(known[name] - card.total))
    return "gpu" if card.total > 20 * _GB else "gpu-small"


def _attached(folder: Path, name: str) -> Path | None:
    """A model folder below ``folder`` whose path names this model; Kaggle writes names in its own way."""

    def plain(text: str) -> str:
        return "".join(character for character in text.lower() if character.isalnum())

    parts = [plain(part) for part in name.split("-")]
    configs = sorted(folder.glob("**/config.json")) if folder.is_dir() else []
    folders = [path.parent for path in configs]
    return next((f for f in folders if all(p in plain(str(f.relative_to(folder))) for p in parts)), None)


def free_at(path: Path) -> int:
    """Free bytes where a path lies, or will lie once it is made."""
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    return shutil.disk_usage(existing).free


def hub_cache() -> Path:
    """Where Hugging Face keeps models."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def hub_answers(address: tuple[str, int] = ("huggingface.co", 443)) -> bool:
    """Whether Hugging Face can be reached from here; waits 3 seconds at most."""
    try:
        socket.create_connection(address, timeout=3).close()
    except OSError:
        return False
    return True
