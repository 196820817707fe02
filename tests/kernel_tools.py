"""How does a test drive a real kernel? Over its sockets, as a front end does: run, click, press ■."""

from __future__ import annotations

import hashlib
import os
import queue
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from artnb.bundled import cache_root

REPOSITORY = Path(__file__).resolve().parent.parent
PATIENCE = 60.0
"""Seconds that a busy machine may need for anything that should happen at once."""

OLD_KERNELS = {
    "6.17.1": (  # Colab's and Kaggle's
        *("ipykernel==6.17.1", "ipython==7.34.0", "ipywidgets==7.7.1", "tornado==6.5.7"),
        *("jupyter_client==7.4.9", "traitlets==5.7.1"),
    ),
    "7.3.0": ("ipykernel==7.3.0", "ipywidgets>=8"),
}
_FRONT_END = ("ARTNB_", "COLAB_", "KAGGLE_", "JPY_", "VSCODE_")


def old_kernel(version: str) -> Path:
    """The Python of an environment with this ipykernel and what artnb's core needs; made on first use."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return environment(f"ipykernel-{version}", [*OLD_KERNELS[version], *project["dependencies"]])


def environment(name: str, wanted: Sequence[str]) -> Path:
    """The Python of a virtual environment with these packages; made on first use and kept."""
    digest = hashlib.sha256(f"{sys.version} {wanted}".encode()).hexdigest()[:12]
    folder = cache_root() / "test-kernels" / f"{name}-{digest}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        (folder / "complete").touch()
    return python


class Cell:
    """A cell that was sent to the kernel."""

    def __init__(self, kernel: Kernel, identity: str) -> None:
        self.kernel = kernel
        self.identity = identity

    @property
    def text(self) -> str:
        """What it printed so far."""
        return "".join(m["content"]["text"] for m in self.kernel.published(self.identity, "stream"))

    def prints(self, text: str) -> None:
        """Wait until it has printed this."""
        self.kernel.wait(lambda: text in self.text, lambda: f"{text!r} to be printed; so far: {self.text!r}")

    def reply(self) -> dict[str, Any]:
        """Wait for its end: ``status``, and of an error ``ename`` and ``evalue``."""
        self.kernel.wait(lambda: self.identity in self.kernel.replies, "the reply of a cell")
        return self.kernel.replies[self.identity]

    def output(self) -> str:
        """What it printed, once it has ended without an error."""
        reply = self.reply()
        assert reply["status"] == "ok", "\n".join([self.text, *reply.get("traceback", [])])

        def is_idle() -> bool:
            states = self.kernel.published(self.identity, "status")
            return bool(states) and states[-1]["content"]["execution_state"] == "idle"

        self.kernel.wait(is_idle, "the cell's last output")
        return self.text


class Kernel:
    """A kernel in a process of its own, and what came from it."""

    def __init__(self, client: Any, manager: Any) -> None:
        self.client, self.manager = client, manager
        self.messages: list[dict[str, Any]] = []
        """Everything published, in order."""
        self.replies: dict[str, dict[str, Any]] = {}

    def start(self, code: str, subshell: str | None = None) -> Cell:
        """Send a cell; a later one of the same (sub)shell waits for it."""
        content = {"code": code, "silent": False, "stop_on_error": False}
        return Cell(self, self._send("execute_request", content, subshell))

    def run(self, code: str) -> str:
        """What a cell prints. Raises AssertionError with the traceback of one that fails."""
        return self.start(code).output()

    def click(self, comm_id: str, data: Any = None, subshell: str | None = None) -> str:
        """Send a message to a comm, as a widget in a page does; returns the message's id."""
        return self._send("comm_msg", {"comm_id": comm_id, "data": data or {}}, subshell)

    def new_subshell(self) -> str:
        """Open another thread that runs cells; returns its id."""
        session = self.client.session
        self.client.control_channel.send(session.msg("create_subshell_request"))
        return self.client.get_control_msg(timeout=PATIENCE)["content"]["subshell_id"]

    def _send(self, kind: str, content: dict[str, Any], subshell: str | None) -> str:
        message = self.client.session.msg(kind, content)
        if subshell is not None:
            message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def interrupt(self) -> None:
        """Press ■."""
        self.manager.interrupt_kernel()

    def published(self, identity: str, kind: str) -> list[dict[str, Any]]:
        """What was published of this kind on behalf of the message with this id."""
        found = (m for m in self.messages if m["parent_header"].get("msg_id") == identity)
        return [message for message in found if message["msg_type"] == kind]

    def wait(self, is_reached: Callable[[], bool], what: str | Callable[[], str]) -> None:
        until = time.monotonic() + PATIENCE
        while not is_reached():
            assert time.monotonic() < until, f"waited in vain for {what() if callable(what) else what}"
            with suppress(queue.Empty):
                self.messages.append(self.client.get_iopub_msg(timeout=0.02))
            with suppress(queue.Empty):
                reply = self.client.get_shell_msg(timeout=0)
                self.replies[reply["parent_header"]["msg_id"]] = reply["content"]


@contextmanager
def running_kernel(folder: Path, python: Path | str = sys.executable, **environment: str) -> Iterator[Kernel]:
    """Start a kernel in ``folder`` that can import this checkout, with these variables of a front end."""
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import KernelManager

    manager = KernelManager()
    command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=[*command, "--HistoryManager.enabled=False"], language="python")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_FRONT_END)}
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "environments")])
    manager.start_kernel(cwd=str(folder), env=inherited | {"PYTHONPATH": paths} | environment)
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=PATIENCE)
        yield Kernel(client, manager)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
