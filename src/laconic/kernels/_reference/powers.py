"""Powers of two: those of a preconditioner's units, and how a tensor gets into these and back.

    out = source·2^e      or, with `inverse`,      out = source·2^-e        (e an int8 per value,
    from -MOST_EXPONENT to MOST_EXPONENT)

A power of two changes no bit of a mantissa, so the way there and back is exact, and the sum of
products is the product of the sum, on any device, unless a value leaves the range of its dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels._layout import LOG2_ROUND, MOST_EXPONENT

_PART = 1 << 15  # values whose intermediate results fit a core's cache


def times_powers(source: Tensor, exponents: Tensor, out: Tensor, *, inverse: bool) -> None:
    """See `Kernels`."""
    e = exponents.to(torch.int32)
    factors = ((127 - e if inverse else 127 + e) << 23).view(torch.float32)
    out.copy_(source.to(torch.float32) * factors)


def row_exponents(
    v: Tensor, out: Tensor, *, factor: float | Tensor, share: float | Tensor, epsilon: float
) -> Tensor:
    """See `Kernels`. In fp32; means add up in fp64, so that their order does not matter.

    Exponents are at most MOST_EXPONENT, and 0 for what is not finite.
    """
    at_once = max(1, (_PART if v.device.type == "cpu" else v.numel()) // max(1, v.shape[1]))
    known = [
        _exponents(part.float() * factor, share, epsilon, target)
        for part, target in zip(v.split(at_once), out.split(at_once), strict=True)
    ]
    return torch.stack(known).any()


def _exponents(v: Tensor, share: float | Tensor, epsilon: float, out: Tensor) -> Tensor:
    mean = v.mean(1, keepdim=True, dtype=torch.float64).float()
    u = v + (mean - v) * share
    known = (u > 0).any()
    out.copy_(rounded_log2(u.sqrt_().add_(epsilon)))
    return known


def rounded_log2(w: Tensor) -> Tensor:
    """round(log2(w)) as int8, from the bits of fp32; 0 for what is not finite."""
    e = w.view(torch.int32).add(LOG2_ROUND).bitwise_right_shift_(23).sub_(127)
    e = e.clamp_(-MOST_EXPONENT, MOST_EXPONENT).to(torch.int8)
    return e.mul_(w.isfinite())
