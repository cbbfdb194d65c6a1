"""The bound and the sample of ecdq's steps. The definitions are in `_reference/ecdq_steps.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels import _coding
from laconic.kernels._triton.chunk import BLOCK

SAMPLE: tl.constexpr = tl.constexpr(_coding.SAMPLE)
LEVELS: tl.constexpr = tl.constexpr(_coding.LEVELS)
BINS: tl.constexpr = tl.constexpr(2 * _coding.LEVELS)  # the others are for blocks without a level
_SCALINGS: tl.constexpr = tl.constexpr(_coding.SCALINGS)
_UNIT: tl.constexpr = tl.constexpr(float(_coding.UNIT))
WIDE: tl.constexpr = tl.constexpr(4096)  # the same where one program looks at all of a segment


@triton.jit
def radius(level):
    """What the root mean square of a block of this level stays below."""
    return tl.sqrt(((level + 1).to(tl.int64) << 52).to(tl.float64, bitcast=True) / BLOCK)


@triton.jit
def _weight(part):
    """The weight of a block that is sampled with this probability."""
    return tl.maximum(tl.floor(part * _UNIT + 0.5).to(tl.int64), 1)


@triton.jit
def _point(j):
    """Where the j-th point lies, in shares of the weights."""
    hashed = (j.to(tl.uint32) * 0x9E3779B1) >> 16
    return j.to(tl.float64) + hashed.to(tl.float64) * (1 / 65536.0)


@triton.jit
def _points_below(y, share, points):
    """How many points lie below y."""
    j = tl.minimum((y.to(tl.float64) / share).to(tl.int32), points)
    return j + ((j < points) & (_point(j) * share < y.to(tl.float64))).to(tl.int32)


@triton.jit
def sample_alike(picked, teams, cap, blocks):
    """Sample blocks of equal weight: how many, how many of them are points', and all weights."""
    j = tl.arange(0, SAMPLE)
    taken = tl.minimum(blocks, SAMPLE)
    points, total = 0 * blocks, 0 * blocks.to(tl.int64)
    place, own = j, j * 0
    if blocks > SAMPLE:
        points = taken
        weight = _weight(cap / (blocks.to(tl.float64) * cap / SAMPLE))
        total = weight * blocks
        at = (_point(j) * (total.to(tl.float64) / SAMPLE)).to(tl.int64)
        place, own = (at // weight).to(tl.int32), own + weight.to(tl.int32)
    tl.store(picked + j, place, mask=j < taken)
    tl.store(picked + teams * SAMPLE + j, own, mask=j < taken)
    return taken, points, total


@triton.jit
def sample_blocks(levels, owns, picked, teams, highest, blocks, budget, delta, per_value):
    """The safe step; how many blocks are sampled, how many are points', and all weights."""
    i = tl.arange(0, BINS)
    counts = _count(levels, highest, blocks)
    radii = radius(highest - i)
    for _ in range(_SCALINGS):
        bound = tl.sum(counts.to(tl.float64) * tl.minimum(delta / per_value, radii), 0)
        delta = delta * tl.maximum(1.0, tl.sqrt(budget / (bound * BLOCK * delta)))
    worth = tl.minimum(delta / per_value, radii)
    sure, tau = _threshold(counts, worth)
    weights = tl.where((i >= sure) & (i < LEVELS), _weight(worth / tau), 0)
    total = tl.sum(counts.to(tl.int64) * weights, 0)
    certain = tl.sum(tl.where(i < sure, counts, 0), 0)
    points = tl.where(total > 0, SAMPLE - certain, 0)
    tl.store(owns + i, weights.to(tl.int32))
    tl.debug_barrier()  # before other threads load them
    _pick(levels, owns, picked, teams, highest, blocks, sure, certain, points, total)
    return delta, certain + points, points, total


@triton.jit
def _count(levels, highest, blocks):
    """Blocks of every level, from the highest down."""
    i = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for at in range(0, blocks, WIDE):
        b = at + tl.arange(0, WIDE)
        level = tl.load(levels + b, mask=b < blocks, other=0).to(tl.int32)
        place = tl.where(level > 0, tl.minimum(highest - level, LEVELS - 1), LEVELS)
        counts += tl.histogram(place, BINS)
    return tl.where(i < LEVELS, counts, 0)


@triton.jit
def _threshold(counts, worth):
    """How many levels, from the highest down, are taken for sure; and tau of the others."""
    i = tl.arange(0, BINS)
    tau = tl.sum(worth, 0) * 0.0 + 1.0
    sure = tl.sum(counts, 0) * 0 + LEVELS
    if tl.sum(counts, 0) > SAMPLE:
        sure = sure * 0
        moved = sure + 1
        while moved > 0:
            left = SAMPLE - tl.sum(tl.where(i < sure, counts, 0), 0)
            tau = tl.sum(tl.where(i >= sure, counts.to(tl.float64) * worth, 0.0), 0) / left
            more = tl.sum(((i < LEVELS) & ((i < sure) | (worth >= tau))).to(tl.int32), 0)
            moved = more - sure
            sure = more
    return sure, tau


@triton.jit
def _pick(levels, owns, picked, teams, highest, blocks, sure, certain, points, total):
    """Write down the sampled blocks and their weights, 0 for those that are taken for sure."""
    share = tl.maximum(total, 1).to(tl.float64) / tl.maximum(points, 1)
    weights = picked + teams * SAMPLE
    base, seen = total * 0, certain * 0
    for at in range(0, blocks, WIDE):
        b = at + tl.arange(0, WIDE)
        level = tl.load(levels + b, mask=b < blocks, other=0).to(tl.int32)
        place = tl.minimum(highest - level, LEVELS - 1)
        surely = (level > 0) & (place < sure)
        own = tl.load(owns + place, mask=(level > 0) & (place >= sure), other=0)
        end = base + tl.cumsum(own.to(tl.int64), 0)
        first, last = _points_below(end - own, share, points), _points_below(end, share, points)
        for k in tl.static_range(3):  # no weight is longer than two shares
            tl.store(picked + certain + first + k, b, mask=first + k < last)
            tl.store(weights + certain + first + k, own, mask=first + k < last)
        rank = seen + tl.cumsum(surely.to(tl.int32), 0) - 1
        tl.store(picked + rank, b, mask=surely)
        tl.store(weights + rank, b * 0, mask=surely)
        base += tl.sum(own.to(tl.int64), 0)
        seen += tl.sum(surely.to(tl.int32), 0)
