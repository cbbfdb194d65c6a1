"""Predicted against measured as an SVG: one file that any viewer of the docs shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks._line_plot import Axis
from benchmarks._svg import LINE, WIDTH, Canvas

_LEFT, _RIGHT = 62, 18
_TICKS = tuple(step * 10**power for power in range(5) for step in (1, 2, 5))
_BAND = 1.25


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
    low, high = 0.85 * min(values), 1.18 * max(values)
    axis = Axis(label="", low=low, high=high, log=True, ticks=())
    series = list(dict.fromkeys(one.series for one in points))
    canvas = Canvas(
        title,
        f"{len(points)} predictions in ms over measured times from {min(values):.0f} to "
        f"{max(values):.0f} ms, both logarithmic; most lie within a quarter of the diagonal.",
    )
    canvas.y += LINE
    canvas.label(12, canvas.y, "predicted, ms per step")
    top, span = canvas.y + 14, WIDTH - _LEFT - _RIGHT
    bottom = top + span

    def x(value: float) -> float:
        return _LEFT + span * axis.share(value)

    def y(value: float) -> float:
        return bottom - span * axis.share(value)

    corners = [(low, low), (low, low * _BAND), (high / _BAND, high), (high, high)]
    corners += [(high, high / _BAND), (low * _BAND, low)]
    area = "M" + "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in corners) + "z"
    canvas.path(area, "band")
    for tick in (tick for tick in _TICKS if low <= tick <= high):
        canvas.path(f"M{x(tick):.1f} {top}V{bottom}M{_LEFT} {y(tick):.1f}h{span}", "grid")
        canvas.label(x(tick), bottom + 19, str(tick), "middle")
        canvas.label(_LEFT - 7, y(tick) + 5, str(tick), "end")
    canvas.path(f"M{x(low):.1f} {y(low):.1f}L{x(high):.1f} {y(high):.1f}", "ink")
    canvas.label(_LEFT + span / 2, bottom + 42, "measured, ms per step", "middle")
    for one in points:
        tip = f"{one.label}: predicted {one.predicted:.0f}, measured {one.measured:.0f} ms"
        canvas.marker(x(one.measured), y(one.predicted), series.index(one.series), tip)
    canvas.y = bottom + 50
    canvas.legend(series, [None] * len(series))
    canvas.note("Line: predicted = measured. Band: within a quarter of it.")
    return canvas.text()
