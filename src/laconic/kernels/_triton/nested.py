"""Nested quantization on the GPU. The definitions are in `_reference/nested.py`.

A row is a check block of 512 values. Floor division as in `_numba/nested.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic._key import Stream
from laconic.kernels import _layout
from laconic.kernels._layout import CHECK_GROUPS, GROUP, ScaleKind, fraction_bits
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
    dither2,
    flush,
    gather,
    group_bytes,
    lanes,
    load2,
    no_bytes,
    planes,
    programs,
    scatter,
    shape,
    tile_start,
    words,
)

_ROW = CHECK_GROUPS * GROUP
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
    tile = shape(bits, _ROW)
    _nested_quantize[programs(x.numel(), tile)](
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
        **tile,
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
    tile = shape(bits, _ROW)
    _nested_dequantize[programs(out.numel(), tile)](
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
        torch.finfo(out.dtype).max,
        BLOCK=block,
        FRACTION=fraction,
        RATIO=ratio,
        BITS=bits,
        ADD=add,
        **tile,
        **OPTIONS,
    )


@triton.jit
def _cell(
    x,
    r,
    base,
    e,
    left,
    scale,
    gain,
    total,
    BLOCK: tl.constexpr,
    FRACTION: tl.constexpr,
    RATIO: tl.constexpr,
):
    """Code of one value per lane; its share of the check is added to total."""
    y = scaled(x, of_element(scale, base, e, left, BLOCK), gain)
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
    RUN: tl.constexpr,
):
    base, left = tile_start(n, ROWS, W, RUN)
    e = lanes(ROWS, W, RUN)
    to = group_bytes(payload, base, e, BITS)
    even, odd, one = no_bytes(e)
    total = e * 0
    for i in tl.static_range(64 // RUN):
        f = e + i * RUN
        a, b = load2(x + base, f, left)
        r, s = dither2(base, f, k0, k1, FRACTION)
        c, total = _cell(a, r, base, f, left, scale, gain, total, BLOCK, FRACTION, RATIO)
        d, total = _cell(b, s, base, f + 64, left, scale, gain, total, BLOCK, FRACTION, RATIO)
        even, odd, one = gather(to, f, left, c, d, even, odd, one, i, BITS, RUN)
    flush(to, e, left, even, odd, one, BITS, RUN)
    row = tl.arange(0, ROWS)[:, None]
    byte = (tl.sum(total, 1)[:, None] & 0xFF).to(tl.uint8)
    tl.store(check + base // 512 + row, byte, mask=row * 512 < left)


@triton.jit
def _resolved(
    code,
    r,
    base,
    e,
    left,
    scale,
    y,
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
    size = of_element(scale, base, e, left, BLOCK)
    near = scaled(y, size, gain)
    near = clamped(tl.where(near == near, near, 0.0), _SIDE_LIMIT)
    w = ((code - (RATIO - 1) // 2) << (FRACTION + 1)) - 2 * r + ((1 << FRACTION) - 1)
    z = w - 2 * (rint_bits(near) - 0x4B400000) + (RATIO << FRACTION)
    MAGIC: tl.constexpr = (1 << 20) // RATIO + 1
    k = ((((z >> (FRACTION + 1)) + _LIFT * RATIO) * MAGIC) >> 20) - _LIFT
    v = (w - (RATIO << (FRACTION + 1)) * k).to(tl.float32)
    v = clamped((v * step(size, unit, weight)) * lower_of(size), bound)
    emit(out, e, left, v + y * beta, ADD)
    # a row may reach past the last group, where there are no codes
    return total - tl.where((e // 128) * 128 < left, k * (r | 1), 0)


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
    RUN: tl.constexpr,
):
    base, left = tile_start(n, ROWS, W, RUN)
    e = lanes(ROWS, W, RUN)
    at = group_bytes(payload, base, e, BITS)
    even, odd, one = planes(at, e, left, BITS, RUN)
    out += base
    total = e * 0
    for i in tl.static_range(64 // RUN):
        f = e + i * RUN
        c, d = scatter(at, f, left, even, odd, one, i, BITS, RUN)
        y, z = load2(side + base, f, left)
        r, s = dither2(base, f, k0, k1, FRACTION)
        total = _resolved(
            c, r, base, f, left, scale, y, gain, unit, weight, beta, bound, out, total,
            BLOCK, FRACTION, RATIO, ADD,
        )  # fmt: skip
        total = _resolved(
            d, s, base, f + 64, left, scale, z, gain, unit, weight, beta, bound, out, total,
            BLOCK, FRACTION, RATIO, ADD,
        )  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    real = row * 512 < left
    sent = tl.load(check + base // 512 + row, mask=real, other=0).to(tl.int32)
    wrong = (tl.sum(total, 1)[:, None] & 0xFF) != sent
    tl.store(failed + base // 512 + row, wrong.to(tl.uint8), mask=real)
