"""Horizontal bars with their values, as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks._svg import LINE, WIDTH, Canvas

_LEFT, _VALUE = 12, 72  # of bars; what the value beside a bar takes


def bar_plot(
    *,
    title: str,
    description: str,
    groups: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    unit: str,
    note: str = "",
) -> str:
    """Every group has a scale of its own; the name stands above its bar, so that it may be long."""
    canvas = Canvas(title, description)
    for number, (heading, bars) in enumerate(groups):
        canvas.y += LINE + (8 if number else 0)
        canvas.label(_LEFT, canvas.y, heading, "title")
        most = max(value for _, value in bars)
        for row, (name, value) in enumerate(bars):
            canvas.y += LINE + 2
            canvas.label(_LEFT, canvas.y, name)
            long = max(2.0, (WIDTH - _LEFT - _VALUE - 16) * value / most)
            canvas.y += 6
            colour = "f6" if row == 0 else "f0"
            canvas.add(
                f'<rect class="{colour}" x="{_LEFT}" y="{canvas.y:.1f}" width="{long:.1f}" '
                'height="14" rx="3"/>'
            )
            canvas.label(_LEFT + long + 7, canvas.y + 12.5, f"{value:.0f} {unit}")
            canvas.y += 14
    if note:
        canvas.note(note)
    return canvas.text()
