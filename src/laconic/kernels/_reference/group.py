"""Groups of 128 values: the draws of `laconic._key`, packing, scales of elements.

The layout of packed codes is in `kernels/_layout.py`. 32-bit words live in int64, masked after
each step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import GROUP, LIFT, TINY, groups
from laconic.kernels._protocol import Dither, Output

# --- draws --------------------------------------------------------------------------------


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


def dither(stream: Stream, groups: int, fraction: int, device: torch.device) -> Tensor:
    """r, the top F bits of an element's 16; shape (groups, 128)."""
    h = draws(stream, groups * GROUP // 2, device).view(groups, GROUP // 2)
    return torch.cat([h & 0xFFFF, h >> 16], dim=1) >> (16 - fraction)


def draws_of(own: Dither, groups: int, fraction: int, device: torch.device) -> Tensor:
    """(workers·r + shift) mod 2^F."""
    r = dither(own.stream, groups, fraction, device)
    return (own.workers * r + own.shift) & ((1 << fraction) - 1)


# --- packing ------------------------------------------------------------------------------


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


# --- scales of elements ------------------------------------------------------------------


def fixed_point(x: Tensor, scale: Tensor, block: int, limit: int) -> tuple[Tensor, Tensor]:
    """t of every element as int64, shape (groups, 128), and where |x| exceeds its scale."""
    y = scaled(x, scale, block, float(limit))
    tolerance = float(np.float32(limit * (1 + 2.0**-16)))
    n = per_element(scale, x.numel(), block)
    overflow = ~(y.abs() <= tolerance) | ((n == 0) & (grouped(x) != 0))
    y = torch.where(overflow, 0.0, y.clamp(-limit, limit))
    return torch.round(y).to(torch.int64), overflow


def scaled(x: Tensor, scale: Tensor, block: int, gain: float) -> Tensor:
    """x · gain/scale with the factor rounded down, so |x| ≤ scale gives at most `gain`.

    Shape (groups, 128). Zero where the scale is zero or not finite.
    """
    n = per_element(scale, x.numel(), block)
    usable = torch.isfinite(n) & (n > 0)
    lift = torch.where(n < TINY, LIFT, 1.0)
    factor = torch.full_like(n, gain) / torch.where(usable, n * lift, 1.0)
    factor = (factor.view(torch.int32) - 1).view(torch.float32)  # the float just below
    return torch.where(usable, (grouped(x.to(torch.float32)) * lift) * factor, 0.0)


def store(
    q: Tensor,
    scale: Tensor,
    output: Output,
    *,
    block: int,
    unit: float,
    extra: Tensor | None = None,
    poison: Tensor | float = 0.0,
) -> None:
    """Output of q·scale·unit, + extra, clamped to what its dtype can hold; + poison."""
    out = output.tensor
    n = per_element(scale, out.numel(), block)
    lift = torch.where(n < TINY, LIFT, 1.0)
    step = ((n * lift) * float(np.float32(unit))) * float(np.float32(output.weight))
    step = torch.where(torch.isfinite(n) & ~torch.signbit(n), step, torch.nan)
    y = (q.to(torch.float32) * step) * torch.where(n < TINY, 1.0 / LIFT, 1.0)
    bound = torch.finfo(out.dtype).max
    y = y.clamp(-bound, bound)
    if extra is not None:
        y = (y + extra).clamp(-bound, bound) + poison
    put(y.view(-1)[: out.numel()], output)


def put(y: Tensor, output: Output) -> None:
    """Add weighted values to the output, or store them."""
    out = output.tensor
    out.copy_(out.to(torch.float32) + y if output.add else y)


def grouped(x: Tensor) -> Tensor:
    """x as rows of 128, the last padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % GROUP)).view(-1, GROUP)


def per_element(scale: Tensor, numel: int, block: int) -> Tensor:
    """The scale of every element, shape (groups, 128); padding takes the last block's."""
    count = groups(numel) * GROUP
    if not block:
        return scale.expand(count).view(-1, GROUP)
    index = torch.arange(count, device=scale.device) // block
    return scale[index.clamp(max=scale.numel() - 1)].view(-1, GROUP)
