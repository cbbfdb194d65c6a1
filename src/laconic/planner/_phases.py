"""Every exchange as works and moves: what a rank does with one bucket, one thing after another.

n ranks, d values to encode, c = d/n a chunk, p plain values of 4 bytes; b and b' bits a value out
and back, h = 64 + 16 bytes a header and a message's frame, f = 16 a frame alone. E(v, k), D(v, k)
encode and decode v values in k calls; A(s), X(s) and H(s) are all-reduce, swap and hop in which a
rank sends s bytes; S is a sum of 4(n+p) bytes in our own messages, at once or in two swaps (4p
where there is no norm). κ is not here: it changes b.

    none       A(2(n-1)/n·w·d), w bytes a value
    allreduce  [norm(d),] S, E(d, 1), A(2(n-1)/n·(b·d/8 + 4n)), reduce(d), D(d, 1)
    scatter-   E((n-1)c, n-1), [X(f(n-1)),] X((n-1)(b·c/8 + h) + 4p·(n-1)/n), D((n-1)c, n-1),
    reduce     E(c, 1), [X(f(n-1)),] X((n-1)(b'·c/8 + h) + 4p·(n-1)/n), D(d, n)
    nested     as scatter-reduce
    allgather  E(d, 1), [X(f(n-1)),] X((n-1)(b·d/8 + h + 4p)), D(n·d, n)
    sparse     norm(d), S, as allgather
    tree       norm(d), S, E(d, n), for rounds k = 0 .. ⌈log2 n⌉ - 1 with m_k chunks:
               H(m_k·(b·c/8 + 64) + f), reduce(m_k·c);  X((n-1)(b·c/8 + h)), D(d, n)
    ring       norm(d), S, E(c, 4), for hops k = 1 .. 2(n-1) of up to 4 pieces: H(w_k·c/8 + f each),
               then E(c, 4) + reduce(c, 4) while k < n, D(c, 4) later
    hierarchi- X_in((L-1)/L·w·d), the inner exchange of d/L values among K nodes,
    cal        X_in((L-1)/L·w·d)

In brackets: where there is a shared norm; where lengths vary. The length's swap is a latency.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from laconic.errors import ConfigError
from laconic.exchanges import pair
from laconic.exchanges._allreduce import CHECK_BYTES
from laconic.exchanges._frame import FRAME_BYTES
from laconic.exchanges._ring import PIECE_VALUES, sum_bits
from laconic.exchanges._transport import checked_sum_bytes, sums_at_once
from laconic.planner._cluster import Cluster, CodecCost, Device, Links
from laconic.planner._line import Line
from laconic.planner._timeline import Move, Task, Work

_WIRE_HEADER = 64
_HEADER = _WIRE_HEADER + FRAME_BYTES
_PIECES = 4  # of a ring's chunk

Phases = list[Task]


@dataclass(frozen=True, kw_only=True)
class Load:
    """A bucket's values, and what the codec makes of them."""

    encoded: float
    plain: float
    cost: CodecCost
    varies: bool  # lengths travel before the wires
    shared_norm: bool
    value_bytes: int = 4
    levels: int = 0  # of one gradient, where a ring adds integers


def phases(exchange: str, load: Load, cluster: Cluster) -> Phases:
    """What a rank does with a bucket; ConfigError for an exchange without a formula."""
    if exchange == "hierarchical":
        return _hierarchical(load, cluster)
    return _flat(exchange, load, cluster.flat, cluster.device)


def _flat(exchange: str, load: Load, links: Links, device: Device) -> Phases:
    if exchange not in _FLAT:
        raise ConfigError(f"the cost model knows {', '.join(_FLAT)}, hierarchical, not {exchange}")
    return _FLAT[exchange](load, links, device)


def allreduce(payload: float, links: Links) -> Move:
    """The backend's, of so many bytes: its fastest algorithm."""
    sent = ring_bytes(payload, links.ranks)
    best = min(links.allreduce, key=lambda line: line.seconds(sent))
    return _move(best, sent)


def ring_bytes(payload: float, ranks: int) -> float:
    """What a rank sends in a ring's all-reduce."""
    return 2 * (ranks - 1) / ranks * payload


def _move(line: Line, nbytes: float) -> Move:
    return Move(line.start_s, nbytes / line.per_s, nbytes)


def _allreduce(load: Load, links: Links, device: Device) -> Phases:
    cost, d = load.cost, load.encoded
    if load.cost.spec == "none":
        payload = load.value_bytes * (d + load.plain)
        return [allreduce(payload, links), Work(device.copy.seconds(d + load.plain))]
    return [
        *_norm_or_rest(load, links),
        Work(cost.encode.seconds(d)),
        allreduce(cost.bits_out / 8 * d + CHECK_BYTES * links.ranks, links),
        Work(cost.reduce.seconds(d) + cost.decode.seconds(d)),
    ]


def _norm_or_rest(load: Load, links: Links) -> Phases:
    """The shared scale and plain values in one message, or plain values alone."""
    if load.shared_norm:
        norm = Work(load.cost.norm.seconds(load.encoded))
        return [norm, *_small_sum(4 * (links.ranks + load.plain), links)]
    return _small_sum(4 * load.plain, links) if load.plain else []


def _small_sum(nbytes: float, links: Links) -> Phases:
    """In messages that can be checked."""
    sent = checked_sum_bytes(nbytes, links.ranks)
    if sums_at_once(nbytes, links.ranks):
        return [_move(links.swap, sent)]
    return [_move(links.swap, sent / 2)] * 2


def _scatter_reduce(load: Load, links: Links, device: Device) -> Phases:
    return [
        *scatter(load, links, device),
        *gather(load, links),
    ]


def scatter(load: Load, links: Links, device: Device) -> Phases:
    """Every chunk to its owner, who adds."""
    n, cost = links.ranks, load.cost
    c, others = load.encoded / n, n - 1
    sent = others * (cost.bits_out / 8 * c + _HEADER) + 4 * load.plain * others / n
    return [
        Work(cost.encode.seconds(others * c, others)),
        *_lengths(load, links),
        _move(links.swap, sent),
        Work(device.copy.seconds(2 * c) + cost.decode.seconds(others * c, others)),
    ]


def gather(load: Load, links: Links) -> Phases:
    """Every owner's chunk to all."""
    n, cost = links.ranks, load.cost
    c, others = load.encoded / n, n - 1
    sent = others * (cost.bits_back / 8 * c + _HEADER) + 4 * load.plain * others / n
    return [
        Work(cost.encode.seconds(c)),
        *_lengths(load, links),
        _move(links.swap, sent),
        Work(cost.decode.seconds(load.encoded, n)),
    ]


def _lengths(load: Load, links: Links) -> Phases:
    return [_move(links.swap, FRAME_BYTES * (links.ranks - 1))] if load.varies else []


def _allgather(load: Load, links: Links, device: Device) -> Phases:
    n, cost, d = links.ranks, load.cost, load.encoded
    sent = (n - 1) * (cost.bits_out / 8 * d + _HEADER + 4 * load.plain)
    return [
        Work(cost.encode.seconds(d)),
        *_lengths(load, links),
        _move(links.swap, sent),
        Work(cost.decode.seconds(n * d, n)),
    ]


def _sparse(load: Load, links: Links, device: Device) -> Phases:
    n, cost, d = links.ranks, load.cost, load.encoded
    return [
        *_norm_or_rest(load, links),
        Work(cost.encode.seconds(d)),
        *_lengths(load, links),
        _move(links.swap, (n - 1) * (cost.bits_out / 8 * d + _HEADER)),
        Work(cost.decode.seconds(n * d, n) + device.copy.seconds(d)),
    ]


def _tree(load: Load, links: Links, device: Device) -> Phases:
    n, cost, d = links.ranks, load.cost, load.encoded
    c = d / n
    found = [*_norm_or_rest(load, links), Work(cost.encode.seconds(d, n))]
    for stride in (1 << k for k in range(math.ceil(math.log2(n)))):
        chunks = len(range(stride, n, 2 * stride))
        found += [
            _move(links.hop, chunks * (cost.bits_out / 8 * c + _WIRE_HEADER) + FRAME_BYTES),
            Work(cost.reduce.seconds(chunks * c, chunks)),
        ]
    sent = (n - 1) * (cost.bits_out / 8 * c + _HEADER)
    return [*found, _move(links.swap, sent), Work(cost.decode.seconds(d, n))]


def _ring(load: Load, links: Links, device: Device) -> Phases:
    """Pieces of a chunk overlap with each other in truth; here a hop is its wire, then its work."""
    n, cost = links.ranks, load.cost
    c = load.encoded / n
    adding = cost.encode.seconds(c, _PIECES) + cost.reduce.seconds(c, _PIECES)
    found = [*_norm_or_rest(load, links), Work(cost.encode.seconds(c, _PIECES))]
    frames = FRAME_BYTES * min(_PIECES, math.ceil(c / PIECE_VALUES))
    for hop in range(1, 2 * n - 1):
        work = adding if hop < n else cost.decode.seconds(c, _PIECES)
        sent = sum_bits(load.levels, min(hop, n)) / 8 * c + frames
        found += [_move(links.hop, sent), Work(work)]
    return found


def _hierarchical(load: Load, cluster: Cluster) -> Phases:
    """Values travel as they are inside a node, in their own dtype."""
    inside, between = cluster.inside, cluster.between
    if inside is None or between is None:
        raise ConfigError("hierarchical needs nodes with several workers")
    lanes = inside.ranks
    d, p = load.encoded, load.plain
    local = (lanes - 1) / lanes * (load.value_bytes * d + 4 * p)
    part = replace(load, encoded=d / lanes, plain=p / lanes)
    step = Move(inside.swap.start_s, local / inside.swap.per_s)
    add = Work(cluster.device.copy.seconds(d))  # lanes parts of 1/lanes each
    inner = _flat(default_exchange_name(load.cost.spec), part, between, cluster.device)
    return [step, add, *inner, step]


@cache
def default_exchange_name(spec: str) -> str:
    """As the codec's own."""
    return pair(spec)[1].name


_FLAT: dict[str, Callable[[Load, Links, Device], Phases]] = {
    "allreduce": _allreduce,
    "scatter-reduce": _scatter_reduce,
    "nested": _scatter_reduce,
    "allgather": _allgather,
    "sparse": _sparse,
    "tree": _tree,
    "ring": _ring,
}


def paper_tree(nbytes: float, links: Links, ratio: float, reduce: Line, slower: float) -> Phases:
    """Global-QSGD's model of a tree all-reduce: whole buffers, up and down again, not cut.

        T = 2·log n·α + 2·log n·S/(ρ·β) + log n·ω·S/(ρ·γ)

    S bytes, ρ times fewer on the wire, γ the speed of plain reduction in bytes, ω times slower for
    encoded ones. Encoding is free. Against ρ = ω = 1 it pays where

        2·(1 - 1/ρ)/β > (ω/ρ - 1)/γ,   at ρ = 4:   β < 6γ/(ω - 4)

    Xin et al., Global-QSGD, 2025, arXiv 2305.18627. Our `tree` cuts the tensor into chunks with a
    tree each, so that a rank sends 2·(n-1)/n of it, not 2·log n times.
    """
    levels = math.log2(links.ranks)
    up = [_move(links.hop, nbytes / ratio), Work(slower * reduce.seconds(nbytes / ratio))]
    down = [_move(links.hop, nbytes / ratio)]
    whole = int(levels)
    if whole != levels:
        raise ConfigError("the paper's formula is for powers of two of workers")
    return [*up * whole, *down * whole]
