"""Nested quantization on the GPU. The definitions are in `_reference/nested.py`.

A row is a check block: 512 values, 64 lanes. Floor division as in `_numba/nested.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from laconic._key import Stream
from laconic.kernels import _layout
from laconic.kernels._layout import CHECK_GROUPS, GROUP, ScaleKind, checks, fraction_bits
from laconic.kernels._triton.linear import scales
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
    pack8,
    row_starts,
    rows,
    unpack8,
    words,
)

_WIDTH = CHECK_GROUPS * GROUP // 8
_ROWS = rows(_WIDTH)
_LIFT: tl.constexpr = tl.constexpr(64)
_SIDE_LIMIT: tl.constexpr = tl.constexpr(float(_layout.SIDE_LIMIT))


def nested_quantize(
    x: Tensor,
    scale: Tensor,
    checks_out: Tensor,
    payload: Tensor,
    *,
    stream: Stream,
    block: int,
    levels: int,
    ratio: int,
    alpha: float,
    bits: int,
    kind: ScaleKind,
) -> None:
    """See the reference."""
    scales(x, scale, block=block, kind=kind)
    fraction = fraction_bits(levels)
    _nested_quantize[(triton.cdiv(checks(x.numel()), _ROWS),)](
        x,
        scale,
        checks_out,
        payload,
        x.numel(),
        *words(stream),
        alpha * (levels << fraction),
        BLOCK=block,
        FRACTION=fraction,
        RATIO=ratio,
        BITS=bits,
        ROWS=_ROWS,
        W=_WIDTH,
        **OPTIONS,
    )


def nested_dequantize(
    payload: Tensor,
    scale: Tensor,
    checks_in: Tensor,
    side: Tensor,
    out: Tensor,
    failed: Tensor,
    *,
    stream: Stream,
    block: int,
    levels: int,
    ratio: int,
    alpha: float,
    bits: int,
    weight: float,
    add: bool,
) -> None:
    """See the reference."""
    fraction = fraction_bits(levels)
    _nested_dequantize[(triton.cdiv(checks(out.numel()), _ROWS),)](
        payload,
        scale,
        checks_in,
        side,
        out,
        failed,
        out.numel(),
        *words(stream),
        alpha * (levels << fraction),
        alpha / (levels << (fraction + 1)),
        weight,
        (1.0 - alpha * alpha) * weight,
        largest_float(out.dtype),
        BLOCK=block,
        FRACTION=fraction,
        RATIO=ratio,
        BITS=bits,
        ADD=add,
        ROWS=_ROWS,
        W=_WIDTH,
        **OPTIONS,
    )


@triton.jit
def _cell(
    x,
    r,
    e,
    n,
    scale,
    gain,
    total,
    BLOCK: tl.constexpr,
    FRACTION: tl.constexpr,
    RATIO: tl.constexpr,
):
    """Code of one value per lane, and its share of the check."""
    y = scaled(x, of_element(scale, e, n, BLOCK), gain)
    y = tl.where(y == y, y, 0.0)
    index = (rint_bits(y) - 0x4B400000 + r) >> FRACTION
    HALF: tl.constexpr = (RATIO - 1) // 2
    MAGIC: tl.constexpr = (1 << 20) // RATIO + 1
    cell = (((index + (HALF + _LIFT * RATIO)) * MAGIC) >> 20) - _LIFT
    return index - RATIO * cell + HALF, total + cell * (r | 1)


@triton.jit(do_not_specialize=["k0", "k1"])
def _nested_quantize(
    x,
    scale,
    check,
    payload,
    n,
    k0,
    k1,
    gain,
    BLOCK: tl.constexpr,
    FRACTION: tl.constexpr,
    RATIO: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    start = row_starts(ROWS, W)
    e = start + lanes(W)
    x0, x1, x2, x3, x4, x5, x6, x7 = load8(x, e, n)
    r0, r1, r2, r3, r4, r5, r6, r7 = dither8(e, k0, k1, FRACTION)
    t = r0 * 0
    c0, t = _cell(x0, r0, e, n, scale, gain, t, BLOCK, FRACTION, RATIO)
    c1, t = _cell(x1, r1, e + 16, n, scale, gain, t, BLOCK, FRACTION, RATIO)
    c2, t = _cell(x2, r2, e + 32, n, scale, gain, t, BLOCK, FRACTION, RATIO)
    c3, t = _cell(x3, r3, e + 48, n, scale, gain, t, BLOCK, FRACTION, RATIO)
    c4, t = _cell(x4, r4, e + 64, n, scale, gain, t, BLOCK, FRACTION, RATIO)
    c5, t = _cell(x5, r5, e + 80, n, scale, gain, t, BLOCK, FRACTION, RATIO)
    c6, t = _cell(x6, r6, e + 96, n, scale, gain, t, BLOCK, FRACTION, RATIO)
    c7, t = _cell(x7, r7, e + 112, n, scale, gain, t, BLOCK, FRACTION, RATIO)
    pack8(payload, e, n, c0, c1, c2, c3, c4, c5, c6, c7, BITS)
    total = tl.sum(t, 1)[:, None] & 0xFF
    tl.store(check + start // (8 * W), total.to(tl.uint8), mask=start < n)


@triton.jit
def _resolved(
    code,
    r,
    y,
    e,
    n,
    scale,
    gain,
    unit,
    weight,
    beta,
    bound,
    out,
    total,
    BLOCK: tl.constexpr,
    FRACTION: tl.constexpr,
    RATIO: tl.constexpr,
    ADD: tl.constexpr,
):
    """Decode one value per lane into out; its share of the check is added to total."""
    size = of_element(scale, e, n, BLOCK)
    near = scaled(y, size, gain)
    near = clamped(tl.where(near == near, near, 0.0), _SIDE_LIMIT)
    w = ((code - (RATIO - 1) // 2) << (FRACTION + 1)) - 2 * r + ((1 << FRACTION) - 1)
    z = w - 2 * (rint_bits(near) - 0x4B400000) + (RATIO << FRACTION)
    MAGIC: tl.constexpr = (1 << 20) // RATIO + 1
    k = ((((z >> (FRACTION + 1)) + _LIFT * RATIO) * MAGIC) >> 20) - _LIFT
    v = (w - (RATIO << (FRACTION + 1)) * k).to(tl.float32)
    v = clamped((v * step(size, unit, weight)) * lower_of(size), bound)
    emit(out, e, n, v + y * beta, ADD)
    return total - k * (r | 1)


@triton.jit(do_not_specialize=["k0", "k1"])
def _nested_dequantize(
    payload,
    scale,
    check,
    side,
    out,
    failed,
    n,
    k0,
    k1,
    gain,
    unit,
    weight,
    beta,
    bound,
    BLOCK: tl.constexpr,
    FRACTION: tl.constexpr,
    RATIO: tl.constexpr,
    BITS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    start = row_starts(ROWS, W)
    e = start + lanes(W)
    c0, c1, c2, c3, c4, c5, c6, c7 = unpack8(payload, e, n, BITS)
    y0, y1, y2, y3, y4, y5, y6, y7 = load8(side, e, n)
    r0, r1, r2, r3, r4, r5, r6, r7 = dither8(e, k0, k1, FRACTION)
    s, g, u, w, b, m = scale, gain, unit, weight, beta, bound
    B: tl.constexpr = BLOCK
    F: tl.constexpr = FRACTION
    R: tl.constexpr = RATIO
    t = r0 * 0
    t = _resolved(c0, r0, y0, e, n, s, g, u, w, b, m, out, t, B, F, R, ADD)
    t = _resolved(c1, r1, y1, e + 16, n, s, g, u, w, b, m, out, t, B, F, R, ADD)
    t = _resolved(c2, r2, y2, e + 32, n, s, g, u, w, b, m, out, t, B, F, R, ADD)
    t = _resolved(c3, r3, y3, e + 48, n, s, g, u, w, b, m, out, t, B, F, R, ADD)
    t = _resolved(c4, r4, y4, e + 64, n, s, g, u, w, b, m, out, t, B, F, R, ADD)
    t = _resolved(c5, r5, y5, e + 80, n, s, g, u, w, b, m, out, t, B, F, R, ADD)
    t = _resolved(c6, r6, y6, e + 96, n, s, g, u, w, b, m, out, t, B, F, R, ADD)
    t = _resolved(c7, r7, y7, e + 112, n, s, g, u, w, b, m, out, t, B, F, R, ADD)
    # rows are whole check blocks; groups beyond the last hold no codes, so they count nothing
    total = tl.sum(tl.where((e // 128) * 128 < n, t, 0), 1)[:, None] & 0xFF
    row = start // (8 * W)
    sent = tl.load(check + row, mask=start < n, other=0).to(tl.int32)
    tl.store(failed + row, (total != sent).to(tl.uint8), mask=start < n)
