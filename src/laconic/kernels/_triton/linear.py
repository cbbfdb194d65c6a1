"""Linear quantization on the GPU. The definitions are in `_reference/linear.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import ScaleKind, dither_centre
from laconic.kernels._protocol import Dither, Lattice, Output
from laconic.kernels._triton.group import (
    OPTIONS,
    clamped,
    dither2,
    emit2,
    finish,
    lanes,
    load2,
    lower_of,
    magnitude,
    narrowed,
    pack2,
    programs,
    rint_bits,
    scale_of,
    scaled2,
    shape,
    square,
    step,
    strata2,
    tile_start,
    unpack2,
    words,
)

_SPAN = 8192  # values a program of a whole-tensor scale reads
_WARPS = {**OPTIONS, "num_warps": 4}


def scales(x: Tensor, out: Tensor, *, block: int, kind: ScaleKind) -> None:
    """See `Kernels`."""
    n = x.numel()
    if block:
        span = min(triton.next_power_of_2(block), _SPAN)
        _block_scales[(out.numel(),)](x, out, n, BLOCK=block, SPAN=span, KIND=int(kind), **_WARPS)
        return
    parts = triton.cdiv(n, _SPAN)
    squares = out  # not touched for the largest magnitude
    if kind is ScaleKind.L2:
        squares = torch.empty(parts, dtype=torch.float64, device=x.device)
    out.zero_()
    _whole[(parts,)](x, out.view(torch.int32), squares, n, SPAN=_SPAN, KIND=int(kind), **_WARPS)
    if kind is ScaleKind.L2:
        _finish[(1,)](out, squares.sum(), **OPTIONS)


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
    tile = shape(lattice.block)
    fused = lattice.block == 2 * tile["W"] and kind is not ScaleKind.GIVEN
    if kind is not ScaleKind.GIVEN and not fused:
        scales(x, scale, block=lattice.block, kind=kind)
    _quantize[programs(x.numel(), tile)](
        x,
        scale,
        codes,
        x.numel(),
        *words(dither.stream),
        dither.shift,
        KIND=int(kind) if fused else 0,
        **rounding(lattice),
        **tile,
        **OPTIONS,
    )


def rounding(lattice: Lattice) -> dict[str, int]:
    """Launch arguments of kernels that make codes."""
    return {
        "BLOCK": lattice.block,
        "LIMIT": lattice.limit,
        "FRACTION": lattice.fraction,
        "BITS": lattice.bits,
        "OFFSET": 0 if lattice.bits == 32 else lattice.offset,
    }


def accumulate(source: Tensor, output: Output) -> None:
    """See `Kernels`."""
    out, weight, add = output
    n = out.numel()
    _accumulate[(triton.cdiv(n, _SPAN // 4),)](
        source, out, n, weight, ADD=add, SPAN=_SPAN // 4, **_WARPS
    )


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
    fraction, tile, out = lattice.fraction, shape(lattice.block), output.tensor
    stream, shift, workers = (None, 0, 1) if dither is None else dither
    _dequantize[programs(out.numel(), tile)](
        codes,
        scale,
        out,
        out.numel(),
        *words(stream),
        *worth_of(output, lattice, stream),
        offset,
        workers % (1 << fraction),
        shift,
        dither_centre(workers, fraction),
        BLOCK=lattice.block,
        FRACTION=fraction,
        BITS=lattice.bits,
        SUBTRACT=stream is not None,
        ADD=output.add,
        **tile,
        **OPTIONS,
    )


def worth_of(output: Output, lattice: Lattice, stream: Stream | None) -> tuple[float, float, float]:
    """What a unit of a code is worth in scales, the weight, and the largest value there may be."""
    levels = lattice.levels
    unit = 1.0 / (levels if stream is None else levels << (lattice.fraction + 1))
    return unit, output.weight, torch.finfo(output.tensor.dtype).max


@triton.jit
def _accumulate(source, out, n, weight, ADD: tl.constexpr, SPAN: tl.constexpr):
    e = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    v = tl.load(source + e, mask=e < n, other=0.0).to(tl.float32) * weight
    if ADD:
        v = tl.load(out + e, mask=e < n, other=0.0).to(tl.float32) + v
    tl.store(out + e, narrowed(v, out.dtype.element_ty), mask=e < n)


@triton.jit
def _block_scales(x, out, n, BLOCK: tl.constexpr, SPAN: tl.constexpr, KIND: tl.constexpr):
    """One program a block."""
    b = tl.program_id(0).to(tl.int64)
    m = tl.zeros((SPAN,), tl.int32)
    squares = tl.zeros((SPAN,), tl.float64)
    for start in range(0, BLOCK, SPAN):
        i = start + tl.arange(0, SPAN)
        e = b * BLOCK + i
        v = tl.load(x + e, mask=(i < BLOCK) & (e < n), other=0.0).to(tl.float32)
        m = tl.maximum(m, magnitude(v))
        if KIND == 2:
            squares += square(v)
    tl.store(out + b, finish(tl.max(m, 0), tl.sum(squares, 0), KIND))


@triton.jit
def _whole(x, out, squares, n, SPAN: tl.constexpr, KIND: tl.constexpr):
    """Largest magnitude by atomic maximum of its bits, whatever the order; squares by part."""
    part = tl.program_id(0).to(tl.int64)
    e = part * SPAN + tl.arange(0, SPAN)
    v = tl.load(x + e, mask=e < n, other=0.0).to(tl.float32)
    m = tl.max(magnitude(v), 0)
    tl.atomic_max(out, tl.where(m >= 0x7F800000, 0x7FC00000, m))
    if KIND == 2:
        tl.store(squares + part, tl.sum(square(v), 0))


@triton.jit
def _finish(out, squares):
    m = tl.load(out).to(tl.int32, bitcast=True)
    tl.store(out, finish(m, tl.load(squares), 2))


@triton.jit
def _within(x, y, size, over, LIMIT: tl.constexpr):
    """y, cut to ±LIMIT where rounding took it beyond and zero where |x| exceeds the scale."""
    TOLERANCE: tl.constexpr = LIMIT * (1 + 2.0**-16)
    bad = (tl.abs(y) > TOLERANCE) | (y != y) | ((size == 0.0) & (x != 0.0))
    return tl.where(bad, 0.0, clamped(y, LIMIT * 1.0)), over | tl.max(
        tl.max(bad.to(tl.int32), 1), 0
    )


@triton.jit
def _code(y, r, FRACTION: tl.constexpr, OFFSET: tl.constexpr):
    """((rint(y) + r) >> F) + OFFSET; the rounding constant goes with the offset."""
    return ((rint_bits(y) + r) >> FRACTION) + (OFFSET - (0x4B400000 >> FRACTION))


@triton.jit(do_not_specialize=["k0", "k1", "shift"])
def _quantize(
    x,
    scale,
    payload,
    n,
    k0,
    k1,
    shift,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    FRACTION: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    base, left = tile_start(n, ROWS, W)
    group, lane = lanes(ROWS, W)
    a, b = load2(x + base, group * 128 + lane % 64, left)
    quantize_tile(
        a,
        b,
        scale,
        payload,
        base,
        left,
        k0,
        k1,
        shift,
        BLOCK,
        KIND,
        LIMIT,
        FRACTION,
        BITS,
        OFFSET,
        ROWS,
        W,
    )


@triton.jit
def quantize_tile(
    a,
    b,
    scale,
    payload,
    base,
    left,
    k0,
    k1,
    shift,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    FRACTION: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    """The lanes' values a and b of ROWS rows; with KIND set a row is a block, scaled here."""
    group, lane = lanes(ROWS, W)
    e = group * 128 + lane % 64
    if KIND:
        squares = tl.zeros((ROWS, W), tl.float64)
        if KIND == 2:
            squares = square(a) + square(b)
        m = tl.maximum(magnitude(a), magnitude(b))
        size = finish(tl.max(m, 1), tl.sum(squares, 1), KIND)[:, None]
        row = tl.arange(0, ROWS)[:, None]
        tl.store(scale + base // BLOCK + row, size, mask=row * BLOCK < left)
        other = size
    else:
        size = scale_of(scale, base, e, left, BLOCK, ROWS, W)
        other = scale_of(scale, base, e + 64, left, BLOCK, ROWS, W)
    r, s = dither2(base, group, lane, k0, k1, FRACTION)
    r, s = strata2(r, s, 1, shift, FRACTION)
    y, z = scaled2(a, b, size, other, LIMIT * 1.0)
    if KIND == 0:
        beyond = (magnitude(a) > magnitude(size)) | (magnitude(b) > magnitude(other))
        if tl.max(tl.max(beyond.to(tl.int32), 1), 0) > 0:
            over = 0
            y, over = _within(a, y, size, over, LIMIT)
            z, over = _within(b, z, other, over, LIMIT)
            if BLOCK == 0:  # poison the one scale: a value above it has no code
                tl.store(scale, float("nan"), mask=over > 0)
    c, d = _code(y, r, FRACTION, OFFSET), _code(z, s, FRACTION, OFFSET)
    if BITS == 32:
        tl.store(payload + base + e, c, mask=e < left)
        tl.store(payload + base + e + 64, d, mask=e + 64 < left)
    else:
        pack2(payload, base, group, lane, left, c, d, BITS, ROWS, W)


@triton.jit(do_not_specialize=["k0", "k1", "offset", "shift", "centre"])
def _dequantize(
    payload,
    scale,
    out,
    n,
    k0,
    k1,
    unit,
    weight,
    bound,
    offset,
    workers,
    shift,
    centre,
    BLOCK: tl.constexpr,
    FRACTION: tl.constexpr,
    BITS: tl.constexpr,
    SUBTRACT: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    base, left = tile_start(n, ROWS, W)
    group, lane = lanes(ROWS, W)
    v, w = dequantize_tile(
        payload,
        scale,
        base,
        left,
        k0,
        k1,
        unit,
        weight,
        bound,
        offset,
        workers,
        shift,
        centre,
        BLOCK,
        FRACTION,
        BITS,
        SUBTRACT,
        ROWS,
        W,
    )
    emit2(out + base, group * 128 + lane % 64, left, v, w, ADD)


@triton.jit
def dequantize_tile(
    payload,
    scale,
    base,
    left,
    k0,
    k1,
    unit,
    weight,
    bound,
    offset,
    workers,
    shift,
    centre,
    BLOCK: tl.constexpr,
    FRACTION: tl.constexpr,
    BITS: tl.constexpr,
    SUBTRACT: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    """The values of the lanes of ROWS rows."""
    group, lane = lanes(ROWS, W)
    e = group * 128 + lane % 64
    if BITS == 32:
        c = tl.load(payload + base + e, mask=e < left, other=0)
        d = tl.load(payload + base + e + 64, mask=e + 64 < left, other=0)
    else:
        c, d = unpack2(payload, base, group, lane, left, BITS)
        c, d = c - offset, d - offset
    if SUBTRACT:
        r, s = dither2(base, group, lane, k0, k1, FRACTION)
        r, s = strata2(r, s, workers, shift, FRACTION)
        if BITS == 32:  # a sum of many workers needs more than 32 bits here
            c, d = c.to(tl.int64), d.to(tl.int64)
        c = (c << (FRACTION + 1)) - 2 * r + centre
        d = (d << (FRACTION + 1)) - 2 * s + centre
    size = scale_of(scale, base, e, left, BLOCK, ROWS, W)
    other = scale_of(scale, base, e + 64, left, BLOCK, ROWS, W)
    v = (c.to(tl.float32) * step(size, unit, weight)) * lower_of(size)
    w = (d.to(tl.float32) * step(other, unit, weight)) * lower_of(other)
    return clamped(v, bound), clamped(w, bound)
