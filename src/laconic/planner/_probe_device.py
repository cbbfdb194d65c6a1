"""What a rank's device can do at once: compute, encode and move bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

import torch

from laconic.planner._clock import Clock
from laconic.planner._cluster import Device, Links
from laconic.planner._line import Line, fit
from laconic.planner._probe_links import swaps

_FULL = 0.97  # speeds above this count as undisturbed
_TINY, _SMALLEST, _LARGEST = 1 << 10, 1 << 18, 1 << 24  # bytes that a rank sends
_MOST = 40  # moves
_SIDE = 192  # of matrices: in the cache, long enough for threads to meet


def probe_device(clock: Clock, links: Links, patience_s: float) -> Device:
    """Room, drain and pace of the timeline's rules, by running works and moves side by side.

    With one work alone at speed 1: two at once run at v₁ each, so room = 2·v₁ (1 to 2). A work
    beside large moves runs at v₂: drain = room - v₂ (nothing, if v₂ is 1). Small and large moves,
    alone and beside works, say how much slower starts and bytes are then. A GPU is taken as full
    with one task, and wires as moving without it.
    """
    copy = _copies(clock, patience_s / 4)
    if clock.device.type == "cuda":
        return Device(copy=copy)
    x = torch.randn(_SIDE, _SIDE)
    work = _matmuls(x)
    alone = _rate(work, clock, patience_s / 4, None)
    with ThreadPoolExecutor(1) as pool:
        both = _rate(work, clock, patience_s / 4, lambda stop: pool.submit(_until, stop, work))
        room = max(1.0, min(2.0, 2 * both / alone))
        sent = min(_LARGEST, max(_SMALLEST, round(links.swap.per_s * patience_s / 32)))
        small, large = (
            _beside(work, swaps(size, clock.group, clock.device), clock, patience_s / 8, pool)
            for size in (_TINY, sent)
        )
    v2 = min(1.0, large.works / alone)
    drain = max(0.0, room - v2) if v2 < _FULL else 0.0
    bytes_alone, bytes_beside = large.alone - small.alone, large.beside - small.beside
    return Device(
        room=room,
        drain=min(drain, 0.95),
        pace=_pace(bytes_alone, bytes_beside),
        start_pace=_pace(small.alone, small.beside),
        copy=copy,
    )


def _pace(alone: float, beside: float) -> float:
    """Speed beside works over speed alone."""
    return max(0.02, min(1.0, alone / beside)) if 0 < alone < beside else 1.0


@dataclass(frozen=True)
class _Pair:
    """Seconds of a move alone and beside works, and works a second beside it."""

    alone: float
    beside: float
    works: float


def _matmuls(x: torch.Tensor) -> Callable[[], object]:
    out = torch.empty_like(x)
    return lambda: torch.mm(x, x, out=out)


def _until(stop: Event, action: Callable[[], object]) -> None:
    while not stop.is_set():
        action()


def _rate(
    work: Callable[[], object],
    clock: Clock,
    patience_s: float,
    beside: Callable[[Event], object] | None,
) -> float:
    """Works a second of this thread, with something else beside it; the mean over ranks."""
    stop = Event()
    clock.mean(0.0)
    running = beside(stop) if beside else None
    try:
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < patience_s:
            work()
            count += 1
        rate = count / (time.perf_counter() - start)
    finally:
        stop.set()
        if running is not None:
            running.result()  # pyright: ignore[reportAttributeAccessIssue]
    return clock.mean(rate)


def _beside(
    work: Callable[[], object],
    move: Callable[[], object],
    clock: Clock,
    patience_s: float,
    pool: ThreadPoolExecutor,
) -> _Pair:
    alone = clock.seconds(move, patience_s / 2)
    count = max(4, min(_MOST, round(patience_s / alone)))
    clock.mean(0.0)
    task, start, works = pool.submit(_often, move, count), time.perf_counter(), 0
    while not task.done():
        work()
        works += 1
    rate = works / (time.perf_counter() - start)
    return _Pair(alone, clock.mean(task.result()), clock.mean(rate))


def _often(move: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        move()
    return (time.perf_counter() - start) / count


def _copies(clock: Clock, patience_s: float) -> Line:
    """Of tensors that no cache holds: gradients are seldom smaller."""
    points = []
    for count in (1 << 12, 1 << 22, 1 << 23):
        x = torch.zeros(count, device=clock.device)
        y = torch.empty_like(x)
        points.append((count, clock.throughput(lambda y=y, x=x: y.copy_(x), patience_s / 3)))
    return fit(points)
