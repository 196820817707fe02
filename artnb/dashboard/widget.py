"""How does a run appear live in a notebook? One anywidget where the front end has it, else plain HTML.

A task on the kernel's event loop looks at the run's folder four times a second and sends what changed.
What a person clicks comes back as messages, in whichever thread; a callback only writes an event into the
run's journal or sets a flag.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import time
from collections.abc import Mapping
from importlib import resources
from typing import Any

from artnb.dashboard.protocol import Stream
from artnb.dashboard.twin import summary_text, twin_html
from artnb.dashboard.view import View
from artnb.errors import ArtnbError, ConfigurationError
from artnb.ui.display import Live, Mode, detect

LIVE_SECONDS = 0.25
IDLE_SECONDS = 2.0
"""Between looks at a run that nobody is writing."""
TWIN_SECONDS = 10.0
"""Between drawings of the static copy beside a live view; alone, it is drawn twice a second at most."""
ALONE_SECONDS = 0.5
PATIENCE_SECONDS = 5.0
"""How long the front end may take to say that it shows the widget."""
_LONGEST_NOTE = 2000

_UNANSWERED = (
    "This front end did not show the live dashboard within 5 s (its anywidget extension may be missing), so "
    "this static view stands in for it and is kept up to date. To end the loop after its step, use "
    'run.ask("stop") or create a file named STOP in the run\'s folder.'
)
_UNINSTALLED = (
    'This is the static view. The live dashboard needs anywidget: pip install "artnb[notebook]", then '
    "restart the kernel."
)
_OTHERS = "Another process writes this run, or none does: only stop reaches it, through the file STOP."


class Dashboard:
    """A run on the screen: curves, alarms, groups, and buttons that steer its loop.

    run: a live ``model.run``, or ``Run.read(name)`` of one that is running elsewhere, has finished or has
    crashed; everything shown comes from its folder. baselines: rewards to draw as dashed lines, numbers or
    Evaluations; those in ``result.json`` are drawn anyway.

    Make it the last line of a cell; several views of a run agree. Without a notebook it prints as text.
    """

    def __init__(self, run: Any, *, baselines: Mapping[str, Any] | None = None) -> None:
        if not hasattr(run, "path") or not hasattr(run, "metrics"):
            raise ConfigurationError(
                f"a Dashboard shows a run, got {type(run).__name__}: use Dashboard(model.run) or "
                "Dashboard(Run.read(name))"
            )
        levels = {name: getattr(value, "mean_reward", value) for name, value in (baselines or {}).items()}
        self.run = run
        self.view = View(run, {name: float(level) for name, level in levels.items() if level is not None})
        self.widget: Any = None
        """The anywidget, once this has been shown where widgets are."""
        self._stream = Stream()
        self._views: set[str] = set()
        self._needs_everything = False
        self._answers: list[str] = []
        self._twin: Live | None = None
        self._twin_state: tuple[Any, ...] = ()
        self._twin_drawn = self._shown = float("-inf")
        self._note = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    # ---- on the screen --------------------------------------------------------------------------

    def _ipython_display_(self) -> None:
        mode = detect()
        if mode == "live":
            self.view.look()  # the rest comes step by step
        else:
            self._look_at_everything()
        self._shown = time.monotonic()
        if mode == "live" and (widget := self._make_widget()) is not None:
            from IPython.display import display

            display(widget)
        self._show_twin(mode)
        if mode == "live":
            self._loop = asyncio.get_running_loop()
            self._start()
        elif self._draw_after_step not in getattr(self.run, "on_step", [self._draw_after_step]):
            self.run.on_step.append(self._draw_after_step)

    def _make_widget(self) -> Any:
        if importlib.util.find_spec("anywidget") is None:
            self._note = _UNINSTALLED
            return None
        if self.widget is None:
            self.widget = _widget_class()()
            self.widget.on_msg(self._hear)
        return self.widget

    def _show_twin(self, mode: Mode) -> None:
        self._twin = Live(f"dashboard {self.run.name}", keep_text=True) if mode != "none" else None
        self._twin_state = ()
        self._draw_twin()

    def _draw_twin(self) -> None:
        """Draw the static copy when there is something new to see in it."""
        is_folded = self.widget is not None and not self._note
        state = self.view.head, self._note, is_folded
        if self._twin is None or state == self._twin_state:
            return
        self._twin_state, self._twin_drawn = state, time.monotonic()
        self._twin.finish(twin_html(self.view, self._note, is_folded=is_folded), self._text())

    def _draw_after_step(self) -> None:
        """Where there are no background tasks: the loop itself draws after each of its steps."""
        self.view.look()
        self._draw_twin()

    def _text(self) -> str:
        alarms = [f"⚠ {alarm['kind']}: {alarm['text']}" for alarm in self.view.head["alarms"]]
        return "\n".join([summary_text(self.view), *alarms])

    def _look_at_everything(self) -> None:
        while self.view.look():
            pass

    def _repr_html_(self) -> str:
        self._look_at_everything()
        return twin_html(self.view)

    def __repr__(self) -> str:
        self._look_at_everything()
        return self._text()

    # ---- the task on the kernel's loop ----------------------------------------------------------

    def _start(self) -> None:
        if self._loop is not None and (self._task is None or self._task.done()):
            self._task = self._loop.create_task(self._keep_up())

    async def _keep_up(self) -> None:
        while True:
            has_news = await asyncio.to_thread(self.view.look)
            self._send_news()
            self._fall_back()
            pause = TWIN_SECONDS if self._views else ALONE_SECONDS
            if time.monotonic() - self._twin_drawn >= pause or self.view.head["status"] != "running":
                self._draw_twin()
            is_busy = has_news or self.view.head["status"] == "running"
            until = time.monotonic() + (LIVE_SECONDS if is_busy else IDLE_SECONDS)
            await asyncio.sleep(LIVE_SECONDS)
            while time.monotonic() < until and not self._needs_everything and not self._answers:
                await asyncio.sleep(LIVE_SECONDS)

    def _send_news(self) -> None:
        """Send what changed to the views, and everything to one that asked for it."""
        if self.widget is None or not self._views:
            return
        if self._needs_everything:
            self._needs_everything = False
            messages = self._stream.everything(self.view.head, self.view.tables)
        else:
            messages = self._stream.changes(self.view.head, self.view.tables)
        answers, self._answers = self._answers, []
        for message in [*messages, *({"type": "answer", "text": text} for text in answers)]:
            self.widget.send(message)

    def _fall_back(self) -> None:
        if self.widget is None:
            return
        if self._views:
            self._note = ""
        elif time.monotonic() - self._shown > PATIENCE_SECONDS and self._shown > 0:
            self._note = _UNANSWERED

    def close(self) -> None:
        """Leave the static copy, end the task and the widget. The run goes on."""
        if self._task is not None:
            self._task.cancel()
        self._loop = None
        if self._draw_after_step in getattr(self.run, "on_step", []):
            self.run.on_step.remove(self._draw_after_step)
        if self.widget is not None:
            self.widget.close()
            self.widget = None
        self._draw_twin()

    # ---- what comes from the screen -------------------------------------------------------------

    def _hear(self, _: Any, content: Any, buffers: Any = None) -> None:
        """Take a message of the front end; may run in another thread, in the middle of anything."""
        if not isinstance(content, dict):
            return
        kind, view = content.get("type"), str(content.get("view"))
        if kind == "gone":
            self._views.discard(view)
        elif kind in ("ready", "resync"):
            self._views.add(view)
            self._needs_everything = True
        elif kind in ("control", "note"):
            try:
                self._answers.append(self._do(content))
            except (ArtnbError, OSError) as error:  # shown to who clicked; the loop does not suffer from it
                self._answers.append(f"{type(error).__name__}: {error}")

    def _do(self, content: Mapping[str, Any]) -> str:
        """Write what a person asked for into the journal; returns what to tell them."""
        is_writer = hasattr(self.run, "ask")
        if content["type"] == "note":
            text = str(content.get("text") or "").strip()[:_LONGEST_NOTE]
            if not is_writer or not text:
                return _OTHERS if text else "A note needs some words."
            self.run.note(text)
            return "The note is in the run's journal."
        control = str(content.get("control"))
        if is_writer:
            self.run.ask(control, content.get("value"))
            return ""
        if control != "stop":
            return _OTHERS
        (self.run.path / "STOP").touch()
        return "The file STOP is in the run's folder: its loop ends after the step under way."


_SCRIPTS = ("uPlot.iife.min.js", "chart.js", "strip.js", "dashboard.js")
"""Concatenated into the widget's one module: no network, no second file to load."""


@functools.cache
def _widget_class() -> type[Any]:
    import anywidget

    static = resources.files("artnb.ui") / "static"

    def text(name: str) -> str:
        return (static / name).read_text(encoding="utf-8")

    class DashboardWidget(anywidget.AnyWidget):
        _esm = "\n".join(map(text, _SCRIPTS))
        _css = text("uPlot.min.css") + text("dashboard.css")

    return DashboardWidget
