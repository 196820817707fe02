"""Where are we, and how is something shown that keeps changing?

The only file that asks whether this is a notebook. A live view is one display with one id, updated
in place and finished with plain HTML: it needs no widget, so it stays readable in a saved notebook.
"""

from __future__ import annotations

import base64
import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from artnb.errors import ConfigurationError
from artnb.places import host
from artnb.ui.html import progress_html, visible
from artnb.ui.snapshot import seconds_text

Mode = Literal["live", "html", "text", "none"]

_NOTEBOOK_INTERVAL, _TERMINAL_INTERVAL, _LOG_INTERVAL = 0.5, 0.2, 15.0
"""Seconds between two drawings, at least: VS Code flickers when HTML comes more often."""


def detect() -> Mode:
    """``live`` where widgets may be used, ``html`` in other kernels, ``text`` elsewhere.

    A kernel counts as batch work, without widgets, until its environment proves that somebody sits before
    it. The variable ARTNB_UI overrides: ``live``, ``html``, ``text`` or ``none``.

    >>> detect() in ("live", "html", "text", "none")
    True
    """
    override: Any = os.environ.get("ARTNB_UI")
    if override:
        if override not in get_args(Mode):
            raise ConfigurationError(f"ARTNB_UI must be live, html, text or none; got {override!r}")
        return override
    if kernel() is None:
        return "text"
    return "live" if _is_interactive() else "html"


def _is_interactive() -> bool:
    if _is_started_by_a_cell():
        return False
    if (kind := os.environ.get("KAGGLE_KERNEL_RUN_TYPE")) is not None:
        return kind == "Interactive"  # whatever Colab's image, which Kaggle's is made from, may say
    has_session = "JPY_SESSION_NAME" in os.environ  # JupyterLab and Notebook 7 set it, papermill does not
    is_colab = any(name.startswith("COLAB_") for name in os.environ)
    is_vscode = "VSCODE_PID" in os.environ or "__vsc_ipynb_file__" in _shell().user_ns
    return has_session or is_colab or is_vscode


def _is_started_by_a_cell() -> bool:
    """A cell's ``!papermill`` hands on the front end's variables, and its own kernel's JPY_PARENT_PID."""
    try:
        environment = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:  # not Linux, or not ours to read
        return False
    return any(line.startswith(b"JPY_PARENT_PID=") for line in environment.split(b"\0"))


def _shell() -> Any:
    ipython = sys.modules.get("IPython")  # a kernel has imported it already
    return ipython.get_ipython() if ipython is not None else None


def kernel() -> Any:
    """The Jupyter kernel that this process is, or None."""
    return getattr(_shell(), "kernel", None)


def front_end() -> str:
    """The program that shows this process's output, as far as its environment tells.

    >>> isinstance(front_end(), str)
    True
    """
    place = host()
    if kernel() is not None:
        local = {"VSCODE_PID": "VS Code", "JPY_SESSION_NAME": "JupyterLab or Notebook"}
        found = (name for sign, name in local.items() if sign in os.environ)
        return place or next(found, "papermill, nbclient or other")
    return f"a shell on {place}" if place else "a terminal" if sys.stdout.isatty() else "a plain process"


_free_places: dict[tuple[int | None, str], Any] = {}
"""Finished views of the present cell: (number of its execution, title) -> handle."""


def cell_number() -> int | None:
    """The number of the cell that is running, None outside of IPython."""
    return getattr(_shell(), "execution_count", None)


def show(html: str, text: str) -> None:
    """Show a finished view once."""
    Live(keep_text=True).finish(html, text)


def cell_id() -> str | None:
    """The front end's own name of the cell that is running, which stays when it is run again."""
    try:
        parent = kernel().get_parent("shell")
        return (parent.get("metadata") or {}).get("cellId")
    except AttributeError:  # no kernel, or one that does not tell
        return None


def after_each_cell(call: Callable[[BaseException | None], object]) -> Callable[[], None]:
    """Call this at the end of every cell with the error it ended with; returns what takes it back."""
    shell = _shell()
    if shell is None:
        return lambda: None

    def hear(result: Any = None) -> None:
        call(getattr(result, "error_before_exec", None) or getattr(result, "error_in_exec", None))

    shell.events.register("post_run_cell", hear)

    def forget() -> None:
        with contextlib.suppress(ValueError):  # forgotten already
            shell.events.unregister("post_run_cell", hear)

    return forget


def show_widget(widget: Any) -> None:
    """Show an ipywidget below the present cell."""
    from IPython.display import display

    display(widget)


def log(line: str) -> None:
    """Print a line in a kernel that runs as a batch: its log has no place for tables that change."""
    if detect() == "html":
        print(line, flush=True)


class Live:
    """One place on the screen whose content changes.

    keep_text: in a terminal, print only the finished text, over several lines if need be;
    otherwise the text is one line that is redrawn in place.
    one_a_cell: take the place of a finished view of the same title in the same cell, so that a loop
    leaves one line and not one a round.
    """

    def __init__(
        self, title: str = "", *, enabled: bool = True, keep_text: bool = False, one_a_cell: bool = False
    ) -> None:
        self.title = title
        mode: Mode = detect() if enabled else "none"
        self.mode: Mode = "html" if mode == "live" else mode  # this view is no widget
        self._keep_text = keep_text
        self._one_a_cell = one_a_cell
        self._handle: Any = None
        self._last = float("-inf")
        self._width = 0
        self._is_tty = bool(getattr(sys.stderr, "isatty", lambda: False)())

    @property
    def is_due(self) -> bool:
        """False while an update would come too soon after the last one; it saves building it."""
        if self.mode == "none":
            return False
        return time.monotonic() - self._last >= self._interval

    @property
    def _interval(self) -> float:
        if self.mode == "html":
            return _NOTEBOOK_INTERVAL
        return _TERMINAL_INTERVAL if self._is_tty else _LOG_INTERVAL

    def update(self, html: str, text: str) -> None:
        """Show this now, or drop it when the last update was a moment ago."""
        if self.is_due:
            self._draw(html, text, final=False)

    def finish(self, html: str, text: str) -> None:
        """Show this and leave it there."""
        if self.mode != "none":
            self._draw(html, text, final=True)

    def _draw(self, html: str, text: str, *, final: bool) -> None:
        text = visible(text)
        if self.mode == "html":
            self._draw_html(html, text, final=final)
        elif self._keep_text:
            if final:
                print(text, flush=True)
        else:
            self._draw_line(text, final=final)
        self._last = time.monotonic()

    def _draw_html(self, html: str, text: str, *, final: bool) -> None:
        from IPython.display import display

        bundle = {"text/html": html, "text/plain": text}
        place = (cell_number(), self.title)
        if self._handle is None and self._one_a_cell:
            self._handle = _free_places.pop(place, None)
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
        if final and self._one_a_cell and place[0] is not None:
            for other in [key for key in _free_places if key[0] != place[0]]:
                del _free_places[other]
            _free_places[place] = self._handle

    def _draw_line(self, text: str, *, final: bool) -> None:
        line = " ".join(text.split())
        if self._is_tty:
            sys.stderr.write("\r" + line.ljust(self._width) + ("\n" if final else ""))
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()
        self._width = len(line)


class Slot:
    """An empty place below a cell, into which a widget may be put later, from elsewhere."""

    def __init__(self) -> None:
        from IPython.display import display

        self._nothing = {"text/html": "", "text/plain": ""}
        self._handle: Any = display(self._nothing, raw=True, display_id=True)

    def put(self, widget: Any) -> None:
        """Show this widget here; None empties the place."""
        if widget is None:
            self._handle.update(self._nothing, raw=True)
        else:
            self._handle.update(widget)


class Picture:
    """A PNG in a display of its own, for pages that drop the drawings of HTML (GitHub); not in a terminal."""

    def __init__(self) -> None:
        self._is_shown = detect() in ("live", "html")
        self._handle: Any = None

    def draw(self, png: bytes, text: str) -> None:
        """Show this image, or put it in the place of the one before; ``text`` stands for it elsewhere."""
        if not self._is_shown:
            return
        from IPython.display import display

        bundle = {"image/png": base64.b64encode(png).decode("ascii"), "text/plain": text}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


class Progress:
    """The progress of many rollouts on one line: done, failed, mean reward, tokens/s, time left.

    >>> with Progress(2, "gather", enabled=False) as progress:
    ...     progress.update(1, failed=0, mean_reward=0.5, tokens=20)
    """

    def __init__(self, total: int, title: str = "", enabled: bool = True) -> None:
        self.total = total
        self.title = title
        self.live = Live(title, enabled=enabled, one_a_cell=True)
        self._started = time.monotonic()
        self._state: dict[str, Any] = {"done": 0, "failed": 0, "mean_reward": None, "tokens": 0}

    def update(self, done: int, failed: int = 0, mean_reward: float | None = None, tokens: int = 0) -> None:
        """``done`` counts finished rollouts, the failed ones included; all figures are totals."""
        self._state = {"done": done, "failed": failed, "mean_reward": mean_reward, "tokens": tokens}
        if self.live.is_due:
            self.live.update(self._html(), self._text())

    def finish(self, note: str = "") -> None:
        """Draw the last state and leave it on the screen; ``note`` says why it ended early."""
        self.live.finish(self._html(note), self._text(note))

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(f"stopped by {kind.__name__}" if kind else "")

    def _facts(self, note: str) -> list[str]:
        done, seconds = self._state["done"], time.monotonic() - self._started
        facts = [f"{done}/{self.total}"]
        if self._state["failed"]:
            facts.append(f"{self._state['failed']} failed")
        if self._state["mean_reward"] is not None:
            facts.append(f"mean reward {self._state['mean_reward']:.3f}")
        if self._state["tokens"] and seconds > 0:
            facts.append(f"{self._state['tokens'] / seconds:,.0f} tokens/s")
        facts.append(seconds_text(seconds))
        if 0 < done < self.total and not note:
            facts.append(f"{seconds_text(seconds / done * (self.total - done))} left")
        return [*facts, note] if note else facts

    def _html(self, note: str = "") -> str:
        share = self._state["done"] / self.total if self.total else 1.0
        return progress_html(self.title, share, self._facts(note))

    def _text(self, note: str = "") -> str:
        title = f"{self.title}: " if self.title else ""
        return title + ", ".join(self._facts(note))
