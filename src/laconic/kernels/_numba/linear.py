"""Linear quantization on the CPU. The definitions are in `_reference/linear.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import (
    GROUP,
    TINY,
    ScaleKind,
    code_offset,
    dither_centre,
    fraction_bits,
    groups,
)
from laconic.kernels._numba.group import emit, fixed_point, per_element, round_group, values
from laconic.kernels._numba.memory import (
    Pointer,
    array,
    bits_of,
    code_scratch,
    f32,
    float_scratch,
    get,
    i32,
    kernel,
    load,
    pointer,
    put,
    store,
    u32,
)
from laconic.kernels._numba.pack import pack, unpack
from laconic.kernels._numba.scale import (
    block_scale,
    factor,
    finish,
    largest,
    square_sum,
    step,
    usable,
)
from laconic.kernels._numba.wide import dequantize_wide, quantize_wide
from laconic.kernels._pool import split

_SPAN = 1 << 16  # elements a part of a whole-tensor scale


def scales(x: Tensor, out: Tensor, *, block: int, kind: ScaleKind) -> None:
    """See the reference."""
    data, n = array(x), x.numel()
    if block:
        target = array(out)
        split(lambda a, b: _scales(data, n, target, block, int(kind), a, b), out.numel(), block)
        return
    parts = split(lambda a, b: _whole(data, n, int(kind), a, b), -(-n // _SPAN), _SPAN)
    m = max(part[0] for part in parts)
    out.fill_(float(finish(i32(m), sum(part[1] for part in parts), int(kind))))


def quantize(
    x: Tensor,
    scale: Tensor,
    payload: Tensor,
    *,
    stream: Stream,
    block: int,
    levels: int,
    bits: int,
    kind: ScaleKind,
    shift: int = 0,
) -> None:
    """See the reference."""
    fraction = fraction_bits(levels)
    if bits == 32:
        return quantize_wide(x, scale, payload, stream, levels << fraction, fraction, shift)
    fused = block > 0 and block % GROUP == 0
    if kind is not ScaleKind.GIVEN and not fused:
        scales(x, scale, block=block, kind=kind)
    data, n, ns, out = array(x), x.numel(), array(scale), array(payload)
    per = block // GROUP if fused else 1
    settings = (
        block,
        int(kind) if fused else 0,
        levels << fraction,
        fraction,
        bits,
        0 if bits == 8 else code_offset(levels, bits),  # 8 bits hold q itself
        u32(stream.k0),
        u32(stream.k1),
        u32(shift << (16 - fraction)) if shift else None,
    )
    total = groups(n)
    overflow = split(
        lambda a, b: _quantize(data, n, ns, out, *settings, a * per, min(b * per, total)),
        -(-total // per),
        per * GROUP,
    )
    if kind is ScaleKind.GIVEN and any(overflow):
        scale.fill_(torch.nan)


def accumulate(source: Tensor, out: Tensor, *, weight: float, add: bool) -> None:
    """See the reference."""
    data, target = array(source), array(out)
    split(lambda a, b: _accumulate(data, target, f32(weight), add, a, b), out.numel(), 1)


def dequantize(
    payload: Tensor,
    scale: Tensor,
    out: Tensor,
    *,
    stream: Stream | None,
    block: int,
    levels: int,
    bits: int,
    offset: int,
    weight: float,
    add: bool,
    shift: int = 0,
    workers: int = 1,
) -> None:
    """See the reference."""
    fraction = fraction_bits(levels)
    unit = 1.0 / (levels if stream is None else levels << (fraction + 1))
    worth = (f32(unit), f32(weight), f32(torch.finfo(out.dtype).max), add)
    dither = dither_settings(stream, fraction, shift, workers)
    if bits == 32:
        return dequantize_wide(payload, scale, out, *dither, *worth)
    codes, ns, target = array(payload), array(scale), array(out)
    settings = (block, bits, offset, *dither)
    split(
        lambda a, b: _dequantize(codes, out.numel(), ns, target, *settings, *worth, a, b),
        groups(out.numel()),
        GROUP,
    )


def dither_settings(stream: Stream | None, fraction: int, shift: int, workers: int) -> tuple:
    """What decoding needs to know of the dither."""
    k0, k1 = (0, 0) if stream is None else stream
    strata = None
    if stream is not None and (shift or workers > 1):
        strata = (u32(workers % (1 << fraction)), u32(shift))
    centre = dither_centre(workers, fraction)
    return fraction, stream is not None, centre, u32(k0), u32(k1), strata


@kernel
def _scales(
    x: np.ndarray, n: int, out: np.ndarray, block: int, kind: int, first: int, last: int
) -> None:
    x, out = pointer(x), pointer(out)
    for b in range(first, last):
        store(out, b, block_scale(x, b * block, min((b + 1) * block, n), kind))


@kernel
def _whole(x: np.ndarray, n: int, kind: int, first: int, last: int) -> tuple[np.int32, float]:
    """Largest magnitude and sum of squares of some spans."""
    x = pointer(x)
    m, squares = i32(0), 0.0
    for s in range(first, last):
        end = min((s + 1) * _SPAN, n)
        m = max(m, largest(x, s * _SPAN, end))
        if kind == 2:
            squares += square_sum(x, s * _SPAN, end)
    return m, squares


@kernel
def _quantize(x: np.ndarray, n: int, scale: np.ndarray, out: np.ndarray, *rest: Any) -> bool:
    return quantize_groups(pointer(x), n, pointer(scale), pointer(out), *rest)


@kernel
def quantize_groups(
    x: Pointer,
    n: int,
    scale: Pointer,
    out: Pointer,
    block: int,
    kind: int,
    limit: int,
    fraction: int,
    bits: int,
    offset: int,
    k0: np.uint32,
    k1: np.uint32,
    lag: np.uint32 | None,
    first: int,
    last: int,
) -> bool:
    """Groups first .. last-1; True if a value exceeded its scale."""
    codes = code_scratch()
    y = float_scratch()
    # codes of 4 and 8 bits go straight into the wire, others by way of a byte each
    direct = bits == 4 or bits == 8
    target = out if direct else codes
    gain = f32(limit)
    overflow = False
    whole = block % GROUP == 0  # groups do not cross blocks
    per = block // GROUP if whole and block else last + 1  # groups a block
    b = first // per
    until = first  # the group at which the next block starts
    size = times = f32(0)
    for g in range(first, last):
        e = g * GROUP
        if whole and g == until:
            if g > first:
                b += 1
            until = (b + 1) * per
            if kind:
                store(scale, b, block_scale(x, e, min(e + block, n), kind))
            size = load(scale, b)
            times = factor(size, gain)
        plain = whole and e + GROUP <= n and size >= f32(TINY) and usable(size)
        if kind and size == f32(
            0
        ):  # a block of zeros, times zero: sparse gradients are full of them
            plain = e + GROUP <= n
        if plain and not kind:
            plain = largest(x, e, e + GROUP) <= bits_of(size)
        p0 = u32(e >> 1)
        to = g * 16 * bits if direct else 0
        if plain:
            round_group(x, e, times, target, to, bits, fraction, offset, p0, k0, k1, lag)
        else:
            overflow |= fixed_point(x, n, scale, block, gain, e, y)
            round_group(y, 0, f32(1), target, to, bits, fraction, offset, p0, k0, k1, lag)
        if not direct:
            pack(codes, out, g * 16 * bits, bits)
    return overflow


@kernel
def _accumulate(
    source: np.ndarray, out: np.ndarray, weight: np.float32, add: bool, first: int, last: int
) -> None:
    source, out = pointer(source), pointer(out)
    if add:
        for i in range(first, last):
            put(out, i, f32(get(out, i) + f32(get(source, i) * weight)))
    else:
        for i in range(first, last):
            put(out, i, f32(get(source, i) * weight))


@kernel
def _dequantize(data: np.ndarray, n: int, scale: np.ndarray, out: np.ndarray, *rest: Any) -> None:
    dequantize_groups(pointer(data), n, pointer(scale), pointer(out), *rest)


@kernel
def dequantize_groups(
    data: Pointer,
    n: int,
    scale: Pointer,
    out: Pointer,
    block: int,
    bits: int,
    offset: int,
    fraction: int,
    subtract: bool,
    centre: int,
    k0: np.uint32,
    k1: np.uint32,
    strata: tuple[np.uint32, np.uint32] | None,
    unit: np.float32,
    weight: np.float32,
    bound: np.float32,
    add: bool,
    first: int,
    last: int,
) -> None:
    """Groups first .. last-1."""
    codes = code_scratch()
    y = float_scratch()
    whole = block % GROUP == 0  # groups do not cross blocks
    per = block // GROUP if whole and block else last + 1  # groups a block
    b = first // per
    until = first  # the group at which the next block starts
    worth, plain = f32(0), False
    base = centre - (offset << (fraction + 1)) if subtract else -offset
    draw = (k0, k1, strata)
    for g in range(first, last):
        e = g * GROUP
        source, at = data, g * 16 * bits
        if bits == 8 and e + GROUP > n:  # a sum of 8-bit codes comes without padding
            for j in range(n - e):
                store(codes, j, load(data, e + j))
            source, at = codes, 0
        elif bits != 4 and bits != 8:
            unpack(data, at, codes, bits)
            source, at = codes, 0
        if whole and g == until:
            if g > first:
                b += 1
            until = (b + 1) * per
            size = load(scale, b)
            worth = step(size, unit, weight)
            # no code is worth more than 512 scales, so nothing needs clamping here
            most = f32(size * max(abs(weight), f32(1)))
            plain = (size >= f32(TINY) or size == f32(0)) and most < f32(bound / f32(512))
        p0 = u32(e >> 1)
        if plain and e + GROUP <= n:
            values(source, at, bits, worth, base, fraction, subtract, p0, *draw, out, e, add)
        else:
            values(source, at, bits, f32(1), base, fraction, subtract, p0, *draw, y, 0, False)
            count = min(GROUP, n - e)
            per_element(y, scale, block, e, count, unit, weight, bound)
            emit(y, out, e, count, add)
