"""How do means with their intervals compare at a glance? One below the other, on one scale, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from artnb.ui.curve import ticks
from artnb.ui.html import esc
from artnb.ui.snapshot import number_text

_WIDTH, _LEFT, _RIGHT, _LINE, _FOOT = 640, 170, 90, 24, 26
_COLOUR, _LONGEST, _MOST = "#2f7fe0", 24, 20


def intervals_svg(estimates: Sequence[Mapping[str, Any]]) -> str:
    """Dots for means and bars for intervals, as an SVG string; empty when no mean is a number.

    estimates: dicts with ``name``, ``mean``, ``low`` and ``high``; a None is not drawn. The first 20 are.

    >>> intervals_svg([{"name": "after", "mean": 0.5, "low": 0.4, "high": 0.6}])[:4]
    '<svg'
    """
    known = [one for one in estimates if _is_number(one["mean"])][:_MOST]
    if not known:
        return ""
    ends = [v for one in known for v in (one["low"], one["high"], one["mean"]) if _is_number(v)]
    low, high = min(0.0, *ends), max(1e-9, *ends)

    def x(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    parts = []
    for index, one in enumerate(known):
        parts += _line(one, _LINE * index + 14, x)
    height = _LINE * len(known) + _FOOT
    for value in ticks(low, high, 5):
        parts.append(_text(x(value), height - 6, number_text(value), "middle", 0.7))
    said = "; ".join(f"{one['name']} {interval_text(one)}" for one in known)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        'role="img" style="max-width:100%;height:auto" font-size="12" font-family="sans-serif" '
        f'aria-label="{esc(said)}">{"".join(parts)}</svg>'
    )


def interval_text(record: Mapping[str, Any], mean: str = "mean") -> str:
    """A mean with its interval.

    >>> interval_text({"mean": 0.5, "low": 0.25, "high": 0.75})
    '0.500 (0.250 to 0.750)'
    """
    value, low, high = (record.get(name) for name in (mean, "low", "high"))
    if low is None or high is None:
        return number_text(value)
    return f"{number_text(value)} ({number_text(low)} to {number_text(high)})"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _line(one: Mapping[str, Any], y: int, x: Any) -> list[str]:
    name = str(one["name"])
    parts = [_text(_LEFT - 10, y + 4, name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…", "end")]
    if _is_number(one["low"]) and _is_number(one["high"]):
        parts.append(
            f'<line x1="{x(one["low"]):.1f}" x2="{x(one["high"]):.1f}" y1="{y}" y2="{y}" stroke="{_COLOUR}" '
            'stroke-width="3" stroke-opacity="0.45" stroke-linecap="round"/>'
        )
    parts.append(f'<circle cx="{x(one["mean"]):.1f}" cy="{y}" r="4.5" fill="{_COLOUR}"/>')
    return [*parts, _text(_WIDTH - _RIGHT + 12, y + 4, number_text(one["mean"]), "start")]


def _text(x: float, y: float, text: str, anchor: str, opacity: float = 1.0) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor" '
        f'fill-opacity="{opacity:g}">{esc(text)}</text>'
    )
