"""Lines and points over two axes, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks._svg import COLOURS, LINE, WIDTH, Canvas

_LEFT, _RIGHT, _HEIGHT = 62, 18, 300


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A range with its ticks: (value, words). Values outside the range are cut."""

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def has(self, value: float) -> bool:
        """Whether a value is in the range, but for rounding."""
        return -1e-9 <= self.share(value) <= 1 + 1e-9


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one kind; `dash` of the line between them (None: no line, "": solid)."""

    name: str
    points: Sequence[tuple[float, float]]
    dash: str | None = ""
    marks: bool = True


def line_plot(
    *,
    title: str,
    description: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    note: str = "",
) -> str:
    """The y axis' label stands above it, and the legend below the plot."""
    canvas = Canvas(title, description)
    canvas.y += LINE
    canvas.label(12, canvas.y, y.label)
    top = canvas.y + 14
    across, bottom = WIDTH - _LEFT - _RIGHT, top + _HEIGHT

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return _LEFT + across * x.share(point[0]), bottom - _HEIGHT * y.share(point[1])

    for value, words in x.ticks:
        at = place((value, y.low))[0]
        canvas.path(f"M{at:.1f} {top}V{bottom}", "grid")
        canvas.label(at, bottom + 19, words, "middle")
    for value, words in y.ticks:
        at = place((x.low, value))[1]
        canvas.path(f"M{_LEFT} {at:.1f}h{across}", "grid")
        canvas.label(_LEFT - 7, at + 5, words, "end")
    canvas.path(f"M{_LEFT} {top}V{bottom}h{across}", "ink")
    canvas.label(_LEFT + across / 2, bottom + 42, x.label, "middle")
    for number, one in enumerate(series):
        shown = [point for point in one.points if x.has(point[0]) and y.has(point[1])]
        _draw(canvas, number, one, [place(point) for point in shown], shown)
    canvas.y = bottom + 50
    canvas.legend(
        [one.name for one in series],
        [None if one.marks else one.dash for one in series],
    )
    if note:
        canvas.note(note)
    return canvas.text()


def _draw(
    canvas: Canvas,
    number: int,
    one: Series,
    places: Sequence[tuple[float, float]],
    values: Sequence[tuple[float, float]],
) -> None:
    if one.dash is not None and len(places) > 1:
        d = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
        dashes = f' stroke-dasharray="{one.dash}"' if one.dash else ""
        canvas.path(d, f"s{number % COLOURS}", f'stroke-width="2.5"{dashes}')
    if one.marks:
        for (a, b), (u, v) in zip(places, values, strict=True):
            canvas.marker(a, b, number, f"{one.name}: {u:.3g}, {v:.3g}")
