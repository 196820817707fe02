"""How does a reward curve look without a plotting package? One inline SVG for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from artnb.ui.html import esc

COLOURS = ("#2f7fe0", "#e07a1f", "#1fa37a", "#b45fd0", "#d0506a", "#8a8f2a")
_DASHES = ("6 4", "2 3", "9 3 2 3", "4 2")
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 130, 14, 34
_BARS = "▁▂▃▄▅▆▇█"
_MOST_DOTS = 100
"""Of a longer line only the line is drawn."""


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most so many points: of more, the means of neighbours, each at its last neighbour's x.

    >>> thinned([(0, 1.0), (1, 3.0), (2, 5.0)], 2)
    [(1, 2.0), (2, 5.0)]
    """
    size = math.ceil(len(points) / most)
    if size <= 1:
        return list(points)
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return [(chunk[-1][0], math.fsum(y for _, y in chunk) / len(chunk)) for chunk in chunks]


def sparkline(values: Sequence[float]) -> str:
    """The curve as one line of text, for places that drop SVG.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    scaled = [round((v - low) / span * 7 + 1e-9) if math.isfinite(v) else None for v in values]
    return "".join(" " if s is None else _BARS[s] for s in scaled)


def curve_svg(
    series: Sequence[Mapping[str, Any]],
    baselines: Mapping[str, float] | None = None,
    *,
    width: int = 640,
    height: int = 260,
    x_label: str = "step",
    y_label: str = "mean reward",
) -> str:
    """Lines through points, with dashed horizontal baselines, as an SVG string.

    series: dicts with ``name`` and ``points``, a list of (x, y) pairs. Points that are not finite
    are left out.

    >>> curve_svg([{"name": "reward", "points": [(0, 0.1), (1, 0.4)]}])[:4]
    '<svg'
    """
    lines = [(str(s["name"]), _finite(s["points"])) for s in series]
    from_top = sorted((baselines or {}).items(), key=lambda item: -item[1])
    levels = {name: y for name, y in from_top if math.isfinite(y)}
    xs = [x for _, points in lines for x, _ in points]
    ys = [y for _, points in lines for _, y in points] + list(levels.values())
    frame = _Frame(_range(xs, whole=True), _range([0.0, *ys] if ys else ys), width, height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'width="{width}" height="{height}" style="max-width:100%;height:auto" font-size="11" '
        f'font-family="sans-serif" aria-label="{esc(_summary(lines, levels))}">',
        *frame.axes(x_label, y_label),
    ]
    labels = _Labels(height - _BOTTOM)
    for index, (name, points) in enumerate(lines):
        parts += _line(frame, labels, name, points, COLOURS[index % len(COLOURS)])
    for index, (name, level) in enumerate(levels.items()):
        parts += _baseline(frame, labels, name, level, _DASHES[index % len(_DASHES)])
    return "".join(parts) + "</svg>"


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in points if y is not None and math.isfinite(y)]


def _range(values: Sequence[float], *, whole: bool = False) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if high - low < 1e-9:
        return low, low + 1.0
    return (low, high) if whole else (low, high + 0.04 * (high - low))


def _summary(lines: Sequence[tuple[str, list[tuple[float, float]]]], levels: Mapping[str, float]) -> str:
    said = [f"{n} from {p[0][1]:.3g} to {p[-1][1]:.3g}" for n, p in lines if p]
    said += [f"baseline {name} at {level:.3g}" for name, level in levels.items()]
    return "Chart: " + (", ".join(said) or "nothing yet")


class _Frame:
    """The mapping from values to pixels."""

    def __init__(self, xs: tuple[float, float], ys: tuple[float, float], width: int, height: int) -> None:
        self.xs, self.ys, self.width, self.height = xs, ys, width, height

    def x(self, value: float) -> float:
        share = (value - self.xs[0]) / (self.xs[1] - self.xs[0])
        return _LEFT + share * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.ys[0]) / (self.ys[1] - self.ys[0])
        return self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM)

    def axes(self, x_label: str, y_label: str) -> list[str]:
        left, right = _LEFT, self.width - _RIGHT
        bottom = self.height - _BOTTOM
        parts = [f'<g stroke="currentColor" stroke-opacity="0.15">{self._grid(left, right)}</g>']
        parts.append('<g fill="currentColor" fill-opacity="0.75">')
        for tick in ticks(*self.ys, 5):
            parts.append(f'<text x="{left - 6}" y="{self.y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
        for tick in ticks(*self.xs, 8, whole=True):
            parts.append(
                f'<text x="{self.x(tick):.1f}" y="{bottom + 15}" text-anchor="middle">{tick:g}</text>'
            )
        middle = (left + right) / 2
        parts.append(
            f'<text x="{middle:.0f}" y="{self.height - 4}" text-anchor="middle">{esc(x_label)}</text>'
        )
        parts.append(f'<text x="{left}" y="10">{esc(y_label)}</text></g>')
        return parts

    def _grid(self, left: int, right: int) -> str:
        rows = (self.y(tick) for tick in ticks(*self.ys, 5))
        return "".join(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>' for y in rows)


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """At most so many round numbers between two numbers, about.

    >>> ticks(0.0, 1.03, 5)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough)
    size = max(1.0, math.ceil(size)) if whole else size
    first = math.ceil(low / size - 1e-9)
    return [round(k * size, 10) for k in range(first, math.floor(high / size + 1e-9) + 1)]


class _Labels:
    """Labels at the right edge, moved apart where they would overlap."""

    def __init__(self, bottom: float) -> None:
        self.bottom = bottom
        self.taken: list[float] = []

    def place(self, y: float) -> float:
        for distance in range(0, 400, 2):
            for candidate in (y - distance, y + distance):
                is_free = all(abs(candidate - other) >= 13 for other in self.taken)
                if is_free and _TOP <= candidate <= self.bottom + 6:
                    self.taken.append(candidate)
                    return candidate
        return y


def _line(
    frame: _Frame, labels: _Labels, name: str, points: list[tuple[float, float]], colour: str
) -> list[str]:
    if not points:
        return []
    pixels = [(frame.x(x), frame.y(y)) for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    dotted = zip(pixels, points, strict=True) if len(points) <= _MOST_DOTS else ()
    for (x, y), (value_x, value_y) in dotted:
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}">'
            f"<title>{esc(name)}: {value_y:.4g} at {value_x:g}</title></circle>"
        )
    y = labels.place(pixels[-1][1] + 4)
    parts.append(
        f'<text x="{frame.width - _RIGHT + 8}" y="{y:.1f}" fill="{colour}">'
        f"{esc(_short(name))} {points[-1][1]:.3g}</text>"
    )
    return parts


def _baseline(frame: _Frame, labels: _Labels, name: str, level: float, dash: str) -> list[str]:
    y, right = frame.y(level), frame.width - _RIGHT
    text_y = labels.place(y + 4)
    return [
        f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
        f'stroke-opacity="0.6" stroke-dasharray="{dash}"><title>{esc(name)}: {level:.4g}</title></line>',
        f'<text x="{right + 8}" y="{text_y:.1f}" fill="currentColor" fill-opacity="0.8">'
        f"{esc(_short(name))} {level:.3g}</text>",
    ]


def _short(name: str) -> str:
    return name if len(name) <= 14 else name[:13] + "…"
