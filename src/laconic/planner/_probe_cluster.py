"""What links cost, and what a rank's device can do at once; measured on all ranks together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Event

import torch
import torch.distributed as dist

from laconic._cost import Device, LinearCost, Links, fit, ring_bytes
from laconic.comm._context import ExchangeContext, Sizes
from laconic.comm._point_to_point import sendrecv
from laconic.comm._sums import sum_in_place
from laconic.comm._transport import Message, all_to_all, no_values

Action = Callable[[], object]

_MAX_RUNS = 64
_SMALLEST, _LARGEST, _TIMES = 1 << 10, 1 << 26, 4  # bytes of a payload, and their steps
_GRAIN = 16  # bytes, of which messages are multiples

_FULL = 0.97  # speeds above this count as undisturbed
_TINY, _FEW_BYTES, _MANY_BYTES = 1 << 10, 1 << 18, 1 << 24  # that a rank sends beside work
_MAX_MOVES = 40
_SIDE = 192  # of matrices: in the cache, and long enough for threads to overlap


# Seconds of what all ranks do at once


def typical(seconds: Sequence[float]) -> float:
    """The mean without the slowest tenth.

    Not the median: where ranks share cores, a thing runs undisturbed or takes twice as long, and
    a mean of both is what steps take.
    """
    kept = sorted(seconds)[: max(1, round(0.9 * len(seconds)))]
    return statistics.mean(kept)


@dataclass(frozen=True)
class Clock:
    """Measures on all ranks of a group; every rank gets the same numbers."""

    group: dist.ProcessGroup
    device: torch.device

    def seconds(self, action: Action, patience_s: float) -> float:
        """The typical time of an action in which ranks communicate; all start together.

        As many repetitions as `patience_s` allows, 3 to 64; the first two are not counted.
        """
        self._once(action)
        first = self.mean(self._once(action))
        count = max(3, min(_MAX_RUNS, round(patience_s / max(first, 1e-6))))
        return self.mean(typical([self._once(action) for _ in range(count)]))

    def throughput(self, action: Action, patience_s: float) -> float:
        """Seconds of an action that all ranks run, each for itself, for `patience_s`.

        The mean over a long loop: where ranks share cores, short actions run undisturbed or not at
        all, and a median would see the former.
        """
        action()
        self.mean(0.0)
        self.finish()
        start, count = time.perf_counter(), 0
        while count < 3 or time.perf_counter() - start < patience_s:
            action()
            count += 1
        self.finish()
        return self.mean((time.perf_counter() - start) / count)

    def mean(self, value: float) -> float:
        """Over ranks, which also synchronizes them."""
        one = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(one, group=self.group)
        return float(one) / self.group.size()

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, action: Action) -> float:
        """This rank's seconds of it, once."""
        start = time.perf_counter()
        action()
        self.finish()
        return time.perf_counter() - start

    def _once(self, action: Action) -> float:
        self.mean(0.0)
        self.finish()
        return self.timed(action)


# Links


def probe_links(clock: Clock, patience_s: float, group: dist.ProcessGroup | None = None) -> Links:
    """Costs of all-reduce, all-to-all and sendrecv, with the library's own transport.

    With `group`, a part of those ranks, all parts communicate at the same time: what nodes or lanes
    share, they share here, too.
    Sizes grow until one message takes half of the time that a kind may have.
    """
    context = ExchangeContext(group=group or clock.group)
    allreduce, exchange, pair = (
        _link(kind, context, clock, patience_s / 3)
        for kind in (_all_reduce, _all_to_all, _sendrecv)
    )
    return Links(ranks=context.size, allreduce=(allreduce,), all_to_all=exchange, sendrecv=pair)


def _link(
    kind: Callable[[int, ExchangeContext, torch.device], tuple[Action, float]],
    context: ExchangeContext,
    clock: Clock,
    patience_s: float,
) -> LinearCost:
    points, size = [], _SMALLEST
    while size <= _LARGEST:
        action, sent = kind(size, context, clock.device)
        seconds = clock.seconds(action, patience_s / 12)
        points.append((sent, seconds))
        size *= _TIMES
        if _TIMES * seconds > patience_s / 2 and len(points) > 2:
            break
    return _through_ends(points)


def _through_ends(points: Sequence[tuple[float, float]]) -> LinearCost:
    """The start from the two smallest sizes, the speed from the two largest.

    An idle link (its buffers, a token bucket) lets a burst through at once. Sizes in the middle
    would make the link look faster than it is under load.
    """
    start = statistics.mean(t for _, t in points[:2])
    per_byte = statistics.mean(max(t - start, 0.05 * t) / x for x, t in points[-2:])
    line = LinearCost(start_s=start, per_s=1 / per_byte)
    return replace(line, spread=line.off(points))


def _all_reduce(size: int, context: ExchangeContext, device: torch.device) -> tuple[Action, float]:
    x = torch.zeros(size // 4, device=device)
    return lambda: sum_in_place(x, context), ring_bytes(size, context.size)


def _all_to_all(size: int, context: ExchangeContext, device: torch.device) -> tuple[Action, float]:
    """A chunk of the payload to every other rank."""
    n, chunk = context.size, _chunk(size, context)
    x = torch.zeros(chunk, dtype=torch.uint8, device=device)
    lengths = [0 if i == context.rank else chunk for i in range(n)]
    messages = [Message(x[:length], no_values(x)) for length in lengths]
    sizes = Sizes(tuple(lengths), known=True)
    return lambda: all_to_all(messages, context, sizes, [0] * n), (n - 1) * chunk


def _sendrecv(size: int, context: ExchangeContext, device: torch.device) -> tuple[Action, float]:
    """A chunk to the next rank, one from the rank before."""
    n, rank, chunk = context.size, context.rank, _chunk(size, context)
    mine, theirs = (torch.zeros(chunk, dtype=torch.uint8, device=device) for _ in range(2))

    def send_receive() -> None:
        sendrecv(mine, (rank + 1) % n, theirs, (rank - 1) % n, "probe", context).wait(context)

    return send_receive, chunk


def _chunk(size: int, context: ExchangeContext) -> int:
    return max(_GRAIN, size // context.size // _GRAIN * _GRAIN)


# What a device does at once


def probe_device(clock: Clock, links: Links, patience_s: float) -> Device:
    """The numbers of the timeline's rules, by running works and moves side by side.

    With one work alone at speed 1: two at once run at v₁ each, so slots = 2·v₁ (1 to 2). A work
    beside large moves runs at v₂: wire_cpu_share = slots - v₂ (nothing, if v₂ is 1). Small and
    large moves, alone and beside works, say how much slower starts and bytes are then. A GPU is
    taken as full with one task, and wires as moving without it.
    """
    # tensors that no cache holds: gradients are seldom smaller
    copy = fitted((1 << 12, 1 << 22, 1 << 23), clock, patience_s / 4, partial(_copying, clock))
    if clock.device.type == "cuda":
        return Device(copy=copy)
    x = torch.randn(_SIDE, _SIDE)
    out = torch.empty_like(x)

    def work() -> None:
        torch.mm(x, x, out=out)

    alone = _rate(work, clock, patience_s / 4, None)
    with ThreadPoolExecutor(1) as pool:
        both = _rate(work, clock, patience_s / 4, lambda stop: pool.submit(_until, stop, work))
        slots = max(1.0, min(2.0, 2 * both / alone))
        sent = min(_MANY_BYTES, max(_FEW_BYTES, round(links.all_to_all.per_s * patience_s / 32)))
        small, large = (
            _beside(work, _busy_wire(size, clock), clock, patience_s / 8, pool)
            for size in (_TINY, sent)
        )
    v2 = min(1.0, large.works / alone)
    share = max(0.0, slots - v2) if v2 < _FULL else 0.0
    bytes_alone, bytes_beside = large.alone - small.alone, large.beside - small.beside
    return Device(
        slots=slots,
        wire_cpu_share=min(share, 0.95),
        overlap_bandwidth=_speed(bytes_alone, bytes_beside),
        overlap_starts=_speed(small.alone, small.beside),
        copy=copy,
    )


def _speed(alone: float, beside: float) -> float:
    """Speed beside works over speed alone."""
    return max(0.02, min(1.0, alone / beside)) if 0 < alone < beside else 1.0


@dataclass(frozen=True)
class _Pair:
    """Seconds of a move alone and beside works, and works per second beside it."""

    alone: float
    beside: float
    works: float


def _copying(clock: Clock, count: int) -> Action:
    x = torch.zeros(count, device=clock.device)
    y = torch.empty_like(x)
    return lambda: y.copy_(x)


def _busy_wire(nbytes: int, clock: Clock) -> Action:
    """An all-to-all in which a rank sends about `nbytes`."""
    n = clock.group.size()
    context = ExchangeContext(group=clock.group)
    return _all_to_all(round(nbytes * n / (n - 1)), context, clock.device)[0]


def _until(stop: Event, action: Action) -> None:
    while not stop.is_set():
        action()


def _rate(
    work: Action, clock: Clock, patience_s: float, beside: Callable[[Event], Future[None]] | None
) -> float:
    """Works per second of this thread, with something else beside it; the mean over ranks."""
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
            running.result()
    return clock.mean(rate)


def _beside(
    work: Action, move: Action, clock: Clock, patience_s: float, pool: ThreadPoolExecutor
) -> _Pair:
    alone = clock.seconds(move, patience_s / 2)
    count = max(4, min(_MAX_MOVES, round(patience_s / alone)))
    clock.mean(0.0)
    task, start, works = pool.submit(_often, move, count), time.perf_counter(), 0
    while not task.done():
        work()
        works += 1
    rate = works / (time.perf_counter() - start)
    return _Pair(alone, clock.mean(task.result()), clock.mean(rate))


def _often(move: Action, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        move()
    return (time.perf_counter() - start) / count


def fitted(
    sizes: Sequence[int], clock: Clock, patience_s: float, action_of: Callable[[int], Action]
) -> LinearCost:
    """The linear cost of an action on values, from several sizes."""
    each = patience_s / len(sizes)
    return fit([(size, clock.throughput(action_of(size), each)) for size in sizes])
