"""Linear quantization on the GPU. The definitions are in `_reference/linear.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import ScaleKind, code_offset, fraction_bits
from laconic.kernels._triton.scale import (
    clamped,
    emit,
    finish,
    lower_of,
    magnitude,
    of_element,
    rint_bits,
    scaled,
    step,
)
from laconic.kernels._triton.tile import (
    OPTIONS,
    dither8,
    lanes,
    largest_float,
    load8,
    pack8,
    row_starts,
    rows,
    unpack8,
    word,
    words,
)

_SPAN = 8192  # values a program of a whole-tensor scale reads
_WIDTH = 64  # lanes of a row where blocks do not set it: four groups


def scales(x: Tensor, out: Tensor, *, block: int, kind: ScaleKind) -> None:
    """See the reference."""
    n = x.numel()
    if block:
        span = min(triton.next_power_of_2(block), _SPAN)
        _block_scales[(out.numel(),)](
            x, out, n, BLOCK=block, SPAN=span, KIND=int(kind), **OPTIONS
        )
        return
    parts = triton.cdiv(n, _SPAN)
    squares = torch.zeros(parts if kind is ScaleKind.L2 else 1, dtype=torch.float64, device=x.device)
    out.zero_()
    _whole[(parts,)](
        x, out.view(torch.int32), squares, n, SPAN=_SPAN, KIND=int(kind), **OPTIONS
    )
    if kind is ScaleKind.L2:
        _finish[(1,)](out, squares.sum(), **OPTIONS)


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
) -> None:
    """See the reference."""
    fused = 128 <= block <= 4096 and block & (block - 1) == 0 and kind is not ScaleKind.GIVEN
    if kind is not ScaleKind.GIVEN and not fused:
        scales(x, scale, block=block, kind=kind)
    width = block // 8 if fused else _WIDTH
    per = rows(width)
    fraction = fraction_bits(levels)
    _quantize[(triton.cdiv(x.numel(), per * width * 8),)](
        x,
        scale,
        payload,
        x.numel(),
        *words(stream),
        BLOCK=block,
        KIND=int(kind) if fused else 0,
        LIMIT=levels << fraction,
        FRACTION=fraction,
        BITS=bits,
        OFFSET=0 if bits == 32 else code_offset(levels, bits),
        ROWS=per,
        W=width,
        **OPTIONS,
    )


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
) -> None:
    """See the reference."""
    fraction = fraction_bits(levels)
    per = rows(_WIDTH)
    _dequantize[(triton.cdiv(out.numel(), per * _WIDTH * 8),)](
        payload,
        scale,
        out,
        out.numel(),
        *words(stream),
        1.0 / (levels if stream is None else levels << (fraction + 1)),
        weight,
        largest_float(out.dtype),
        offset,
        BLOCK=block,
        FRACTION=fraction,
        BITS=bits,
        SUBTRACT=stream is not None,
        ADD=add,
        ROWS=per,
        W=_WIDTH,
        **OPTIONS,
    )


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
            w = v.to(tl.float64)
            squares += w * w
    tl.store(out + b, finish(tl.max(m, 0), tl.sum(squares, 0), KIND))


@triton.jit
def _whole(x, out, squares, n, SPAN: tl.constexpr, KIND: tl.constexpr):
    """Largest magnitude by atomic maximum of its bits, whatever the order; squares by part."""
    part = tl.program_id(0).to(tl.int64)
    e = part * SPAN + tl.arange(0, SPAN)
    v = tl.load(x + e, mask=e < n, other=0.0).to(tl.float32)
    tl.atomic_max(out, tl.max(magnitude(v), 0))
    if KIND == 2:
        w = v.to(tl.float64)
        tl.store(squares + part, tl.sum(w * w, 0))


@triton.jit
def _finish(out, squares):
    m = tl.load(out).to(tl.int32, bitcast=True)
    tl.store(out, finish(m, tl.load(squares), 2))


@triton.jit
def _row_max(x0, x1, x2, x3, x4, x5, x6, x7):
    a = tl.maximum(tl.maximum(magnitude(x0), magnitude(x1)), tl.maximum(magnitude(x2), magnitude(x3)))
    b = tl.maximum(tl.maximum(magnitude(x4), magnitude(x5)), tl.maximum(magnitude(x6), magnitude(x7)))
    return tl.max(tl.maximum(a, b), 1)


@triton.jit
def _row_squares(x0, x1, x2, x3, x4, x5, x6, x7):
    a, b, c, d = x0.to(tl.float64), x1.to(tl.float64), x2.to(tl.float64), x3.to(tl.float64)
    s = a * a + b * b + c * c + d * d
    a, b, c, d = x4.to(tl.float64), x5.to(tl.float64), x6.to(tl.float64), x7.to(tl.float64)
    return tl.sum(s + a * a + b * b + c * c + d * d, 1)


@triton.jit
def _code(
    x,
    r,
    e,
    n,
    scale,
    size,
    over,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    FRACTION: tl.constexpr,
    CHECK: tl.constexpr,
):
    """q of one value per lane; with CHECK, `over` also tells where |x| exceeds its scale."""
    if BLOCK % 128 != 0:
        size = of_element(scale, e, n, BLOCK)
    y = scaled(x, size, LIMIT * 1.0)
    if CHECK:
        TOLERANCE: tl.constexpr = LIMIT * (1 + 2.0**-16)
        bad = (tl.abs(y) > TOLERANCE) | (y != y) | ((size == 0.0) & (x != 0.0))
        y = tl.where(bad, 0.0, clamped(y, LIMIT * 1.0))
        over = over | bad
    return (rint_bits(y) - 0x4B400000 + r) >> FRACTION, over


@triton.jit(do_not_specialize=["k0", "k1"])
def _quantize(
    x,
    scale,
    payload,
    n,
    k0,
    k1,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    FRACTION: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    """ROWS rows; with KIND set a row is a block and its scale is found here."""
    start = row_starts(ROWS, W)
    e = start + lanes(W)
    x0, x1, x2, x3, x4, x5, x6, x7 = load8(x, e, n)
    if KIND:
        squares = tl.zeros((ROWS,), tl.float64)
        if KIND == 2:
            squares = _row_squares(x0, x1, x2, x3, x4, x5, x6, x7)
        size = finish(_row_max(x0, x1, x2, x3, x4, x5, x6, x7), squares, KIND)[:, None]
        tl.store(scale + start // BLOCK, size, mask=start < n)
    else:
        size = of_element(scale, e, n, BLOCK)
    r0, r1, r2, r3, r4, r5, r6, r7 = dither8(e, k0, k1, FRACTION)
    CHECK: tl.constexpr = KIND == 0
    over = e < 0
    c0, over = _code(x0, r0, e, n, scale, size, over, BLOCK, LIMIT, FRACTION, CHECK)
    c1, over = _code(x1, r1, e + 16, n, scale, size, over, BLOCK, LIMIT, FRACTION, CHECK)
    c2, over = _code(x2, r2, e + 32, n, scale, size, over, BLOCK, LIMIT, FRACTION, CHECK)
    c3, over = _code(x3, r3, e + 48, n, scale, size, over, BLOCK, LIMIT, FRACTION, CHECK)
    c4, over = _code(x4, r4, e + 64, n, scale, size, over, BLOCK, LIMIT, FRACTION, CHECK)
    c5, over = _code(x5, r5, e + 80, n, scale, size, over, BLOCK, LIMIT, FRACTION, CHECK)
    c6, over = _code(x6, r6, e + 96, n, scale, size, over, BLOCK, LIMIT, FRACTION, CHECK)
    c7, over = _code(x7, r7, e + 112, n, scale, size, over, BLOCK, LIMIT, FRACTION, CHECK)
    if BITS == 32:
        tl.store(payload + e, c0, mask=e < n)
        tl.store(payload + e + 16, c1, mask=e + 16 < n)
        tl.store(payload + e + 32, c2, mask=e + 32 < n)
        tl.store(payload + e + 48, c3, mask=e + 48 < n)
        tl.store(payload + e + 64, c4, mask=e + 64 < n)
        tl.store(payload + e + 80, c5, mask=e + 80 < n)
        tl.store(payload + e + 96, c6, mask=e + 96 < n)
        tl.store(payload + e + 112, c7, mask=e + 112 < n)
    else:
        c0, c1, c2, c3 = c0 + OFFSET, c1 + OFFSET, c2 + OFFSET, c3 + OFFSET
        c4, c5, c6, c7 = c4 + OFFSET, c5 + OFFSET, c6 + OFFSET, c7 + OFFSET
        pack8(payload, e, n, c0, c1, c2, c3, c4, c5, c6, c7, BITS)
    if CHECK and BLOCK == 0:  # poison the one scale: a value above it has no code
        bad = tl.max(tl.max(over.to(tl.int32), 1), 0)
        tl.store(scale, float("nan"), mask=bad > 0)


@triton.jit
def _value(
    q,
    r,
    e,
    n,
    scale,
    worth,
    lower,
    unit,
    weight,
    bound,
    out,
    BLOCK: tl.constexpr,
    FRACTION: tl.constexpr,
    SUBTRACT: tl.constexpr,
    ADD: tl.constexpr,
):
    """Decode one value per lane into out."""
    if BLOCK % 128 != 0:
        size = of_element(scale, e, n, BLOCK)
        worth, lower = step(size, unit, weight), lower_of(size)
    if SUBTRACT:
        q = (q << (FRACTION + 1)) - 2 * r + ((1 << FRACTION) - 1)
    emit(out, e, n, clamped((q.to(tl.float32) * worth) * lower, bound), ADD)


@triton.jit(do_not_specialize=["k0", "k1", "offset"])
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
    BLOCK: tl.constexpr,
    FRACTION: tl.constexpr,
    BITS: tl.constexpr,
    SUBTRACT: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    e = row_starts(ROWS, W) + lanes(W)
    if BITS == 32:
        c0, c1 = word(payload, e, n), word(payload, e + 16, n)
        c2, c3 = word(payload, e + 32, n), word(payload, e + 48, n)
        c4, c5 = word(payload, e + 64, n), word(payload, e + 80, n)
        c6, c7 = word(payload, e + 96, n), word(payload, e + 112, n)
    else:
        c0, c1, c2, c3, c4, c5, c6, c7 = unpack8(payload, e, n, BITS)
        c0, c1, c2, c3 = c0 - offset, c1 - offset, c2 - offset, c3 - offset
        c4, c5, c6, c7 = c4 - offset, c5 - offset, c6 - offset, c7 - offset
    r0, r1, r2, r3, r4, r5, r6, r7 = c0, c0, c0, c0, c0, c0, c0, c0
    if SUBTRACT:
        r0, r1, r2, r3, r4, r5, r6, r7 = dither8(e, k0, k1, FRACTION)
    size = of_element(scale, e, n, BLOCK)
    s, t = step(size, unit, weight), lower_of(size)
    u, w, b = unit, weight, bound
    _value(c0, r0, e, n, scale, s, t, u, w, b, out, BLOCK, FRACTION, SUBTRACT, ADD)
    _value(c1, r1, e + 16, n, scale, s, t, u, w, b, out, BLOCK, FRACTION, SUBTRACT, ADD)
    _value(c2, r2, e + 32, n, scale, s, t, u, w, b, out, BLOCK, FRACTION, SUBTRACT, ADD)
    _value(c3, r3, e + 48, n, scale, s, t, u, w, b, out, BLOCK, FRACTION, SUBTRACT, ADD)
    _value(c4, r4, e + 64, n, scale, s, t, u, w, b, out, BLOCK, FRACTION, SUBTRACT, ADD)
    _value(c5, r5, e + 80, n, scale, s, t, u, w, b, out, BLOCK, FRACTION, SUBTRACT, ADD)
    _value(c6, r6, e + 96, n, scale, s, t, u, w, b, out, BLOCK, FRACTION, SUBTRACT, ADD)
    _value(c7, r7, e + 112, n, scale, s, t, u, w, b, out, BLOCK, FRACTION, SUBTRACT, ADD)
