"""Sums of codes on the CPU. The definitions are in `_reference/sums.py`."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from laconic.kernels._layout import GROUP, groups
from laconic.kernels._numba.group import pack, unpack
from laconic.kernels._numba.intrinsics import (
    Pointer,
    array,
    code_scratch,
    i32,
    kernel,
    load,
    pointer,
    sar,
    shl,
    store,
    u8,
    word_scratch,
)
from laconic.kernels._pool import split
from laconic.kernels._protocol import Lattice


def add_codes(
    own: Tensor,
    sums: Tensor | None,
    out: Tensor,
    lattice: Lattice,
    *,
    numel: int,
    width: int,
    wider: int,
) -> None:
    """See `Kernels`."""
    mine, target = array(own), array(out)
    theirs = target if sums is None else array(sums)
    settings = (numel, lattice.levels, lattice.bits, 0 if sums is None else width, wider)
    split(lambda a, b: _add(mine, theirs, target, *settings, a, b), groups(numel), GROUP)


def read_sums(sums: Tensor, out: Tensor, *, width: int, offset: int) -> None:
    """See `Kernels`."""
    data, target, n = array(sums), array(out), out.numel()
    split(lambda a, b: _read(data, target, n, width, offset, a, b), groups(n), GROUP)


@kernel
def _add(
    own: np.ndarray,
    sums: np.ndarray,
    out: np.ndarray,
    n: int,
    levels: int,
    bits: int,
    width: int,
    wider: int,
    first: int,
    last: int,
) -> None:
    """Groups first .. last-1."""
    own, sums, out = pointer(own), pointer(sums), pointer(out)
    c = word_scratch()
    for g in range(first, last):
        _own(own, g, n, i32(levels), bits, c)
        if width:
            _unpack(sums, g * 16 * width, width, c)
        _pack(c, out, g * 16 * wider, wider)


@kernel
def _read(
    sums: np.ndarray, out: np.ndarray, n: int, width: int, offset: int, first: int, last: int
) -> None:
    """Groups first .. last-1."""
    sums, out = pointer(sums), pointer(out)
    c = word_scratch()
    for g in range(first, last):
        e = g * GROUP
        for j in range(GROUP):
            store(c, j, i32(-offset))
        _unpack(sums, g * 16 * width, width, c)
        for j in range(min(GROUP, n - e)):
            store(out, e + j, load(c, j))


@kernel
def _own(own: Pointer, g: int, n: int, levels: np.int32, bits: int, c: Pointer) -> None:
    """The codes of group g."""
    if bits == 4:
        for j in range(64):
            b = i32(load(own, g * 64 + j))
            store(c, j, b & i32(15))
            store(c, j + 64, sar(b, i32(4)) & i32(15))
        return
    e = g * GROUP
    if e + GROUP <= n:
        for j in range(GROUP):
            store(c, j, i32(i32(load(own, e + j)) + levels))
        return
    for j in range(GROUP):
        store(c, j, levels)
    for j in range(n - e):
        store(c, j, i32(i32(load(own, e + j)) + levels))


@kernel
def _unpack(data: Pointer, start: int, width: int, c: Pointer) -> None:
    """Add 128 sums onto c."""
    low = i32(0)
    for _ in range(width >> 3):
        for j in range(GROUP):
            store(c, j, i32(load(c, j) + shl(i32(load(data, start + j)), low)))
        start += GROUP
        low = i32(low + i32(8))
    if width & 7:
        codes = code_scratch()
        unpack(data, start, codes, width & 7)
        for j in range(GROUP):
            store(c, j, i32(load(c, j) + shl(i32(load(codes, j)), low)))


@kernel
def _pack(c: Pointer, out: Pointer, start: int, width: int) -> None:
    """Write 128 sums."""
    low = i32(0)
    for _ in range(width >> 3):
        for j in range(GROUP):
            store(out, start + j, u8(sar(load(c, j), low)))
        start += GROUP
        low = i32(low + i32(8))
    if width & 7:
        codes = code_scratch()
        for j in range(GROUP):
            store(codes, j, u8(sar(load(c, j), low)))
        pack(codes, out, start, width & 7)
