"""Which Python serves the notebook's page, which one runs its cells, and do their packages fit together?

A page loads a widget's JavaScript from the environment of the server, JupyterLab or Notebook; the cells run
in the kernel's. On one machine these are often two. Colab's, Kaggle's and VS Code's pages are none of these.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from artnb.compatibility import Finding
from artnb.places import host
from artnb.ui.display import kernel

_EXTENSION = "anywidget"
"""The page's half of every widget of ours."""
_SYSTEM_FOLDERS = (Path("/usr/local/share/jupyter"), Path("/usr/share/jupyter"))


@dataclass(frozen=True)
class Environments:
    """The two Pythons of a notebook, and what of the other one each of them holds."""

    cells: Path
    """Prefix of the Python that runs the cells: this process's."""
    page: Path | None
    """Prefix of the Python that serves the page; None where there is no Jupyter server, or not ours."""
    widgets: str | None
    """Version of anywidget beside the cells; None where it is not installed."""
    extension: str | None
    """Version of the extension that the server gives to the page."""
    is_kernel: bool
    """The server can start a kernel in the cells' environment, or has done so."""

    @property
    def is_one(self) -> bool:
        return self.page == self.cells


def find(installed: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> Environments:
    """Look for the server that started this kernel, or in a shell for the Jupyter that its PATH finds.

    installed: versions of this process's packages by name.
    """
    cells, page = Path(sys.prefix), _page(environment)
    folders = _jupyter_folders(page, environment) if page else []
    can_start = page == cells and "ipykernel" in installed
    return Environments(
        cells,
        page,
        installed.get(_EXTENSION),
        _extension(folders),
        kernel() is not None or can_start or cells in _kernels(folders, page),
    )


def facts(found: Environments) -> dict[str, str]:
    """Which package belongs into which of the two environments."""
    ours, theirs = "artnb, ipykernel and anywidget", "jupyterlab or notebook, and anywidget for its extension"
    if found.is_one:
        return {"cells and page": f"{found.cells}; here belong {ours}, and jupyterlab or notebook"}
    page = (
        "a service's own page, or none found" if found.page is None else f"{found.page}; here belong {theirs}"
    )
    return {"cells run in": f"{found.cells}; here belong {ours}", "page is served from": page}


def findings(found: Environments) -> Iterator[Finding]:
    """Where the two environments do not fit together. A dashboard without its widget is a static table."""
    if found.page is None:
        return
    if not found.is_kernel:
        what = f"the Jupyter of {found.page} has no kernel in {found.cells}: a notebook there finds no artnb"
        python = sys.executable
        fix = f"{python} -m pip install ipykernel && {python} -m ipykernel install --user --name artnb"
        yield Finding("warning", what, fix)
    if found.widgets is None:
        what = f"anywidget is missing in {found.cells}, where the cells run: dashboards stay static"
        yield Finding("warning", what, f"{sys.executable} -m pip install {_EXTENSION}")
        return
    wanted = _release(found.widgets)
    fix = f'{found.page}/bin/python -m pip install "{_EXTENSION}=={wanted}.*", then reload the page'
    if found.extension is None:
        what = f"the server of {found.page} has no anywidget extension: dashboards stay static"
        yield Finding("warning", what, fix)
    elif _release(found.extension) != wanted:
        what = (
            f"the server of {found.page} gives the page anywidget {found.extension}, and the cells use "
            f"{found.widgets}: dashboards stay static"
        )
        yield Finding("warning", what, fix)


def _release(version: str) -> str:
    """A widget asks the page for its own release: 0.9.21 works with 0.9.13, not with 0.11.0."""
    return ".".join(version.split(".")[:2])


def _page(environment: Mapping[str, str]) -> Path | None:
    if host(environment):
        return None
    if kernel() is None:
        command = shutil.which("jupyter-lab", path=environment.get("PATH")) or shutil.which(
            "jupyter", path=environment.get("PATH")
        )
        return Path(command).parent.parent if command else None
    if "JPY_SESSION_NAME" not in environment:  # papermill and VS Code serve no page of Jupyter's
        return None
    return _prefix(Path("/proc") / environment.get("JPY_PARENT_PID", "none"))


def _prefix(process: Path) -> Path | None:
    """The prefix of a running Python. Its ``exe`` is no use: that of a virtual environment is a link."""
    try:
        command = os.fsdecode((process / "cmdline").read_bytes().split(b"\0")[0])
        variables = (process / "environ").read_bytes().split(b"\0")
    except OSError:  # not Linux, or not ours to read
        return None
    path = next((os.fsdecode(v[5:]) for v in variables if v.startswith(b"PATH=")), None)
    python = shutil.which(command, path=path)
    return Path(python).parent.parent if python else None


def _jupyter_folders(page: Path, environment: Mapping[str, str]) -> list[Path]:
    """The folders in which that server looks for extensions and kernels, as in ``jupyter --paths``."""
    given = [Path(folder) for folder in environment.get("JUPYTER_PATH", "").split(os.pathsep) if folder]
    user = environment.get("JUPYTER_DATA_DIR") or "~/.local/share/jupyter"
    return [*given, Path(user).expanduser(), page / "share" / "jupyter", *_SYSTEM_FOLDERS]


def _extension(folders: list[Path]) -> str | None:
    for folder in folders:
        if record := _read(folder / "labextensions" / _EXTENSION / "package.json"):
            return str(record.get("version"))
    return None


def _kernels(folders: list[Path], page: Path | None) -> set[Path]:
    """Prefixes of the Pythons that the server's kernels run; one named without a folder is its own."""
    found = set()
    for folder in folders:
        for path in folder.glob("kernels/*/kernel.json"):
            python = Path((_read(path).get("argv") or ["python"])[0])
            found.add(python.parent.parent if python.is_absolute() else page)
    return {prefix for prefix in found if prefix is not None}


def _read(path: Path) -> dict:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or not JSON: the server cannot use it either
        return {}
    return record if isinstance(record, dict) else {}
