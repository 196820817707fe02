"""Which versions of which packages made this run?"""

from __future__ import annotations

import functools
import importlib.metadata
import platform

_PACKAGES = ("artnb", "torch", "transformers", "peft", "renderers", "openai", "unsloth", "vllm", "numpy")


def package_version(name: str) -> str | None:
    """The installed version, without importing the package; None when it is not installed.

    >>> package_version("no-such-package") is None
    True
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def versions() -> dict[str, str]:
    """Python and the installed packages that decide what a run does."""
    found = {name: package_version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **{k: v for k, v in found.items() if v is not None}}
