"""The largest entries of a tensor, by two passes: count by leading bits, then collect.

The first 12 bits of a magnitude (sign, exponent, 3 of the mantissa) put it into one of 2048 bins.
Entries at or above the bin of the count-th largest are collected in order; only those are sorted.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic.kernels._numba.intrinsics import array, bits_of, get, i32, kernel, pointer
from laconic.kernels._pool import split

_BINS = 2048
_SPAN = 1 << 12


def topk(x: Tensor, count: int) -> Tensor:
    """See `Kernels`."""
    data, n = array(x), x.numel()
    spans = -(-n // _SPAN)
    counts = split(lambda a, b: (a, b, _count(data, n, a, b)), spans, _SPAN)
    above = sum(part[2] for part in counts)[::-1].cumsum()[::-1]
    lowest = int((above >= count).nonzero()[0][-1])
    index = np.empty(above[lowest], np.int64)
    start = 0
    for first, last, bins in counts:
        size = int(bins[lowest:].sum())
        _collect(data, n, lowest, index[start : start + size], first, last)
        start += size
    sizes = x[torch.from_numpy(index)].to(torch.float32).view(torch.int32) & 0x7FFFFFFF
    best = np.argsort(-sizes.numpy(), kind="stable")[:count]
    return torch.from_numpy(index[best])


@kernel
def _count(x: np.ndarray, n: int, first: int, last: int) -> np.ndarray:
    """Entries of each bin in some spans."""
    bins = np.zeros(_BINS, np.int64)
    at = pointer(x)
    for i in range(first * _SPAN, min(last * _SPAN, n)):
        bins[(bits_of(get(at, i)) & i32(0x7FFFFFFF)) >> i32(20)] += 1
    return bins


@kernel
def _collect(x: np.ndarray, n: int, lowest: int, out: np.ndarray, first: int, last: int) -> None:
    """Indices of the entries at or above a bin."""
    at, found = pointer(x), 0
    for i in range(first * _SPAN, min(last * _SPAN, n)):
        if (bits_of(get(at, i)) & i32(0x7FFFFFFF)) >> i32(20) >= lowest:
            out[found] = i
            found += 1
