"""Linear quantization: scales, stochastic rounding, subtractive dither."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import (
    GROUP,
    LIFT,
    TINY,
    ScaleKind,
    code_offset,
    dither_centre,
    fraction_bits,
    groups,
)
from laconic.kernels._reference.pack import pack, unpack
from laconic.kernels._reference.random import dither


def scales(x: Tensor, out: Tensor, *, block: int, kind: ScaleKind) -> None:
    """Scale of every block: the largest magnitude, or the 2-norm (never below the largest).

    A block that holds NaN or infinity gets the scale NaN.
    """
    rows = _rows(x, block)
    largest = (rows.view(torch.int32) & 0x7FFFFFFF).amax(1)
    bad, largest = largest >= 0x7F800000, largest.view(torch.float32)
    if kind is ScaleKind.MAX:
        out.copy_(torch.where(bad, torch.nan, largest))
        return
    norm = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    norm = norm.clamp(max=torch.finfo(torch.float32).max).to(torch.float32)
    out.copy_(torch.where(bad, torch.nan, torch.maximum(norm, largest)))


def quantize(
    x: Tensor,
    scale: Tensor,
    payload: Tensor,
    *,
    stream: Stream,
    block: int,
    levels: int,
    bits: int,
    kind: ScaleKind,
    shift: int = 0,
) -> None:
    """Round x to the lattice scale/levels·Z with stochastic rounding; pack into `payload`.

    `shift` moves the draws, in 2^-F of a level: a worker's stratum.
    """
    if kind is not ScaleKind.GIVEN:
        scales(x, scale, block=block, kind=kind)
    fraction = fraction_bits(levels)
    t, overflow = fixed_point(x, scale, block, levels << fraction)
    q = (t + dither(stream, groups(x.numel()), fraction, x.device, shift=shift)) >> fraction
    if bits == 32:
        payload.copy_(q.view(-1)[: x.numel()])
    else:
        payload.copy_(pack(q + code_offset(levels, bits), bits).view(-1))
    if kind is ScaleKind.GIVEN:
        scale.copy_(torch.where(overflow.any(), torch.nan, scale))


def dequantize(
    payload: Tensor,
    scale: Tensor,
    out: Tensor,
    *,
    stream: Stream | None,
    block: int,
    levels: int,
    bits: int,
    offset: int,
    weight: float,
    add: bool,
    shift: int = 0,
    workers: int = 1,
) -> None:
    """Decode, times `weight`, into or onto `out`. With a stream, subtract its dither.

    That is moved by `shift`, as when encoded; or the sum of the strata of so many `workers`.
    """
    count = groups(out.numel())
    if bits == 32:
        q = grouped(payload).to(torch.int64)  # a sum of many workers, shifted, needs them
    else:
        # sums of 8-bit codes come without padding
        padded = torch.nn.functional.pad(payload, (0, count * 16 * bits - payload.numel()))
        q = unpack(padded.view(count, 16 * bits), bits) - offset
    divisor = levels
    if stream is not None:
        fraction = fraction_bits(levels)
        r = dither(stream, count, fraction, out.device, shift=shift, workers=workers)
        q = (q << (fraction + 1)) - 2 * r + dither_centre(workers, fraction)
        divisor = levels << (fraction + 1)
    store(q, scale, out, block=block, unit=1.0 / divisor, weight=weight, add=add)


def accumulate(source: Tensor, out: Tensor, *, weight: float, add: bool) -> None:
    """out (+)= source·weight in fp32, rounded once to out's dtype."""
    y = source.to(torch.float32) * float(np.float32(weight))
    out.copy_(out.to(torch.float32) + y if add else y)


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
    out: Tensor,
    *,
    block: int,
    unit: float,
    weight: float,
    add: bool,
    extra: Tensor | None = None,
    poison: Tensor | float = 0.0,
) -> None:
    """out (+)= q·scale·unit·weight + extra, clamped to what out's dtype can hold; + poison."""
    n = per_element(scale, out.numel(), block)
    lift = torch.where(n < TINY, LIFT, 1.0)
    step = ((n * lift) * float(np.float32(unit))) * float(np.float32(weight))
    step = torch.where(torch.isfinite(n) & ~torch.signbit(n), step, torch.nan)
    y = (q.to(torch.float32) * step) * torch.where(n < TINY, 1.0 / LIFT, 1.0)
    bound = torch.finfo(out.dtype).max
    y = y.clamp(-bound, bound)
    if extra is not None:
        y = (y + extra).clamp(-bound, bound) + poison
    y = y.view(-1)[: out.numel()]
    out.copy_(out.to(torch.float32) + y if add else y)


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


def _rows(x: Tensor, block: int) -> Tensor:
    """x as fp32 rows of one block each, the last padded with zeros."""
    width = block or x.numel()
    rows = -(-x.numel() // width)
    return torch.nn.functional.pad(x.to(torch.float32), (0, rows * width - x.numel())).view(
        rows, width
    )
