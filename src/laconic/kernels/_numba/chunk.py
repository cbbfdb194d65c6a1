"""Chunks of a coded section: bit planes, check sums, and what frames every coder's stream.

The format is described in `kernels/_coding.py`.
"""

from __future__ import annotations

import numpy as np

from laconic.kernels._coding import BLOCK, LANES, MAX_MAGNITUDE
from laconic.kernels._numba.memory import Pointer, i16, i32, kernel, load, shl, shr, store, u32
from laconic.kernels._numba.random import mix


@kernel
def salt_of(c: int, stamp: np.uint32, k0: np.uint32, k1: np.uint32) -> np.uint32:
    """What the check of chunk c starts from; the number of its values is added to it."""
    return u32(mix(u32(c), k0, k1) ^ stamp)


@kernel
def check(words: Pointer, at: int, length: int, salt: np.uint32) -> np.uint32:
    """The check sum of words[at : at + length]."""
    total = u32(0)
    for i in range(length):
        h = u32(load(words, at + i) ^ u32(salt + u32(u32(i) * u32(0x9E3779B1))))
        h = u32(h ^ shr(h, u32(16)))
        h = u32(h * u32(0x7FEB352D))
        h = u32(h ^ shr(h, u32(15)))
        h = u32(h * u32(0x846CA68B))
        total = u32(total + u32(h ^ shr(h, u32(16))))
    return total


@kernel
def width_of(q: Pointer, at: int, count: int) -> int:
    """Bits of the largest magnitude."""
    every = i32(0)
    for j in range(count):
        every |= i32(abs(i32(load(q, at + j))))
    width = 0
    while every >> width:
        width += 1
    return width


@kernel
def frame(
    stream: Pointer,
    length: int,
    kind: int,
    q: Pointer,
    at: int,
    count: int,
    mark: np.uint32,
    salt: np.uint32,
    out: Pointer,
    to: int,
    checks: Pointer,
    c: int,
) -> int:
    """Write chunk c at out[to:]: the stream, or bit planes of q[at:] if these are not longer.

    Returns where the next chunk starts. With length < 0 there is no stream.
    """
    width = width_of(q, at, count)
    blocks = (count + BLOCK - 1) // BLOCK
    planes = blocks * LANES * (1 + width) if width else 0
    if 0 <= length < planes:
        store(out, to, u32(u32(kind) | u32(mark << u32(16))))
        for i in range(length):
            store(out, to + 1 + i, load(stream, i))
    else:
        length = planes
        store(out, to, u32(u32(width << 8) | u32(mark << u32(16))))
        if width:
            for b in range(blocks):
                put_planes(q, at + b * BLOCK, width, out, to + 1 + b * LANES * (1 + width))
    store(checks, c, check(out, to, length + 1, u32(salt + u32(count))))
    return to + 1 + length


@kernel
def put_planes(q: Pointer, at: int, width: int, out: Pointer, to: int) -> None:
    """The sign plane and `width` magnitude planes of 512 integers."""
    for j in range(LANES * (1 + width)):
        store(out, to + j, u32(0))
    for i in range(BLOCK // LANES):
        for g in range(LANES):
            v = i32(load(q, at + LANES * i + g))
            sign = u32(u32(v) >> u32(31))
            store(out, to + g, u32(load(out, to + g) | u32(sign << u32(i))))
        for p in range(width):
            row = to + LANES * (1 + p)
            for g in range(LANES):
                m = u32(abs(i32(load(q, at + LANES * i + g))))
                bit = u32(u32(m >> u32(p)) & u32(1))
                store(out, row + g, u32(load(out, row + g) | u32(bit << u32(i))))


@kernel
def get_planes(words: Pointer, at: int, width: int, q: Pointer, to: int) -> None:
    """512 integers from their planes."""
    for i in range(BLOCK // LANES):
        for g in range(LANES):
            m = i32(0)
            for p in range(width):
                w = load(words, at + LANES * (1 + p) + g)
                m |= shl(i32(u32(w >> u32(i)) & u32(1)), i32(p))
            minus = i32(u32(load(words, at + g) >> u32(i)) & u32(1))
            store(q, to + LANES * i + g, i16(i32(i32(m ^ i32(-minus)) + minus)))


@kernel
def decode_planes(
    words: Pointer, at: int, length: int, head: np.uint32, q: Pointer, to: int, count: int
) -> bool:
    """A chunk of kind FIXED, whose stream is words[at : at + length]; False if it is malformed."""
    width = int(u32(head >> u32(8)) & u32(0xFF))
    blocks = (count + BLOCK - 1) // BLOCK
    if width > 15 or length != (blocks * LANES * (1 + width) if width else 0):
        return False
    if width == 0:
        for j in range(blocks * BLOCK):
            store(q, to + j, i16(0))
        return True
    top = u32(0)
    for b in range(blocks):
        row = at + b * LANES * (1 + width)
        for g in range(LANES):
            some = u32(0)
            for p in range(1, 1 + width):
                some = u32(some | load(words, row + LANES * p + g))
            if u32(load(words, row + g) & u32(~some)):  # a negative zero
                return False
            top = u32(top | load(words, row + LANES * width + g))
        get_planes(words, row, width, q, to + b * BLOCK)
    return top != u32(0)  # else the width was not the smallest


@kernel
def acceptable(q: Pointer, at: int, count: int, limit: int) -> bool:
    """No magnitude above limit, and zeros from `count` to the end of the block."""
    worst = i32(0)
    for j in range(count):
        worst = max(worst, i32(abs(i32(load(q, at + j)))))
    rest = i32(0)
    for j in range(count, (count + BLOCK - 1) // BLOCK * BLOCK):
        rest |= i32(load(q, at + j))
    return worst <= min(limit, MAX_MAGNITUDE) and rest == 0
