"""How does a chat appear in a notebook? As one anywidget where the front end has it, and as plain HTML that
stays when kernel or widget are gone.

Messages from the page may arrive in any thread; everything that follows from them happens on the kernel's
event loop. What changed is sent at most four times a second.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artnb.dashboard.protocol import Stream
from artnb.errors import ArtnbError, Stopped
from artnb.ui.display import Live, cell_number, detect, show_widget
from artnb.ui.html import conversation_html, esc
from artnb.ui.live_widget import PATIENCE_SECONDS, leave_place, make_widget, take_place, widget_class
from artnb.ui.snapshot import number_text, shorten

if TYPE_CHECKING:
    from artnb.talk.talk import Talk

SEND_SECONDS = 0.25
LONGEST_MESSAGE = 100_000
"""Characters that a person may send at once."""

_log = logging.getLogger(__name__)
_HOW = 'Talk with: reply = await talk.say("..."), where talk is what artnb.chat returned.'
_UNANSWERED = (
    "This front end did not show the chat within 5 s (its anywidget extension may be missing). " + _HOW
)
_UNINSTALLED = (
    'The live chat needs anywidget: pip install "artnb[notebook]", then restart the kernel. ' + _HOW
)


class Screen:
    """The views of one Talk."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.widget: Any = None
        """The anywidget, once this has been shown where widgets are."""
        self._stream = Stream()
        self._views: set[str] = set()
        self._needs_everything = False
        self._answer = ""
        self._note = ""
        self._twin: Live | None = None
        self._twin_html = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sent = float("-inf")
        self._cell: int | None = None

    # ---- on the screen --------------------------------------------------------------------------

    def open(self) -> None:
        """Show the chat at once where somebody may use it; elsewhere it is shown when asked for."""
        if detect() == "live":
            self.show()

    def show(self) -> None:
        """Show it below the present cell, unless it is there already."""
        mode, cell = detect(), cell_number()
        if mode == "none" or (cell is not None and cell == self._cell):
            return
        self._cell = cell
        take_place(self, self._subject, self._leave)
        if mode == "text":
            print(repr(self.talk), flush=True)
            return
        if mode == "live":
            self._show_widget()
        self._twin, self._twin_html = Live("chat"), ""
        self._draw_twin()

    @property
    def _subject(self) -> tuple[str, Path]:
        return "chat", self.talk.model.run.path

    def _show_widget(self) -> None:
        self.widget = self.widget or make_widget(_widget_class, self._hear)
        if self.widget is None:
            self._note = _UNINSTALLED
            return
        self._loop = asyncio.get_running_loop()
        show_widget(self.widget)
        self._loop.call_later(PATIENCE_SECONDS, self._fall_back)

    def _fall_back(self) -> None:
        if self.widget is not None and not self._views:
            self._note = _UNANSWERED
            self._draw_twin()

    def html(self) -> str:
        """The conversation as plain HTML: what the environment began with is folded."""
        entries, talk = self.talk.conversation.entries(), self.talk
        opening = [entry for entry in entries if entry["is_opening"]]
        rest = [entry for entry in entries if not entry["is_opening"]]
        parts = [f"<div>{esc(self._note)}</div>"] if self._note else []
        parts.append(f"<div>{esc(self._facts())}</div>")
        if opening:
            what = f"{len(opening)} messages before: {talk.trajectory.scenario_id}"
            inner = conversation_html(opening)
            parts.append(f"<details><summary>{esc(what)}</summary>{inner}</details>")
        parts.append(conversation_html(rest) or f"<div>Nothing has been said yet. {esc(_HOW)}</div>")
        body = "".join(parts)
        if self.widget is not None and not self._note:
            return f"<details><summary><small>Static copy of the chat</small></summary>{body}</details>"
        return f"<div>{body}</div>"

    def _facts(self) -> str:
        talk = self.talk
        facts = [f"Chat with {talk.model.name}", f"policy {talk.policy}"]
        if talk.env is not None:
            facts.append(talk.env.name)
        if (reward := talk.trajectory.reward) is not None:
            facts.append(f"reward {number_text(reward)}")
        return ", ".join(facts)

    def _draw_twin(self) -> None:
        """Draw the static copy when there is something new to see in it."""
        if self._twin is None or (html := self.html()) == self._twin_html:
            return
        self._twin_html = html
        self._twin.finish(html, repr(self.talk))

    def close(self) -> None:
        """Take the widget away and leave the static copy."""
        self._leave()
        self._draw_twin()

    def _leave(self) -> None:
        """Take the widget away, and have nothing more drawn by itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.widget is not None:
            self.widget.close()
            self.widget = self._loop = None
        self._views.clear()
        self._cell = None
        leave_place(self, self._subject)

    # ---- to the page ----------------------------------------------------------------------------

    def changed(self) -> None:
        """Have what is new drawn soon; any thread may ask for it."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._plan)
        elif not self.talk.is_busy:
            self._draw_twin()

    def _plan(self) -> None:
        if self._timer is None and self._loop is not None:
            pause = max(0.0, self._sent + SEND_SECONDS - time.monotonic())
            self._timer = self._loop.call_later(pause, self._draw)

    def _draw(self) -> None:
        self._timer, self._sent = None, time.monotonic()
        if self.widget is not None and self._views:
            for message in self._messages():
                self.widget.send(message)
        if self.talk.is_busy:
            self._plan()  # tokens come from another thread, one by one
        else:
            self._draw_twin()

    def _messages(self) -> list[dict[str, Any]]:
        head, entries = self._head(), self.talk.conversation.entries()
        tables = {"entries": {str(index): entry for index, entry in enumerate(entries)}}
        if self._needs_everything:
            self._needs_everything = False
            return self._stream.everything(head, tables)
        return self._stream.changes(head, tables)

    def _head(self) -> dict[str, Any]:
        talk, own = self.talk, self.talk.model.sampling
        talk.look()
        options = {"temperature": own.temperature, "max_tokens": own.max_tokens} | talk.options()
        return {
            "facts": self._facts(),
            "status": talk.status,
            "pending": shorten(talk.pending),
            "can_go_on": talk.conversation.awaits_move,
            "policy": talk.policy,
            "policies": talk.policies,
            "temperature": options["temperature"],
            "max_tokens": options["max_tokens"],
            "scenarios": [one.id for one in talk.scenarios],
            "scenario": talk.scenario,
            "answer": self._answer,
            "taken_back": talk.taken_back,
        }

    # ---- from the page --------------------------------------------------------------------------

    def _hear(self, _: Any, content: Any, buffers: Any = None) -> None:
        """Take a message of the front end, in whichever thread, to the loop."""
        if isinstance(content, dict) and self._loop is not None:
            self._loop.call_soon_threadsafe(self._obey, content)

    def _obey(self, content: Mapping[str, Any]) -> None:
        kind, view = content.get("type"), str(content.get("view"))
        if kind == "gone":
            self._views.discard(view)
        elif kind in ("ready", "resync"):
            self._views.add(view)
            self._needs_everything, self._note = True, ""
        else:
            try:
                self._answer = self._do(kind, content)
            except ArtnbError as error:  # told to who clicked
                self._answer = str(error)
        self.changed()

    def _do(self, kind: Any, content: Mapping[str, Any]) -> str:
        """Do what a person asked for; returns what to tell them."""
        talk = self.talk
        if kind == "say":
            text = content.get("text")
            if isinstance(text, str) and len(text) > LONGEST_MESSAGE:
                return f"A message may have {LONGEST_MESSAGE:,} characters."
            talk.start(text if isinstance(text, str) and text.strip() else None).add_done_callback(
                self._ended
            )
        elif kind == "stop":
            talk.stop()
        elif kind == "reset":
            scenario = content.get("scenario")
            talk.reset(scenario if isinstance(scenario, int) else None)
        elif kind == "choose":
            names = ("policy", "temperature", "max_tokens")
            talk.choose(**{name: content[name] for name in names if name in content})
        return ""

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """Tell how an answer asked for by the page went wrong."""
        if task.cancelled():
            self._answer = "Stopped. What had been finished is kept."
        elif error := task.exception():
            self._answer = f"{type(error).__name__}: {error}"[:2000]
            if not isinstance(error, (ArtnbError, Stopped)):
                _log.error("a chat's answer failed", exc_info=error)
        self.changed()


_widget_class = functools.partial(
    widget_class, "TalkWidget", ("theme.js", "page.js", "talk.js"), ("talk.css",)
)
