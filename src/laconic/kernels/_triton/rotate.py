"""Randomised Hadamard rotation on the GPU. The definitions are in `_reference/rotate.py`.

A tile is rotated in registers. Triton gives a lane all values of a dimension that is split in
two, so butterflies run along dimensions, and Triton transposes the tile (by way of shared memory)
where the next pairs lie in different lanes. Tiles that are not full take a launch of their own,
in which butterflies look where their piece ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import GROUP, ScaleKind
from laconic.kernels._protocol import Lattice, Output, Rotation
from laconic.kernels._triton.group import (
    LARGEST,
    MAX_ROW,
    OPTIONS,
    TILE,
    clamped,
    mix,
    narrowed,
    words,
)
from laconic.kernels._triton.linear import dequantize_tile, quantize_tile, rounding, worth_of

_UNIT = 1024  # values that share 32 draws


def rotate_into(x: Tensor, out: Tensor, rotation: Rotation) -> None:
    """See `Kernels`."""
    for grid, first, table, settings in _launches(x, rotation):
        signs = words(rotation.signs)
        _rotate_into[grid](x, out, x.numel(), first, table, *signs, **settings, **OPTIONS)


def rotate_back(y: Tensor, output: Output, rotation: Rotation) -> None:
    """See `Kernels`."""
    out, weight, add = output
    worth = (*words(rotation.signs), weight, torch.finfo(out.dtype).max)
    for grid, first, table, settings in _launches(y, rotation):
        _rotate_back[grid](y, out, y.numel(), first, table, *worth, ADD=add, **settings, **OPTIONS)


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
    """See `Kernels`."""
    for grid, first, _, settings in _launches(x, rotation, lattice.block):
        _rotate_quantize[grid](
            x,
            scale,
            codes,
            x.numel(),
            first,
            *words(rotation.signs),
            *words(stream),
            KIND=int(kind),
            **rounding(lattice),
            **settings,
            **OPTIONS,
        )


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
    """See `Kernels`."""
    block, tile, out = lattice.block, max(rotation.size, TILE), output.tensor
    row = block if _is_row(block) and block <= tile else tile
    for grid, first, _, settings in _launches(out, rotation):
        _dequantize_rotate[grid](
            codes,
            scale,
            out,
            out.numel(),
            first,
            *words(rotation.signs),
            *words(stream),
            *worth_of(output, lattice, stream),
            offset,
            BLOCK=block,
            FRACTION=lattice.fraction,
            BITS=lattice.bits,
            SUBTRACT=stream is not None,
            ADD=output.add,
            ROWS=tile // row,
            W=row // 2,
            **settings,
            **OPTIONS,
        )


def _is_row(block: int) -> bool:
    """Scales of such blocks are found in the tile."""
    return GROUP <= block <= MAX_ROW and block & (block - 1) == 0


def _launches(
    x: Tensor, rotation: Rotation, block: int = 0
) -> Iterator[tuple[tuple[int], int, Tensor | None, dict[str, Any]]]:
    """Grid, first tile, table of tiles and settings: for full tiles, then for the others."""
    _, size, segments = rotation
    tile = max(size, block, TILE)
    settings = {"T": tile, "K": size.bit_length() - 1}
    if segments:
        for full, table in zip(
            (True, False), _tables(tuple(segments), tile, x.device), strict=True
        ):
            if len(table):
                yield (len(table),), 0, table, {**settings, "FULL": full}
        return
    full, rest = divmod(x.numel(), tile)
    if full:
        yield (full,), 0, None, {**settings, "FULL": True}
    if rest:
        yield (1,), full, None, {**settings, "FULL": False}


@lru_cache(maxsize=64)
def _tables(segments: tuple[int, ...], tile: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Start, number of values and place among the signs of full tiles, and of the others."""
    full, rest = [], []
    start = unit = 0
    for length in segments:
        place = unit * _UNIT
        whole = length // tile
        full += [(start + t * tile, tile, place + t * tile) for t in range(whole)]
        if length % tile:
            rest.append((start + whole * tile, length % tile, place + whole * tile))
        start, unit = start + length, unit - -length // _UNIT
    full, rest = (torch.tensor(rows, dtype=torch.int64).view(-1, 3) for rows in (full, rest))
    return full.to(device), rest.to(device)


@triton.jit
def tile_at(table, n, first, T: tl.constexpr, FULL: tl.constexpr):
    """First value, number of values, and place among the signs of this program's tile."""
    t = tl.program_id(0).to(tl.int64) + first
    if table is None:
        start, left, place = t * T, tl.minimum(n - t * T, T).to(tl.int32), t * T
    else:
        start = tl.load(table + 3 * t)
        left = tl.load(table + 3 * t + 1).to(tl.int32)
        place = tl.load(table + 3 * t + 2)
    if FULL:
        left = T
    return start, left, place


@triton.jit
def load_tile(ptr, left, T: tl.constexpr, FULL: tl.constexpr):
    """T values as float32, zero beyond the end."""
    e = tl.arange(0, T)
    if FULL:
        return tl.load(ptr + e).to(tl.float32)
    else:
        return tl.load(ptr + e, mask=e < left, other=0.0).to(tl.float32)


@triton.jit
def sign_bits(place, s0, s1, T: tl.constexpr):
    """Bit 31 for each of T values that change their sign."""
    p = (place // 32).to(tl.uint32) + tl.arange(0, T // 32).to(tl.uint32)
    word = tl.reshape(mix(p, s0.to(tl.uint32), s1.to(tl.uint32)), (T // 1024, 1, 32, 1))
    shift = tl.arange(0, 8)[None, :, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    return tl.reshape((word << shift.to(tl.uint32)) & 0x80000000, (T,))


@triton.jit
def flipped(v, signs):
    """v, with some signs changed."""
    return (v.to(tl.uint32, bitcast=True) ^ signs).to(tl.float32, bitcast=True)


@triton.jit
def butterflies(v, left, T: tl.constexpr, K: tl.constexpr, FULL: tl.constexpr):
    """H·v for each block of 2^K of T values, of which `left` are real."""
    reach = tl.arange(0, T)
    if FULL:
        v = v * 2.0 ** (-K / 2)
    else:
        # the highest bit of `reach` is the size of the value's piece; beyond the end, none or any
        i = reach % (1 << K)
        reach = i ^ tl.minimum(left - (reach - i), 1 << K)
        factor = tl.full((T,), 1.0, tl.float32)
        for k in tl.static_range(1, K + 1):
            factor = tl.where(reach >= (1 << k), 2.0 ** (-k / 2), factor)
        v = v * factor
    v = tl.permute(tl.reshape(v, (T // 32, 32)), (1, 0))
    reach = tl.permute(tl.reshape(reach, (T // 32, 32)), (1, 0))
    v = along(v, reach, 32, T // 32, 0, 5, FULL)
    v, reach = tl.permute(v, (1, 0)), tl.permute(reach, (1, 0))
    return tl.reshape(along(v, reach, T // 32, 32, 5, K, FULL), (T,))


@triton.jit
def along(
    v,
    reach,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    FULL: tl.constexpr,
):
    """Butterflies 2^FIRST to 2^(LAST-1) values apart; rows are 2^FIRST values apart."""
    for k in tl.static_range(LAST - FIRST):
        a, b = halves(v, ROWS, W, 1 << k)
        c, d = a + b, a - b
        if not FULL:
            end, _ = halves(reach, ROWS, W, 1 << k)
            pair = end >= (2 << (FIRST + k))
            c, d = tl.where(pair, c, a), tl.where(pair, d, b)
        v = tl.reshape(tl.permute(tl.join(c, d), (0, 3, 1, 2)), (ROWS, W))
    return v


@triton.jit
def halves(v, ROWS: tl.constexpr, W: tl.constexpr, H: tl.constexpr):
    """The rows without and those with bit H in their number."""
    return tl.split(tl.permute(tl.reshape(v, (ROWS // (2 * H), 2, H, W)), (0, 2, 3, 1)))


@triton.jit
def give(
    out, v, signs, weight, bound, left, T: tl.constexpr, ADD: tl.constexpr, FULL: tl.constexpr
):
    """out (+)= ±weight·v; beyond ±bound only if v is not finite."""
    w = flipped(v, signs) * weight
    w = tl.where(tl.abs(v) <= LARGEST, clamped(w, bound), w)
    if ADD:
        w = load_tile(out, left, T, FULL) + w
    e = tl.arange(0, T)
    w = narrowed(w, out.dtype.element_ty)
    if FULL:
        tl.store(out + e, w)
    else:
        tl.store(out + e, w, mask=e < left)


@triton.jit(do_not_specialize=["first", "s0", "s1"])
def _rotate_into(
    x, out, n, first, table, s0, s1, T: tl.constexpr, K: tl.constexpr, FULL: tl.constexpr
):
    start, left, place = tile_at(table, n, first, T, FULL)
    v = flipped(load_tile(x + start, left, T, FULL), sign_bits(place, s0, s1, T))
    v = butterflies(v, left, T, K, FULL)
    e = tl.arange(0, T)
    if FULL:
        tl.store(out + start + e, v)
    else:
        tl.store(out + start + e, v, mask=e < left)


@triton.jit(do_not_specialize=["first", "s0", "s1"])
def _rotate_back(
    y,
    out,
    n,
    first,
    table,
    s0,
    s1,
    weight,
    bound,
    ADD: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    FULL: tl.constexpr,
):
    start, left, place = tile_at(table, n, first, T, FULL)
    v = butterflies(load_tile(y + start, left, T, FULL), left, T, K, FULL)
    give(out + start, v, sign_bits(place, s0, s1, T), weight, bound, left, T, ADD, FULL)


@triton.jit(do_not_specialize=["first", "s0", "s1", "k0", "k1"])
def _rotate_quantize(
    x,
    scale,
    payload,
    n,
    first,
    s0,
    s1,
    k0,
    k1,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    FRACTION: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    FULL: tl.constexpr,
):
    ROWS: tl.constexpr = T // BLOCK
    W: tl.constexpr = BLOCK // 2
    base, left, place = tile_at(None, n, first, T, FULL)
    v = flipped(load_tile(x + base, left, T, FULL), sign_bits(place, s0, s1, T))
    v = tl.reshape(butterflies(v, left, T, K, FULL), (ROWS, W // 64, 2, 64))
    a, b = tl.split(tl.permute(v, (0, 1, 3, 2)))
    a, b = tl.reshape(a, (ROWS, W)), tl.reshape(b, (ROWS, W))
    quantize_tile(
        a,
        b,
        scale,
        payload,
        base,
        left,
        k0,
        k1,
        0,
        BLOCK,
        KIND,
        LIMIT,
        FRACTION,
        BITS,
        OFFSET,
        ROWS,
        W,
    )


@triton.jit(do_not_specialize=["first", "s0", "s1", "k0", "k1", "offset"])
def _dequantize_rotate(
    payload,
    scale,
    out,
    n,
    first,
    s0,
    s1,
    k0,
    k1,
    unit,
    weight,
    bound,
    offset,
    BLOCK: tl.constexpr,
    FRACTION: tl.constexpr,
    BITS: tl.constexpr,
    SUBTRACT: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    FULL: tl.constexpr,
):
    base, left, place = tile_at(None, n, first, T, FULL)
    a, b = dequantize_tile(
        payload,
        scale,
        base,
        left,
        k0,
        k1,
        unit,
        1.0,
        LARGEST,
        offset,
        1,
        0,
        (1 << FRACTION) - 1,
        BLOCK,
        FRACTION,
        BITS,
        SUBTRACT,
        ROWS,
        W,
    )
    v = tl.permute(tl.reshape(tl.join(a, b), (ROWS, W // 64, 64, 2)), (0, 1, 3, 2))
    v = butterflies(tl.reshape(v, (T,)), left, T, K, FULL)
    give(out + base, v, sign_bits(place, s0, s1, T), weight, bound, left, T, ADD, FULL)
