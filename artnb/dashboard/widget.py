"""How does a run appear live in a notebook? One anywidget where the front end has it, else plain HTML.

A task on the kernel's event loop looks at the runs' folders up to four times a second and sends what
changed. What a person clicks comes back as messages, in whichever thread; a callback only writes an event
into the run's journal or sets a flag.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from artnb.dashboard.png import can_draw, views_png
from artnb.dashboard.protocol import Stream
from artnb.dashboard.twin import summary_text, twin_html
from artnb.dashboard.view import View
from artnb.errors import ArtnbError, ConfigurationError
from artnb.secrets import redact
from artnb.store import Run
from artnb.ui.display import Live, Mode, Picture, Slot, after_each_cell, detect, show_widget
from artnb.ui.html import visible
from artnb.ui.live_widget import (
    PATIENCE_SECONDS,
    is_replaced,
    leave_place,
    make_widget,
    take_place,
    widget_class,
)

LIVE_SECONDS = 0.25
SLOW_SECONDS = 2.0
"""Between looks at a run that nobody is writing, and at most between any two."""
MOST_SHARE = 0.01
"""Of a processor, for looking and sending: what costs more is done less often, down to SLOW_SECONDS."""
TWIN_SECONDS = 10.0
"""Between drawings of the static copy beside a live view; alone, it is drawn twice a second at most."""
ALONE_SECONDS = 0.5
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
_GOES_BACK = (
    "Asked for. The loop over run.steps() goes back after its present step; when none is running, the next "
    "one begins with it, and model.rollback(...) does it at once."
)


class Dashboard:
    """Runs on the screen: curves, alarms, groups, and buttons that steer the loop.

    run: a live ``model.run``, or ``Run.read(name)`` of one that is running elsewhere, has finished or has
    crashed, or a run's name under ``root``; or a list of these to compare. Everything shown comes from their
    folders. baselines: rewards to draw as dashed lines, numbers or Evaluations; those in ``result.json`` are
    drawn anyway. root: None for ``run_root()``.

    Make it the last line of a cell; several views of a run agree. Without a notebook it prints as text.
    Raises ConfigurationError for what is no run.
    """

    def __init__(
        self,
        run: Any,
        *,
        baselines: Mapping[str, Any] | None = None,
        root: str | Path | None = None,
    ) -> None:
        runs = list(run) if isinstance(run, list | tuple) else [run]
        if not runs:
            raise ConfigurationError("a Dashboard shows at least one run")
        levels = {name: getattr(value, "mean_reward", value) for name, value in (baselines or {}).items()}
        given = {name: float(level) for name, level in levels.items() if level is not None}
        self.views = [View(_run(one, root), given) for one in runs]
        self.view = self.views[0]
        self.run = self.view.run
        self.widget: Any = None
        """The anywidget, once this has been shown where widgets are."""
        self._streams = [Stream() for _ in self.views]
        self._clients: set[str] = set()
        self._needs_everything = False
        self._details: dict[int, tuple[float, float]] = {}
        """Steps, first and last, that somebody zoomed in on, by run."""
        self._slot: Slot | None = None
        self._buttons: Any = None
        self._answers: list[str] = []
        self._twin: Live | None = None
        self._twin_state: tuple[Any, ...] = ()
        self._picture: Picture | None = None
        self._pictured: tuple[Any, ...] = ()
        self._twin_drawn = self._picture_drawn = self._shown = float("-inf")
        self._note = ""
        self._failure = ""
        self._seen: list[Any] = []
        self._is_replaced = False
        self._forget: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    # ---- on the screen --------------------------------------------------------------------------

    def _ipython_display_(self) -> None:
        mode = detect()
        take_place(self, self._runs, self._leave)
        self._is_replaced = False
        if mode == "live":
            self._look()  # the rest comes step by step
        else:
            self._look_at_everything()
        self._shown, self._seen = time.monotonic(), self._written()
        if mode == "live" and (widget := self._make_widget()) is not None:
            show_widget(widget)
            self._slot = Slot()
        self._show_twin(mode)
        self._forget()
        self._forget = after_each_cell(self._end_cell)
        if mode == "live":
            self._loop = asyncio.get_running_loop()
            self._start()
        for view in self.views if mode != "live" else ():
            told = getattr(view.run, "on_step", [])
            if self._draw_after_step not in told:
                told.append(self._draw_after_step)

    @property
    def _runs(self) -> tuple[str | Path, ...]:
        return ("dashboard", *(view.run.path for view in self.views))

    def _make_widget(self) -> Any:
        self.widget = self.widget or make_widget(_widget_class, self._hear)
        if self.widget is None:
            self._note = _UNINSTALLED
        return self.widget

    def _show_twin(self, mode: Mode) -> None:
        is_shown = mode != "none"
        self._twin = Live(f"dashboard {self.run.name}", keep_text=True) if is_shown else None
        self._picture = Picture() if is_shown and can_draw() else None
        self._twin_state = self._pictured = ()
        self._draw_twin()
        if not self._is_folded:
            self._draw_picture()

    @property
    def _is_folded(self) -> bool:
        """Whether the static copy stands folded below a live view."""
        return self.widget is not None and not self._note

    def _draw_twin(self) -> None:
        """Draw the static copy when there is something new to see in it."""
        state = *(view.head for view in self.views), self._note, self._failure, self._is_folded
        if self._twin is None or state == self._twin_state:
            return
        self._twin_state, self._twin_drawn = state, time.monotonic()
        has_picture = self._picture is not None and not self._is_folded and bool(self.view.rows)
        note = " ".join(filter(None, (self._note, self._failure)))
        html = twin_html(self.views, note, is_folded=self._is_folded, has_picture=has_picture)
        self._twin.finish(html, self._text())

    def _draw_picture(self) -> None:
        """Draw the curves as an image when they have grown."""
        state = tuple((len(view.rows), len(view.tables["checks"])) for view in self.views)
        if self._picture is None or state == self._pictured or not any(view.rows for view in self.views):
            return
        self._pictured, self._picture_drawn = state, time.monotonic()
        self._picture.draw(views_png(self.views), self._text())

    def _draw_after_step(self) -> None:
        """Where there are no background tasks: the loop draws after its steps, and its cell when it ends."""
        if time.monotonic() - self._twin_drawn < ALONE_SECONDS:
            return
        self._look()
        self._draw_twin()
        if time.monotonic() - self._picture_drawn >= TWIN_SECONDS:
            self._draw_picture()

    def _end_cell(self, error: BaseException | None) -> None:
        """Leave in the notebook what a cell made of the runs, also when it was stopped or failed."""
        self._look()
        if (written := self._written()) == self._seen:
            return  # this cell did nothing to them
        self._seen, self._failure = written, ""
        if error is not None:
            self._failure = redact(f"The last cell ended with {type(error).__name__}: {error}")[:300]
        self._draw_twin()
        self._draw_picture()

    def _written(self) -> list[Any]:
        return [view.head["written"] for view in self.views]

    def _text(self) -> str:
        alarms = [(view.head["name"], alarm) for view in self.views for alarm in view.head["alarms"]]
        names = len(self.views) > 1
        told = [f"⚠ {f'{name}: ' if names else ''}{a['kind']}: {a['text']}" for name, a in alarms]
        return visible("\n".join([*map(summary_text, self.views), *told]))

    def _look(self) -> bool:
        return any([view.look() for view in self.views])

    def _look_at_everything(self) -> None:
        for view in self.views:
            view.look_at_everything()

    def _repr_html_(self) -> str:
        self._look_at_everything()
        return twin_html(self.views)

    def __repr__(self) -> str:
        self._look_at_everything()
        return self._text()

    # ---- the task on the kernel's loop ----------------------------------------------------------

    def _start(self) -> None:
        if self._loop is not None and (self._task is None or self._task.done()):
            self._task = self._loop.create_task(self._keep_up())

    async def _keep_up(self) -> None:
        while not self._is_replaced:
            has_news, cost = await asyncio.to_thread(self._timed_look)
            started = time.thread_time()
            for message in self._news():
                self.widget.send(message)
                await asyncio.sleep(0)
            self._fall_back()
            is_running = any(view.head["status"] == "running" for view in self.views)
            self._draw_when_due(is_running)
            cost += time.thread_time() - started
            pause = min(SLOW_SECONDS, max(LIVE_SECONDS, cost / MOST_SHARE))
            until = time.monotonic() + (pause if has_news or is_running else SLOW_SECONDS)
            await asyncio.sleep(LIVE_SECONDS)
            while time.monotonic() < until and not self._is_asked:
                await asyncio.sleep(LIVE_SECONDS)
        self._leave()

    @property
    def _is_asked(self) -> bool:
        return bool(self._needs_everything or self._answers or self._details)

    def _timed_look(self) -> tuple[bool, float]:
        """Look; returns whether there is news, and the seconds of processor that it took."""
        started = time.thread_time()
        try:
            return self._look(), time.thread_time() - started
        except OSError as error:  # a mount that is gone for a while
            self._answers.append(f"the run cannot be read: {error}")
            return False, 0.0

    def _draw_when_due(self, is_running: bool) -> None:
        pause = TWIN_SECONDS if self._clients else ALONE_SECONDS
        if time.monotonic() - self._twin_drawn >= pause or not is_running:
            self._draw_twin()
        is_due = not self._is_folded and time.monotonic() - self._picture_drawn >= TWIN_SECONDS
        if is_due or not is_running:
            self._draw_picture()

    def _news(self) -> list[dict[str, Any]]:
        """What changed, for the clients; everything when one asked for it."""
        if self.widget is None or not self._clients:
            return []
        is_whole, self._needs_everything = self._needs_everything, False
        messages: list[dict[str, Any]] = []
        for run, (view, stream) in enumerate(zip(self.views, self._streams, strict=True)):
            with view.lock:
                new = view.take_new()
                if is_whole or new is None:
                    found = stream.everything(view.head, view.outline())
                else:
                    found = stream.news(view.head, new)
                if (asked := self._details.pop(run, None)) is not None:
                    found += stream.news(view.head, view.between(*asked))
            messages += [{**message, "run": run, "runs": len(self.views)} for message in found]
        answers, self._answers = self._answers, []
        return [*messages, *({"type": "answer", "text": text} for text in answers)]

    def _fall_back(self) -> None:
        if self.widget is None:
            return
        if self._clients:
            self._note = ""
        elif time.monotonic() - self._shown > PATIENCE_SECONDS and self._shown > 0:
            self._note = _UNANSWERED
        self._show_buttons(is_needed=bool(self._note))

    def _show_buttons(self, *, is_needed: bool) -> None:
        """Buttons of plain ipywidgets, which some front ends show that know no anywidget."""
        if self._slot is None or is_needed == (self._buttons is not None):
            return
        self._buttons = _plain_buttons(self._press) if is_needed else None
        self._slot.put(self._buttons)

    def _press(self, control: str) -> None:
        self._hear(None, {"type": "control", "control": control})

    def close(self) -> None:
        """Leave the static copy, end the task and the widget. The run goes on."""
        self._leave()
        self._look()
        self._draw_twin()
        self._draw_picture()

    def _leave(self) -> None:
        """End the task, the widget and every call from elsewhere."""
        if self._task is not None:
            self._task.cancel()
        self._loop = None
        self._forget()
        for view in self.views:
            if self._draw_after_step in getattr(view.run, "on_step", []):
                view.run.on_step.remove(self._draw_after_step)
        if self.widget is not None:
            self._show_buttons(is_needed=False)
            self.widget.close()
            self.widget = None
        leave_place(self, self._runs)

    # ---- what comes from the screen -------------------------------------------------------------

    def _hear(self, _: Any, content: Any, buffers: Any = None) -> None:
        """Take a message of the front end; may run in another thread, in the middle of anything."""
        if not isinstance(content, dict):
            return
        kind, client = content.get("type"), str(content.get("view"))
        if kind == "gone":
            self._clients.discard(client)
            # nobody looks any more, and the same runs are shown elsewhere: the cell was run again
            self._is_replaced = not self._clients and is_replaced(self, self._runs)
        elif kind in ("ready", "resync"):
            self._clients.add(client)
            self._needs_everything = True
        elif kind == "detail":
            first, last = content.get("first"), content.get("last")
            if isinstance(first, int | float) and isinstance(last, int | float):
                self._details[self._place_of(content)] = first, last
        elif kind in ("control", "note"):
            try:
                self._answers.append(self._do(content))
            except (ArtnbError, OSError) as error:  # shown to who clicked; the loop does not suffer from it
                self._answers.append(f"{type(error).__name__}: {error}")

    def _place_of(self, content: Mapping[str, Any]) -> int:
        place = content.get("run")
        return place if isinstance(place, int) and 0 <= place < len(self.views) else 0

    def _do(self, content: Mapping[str, Any]) -> str:
        """Write what a person asked for into the journal; returns what to tell them."""
        run = self.views[self._place_of(content)].run
        is_writer = hasattr(run, "ask")
        if content["type"] == "note":
            text = str(content.get("text") or "").strip()[:_LONGEST_NOTE]
            if not is_writer or not text:
                return _OTHERS if text else "A note needs some words."
            run.note(text)
            return "The note is in the run's journal."
        control = str(content.get("control"))
        if is_writer:
            run.ask(control, content.get("value"))
            return _GOES_BACK if control == "roll_back" else ""
        if control != "stop":
            return _OTHERS
        (run.path / "STOP").touch()
        return "The file STOP is in the run's folder: its loop ends after the step under way."


def _run(run: Any, root: str | Path | None) -> Any:
    """The run that a person means: a name finds the live one first, which hears more than stop."""
    if isinstance(run, str):
        return Run.live(run, root) or Run.read(run, root)
    if hasattr(run, "path") and hasattr(run, "metrics"):
        return run
    raise ConfigurationError(
        f"a Dashboard shows a run, got {type(run).__name__}: use Dashboard(model.run), a run's name, or a "
        "list of these"
    )


def _plain_buttons(press: Callable[[str], None]) -> Any:
    import ipywidgets

    words = {"stop": "Stop after this step", "pause": "Pause", "resume": "Go on"}
    buttons = []
    for control, description in words.items():
        button = ipywidgets.Button(description=description, layout=ipywidgets.Layout(width="auto"))
        button.on_click(lambda _, control=control: press(control))
        buttons.append(button)
    return ipywidgets.HBox(buttons)


_SCRIPTS = (
    *("uPlot.iife.min.js", "theme.js", "page.js"),
    *("chart.js", "strip.js", "controls.js", "dashboard.js"),
)
_widget_class = functools.partial(
    widget_class, "DashboardWidget", _SCRIPTS, ("uPlot.min.css", "dashboard.css")
)
