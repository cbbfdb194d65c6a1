"""Tiles: where lanes find their values, how they pack them, what they draw.

Inside a program every offset is a 32-bit one from the tile's first element; only that element's
place in the tensor needs 64 bits.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from laconic._key import Stream
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
