"""Who does what when: rows of coloured spans over time, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks._svg import LINE, WIDTH, Canvas

_LEFT, _RIGHT, _ROW = 12, 16, 16


@dataclass(frozen=True)
class Span:
    """From, to, and which kind (a place in the legend)."""

    start: float
    end: float
    kind: int


@dataclass(frozen=True, kw_only=True)
class Track:
    """A strategy: rows of spans, one for each thread; `steps` are the ends of its steps."""

    name: str
    rows: Sequence[Sequence[Span]]
    steps: Sequence[float]


def time_plot(
    *,
    title: str,
    description: str,
    kinds: Sequence[str],
    tracks: Sequence[Track],
    end: float,
    ticks: Sequence[float],
    note: str = "",
) -> str:
    """Seconds from left to right; small strokes are the ends of steps."""
    canvas = Canvas(title, description)
    across = WIDTH - _LEFT - _RIGHT

    def at(seconds: float) -> float:
        return _LEFT + across * min(seconds, end) / end

    canvas.legend(kinds, [None] * len(kinds))
    for track in tracks:
        canvas.y += LINE + 6
        canvas.label(_LEFT, canvas.y, track.name)
        canvas.y += 7
        top = canvas.y
        for row in track.rows:
            for span in row:
                if span.start >= end:
                    continue
                wide = max(0.6, at(span.end) - at(span.start))
                canvas.add(
                    f'<rect class="f{span.kind}" x="{at(span.start):.1f}" y="{canvas.y:.1f}" '
                    f'width="{wide:.1f}" height="{_ROW - 2}"/>'
                )
            canvas.y += _ROW
        for step in track.steps:
            if step <= end:
                canvas.path(f"M{at(step):.1f} {top - 3:.1f}V{canvas.y + 1:.1f}", "ink")
    last = canvas.y + 8
    for tick in ticks:
        canvas.path(f"M{at(tick):.1f} {last:.1f}v6", "ink")
        kind = "middle" if 0 < tick < end else ("end" if tick else "")
        canvas.label(at(tick), last + 22, f"{tick * 1000:.0f} ms", kind)
    canvas.path(f"M{_LEFT} {last:.1f}h{across}", "ink")
    canvas.y = last + 24
    if note:
        canvas.note(note)
    return canvas.text()
