"""How is a screen of ours made into a widget? One anywidget whose module is a few files of ui/static."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Hashable
from importlib import resources
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from artnb.ui.display import cell_id, cell_number

PATIENCE_SECONDS = 5.0
"""How long the front end may take to say that it shows a widget."""


@functools.cache
def widget_class(name: str, scripts: tuple[str, ...], styles: tuple[str, ...]) -> type[Any]:
    """A widget of these files, concatenated: no network, no second file to load.

    ``name`` tells front ends whose styles are whose, so no two widgets share one.
    """
    import anywidget

    static = resources.files("artnb.ui") / "static"

    def text(names: tuple[str, ...]) -> str:
        return "\n".join((static / one).read_text(encoding="utf-8") for one in names)

    return type(name, (anywidget.AnyWidget,), {"_esm": text(scripts), "_css": text(styles)})


def make_widget(made_class: Callable[[], type[Any]], hear: Callable[..., None]) -> Any:
    """A widget whose messages go to ``hear``, in whichever thread; None where anywidget is not installed."""
    if importlib.util.find_spec("anywidget") is None:
        return None
    widget = made_class()()
    widget.on_msg(hear)
    return widget


class _Shown(NamedTuple):
    """A screen in a cell, which run of the cell showed it, and what lets it go."""

    screen: Any
    number: int | None
    leave: Callable[[], object]


_in_cells: dict[str, list[_Shown]] = {}
"""Screens by the front end's name of the cell."""
_latest: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
"""The screen that was shown last, by what it shows; one that nobody closes is not kept by this."""


def take_place(screen: Any, subject: Hashable, leave: Callable[[], object]) -> None:
    """Note that the present cell shows this screen, and let go what an earlier run of the cell showed.

    Output of a cell that is run again is cleared, and nobody tells the kernel: without this its widget, its
    task and all that it holds would stay. ``subject`` is what the screen shows: see ``is_replaced``.
    """
    _latest[subject] = screen
    cell, number = cell_id(), cell_number()
    if cell is None:
        return
    before, _in_cells[cell] = _in_cells.get(cell, []), []
    beside = [one for one in before if number is not None and one.number == number]
    _in_cells[cell] = [*beside, _Shown(screen, number, leave)]
    still = [one.screen for shown in _in_cells.values() for one in shown]
    for one in before:
        if not any(one.screen is other for other in still):
            one.leave()


def is_replaced(screen: Any, subject: Hashable) -> bool:
    """Whether the same is shown elsewhere by now: what nobody looks at may go then."""
    return _latest.get(subject, screen) is not screen


def leave_place(screen: Any, subject: Hashable) -> None:
    """Forget where this screen stood."""
    if not is_replaced(screen, subject):
        _latest.pop(subject, None)
    for cell, shown in list(_in_cells.items()):
        _in_cells[cell] = [one for one in shown if one.screen is not screen]
        if not _in_cells[cell]:
            del _in_cells[cell]
