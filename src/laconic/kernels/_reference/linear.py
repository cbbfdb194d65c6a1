"""Linear quantization: scales, stochastic rounding, subtractive dither."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic.kernels._layout import (
    ScaleKind,
    dither_centre,
    groups,
)
from laconic.kernels._protocol import Dither, Lattice, Output
from laconic.kernels._reference.group import (
    draws_of,
    fixed_point,
    grouped,
    pack,
    put,
    store,
    unpack,
)


def scales(x: Tensor, out: Tensor, *, block: int, kind: ScaleKind) -> None:
    """See `Kernels`."""
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
    codes: Tensor,
    lattice: Lattice,
    *,
    dither: Dither,
    kind: ScaleKind,
) -> None:
    """See `Kernels`."""
    if kind is not ScaleKind.GIVEN:
        scales(x, scale, block=lattice.block, kind=kind)
    t, overflow = fixed_point(x, scale, lattice.block, lattice.limit)
    q = (t + draws_of(dither, groups(x.numel()), lattice.fraction, x.device)) >> lattice.fraction
    if lattice.bits == 32:
        codes.copy_(q.view(-1)[: x.numel()])
    else:
        codes.copy_(pack(q + lattice.offset, lattice.bits).view(-1))
    if kind is ScaleKind.GIVEN:
        scale.copy_(torch.where(overflow.any(), torch.nan, scale))


def dequantize(
    codes: Tensor,
    scale: Tensor,
    output: Output,
    lattice: Lattice,
    *,
    dither: Dither | None,
    offset: int,
) -> None:
    """See `Kernels`."""
    count, bits = groups(output.tensor.numel()), lattice.bits
    if bits == 32:
        q = grouped(codes).to(torch.int64)  # a sum of many workers, shifted, needs them
    else:
        # sums of 8-bit codes come without padding
        padded = torch.nn.functional.pad(codes, (0, count * 16 * bits - codes.numel()))
        q = unpack(padded.view(count, 16 * bits), bits) - offset
    divisor = lattice.levels
    if dither is not None:
        r = draws_of(dither, count, lattice.fraction, codes.device)
        q = (q << (lattice.fraction + 1)) - 2 * r + dither_centre(dither.workers, lattice.fraction)
        divisor <<= lattice.fraction + 1
    store(q, scale, output, block=lattice.block, unit=1.0 / divisor)


def accumulate(source: Tensor, output: Output) -> None:
    """See `Kernels`."""
    put(source.to(torch.float32) * float(np.float32(output.weight)), output)


def _rows(x: Tensor, block: int) -> Tensor:
    """x as fp32 rows of one block each, the last padded with zeros."""
    width = block or x.numel()
    rows = -(-x.numel() // width)
    return torch.nn.functional.pad(x.to(torch.float32), (0, rows * width - x.numel())).view(
        rows, width
    )
