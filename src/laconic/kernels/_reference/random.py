"""The draws of `laconic._key`, in torch. 32-bit words live in int64, masked after each step."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import GROUP

_MASK = 0xFFFFFFFF


def draws(stream: Stream, count: int, device: torch.device) -> Tensor:
    """The 32-bit draws 0 .. count-1 of a stream, as int64."""
    h = (torch.arange(count, device=device) * 0x9E3779B1 + stream.k0) & _MASK
    h ^= h >> 16
    h = (h * 0x7FEB352D) & _MASK
    h ^= h >> 15
    h ^= stream.k1
    h = (h * 0x846CA68B) & _MASK
    return h ^ (h >> 16)


def dither(
    stream: Stream,
    groups: int,
    fraction: int,
    device: torch.device,
    *,
    shift: int = 0,
    workers: int = 1,
) -> Tensor:
    """(workers·r + shift) mod 2^F, r the top F bits of an element's 16; shape (groups, 128)."""
    h = draws(stream, groups * GROUP // 2, device).view(groups, GROUP // 2)
    r = torch.cat([h & 0xFFFF, h >> 16], dim=1) >> (16 - fraction)
    return (workers * r + shift) & ((1 << fraction) - 1)
