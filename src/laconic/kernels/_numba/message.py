"""The check sum of a message on the CPU. The definition is in `_reference/message.py`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic.kernels._numba.chunk import check
from laconic.kernels._numba.memory import i32, kernel, load, pointer, u32
from laconic.kernels._pool import split

_GROUP = 4  # words of 4 bytes: messages are padded to 16 bytes


def message_check(data: Tensor, salt: int) -> Tensor:
    """See the reference."""
    words = data.numpy().view(np.uint32)
    found = split(
        lambda first, last: int(_part(words, first * _GROUP, last * _GROUP, u32(salt))),
        len(words) // _GROUP,
        _GROUP,
    )
    return torch.tensor(sum(found) & 0xFFFFFFFF)


def payload_check(payload: Tensor, salt: int) -> Tensor:
    """See the reference."""
    values = payload.numpy()
    found = split(lambda first, last: int(_weighed(values, first, last, u32(salt))), len(values), 1)
    return torch.tensor(sum(found) & 0xFFFFFFFF)


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
    """The sum over words first .. last-1, without word 3."""
    data, total = pointer(words), u32(0)
    if first == 0 and last > 0:
        total = check(data, 0, 3, salt)
        first = 4
    start = u32(salt + u32(u32(first) * u32(0x9E3779B1)))
    return u32(total + check(data, first, last - first, start))
