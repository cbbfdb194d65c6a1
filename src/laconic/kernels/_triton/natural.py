"""Natural quantization on the GPU. The definitions are in `_reference/natural.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import GROUP
from laconic.kernels._triton.scale import (
    clamped,
    emit,
    lower_of,
    of_element,
    rint_bits,
    scaled,
    step,
)
from laconic.kernels._triton.tile import (
    OPTIONS,
    dither8,
    lanes,
    largest_float,
    load8,
    mix,
    pack8,
    row_starts,
    rows,
    unpack8,
    words,
)

_WIDTH = 64
_ROWS = rows(_WIDTH)
_SPAN = _ROWS * _WIDTH * 8


def natural_quantize(
    x: Tensor, scale: Tensor, payload: Tensor, *, stream: Stream, levels: int, bits: int
) -> None:
    """See the reference."""
    _natural_quantize[(triton.cdiv(x.numel(), _SPAN),)](
        x,
        scale,
        payload,
        x.numel(),
        *words(stream),
        2.0 ** (levels + 15 - 48),
        LEVELS=levels,
        BITS=bits,
        ROWS=_ROWS,
        W=_WIDTH,
        **OPTIONS,
    )


def natural_dequantize(
    payload: Tensor,
    scale: Tensor,
    out: Tensor,
    *,
    levels: int,
    bits: int,
    weight: float,
    add: bool,
) -> None:
    """See the reference."""
    _natural_dequantize[(triton.cdiv(out.numel(), _SPAN),)](
        payload,
        scale,
        out,
        out.numel(),
        weight,
        largest_float(out.dtype),
        LEVELS=levels,
        BITS=bits,
        ADD=add,
        ROWS=_ROWS,
        W=_WIDTH,
        **OPTIONS,
    )


def natural_reduce(a: Tensor, b: Tensor, out: Tensor, *, stream: Stream, bits: int) -> None:
    """See the reference."""
    n = out.numel() // (16 * bits) * GROUP
    _natural_reduce[(triton.cdiv(n, _SPAN),)](
        a, b, out, n, *words(stream), BITS=bits, ROWS=_ROWS, W=_WIDTH, **OPTIONS
    )


@triton.jit
def _code(x, r, size, boost, LEVELS: tl.constexpr, BITS: tl.constexpr):
    """Sign and magnitude of one value per lane."""
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
    y = scaled(x, size, 1.0)
    v = tl.abs(y)
    over = (v > 1 + 2.0**-16) | (v != v)
    v = tl.where(v > 1.0, 1.0, v)
    word = v.to(tl.int32, bitcast=True)
    large = ((((word + 64) >> 7) + r) >> 16) + (LEVELS - 127)
    small = word < (128 - LEVELS) << 23
    t = (tl.where(small, v, 0.0) * 2.0**48) * boost
    little = (rint_bits(t) - 0x4B400000 + r) >> 16
    m = tl.where(small, little, large)
    m = tl.where(over, TOP, m)
    return m | tl.where((y < 0) & (m > 0), TOP + 1, 0)


@triton.jit(do_not_specialize=["k0", "k1"])
def _natural_quantize(
    x,
    scale,
    payload,
    n,
    k0,
    k1,
    boost,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    e = row_starts(ROWS, W) + lanes(W)
    x0, x1, x2, x3, x4, x5, x6, x7 = load8(x, e, n)
    r0, r1, r2, r3, r4, r5, r6, r7 = dither8(e, k0, k1, 16)
    size = of_element(scale, e, n, 0)
    c0, c1 = _code(x0, r0, size, boost, LEVELS, BITS), _code(x1, r1, size, boost, LEVELS, BITS)
    c2, c3 = _code(x2, r2, size, boost, LEVELS, BITS), _code(x3, r3, size, boost, LEVELS, BITS)
    c4, c5 = _code(x4, r4, size, boost, LEVELS, BITS), _code(x5, r5, size, boost, LEVELS, BITS)
    c6, c7 = _code(x6, r6, size, boost, LEVELS, BITS), _code(x7, r7, size, boost, LEVELS, BITS)
    pack8(payload, e, n, c0, c1, c2, c3, c4, c5, c6, c7, BITS)


@triton.jit
def _value(code, e, n, worth, lower, bound, out, LEVELS: tl.constexpr, BITS: tl.constexpr, ADD: tl.constexpr):
    """Decode one value per lane into out."""
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
    m = code & TOP
    v = ((m + (127 - LEVELS)) << 23).to(tl.float32, bitcast=True)
    v = tl.where(m == 0, 0.0, v)
    v = tl.where(m == TOP, float("nan"), v)
    v = tl.where(code > TOP, -v, v)
    emit(out, e, n, clamped((v * worth) * lower, bound), ADD)


@triton.jit
def _natural_dequantize(
    payload,
    scale,
    out,
    n,
    weight,
    bound,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    e = row_starts(ROWS, W) + lanes(W)
    c0, c1, c2, c3, c4, c5, c6, c7 = unpack8(payload, e, n, BITS)
    size = of_element(scale, e, n, 0)
    s, t, b = step(size, 1.0, weight), lower_of(size), bound
    _value(c0, e, n, s, t, b, out, LEVELS, BITS, ADD)
    _value(c1, e + 16, n, s, t, b, out, LEVELS, BITS, ADD)
    _value(c2, e + 32, n, s, t, b, out, LEVELS, BITS, ADD)
    _value(c3, e + 48, n, s, t, b, out, LEVELS, BITS, ADD)
    _value(c4, e + 64, n, s, t, b, out, LEVELS, BITS, ADD)
    _value(c5, e + 80, n, s, t, b, out, LEVELS, BITS, ADD)
    _value(c6, e + 96, n, s, t, b, out, LEVELS, BITS, ADD)
    _value(c7, e + 112, n, s, t, b, out, LEVELS, BITS, ADD)


@triton.jit
def _sum(a, b, e, k0, k1, BITS: tl.constexpr):
    """One pair per lane; the rule is in `_reference/natural.py`."""
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
    coin = mix(e.to(tl.uint32), k0.to(tl.uint32), k1.to(tl.uint32))
    swap = (b & TOP) > (a & TOP)
    large, little = tl.where(swap, b, a), tl.where(swap, a, b)
    high, low = large & TOP, little & TOP
    opposite = (large ^ little) > TOP
    gap = tl.maximum(high - low - opposite.to(tl.int32), 0)
    chance = tl.full(gap.shape, 0xFFFFFFFF, tl.uint32) >> tl.minimum(gap, 31).to(tl.uint32)
    moves = (gap < 32) & (coin <= chance)
    moved = tl.where(opposite, high - 1, tl.minimum(high + 1, TOP))
    m = tl.where(moves, moved, high)
    m = tl.where(opposite & (high == low), 0, m)
    m = tl.where(low == 0, high, m)
    m = tl.where(high == TOP, TOP, m)
    return m | tl.where(m > 0, large & (TOP + 1), 0)


@triton.jit(do_not_specialize=["k0", "k1"])
def _natural_reduce(
    a,
    b,
    out,
    n,
    k0,
    k1,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    e = row_starts(ROWS, W) + lanes(W)
    a0, a1, a2, a3, a4, a5, a6, a7 = unpack8(a, e, n, BITS)
    b0, b1, b2, b3, b4, b5, b6, b7 = unpack8(b, e, n, BITS)
    c0, c1 = _sum(a0, b0, e, k0, k1, BITS), _sum(a1, b1, e + 16, k0, k1, BITS)
    c2, c3 = _sum(a2, b2, e + 32, k0, k1, BITS), _sum(a3, b3, e + 48, k0, k1, BITS)
    c4, c5 = _sum(a4, b4, e + 64, k0, k1, BITS), _sum(a5, b5, e + 80, k0, k1, BITS)
    c6, c7 = _sum(a6, b6, e + 96, k0, k1, BITS), _sum(a7, b7, e + 112, k0, k1, BITS)
    pack8(out, e, n, c0, c1, c2, c3, c4, c5, c6, c7, BITS)
