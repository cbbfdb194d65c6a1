"""Tiles of groups: where lanes find their values, what they draw, how they scale and pack them.

Inside a program every offset is a 32-bit one from the tile's first element; only that element's
place in the tensor needs 64 bits.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl

from laconic._key import Stream
from laconic.kernels import _layout
from laconic.kernels._layout import GROUP

# kernels round as written: a fused multiply-add would change bytes
OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}
TILE = 1024  # values a program; one warp, so that scales need no barrier
MAX_ROW = 4096


def words(stream: Stream | None) -> tuple[int, ...]:
    """The stream's words as signed integers, so that a launch always sees the same type."""
    return tuple(k - (1 << 32) if k >> 31 else k for k in stream or (0, 0))


def shape(block: int) -> dict[str, int]:
    """Launch arguments ROWS and W. A row is a block, if blocks are powers of two up to MAX_ROW."""
    row = block if GROUP <= block <= MAX_ROW and block & (block - 1) == 0 else TILE
    return {"ROWS": max(1, TILE // row), "W": row // 2}


def programs(count: int, shape: dict[str, int]) -> tuple[int]:
    """The grid that covers `count` values."""
    return (triton.cdiv(count, shape["ROWS"] * shape["W"] * 2),)


@triton.jit
def tile_start(n, ROWS: tl.constexpr, W: tl.constexpr):
    """First element of this program (int64), and how many of its values are real (int32)."""
    base = tl.program_id(0).to(tl.int64) * (2 * ROWS * W)
    return base, tl.minimum(n - base, 2 * ROWS * W).to(tl.int32)


@triton.jit
def lanes(ROWS: tl.constexpr, W: tl.constexpr):
    """Group and number of each lane: its values are 128·group + lane % 64 and the one 64 further.

    Addresses are made of these two, not of their sum, so that Triton sees which are neighbours.
    """
    lane = tl.arange(0, W)[None, :]
    return (tl.arange(0, ROWS) * (W // 64))[:, None] + lane // 64, lane


@triton.jit
def load2(ptr, e, left):
    """The lane's values as float32, zero beyond the end."""
    a = tl.load(ptr + e, mask=e < left, other=0.0).to(tl.float32)
    return a, tl.load(ptr + e + 64, mask=e + 64 < left, other=0.0).to(tl.float32)


@triton.jit
def mix(p, k0, k1):
    """Draw p of stream (k0, k1); all uint32."""
    h = p * 0x9E3779B1 + k0
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ (h >> 15)
    h = h ^ k1
    h = h * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def dither2(base, group, lane, k0, k1, FRACTION: tl.constexpr):
    """The dither of the lane's values: low and high half of one draw."""
    p = (base // 2).to(tl.uint32) + (group * 64 + lane % 64).to(tl.uint32)
    h = mix(p, k0.to(tl.uint32), k1.to(tl.uint32))
    low = ((h & 0xFFFF) >> (16 - FRACTION)).to(tl.int32)
    return low, (h >> (32 - FRACTION)).to(tl.int32)


@triton.jit
def strata2(r, s, workers, shift, FRACTION: tl.constexpr):
    """(workers·r + shift) mod 2^F, and of s."""
    RING: tl.constexpr = (1 << FRACTION) - 1
    return (workers * r + shift) & RING, (workers * s + shift) & RING


@triton.jit
def pack2(
    ptr, base, group, lane, left, c, d, BITS: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr
):
    """Write the codes (of BITS bits, nothing above) of a tile's lanes."""
    ptr += (base // 128) * (16 * BITS)
    p = ptr + (group * (16 * BITS) + lane % 64)
    real = group * 128 < left
    if BITS == 8:
        tl.store(p, (c ^ 0x80).to(tl.uint8), mask=real)
        tl.store(p + 64, (d ^ 0x80).to(tl.uint8), mask=real)
    elif BITS == 4:
        tl.store(p, (c | (d << 4)).to(tl.uint8), mask=real)
    else:
        if BITS & 4:
            tl.store(p, ((c & 15) | ((d & 15) << 4)).to(tl.uint8), mask=real)
        if BITS & 2:
            plane(ptr, left, c >> (BITS & 4), d >> (BITS & 4), 2, BITS & 4, BITS, ROWS, W)
        if BITS & 1:
            plane(ptr, left, c >> (BITS & 6), d >> (BITS & 6), 1, BITS & 6, BITS, ROWS, W)


@triton.jit
def plane(
    ptr,
    left,
    c,
    d,
    P: tl.constexpr,
    BEFORE: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    """Write a plane of P = 2 or 1 bits: a byte takes 4/P lanes, 16·P apart."""
    LANES: tl.constexpr = 4 // P
    GROUPS: tl.constexpr = ROWS * W // 64
    if BEFORE + P < BITS:  # bits of planes above
        c, d = c & ((1 << P) - 1), d & ((1 << P) - 1)
    fields = c | (d << 4)
    fields = tl.reshape(fields, (GROUPS, LANES, 16 * P))
    shift = (tl.arange(0, LANES) * P)[None, :, None]
    byte = tl.sum(fields << shift, 1)
    group = tl.arange(0, GROUPS)[:, None]
    to = ptr + group * (16 * BITS) + 16 * BEFORE + tl.arange(0, 16 * P)[None, :]
    tl.store(to, byte.to(tl.uint8), mask=group * 128 < left)


@triton.jit
def unpack2(ptr, base, group, lane, left, BITS: tl.constexpr):
    """The codes of the lane's values."""
    ptr += (base // 128) * (16 * BITS)
    p = ptr + (group * (16 * BITS) + lane % 64)
    if BITS == 8:  # a sum of 8-bit codes comes without padding
        e = group * 128 + lane % 64
        c = tl.load(p, mask=e < left, other=0).to(tl.int32) ^ 0x80
        d = tl.load(p + 64, mask=e + 64 < left, other=0).to(tl.int32) ^ 0x80
    else:
        real = group * 128 < left
        c, d = group * 0, group * 0
        if BITS & 4:
            a = tl.load(p, mask=real, other=0).to(tl.int32)
            c, d = a & 15, a >> 4
        if BITS & 2:
            p = ptr + (group * (16 * BITS) + 16 * (BITS & 4) + lane % 32)
            a = tl.load(p, mask=real, other=0).to(tl.int32) >> ((lane // 32) % 2 * 2)
            c, d = c | ((a & 3) << (BITS & 4)), d | (((a >> 4) & 3) << (BITS & 4))
        if BITS & 1:
            p = ptr + (group * (16 * BITS) + 16 * (BITS & 6) + lane % 16)
            a = tl.load(p, mask=real, other=0).to(tl.int32) >> ((lane // 16) % 4)
            c, d = c | ((a & 1) << (BITS & 6)), d | (((a >> 4) & 1) << (BITS & 6))
    return c, d


# --- scales of blocks, and the factors that encode and decode make of them ----------------


TINY: tl.constexpr = tl.constexpr(_layout.TINY)
LIFT: tl.constexpr = tl.constexpr(_layout.LIFT)
INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)


@triton.jit
def magnitude(x):
    """Bits of |x|: as integers they order like magnitudes, NaN and infinity on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def square(x):
    """x² in double precision."""
    return x.to(tl.float64) * x.to(tl.float64)


@triton.jit
def finish(m, squares, KIND: tl.constexpr):
    """The scale, from the largest magnitude's bits and (KIND 2) the sum of squares."""
    norm = m.to(tl.float32, bitcast=True)
    if KIND == 2:
        norm = tl.maximum(tl.minimum(tl.sqrt(squares), LARGEST).to(tl.float32), norm)
    return tl.where(m >= 0x7F800000, float("nan"), norm)


@triton.jit
def scale_of(ptr, base, e, left, BLOCK: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr):
    """The scales of a tile's values: one a row, (ROWS, 1), where rows do not cross blocks.

    BLOCK 0 means one for the whole tensor. Otherwise one a lane, at the values e.
    """
    row = tl.arange(0, ROWS)[:, None]
    if BLOCK == 2 * W:
        return tl.load(ptr + base // BLOCK + row, mask=row * BLOCK < left, other=0.0)
    elif BLOCK == 0:
        return tl.load(ptr + row * 0)
    elif BLOCK % (2 * ROWS * W) == 0:
        return tl.load(ptr + base // BLOCK + row * 0)
    else:
        index = ((base.to(tl.uint32) + e.to(tl.uint32)) // BLOCK).to(tl.int32)
        return tl.load(ptr + index, mask=e < left, other=0.0)


@triton.jit
def usable(size):
    """A scale that can be divided by."""
    bits = size.to(tl.int32, bitcast=True)
    return (bits > 0) & (bits < 0x7F800000)


@triton.jit
def lift_of(size):
    """Power of two that keeps 1/scale finite."""
    return tl.where(size < TINY, LIFT, 1.0)


@triton.jit
def lower_of(size):
    """What undoes the lift."""
    return tl.where(size < TINY, 1.0 / LIFT, 1.0)


@triton.jit
def factor(size, gain):
    """The float just below gain/scale (of the lifted scale)."""
    below = tl.where(usable(size), size * lift_of(size), 1.0)
    quotient = tl.div_rn(gain + tl.zeros_like(below), below)
    return (quotient.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)


@triton.jit
def scaled2(x, y, size, other, gain):
    """x·gain/size and y·gain/other; zero where a scale is zero or not finite.

    Only tiles with such a scale, or a tiny one, pay for that.
    """
    plain = (size >= TINY) & (size <= LARGEST) & (other >= TINY) & (other <= LARGEST)
    if tl.min(tl.min(plain.to(tl.int32), 1), 0) == 0:
        x = tl.where(usable(size), x * lift_of(size), 0.0)
        y = tl.where(usable(other), y * lift_of(other), 0.0)
    return x * factor(size, gain), y * factor(other, gain)


@triton.jit
def step(size, unit, weight):
    """What one unit of a code is worth (lifted); NaN under a scale that is not finite."""
    bits = size.to(tl.int32, bitcast=True)
    return tl.where(
        (bits >= 0) & (bits < 0x7F800000), ((size * lift_of(size)) * unit) * weight, float("nan")
    )


@triton.jit
def clamped(v, bound):
    """v within ±bound; NaN stays."""
    v = tl.minimum(v, bound, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(v, -bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rint_bits(y):
    """Bits of y + 1.5·2^23: rint(y) sits in the low ones, for |y| ≤ 2^22."""
    return (y + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def emit2(ptr, e, left, v, w, ADD: tl.constexpr):
    """out (+)= v at e and w at e + 64. Both are loaded before either is stored."""
    if ADD:
        v = tl.load(ptr + e, mask=e < left, other=0.0).to(tl.float32) + v
        w = tl.load(ptr + e + 64, mask=e + 64 < left, other=0.0).to(tl.float32) + w
    tl.store(ptr + e, narrowed(v, ptr.dtype.element_ty), mask=e < left)
    tl.store(ptr + e + 64, narrowed(w, ptr.dtype.element_ty), mask=e + 64 < left)


@triton.jit
def narrowed(v, KIND: tl.constexpr):
    """v in another float type, rounded to nearest."""
    if INTERPRETED and tl.bfloat16 == KIND:  # the interpreter would truncate
        word = v.to(tl.int32, bitcast=True)
        word = (word + 0x7FFF + ((word >> 16) & 1)) & -0x10000
        v = tl.where(v == v, word.to(tl.float32, bitcast=True), v)
    return v.to(KIND)
