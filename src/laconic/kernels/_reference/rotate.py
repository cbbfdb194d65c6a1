"""Randomised Hadamard rotation, block by block.

    y = H·D·x        D = diag(±1), at random        H_1 = [1], H_2m = [[H_m, H_m], [H_m, -H_m]]/√2

H is orthonormal and its own inverse, so x = D·H·y. Whatever x is, a value of y is a sum of all
values of x with random signs: nearly Gaussian, with the block's root mean square.

Blocks have `block` values, a power of two. The rest of a tensor (or segment: blocks do not cross
segments) is cut into descending powers of two: 1500 = 1024 + 256 + 128 + 64 + 16 + 8 + 4. In a
rest of L values, value i lies in the piece whose size is the highest bit of (i xor L).

Every backend makes the same bits, because the order is fixed: multiply by 2^(-k/2), rounded to
fp32, for a piece of 2^k values; then replace pairs a, b by a + b, a - b, first those 1 apart,
then 2, 4, .. 2^(k-1).

One draw of the stream has the signs of 32 values. Value i, counted from the start of its segment,
takes bit 31 - (4·(i div 128 mod 8) + i mod 4) of draw 32·(i div 1024) + (i div 4 mod 32); set
means minus. (Thus a GPU lane that reads four values from each of eight rows needs one draw.) The
draws of a segment start behind those of the 1024s, begun ones too, of the segments before it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import ScaleKind
from laconic.kernels._protocol import Dither, Lattice, Output, Rotation
from laconic.kernels._reference.group import draws, put
from laconic.kernels._reference.linear import dequantize, quantize

_UNIT = 1024  # values that share 32 draws


def rotate_into(x: Tensor, out: Tensor, rotation: Rotation) -> None:
    """See `Kernels`."""
    for part, signs in _parts(x, rotation):
        _butterflies(x[part].to(torch.float32) * signs, out[part], rotation.size)


def rotate_back(y: Tensor, output: Output, rotation: Rotation) -> None:
    """See `Kernels`."""
    bound = torch.finfo(output.tensor.dtype).max
    for part, signs in _parts(y, rotation):
        _butterflies(y[part], y[part], rotation.size)
        v = y[part]
        w = (v * signs) * float(np.float32(output.weight))
        w = torch.where(torch.isfinite(v), w.clamp(-bound, bound), w)
        put(w, output._replace(tensor=output.tensor[part]))


def rotate_quantize(
    x: Tensor,
    scale: Tensor,
    codes: Tensor,
    rotation: Rotation,
    lattice: Lattice,
    *,
    stream: Stream,
    kind: ScaleKind,
) -> None:
    """See `Kernels`. Faster kernels do both at once."""
    y = torch.empty(x.numel(), device=x.device)
    rotate_into(x, y, rotation)
    quantize(y, scale, codes, lattice, dither=Dither(stream), kind=kind)


def dequantize_rotate(
    codes: Tensor,
    scale: Tensor,
    output: Output,
    rotation: Rotation,
    lattice: Lattice,
    *,
    stream: Stream | None,
    offset: int,
) -> None:
    """See `Kernels`. Faster kernels do both at once."""
    y = torch.empty(output.tensor.numel(), device=codes.device)
    dither = None if stream is None else Dither(stream)
    dequantize(codes, scale, Output(y), lattice, dither=dither, offset=offset)
    rotate_back(y, output, rotation)


def _parts(x: Tensor, rotation: Rotation) -> Iterator[tuple[slice, Tensor]]:
    """Where the segments lie, and the signs of their values."""
    start, unit, device = 0, 0, x.device
    for length in rotation.segments or (x.numel(),):
        count = -(-length // _UNIT)
        words = draws(rotation.signs, 32 * (unit + count), device)[32 * unit :].view(-1, 1, 32, 1)
        bit = 31 - torch.arange(32, device=device).view(8, 1, 4)
        signs = (1 - 2 * ((words >> bit) & 1)).to(torch.float32)
        yield slice(start, start + length), signs.view(-1)[:length]
        start, unit = start + length, unit + count


def _butterflies(x: Tensor, out: Tensor, size: int) -> None:
    """out = H·x, piece by piece."""
    start, left = 0, x.numel()
    while left:
        width = min(size, 1 << (left.bit_length() - 1))
        count = left // width if width == size else 1
        end = start + count * width
        v = x[start:end] * float(np.float32(width**-0.5))
        for h in (1 << k for k in range(width.bit_length() - 1)):
            a, b = v.view(-1, 2, h).unbind(1)
            v = torch.stack((a + b, a - b), 1)
        out[start:end] = v.view(-1)
        start, left = end, left - count * width
