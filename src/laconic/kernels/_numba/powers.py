"""Products with powers of two on the CPU. The definition is in `_reference/powers.py`."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from laconic.kernels._numba.memory import (
    array,
    f32,
    float_of,
    get,
    i32,
    kernel,
    load,
    pointer,
    put,
    shl,
)
from laconic.kernels._pool import split


def times_powers(source: Tensor, exponents: Tensor, out: Tensor, *, inverse: bool) -> None:
    """See the reference."""
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
