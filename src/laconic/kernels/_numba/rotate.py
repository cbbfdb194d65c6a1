"""Randomised Hadamard rotation on the CPU. The definitions are in `_reference/rotate.py`.

A block takes two or three sweeps in the first-level cache: 128 values at a time in registers
(pairs up to 64 apart), then two, four or eight such rows at a time. Compilers do not vectorise
butterflies inside a register, so these are written as vector instructions of 16 lanes, which
LLVM cuts to what the machine has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once
from numba.extending import intrinsic
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import GROUP, ScaleKind, code_offset, fraction_bits
from laconic.kernels._numba.group import clamped
from laconic.kernels._numba.linear import dequantize_groups, dither_settings, quantize_groups
from laconic.kernels._numba.memory import (
    Pointer,
    array,
    bits_of,
    f32,
    float_of,
    get,
    i32,
    kernel,
    load,
    pointer,
    put,
    shl,
    store,
    u32,
    word_scratch,
)
from laconic.kernels._numba.random import mix
from laconic.kernels._numba.scale import INFINITY
from laconic.kernels._pool import split

LANES = 16
ROW = 128
UNIT = 1024  # values that share 32 draws; whole units are done at a time
MOST = 4096  # values of a block
SIGN = i32(-(1 << 31))
LARGEST = f32(3.4028234663852886e38)


def rotate_into(
    x: Tensor, out: Tensor, *, stream: Stream, size: int, segments: Sequence[int] = ()
) -> None:
    """See the reference."""
    data, target = array(x), array(out)
    settings = (size, max(size, UNIT), _factor(size), u32(stream.k0), u32(stream.k1))
    for start, length, unit in _segments(x.numel(), segments):
        where = (start, length, unit)
        split(
            lambda a, b, w=where: _rotate_into(data, target, *w, *settings, a, b),
            -(-length // settings[1]),
            settings[1],
        )


def rotate_back(
    y: Tensor,
    out: Tensor,
    *,
    stream: Stream,
    size: int,
    weight: float,
    add: bool,
    segments: Sequence[int] = (),
) -> None:
    """See the reference."""
    data, target = array(y), array(out)
    settings = (size, max(size, UNIT), _factor(size), u32(stream.k0), u32(stream.k1))
    worth = (f32(weight), f32(torch.finfo(out.dtype).max), add)
    for start, length, unit in _segments(y.numel(), segments):
        where = (start, length, unit)
        split(
            lambda a, b, w=where: _rotate_back(data, target, *w, *settings, *worth, a, b),
            -(-length // settings[1]),
            settings[1],
        )


def rotate_quantize(
    x: Tensor,
    scale: Tensor,
    payload: Tensor,
    *,
    signs: Stream,
    size: int,
    stream: Stream,
    block: int,
    levels: int,
    bits: int,
    kind: ScaleKind,
) -> None:
    """See the reference."""
    chunk = max(size, block, UNIT)  # values that are rotated and quantized on their own
    fraction = fraction_bits(levels)
    data, n, ns, out = array(x), x.numel(), array(scale), array(payload)
    rotation = (size, chunk, _factor(size), u32(signs.k0), u32(signs.k1))
    settings = (
        block,
        int(kind),
        levels << fraction,
        fraction,
        bits,
        0 if bits == 8 else code_offset(levels, bits),
        u32(stream.k0),
        u32(stream.k1),
        None,
    )
    split(
        lambda a, b: _rotate_quantize(data, n, ns, out, *rotation, settings, a, b),
        -(-n // chunk),
        chunk,
    )


def dequantize_rotate(
    payload: Tensor,
    scale: Tensor,
    out: Tensor,
    *,
    signs: Stream,
    size: int,
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
    unit = 1.0 / (levels if stream is None else levels << (fraction + 1))
    codes, n, ns, target = array(payload), out.numel(), array(scale), array(out)
    rotation = (size, max(size, UNIT), _factor(size), u32(signs.k0), u32(signs.k1))
    dither = dither_settings(stream, fraction, shift=0, workers=1)
    plain = (f32(1), LARGEST, False)  # weight and bound, no adding
    settings = (block, bits, offset, *dither, f32(unit), *plain)
    worth = (f32(weight), f32(torch.finfo(out.dtype).max), add)
    split(
        lambda a, b: _dequantize_rotate(codes, n, ns, target, *rotation, *worth, settings, a, b),
        -(-n // rotation[1]),
        rotation[1],
    )


def _factor(size: int) -> np.float32:
    return f32(size**-0.5)


def _segments(numel: int, segments: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """First value, number of values, first unit of draws."""
    start = unit = 0
    for length in segments or (numel,):
        yield start, length, unit
        start, unit = start + length, unit - -length // UNIT


# --- vectors of 16 lanes -------------------------------------------------------------------

_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)


def _all(builder: Any, value: Any) -> Any:
    """`value` in every lane."""
    kind = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * LANES))


def _place(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(base, [index], inbounds=True), kind.as_pointer())


def _read(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    """16 values as float32; the array's type tells which float it holds (see `memory`)."""
    if kind == types.float32:
        return builder.load(_place(builder, base, index, _FLOATS), align=4)
    value = builder.load(_place(builder, base, index, _SHORTS), align=2)
    if kind == types.uint16:
        word = builder.shl(builder.zext(value, _WORDS), ir.Constant(_WORDS, [16] * LANES))
        return builder.bitcast(word, _FLOATS)
    return builder.fpext(builder.bitcast(value, _HALVES), _FLOATS)


def _between(builder: Any, vectors: list[Any]) -> list[Any]:
    """Butterflies of vectors that are 1, 2, 4 .. apart."""
    h = 1
    while h < len(vectors):
        for i in range(len(vectors)):
            if not i & h:
                a, b = vectors[i], vectors[i + h]
                vectors[i], vectors[i + h] = builder.fadd(a, b), builder.fsub(a, b)
        h *= 2
    return vectors


def _inside(builder: Any, v: Any) -> Any:
    """Butterflies of lanes that are 1, 2, 4 and 8 apart: the other one ± this one.

    Products with ±1 are exact, so that a fused multiply-add rounds like an addition.
    """
    exact = {"flags": ("contract",)}
    h = 1
    while h < LANES:
        other = builder.shuffle_vector(v, v, ir.Constant(_WORDS, [i ^ h for i in range(LANES)]))
        signs = ir.Constant(_FLOATS, [-1.0 if i & h else 1.0 for i in range(LANES)])
        v = builder.fadd(other, builder.fmul(v, signs, **exact), **exact)
        h *= 2
    return v


def _row(signed: bool) -> Any:
    @intrinsic
    def row(
        typing: Any, x: Any, at: Any, signs: Any, shift: Any, factor: Any, y: Any, to: Any
    ) -> Any:
        """y[to : to+128] = x·factor, with signs or without, then butterflies up to 64 apart.

        The signs are bits 31 - shift of 128 words.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, at, signs, shift, factor, y, to = args
            shift, times = _all(builder, shift), _all(builder, factor)
            size = builder.bitcast(times, _WORDS)
            top = ir.Constant(_WORDS, [1 << 31] * LANES)
            vectors = []
            for i in range(0, ROW, LANES):
                if signed:
                    words = builder.load(_place(builder, signs, at.type(i), _WORDS), align=4)
                    bits = builder.and_(builder.shl(words, shift), top)
                    times = builder.bitcast(builder.or_(bits, size), _FLOATS)
                v = _read(builder, x, builder.add(at, at.type(i)), signature.args[0].dtype)
                vectors.append(_inside(builder, builder.fmul(v, times)))
            for i, v in enumerate(_between(builder, vectors)):
                place = _place(builder, y, builder.add(to, to.type(i * LANES)), _FLOATS)
                builder.store(v, place, align=4)
            return context.get_dummy_value()

        arguments = (x, types.intp, signs, types.int32, types.float32, y, types.intp)
        return types.void(*arguments), generate

    return row


signed_row, plain_row = _row(True), _row(False)


def _rows(count: int) -> Any:
    @intrinsic
    def rows(typing: Any, y: Any, at: Any, h: Any) -> Any:
        """Butterflies of `count` vectors of y, h values apart, the first at y[at]."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            y, at, h = args
            places = []
            for _ in range(count):
                places.append(_place(builder, y, at, _FLOATS))
                at = builder.add(at, h)
            vectors = [builder.load(place, align=4) for place in places]
            for v, place in zip(_between(builder, vectors), places, strict=True):
                builder.store(v, place, align=4)
            return context.get_dummy_value()

        return types.void(y, types.intp, types.intp), generate

    return rows


two, four, eight = _rows(2), _rows(4), _rows(8)


@intrinsic
def float_block(typing: Any) -> Any:
    """4096 float32 on the stack."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = alloca_once(builder, ir.ArrayType(ir.FloatType(), MOST))
        place.align = 64
        return builder.bitcast(place, ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(), generate


@intrinsic
def moved(typing: Any, a: Any, by: Any) -> Any:
    """The pointer a + by."""
    return a(a, types.intp), lambda c, builder, s, args: builder.gep(args[0], [args[1]])


# --- pieces, chunks, tensors ---------------------------------------------------------------


@kernel
def draw_signs(unit: int, k0: np.uint32, k1: np.uint32, signs: Pointer) -> None:
    """Bit 31 - 4·g of signs[j]: value 128·g + j of the unit changes its sign."""
    for w in range(32):
        h = i32(mix(u32(unit * 32 + w), k0, k1))
        for j in range(4):
            store(signs, 4 * w + j, shl(h, i32(j)))


@kernel
def no_signs(signs: Pointer) -> None:
    """All values keep theirs."""
    for j in range(ROW):
        store(signs, j, i32(0))


@kernel
def flipped(v: np.float32, signs: Pointer, i: int) -> np.float32:
    """v with the sign of value i of a unit."""
    word = shl(load(signs, i % ROW), i32(i // ROW % 8 * 4))
    return float_of(i32(bits_of(v) ^ i32(word & SIGN)))


@kernel
def short(x: Pointer, e: int, y: Pointer, to: int, size: int, place: int, signs: Pointer) -> None:
    """A piece of less than 128 values."""
    factor = f32(1 / np.sqrt(size))
    for j in range(size):
        store(y, to + j, f32(get(x, e + j) * flipped(factor, signs, place + j)))
    h = 1
    while h < size:
        for b in range(to, to + size, 2 * h):
            for j in range(b, b + h):
                u, v = load(y, j), load(y, j + h)
                store(y, j, f32(u + v))
                store(y, j + h, f32(u - v))
        h *= 2


@kernel
def sweep(y: Pointer, to: int, size: int) -> None:
    """Butterflies from 128 apart on, of y[to : to+size]."""
    h = ROW
    while h < size:
        wide = min(size // h, 8)
        for b in range(to, to + size, wide * h):
            for j in range(b, b + h, LANES):
                if wide == 8:
                    eight(y, j, h)
                elif wide == 4:
                    four(y, j, h)
                else:
                    two(y, j, h)
        h *= wide


@kernel
def turn(
    x: Pointer,
    e: int,
    count: int,
    y: Pointer,
    to: int,
    size: int,
    factor: np.float32,
    place: int,
    signed: bool,
    k0: np.uint32,
    k1: np.uint32,
    signs: Pointer,
) -> None:
    """y[to : to+count] = H·D·x[e : e+count], D = 1 unless signed.

    `place`, where x[e] stands in the stream of signs, is a multiple of UNIT. x may be y.
    """
    done = 0
    while done < count:
        width, times = size, factor
        while width > count - done:
            width //= 2
            times = f32(1 / np.sqrt(width))
        if width < ROW:
            if signed and (place + done) % UNIT == 0:
                draw_signs((place + done) // UNIT, k0, k1, signs)
            short(x, e + done, y, to + done, width, place + done, signs)
        else:
            for r in range(done, done + width, ROW):
                if signed and (place + r) % UNIT == 0:
                    draw_signs((place + r) // UNIT, k0, k1, signs)
                shift = i32((place + r) // ROW % 8 * 4)
                if signed:
                    signed_row(x, e + r, signs, shift, times, y, to + r)
                else:
                    plain_row(x, e + r, signs, shift, times, y, to + r)
            sweep(y, to + done, width)
        done += width


@kernel
def give(
    y: Pointer,
    to: int,
    out: Pointer,
    e: int,
    count: int,
    place: int,
    k0: np.uint32,
    k1: np.uint32,
    signs: Pointer,
    weight: np.float32,
    bound: np.float32,
    add: bool,
) -> None:
    """out[e : e+count] (+)= weight·D·y[to : to+count]; beyond ±bound only if y is not finite."""
    # nothing can need clamping where out holds all that y does
    safe = bound == LARGEST and abs(weight) <= f32(1)
    for r in range(0, count, ROW):
        if (place + r) % UNIT == 0:
            draw_signs((place + r) // UNIT, k0, k1, signs)
        shift = i32((place + r) // ROW % 8 * 4)
        for j in range(min(ROW, count - r)):
            i, v = e + r + j, load(y, to + r + j)
            minus = i32(shl(load(signs, j), shift) & SIGN)
            w = f32(v * float_of(i32(bits_of(weight) ^ minus)))
            if not safe:
                finite = i32(bits_of(v) & i32(0x7FFFFFFF)) < INFINITY
                w = clamped(w, bound) if finite else w
            put(out, i, f32(get(out, i) + w) if add else w)


@kernel
def _rotate_into(
    x: np.ndarray,
    y: np.ndarray,
    start: int,
    length: int,
    unit: int,
    size: int,
    chunk: int,
    factor: np.float32,
    k0: np.uint32,
    k1: np.uint32,
    first: int,
    last: int,
) -> None:
    """Chunks first .. last-1 of a segment."""
    x, y = pointer(x), pointer(y)
    signs = word_scratch()
    for c in range(first, last):
        e, count, place = start + c * chunk, min(chunk, length - c * chunk), unit * UNIT + c * chunk
        turn(x, e, count, y, e, size, factor, place, True, k0, k1, signs)


@kernel
def _rotate_back(
    y: np.ndarray,
    out: np.ndarray,
    start: int,
    length: int,
    unit: int,
    size: int,
    chunk: int,
    factor: np.float32,
    k0: np.uint32,
    k1: np.uint32,
    weight: np.float32,
    bound: np.float32,
    add: bool,
    first: int,
    last: int,
) -> None:
    """Chunks first .. last-1 of a segment."""
    y, out = pointer(y), pointer(out)
    signs, none = word_scratch(), word_scratch()
    no_signs(none)
    for c in range(first, last):
        e, count, place = start + c * chunk, min(chunk, length - c * chunk), unit * UNIT + c * chunk
        turn(y, e, count, y, e, size, factor, place, False, k0, k1, none)
        give(y, e, out, e, count, place, k0, k1, signs, weight, bound, add)


@kernel
def _rotate_quantize(
    x: np.ndarray,
    n: int,
    scale: np.ndarray,
    out: np.ndarray,
    size: int,
    chunk: int,
    factor: np.float32,
    k0: np.uint32,
    k1: np.uint32,
    settings: tuple,
    first: int,
    last: int,
) -> None:
    """Chunks first .. last-1, each rotated in scratch and quantized from there."""
    x, scale, out = pointer(x), pointer(scale), pointer(out)
    y, signs = float_block(), word_scratch()
    for c in range(first, last):
        e = c * chunk
        end = min(e + chunk, n)
        turn(x, e, end - e, y, 0, size, factor, e, True, k0, k1, signs)
        part = (e // GROUP, -(-end // GROUP))
        quantize_groups(moved(y, -e), n, scale, out, *settings, *part)


@kernel
def _dequantize_rotate(
    data: np.ndarray,
    n: int,
    scale: np.ndarray,
    out: np.ndarray,
    size: int,
    chunk: int,
    factor: np.float32,
    k0: np.uint32,
    k1: np.uint32,
    weight: np.float32,
    bound: np.float32,
    add: bool,
    settings: tuple,
    first: int,
    last: int,
) -> None:
    """Chunks first .. last-1, each decoded into scratch and rotated back from there."""
    data, scale, out = pointer(data), pointer(scale), pointer(out)
    y, signs, none = float_block(), word_scratch(), word_scratch()
    no_signs(none)
    for c in range(first, last):
        e = c * chunk
        end = min(e + chunk, n)
        part = (e // GROUP, -(-end // GROUP))
        dequantize_groups(data, n, scale, moved(y, -e), *settings, *part)
        turn(y, 0, end - e, y, 0, size, factor, e, False, k0, k1, none)
        give(y, 0, out, e, end - e, e, k0, k1, signs, weight, bound, add)
