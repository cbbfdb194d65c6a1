"""What the planner's simulation of a step does when, kept for a picture."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks._time_plot import Span, Track
from laconic._cost import Move, Pause, Work
from laconic.planner import Probe, Strategy
from laconic.planner._predict import Timeline

_TIMES = 12  # a program that ends is seen again: steps of a synchronous strategy are alike


@dataclass
class _Seen(Timeline):
    """Remembers what every thread did between two events."""

    seen: list[tuple[int, Span]] = field(default_factory=list)

    def _flow(self) -> None:
        before = self.now
        doing = [(thread, _kind(thread, one.stage)) for thread, one in enumerate(self._tasks)]
        super()._flow()
        for thread, kind in doing:
            if kind is not None:
                self.seen.append((thread, Span(before, self.now, kind)))


def _kind(thread: int, stage: object) -> int | None:
    """A place in the legend: computation, codec, wire (waiting for others is a part of it)."""
    if isinstance(stage, Work):
        return 0 if thread == 0 else 1
    return 2 if isinstance(stage, Move | Pause) else None


def track(name: str, strategy: Strategy, probe: Probe) -> Track:
    """As `step_seconds` simulates it, from its first mark on."""
    cluster, workload = probe.cluster, probe.workload
    assert workload is not None
    timing = strategy.timing
    timeline = _Seen(lanes=timing.lanes(cluster), device=cluster.device)
    marks = timeline.run(timing.program(strategy.on(cluster, workload)))
    start, long = marks[0], marks[-1] - marks[0]
    repeats = 1 if strategy.schedule == "ssd" else _TIMES
    rows: list[list[Span]] = [[] for _ in range(1 + timeline.lanes)]
    for turn in range(repeats):
        for thread, span in timeline.seen:
            if span.start >= start - 1e-9:
                shift = turn * long - start
                rows[thread].append(Span(span.start + shift, span.end + shift, span.kind))
    if strategy.schedule == "local":
        each = workload.compute_s
        own = [each * (k + 1) for k in range(strategy.period - 1)] + [long]
    else:
        own = [mark - start for mark in marks[1:]]
    ends = [turn * long + mark for turn in range(repeats) for mark in own]
    return Track(name=name, rows=[_joined(row) for row in rows], steps=ends)


def _joined(row: list[Span]) -> list[Span]:
    """Neighbours of one kind as one span."""
    found: list[Span] = []
    for span in row:
        if found and found[-1].kind == span.kind and span.start - found[-1].end < 1e-9:
            found[-1] = Span(found[-1].start, span.end, span.kind)
        else:
            found.append(span)
    return found
