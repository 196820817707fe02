"""How is the GPU stack put onto Colab's or Kaggle's image, and does the kernel need a restart afterwards?

The images bring torch, numpy, pandas and some 700 more packages. pip replaces one of them only where a
new package requires another version; ``artnb/constraints`` fixes, for each image, what is added, so that
these are few and known. Its files say which, and the tests work them out from the packages' metadata.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from artnb.compatibility import loaded, stale
from artnb.devices import Gpu, gpus
from artnb.errors import ArtnbError
from artnb.ui.display import host

_FOLDER = Path(__file__).parent / "constraints"


@dataclass(frozen=True)
class Installation:
    """What ``install`` did, or would do, with a repr that says whether to restart."""

    command: tuple[str, ...]
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
        changes = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in self.replaced.items())
        lines = [" ".join(self.command), f"added {len(self.added)} packages; replaced: {changes or 'none'}"]
        if self.stale:
            lines.append(f"RESTART THE KERNEL (Runtime or Run menu): it runs {', '.join(self.stale)}")
        else:
            lines.append("no restart is needed: nothing that this kernel has imported was replaced")
        return "\n".join(lines)


def install(*, vllm: bool = True, dry_run: bool = False) -> Installation:
    """Install what this machine's GPU needs, with the constraints of the image that it runs.

    vllm: also the vLLM engine, which on Colab replaces torch by the version that it was built for;
    without it artnb's own engine samples. dry_run: only show the command.
    Without a GPU the CPU packages are installed. Raises ArtnbError when pip fails, with its last lines.
    """
    command = pip_command(where(), gpus(), vllm=vllm)
    before, imported = _versions(), loaded()
    if not dry_run:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise ArtnbError(f"{' '.join(command)} failed: {done.stderr.strip()[-1500:]}")
    after = _versions()
    return changes(command, before, after, imported)


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
    named = ((one.metadata["Name"], one.version) for one in metadata.distributions())
    return {name.lower().replace("_", "-"): version for name, version in named if name}


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
    print(done)
    if done.replaced:
        print("a notebook that has imported one of the replaced packages must restart its kernel")
    return 0


if __name__ == "__main__":
    sys.exit(main())
