"""Nested (modular) quantization: send the position inside a coarse cell, and a check.

    r = (t + dither) >> F            index on the fine lattice D1·Z
    c = floor((r + (ρ-1)/2) / ρ)     coarse cell, not sent
    q = r - ρ·c                      sent, ρ symbols
    check[b] = Σ c·(dither | 1) mod 256 over 512 elements

The decoder resolves the cell with y, which is near x:  k = round((W - 2·t_y) / (ρ·2^(F+1))),
c = -k. A single wrong cell always changes the check (its weight is odd); a block with several
escapes with probability of about 1/128.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import (
    CHECK_GROUPS,
    SIDE_LIMIT,
    ScaleKind,
    groups,
)
from laconic.kernels._protocol import Lattice, Modulo, Output
from laconic.kernels._reference.group import dither, grouped, pack, scaled, store, unpack
from laconic.kernels._reference.linear import scales


def nested_quantize(
    x: Tensor,
    scale: Tensor,
    checks: Tensor,
    codes: Tensor,
    lattice: Lattice,
    modulo: Modulo,
    *,
    stream: Stream,
    kind: ScaleKind,
) -> None:
    """See `Kernels`."""
    scales(x, scale, block=lattice.block, kind=kind)
    r = dither(stream, groups(x.numel()), lattice.fraction, x.device)
    y = scaled(x, scale, lattice.block, modulo.alpha * lattice.limit)
    index = (torch.round(y).to(torch.int64) + r) >> lattice.fraction
    ratio, half = modulo.ratio, (modulo.ratio - 1) // 2
    cell = torch.div(index + half, ratio, rounding_mode="floor")
    checks.copy_(_check(cell, r))
    codes.copy_(pack(index - ratio * cell + half, lattice.bits).view(-1))


def nested_dequantize(
    codes: Tensor,
    scale: Tensor,
    checks: Tensor,
    side: Tensor,
    failed: Tensor,
    output: Output,
    lattice: Lattice,
    modulo: Modulo,
    *,
    stream: Stream,
) -> None:
    """See `Kernels`."""
    count, fraction, bits = groups(side.numel()), lattice.fraction, lattice.bits
    ratio, alpha = modulo
    r = dither(stream, count, fraction, side.device)
    q = unpack(codes.view(count, 16 * bits), bits).to(torch.int64) - (ratio - 1) // 2
    w = (q << (fraction + 1)) - (2 * r + 1) + (1 << fraction)
    y = scaled(side, scale, lattice.block, alpha * lattice.limit)
    ty = torch.round(y.nan_to_num(nan=0.0).clamp(-SIDE_LIMIT, SIDE_LIMIT)).to(torch.int64)
    period = ratio << (fraction + 1)
    k = torch.div(w - 2 * ty + period // 2, period, rounding_mode="floor")
    failed.copy_(_check(-k, r) != checks)
    known = grouped(side.to(torch.float32))
    beta = float(np.float32((1.0 - alpha * alpha) * output.weight))
    store(
        w - period * k,
        scale,
        output,
        block=lattice.block,
        unit=alpha / (lattice.levels << (fraction + 1)),
        extra=known * beta,
        poison=known * 0.0,  # NaN where the side information is not finite
    )


def _check(cell: torch.Tensor, r: torch.Tensor) -> Tensor:
    """Weighted sums of cells, mod 256, one per CHECK_GROUPS groups."""
    sums = (cell * (r | 1)).sum(1)
    sums = torch.nn.functional.pad(sums, (0, -sums.numel() % CHECK_GROUPS))
    return (sums.view(-1, CHECK_GROUPS).sum(1) & 0xFF).to(torch.uint8)
