"""Powers of two on the CPU. The definitions are in `_reference/powers.py`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic.kernels._layout import LOG2_ROUND, MOST_EXPONENT
from laconic.kernels._numba.intrinsics import (
    array,
    bits_of,
    f32,
    float_of,
    get,
    i32,
    kernel,
    load,
    pointer,
    put,
    reassociating,
    sar,
    shl,
    store,
)
from laconic.kernels._pool import split


def times_powers(source: Tensor, exponents: Tensor, out: Tensor, *, inverse: bool) -> None:
    """See `Kernels`."""
    data, powers, target = array(source), exponents.numpy(), array(out)
    sign = i32(-1 if inverse else 1)
    split(lambda a, b: _times(data, powers, target, sign, a, b), out.numel(), 1)


@kernel
def _times(
    source: np.ndarray, powers: np.ndarray, out: np.ndarray, sign: np.int32, first: int, last: int
) -> None:
    source, powers, out = pointer(source), pointer(powers), pointer(out)
    for i in range(first, last):
        e = i32(i32(127) + i32(sign * i32(load(powers, i))))
        put(out, i, f32(get(source, i) * float_of(shl(e, i32(23)))))


def row_exponents(
    v: Tensor, out: Tensor, *, factor: float | Tensor, share: float | Tensor, epsilon: float
) -> Tensor:
    """See `Kernels`."""
    data, target, width = array(v), out.numpy(), v.shape[1]
    by, part, more = f32(float(factor)), f32(float(share)), f32(epsilon)
    found = split(
        lambda a, b: _exponents(data, target, width, by, part, more, a, b), v.shape[0], width
    )
    return torch.tensor(any(found))


@kernel
def _exponents(
    v: np.ndarray,
    out: np.ndarray,
    width: int,
    factor: np.float32,
    share: np.float32,
    epsilon: np.float32,
    first: int,
    last: int,
) -> bool:
    data, out, known = pointer(v), pointer(out), False
    for row in range(first, last):
        start = row * width
        mean = f32(_total(v, factor, start, start + width) / np.float64(width))
        most = f32(0)
        for i in range(start, start + width):
            x = f32(get(data, i) * factor)
            u = f32(x + f32(f32(mean - x) * share))
            most = max(most, u)
            bits = bits_of(f32(f32(np.sqrt(u)) + epsilon))
            e = i32(sar(i32(bits + i32(LOG2_ROUND)), i32(23)) - i32(127))
            e = min(max(e, i32(-MOST_EXPONENT)), i32(MOST_EXPONENT))
            finite = i32(bits & i32(0x7F800000)) != i32(0x7F800000)
            store(out, i, e if finite else i32(0))
        known |= most > 0
    return known


@reassociating
def _total(v: np.ndarray, factor: np.float32, first: int, last: int) -> np.float64:
    data, total = pointer(v), np.float64(0)
    for i in range(first, last):
        total += np.float64(f32(get(data, i) * factor))
    return total
