"""Tiles: where lanes find their values, how they pack them, what they draw.

Inside a program every offset is a 32-bit one from the tile's first element; only that element's
place in the tensor needs 64 bits.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from laconic._key import Stream

# kernels round as written: a fused multiply-add would change bytes
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
TILE = 4096


def words(stream: Stream | None) -> tuple[int, ...]:
    """The stream's words as signed integers, so that a launch always sees the same type."""
    return tuple(k - (1 << 32) if k >> 31 else k for k in stream or (0, 0))


def shape(bits: int, row: int = 0) -> dict[str, int]:
    """Launch arguments ROWS, W and RUN for codes of `bits` bits; a row has `row` values."""
    run = 16 if bits & 1 else 32 if bits & 2 else 64
    row = row or TILE
    return {"ROWS": max(1, TILE // row), "W": row * run // 128, "RUN": run}


def programs(count: int, shape: dict[str, int]) -> tuple[int]:
    """The grid that covers `count` values."""
    return (triton.cdiv(count, shape["ROWS"] * shape["W"] * 128 // shape["RUN"]),)


@triton.jit
def tile_start(n, ROWS: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr):
    """First element of this program (int64), and how many of its values are real (int32)."""
    SIZE: tl.constexpr = ROWS * W * (128 // RUN)
    base = tl.program_id(0).to(tl.int64) * SIZE
    return base, tl.minimum(n - base, SIZE).to(tl.int32)


@triton.jit
def lanes(ROWS: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr):
    """Offset of each lane's first value."""
    lane = tl.arange(0, W)
    row = tl.arange(0, ROWS) * (W * (128 // RUN))
    return row[:, None] + ((lane // RUN) * 128 + lane % RUN)[None, :]


@triton.jit
def load2(ptr, e, left):
    """Two values 64 apart as float32, zero beyond the end."""
    a = tl.load(ptr + e, mask=e < left, other=0.0).to(tl.float32)
    return a, tl.load(ptr + e + 64, mask=e + 64 < left, other=0.0).to(tl.float32)


@triton.jit
def mix(p, k0, k1):
    """Draw p of stream (k0, k1); all uint32."""
    h = p + k0
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ (h >> 15)
    h = h ^ k1
    h = h * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def dither2(base, e, k0, k1, FRACTION: tl.constexpr):
    """The dither of the values at e and e + 64: low and high half of one draw."""
    p = (base // 2).to(tl.uint32) + ((e // 128) * 64 + e % 64).to(tl.uint32)
    h = mix(p, k0.to(tl.uint32), k1.to(tl.uint32))
    low = ((h & 0xFFFF) >> (16 - FRACTION)).to(tl.int32)
    return low, (h >> (32 - FRACTION)).to(tl.int32)


@triton.jit
def group_bytes(ptr, base, e, BITS: tl.constexpr):
    """Where the packed group of each lane begins."""
    return ptr + (base // 128) * (16 * BITS) + (e // 128) * (16 * BITS)


@triton.jit
def no_bytes(e):
    """What `gather` starts from: empty bytes of the planes of two bits (two) and one bit."""
    zero = e * 0
    return zero, zero, zero


@triton.jit
def gather(
    ptr, e, left, c, d, even, odd, one, M: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr
):
    """Take the codes of pair M: write whole bytes, collect the narrower planes."""
    real = (e // 128) * 128 < left
    if BITS == 8:
        tl.store(ptr + e % 64, (c ^ 0x80).to(tl.uint8), mask=real)
        tl.store(ptr + e % 64 + 64, (d ^ 0x80).to(tl.uint8), mask=real)
    else:
        if BITS & 4:
            tl.store(ptr + e % 64, ((c & 15) | ((d & 15) << 4)).to(tl.uint8), mask=real)
        if BITS & 2:
            LOW2: tl.constexpr = BITS & 4
            two = (((c >> LOW2) & 3) | (((d >> LOW2) & 3) << 4)) << (2 * (M * RUN // 32))
            if RUN == 16 and M % 2:
                odd = odd | two
            else:
                even = even | two
        if BITS & 1:
            LOW1: tl.constexpr = BITS & 6
            one = one | ((((c >> LOW1) & 1) | (((d >> LOW1) & 1) << 4)) << M)
    return even, odd, one


@triton.jit
def flush(ptr, e, left, even, odd, one, BITS: tl.constexpr, RUN: tl.constexpr):
    """Write the bytes that `gather` collected."""
    real = (e // 128) * 128 < left
    if BITS < 8:
        if BITS & 2:
            q = ptr + 16 * (BITS & 4) + e % RUN
            tl.store(q, even.to(tl.uint8), mask=real)
            if RUN == 16:
                tl.store(q + 16, odd.to(tl.uint8), mask=real)
        if BITS & 1:
            tl.store(ptr + 16 * (BITS & 6) + e % RUN, one.to(tl.uint8), mask=real)


@triton.jit
def planes(ptr, e, left, BITS: tl.constexpr, RUN: tl.constexpr):
    """The lane's bytes of the narrower planes, for `scatter`."""
    real = (e // 128) * 128 < left
    even, odd, one = no_bytes(e)
    if BITS < 8:
        if BITS & 2:
            q = ptr + 16 * (BITS & 4) + e % RUN
            even = tl.load(q, mask=real, other=0).to(tl.int32)
            if RUN == 16:
                odd = tl.load(q + 16, mask=real, other=0).to(tl.int32)
        if BITS & 1:
            one = tl.load(ptr + 16 * (BITS & 6) + e % RUN, mask=real, other=0).to(tl.int32)
    return even, odd, one


@triton.jit
def scatter(ptr, e, left, even, odd, one, M: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr):
    """The codes of pair M."""
    if BITS == 8:  # a sum of 8-bit codes comes without padding
        c = tl.load(ptr + e % 64, mask=e < left, other=0).to(tl.int32) ^ 0x80
        d = tl.load(ptr + e % 64 + 64, mask=e + 64 < left, other=0).to(tl.int32) ^ 0x80
    else:
        c = e * 0
        d = c
        if BITS & 4:
            a = tl.load(ptr + e % 64, mask=(e // 128) * 128 < left, other=0).to(tl.int32)
            c, d = a & 15, a >> 4
        if BITS & 2:
            LOW2: tl.constexpr = BITS & 4
            two = even >> (2 * (M * RUN // 32))
            if RUN == 16 and M % 2:
                two = odd >> (2 * (M * RUN // 32))
            c, d = c | ((two & 3) << LOW2), d | (((two >> 4) & 3) << LOW2)
        if BITS & 1:
            LOW1: tl.constexpr = BITS & 6
            bit = one >> M
            c, d = c | ((bit & 1) << LOW1), d | (((bit >> 4) & 1) << LOW1)
    return c, d
