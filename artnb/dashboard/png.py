"""How does a run look as an image, for places that keep no HTML? Drawn by matplotlib, where there is one."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from typing import Any

from artnb.dashboard.panels import Panel, panels
from artnb.dashboard.view import View
from artnb.errors import require
from artnb.ui.curve import COLOURS

_SMALL = ("entropy", "kl", "gradient")
_DASHES: tuple[Any, ...] = (
    "-",
    (0, (6, 3)),
    (0, (1.5, 2)),
    (0, (8, 2, 2, 2)),
    (0, (10, 4)),
    (0, (3, 2, 1, 2)),
)
_LONGEST = 40


def run_png(
    run: Any, metrics: Sequence[str] | None = None, *, width: int = 900, height: int | None = None
) -> bytes:
    """A run's curves as a PNG of ``width`` by ``height`` pixels.

    metrics: ids of charts such as "reward" or "entropy", or names of metrics; None for the reward with a few
    small charts below. Raises MissingDependency without matplotlib, ConfigurationError for unknown names.
    """
    require("matplotlib", extra="figures", why="to draw a PNG")
    view = View(run)
    view.look_at_everything()
    return views_png([view], metrics, width=width, height=height)


def can_draw() -> bool:
    """True where matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def views_png(
    views: Sequence[View],
    metrics: Sequence[str] | None = None,
    *,
    width: int = 760,
    height: int | None = None,
) -> bytes:
    """The same for views that have been looked at; several runs share the axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if metrics is None:
        there = {spec["id"] for view in views for spec in view.head.get("charts", [])}
        metrics = ["reward", *(name for name in _SMALL if name in there)]
    shown = panels(views, metrics)
    large, small = shown[:1], shown[1:]
    size = (width / 100, (height or (300 + 170 * -(-len(small) // 3))) / 100)
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    grid = figure.add_gridspec(1 + -(-len(small) // 3), 3, height_ratios=[1.6] + [1] * -(-len(small) // 3))
    for panel in large:
        _draw(figure.add_subplot(grid[0, :]), panel, is_large=True)
    for place, panel in enumerate(small):
        _draw(figure.add_subplot(grid[1 + place // 3, place % 3]), panel, is_large=False)
    if not shown:
        _words(figure.suptitle("No finished step yet"))
    written = io.BytesIO()
    FigureCanvasAgg(figure).print_png(written, pil_kwargs={"optimize": True})
    return written.getvalue()


def _draw(axes: Any, panel: Panel, *, is_large: bool) -> None:
    for xs, low, high, run in panel.bands:
        axes.fill_between(xs, low, high, color=_colour(run), alpha=0.15, linewidth=0)
    for curve in panel.curves:
        # what shows at most three points a pixel shows all there is to see
        keep = max(1, len(curve.xs) // 3000)
        label, look = _short(curve.label), _DASHES[curve.mark % len(_DASHES)]
        style = {"color": _colour(curve.mark), "linestyle": look, "linewidth": 1.6}
        axes.plot(curve.xs[::keep], curve.ys[::keep], label=label, **style)
    for index, (name, level) in enumerate(panel.levels.items()):
        look = _DASHES[1 + index % (len(_DASHES) - 1)]
        axes.axhline(level, color="0.45", linestyle=look, linewidth=1, label=_short(name))
    for check, run in panel.checks:
        colour = _colour(run) if panel.is_compared else COLOURS[3]
        span = [check["mean"]] * 2 if check["low"] is None else [check["low"], check["high"]]
        axes.plot([check["step"]] * 2, span, color=colour, linewidth=1.5)
        face = "white" if check["is_base"] else colour
        axes.plot([check["step"]], [check["mean"]], "D", color=colour, markerfacecolor=face, markersize=5)
    _words(axes.set_title(panel.title, fontsize=10 if is_large else 9, loc="left"))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params(axis="x", integer=True)
    if is_large or len(panel.curves) > 1:
        for text in axes.legend(fontsize=8 if is_large else 7, frameon=False).get_texts():
            _words(text)


def _words(text: Any) -> None:
    """A dollar sign in somebody's name starts no formula."""
    text.set_parse_math(False)


def _short(name: str) -> str:
    shown = "".join(c if c.isprintable() else "?" for c in name)
    # matplotlib leaves names with a leading underscore out of its legend
    shown = f" {shown}" if shown.startswith("_") else shown
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
