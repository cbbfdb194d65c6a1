"""What kernels do to a group of 128 values: its draws, its scale, rounding, and packing.

The layout of packed codes is in `kernels/_layout.py`, the draws are those of `laconic._key`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from laconic._key import Stream
from laconic.kernels._layout import (
    GROUP,
    LIFT,
    TINY,
    ScaleKind,
    code_offset,
    dither_centre,
    fraction_bits,
)
from laconic.kernels._numba.intrinsics import (
    Pointer,
    bits_of,
    f32,
    float_of,
    get,
    i32,
    inlined,
    kernel,
    load,
    load_word,
    put,
    reassociating,
    sar,
    shl,
    shr,
    store,
    store_word,
    u8,
    u32,
)
from laconic.kernels._protocol import Dither, Lattice, Output

# --- draws --------------------------------------------------------------------------------


@kernel
def mix(p: np.uint32, k0: np.uint32, k1: np.uint32) -> np.uint32:
    """Draw p of stream (k0, k1)."""
    h = u32(u32(p * u32(0x9E3779B1)) + k0)
    h = u32(h ^ (h >> u32(16)))
    h = u32(h * u32(0x7FEB352D))
    h = u32(h ^ (h >> u32(15)))
    h = u32(h ^ k1)
    h = u32(h * u32(0x846CA68B))
    return u32(h ^ (h >> u32(16)))


# --- packing, four bytes at a time --------------------------------------------------------


@kernel
def pack(codes: Pointer, out: Pointer, start: int, bits: int) -> None:
    """128 code bytes to 16·bits bytes at out[start]."""
    if bits == 8:
        for j in range(0, 128, 4):
            store_word(out, start + j, u32(load_word(codes, j) ^ u32(0x80808080)))
        return
    low = u32(0)
    if bits & 4:
        mask = u32(0x0F0F0F0F)
        for j in range(0, 64, 4):
            w = load_word(codes, j) & mask
            w |= u32((load_word(codes, j + 64) & mask) << u32(4))
            store_word(out, start + j, u32(w))
        start += 64
        low = u32(4)
    if bits & 2:
        mask = u32(0x03030303)
        for j in range(0, 32, 4):
            w = shr(load_word(codes, j), low) & mask
            w |= u32((shr(load_word(codes, j + 32), low) & mask) << u32(2))
            w |= u32((shr(load_word(codes, j + 64), low) & mask) << u32(4))
            w |= u32((shr(load_word(codes, j + 96), low) & mask) << u32(6))
            store_word(out, start + j, u32(w))
        start += 32
        low = u32(low + u32(2))
    if bits & 1:
        mask = u32(0x01010101)
        for j in range(0, 16, 4):
            w = u32(0)
            for k in range(8):
                w |= u32((shr(load_word(codes, j + 16 * k), low) & mask) << u32(k))
            store_word(out, start + j, u32(w))


@kernel
def unpack(data: Pointer, start: int, codes: Pointer, bits: int) -> None:
    """16·bits bytes at data[start] to 128 code bytes."""
    if bits == 8:
        for j in range(0, 128, 4):
            store_word(codes, j, u32(load_word(data, start + j) ^ u32(0x80808080)))
        return
    low = u32(0)
    if bits & 4:
        mask = u32(0x0F0F0F0F)
        for j in range(0, 64, 4):
            w = load_word(data, start + j)
            store_word(codes, j, u32(w & mask))
            store_word(codes, j + 64, u32(u32(w >> u32(4)) & mask))
        start += 64
        low = u32(4)
    else:
        for j in range(0, 128, 4):
            store_word(codes, j, u32(0))
    if bits & 2:
        mask = u32(0x03030303)
        for j in range(0, 32, 4):
            w = load_word(data, start + j)
            for k in range(4):
                part = u32(shl(i32(u32(w >> u32(2 * k)) & mask), i32(low)))
                store_word(codes, j + 32 * k, u32(load_word(codes, j + 32 * k) | part))
        start += 32
        low = u32(low + u32(2))
    if bits & 1:
        mask = u32(0x01010101)
        for j in range(0, 16, 4):
            w = load_word(data, start + j)
            for k in range(8):
                part = u32(shl(i32(u32(w >> u32(k)) & mask), i32(low)))
                store_word(codes, j + 16 * k, u32(load_word(codes, j + 16 * k) | part))


# --- scales of blocks, and the factors that encode and decode make of them ----------------


INFINITY = i32(0x7F800000)
_L2 = 2


@kernel
def largest(x: Pointer, first: int, last: int) -> np.int32:
    """Bits of max|x[first:last]|: an integer maximum, which keeps NaN and infinity on top."""
    m = i32(0)
    for i in range(first, last):
        m = max(m, i32(bits_of(get(x, i)) & i32(0x7FFFFFFF)))
    return m


@reassociating
def square_sum(x: Pointer, first: int, last: int) -> float:
    """Σ x² in double precision; the order of adding is the machine's."""
    total = 0.0
    for i in range(first, last):
        v = np.float64(get(x, i))
        total += v * v
    return total


@kernel
def finish(m: np.int32, squares: float, kind: int) -> np.float32:
    """The scale, from the largest magnitude and (for the 2-norm) the sum of squares."""
    if m >= INFINITY:
        return f32(np.nan)
    if kind != _L2:
        return float_of(m)
    return max(float_of(m), f32(min(np.sqrt(squares), 3.4028234663852886e38)))


@kernel
def block_scale(x: Pointer, first: int, last: int, kind: int) -> np.float32:
    """The scale of x[first:last]."""
    squares = square_sum(x, first, last) if kind == _L2 else 0.0
    return finish(largest(x, first, last), squares, kind)


@kernel
def usable(n: np.float32) -> bool:
    """A scale that can be divided by."""
    m = bits_of(n)
    return i32(0) < m < INFINITY


@kernel
def lift_of(n: np.float32) -> np.float32:
    """Power of two that keeps 1/scale finite."""
    return f32(LIFT) if n < f32(TINY) else f32(1)


@kernel
def factor(n: np.float32, gain: np.float32) -> np.float32:
    """The float just below gain/scale (of the lifted scale); zero if there is no scale."""
    if not usable(n):
        return f32(0)
    return float_of(i32(bits_of(f32(gain / f32(n * lift_of(n)))) - i32(1)))


@kernel
def step(n: np.float32, unit: np.float32, weight: np.float32) -> np.float32:
    """What one unit of a code is worth (lifted); NaN under a scale that is not finite."""
    if bits_of(n) >= INFINITY or bits_of(n) < i32(0):
        return f32(np.nan)
    return f32(f32(f32(n * lift_of(n)) * unit) * weight)


# --- arguments of the functions below; launchers hand them over as plain tuples -------------


Words = tuple[np.uint32, np.uint32]


class Rounding(NamedTuple):
    """How a tensor is rounded to codes."""

    block: int
    kind: int  # of the scales that are found on the way; 0 if they are given
    limit: int  # the largest t
    fraction: int
    bits: int
    offset: int  # of codes; 0 for 8 bits, which hold q itself
    k0: np.uint32
    k1: np.uint32


class Decoding(NamedTuple):
    """What codes mean."""

    block: int
    bits: int
    offset: int
    fraction: int
    subtract: bool
    centre: int
    k0: np.uint32
    k1: np.uint32


class Worth(NamedTuple):
    """What a unit of a code is worth in scales, and how it is put out."""

    unit: np.float32
    weight: np.float32
    bound: np.float32  # the largest value of the output's dtype
    add: bool


_NO_DITHER = Dither(Stream(0, 0))


def words(stream: Stream) -> Words:
    """The stream's words as kernels take them."""
    return u32(stream.k0), u32(stream.k1)


def worth_of(output: Output, unit: float = 1.0) -> tuple:
    """A `Worth`."""
    bound = torch.finfo(output.tensor.dtype).max
    return f32(unit), f32(output.weight), f32(bound), output.add


def rounding_of(lattice: Lattice, stream: Stream, kind: ScaleKind) -> tuple:
    """A `Rounding`."""
    block, levels, bits = lattice
    fraction, offset = fraction_bits(levels), 0 if bits == 8 else code_offset(levels, bits)
    return block, int(kind), levels << fraction, fraction, bits, offset, *words(stream)


def decoding_of(lattice: Lattice, dither: Dither | None, offset: int) -> tuple[tuple, float]:
    """A `Decoding`, and the unit of its values."""
    block, levels, bits = lattice
    fraction, subtract = fraction_bits(levels), dither is not None
    stream, _, workers = dither or _NO_DITHER
    centre = dither_centre(workers, fraction)
    what = (block, bits, offset, fraction, subtract, centre, *words(stream))
    return what, 1.0 / (levels << (fraction + 1) if subtract else levels)


# --- one group of 128 values, in scratch or in place --------------------------------------


ROUND = f32(1.5 * 2**23)  # adding it leaves rint of a float up to 2^22 in the low bits
ROUND_BITS = 0x4B400000


@kernel
def fixed_point(
    x: Pointer,
    n: int,
    scale: Pointer,
    block: int,
    limit: np.float32,
    e: int,
    y: Pointer,
) -> bool:
    """y[0:128] = x·limit/scale element by element, in range; True if |x| exceeds a scale."""
    overflow = False
    tolerance = f32(limit * f32(1 + 2.0**-16))
    for j in range(GROUP):
        v = f32(0)
        if e + j < n:
            size = load(scale, (e + j) // block if block else 0)
            v = f32(f32(get(x, e + j) * lift_of(size)) * factor(size, limit))
            if not usable(size):
                v = f32(0)
                overflow |= size == f32(0) and get(x, e + j) != f32(0)
            elif not abs(v) <= tolerance:
                v = f32(0)
                overflow = True
        store(y, j, min(max(v, -limit), limit))
    return overflow


@inlined
def round_group(
    y: Pointer,
    start: int,
    times: np.float32,
    codes: Pointer,
    to: int,
    p0: np.uint32,
    how: Rounding,
    lag: np.uint32 | None,
) -> None:
    """Codes ((rint(y[start+j]·times) + r) >> F) + offset of 128 elements, from codes[to] on.

    With 4 bits they are packed, two to a byte; else there is a byte for each. `lag` is added to
    the 16 bits that r is the top of; None is a kernel of its own, without the additions.
    """
    bits, fraction = how.bits, how.fraction
    low, high, shift = u32(16 - fraction), u32(32 - fraction), i32(fraction)
    adjust = i32(how.offset - (ROUND_BITS >> fraction))
    for j in range(64):
        h = mix(u32(p0 + u32(j)), how.k0, how.k1)
        g = h
        if lag is not None:
            g, h = u32(h + u32(lag << u32(16))), u32(h + lag)
        a = bits_of(f32(f32(get(y, start + j) * times) + ROUND))
        b = bits_of(f32(f32(get(y, start + j + 64) * times) + ROUND))
        a = i32(sar(i32(a + i32(shr(u32(h & u32(0xFFFF)), low))), shift) + adjust)
        b = i32(sar(i32(b + i32(shr(g, high))), shift) + adjust)
        if bits == 4:
            store(codes, to + j, u8(i32(a | i32(b << i32(4)))))
        else:
            store(codes, to + j, u8(a))
            store(codes, to + j + 64, u8(b))


@inlined
def values(
    codes: Pointer,
    at: int,
    worth: np.float32,
    base: int,
    p0: np.uint32,
    what: Decoding,
    strata: Words | None,
    out: Pointer,
    start: int,
    add: bool,
) -> None:
    """out (+)= (code + base)·worth; with subtract, of W in units of 2^-(F+1).

    Codes are read from codes[at] on: packed if of 4 bits, two's complement if of 8 bits, else a
    byte for each. Strata are workers and shift; None is a kernel of its own, without them.
    """
    bits, fraction, subtract = what.bits, what.fraction, what.subtract
    second = at if bits == 4 else at + 64
    mask, drop = i32(15 if bits == 4 else 255), i32(4 if bits == 4 else 0)
    flip = i32(0x80 if bits == 8 else 0)
    low, high = u32(16 - fraction), u32(32 - fraction)
    double, base = i32(fraction + 1 if subtract else 0), i32(base)
    ring = u32((1 << fraction) - 1)
    for j in range(64):
        a = i32(i32(i32(load(codes, at + j)) & mask) ^ flip)
        b = i32(sar(i32(load(codes, second + j)), drop) ^ flip)
        a, b = i32(shl(a, double) + base), i32(shl(b, double) + base)
        if subtract:
            h = mix(u32(p0 + u32(j)), what.k0, what.k1)
            r, s = shr(u32(h & u32(0xFFFF)), low), shr(h, high)
            if strata is not None:
                r = u32(u32(u32(r * strata[0]) + strata[1]) & ring)
                s = u32(u32(u32(s * strata[0]) + strata[1]) & ring)
            a = i32(a - i32(u32(r << u32(1))))
            b = i32(b - i32(u32(s << u32(1))))
        v, w = f32(f32(a) * worth), f32(f32(b) * worth)
        put(out, start + j, f32(get(out, start + j) + v) if add else v)
        put(out, start + j + 64, f32(get(out, start + j + 64) + w) if add else w)


@kernel
def per_element(y: Pointer, scale: Pointer, block: int, e: int, count: int, worth: Worth) -> None:
    """y *= step of each element's scale, lowered again and clamped."""
    unit, weight, bound = worth.unit, worth.weight, worth.bound
    if block == 0 or block % GROUP == 0:
        size = load(scale, e // block if block else 0)
        times, lower = step(size, unit, weight), f32(f32(1) / lift_of(size))
        for j in range(count):
            store(y, j, clamped(f32(f32(load(y, j) * times) * lower), bound))
        return
    for j in range(count):
        size = load(scale, (e + j) // block)
        v = f32(f32(load(y, j) * step(size, unit, weight)) / lift_of(size))
        store(y, j, clamped(v, bound))


@kernel
def clamped(v: np.float32, bound: np.float32) -> np.float32:
    """v within ±bound; NaN stays."""
    v = bound if v > bound else v
    return -bound if v < -bound else v


@kernel
def emit(y: Pointer, out: Pointer, e: int, count: int, add: bool) -> None:
    """out (+)= y."""
    if add:
        for j in range(count):
            put(out, e + j, f32(get(out, e + j) + load(y, j)))
    else:
        for j in range(count):
            put(out, e + j, load(y, j))
