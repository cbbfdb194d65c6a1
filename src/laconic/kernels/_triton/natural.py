"""Natural quantization on the GPU. The definitions are in `_reference/natural.py`."""

from __future__ import annotations

import torch
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
    dither2,
    flush,
    gather,
    group_bytes,
    lanes,
    load2,
    mix,
    no_bytes,
    planes,
    programs,
    scatter,
    shape,
    tile_start,
    words,
)


def natural_quantize(
    x: Tensor, scale: Tensor, payload: Tensor, *, stream: Stream, levels: int, bits: int
) -> None:
    """See the reference."""
    tile = shape(bits)
    _natural_quantize[programs(x.numel(), tile)](
        x,
        scale,
        payload,
        x.numel(),
        *words(stream),
        2.0 ** (levels + 15 - 48),
        LEVELS=levels,
        BITS=bits,
        **tile,
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
    tile = shape(bits)
    _natural_dequantize[programs(out.numel(), tile)](
        payload,
        scale,
        out,
        out.numel(),
        weight,
        torch.finfo(out.dtype).max,
        LEVELS=levels,
        BITS=bits,
        ADD=add,
        **tile,
        **OPTIONS,
    )


def natural_reduce(a: Tensor, b: Tensor, out: Tensor, *, stream: Stream, bits: int) -> None:
    """See the reference."""
    n = out.numel() // (16 * bits) * GROUP
    tile = shape(bits)
    _natural_reduce[programs(n, tile)](a, b, out, n, *words(stream), BITS=bits, **tile, **OPTIONS)


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
    RUN: tl.constexpr,
):
    base, left = tile_start(n, ROWS, W, RUN)
    e = lanes(ROWS, W, RUN)
    size = of_element(scale, base, e, left, 0)
    to = group_bytes(payload, base, e, BITS)
    even, odd, one = no_bytes(e)
    for i in tl.static_range(64 // RUN):
        f = e + i * RUN
        a, b = load2(x + base, f, left)
        r, s = dither2(base, f, k0, k1, 16)
        c, d = _code(a, r, size, boost, LEVELS, BITS), _code(b, s, size, boost, LEVELS, BITS)
        even, odd, one = gather(to, f, left, c, d, even, odd, one, i, BITS, RUN)
    flush(to, e, left, even, odd, one, BITS, RUN)


@triton.jit
def _value(
    code,
    e,
    left,
    worth,
    lower,
    bound,
    out,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Decode one value per lane into out."""
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
    m = code & TOP
    v = ((m + (127 - LEVELS)) << 23).to(tl.float32, bitcast=True)
    v = tl.where(m == 0, 0.0, v)
    v = tl.where(m == TOP, float("nan"), v)
    v = tl.where(code > TOP, -v, v)
    emit(out, e, left, clamped((v * worth) * lower, bound), ADD)


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
    RUN: tl.constexpr,
):
    base, left = tile_start(n, ROWS, W, RUN)
    e = lanes(ROWS, W, RUN)
    out += base
    size = of_element(scale, base, e, left, 0)
    worth, lower = step(size, 1.0, weight), lower_of(size)
    at = group_bytes(payload, base, e, BITS)
    even, odd, one = planes(at, e, left, BITS, RUN)
    for i in tl.static_range(64 // RUN):
        f = e + i * RUN
        c, d = scatter(at, f, left, even, odd, one, i, BITS, RUN)
        _value(c, f, left, worth, lower, bound, out, LEVELS, BITS, ADD)
        _value(d, f + 64, left, worth, lower, bound, out, LEVELS, BITS, ADD)


@triton.jit
def _sum(a, b, p, k0, k1, BITS: tl.constexpr):
    """Sum of two codes by draw p; the rule is in `_reference/natural.py`."""
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
    coin = mix(p, k0.to(tl.uint32), k1.to(tl.uint32))
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
    RUN: tl.constexpr,
):
    base, left = tile_start(n, ROWS, W, RUN)
    e = lanes(ROWS, W, RUN)
    p, q = group_bytes(a, base, e, BITS), group_bytes(b, base, e, BITS)
    p_even, p_odd, p_one = planes(p, e, left, BITS, RUN)
    q_even, q_odd, q_one = planes(q, e, left, BITS, RUN)
    to = group_bytes(out, base, e, BITS)
    even, odd, one = no_bytes(e)
    first = base.to(tl.uint32)
    for i in tl.static_range(64 // RUN):
        f = e + i * RUN
        c, d = scatter(p, f, left, p_even, p_odd, p_one, i, BITS, RUN)
        g, h = scatter(q, f, left, q_even, q_odd, q_one, i, BITS, RUN)
        c = _sum(c, g, first + f.to(tl.uint32), k0, k1, BITS)
        d = _sum(d, h, first + (f + 64).to(tl.uint32), k0, k1, BITS)
        even, odd, one = gather(to, f, left, c, d, even, odd, one, i, BITS, RUN)
    flush(to, e, left, even, odd, one, BITS, RUN)
