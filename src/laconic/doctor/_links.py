"""Rates of links: pairs of ranks, one pair after another, so that nobody shares the network."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._records import record
from laconic._units import seconds
from laconic.comm._context import ExchangeContext
from laconic.comm._frame import FRAME_BYTES
from laconic.comm._point_to_point import sendrecv
from laconic.doctor._facts import Facts
from laconic.doctor._finding import Finding, fine, problem

_EVERY_PAIR = 8  # ranks up to which all pairs are measured; more are measured in a ring
_TINY, _SMALLEST, _LARGEST, _TIMES = 16, 1 << 16, 1 << 24, 4  # bytes
_ROUNDS, _REPEATS = 8, 3
_APART = 4.0  # times: links between hosts that differ so much are not of one kind


@dataclass(frozen=True, kw_only=True)
class PairCost:
    """Seconds of a tiny message; bits per second in the slower direction."""

    ranks: tuple[int, int]
    tiny_s: float
    bit_s: float


def pairs(size: int) -> list[tuple[int, int]]:
    """Those that are measured.

    >>> pairs(3)
    [(0, 1), (0, 2), (1, 2)]
    """
    if size <= _EVERY_PAIR:
        return list(combinations(range(size), 2))
    return [(rank, (rank + 1) % size) for rank in range(size)]


def measure(group: dist.ProcessGroup, patience_s: float) -> list[PairCost]:
    """Of the pairs of which this rank is the first; all ranks call it at once."""
    context, found = ExchangeContext(group=group), []
    chosen = pairs(group.size())
    for first, second in chosen:
        if context.rank in (first, second):
            peer = second if context.rank == first else first
            tiny, rate = _pair(peer, context, patience_s / len(chosen))
            if context.rank == first:
                found.append(PairCost(ranks=(first, second), tiny_s=tiny, bit_s=rate))
        dist.barrier(group=group)
    return found


def _pair(peer: int, context: ExchangeContext, patience_s: float) -> tuple[float, float]:
    """Seconds of a tiny message, and bits per second of the slower direction."""
    _told(0.0, peer, context)  # what is compiled or connected first
    tiny = min(_seconds(0, peer, context, sends=False) for _ in range(_ROUNDS))
    ways = [_rate(sends, tiny, peer, context, patience_s / 2) for sends in (True, False)]
    return tiny, min(ways)


def _rate(
    first: bool, tiny_s: float, peer: int, context: ExchangeContext, patience_s: float
) -> float:
    """Payloads grow until one takes a part of the time, as both ranks agree."""
    nbytes, sends = _SMALLEST, (context.rank < peer) == first
    while True:
        own = min(_seconds(nbytes, peer, context, sends=sends) for _ in range(_REPEATS))
        spent = statistics.mean(_told(own, peer, context))
        if spent > patience_s / (2 * _REPEATS) or nbytes >= _LARGEST:
            return 8 * nbytes / max(spent - tiny_s, 0.05 * spent)
        nbytes *= _TIMES


def _seconds(nbytes: int, peer: int, context: ExchangeContext, *, sends: bool) -> float:
    """From when both ranks are there to when both know that so many bytes have come."""
    message, none = (
        torch.zeros(size, dtype=torch.uint8) for size in (FRAME_BYTES + nbytes if nbytes else 0, 0)
    )
    leaving, arriving = (message, none) if sends else (none, message)
    _told(0.0, peer, context)
    start = time.perf_counter()
    sendrecv(leaving, peer, arriving, peer, "doctor", context).wait(context)
    _told(0.0, peer, context)
    return time.perf_counter() - start


def _told(value: float, peer: int, context: ExchangeContext) -> tuple[float, float]:
    """This rank's number and the other's, in the order of ranks."""
    mine, theirs = (torch.zeros(FRAME_BYTES + _TINY, dtype=torch.uint8) for _ in range(2))
    _number(mine)[0] = value
    got = sendrecv(mine, peer, theirs, peer, "doctor", context).wait(context)
    other = float(got[:8].clone().view(torch.float64))
    return (value, other) if context.rank < peer else (other, value)


def _number(message: Tensor) -> Tensor:
    return message[FRAME_BYTES : FRAME_BYTES + 8].view(torch.float64)


def to_json(found: Sequence[PairCost]) -> str:
    """One line."""
    return json.dumps([asdict(one) for one in found])


def from_json(text: str) -> list[PairCost]:
    """ValueError for anything else."""
    return [record(PairCost, one) for one in json.loads(text)]


def check_links(found: Sequence[PairCost], rows: Sequence[Facts]) -> Iterator[Finding]:
    """The slowest and the fastest; between hosts they should be alike."""
    if not found:
        return
    slow, fast = (pick(found, key=lambda one: one.bit_s) for pick in (min, max))
    late = max(found, key=lambda one: one.tiny_s)
    text = f"slowest {_named(slow)}, fastest {_named(fast)}" if len(found) > 1 else _named(slow)
    text += f"; a tiny message takes up to {seconds(late.tiny_s)}"
    between = [one for one in found if len({rows[rank].place for rank in one.ranks}) > 1]
    rates = [one.bit_s for one in between]
    if rates and max(rates) > _APART * min(rates):
        worst = min(between, key=lambda one: one.bit_s)
        yield problem(
            "links",
            text,
            f"look at the interface and the cable between ranks {worst.ranks[0]} and "
            f"{worst.ranks[1]}: other links between hosts are {max(rates) / min(rates):.0f} times "
            "as fast",
            worst.ranks,
        )
    else:
        yield fine("links", text)


def _named(one: PairCost) -> str:
    return f"ranks {one.ranks[0]} and {one.ranks[1]}: {one.bit_s / 1e6:,.0f} Mbit/s"
