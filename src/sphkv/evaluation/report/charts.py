# SPDX-License-Identifier: Apache-2.0
"""Charts as inline SVG: no scripts or fonts from elsewhere, colours from the page's style."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

COLOURS = (
    "#5b6675", "#c2410c", "#1d6fb8", "#0f8a5f", "#8b5fbf", "#b08900", "#c0417f", "#3f7d8c",
    "#7a4b2a", "#4f6bd6", "#7f9c1f", "#a33b3b", "#2aa6a6", "#d17fd1",
)  # fmt: skip
_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 30, 44


@dataclass(frozen=True, slots=True)
class Mark:
    """One point of a chart.

    Attributes:
        x: Horizontal value.
        y: Vertical value.
        label: Shown when pointed at.
        is_excluded: Drawn grey and hollow.
        is_star: Drawn as a star.
    """

    x: float
    y: float
    label: str
    is_excluded: bool = False
    is_star: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """The points of one method.

    Attributes:
        name: Method; also the class that the page's switches act on.
        marks: Its points.
        line: Corners of its line, in order.
    """

    name: str
    marks: tuple[Mark, ...]
    line: tuple[tuple[float, float], ...] = ()


class _Scale:
    """Maps values to pixels, logarithmically if asked."""

    def __init__(self, values: Sequence[float], low: float, high: float, *, is_log: bool) -> None:
        self.is_log = is_log and min(values, default=0.0) > 0
        seen = [math.log10(v) for v in values] if self.is_log else list(values)
        first, last = (min(seen), max(seen)) if seen else (0.0, 1.0)
        pad = 0.06 * (last - first) or 0.5 * abs(first) or 0.5
        self._first, self._last = first - pad, last + pad
        self._low, self._high = low, high

    def __call__(self, value: float) -> float:
        at = math.log10(value) if self.is_log else value
        share = (at - self._first) / (self._last - self._first)
        return self._low + share * (self._high - self._low)

    def ticks(self, count: int = 4) -> list[float]:
        step = (self._last - self._first) / (count + 1)
        ends = [self._first + step * (number + 0.5) for number in range(count + 1)]
        return [10**end if self.is_log else end for end in ends]


def colour_of(index: int) -> str:
    """Colour of series number ``index``."""
    return COLOURS[index % len(COLOURS)]


def number_text(value: float | None) -> str:
    """Four significant digits, thousands grouped."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def scatter(
    title: str, x_name: str, y_name: str, series: Sequence[Series], *, log_x: bool, log_y: bool
) -> str:
    """A scatter chart with lines."""
    xs = [mark.x for one in series for mark in one.marks]
    ys = [mark.y for one in series for mark in one.marks]
    x = _Scale(xs, _LEFT, _WIDTH - _RIGHT, is_log=log_x)
    y = _Scale(ys, _HEIGHT - _BOTTOM, _TOP, is_log=log_y)
    parts = [
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{html.escape(title)}'>",
        f"<text x='{_LEFT}' y='18' class='title'>{html.escape(title)}</text>",
        _axes(x, y, x_name, y_name),
    ]
    for index, one in enumerate(series):
        colour = colour_of(index)
        parts.append(f"<g class='series' data-method='{html.escape(one.name)}'>")
        if len(one.line) > 1:
            corners = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in one.line)
            parts.append(f"<polyline points='{corners}' fill='none' stroke='{colour}'/>")
        parts += [_mark(mark, x(mark.x), y(mark.y), colour) for mark in one.marks]
        parts.append("</g>")
    return "".join(parts) + "</svg>"


def _axes(x: _Scale, y: _Scale, x_name: str, y_name: str) -> str:
    base, side = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [
        f"<line x1='{_LEFT}' y1='{base}' x2='{side}' y2='{base}' class='axis'/>",
        f"<line x1='{_LEFT}' y1='{_TOP}' x2='{_LEFT}' y2='{base}' class='axis'/>",
    ]
    for tick in x.ticks():
        parts.append(f"<text x='{x(tick):.1f}' y='{base + 15}' class='tick mid'>")
        parts.append(f"{number_text(_round(tick))}</text>")
    for tick in y.ticks():
        parts.append(f"<line x1='{_LEFT}' y1='{y(tick):.1f}' x2='{side}' y2='{y(tick):.1f}' ")
        parts.append(f"class='grid'/><text x='{_LEFT - 5}' y='{y(tick) + 4:.1f}' class='tick end'>")
        parts.append(f"{number_text(_round(tick))}</text>")
    middle = (_LEFT + side) // 2
    parts.append(f"<text x='{middle}' y='{_HEIGHT - 8}' class='name mid'>{html.escape(x_name)}")
    parts.append(f"{', log' if x.is_log else ''}</text><text x='14' y='{_HEIGHT // 2}' ")
    parts.append(f"class='name mid' transform='rotate(-90 14 {_HEIGHT // 2})'>")
    parts.append(f"{html.escape(y_name)}{', log' if y.is_log else ''}</text>")
    return "".join(parts)


def _round(value: float) -> float:
    """Two significant digits, for ticks."""
    if value == 0:
        return 0.0
    digits = 1 - math.floor(math.log10(abs(value)))
    return round(value, digits)


def _mark(mark: Mark, x: float, y: float, colour: str) -> str:
    label = f"<title>{html.escape(mark.label)}</title>"
    if mark.is_star:
        corners = " ".join(
            f"{x + r * math.sin(a):.1f},{y - r * math.cos(a):.1f}"
            for number in range(10)
            for a, r in ((number * math.pi / 5, 9.0 if number % 2 == 0 else 3.8),)
        )
        return f"<polygon points='{corners}' fill='{colour}' class='star'>{label}</polygon>"
    if mark.is_excluded:
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' class='excluded'>{label}</circle>"
    return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4.5' fill='{colour}'>{label}</circle>"


def stacked_bars(
    title: str, unit: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]
) -> str:
    """One horizontal bar per row, divided into named parts."""
    names = list(dict.fromkeys(name for _, row in rows for name, _ in row))
    most = max((sum(size for _, size in row) for _, row in rows), default=1.0) or 1.0
    height = 54 + 22 * len(rows)
    parts = [
        f"<svg viewBox='0 0 760 {height}' role='img' aria-label='{html.escape(title)}'>",
        f"<text x='0' y='18' class='title'>{html.escape(title)}</text>",
    ]
    for number, (label, row) in enumerate(rows):
        top, left = 28 + 22 * number, 190.0
        parts.append(f"<text x='184' y='{top + 14}' class='tick end'>{html.escape(label)}</text>")
        for name, size in row:
            width = 460 * size / most
            parts.append(
                f"<rect x='{left:.1f}' y='{top}' width='{width:.1f}' height='17' "
                f"fill='{colour_of(names.index(name))}'><title>{html.escape(label)}: "
                f"{html.escape(name)} {number_text(size)} {html.escape(unit)}</title></rect>"
            )
            left += width
        total = sum(size for _, size in row)
        parts.append(f"<text x='{left + 6:.1f}' y='{top + 14}' class='tick'>")
        parts.append(f"{number_text(total)} {html.escape(unit)}</text>")
    at = 0
    for index, name in enumerate(names):
        parts.append(f"<rect x='{at}' y='{height - 16}' width='11' height='11' ")
        parts.append(f"fill='{colour_of(index)}'/><text x='{at + 16}' y='{height - 6}' ")
        parts.append(f"class='tick'>{html.escape(name)}</text>")
        at += 30 + 7 * len(name)
    return "".join(parts) + "</svg>"
