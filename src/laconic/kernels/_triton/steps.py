"""The steps of ecdq on the GPU. The definitions are in `_reference/ecdq.py`.

One kernel reads the tensor once, a program a chunk; another searches. There a segment's sampled
blocks are spread over a team of programs, which keep them in registers, try the same steps, and
add up what they find in one 64-bit word a trial.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import _coding
from laconic.kernels._coding import Subtract, sample_blocks
from laconic.kernels._triton.chunk import BLOCK, CHUNK, place_of
from laconic.kernels._triton.coding import chunks
from laconic.kernels._triton.scale import INTERPRETED, lift_of, magnitude, square
from laconic.kernels._triton.tile import OPTIONS

ALWAYS: tl.constexpr = tl.constexpr(int(Subtract.ALWAYS))
NEVER: tl.constexpr = tl.constexpr(int(Subtract.NEVER))
LARGEST: tl.constexpr = tl.constexpr(float(_coding.LARGEST))
_EVALUATIONS: tl.constexpr = tl.constexpr(_coding.EVALUATIONS)
_BISECTIONS: tl.constexpr = tl.constexpr(24)
_LIMIT: tl.constexpr = tl.constexpr(_coding.LARGEST * 65536.0)
_SLOTS: tl.constexpr = tl.constexpr(16)  # words of a team, one a trial
_MEMBER: tl.constexpr = tl.constexpr(1 << 40)  # in such a word: members counted, above their sum
_SPAN: tl.constexpr = tl.constexpr(1024)  # chunks looked at at once
# sampled blocks of a member; the interpreter runs programs in turn, so none may wait for another
_SHARE = _coding.SAMPLE if INTERPRETED.value else 8
_WARPS = {**OPTIONS, "num_warps": 8}


def ecdq_steps(
    x: Tensor,
    out: Tensor,
    parts: tuple[int, ...],
    *,
    error: float,
    step: float,
    max_bits: float,
    subtract: Subtract,
) -> None:
    """See the reference; the step may differ from its in the last bits."""
    place = chunks(parts, x)
    count = place.grid[0]
    squares = torch.empty(count, dtype=torch.float64, device=x.device)
    most = torch.empty(count, dtype=torch.int32, device=x.device)
    slots = torch.empty(len(parts) * _SLOTS.value + 1, dtype=torch.int64, device=x.device)
    _measure[place.grid](
        x, *place.tensors, most, squares, slots, x.numel(), len(parts), **place.options, **_WARPS
    )
    search = step == 0 and subtract is not Subtract.ALWAYS
    teams = _teams(parts, search, x.device)
    _choose[(teams[0].numel() // 2,)](
        x,
        out,
        *teams,
        most,
        squares,
        slots,
        len(parts),
        float(error),
        float(step),
        float(max_bits),
        SUBTRACT=int(subtract),
        SEARCH=search,
        SHARE=_SHARE,
        **_WARPS,
    )


@lru_cache(maxsize=256)
def _teams(
    parts: tuple[int, ...], search: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Members, segments, and sampled blocks.

    A member is its segment and its number in the team. A segment is where its chunks and its
    sampled blocks start, how many of each there are, and how many values are in it and sampled.
    """
    start, size = sample_blocks(parts)
    segments = np.zeros((len(parts), 6), np.int64)
    members = []
    for number, length in enumerate(parts):
        chunk_count, blocks = -(-length // _coding.CHUNK), -(-length // _coding.BLOCK)
        segments[number, 2:5] = chunk_count, min(blocks, _coding.SAMPLE), length
        team = -(-segments[number, 3] // _SHARE) if search else 1
        members += [(number, member) for member in range(team)]
    segments[1:, :2] = np.cumsum(segments[:-1, 2:4], axis=0)
    for row in segments:
        row[5] = size[row[1] : row[1] + row[3]].sum()
    columns = (np.array(members, np.int32), segments, start, size)
    a, b, c, d = (torch.from_numpy(column).to(device) for column in columns)
    return a.view(-1), b.view(-1), c, d


@triton.jit(do_not_specialize=["n", "teams"])
def _measure(
    x,
    starts,
    counts,
    segments,
    most,
    squares,
    slots,
    n,
    teams,
    SEGMENTS: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Bits of the largest magnitude, and the sum of squares, of a chunk. Clears the slots."""
    c = tl.program_id(0)
    start, count, _ = place_of(c, n, starts, counts, segments, SEGMENTS, NEAR)
    i = tl.arange(0, CHUNK)
    if count == CHUNK:
        v = tl.load(x + start + i).to(tl.float32)
    else:
        v = tl.load(x + start + i, mask=i < count, other=0.0).to(tl.float32)
    tl.store(most + c, tl.max(magnitude(v), 0))
    tl.store(squares + c, tl.sum(square(v), 0))
    slot = tl.arange(0, _SLOTS)
    tl.store(slots + c.to(tl.int64) * _SLOTS + slot, slot.to(tl.int64) * 0, mask=c < teams)
    tl.store(slots + teams * _SLOTS + c, c.to(tl.int64), mask=c == 0)


@triton.jit(do_not_specialize=["teams"], do_not_specialize_on_alignment=["out"])
def _choose(
    x,
    out,
    members,
    segments,
    starts,
    sizes,
    most,
    squares,
    slots,
    teams,
    error: tl.float64,
    step: tl.float64,
    max_bits: tl.float64,
    SUBTRACT: tl.constexpr,
    SEARCH: tl.constexpr,
    SHARE: tl.constexpr,
):
    """The step of a segment, by a team of programs.

    Members wait for each other, which must not depend on the order in which programs start:
    each draws a ticket, so that all teams but the last one drawn from are complete.
    """
    ticket = tl.atomic_add(slots + teams * _SLOTS, 1)
    s, member = tl.load(members + 2 * ticket), tl.load(members + 2 * ticket + 1)
    segment = segments + s * 6
    first, chunks, length = tl.load(segment), tl.load(segment + 2), tl.load(segment + 4)
    top, total = _totals(most + first, squares + first, chunks)
    delta = total * 0.0
    usual = (top > 0) & (top < 0x7F800000)
    if usual:
        rms = tl.sqrt(total / length)
        delta = step * rms
        if SEARCH:
            delta = _for_error(
                x, starts, sizes, segment, slots + s * _SLOTS, member, error, rms, SUBTRACT, SHARE
            )
        elif SUBTRACT == ALWAYS:
            delta = tl.where(step > 0, delta, rms * tl.sqrt(12 * error))
        delta = tl.maximum(delta, top.to(tl.float32, bitcast=True).to(tl.float64) / LARGEST)
        if max_bits > 0:
            delta = _for_bits(most + first, chunks, length, top, max_bits, delta)
    above = tl.minimum(delta, 3.4e38).to(tl.float32).to(tl.int32, bitcast=True) + 1
    above = tl.where(usual, above, tl.where(top == 0, 0, 0x7FC00000))
    tl.store(out + s, above.to(tl.float32, bitcast=True), mask=member == 0)


@triton.jit
def _totals(most, squares, chunks):
    """Largest magnitude's bits and sum of squares of a segment."""
    top = tl.zeros((_SPAN,), tl.int32)
    total = tl.zeros((_SPAN,), tl.float64)
    for at in range(0, chunks, _SPAN):
        i = at + tl.arange(0, _SPAN)
        top = tl.maximum(top, tl.load(most + i, mask=i < chunks, other=0))
        total += tl.load(squares + i, mask=i < chunks, other=0.0)
    return tl.max(top, 0), tl.sum(total, 0)


@triton.jit
def _for_error(
    x,
    starts,
    sizes,
    segment,
    slots,
    member,
    error,
    rms,
    SUBTRACT: tl.constexpr,
    SHARE: tl.constexpr,
):
    """The largest step found at which the sample's error is no more than wished."""
    sampled = tl.load(segment + 3).to(tl.int32)
    values = tl.load(segment + 5)
    row = member * SHARE + tl.arange(0, SHARE)
    at = tl.load(segment + 1) + row
    size = tl.load(sizes + at, mask=row < sampled, other=0)
    i = tl.arange(0, BLOCK)[None, :]
    place = tl.load(starts + at, mask=row < sampled, other=0)[:, None] + i
    v = tl.load(x + place, mask=i < size[:, None], other=0.0).to(tl.float32)
    team = (sampled + (SHARE - 1)) // SHARE
    # the error is at most Δ²/12 where blocks may subtract, Δ²/4 where they may not
    low = rms * tl.sqrt((4 if SUBTRACT == NEVER else 12) * error)
    high = low * 0.0  # none yet
    share = _share(v, size, low, slots, team, SUBTRACT) / values
    round = 1
    while round <= _EVALUATIONS:
        trial = tl.minimum(2 * low, rms * tl.sqrt(error / tl.maximum(share, 1e-12)))
        trial = tl.where(high > 0, tl.sqrt(low * high), trial)
        if trial < low * 1.01:
            round = _EVALUATIONS + 1
        else:
            there = _share(v, size, trial, slots + round, team, SUBTRACT) / values
            fits = trial * trial * there <= error * rms * rms
            low, high = tl.where(fits, trial, low), tl.where(fits, high, trial)
            share = tl.where(fits, there, share)
            round += 1
    return low


@triton.jit
def _share(v, size, delta, slot, team, SUBTRACT: tl.constexpr):
    """Error of all sampled values, in squared steps: the team's members add up theirs.

    In integers, which any order gives: 12·2^16 of them are a squared step.
    """
    step = delta.to(tl.float32)
    lift = lift_of(step)
    times = tl.div_rn(step * 0.0 + 65536.0, step * lift)
    own = 12 * tl.sum(spread(nearest(limited((v * lift) * times))), 1)
    if SUBTRACT != NEVER:
        own = tl.minimum(own, 65536 * size)
    tl.atomic_add(slot, tl.sum(own.to(tl.int64), 0) + _MEMBER, sem="relaxed")
    found = tl.atomic_add(slot, 0, sem="relaxed")
    while found // _MEMBER < team:
        found = tl.atomic_add(slot, 0, sem="relaxed")
    return (found % _MEMBER).to(tl.float64) / (12 * 65536.0)


@triton.jit
def _for_bits(most, chunks, length, top, max_bits, delta):
    """The smallest step found, from delta on, whose bit planes keep to max_bits a value."""
    blocks = (length + (BLOCK - 1)) // BLOCK
    room = max_bits * blocks.to(tl.float64)
    if _planes(most, chunks, length, delta) > room:
        low, high = delta, top.to(tl.float32, bitcast=True).to(tl.float64) * 1.0001
        for _ in range(_BISECTIONS):
            middle = tl.sqrt(low * high)
            fits = _planes(most, chunks, length, middle) <= room
            low, high = tl.where(fits, low, middle), tl.where(fits, middle, high)
        delta = high
    return delta


@triton.jit
def _planes(most, chunks, length, delta):
    """Bit planes of all blocks that no dither can exceed."""
    total = tl.zeros((_SPAN,), tl.int64)
    per_step = 1.0 / delta
    for at in range(0, chunks, _SPAN):
        i = at + tl.arange(0, _SPAN)
        bits = tl.load(most + i, mask=i < chunks, other=0)
        level = bits.to(tl.float32, bitcast=True).to(tl.float64) * per_step
        level = level * (1 + 2.0**-18) + 2.0**-15
        bound = tl.minimum(level, 65536.0).to(tl.int32) + 1
        width = (bound.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 125
        values = tl.minimum(length - i.to(tl.int64) * CHUNK, CHUNK)
        total += (values + (BLOCK - 1)) // BLOCK * tl.where(bits > 0, width, 0)
    return tl.sum(total, 0).to(tl.float64)


# --- fixed point ---------------------------------------------------------------------------


@triton.jit
def limited(v):
    """Within the range of fixed point."""
    return tl.minimum(tl.maximum(v, -_LIMIT), _LIMIT)


@triton.jit
def nearest(v):
    """floor(v + ½)."""
    return tl.floor(v + 0.5).to(tl.int32)


@triton.jit
def spread(t):
    """2^16·φ(1-φ), φ the fraction of a fixed-point number, to 8 bits."""
    part = (t >> 8) & 0xFF
    return part * (256 - part)
