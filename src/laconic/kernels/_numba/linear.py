"""Linear quantization on the CPU. The definitions are in `_reference/linear.py`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic.kernels._layout import (
    GROUP,
    TINY,
    ScaleKind,
    groups,
)
from laconic.kernels._numba.group import (
    ROUND,
    ROUND_BITS,
    Decoding,
    Rounding,
    Words,
    Worth,
    block_scale,
    decoding_of,
    emit,
    factor,
    finish,
    fixed_point,
    largest,
    mix,
    pack,
    per_element,
    round_group,
    rounding_of,
    square_sum,
    step,
    unpack,
    usable,
    values,
    worth_of,
)
from laconic.kernels._numba.intrinsics import (
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
    shr,
    store,
    u32,
)
from laconic.kernels._pool import split
from laconic.kernels._protocol import Dither, Lattice, Output

_SPAN = 1 << 16  # elements a part of a whole-tensor scale


def scales(x: Tensor, out: Tensor, *, block: int, kind: ScaleKind) -> None:
    """See `Kernels`."""
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
    codes: Tensor,
    lattice: Lattice,
    *,
    dither: Dither,
    kind: ScaleKind,
) -> None:
    """See `Kernels`."""
    data, n, ns, out = array(x), x.numel(), array(scale), array(codes)
    block = lattice.block
    fused = kind is not ScaleKind.GIVEN and block > 0 and block % GROUP == 0
    if kind is not ScaleKind.GIVEN and not fused:
        scales(x, scale, block=block, kind=kind)
    how = rounding_of(lattice, dither.stream, kind if fused else ScaleKind.GIVEN)
    work, per, total = _quantize, block // GROUP if fused else 1, groups(n)
    lag = u32(dither.shift << (16 - lattice.fraction)) if dither.shift else None
    if lattice.bits == 32:
        work, lag = _quantize_wide, u32(dither.shift)
    overflow = split(
        lambda a, b: work(data, n, ns, out, how, lag, a * per, min(b * per, total)),
        -(-total // per),
        per * GROUP,
    )
    if kind is ScaleKind.GIVEN and any(overflow):
        scale.fill_(torch.nan)


def accumulate(source: Tensor, output: Output) -> None:
    """See `Kernels`."""
    data, target = array(source), array(output.tensor)
    weight, add = f32(output.weight), output.add
    split(lambda a, b: _accumulate(data, target, weight, add, a, b), output.tensor.numel(), 1)


def dequantize(
    codes: Tensor,
    scale: Tensor,
    output: Output,
    lattice: Lattice,
    *,
    dither: Dither | None,
    offset: int,
) -> None:
    """See `Kernels`."""
    data, ns, out, n = array(codes), array(scale), array(output.tensor), output.tensor.numel()
    what, unit = decoding_of(lattice, dither, offset)
    worth, work = worth_of(output, unit), _dequantize_wide if lattice.bits == 32 else _dequantize
    strata = None
    if dither is not None and (dither.shift or dither.workers > 1):
        strata = (u32(dither.workers % (1 << lattice.fraction)), u32(dither.shift))
    split(lambda a, b: work(data, n, ns, out, what, strata, worth, a, b), groups(n), GROUP)


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
def _quantize(
    x: np.ndarray,
    n: int,
    scale: np.ndarray,
    out: np.ndarray,
    how: tuple,
    lag: np.uint32 | None,
    first: int,
    last: int,
) -> bool:
    where = (pointer(x), n, pointer(scale), pointer(out))
    return quantize_groups(*where, Rounding(*how), lag, first, last)


@kernel
def quantize_groups(
    x: Pointer,
    n: int,
    scale: Pointer,
    out: Pointer,
    how: Rounding,
    lag: np.uint32 | None,
    first: int,
    last: int,
) -> bool:
    """Groups first .. last-1; True if a value exceeded its scale."""
    block, kind, bits = how.block, how.kind, how.bits
    codes = code_scratch()
    y = float_scratch()
    # codes of 4 and 8 bits go straight into the wire, others by way of a byte each
    direct = bits == 4 or bits == 8
    target = out if direct else codes
    gain = f32(how.limit)
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
            round_group(x, e, times, target, to, p0, how, lag)
        else:
            overflow |= fixed_point(x, n, scale, block, gain, e, y)
            round_group(y, 0, f32(1), target, to, p0, how, lag)
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
def _dequantize(
    data: np.ndarray,
    n: int,
    scale: np.ndarray,
    out: np.ndarray,
    what: tuple,
    strata: Words | None,
    worth: tuple,
    first: int,
    last: int,
) -> None:
    where = (pointer(data), n, pointer(scale), pointer(out))
    dequantize_groups(*where, Decoding(*what), strata, Worth(*worth), first, last)


@kernel
def dequantize_groups(
    data: Pointer,
    n: int,
    scale: Pointer,
    out: Pointer,
    what: Decoding,
    strata: Words | None,
    worth: Worth,
    first: int,
    last: int,
) -> None:
    """Groups first .. last-1."""
    block, bits, offset = what.block, what.bits, what.offset
    codes = code_scratch()
    y = float_scratch()
    whole = block % GROUP == 0  # groups do not cross blocks
    per = block // GROUP if whole and block else last + 1  # groups a block
    b = first // per
    until = first  # the group at which the next block starts
    times, plain = f32(0), False
    base = what.centre - (offset << (what.fraction + 1)) if what.subtract else -offset
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
            times = step(size, worth.unit, worth.weight)
            # no code is worth more than 512 scales, so nothing needs clamping here
            most = f32(size * max(abs(worth.weight), f32(1)))
            plain = (size >= f32(TINY) or size == f32(0)) and most < f32(worth.bound / f32(512))
        p0 = u32(e >> 1)
        if plain and e + GROUP <= n:
            values(source, at, times, base, p0, what, strata, out, e, worth.add)
        else:
            values(source, at, f32(1), base, p0, what, strata, y, 0, False)
            count = min(GROUP, n - e)
            per_element(y, scale, block, e, count, worth)
            emit(y, out, e, count, worth.add)


# --- int32 codes without packing, for sums of many workers --------------------------------


@kernel
def _quantize_wide(
    x: np.ndarray,
    n: int,
    scale: np.ndarray,
    out: np.ndarray,
    how: tuple,
    shift: np.uint32,
    first: int,
    last: int,
) -> bool:
    """Groups first .. last-1 under the one given scale; True if a value exceeded it."""
    how = Rounding(*how)
    fraction, strata = how.fraction, (u32(1), shift)
    x, scale, out = pointer(x), pointer(scale), pointer(out)
    y = float_scratch()
    overflow = False
    for g in range(first, last):
        e = g * GROUP
        overflow |= fixed_point(x, n, scale, 0, f32(how.limit), e, y)
        for j in range(min(GROUP, n - e)):
            r = i32(_draw(e, j, fraction, how.k0, how.k1, strata))
            t = i32(bits_of(f32(load(y, j) + ROUND)) - i32(ROUND_BITS))
            store(out, e + j, sar(i32(t + r), i32(fraction)))
    return overflow


@kernel
def _draw(
    e: int,
    j: int,
    fraction: int,
    k0: np.uint32,
    k1: np.uint32,
    strata: tuple[np.uint32, np.uint32] | None,
) -> np.uint32:
    """(workers·r + shift) mod 2^F of element j of the group that starts at e."""
    h = mix(u32((e >> 1) + (j & 63)), k0, k1)
    r = shr(u32(h & u32(0xFFFF)) if j < 64 else u32(h >> u32(16)), u32(16 - fraction))
    if strata is not None:
        r = u32(u32(u32(r * strata[0]) + strata[1]) & u32((1 << fraction) - 1))
    return r


@kernel
def _dequantize_wide(
    data: np.ndarray,
    n: int,
    scale: np.ndarray,
    out: np.ndarray,
    what: tuple,
    strata: Words | None,
    worth: tuple,
    first: int,
    last: int,
) -> None:
    """Groups first .. last-1."""
    what, worth = Decoding(*what), Worth(*worth)
    fraction = what.fraction
    data, scale, out = pointer(data), pointer(scale), pointer(out)
    y = float_scratch()
    for g in range(first, last):
        e = g * GROUP
        count = min(GROUP, n - e)
        for j in range(count):
            q = np.int64(load(data, e + j))
            if what.subtract:  # a sum of many workers needs more than 32 bits here
                r = np.int64(_draw(e, j, fraction, what.k0, what.k1, strata))
                q = np.int64((q << np.int64(fraction + 1)) - (r << np.int64(1)) + what.centre)
            store(y, j, f32(q))
        per_element(y, scale, 0, e, count, worth)
        emit(y, out, e, count, worth.add)
