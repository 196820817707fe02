"""How does a test drive JupyterLab? In a headless Chromium, by its own commands, in a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

PATIENCE = 120.0
"""Seconds: JupyterLab needs up to 30 of them to start on a busy machine."""
_TOKEN = "artnb-test"
_APPS = {"lab": "LabApp", "notebook": "JupyterNotebookApp"}
_FRONT_END = ("ARTNB_", "COLAB_", "KAGGLE_", "JPY_", "VSCODE_")
_FAILED = '.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.error"]'
_IS_READY = """() => {
  const widget = window.jupyterapp && window.jupyterapp.shell.currentWidget;
  const session = widget && widget.context && widget.context.sessionContext.session;
  const kernel = session && session.kernel;
  return kernel && kernel.status === "idle" && kernel.connectionStatus === "connected";
}"""


@contextlib.contextmanager
def running_lab(folder: Path, *, app: str = "lab", **environment: str) -> Iterator[str]:
    """Start JupyterLab in ``folder``; yields its address. Its settings and its log are in the folder too.

    app: ``notebook`` starts Notebook 7 instead.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {
        f"JUPYTER_{name}_DIR": str(folder / ".jupyter" / name.lower())
        for name in ("CONFIG", "DATA", "RUNTIME")
    }
    settings = folder / ".jupyter" / "config" / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(
        '{"fetchNews": "false", "checkForUpdates": false}'
    )
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_FRONT_END)}
    command = [
        *(sys.executable, "-m", "jupyter", app, "--no-browser", "--allow-root", f"--port={port}"),
        *("--ServerApp.ip=127.0.0.1", f"--IdentityProvider.token={_TOKEN}", f"--ServerApp.root_dir={folder}"),
        *(f"--{_APPS[app]}.expose_app_in_browser=True", "--LabApp.news_url=None"),
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    with open(folder / "lab.log", "w") as log:
        env = inherited | own | {"IPYTHONDIR": str(folder / ".ipython")} | environment
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_for(f"http://127.0.0.1:{port}/api/status?token={_TOKEN}", server, folder / "lab.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:  # now and then it hangs after it has shut down its kernels
            server.kill()
            server.wait()


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < until, f"JupyterLab did not start: {log.read_text()}"
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(address, timeout=5)
            return
        time.sleep(0.25)


def write_notebook(path: Path, cells: list[str]) -> Path:
    """A notebook with these cells of code."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)
    return path


class Lab:
    """A notebook that is open in a page of the browser."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        page.set_default_timeout(1000 * PATIENCE)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def open(self, address: str, name: str, *, app: str = "lab") -> None:
        place = f"lab/tree/{name}?reset&" if app == "lab" else f"notebooks/{name}?"
        self.page.goto(f"{address}/{place}token={_TOKEN}")
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        self.page.wait_for_function(_IS_READY)

    def command(self, name: str, arguments: str = "{}") -> None:
        """Execute a command of JupyterLab and do not wait for its end."""
        self.page.evaluate(f"() => {{ window.jupyterapp.commands.execute({name!r}, {arguments}); }}")

    def save(self) -> None:
        """Save the notebook and wait until that is done."""
        self.command("docmanager:save")
        self.wait("!window.jupyterapp.shell.currentWidget.context.model.dirty")

    def restart(self) -> None:
        """Restart the kernel and wait for the new one."""
        self.page.evaluate(
            "window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.restart()"
        )
        self.page.wait_for_function(_IS_READY)

    def run_cell(self) -> None:
        """Start the selected cell and select the next one."""
        self.command("notebook:run-cell-and-select-next")

    def wait(self, condition: str) -> None:
        """Wait until this JavaScript expression is true; raises AssertionError when a cell fails."""
        self.page.wait_for_function(f"() => ({condition}) || document.querySelector({_FAILED!r})")
        failed = self.page.locator(_FAILED)
        assert not failed.count(), failed.first.inner_text()


@contextlib.contextmanager
def running_chromium() -> Iterator[Any]:
    """A headless Chromium that loads nothing by itself."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=arguments)
        yield chromium
        chromium.close()
