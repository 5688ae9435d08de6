"""Small charts as inline SVG: lines over steps, and a figure with its interval on a common axis.

Colours come from the page's style sheet (classes), so that charts follow its light and dark schemes. All texts are
escaped by MarkupSafe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

Point = tuple[float, float]
_MAX_POINTS = 400
_NUM_COLOURS = 6


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover [low, high]; the first is <= low, the last >= high.

    >>> ticks(0.12, 0.94)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def number(value: float) -> str:
    """A short text of a tick or figure."""
    return f"{value:.4g}"


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most about 400 of the points, evenly spaced, the last kept."""
    stride = max(1, math.ceil(len(points) / _MAX_POINTS))
    kept = list(points[::stride])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


@dataclass(frozen=True)
class _Frame:
    """The rectangle that a chart's lines are drawn in, and what its edges stand for."""

    left: float
    right: float
    top: float
    bottom: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return round(self.left + (value - self.x_low) / (self.x_high - self.x_low) * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        return round(self.bottom - (value - self.y_low) / (self.y_high - self.y_low) * (self.bottom - self.top), 1)


def line_chart(
    title: str,
    series: Mapping[str, Sequence[Point]],
    *,
    x_label: str,
    y_label: str,
    width: int = 460,
    height: int = 270,
) -> Markup:
    """Lines over a common x axis, with a legend when there is more than one. Single points are dots.

    Args:
        series: (x, y) points by name, x ascending, all finite.
    """
    points = [point for line in series.values() for point in line]
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    y_ticks = ticks(min(y for _, y in points), max(y for _, y in points), 4)
    frame = _Frame(58, width - 14, 34, height - 46, x_low, x_high, y_ticks[0], y_ticks[-1])
    parts = [
        _svg('<svg class="chart" viewBox="0 0 {w} {h}" role="img" aria-label="{t}">', w=width, h=height, t=title),
        _svg('<text class="title" x="{x}" y="16">{t}</text>', x=frame.left, t=title),
        *_axes(frame, [tick for tick in ticks(x_low, x_high, 5) if x_low <= tick <= x_high], y_ticks),
        _svg(
            '<text class="label" text-anchor="middle" x="{x}" y="{y}">{t}</text>',
            x=(frame.left + frame.right) / 2,
            y=height - 8,
            t=x_label,
        ),
        _svg(
            '<text class="label" text-anchor="middle" transform="translate(13 {y}) rotate(-90)">{t}</text>',
            y=(frame.top + frame.bottom) / 2,
            t=y_label,
        ),
        *(part for index, line in enumerate(series.values()) for part in _line(frame, line, _colour(index))),
    ]
    if len(series) > 1:
        parts += _legend(list(series), frame.right)
    return Markup("").join([*parts, Markup("</svg>")])


def _axes(frame: _Frame, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> list[Markup]:
    across = {"l": frame.left, "r": frame.right}
    parts = []
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(_svg('<line class="grid" x1="{l}" x2="{r}" y1="{y}" y2="{y}"/>', y=y, **across))
        parts.append(
            _svg(
                '<text class="tick" text-anchor="end" x="{x}" y="{y}" dy="0.35em">{v}</text>',
                x=frame.left - 7,
                y=y,
                v=number(tick),
            )
        )
    parts.append(_svg('<line class="axis" x1="{l}" x2="{r}" y1="{y}" y2="{y}"/>', y=frame.bottom, **across))
    parts += [
        _svg(
            '<text class="tick" text-anchor="middle" x="{x}" y="{y}">{v}</text>',
            x=frame.x(tick),
            y=frame.bottom + 17,
            v=number(tick),
        )
        for tick in x_ticks
    ]
    return parts


def _line(frame: _Frame, line: Sequence[Point], colour: str) -> list[Markup]:
    shown = [(frame.x(x), frame.y(y)) for x, y in thinned(line)]
    parts = []
    if len(shown) > 1:
        path = " ".join(f"{x},{y}" for x, y in shown)
        parts.append(_svg('<polyline class="line {c}" points="{p}"/>', c=colour, p=path))
    if len(shown) <= 25:
        parts += [_svg('<circle class="dot {c}" cx="{x}" cy="{y}" r="2.6"/>', c=colour, x=x, y=y) for x, y in shown]
    return parts


def _legend(names: Sequence[str], right: float) -> list[Markup]:
    parts = []
    for index, name in reversed(list(enumerate(names))):
        parts.append(
            _svg(
                '<text class="legend {c}" text-anchor="end" x="{x}" y="16">\u25cf {n}</text>',
                c=_colour(index),
                x=round(right, 1),
                n=name,
            )
        )
        # No text is measured here: 6.4 units a letter is the mean at this size.
        right -= 24 + 6.4 * len(name)
    return parts


def _colour(index: int) -> str:
    return f"s{index % _NUM_COLOURS}"


def _svg(template: str, **values: object) -> Markup:
    """A fragment with its values escaped."""
    return Markup(template).format(**values)


def interval_strip(
    mean: float, low: float, high: float, axis: tuple[float, float], *, reference: float | None = None, width: int = 150
) -> Markup:
    """A dot with its interval on an axis that all rows of a column share; a dashed line marks the reference."""
    pad = 5
    frame = _Frame(pad, width - pad, 0, 22, axis[0], axis[1], 0, 1)
    label = f"{number(mean)}, 95 % interval {number(low)} to {number(high)}"
    if reference is not None:
        label += f", reference {number(reference)}"
    head = '<svg class="strip" viewBox="0 0 {w} 22" width="{w}" height="22" role="img" aria-label="{t}">'
    parts = [
        _svg(head, w=width, t=label),
        _svg('<line class="grid" x1="{a}" x2="{b}" y1="11" y2="11"/>', a=frame.left, b=frame.right),
    ]
    if reference is not None:
        parts.append(_svg('<line class="reference" x1="{x}" x2="{x}" y1="1" y2="21"/>', x=frame.x(reference)))
    parts.append(_svg('<line class="interval" x1="{a}" x2="{b}" y1="11" y2="11"/>', a=frame.x(low), b=frame.x(high)))
    parts.append(_svg('<circle class="mean" cx="{x}" cy="11" r="4"/></svg>', x=frame.x(mean)))
    return Markup("").join(parts)


def shares_bar(shares: Sequence[tuple[str, float]], *, width: int = 120) -> Markup:
    """A stacked bar of shares that sum to one, each with its name as class (win, tie, loss)."""
    label = ", ".join(f"{name} {share:.0%}" for name, share in shares)
    head = '<svg class="shares" viewBox="0 0 {w} 18" width="{w}" height="18" role="img" aria-label="{t}">'
    parts = [_svg(head, w=width, t=label)]
    x = 0.0
    for name, share in shares:
        parts.append(
            _svg(
                '<rect class="{c}" x="{x}" y="1" height="16" width="{w}"/>',
                c=name,
                x=round(x, 1),
                w=round(share * width, 1),
            )
        )
        x += share * width
    return Markup("").join([*parts, Markup("</svg>")])
