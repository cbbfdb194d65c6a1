"""Nested quantization on the CPU. The definitions are in `_reference/nested.py`.

Floor division by the ratio is a multiplication: floor(a/ρ) = a·(floor(2^20/ρ) + 1) >> 20, exact
while 0 ≤ a·ρ < 2^20. Dividends are made positive by adding `_LIFT` ratios first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import (
    CHECK_GROUPS,
    GROUP,
    SIDE_LIMIT,
    ScaleKind,
)
from laconic.kernels._numba.group import (
    ROUND,
    ROUND_BITS,
    Worth,
    clamped,
    emit,
    factor,
    lift_of,
    mix,
    pack,
    per_element,
    unpack,
    words,
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
    sar,
    shl,
    shr,
    store,
    u8,
    u32,
    word_scratch,
)
from laconic.kernels._numba.linear import scales
from laconic.kernels._pool import split
from laconic.kernels._protocol import Lattice, Modulo, Output

_LIFT = 64  # ratios; |index| ≤ 63 and side information ends 64 fine steps out


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
    args = (array(x), x.numel(), array(scale), array(checks), array(codes))
    settings = _settings(lattice, modulo, stream)
    unit = CHECK_GROUPS * GROUP
    split(lambda a, b: _quantize(*args, settings, a, b), checks.numel(), unit)


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
    alpha, n, unit = modulo.alpha, side.numel(), CHECK_GROUPS * GROUP
    args = (array(codes), n, array(scale), array(checks), array(side), array(failed))
    settings = _settings(lattice, modulo, stream)
    worth = worth_of(output, alpha / (lattice.limit << 1))
    beta, target = f32((1.0 - alpha * alpha) * output.weight), array(output.tensor)
    split(
        lambda a, b: _dequantize(*args, target, settings, worth, beta, a, b), checks.numel(), unit
    )


class _Settings(NamedTuple):
    """What encoding and decoding share."""

    block: int
    gain: np.float32
    fraction: int
    ratio: int
    bits: int
    k0: np.uint32
    k1: np.uint32


def _settings(lattice: Lattice, modulo: Modulo, stream: Stream) -> tuple:
    gain = f32(modulo.alpha * lattice.limit)
    return (lattice.block, gain, lattice.fraction, modulo.ratio, lattice.bits, *words(stream))


@kernel
def _scaled(
    x: Pointer, n: int, scale: Pointer, block: int, gain: np.float32, e: int, y: Pointer
) -> None:
    """y[0:128] = x·gain/scale, cut at ±SIDE_LIMIT; zero in the padding and where x is NaN."""
    count = min(GROUP, n - e)
    if block == 0 or block % GROUP == 0:
        size = load(scale, e // block if block else 0)
        times, lift = factor(size, gain), lift_of(size)
        for j in range(count):
            store(y, j, _cut(f32(f32(get(x, e + j) * lift) * times)))
    else:
        for j in range(count):
            size = load(scale, (e + j) // block)
            store(y, j, _cut(f32(f32(get(x, e + j) * lift_of(size)) * factor(size, gain))))
    for j in range(n - e, GROUP):
        store(y, j, f32(0))


@kernel
def _cut(v: np.float32) -> np.float32:
    limit = f32(SIDE_LIMIT)
    v = v if v == v else f32(0)
    v = limit if v > limit else v
    return -limit if v < -limit else v


@kernel
def _draws(e: int, fraction: int, k0: np.uint32, k1: np.uint32, r: Pointer) -> None:
    """r[0:128]: the dither of a group."""
    low, high = u32(16 - fraction), u32(32 - fraction)
    p0 = u32(e >> 1)
    for j in range(64):
        h = mix(u32(p0 + u32(j)), k0, k1)
        store(r, j, i32(shr(u32(h & u32(0xFFFF)), low)))
        store(r, j + 64, i32(shr(h, high)))


@kernel
def _rint(v: np.float32) -> np.int32:
    return i32(bits_of(f32(v + ROUND)) - i32(ROUND_BITS))


@kernel
def _quantize(
    x: np.ndarray,
    n: int,
    scale: np.ndarray,
    check: np.ndarray,
    out: np.ndarray,
    settings: tuple,
    first: int,
    last: int,
) -> None:
    """Check blocks first .. last-1."""
    x, scale, check, out = pointer(x), pointer(scale), pointer(check), pointer(out)
    own = _Settings(*settings)
    fraction, ratio, bits = own.fraction, own.ratio, own.bits
    codes = code_scratch()
    y = float_scratch()
    draws = word_scratch()
    rho, magic = i32(ratio), i32((1 << 20) // ratio + 1)
    half, lift = i32((ratio - 1) // 2), i32(_LIFT * ratio)
    for c in range(first, last):
        total = i32(0)
        for e in range(c * CHECK_GROUPS * GROUP, min((c + 1) * CHECK_GROUPS * GROUP, n), GROUP):
            _scaled(x, n, scale, own.block, own.gain, e, y)
            _draws(e, fraction, own.k0, own.k1, draws)
            for j in range(GROUP):
                r = load(draws, j)
                index = sar(i32(_rint(load(y, j)) + r), i32(fraction))
                cell = i32(i32(i32(i32(index + half + lift) * magic) >> i32(20)) - i32(_LIFT))
                total = i32(total + i32(cell * i32(r | i32(1))))
                store(codes, j, u8(index - rho * cell + half))
            pack(codes, out, e // GROUP * 16 * bits, bits)
        store(check, c, u8(total))


@kernel
def _dequantize(
    data: np.ndarray,
    n: int,
    scale: np.ndarray,
    check: np.ndarray,
    side: np.ndarray,
    failed: np.ndarray,
    out: np.ndarray,
    settings: tuple,
    worth: tuple,
    beta: np.float32,
    first: int,
    last: int,
) -> None:
    """Check blocks first .. last-1."""
    data, scale, check = pointer(data), pointer(scale), pointer(check)
    side, out, failed = pointer(side), pointer(out), pointer(failed)
    own, worth = _Settings(*settings), Worth(*worth)
    fraction, ratio, bits = own.fraction, own.ratio, own.bits
    codes = code_scratch()
    y = float_scratch()
    draws = word_scratch()
    magic, half = i32((1 << 20) // ratio + 1), i32((ratio - 1) // 2)
    shift = i32(fraction + 1)
    period = i32(ratio << (fraction + 1))
    lift = i32(_LIFT * ratio)
    for c in range(first, last):
        total = i32(0)
        for e in range(c * CHECK_GROUPS * GROUP, min((c + 1) * CHECK_GROUPS * GROUP, n), GROUP):
            unpack(data, e // GROUP * 16 * bits, codes, bits)
            _scaled(side, n, scale, own.block, own.gain, e, y)
            _draws(e, fraction, own.k0, own.k1, draws)
            for j in range(GROUP):
                r = load(draws, j)
                w = shl(i32(i32(load(codes, j)) - half), shift)
                w = i32(i32(w - (r << i32(1))) + i32((1 << fraction) - 1))
                z = i32(i32(w - i32(_rint(load(y, j)) << i32(1))) + i32(period >> i32(1)))
                k = i32(i32(i32(i32(sar(z, shift) + lift) * magic) >> i32(20)) - i32(_LIFT))
                total = i32(total - i32(k * i32(r | i32(1))))
                store(y, j, f32(i32(w - i32(period * k))))
            count = min(GROUP, n - e)
            per_element(y, scale, own.block, e, count, worth)
            for j in range(count):
                known = get(side, e + j)
                v = clamped(f32(load(y, j) + f32(known * beta)), worth.bound)
                store(y, j, f32(v + f32(known * f32(0))))  # NaN if side is not finite
            emit(y, out, e, count, worth.add)
        store(failed, c, u8(u8(total) != load(check, c)))
