"""Scales of blocks, and the factors that encode and decode make of them."""

from __future__ import annotations

import numpy as np

from laconic.kernels._layout import LIFT, TINY
from laconic.kernels._numba.memory import (
    Pointer,
    bits_of,
    f32,
    float_of,
    get,
    i32,
    kernel,
    reassociating,
)

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
