"""Sums of codes, packed at the width that they need.

The codes of k workers with s levels are q + s each; their sum c lies in 0 .. 2·k·s and takes
bit_length(2·k·s) bits. A group of 128 sums of `width` bits takes 16·width bytes: the low bits in
planes of 8 (byte j = bits of element j), the others in planes of 4, 2 and 1 as in `_layout.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels._layout import GROUP, groups
from laconic.kernels._protocol import Lattice
from laconic.kernels._reference.group import grouped, pack, unpack


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
    if bits == 4:
        c = unpack(own.view(-1, 64), 4)
    else:
        c = grouped(own.view(torch.int8 if bits == 8 else torch.int32)[:numel]).to(torch.int32)
        c = c + levels
    if sums is not None:
        c = c + _unpack(sums, width)
    out.copy_(_pack(c, wider).view(-1))


def read_sums(sums: Tensor, out: Tensor, *, width: int, offset: int) -> None:
    """See `Kernels`."""
    out.copy_(_unpack(sums, width).view(-1)[: out.numel()] - offset)


def _pack(c: Tensor, width: int) -> Tensor:
    low = width // 8 * 8
    planes = [((c >> shift) & 0xFF).to(torch.uint8) for shift in range(0, low, 8)]
    if width > low:
        planes.append(pack((c >> low) & ((1 << (width - low)) - 1), width - low))
    return torch.cat(planes, dim=1)


def _unpack(sums: Tensor, width: int) -> Tensor:
    low = width // 8 * 8
    data = sums.view(groups(sums.numel() * 8 // width), 16 * width)
    c = torch.zeros(data.shape[0], GROUP, dtype=torch.int32, device=sums.device)
    for shift in range(0, low, 8):
        c += data[:, 16 * shift : 16 * shift + GROUP].to(torch.int32) << shift
    if width > low:
        c += unpack(data[:, 16 * low :], width - low) << low
    return c
