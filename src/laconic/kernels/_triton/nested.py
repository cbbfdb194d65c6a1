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
from laconic.kernels._layout import CHECK_GROUPS, GROUP, ScaleKind
from laconic.kernels._protocol import Lattice, Modulo, Output
from laconic.kernels._triton.group import (
    OPTIONS,
    clamped,
    dither2,
    emit2,
    lanes,
    load2,
    lower_of,
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
from laconic.kernels._triton.linear import scales

_ROW = CHECK_GROUPS * GROUP
_LIFT: tl.constexpr = tl.constexpr(64)
_SIDE_LIMIT: tl.constexpr = tl.constexpr(float(_layout.SIDE_LIMIT))


def nested_quantize(
    x: Tensor,
    scale: Tensor,
    checks: Tensor,
    codes: Tensor,
    lattice: Lattice,
    modulo: Modulo,
    *,
    stream: Stream,
    kind: ScaleKind,
) -> None:
    """See `Kernels`."""
    scales(x, scale, block=lattice.block, kind=kind)
    tile = shape(_ROW)
    _quantize[programs(x.numel(), tile)](
        x,
        scale,
        checks,
        codes,
        x.numel(),
        *words(stream),
        modulo.alpha * lattice.limit,
        **_settings(lattice, modulo),
        **tile,
        **OPTIONS,
    )


def _settings(lattice: Lattice, modulo: Modulo) -> dict[str, int]:
    """Launch arguments of both kernels."""
    return {
        "BLOCK": lattice.block,
        "FRACTION": lattice.fraction,
        "RATIO": modulo.ratio,
        "BITS": lattice.bits,
    }


def nested_dequantize(
    codes: Tensor,
    scale: Tensor,
    checks: Tensor,
    side: Tensor,
    failed: Tensor,
    output: Output,
    lattice: Lattice,
    modulo: Modulo,
    *,
    stream: Stream,
) -> None:
    """See `Kernels`."""
    (out, weight, add), alpha, tile = output, modulo.alpha, shape(_ROW)
    _dequantize[programs(out.numel(), tile)](
        codes,
        scale,
        checks,
        side,
        out,
        failed,
        out.numel(),
        *words(stream),
        alpha * lattice.limit,
        alpha / (lattice.limit << 1),
        weight,
        (1.0 - alpha * alpha) * weight,
        torch.finfo(out.dtype).max,
        ADD=add,
        **_settings(lattice, modulo),
        **tile,
        **OPTIONS,
    )


@triton.jit
def _cell(
    y,
    r,
    FRACTION: tl.constexpr,
    RATIO: tl.constexpr,
):
    """Code of one value per lane, and its share of the check."""
    y = tl.where(y == y, y, 0.0)
    index = (rint_bits(y) - 0x4B400000 + r) >> FRACTION
    HALF: tl.constexpr = (RATIO - 1) // 2
    MAGIC: tl.constexpr = (1 << 20) // RATIO + 1
    cell = (((index + (HALF + _LIFT * RATIO)) * MAGIC) >> 20) - _LIFT
    return index - RATIO * cell + HALF, cell * (r | 1)


@triton.jit(do_not_specialize=["k0", "k1"])
def _quantize(
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
    base, left = tile_start(n, ROWS, W)
    group, lane = lanes(ROWS, W)
    e = group * 128 + lane % 64
    a, b = load2(x + base, e, left)
    r, s = dither2(base, group, lane, k0, k1, FRACTION)
    size = scale_of(scale, base, e, left, BLOCK, ROWS, W)
    other = scale_of(scale, base, e + 64, left, BLOCK, ROWS, W)
    y, z = scaled2(a, b, size, other, gain)
    c, first = _cell(y, r, FRACTION, RATIO)
    d, second = _cell(z, s, FRACTION, RATIO)
    pack2(payload, base, group, lane, left, c, d, BITS, ROWS, W)
    row = tl.arange(0, ROWS)[:, None]
    byte = (tl.sum(first + second, 1)[:, None] & 0xFF).to(tl.uint8)
    tl.store(check + base // 512 + row, byte, mask=row * 512 < left)


@triton.jit
def _resolved(
    code,
    r,
    size,
    real,
    y,
    near,
    unit,
    weight,
    beta,
    bound,
    FRACTION: tl.constexpr,
    RATIO: tl.constexpr,
):
    """One decoded value per lane, and its share of the check."""
    near = clamped(tl.where(near == near, near, 0.0), _SIDE_LIMIT)
    w = ((code - (RATIO - 1) // 2) << (FRACTION + 1)) - 2 * r + ((1 << FRACTION) - 1)
    z = w - 2 * (rint_bits(near) - 0x4B400000) + (RATIO << FRACTION)
    MAGIC: tl.constexpr = (1 << 20) // RATIO + 1
    k = ((((z >> (FRACTION + 1)) + _LIFT * RATIO) * MAGIC) >> 20) - _LIFT
    v = (w - (RATIO << (FRACTION + 1)) * k).to(tl.float32)
    v = clamped((v * step(size, unit, weight)) * lower_of(size), bound)
    v = clamped(v + y * beta, bound) + y * 0.0  # NaN if side information is not finite
    return v, tl.where(real, -k * (r | 1), 0)


@triton.jit(do_not_specialize=["k0", "k1"])
def _dequantize(
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
    base, left = tile_start(n, ROWS, W)
    group, lane = lanes(ROWS, W)
    e = group * 128 + lane % 64
    c, d = unpack2(payload, base, group, lane, left, BITS)
    y, z = load2(side + base, e, left)
    r, s = dither2(base, group, lane, k0, k1, FRACTION)
    size = scale_of(scale, base, e, left, BLOCK, ROWS, W)
    other = scale_of(scale, base, e + 64, left, BLOCK, ROWS, W)
    near, close = scaled2(y, z, size, other, gain)
    real = group * 128 < left  # a row may reach past the last group, where there are no codes
    v, first = _resolved(c, r, size, real, y, near, unit, weight, beta, bound, FRACTION, RATIO)
    w, second = _resolved(d, s, other, real, z, close, unit, weight, beta, bound, FRACTION, RATIO)
    emit2(out + base, e, left, v, w, ADD)
    row = tl.arange(0, ROWS)[:, None]
    real = row * 512 < left
    sent = tl.load(check + base // 512 + row, mask=real, other=0).to(tl.int32)
    wrong = (tl.sum(first + second, 1)[:, None] & 0xFF) != sent
    tl.store(failed + base // 512 + row, wrong.to(tl.uint8), mask=real)
