"""Tiles: where lanes find their values, how they pack them, what they draw."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from laconic._key import Stream

# kernels round as written: a fused multiply-add would change bytes
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
TILE = 4096


def words(stream: Stream | None) -> tuple[int, int]:
    """The stream's words as signed integers, so that a launch always sees the same type."""
    if stream is None:
        return 0, 0
    return tuple(k - (1 << 32) if k >> 31 else k for k in stream)  # pyright: ignore


def rows(width: int) -> int:
    """Rows of a tile whose rows have `width` lanes of 8 values."""
    return max(1, TILE // (8 * width))


def largest_float(dtype: torch.dtype) -> float:
    """What decoding clamps to."""
    return torch.finfo(dtype).max


@triton.jit
def row_starts(ROWS: tl.constexpr, W: tl.constexpr):
    """First element of every row of this program, as int64."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return (row * (8 * W))[:, None]


@triton.jit
def lanes(W: tl.constexpr):
    """Offset of each lane's first value in its row."""
    lane = tl.arange(0, W)
    return ((lane // 16) * 128 + lane % 16)[None, :]


@triton.jit
def load8(ptr, e, n):
    """The lane's 8 values as float32, zero beyond n."""
    return (
        tl.load(ptr + e, mask=e < n, other=0.0).to(tl.float32),
        tl.load(ptr + e + 16, mask=e + 16 < n, other=0.0).to(tl.float32),
        tl.load(ptr + e + 32, mask=e + 32 < n, other=0.0).to(tl.float32),
        tl.load(ptr + e + 48, mask=e + 48 < n, other=0.0).to(tl.float32),
        tl.load(ptr + e + 64, mask=e + 64 < n, other=0.0).to(tl.float32),
        tl.load(ptr + e + 80, mask=e + 80 < n, other=0.0).to(tl.float32),
        tl.load(ptr + e + 96, mask=e + 96 < n, other=0.0).to(tl.float32),
        tl.load(ptr + e + 112, mask=e + 112 < n, other=0.0).to(tl.float32),
    )


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
def pair(h, FRACTION: tl.constexpr):
    """The dither of two values from one draw."""
    low = ((h & 0xFFFF) >> (16 - FRACTION)).to(tl.int32)
    return low, (h >> (32 - FRACTION)).to(tl.int32)


@triton.jit
def dither8(e, k0, k1, FRACTION: tl.constexpr):
    """The dither of the lane's 8 values: the value 64 further takes the draw's high half."""
    a, b = k0.to(tl.uint32), k1.to(tl.uint32)
    p = ((e // 128) * 64 + e % 16).to(tl.uint32)
    r0, r4 = pair(mix(p, a, b), FRACTION)
    r1, r5 = pair(mix(p + 16, a, b), FRACTION)
    r2, r6 = pair(mix(p + 32, a, b), FRACTION)
    r3, r7 = pair(mix(p + 48, a, b), FRACTION)
    return r0, r1, r2, r3, r4, r5, r6, r7


@triton.jit
def pack8(ptr, e, n, c0, c1, c2, c3, c4, c5, c6, c7, BITS: tl.constexpr):
    """Write the lane's part of its group's 16·BITS bytes."""
    p = ptr + (e // 128) * (16 * BITS) + e % 16
    real = (e // 128) * 128 < n
    if BITS == 8:
        tl.store(p, (c0 ^ 0x80).to(tl.uint8), mask=real)
        tl.store(p + 16, (c1 ^ 0x80).to(tl.uint8), mask=real)
        tl.store(p + 32, (c2 ^ 0x80).to(tl.uint8), mask=real)
        tl.store(p + 48, (c3 ^ 0x80).to(tl.uint8), mask=real)
        tl.store(p + 64, (c4 ^ 0x80).to(tl.uint8), mask=real)
        tl.store(p + 80, (c5 ^ 0x80).to(tl.uint8), mask=real)
        tl.store(p + 96, (c6 ^ 0x80).to(tl.uint8), mask=real)
        tl.store(p + 112, (c7 ^ 0x80).to(tl.uint8), mask=real)
    else:
        LOW2: tl.constexpr = BITS & 4
        LOW1: tl.constexpr = BITS & 6
        if BITS & 4:
            tl.store(p, ((c0 & 15) | ((c4 & 15) << 4)).to(tl.uint8), mask=real)
            tl.store(p + 16, ((c1 & 15) | ((c5 & 15) << 4)).to(tl.uint8), mask=real)
            tl.store(p + 32, ((c2 & 15) | ((c6 & 15) << 4)).to(tl.uint8), mask=real)
            tl.store(p + 48, ((c3 & 15) | ((c7 & 15) << 4)).to(tl.uint8), mask=real)
        if BITS & 2:
            q = p + 16 * LOW2
            tl.store(q, four(c0, c2, c4, c6, LOW2).to(tl.uint8), mask=real)
            tl.store(q + 16, four(c1, c3, c5, c7, LOW2).to(tl.uint8), mask=real)
        if BITS & 1:
            even = ones(c0, c2, c4, c6, LOW1)
            tl.store(p + 16 * LOW1, (even | (ones(c1, c3, c5, c7, LOW1) << 1)).to(tl.uint8), mask=real)


@triton.jit
def four(a, b, c, d, LOW: tl.constexpr):
    """Four fields of two bits."""
    ab = ((a >> LOW) & 3) | (((b >> LOW) & 3) << 2)
    return ab | (((c >> LOW) & 3) << 4) | (((d >> LOW) & 3) << 6)


@triton.jit
def ones(a, b, c, d, LOW: tl.constexpr):
    """Four single bits, two places apart."""
    ab = ((a >> LOW) & 1) | (((b >> LOW) & 1) << 2)
    return ab | (((c >> LOW) & 1) << 4) | (((d >> LOW) & 1) << 6)


@triton.jit
def byte(p, real):
    """One byte per lane, as int32."""
    return tl.load(p, mask=real, other=0).to(tl.int32)


@triton.jit
def word(ptr, e, n):
    """One int32 per lane."""
    return tl.load(ptr + e, mask=e < n, other=0)


@triton.jit
def unpack8(ptr, e, n, BITS: tl.constexpr):
    """The codes of the lane's 8 values."""
    p = ptr + (e // 128) * (16 * BITS) + e % 16
    if BITS == 8:  # a sum of 8-bit codes comes without padding
        return (
            byte(p, e < n) ^ 0x80,
            byte(p + 16, e + 16 < n) ^ 0x80,
            byte(p + 32, e + 32 < n) ^ 0x80,
            byte(p + 48, e + 48 < n) ^ 0x80,
            byte(p + 64, e + 64 < n) ^ 0x80,
            byte(p + 80, e + 80 < n) ^ 0x80,
            byte(p + 96, e + 96 < n) ^ 0x80,
            byte(p + 112, e + 112 < n) ^ 0x80,
        )
    real = (e // 128) * 128 < n
    LOW2: tl.constexpr = BITS & 4
    LOW1: tl.constexpr = BITS & 6
    c0 = tl.zeros_like(e).to(tl.int32)
    c1, c2, c3, c4, c5, c6, c7 = c0, c0, c0, c0, c0, c0, c0
    if BITS & 4:
        a, b = byte(p, real), byte(p + 16, real)
        c, d = byte(p + 32, real), byte(p + 48, real)
        c0, c1, c2, c3 = a & 15, b & 15, c & 15, d & 15
        c4, c5, c6, c7 = a >> 4, b >> 4, c >> 4, d >> 4
    if BITS & 2:
        a, b = byte(p + 16 * LOW2, real), byte(p + 16 * LOW2 + 16, real)
        c0 |= (a & 3) << LOW2
        c1 |= (b & 3) << LOW2
        c2 |= ((a >> 2) & 3) << LOW2
        c3 |= ((b >> 2) & 3) << LOW2
        c4 |= ((a >> 4) & 3) << LOW2
        c5 |= ((b >> 4) & 3) << LOW2
        c6 |= (a >> 6) << LOW2
        c7 |= (b >> 6) << LOW2
    if BITS & 1:
        a = byte(p + 16 * LOW1, real)
        c0 |= (a & 1) << LOW1
        c1 |= ((a >> 1) & 1) << LOW1
        c2 |= ((a >> 2) & 1) << LOW1
        c3 |= ((a >> 3) & 1) << LOW1
        c4 |= ((a >> 4) & 1) << LOW1
        c5 |= ((a >> 5) & 1) << LOW1
        c6 |= ((a >> 6) & 1) << LOW1
        c7 |= (a >> 7) << LOW1
    return c0, c1, c2, c3, c4, c5, c6, c7
