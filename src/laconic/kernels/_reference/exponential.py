"""Natural (power-of-two) quantization, and the sum of two encoded values.

A code of b bits is a sign (top bit) and a magnitude m of b-1 bits:

    m = 0: zero      m = 1 .. top-1: scale · 2^(m - levels)      m = top = 2^(b-1)-1: not a number

A single value uses 1 .. levels; the rest is headroom for sums. With y = |x|/scale:

    y ≥ 2^(1-levels): y = f·2^e, 1 ≤ f < 2: up to e+1 with probability f-1, else e
    y below that:     the smallest level with probability y·2^(levels-1), else zero

Both are unbiased. The sum of 2^a and ±2^b, a ≥ b, rounds to neighbouring powers:

    same signs:      a+1 with probability 2^(b-a), else a
    opposite signs:  a-1 with probability 2^(b-a+1), else a; equal cancels to zero

A sum above the top level turns into "not a number", which every later sum keeps: an overflow
is never a plausible value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import groups
from laconic.kernels._protocol import Lattice, Output
from laconic.kernels._reference.group import dither, draws, grouped, pack, scaled, store, unpack


def exponential_quantize(
    x: Tensor, scale: Tensor, codes: Tensor, lattice: Lattice, *, stream: Stream
) -> None:
    """See `Kernels`."""
    _, levels, bits = lattice
    y = scaled(x, scale, 0, 1.0)
    negative = y < 0
    overflow = ~(y.abs() <= 1 + 2.0**-16) | ((scale == 0) & (grouped(x) != 0))
    y = y.abs().clamp(max=1.0)
    r = dither(stream, groups(x.numel()), 16, x.device)
    word = y.view(torch.int32).to(torch.int64)
    exponent = ((((word + 64) >> 7) + r) >> 16) - 127
    # two multiplications: the factor alone would overflow
    small = torch.round((y * 2.0**48) * 2.0 ** (levels + 15 - 48)).clamp(max=2.0**16)
    small = (small.nan_to_num(nan=0.0).to(torch.int64) + r) >> 16
    magnitude = torch.where(word >= (128 - levels) << 23, exponent + levels, small)
    top = (1 << (bits - 1)) - 1
    magnitude = torch.where(overflow, top, magnitude)
    sign = negative & (magnitude > 0)
    codes.copy_(pack(magnitude | (sign.to(torch.int64) << (bits - 1)), bits).view(-1))


def exponential_dequantize(codes: Tensor, scale: Tensor, output: Output, lattice: Lattice) -> None:
    """See `Kernels`."""
    _, levels, bits = lattice
    code = unpack(codes.view(groups(output.tensor.numel()), 16 * bits), bits)
    top = (1 << (bits - 1)) - 1
    magnitude = code & top
    value = ((magnitude - levels + 127) << 23).view(torch.float32)
    value = torch.where(code > top, -value, value)
    value = torch.where(magnitude == 0, 0.0, value)
    value = torch.where(magnitude == top, torch.nan, value)
    store(value, scale, output, block=0, unit=1.0)


def exponential_reduce(a: Tensor, b: Tensor, out: Tensor, *, stream: Stream, bits: int) -> None:
    """See `Kernels`."""
    first = unpack(a.view(-1, 16 * bits), bits)
    second = unpack(b.view(-1, 16 * bits), bits)
    top = (1 << (bits - 1)) - 1
    swap = (second & top) > (first & top)
    large, little = torch.where(swap, second, first), torch.where(swap, first, second)
    high, low = large & top, little & top
    opposite = (large ^ little) > top
    gap = (high - low - opposite.to(torch.int32)).clamp(0, 32).to(torch.int64)
    coin = draws(stream, first.numel(), a.device).view_as(gap)
    moves = (coin <= (0xFFFFFFFF >> gap)) & (gap < 32)
    moved = torch.where(opposite, high - 1, high + 1)
    magnitude = torch.where(moves, moved, high).clamp(max=top)
    magnitude = torch.where(opposite & (high == low), 0, magnitude)
    magnitude = torch.where(low == 0, high, magnitude)
    magnitude = torch.where(high == top, top, magnitude)
    sign = torch.where(magnitude > 0, large & ~top, 0)
    out.copy_(pack(magnitude | sign, bits).view(-1))
