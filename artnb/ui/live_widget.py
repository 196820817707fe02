"""How is a screen of ours made into a widget? One anywidget whose module is a few files of ui/static."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from importlib import resources
from typing import Any

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
