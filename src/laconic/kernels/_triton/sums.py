"""Sums of codes on the GPU. The definitions are in `_reference/sums.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels._layout import groups
from laconic.kernels._protocol import Lattice
from laconic.kernels._triton.group import OPTIONS

_GROUPS = 8  # a program's


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
    _, levels, bits = lattice
    count = groups(numel)
    _add[(triton.cdiv(count, _GROUPS),)](
        own.view(torch.int8) if bits == 8 else own,
        out if sums is None else sums,
        out,
        numel,
        count,
        levels,
        BITS=bits,
        WIDTH=0 if sums is None else width,
        WIDER=wider,
        GROUPS=_GROUPS,
        **OPTIONS,
    )


def read_sums(sums: Tensor, out: Tensor, *, width: int, offset: int) -> None:
    """See `Kernels`."""
    count = groups(out.numel())
    _read[(triton.cdiv(count, _GROUPS),)](
        sums, out, out.numel(), count, offset, WIDTH=width, GROUPS=_GROUPS, **OPTIONS
    )


@triton.jit
def _add(
    own,
    sums,
    out,
    n,
    count,
    levels,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDER: tl.constexpr,
    GROUPS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * GROUPS
    group, lane = tl.arange(0, GROUPS)[:, None], tl.arange(0, 128)[None, :]
    real = group < count - first
    if BITS == 4:
        byte = tl.load(own + first * 64 + group * 64 + lane % 64, mask=real, other=0)
        c = (byte.to(tl.int32) >> (lane // 64 * 4)) & 15
    else:
        e = group * 128 + lane
        c = tl.load(own + first * 128 + e, mask=e < n - first * 128, other=0).to(tl.int32) + levels
    if WIDTH:
        c += _unpack(sums + first * (16 * WIDTH), group, lane, real, WIDTH)
    _pack(out + first * (16 * WIDER), c, group, lane, real, WIDER, GROUPS)


@triton.jit
def _read(sums, out, n, count, offset, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * GROUPS
    group, lane = tl.arange(0, GROUPS)[:, None], tl.arange(0, 128)[None, :]
    real = group < count - first
    c = _unpack(sums + first * (16 * WIDTH), group, lane, real, WIDTH) - offset
    e = group * 128 + lane
    tl.store(out + first * 128 + e, c, mask=e < n - first * 128)


@triton.jit
def _unpack(ptr, group, lane, real, WIDTH: tl.constexpr):
    """One sum a lane. Lanes that share a byte load it together."""
    p = ptr + group * (16 * WIDTH)
    c = group * 0 + lane * 0
    for b in tl.static_range(WIDTH // 8):
        c += tl.load(p + 128 * b + lane, mask=real, other=0).to(tl.int32) << (8 * b)
    if WIDTH & 4:
        byte = tl.load(p + 16 * (WIDTH & ~7) + lane % 64, mask=real, other=0).to(tl.int32)
        c += ((byte >> (lane // 64 * 4)) & 15) << (WIDTH & ~7)
    if WIDTH & 2:
        byte = tl.load(p + 16 * (WIDTH & ~3) + lane % 32, mask=real, other=0).to(tl.int32)
        c += ((byte >> (lane // 32 * 2)) & 3) << (WIDTH & ~3)
    if WIDTH & 1:
        byte = tl.load(p + 16 * (WIDTH & ~1) + lane % 16, mask=real, other=0).to(tl.int32)
        c += ((byte >> (lane // 16)) & 1) << (WIDTH & ~1)
    return c


@triton.jit
def _pack(ptr, c, group, lane, real, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """Write a tile of sums."""
    for b in tl.static_range(WIDTH // 8):
        byte = (c >> (8 * b)) & 255
        tl.store(ptr + group * (16 * WIDTH) + 128 * b + lane, byte.to(tl.uint8), mask=real)
    if WIDTH & 4:
        _plane(ptr, c, group, real, 4, WIDTH & ~7, WIDTH, GROUPS)
    if WIDTH & 2:
        _plane(ptr, c, group, real, 2, WIDTH & ~3, WIDTH, GROUPS)
    if WIDTH & 1:
        _plane(ptr, c, group, real, 1, WIDTH & ~1, WIDTH, GROUPS)


@triton.jit
def _plane(
    ptr,
    c,
    group,
    real,
    P: tl.constexpr,
    LOW: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write the plane of bits LOW .. LOW+P-1: a byte takes 8/P sums, 16·P apart."""
    fields = tl.reshape((c >> LOW) & ((1 << P) - 1), (GROUPS, 8 // P, 16 * P))
    byte = tl.sum(fields << (tl.arange(0, 8 // P) * P)[None, :, None], 1)
    to = ptr + group * (16 * WIDTH) + 16 * LOW + tl.arange(0, 16 * P)[None, :]
    tl.store(to, byte.to(tl.uint8), mask=real)
