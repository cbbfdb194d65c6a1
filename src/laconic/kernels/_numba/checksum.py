"""Check sums on the CPU. The definitions are in `_reference/checksum.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.kernels._numba.chunk import check
from laconic.kernels._numba.intrinsics import i32, kernel, load, pointer, u32
from laconic.kernels._pool import split

_MASK = 0xFFFFFFFF


def words_check(words: Tensor, salt: int) -> Tensor:
    """See `Kernels`."""
    return _split(_part, words.numpy().view(np.uint32), salt)


def message_check(data: Tensor, salt: int) -> Tensor:
    """See `Kernels`."""
    words = data.numpy().view(np.uint32)
    total = _split(_part, words, salt)
    return total.sub_(int(_part(words, 3, 4, u32(salt)))).bitwise_and_(_MASK)


def payload_check(payload: Tensor, salt: int) -> Tensor:
    """See `Kernels`."""
    return _split(_weighed, payload.numpy(), salt)


def _split(part: Any, values: np.ndarray, salt: int) -> Tensor:
    """The sum of what threads find in their parts."""
    start = u32(salt)
    found = split(lambda first, last: int(part(values, first, last, start)), len(values), 1)
    return torch.tensor(sum(found) & _MASK)


@kernel
def _weighed(values: np.ndarray, first: int, last: int, salt: np.uint32) -> np.uint32:
    """The sum over values first .. last-1."""
    data, total = pointer(values), u32(0)
    for i in range(first, last):
        weight = u32(u32(salt + u32(u32(i) * u32(0x9E3779B2))) | u32(1))
        total = u32(total + u32(weight * u32(i32(load(data, i)))))
    return total


@kernel
def _part(words: np.ndarray, first: int, last: int, salt: np.uint32) -> np.uint32:
    """The sum over words first .. last-1."""
    start = u32(salt + u32(u32(first) * u32(0x9E3779B1)))
    return check(pointer(words), first, last - first, start)
