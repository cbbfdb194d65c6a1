"""Natural quantization on the GPU. The definitions are in `_reference/exponential.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import GROUP
from laconic.kernels._protocol import Lattice, Output
from laconic.kernels._triton.group import (
    OPTIONS,
    clamped,
    dither2,
    emit2,
    lanes,
    load2,
    lower_of,
    mix,
    pack2,
    programs,
    rint_bits,
    scale_of,
    scaled2,
    shape,
    step,
    tile_start,
    unpack2,
    words,
)


def exponential_quantize(
    x: Tensor, scale: Tensor, codes: Tensor, lattice: Lattice, *, stream: Stream
) -> None:
    """See `Kernels`."""
    levels, bits = lattice.levels, lattice.bits
    tile = shape(0)
    _quantize[programs(x.numel(), tile)](
        x,
        scale,
        codes,
        x.numel(),
        *words(stream),
        2.0 ** (levels + 15 - 48),
        LEVELS=levels,
        BITS=bits,
        **tile,
        **OPTIONS,
    )


def exponential_dequantize(codes: Tensor, scale: Tensor, output: Output, lattice: Lattice) -> None:
    """See `Kernels`."""
    out, weight, add = output
    tile = shape(0)
    _dequantize[programs(out.numel(), tile)](
        codes,
        scale,
        out,
        out.numel(),
        weight,
        torch.finfo(out.dtype).max,
        LEVELS=lattice.levels,
        BITS=lattice.bits,
        ADD=add,
        **tile,
        **OPTIONS,
    )


def exponential_reduce(a: Tensor, b: Tensor, out: Tensor, *, stream: Stream, bits: int) -> None:
    """See `Kernels`."""
    n = out.numel() // (16 * bits) * GROUP
    tile = shape(0)
    _reduce[programs(n, tile)](a, b, out, n, *words(stream), BITS=bits, **tile, **OPTIONS)


@triton.jit
def _code(y, r, boost, LEVELS: tl.constexpr, BITS: tl.constexpr):
    """Sign and magnitude of one value per lane."""
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
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
def _quantize(
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
    base, left = tile_start(n, ROWS, W)
    group, lane = lanes(ROWS, W)
    e = group * 128 + lane % 64
    a, b = load2(x + base, e, left)
    r, s = dither2(base, group, lane, k0, k1, 16)
    size = scale_of(scale, base, e, left, 0, ROWS, W)
    y, z = scaled2(a, b, size, size, 1.0)
    y = tl.where((size == 0.0) & (a != 0.0), float("nan"), y)  # no code is above a zero scale
    z = tl.where((size == 0.0) & (b != 0.0), float("nan"), z)
    c, d = _code(y, r, boost, LEVELS, BITS), _code(z, s, boost, LEVELS, BITS)
    pack2(payload, base, group, lane, left, c, d, BITS, ROWS, W)


@triton.jit
def _value(code, LEVELS: tl.constexpr, BITS: tl.constexpr):
    """The power of two that a code means, in units of the scale."""
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
    m = code & TOP
    v = ((m + (127 - LEVELS)) << 23).to(tl.float32, bitcast=True)
    v = tl.where(code > TOP, -v, v)
    v = tl.where(m == 0, 0.0, v)
    return tl.where(m == TOP, float("nan"), v)


@triton.jit
def _dequantize(
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
    base, left = tile_start(n, ROWS, W)
    group, lane = lanes(ROWS, W)
    e = group * 128 + lane % 64
    c, d = unpack2(payload, base, group, lane, left, BITS)
    size = scale_of(scale, base, e, left, 0, ROWS, W)
    worth, lower = step(size, 1.0, weight), lower_of(size)
    v = clamped((_value(c, LEVELS, BITS) * worth) * lower, bound)
    w = clamped((_value(d, LEVELS, BITS) * worth) * lower, bound)
    emit2(out + base, e, left, v, w, ADD)


@triton.jit
def _sum(a, b, coin, BITS: tl.constexpr):
    """Sum of two codes by a coin of 32 bits; the rule is in `_reference/exponential.py`."""
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
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
def _reduce(
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
    base, left = tile_start(n, ROWS, W)
    group, lane = lanes(ROWS, W)
    e = group * 128 + lane % 64
    c, d = unpack2(a, base, group, lane, left, BITS)
    f, g = unpack2(b, base, group, lane, left, BITS)
    p, k, m = base.to(tl.uint32) + e.to(tl.uint32), k0.to(tl.uint32), k1.to(tl.uint32)
    c, d = _sum(c, f, mix(p, k, m), BITS), _sum(d, g, mix(p + 64, k, m), BITS)
    pack2(out, base, group, lane, left, c, d, BITS, ROWS, W)
