"""Linear quantization into int32 codes without packing, for sums of many workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import GROUP, groups
from laconic.kernels._numba.group import ROUND, ROUND_BITS, emit, fixed_point, per_element
from laconic.kernels._numba.memory import (
    array,
    bits_of,
    f32,
    float_scratch,
    i32,
    kernel,
    load,
    pointer,
    sar,
    shr,
    store,
    u32,
)
from laconic.kernels._numba.random import mix
from laconic.kernels._pool import split


def quantize_wide(
    x: Tensor,
    scale: Tensor,
    payload: Tensor,
    stream: Stream,
    limit: int,
    fraction: int,
    shift: int,
) -> None:
    """Round x under the one given scale."""
    data, n, ns, out = array(x), x.numel(), array(scale), array(payload)
    settings = (f32(limit), fraction, u32(stream.k0), u32(stream.k1), u32(shift))
    overflow = split(lambda a, b: _quantize(data, n, ns, out, *settings, a, b), groups(n), GROUP)
    if any(overflow):
        scale.fill_(torch.nan)


def dequantize_wide(payload: Tensor, scale: Tensor, out: Tensor, *settings: Any) -> None:
    """Decode into or onto out; the settings are those of `_dequantize`."""
    codes, n, ns, target = array(payload), out.numel(), array(scale), array(out)
    split(lambda a, b: _dequantize(codes, n, ns, target, *settings, a, b), groups(n), GROUP)


@kernel
def _quantize(
    x: np.ndarray,
    n: int,
    scale: np.ndarray,
    out: np.ndarray,
    limit: np.float32,
    fraction: int,
    k0: np.uint32,
    k1: np.uint32,
    shift: np.uint32,
    first: int,
    last: int,
) -> bool:
    """Groups first .. last-1; True if a value exceeded the scale."""
    x, scale, out = pointer(x), pointer(scale), pointer(out)
    y = float_scratch()
    overflow = False
    for g in range(first, last):
        e = g * GROUP
        overflow |= fixed_point(x, n, scale, 0, limit, e, y)
        for j in range(min(GROUP, n - e)):
            r = i32(_draw(e, j, fraction, k0, k1, (u32(1), shift)))
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
def _dequantize(
    data: np.ndarray,
    n: int,
    scale: np.ndarray,
    out: np.ndarray,
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
    data, scale, out = pointer(data), pointer(scale), pointer(out)
    y = float_scratch()
    for g in range(first, last):
        e = g * GROUP
        count = min(GROUP, n - e)
        for j in range(count):
            q = np.int64(load(data, e + j))
            if subtract:  # a sum of many workers needs more than 32 bits here
                r = np.int64(_draw(e, j, fraction, k0, k1, strata))
                q = np.int64((q << np.int64(fraction + 1)) - (r << np.int64(1)) + centre)
            store(y, j, f32(q))
        per_element(y, scale, 0, e, count, unit, weight, bound)
        emit(y, out, e, count, add)
