"""Predicted against measured as an SVG: one file that any viewer of the docs shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_SIZE, _LEFT, _BOTTOM, _TOP = 560, 64, 52, 40
_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2")
_TICKS = tuple(step * 10**power for power in range(4) for step in (1, 2, 5))


@dataclass(frozen=True)
class Point:
    """A prediction and what was measured, in ms."""

    series: str
    measured: float
    predicted: float
    label: str


def svg(points: Sequence[Point], title: str) -> str:
    """Logarithmic axes of equal length; the diagonal is a right prediction, the band ±25%."""
    values = [value for one in points for value in (one.measured, one.predicted)]
    low, high = 0.8 * min(values), 1.25 * max(values)
    span = _SIZE - _LEFT - 20

    def place(value: float) -> float:
        return span * math.log(value / low) / math.log(high / low)

    def x(value: float) -> float:
        return _LEFT + place(value)

    def y(value: float) -> float:
        return _TOP + span - place(value)

    series = list(dict.fromkeys(one.series for one in points))
    height = _TOP + span + _BOTTOM + 22 * math.ceil(len(series) / 2)
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIZE} {height}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{_SIZE}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
        _band(x, y, low, high),
    ]
    for tick in (tick for tick in _TICKS if low <= tick <= high):
        found += [
            f'<path d="M{x(tick):.1f} {_TOP}V{_TOP + span}M{_LEFT} {y(tick):.1f}h{span}" '
            'stroke="#ddd" fill="none"/>',
            f'<text x="{x(tick):.1f}" y="{_TOP + span + 16}" text-anchor="middle">{tick}</text>',
            f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>',
        ]
    found += [
        f'<text x="{_LEFT + span / 2}" y="{_TOP + span + 36}" text-anchor="middle">'
        "measured, ms a step</text>",
        f'<text transform="translate(16 {_TOP + span / 2}) rotate(-90)" text-anchor="middle">'
        "predicted, ms a step</text>",
    ]
    for one in points:
        colour = _COLOURS[series.index(one.series) % len(_COLOURS)]
        found.append(
            f'<circle cx="{x(one.measured):.1f}" cy="{y(one.predicted):.1f}" r="4" '
            f'fill="{colour}" fill-opacity="0.8"><title>{escape(one.label)}: predicted '
            f"{one.predicted:.0f}, measured {one.measured:.0f} ms</title></circle>"
        )
    for number, name in enumerate(series):
        left = _LEFT + (number % 2) * span / 2
        top = _TOP + span + _BOTTOM + 22 * (number // 2) + 4
        found += [
            f'<circle cx="{left + 5}" cy="{top - 4}" r="5" fill="{_COLOURS[number % 7]}"/>',
            f'<text x="{left + 16}" y="{top}">{escape(name)}</text>',
        ]
    return "\n".join([*found, "</svg>", ""])


def _band(x, y, low: float, high: float) -> str:
    """±25%, and the diagonal."""
    corners = [(low, low), (low, low * 1.25), (high / 1.25, high), (high, high)]
    corners += [(high, high * 0.75), (low / 0.75, low)]
    area = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in corners)
    line = f"M{x(low):.1f} {y(low):.1f}L{x(high):.1f} {y(high):.1f}"
    return f'<polygon points="{area}" fill="#eef2f8"/><path d="{line}" stroke="#888"/>'
