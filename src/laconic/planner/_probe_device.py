"""What a rank's device can do at once: compute, encode and move bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import torch

from laconic.planner._clock import Clock
from laconic.planner._cluster import Device, Links
from laconic.planner._line import fit
from laconic.planner._probe_links import swaps

_FULL = 0.97  # speeds above this count as undisturbed
_SMALLEST, _LARGEST = 1 << 16, 1 << 24  # bytes: whatever a noisy fit says of the wire
_SIDE = 192  # of matrices: in the cache, long enough for threads to meet


def probe_device(clock: Clock, links: Links, patience_s: float) -> Device:
    """Room, drain and pace of the timeline's rules, by running works and moves side by side.

    With one work alone at speed 1: two at once run at v₁ each, so room = 2·v₁ (1 to 2). A work
    beside moves runs at v₂: drain = room - v₂ (nothing, if v₂ is 1). The pace is the moves' speed
    then, over that alone. A GPU is taken as full with one task, and wires as moving without it.
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
        beside, wire = _beside_moves(work, clock, links, patience_s / 4, pool)
    v2 = min(1.0, beside / alone)
    drain = max(0.0, room - v2) if v2 < _FULL else 0.0
    return Device(
        room=room,
        drain=min(drain, 0.95),
        pace=max(0.05, min(1.0, wire)),
        starts_work=True,
        copy=copy,
    )


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


def _beside_moves(
    work: Callable[[], object],
    clock: Clock,
    links: Links,
    patience_s: float,
    pool: ThreadPoolExecutor,
) -> tuple[float, float]:
    """Works a second while the wire is in use, and the wire's speed over its speed alone."""
    sent = min(_LARGEST, max(_SMALLEST, round(links.swap.per_s * patience_s / 8)))
    move = swaps(sent, clock.group, clock.device)
    alone = clock.seconds(move, patience_s / 2)
    count = max(2, round(patience_s / alone))
    clock.mean(0.0)

    def moving() -> float:
        start = time.perf_counter()
        for _ in range(count):
            move()
        return (time.perf_counter() - start) / count

    task, start, works = pool.submit(moving), time.perf_counter(), 0
    while not task.done():
        work()
        works += 1
    rate = works / (time.perf_counter() - start)
    return clock.mean(rate), clock.mean(alone / task.result())


def _copies(clock: Clock, patience_s: float):
    points = []
    for count in (1 << 12, 1 << 16, 1 << 20):
        x = torch.zeros(count, device=clock.device)
        y = torch.empty_like(x)
        points.append((count, clock.throughput(lambda y=y, x=x: y.copy_(x), patience_s / 3)))
    return fit(points)
