"""Linear quantization on the CPU. The definitions are in `_reference/linear.py`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import GROUP, TINY, ScaleKind, code_offset, fraction_bits, groups
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
    sar,
    shl,
    shr,
    store,
    u8,
    u32,
)
from laconic.kernels._numba.pack import pack, unpack
from laconic.kernels._numba.random import mix
from laconic.kernels._numba.scale import (
    block_scale,
    factor,
    finish,
    largest,
    lift_of,
    square_sum,
    step,
    usable,
)
from laconic.kernels._pool import split

ROUND = f32(1.5 * 2**23)  # adding it leaves rint of a float up to 2^22 in the low bits
ROUND_BITS = 0x4B400000
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
) -> None:
    """See the reference."""
    fused = block > 0 and block % GROUP == 0
    if kind is not ScaleKind.GIVEN and not fused:
        scales(x, scale, block=block, kind=kind)
    fraction = fraction_bits(levels)
    data, n, ns, out = array(x), x.numel(), array(scale), array(payload)
    per = block // GROUP if fused else 1
    settings = (
        block,
        int(kind) if fused else 0,
        levels << fraction,
        fraction,
        bits,
        0 if bits == 32 else code_offset(levels, bits),
        u32(stream.k0),
        u32(stream.k1),
    )
    run = _quantize_wide if bits == 32 else _quantize
    total = groups(n)
    overflow = split(
        lambda a, b: run(data, n, ns, out, *settings, a * per, min(b * per, total)),
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
) -> None:
    """See the reference."""
    fraction = fraction_bits(levels)
    unit = 1.0 / (levels if stream is None else levels << (fraction + 1))
    k0, k1 = (0, 0) if stream is None else stream
    codes, ns, target = array(payload), array(scale), array(out)
    bound = torch.finfo(out.dtype).max
    settings = (block, bits, offset, fraction, stream is not None, u32(k0), u32(k1))
    worth = (f32(unit), f32(weight), f32(bound), add)
    run = _dequantize_wide if bits == 32 else _dequantize
    split(
        lambda a, b: run(codes, out.numel(), ns, target, *settings, *worth, a, b),
        groups(out.numel()),
        GROUP,
    )


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
def round_group(
    y: Pointer,
    start: int,
    times: np.float32,
    codes: Pointer,
    fraction: int,
    offset: int,
    p0: np.uint32,
    k0: np.uint32,
    k1: np.uint32,
) -> None:
    """codes[j] = ((rint(y[start+j]·times) + r) >> F) + offset, for 128 elements."""
    low, high, shift = u32(16 - fraction), u32(32 - fraction), i32(fraction)
    adjust = u8(offset - (ROUND_BITS >> fraction))
    for j in range(64):
        h = mix(u32(p0 + u32(j)), k0, k1)
        a = bits_of(f32(f32(get(y, start + j) * times) + ROUND))
        b = bits_of(f32(f32(get(y, start + j + 64) * times) + ROUND))
        a = i32(a + i32(shr(u32(h & u32(0xFFFF)), low)))
        b = i32(b + i32(shr(h, high)))
        store(codes, j, u8(u8(sar(a, shift)) + adjust))
        store(codes, j + 64, u8(u8(sar(b, shift)) + adjust))


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
def _quantize(
    x: np.ndarray,
    n: int,
    scale: np.ndarray,
    out: np.ndarray,
    block: int,
    kind: int,
    limit: int,
    fraction: int,
    bits: int,
    offset: int,
    k0: np.uint32,
    k1: np.uint32,
    first: int,
    last: int,
) -> bool:
    """Groups first .. last-1; True if a value exceeded its scale."""
    x, scale, out = pointer(x), pointer(scale), pointer(out)
    codes = code_scratch()
    y = float_scratch()
    gain = f32(limit)
    overflow = False
    for g in range(first, last):
        e = g * GROUP
        if kind and e % block == 0:
            store(scale, e // block, block_scale(x, e, min(e + block, n), kind))
        plain = e + GROUP <= n and (block == 0 or block % GROUP == 0)
        if plain:
            size = load(scale, e // block if block else 0)
            plain = size >= f32(TINY) and usable(size)
            if plain and not kind:
                plain = largest(x, e, e + GROUP) <= bits_of(size)
        p0 = u32(e >> 1)
        if plain:
            round_group(x, e, factor(size, gain), codes, fraction, offset, p0, k0, k1)
        else:
            overflow |= fixed_point(x, n, scale, block, gain, e, y)
            round_group(y, 0, f32(1), codes, fraction, offset, p0, k0, k1)
        pack(codes, out, g * 16 * bits, bits)
    return overflow


@kernel
def _quantize_wide(
    x: np.ndarray,
    n: int,
    scale: np.ndarray,
    out: np.ndarray,
    block: int,
    kind: int,
    limit: int,
    fraction: int,
    bits: int,
    offset: int,
    k0: np.uint32,
    k1: np.uint32,
    first: int,
    last: int,
) -> bool:
    """As _quantize, into int32 codes without packing."""
    x, scale, out = pointer(x), pointer(scale), pointer(out)
    y = float_scratch()
    overflow = False
    for g in range(first, last):
        e = g * GROUP
        overflow |= fixed_point(x, n, scale, block, f32(limit), e, y)
        for j in range(min(GROUP, n - e)):
            h = mix(u32((e >> 1) + (j & 63)), k0, k1)
            r = i32((h & u32(0xFFFF)) if j < 64 else (h >> u32(16))) >> i32(16 - fraction)
            t = i32(bits_of(f32(load(y, j) + ROUND)) - i32(ROUND_BITS))
            store(out, e + j, i32(i32(t + r) >> i32(fraction)))
    return overflow


@kernel
def values(
    codes: Pointer,
    worth: np.float32,
    offset: int,
    fraction: int,
    subtract: bool,
    p0: np.uint32,
    k0: np.uint32,
    k1: np.uint32,
    out: Pointer,
    start: int,
    add: bool,
) -> None:
    """out (+)= (code - offset)·worth; with subtract, of W in units of 2^-(F+1)."""
    if not subtract:
        for j in range(GROUP):
            v = f32(f32(i32(i32(load(codes, j)) - i32(offset))) * worth)
            put(out, start + j, f32(get(out, start + j) + v) if add else v)
        return
    shift, low, high = i32(fraction + 1), u32(16 - fraction), u32(32 - fraction)
    base = i32(i32((1 << fraction) - 1) - i32(offset << (fraction + 1)))
    for j in range(64):
        h = mix(u32(p0 + u32(j)), k0, k1)
        a = i32(shl(i32(load(codes, j)), shift) + base)
        b = i32(shl(i32(load(codes, j + 64)), shift) + base)
        a = i32(a - i32(u32(shr(u32(h & u32(0xFFFF)), low) << u32(1))))
        b = i32(b - i32(u32(shr(h, high) << u32(1))))
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
def _dequantize(
    data: np.ndarray,
    n: int,
    scale: np.ndarray,
    out: np.ndarray,
    block: int,
    bits: int,
    offset: int,
    fraction: int,
    subtract: bool,
    k0: np.uint32,
    k1: np.uint32,
    unit: np.float32,
    weight: np.float32,
    bound: np.float32,
    add: bool,
    first: int,
    last: int,
) -> None:
    """Groups first .. last-1."""
    data, scale, out = pointer(data), pointer(scale), pointer(out)
    codes = code_scratch()
    y = float_scratch()
    for g in range(first, last):
        e = g * GROUP
        if bits == 8 and e + GROUP > n:  # a sum of 8-bit codes comes without padding
            for j in range(n - e):
                store(codes, j, u8(load(data, e + j) ^ u8(0x80)))
        else:
            unpack(data, g * 16 * bits, codes, bits)
        plain = e + GROUP <= n and (block == 0 or block % GROUP == 0)
        if plain:
            size = load(scale, e // block if block else 0)
            # no code is worth more than 512 scales, so nothing needs clamping here
            plain = size >= f32(TINY) and f32(size * max(abs(weight), f32(1))) < f32(
                bound / f32(512)
            )
        p0 = u32(e >> 1)
        if plain:
            worth = step(size, unit, weight)
            values(codes, worth, offset, fraction, subtract, p0, k0, k1, out, e, add)
        else:
            values(codes, f32(1), offset, fraction, subtract, p0, k0, k1, y, 0, False)
            count = min(GROUP, n - e)
            per_element(y, scale, block, e, count, unit, weight, bound)
            emit(y, out, e, count, add)


@kernel
def _dequantize_wide(
    data: np.ndarray,
    n: int,
    scale: np.ndarray,
    out: np.ndarray,
    block: int,
    bits: int,
    offset: int,
    fraction: int,
    subtract: bool,
    k0: np.uint32,
    k1: np.uint32,
    unit: np.float32,
    weight: np.float32,
    bound: np.float32,
    add: bool,
    first: int,
    last: int,
) -> None:
    """As _dequantize, from int32 codes; they carry no dither to subtract."""
    data, scale, out = pointer(data), pointer(scale), pointer(out)
    y = float_scratch()
    for g in range(first, last):
        e = g * GROUP
        count = min(GROUP, n - e)
        for j in range(count):
            store(y, j, f32(load(data, e + j)))
        per_element(y, scale, block, e, count, unit, weight, bound)
        emit(y, out, e, count, add)
