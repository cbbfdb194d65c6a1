"""Natural quantization on the CPU. The definitions are in `_reference/exponential.py`."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import GROUP, groups
from laconic.kernels._numba.group import (
    ROUND,
    ROUND_BITS,
    Worth,
    emit,
    factor,
    lift_of,
    mix,
    pack,
    per_element,
    unpack,
    usable,
    words,
    worth_of,
)
from laconic.kernels._numba.intrinsics import (
    array,
    bits_of,
    code_scratch,
    f32,
    float_of,
    float_scratch,
    get,
    i32,
    kernel,
    load,
    pointer,
    store,
    u8,
    u32,
)
from laconic.kernels._pool import split
from laconic.kernels._protocol import Lattice, Output


def exponential_quantize(
    x: Tensor, scale: Tensor, codes: Tensor, lattice: Lattice, *, stream: Stream
) -> None:
    """See `Kernels`."""
    _, levels, bits = lattice
    args = (array(x), x.numel(), array(scale), array(codes))
    settings = (levels, f32(2.0 ** (levels + 15 - 48)), bits, *words(stream))
    split(lambda a, b: _quantize(*args, *settings, a, b), groups(x.numel()), GROUP)


def exponential_dequantize(codes: Tensor, scale: Tensor, output: Output, lattice: Lattice) -> None:
    """See `Kernels`."""
    n = output.tensor.numel()
    args = (array(codes), n, array(scale), array(output.tensor))
    settings = (lattice.levels, lattice.bits, worth_of(output))
    split(lambda a, b: _dequantize(*args, *settings, a, b), groups(n), GROUP)


def exponential_reduce(a: Tensor, b: Tensor, out: Tensor, *, stream: Stream, bits: int) -> None:
    """See `Kernels`."""
    args = (array(a), array(b), array(out), bits, *words(stream))
    split(lambda i, j: _reduce(*args, i, j), out.numel() // (16 * bits), GROUP)


@kernel
def _quantize(
    x: np.ndarray,
    n: int,
    scale: np.ndarray,
    out: np.ndarray,
    levels: int,
    boost: np.float32,
    bits: int,
    k0: np.uint32,
    k1: np.uint32,
    first: int,
    last: int,
) -> None:
    """Groups first .. last-1."""
    x, scale, out = pointer(x), pointer(scale), pointer(out)
    codes = code_scratch()
    y = float_scratch()
    size = load(scale, 0)
    times, lift, usual = factor(size, f32(1)), lift_of(size), usable(size)
    top, sign = i32((1 << (bits - 1)) - 1), i32(1 << (bits - 1))
    smallest = i32((128 - levels) << 23)
    for g in range(first, last):
        e = g * GROUP
        for j in range(min(GROUP, n - e)):
            v = f32(f32(get(x, e + j) * lift) * times)
            # no code holds a value above a scale of zero: NaN marks it
            none = f32(np.nan) if size == f32(0) and get(x, e + j) != f32(0) else f32(0)
            store(y, j, v if usual else none)
        for j in range(n - e, GROUP):
            store(y, j, f32(0))
        p0 = u32(e >> 1)
        for j in range(64):
            h = mix(u32(p0 + u32(j)), k0, k1)
            low, high = i32(h & u32(0xFFFF)), i32(h >> u32(16))
            store(codes, j, _code(load(y, j), low, levels, boost, smallest, top, sign))
            store(codes, j + 64, _code(load(y, j + 64), high, levels, boost, smallest, top, sign))
        pack(codes, out, g * 16 * bits, bits)


@kernel
def _code(
    y: np.float32,
    r: np.int32,
    levels: int,
    boost: np.float32,
    smallest: np.int32,
    top: np.int32,
    sign: np.int32,
) -> np.uint8:
    """Sign and magnitude of one scaled value."""
    size = abs(y)
    overflow = not size <= f32(1 + 2.0**-16)
    size = f32(1) if size > f32(1) else size
    word = bits_of(size)
    large = i32(i32(i32(i32(word + i32(64)) >> i32(7)) + r) >> i32(16)) + i32(levels - 127)
    t = f32(f32(size * f32(2.0**48)) * boost)
    t = f32(65536) if t > f32(65536) else t
    little = i32(i32(i32(bits_of(f32(t + ROUND)) - i32(ROUND_BITS)) + r) >> i32(16))
    magnitude = i32(large) if word >= smallest else little
    magnitude = top if overflow else magnitude
    negative = y < f32(0) and magnitude > i32(0)
    return u8(magnitude | (sign if negative else i32(0)))


@kernel
def _dequantize(
    data: np.ndarray,
    n: int,
    scale: np.ndarray,
    out: np.ndarray,
    levels: int,
    bits: int,
    worth: tuple,
    first: int,
    last: int,
) -> None:
    """Groups first .. last-1."""
    data, scale, out, worth = pointer(data), pointer(scale), pointer(out), Worth(*worth)
    codes = code_scratch()
    y = float_scratch()
    top, shift = i32((1 << (bits - 1)) - 1), i32(32 - bits)
    for g in range(first, last):
        e = g * GROUP
        unpack(data, g * 16 * bits, codes, bits)
        for j in range(GROUP):
            code = i32(load(codes, j))
            m = i32(code & top)
            word = i32(i32(m - i32(levels - 127)) << i32(23))
            word = i32(word | (i32(code << shift) & i32(-0x80000000)))
            word = i32(0) if m == i32(0) else word
            word = i32(0x7FC00000) if m == top else word
            store(y, j, float_of(word))
        count = min(GROUP, n - e)
        per_element(y, scale, 0, e, count, worth)
        emit(y, out, e, count, worth.add)


@kernel
def _reduce(
    a: np.ndarray,
    b: np.ndarray,
    out: np.ndarray,
    bits: int,
    k0: np.uint32,
    k1: np.uint32,
    first: int,
    last: int,
) -> None:
    """Groups first .. last-1."""
    a, b, out = pointer(a), pointer(b), pointer(out)
    left = code_scratch()
    right = code_scratch()
    top = i32((1 << (bits - 1)) - 1)
    for g in range(first, last):
        unpack(a, g * 16 * bits, left, bits)
        unpack(b, g * 16 * bits, right, bits)
        p0 = u32(g * GROUP)
        for j in range(GROUP):
            coin = mix(u32(p0 + u32(j)), k0, k1)
            store(left, j, _sum(i32(load(left, j)), i32(load(right, j)), coin, top))
        pack(left, out, g * 16 * bits, bits)


@kernel
def _sum(a: np.int32, b: np.int32, coin: np.uint32, top: np.int32) -> np.uint8:
    """One pair; the rule is in `_reference/exponential.py`."""
    swap = i32(b & top) > i32(a & top)
    large, little = (b if swap else a), (a if swap else b)
    high, low = i32(large & top), i32(little & top)
    opposite = i32(large ^ little) > top
    gap = i32(high - low - (i32(1) if opposite else i32(0)))
    gap = max(gap, i32(0))
    moves = gap < i32(32) and coin <= u32(u32(0xFFFFFFFF) >> u32(min(gap, i32(31))))
    moved = i32(high - i32(1)) if opposite else i32(high + i32(1))
    m = min(moved, top) if moves else high
    m = i32(0) if opposite and high == low else m
    m = high if low == i32(0) else m
    m = top if high == top else m
    return u8(m | (i32(large & ~top) if m > i32(0) else i32(0)))
