"""What it costs these ranks to talk: the library's own transport, over messages of many sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from laconic.exchanges import Call
from laconic.exchanges._point_to_point import fly
from laconic.exchanges._transport import Message, no_values, sum_in_place, swap
from laconic.exchanges._wires import Sizes
from laconic.planner._clock import Clock
from laconic.planner._cluster import Links
from laconic.planner._line import Line
from laconic.planner._phases import ring_bytes

_SMALLEST, _LARGEST, _TIMES = 1 << 10, 1 << 26, 4  # bytes of a payload, and their steps
_GRAIN = 16


def probe_links(clock: Clock, patience_s: float, group: dist.ProcessGroup | None = None) -> Links:
    """Lines of all-reduce, swap and hop; all ranks of the clock's group at once.

    With `group`, a part of those ranks, they talk in their parts, all parts at the same time: what
    nodes or lanes share, they share here, too.
    Sizes grow until one message takes half of the time that a kind may have.
    """
    call = Call(group=group or clock.group)
    each = patience_s / 3
    return Links(
        ranks=call.size,
        allreduce=(_line(_reducing, call, clock, each),),
        swap=_line(_swapping, call, clock, each),
        hop=_line(_hopping, call, clock, each),
    )


def _line(
    kind: Callable[[int, Call, torch.device], tuple[Callable[[], object], float]],
    call: Call,
    clock: Clock,
    patience_s: float,
) -> Line:
    points, size = [], _SMALLEST
    while size <= _LARGEST:
        action, sent = kind(size, call, clock.device)
        seconds = clock.seconds(action, patience_s / 12)
        points.append((sent, seconds))
        size *= _TIMES
        if _TIMES * seconds > patience_s / 2 and len(points) > 2:
            break
    return _through_ends(points)


def _through_ends(points: Sequence[tuple[float, float]]) -> Line:
    """What the two smallest sizes take is a start, what the two largest take beyond it are bytes.

    An idle link (its buffers, a token bucket) lets a burst through at once. Sizes in the middle
    would make the link look faster than it is for whoever keeps it busy.
    """
    start = statistics.mean(t for _, t in points[:2])
    per_byte = statistics.mean(max(t - start, 0.05 * t) / x for x, t in points[-2:])
    line = Line(start_s=start, per_s=1 / per_byte)
    return replace(line, spread=line.off(points))


def _reducing(size: int, call: Call, device: torch.device) -> tuple[Callable[[], object], float]:
    x = torch.zeros(size // 4, device=device)
    return lambda: sum_in_place(x, call), ring_bytes(size, call.size)


def _swapping(size: int, call: Call, device: torch.device) -> tuple[Callable[[], object], float]:
    """A chunk of the payload to every other rank."""
    n, rank = call.size, call.rank
    chunk = max(_GRAIN, size // n // _GRAIN * _GRAIN)
    x = torch.zeros(chunk, dtype=torch.uint8, device=device)
    lengths = [0 if i == rank else chunk for i in range(n)]
    messages = [Message(x[:length], no_values(x)) for length in lengths]
    sizes = Sizes(tuple(lengths), known=True)
    return lambda: swap(messages, call, sizes, [0] * n), (n - 1) * chunk


def _hopping(size: int, call: Call, device: torch.device) -> tuple[Callable[[], object], float]:
    n, rank = call.size, call.rank
    chunk = max(_GRAIN, size // n // _GRAIN * _GRAIN)
    mine, theirs = (torch.zeros(chunk, dtype=torch.uint8, device=device) for _ in range(2))

    def hop() -> None:
        fly(mine, (rank + 1) % n, theirs, (rank - 1) % n, "probe", call).wait(call)

    return hop, chunk


def swaps(nbytes: float, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """A swap in which a rank sends about so many bytes, for whoever wants the wire busy."""
    call = Call(group=group)
    return _swapping(round(nbytes * call.size / (call.size - 1)), call, device)[0]
