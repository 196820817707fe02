"""How does a person look through trajectories? In one anywidget, with a plain copy that stays without it.

The page asks and worker threads answer (``answers``); a task on the kernel's event loop sends the answers,
looks twice a second whether the run grew, and keeps the plain copy up to date.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from artnb.browser.answers import Answers
from artnb.browser.source import source_of
from artnb.browser.static_view import browser_html, browser_text
from artnb.errors import ArtnbError
from artnb.ui.display import Live, after_each_cell, detect, show_widget
from artnb.ui.live_widget import (
    PATIENCE_SECONDS,
    is_replaced,
    leave_place,
    make_widget,
    take_place,
    widget_class,
)

LOOK_SECONDS = 0.5
"""Between looks at a run that may grow."""
IDLE_SECONDS = 2.0
TWIN_SECONDS = 10.0
"""Between drawings of the static copy."""
_PAUSE = 0.005
"""Seconds between messages: a server drops what comes faster than a thousand a second."""

_UNANSWERED = (
    "This front end did not show the trajectory browser within 5 s (its anywidget extension may be missing), "
    "so this static view stands in for it: the best and the worst. run.trajectories() gives all of them."
)
_UNINSTALLED = (
    "This is the static view: the best and the worst. The browser needs anywidget: pip install "
    '"artnb[notebook]", then restart the kernel.'
)


def browse(what: Any, *, model: Any = None, environment: Any = None) -> Browser:
    """Look through trajectories: filter, sort, read, compare, see every token. Make it a cell's last line.

    what: ``model.run``, ``Run.read(name)`` of a run that is going on, has ended or has crashed, its name or
    the path of its folder, a Model, or what ``gather`` returned. model: the current policy, for replays
    from a turn and for texts of tokens. environment: what draws the trajectories, if not the installed one
    that their scenarios name.

    A run is read from its folder piece by piece, so that 100,000 trajectories open at once. Raises
    ConfigurationError for anything else.
    """
    return Browser(what, model=model, environment=environment)


class Browser:
    """Trajectories on the screen; see ``browse``. Without a notebook it prints as text."""

    def __init__(self, what: Any, *, model: Any = None, environment: Any = None) -> None:
        self.source = source_of(what, model=model, environment=environment)
        self.widget: Any = None
        """The anywidget, once this has been shown where widgets are."""
        self._outbox: deque[dict[str, Any]] = deque()
        self._answers = Answers(self.source, self._put)
        self._views: set[str] = set()
        self._twin: Live | None = None
        self._twin_state: tuple[Any, ...] = ()
        self._twin_drawn = self._looked = self._shown = float("-inf")
        self._note = ""
        self._changes = 0
        self._is_replaced = False
        self._forget: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None

    # ---- on the screen --------------------------------------------------------------------------

    def _ipython_display_(self) -> None:
        mode = detect()
        take_place(self, self._subject, self._leave)
        self._shown, self._is_replaced = time.monotonic(), False
        if mode == "live" and (widget := self._make_widget()) is not None:
            show_widget(widget)
        self._twin, self._twin_state = (Live(keep_text=True) if mode != "none" else None), ()
        if mode != "live":
            self._read_whole()
        self._draw_twin()
        if mode == "live":
            self._loop = self._answers.loop = asyncio.get_running_loop()
            self._start()
            self._forget()
            self._forget = after_each_cell(self._end_cell)

    @property
    def _subject(self) -> tuple[str, Path | int]:
        run = self.source.shelf.run
        return "browser", id(self.source.shelf) if run is None else run.path

    def _make_widget(self) -> Any:
        self.widget = self.widget or make_widget(_widget_class, self._hear)
        if self.widget is None:
            self._note = _UNINSTALLED
        return self.widget

    def _draw_twin(self) -> None:
        """Draw the static copy when there is something new to see in it."""
        if (drawing := self._drawing()) is not None:
            self._put_twin(*drawing)

    def _drawing(self) -> tuple[str, str] | None:
        """The static copy as HTML and as text, None while the last one still holds."""
        state = self._changes, self._note
        if self._twin is None or state == self._twin_state:
            return None
        self._twin_state = state
        is_folded = self.widget is not None and not self._note
        return browser_html(self.source, note=self._note, is_folded=is_folded), browser_text(self.source)

    def _put_twin(self, html: str, text: str) -> None:
        assert self._twin is not None
        self._twin_drawn = time.monotonic()
        self._twin.finish(html, text)

    def _read_whole(self) -> None:
        self.source.refresh()
        while self.source.facts()["indexing"] is not None:
            self.source.refresh()

    def _repr_html_(self) -> str:
        self._read_whole()
        return browser_html(self.source)

    def __repr__(self) -> str:
        self._read_whole()
        return browser_text(self.source)

    # ---- the task on the kernel's loop ----------------------------------------------------------

    def _start(self) -> None:
        if self._loop is not None and (self._task is None or self._task.done()):
            self._wake = asyncio.Event()
            self._task = self._loop.create_task(self._keep_up())

    async def _keep_up(self) -> None:
        is_growing = True
        while not self._is_replaced:
            if time.monotonic() - self._looked >= (LOOK_SECONDS if is_growing else IDLE_SECONDS):
                self._looked = time.monotonic()
                is_growing = await self._look()
            await self._send_all()
            await self._wait(LOOK_SECONDS)
        self._leave()

    async def _look(self) -> bool:
        """Notice what is new in the run; returns whether more may come soon."""
        try:
            grew = await asyncio.to_thread(self.source.refresh)
        except (ArtnbError, OSError) as error:  # the folder is gone, or its disk is: say so and look again
            self._outbox.append({"type": "trouble", "text": f"{type(error).__name__}: {error}"})
            return False
        self._changes += grew
        facts = await asyncio.to_thread(self.source.facts)
        if grew and self._views:
            self._outbox.append({"type": "grown", "facts": facts})
        self._fall_back()
        is_due = time.monotonic() - self._twin_drawn >= (TWIN_SECONDS if self._views else IDLE_SECONDS)
        if is_due and (drawing := await asyncio.to_thread(self._drawing)) is not None:
            self._put_twin(*drawing)
        return bool(facts["is_growing"] or facts["indexing"] is not None)

    async def _wait(self, seconds: float) -> None:
        assert self._wake is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)
        self._wake.clear()

    async def _send_all(self) -> None:
        while self._outbox and self.widget is not None:
            self.widget.send(self._outbox.popleft())
            await asyncio.sleep(_PAUSE if self._outbox else 0)

    def _put(self, messages: list[dict[str, Any]]) -> None:
        """Have the loop send these; any thread may ask for it."""
        self._outbox.extend(messages)
        if self._loop is not None and self._wake is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: there is nobody to tell
                self._loop.call_soon_threadsafe(self._wake.set)

    def _end_cell(self, _: BaseException | None) -> None:
        """Have the static copy drawn at once: what a cell left is what a saved notebook shows."""
        self._twin_drawn = self._looked = float("-inf")
        if self._wake is not None:
            self._wake.set()

    def _fall_back(self) -> None:
        if self.widget is None:
            return
        if self._views:
            self._note = ""
        elif time.monotonic() - self._shown > PATIENCE_SECONDS and self._shown > 0:
            self._note = _UNANSWERED

    def close(self) -> None:
        """Leave the static copy, end the task and the widget. The run goes on."""
        self._leave()
        self._draw_twin()

    def _leave(self) -> None:
        """End the task, the widget and the threads that answer."""
        if self._task is not None:
            self._task.cancel()
        self._loop = self._wake = None
        self._forget()
        self._answers.close()
        self._outbox.clear()
        if self.widget is not None:
            self.widget.close()
            self.widget = None
        leave_place(self, self._subject)

    # ---- what comes from the screen -------------------------------------------------------------

    def _hear(self, _: Any, content: Any, buffers: Any = None) -> None:
        """Take a message of the front end; may run in another thread, in the middle of anything."""
        if not isinstance(content, dict):
            return
        kind, view = content.get("type"), str(content.get("view"))
        if kind == "gone":
            self._views.discard(view)
            # nobody looks any more, and the same is shown elsewhere: the cell was run again
            self._is_replaced = not self._views and is_replaced(self, self._subject)
        elif kind in ("ready", "resync"):
            self._views.add(view)
        elif kind == "ask":
            self._answers.ask(content)


_SCRIPTS = (
    *("theme.js", "browser_parts.js", "browser_table.js", "browser_chat.js", "browser_tokens.js"),
    *("browser_compare.js", "browser_trajectory.js", "browser.js"),
)
_widget_class = functools.partial(widget_class, "BrowserWidget", _SCRIPTS, ("browser.css",))
