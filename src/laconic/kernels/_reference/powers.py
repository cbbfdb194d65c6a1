"""Products with powers of two: how a tensor gets into the units of a preconditioner, and back.

    out = source·2^e      or, with `inverse`,      out = source·2^-e        (e an int8 per value,
    from -MOST_EXPONENT to MOST_EXPONENT)

A power of two changes no bit of a mantissa, so the way there and back is exact, and the sum of
products is the product of the sum, on any device, unless a value leaves the range of its dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def times_powers(source: Tensor, exponents: Tensor, out: Tensor, *, inverse: bool) -> None:
    """out = source·2^±e in fp32, rounded once to out's dtype; `out` may be `source`."""
    e = exponents.to(torch.int32)
    factors = ((127 - e if inverse else 127 + e) << 23).view(torch.float32)
    out.copy_(source.to(torch.float32) * factors)
