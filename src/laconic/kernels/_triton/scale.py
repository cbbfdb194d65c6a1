"""Scales of blocks, and the factors that encode and decode make of them."""

from __future__ import annotations

import os

import triton
import triton.language as tl

from laconic.kernels import _layout

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
