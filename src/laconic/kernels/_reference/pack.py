"""Packing of code groups (layout in `kernels/_layout.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels._layout import GROUP


def pack(codes: Tensor, bits: int) -> Tensor:
    """(groups, 128) codes of `bits` bits to (groups, 16·bits) bytes."""
    codes = codes.to(torch.int32)
    if bits == 8:
        return (codes ^ 0x80).to(torch.uint8)
    planes = []
    low = 0
    for width in _planes(bits):
        part = (codes >> low) & ((1 << width) - 1)
        fields = part.view(-1, 8 // width, 16 * width)
        shifts = torch.arange(0, 8, width, device=codes.device, dtype=torch.int32)
        planes.append((fields << shifts[None, :, None]).sum(1))
        low += width
    return torch.cat(planes, dim=1).to(torch.uint8)


def unpack(data: Tensor, bits: int) -> Tensor:
    """(groups, 16·bits) bytes to (groups, 128) codes, as int32."""
    data = data.to(torch.int32)
    if bits == 8:
        return data ^ 0x80
    codes = torch.zeros(data.shape[0], GROUP, dtype=torch.int32, device=data.device)
    low = start = 0
    for width in _planes(bits):
        fields = data[:, None, start : start + 16 * width]
        shifts = torch.arange(0, 8, width, device=data.device, dtype=torch.int32)
        part = (fields >> shifts[None, :, None]) & ((1 << width) - 1)
        codes |= part.reshape(-1, GROUP) << low
        low += width
        start += 16 * width
    return codes


def _planes(bits: int) -> list[int]:
    return [width for width in (4, 2, 1) if bits & width]
