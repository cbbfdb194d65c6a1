"""Bit planes alone: every chunk as wide as its largest integer."""

from __future__ import annotations

import numpy as np

from laconic.kernels._coding import CHUNK
from laconic.kernels._numba.chunk import acceptable, decode_planes, frame, salt_of
from laconic.kernels._numba.memory import kernel, load, pointer, u32


@kernel
def encode_fixed(
    q: np.ndarray,
    first: int,
    last: int,
    count: np.ndarray,
    segment: np.ndarray,
    marks: np.ndarray,
    stamps: np.ndarray,
    k0: np.uint32,
    k1: np.uint32,
    form: int,
    scratch: np.ndarray,
    out: np.ndarray,
    to: int,
    ends: np.ndarray,
    checks: np.ndarray,
) -> int:
    """Chunks first .. last-1 of a section; see `coding.py`."""
    q, out, work, sums = pointer(q), pointer(out), pointer(scratch), pointer(checks)
    start = to
    for c in range(first, last):
        salt, mark = salt_of(c, stamps[segment[c]], k0, k1), u32(marks[c])
        to = frame(work, -1, 0, q, (c - first) * CHUNK, int(count[c]), mark, salt, out, to, sums, c)
        ends[c] = u32(to - start)
    return to


@kernel
def decode_fixed(
    payload: np.ndarray,
    first: int,
    last: int,
    count: np.ndarray,
    ends: np.ndarray,
    k0: np.uint32,
    k1: np.uint32,
    limit: int,
    scratch: np.ndarray,
    q: np.ndarray,
) -> int:
    """-1, or the first malformed chunk of first .. last-1; see `coding.py`."""
    words, q = pointer(payload), pointer(q)
    for c in range(first, last):
        to, n = (c - first) * CHUNK, int(count[c])
        at = int(ends[c - 1]) if c else 0
        head = load(words, at)
        if u32(head & u32(0xFF)) != u32(0):
            return c
        if not decode_planes(words, at + 1, int(ends[c]) - at - 1, head, q, to, n):
            return c
        if not acceptable(q, to, n, limit):
            return c
    return -1
