"""What kernels do to one group of 128 values, in scratch or in place."""

from __future__ import annotations

import numpy as np

from laconic.kernels._layout import GROUP
from laconic.kernels._numba.memory import (
    Pointer,
    bits_of,
    f32,
    get,
    i32,
    kernel,
    load,
    put,
    sar,
    shl,
    shr,
    store,
    u8,
    u32,
)
from laconic.kernels._numba.random import mix
from laconic.kernels._numba.scale import factor, lift_of, step, usable

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


@kernel
def round_group(
    y: Pointer,
    start: int,
    times: np.float32,
    codes: Pointer,
    to: int,
    bits: int,
    fraction: int,
    offset: int,
    p0: np.uint32,
    k0: np.uint32,
    k1: np.uint32,
    lag: np.uint32 | None,
) -> None:
    """Codes ((rint(y[start+j]·times) + r) >> F) + offset of 128 elements, from codes[to] on.

    With bits == 4 they are packed, two to a byte; else there is a byte for each. `lag` is added to
    the 16 bits that r is the top of; None is a kernel of its own, without the additions.
    """
    low, high, shift = u32(16 - fraction), u32(32 - fraction), i32(fraction)
    adjust = i32(offset - (ROUND_BITS >> fraction))
    for j in range(64):
        h = mix(u32(p0 + u32(j)), k0, k1)
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


@kernel
def values(
    codes: Pointer,
    at: int,
    bits: int,
    worth: np.float32,
    base: int,
    fraction: int,
    subtract: bool,
    p0: np.uint32,
    k0: np.uint32,
    k1: np.uint32,
    strata: tuple[np.uint32, np.uint32] | None,
    out: Pointer,
    start: int,
    add: bool,
) -> None:
    """out (+)= (code + base)·worth; with subtract, of W in units of 2^-(F+1).

    Codes are read from codes[at] on: packed if bits == 4, two's complement if bits == 8, else a
    byte for each. Strata are workers and shift; None is a kernel of its own, without them.
    """
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
            h = mix(u32(p0 + u32(j)), k0, k1)
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
def per_element(
    y: Pointer,
    scale: Pointer,
    block: int,
    e: int,
    count: int,
    unit: np.float32,
    weight: np.float32,
    bound: np.float32,
) -> None:
    """y *= step of each element's scale, lowered again and clamped."""
    if block == 0 or block % GROUP == 0:
        size = load(scale, e // block if block else 0)
        worth, lower = step(size, unit, weight), f32(f32(1) / lift_of(size))
        for j in range(count):
            store(y, j, clamped(f32(f32(load(y, j) * worth) * lower), bound))
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
