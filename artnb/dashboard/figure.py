"""How does a run look in plotly, for a person who wants to work on with the drawing? Plotly 5.24 to 7."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from artnb.dashboard.panels import Panel, panels
from artnb.dashboard.view import View
from artnb.errors import ConfigurationError, require
from artnb.ui.curve import COLOURS
from artnb.ui.display import detect

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def figure(
    run: Any,
    metrics: Sequence[str] | None = None,
    *,
    others: Sequence[Any] = (),
    columns: int = 2,
    height: int | None = None,
) -> Any:
    """A run's curves as a ``plotly.graph_objects.Figure``, the reward on top.

    metrics: ids of charts such as "reward" or "time", or names of metrics; None for every chart. others:
    runs to compare with, in the same axes. height: pixels; None suits the number of charts. Raises
    MissingDependency without plotly, ConfigurationError for unknown names.
    """
    require("plotly", extra="figures", why="to draw a figure")
    from plotly.subplots import make_subplots

    views = [View(one) for one in (run, *others)]
    for view in views:
        view.look_at_everything()
    shown = panels(views, metrics)
    large = [panel for panel in shown[:1] if panel.levels or panel.bands or panel.checks or len(shown) == 1]
    small = shown[len(large) :]
    rows = len(large) + -(-len(small) // columns)
    places = [(1, 1)] * len(large)
    places += [(1 + len(large) + i // columns, 1 + i % columns) for i in range(len(small))]
    specs: list[list[Any]] = [[{"colspan": columns}, *[None] * (columns - 1)]] if large else []
    specs += [[{} for _ in range(columns)] for _ in range(rows - len(large))]
    drawn = make_subplots(
        rows=max(1, rows),
        cols=columns,
        specs=specs or None,
        subplot_titles=[_text(panel.title) for panel in shown],
        vertical_spacing=min(0.12, 0.3 / max(1, rows)),
    )
    for number, (panel, (row, column)) in enumerate(zip(shown, places, strict=True)):
        _draw(drawn, panel, row, column, f"panel {number}")
    drawn.update_xaxes(title_text="step", rangemode="nonnegative")
    title = ", ".join(view.head["name"] for view in views)
    layout = {"hovermode": "x unified", "legend": {"tracegroupgap": 12}, "template": "plotly_white"}
    drawn.update_layout(title=_text(title), height=height or 120 + 260 * max(1, rows), **layout)
    return drawn


def figure_widget(run: Any, metrics: Sequence[str] | None = None, **options: Any) -> Any:
    """The figure as a ``FigureWidget``, which does not follow the run. Raises ConfigurationError in batch."""
    if detect() != "live":
        raise ConfigurationError(
            "a FigureWidget puts 5 MB into the saved notebook and needs a person before it: in batch take "
            "run.figure() or run.png(). ARTNB_UI=live overrides this."
        )
    require("anywidget", extra="notebook", why="for a FigureWidget")
    import plotly.graph_objects as go

    return go.FigureWidget(figure(run, metrics, **options))


def _draw(drawn: Any, panel: Panel, row: int, column: int, group: str) -> None:
    import plotly.graph_objects as go

    for xs, low, high, run in panel.bands:
        edge = {"line": {"width": 0}, "hoverinfo": "skip", "showlegend": False, "mode": "lines"}
        fill = {"fill": "tonexty", "fillcolor": _faint(run)}
        drawn.add_trace(go.Scatter(x=xs, y=high, **edge), row=row, col=column)
        drawn.add_trace(go.Scatter(x=xs, y=low, **edge | fill), row=row, col=column)
    for curve in panel.curves:
        line = {"color": COLOURS[curve.mark % len(COLOURS)], "dash": _DASHES[curve.mark % len(_DASHES)]}
        about = {"name": _text(curve.label), "legendgroup": group, "mode": "lines", "line": line}
        if panel.is_stacked:
            about["stackgroup"] = group
        drawn.add_trace(go.Scatter(x=curve.xs, y=curve.ys, **about), row=row, col=column)
    for index, (name, level) in enumerate(panel.levels.items()):
        look = {"line_dash": _DASHES[1 + index % (len(_DASHES) - 1)], "line_color": "#777777"}
        drawn.add_hline(y=level, annotation_text=_text(name), row=row, col=column, **look)
    for run in sorted({run for _, run in panel.checks}):
        checks = [check for check, own in panel.checks if own == run]
        upper = [0 if c["high"] is None else c["high"] - c["mean"] for c in checks]
        lower = [0 if c["low"] is None else c["mean"] - c["low"] for c in checks]
        colour = COLOURS[run % len(COLOURS)] if panel.is_compared else COLOURS[3]
        signs = ["diamond-open" if c["is_base"] else "diamond" for c in checks]
        trace = go.Scatter(
            x=[c["step"] for c in checks],
            y=[c["mean"] for c in checks],
            error_y={"type": "data", "array": upper, "arrayminus": lower},
            marker={"symbol": signs, "size": 9, "color": colour},
            **{"mode": "markers", "name": "evaluation, 95 %", "legendgroup": group},
        )
        drawn.add_trace(trace, row=row, col=column)


def _text(words: str) -> str:
    """Words that plotly takes for words: it reads a few tags of HTML in its texts."""
    return html.escape("".join(c if c.isprintable() else "?" for c in words), quote=False)


def _faint(run: int) -> str:
    red, green, blue = (int(COLOURS[run % len(COLOURS)][i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"
