"""Randomised Hadamard rotation on the CPU. The definitions are in `_reference/rotate.py`.

A block takes two or three sweeps in the first-level cache: 128 values at a time in registers
(pairs up to 64 apart), then two, four or eight such rows at a time. Compilers do not vectorise
butterflies inside a register, so these are written as vector instructions of 16 lanes, which
LLVM cuts to what the machine has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once
from numba.extending import intrinsic
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._layout import GROUP, ScaleKind
from laconic.kernels._numba.group import (
    INFINITY,
    Decoding,
    Rounding,
    Worth,
    clamped,
    decoding_of,
    mix,
    rounding_of,
    words,
    worth_of,
)
from laconic.kernels._numba.intrinsics import (
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
from laconic.kernels._numba.linear import dequantize_groups, quantize_groups
from laconic.kernels._pool import split
from laconic.kernels._protocol import Dither, Lattice, Output, Rotation

LANES = 16
ROW = 128
UNIT = 1024  # values that share 32 draws; whole units are done at a time
MOST = 4096  # values of a block
SIGN = i32(-(1 << 31))
LARGEST = f32(3.4028234663852886e38)


def rotate_into(x: Tensor, out: Tensor, rotation: Rotation) -> None:
    """See `Kernels`."""
    data, target, turning = array(x), array(out), _turning(rotation)
    for where in _segments(x.numel(), rotation.segments):
        split(
            lambda a, b, w=where: _rotate_into(data, target, w, turning, a, b),
            -(-where[1] // turning[1]),
            turning[1],
        )


def rotate_back(y: Tensor, output: Output, rotation: Rotation) -> None:
    """See `Kernels`."""
    data, target, turning = array(y), array(output.tensor), _turning(rotation)
    worth = worth_of(output)
    for where in _segments(y.numel(), rotation.segments):
        split(
            lambda a, b, w=where: _rotate_back(data, target, w, turning, worth, a, b),
            -(-where[1] // turning[1]),
            turning[1],
        )


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
    args = (array(x), x.numel(), array(scale), array(codes))
    turning = _turning(rotation, lattice.block)
    how, chunk = rounding_of(lattice, stream, kind), turning[1]
    split(lambda a, b: _rotate_quantize(*args, turning, how, a, b), -(-x.numel() // chunk), chunk)


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
    n, turning = output.tensor.numel(), _turning(rotation)
    args = (array(codes), n, array(scale), array(output.tensor))
    what, unit = decoding_of(lattice, None if stream is None else Dither(stream), offset)
    inside, worth = (f32(unit), f32(1), LARGEST, False), worth_of(output)
    split(
        lambda a, b: _dequantize_rotate(*args, turning, what, inside, worth, a, b),
        -(-n // turning[1]),
        turning[1],
    )


class Turning(NamedTuple):
    """A rotation, as kernels take it."""

    size: int
    chunk: int  # values that are rotated (and quantized) on their own
    factor: np.float32  # of blocks that are full
    k0: np.uint32
    k1: np.uint32


def _turning(rotation: Rotation, block: int = 0) -> tuple:
    """A `Turning`."""
    size = rotation.size
    return size, max(size, block, UNIT), f32(size**-0.5), *words(rotation.signs)


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
    """16 values as float32; the array's type tells which float it holds (see `intrinsics`)."""
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
    how: Turning,
    place: int,
    signed: bool,
    signs: Pointer,
) -> None:
    """y[to : to+count] = H·D·x[e : e+count], D = 1 unless signed.

    `place`, where x[e] stands in the stream of signs, is a multiple of UNIT. x may be y.
    """
    k0, k1 = how.k0, how.k1
    done = 0
    while done < count:
        width, times = how.size, how.factor
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
    how: Turning,
    place: int,
    signs: Pointer,
    worth: Worth,
) -> None:
    """out[e : e+count] (+)= weight·D·y[to : to+count]; beyond ±bound only if y is not finite."""
    weight, bound, k0, k1 = worth.weight, worth.bound, how.k0, how.k1
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
            put(out, i, f32(get(out, i) + w) if worth.add else w)


@kernel
def _rotate_into(
    x: np.ndarray, y: np.ndarray, where: tuple, how: tuple, first: int, last: int
) -> None:
    """Chunks first .. last-1 of a segment."""
    x, y, how = pointer(x), pointer(y), Turning(*how)
    start, length, unit = where
    signs = word_scratch()
    for c in range(first, last):
        at = c * how.chunk
        count = min(how.chunk, length - at)
        turn(x, start + at, count, y, start + at, how, unit * UNIT + at, True, signs)


@kernel
def _rotate_back(
    y: np.ndarray, out: np.ndarray, where: tuple, how: tuple, worth: tuple, first: int, last: int
) -> None:
    """Chunks first .. last-1 of a segment."""
    y, out, how, worth = pointer(y), pointer(out), Turning(*how), Worth(*worth)
    start, length, unit = where
    signs, none = word_scratch(), word_scratch()
    no_signs(none)
    for c in range(first, last):
        at = c * how.chunk
        e, count, place = start + at, min(how.chunk, length - at), unit * UNIT + at
        turn(y, e, count, y, e, how, place, False, none)
        give(y, e, out, e, count, how, place, signs, worth)


@kernel
def _rotate_quantize(
    x: np.ndarray,
    n: int,
    scale: np.ndarray,
    out: np.ndarray,
    turning: tuple,
    how: tuple,
    first: int,
    last: int,
) -> None:
    """Chunks first .. last-1, each rotated in scratch and quantized from there."""
    x, scale, out = pointer(x), pointer(scale), pointer(out)
    turning, how = Turning(*turning), Rounding(*how)
    y, signs = float_block(), word_scratch()
    for c in range(first, last):
        e = c * turning.chunk
        end = min(e + turning.chunk, n)
        turn(x, e, end - e, y, 0, turning, e, True, signs)
        quantize_groups(moved(y, -e), n, scale, out, how, None, e // GROUP, -(-end // GROUP))


@kernel
def _dequantize_rotate(
    data: np.ndarray,
    n: int,
    scale: np.ndarray,
    out: np.ndarray,
    turning: tuple,
    what: tuple,
    inside: tuple,
    worth: tuple,
    first: int,
    last: int,
) -> None:
    """Chunks first .. last-1, each decoded into scratch and rotated back from there."""
    data, scale, out = pointer(data), pointer(scale), pointer(out)
    turning, worth = Turning(*turning), Worth(*worth)
    what, inside = Decoding(*what), Worth(*inside)
    y, signs, none = float_block(), word_scratch(), word_scratch()
    no_signs(none)
    for c in range(first, last):
        e = c * turning.chunk
        end = min(e + turning.chunk, n)
        part = (e // GROUP, -(-end // GROUP))
        dequantize_groups(data, n, scale, moved(y, -e), what, None, inside, *part)
        turn(y, 0, end - e, y, 0, turning, e, False, none)
        give(y, 0, out, e, end - e, turning, e, signs, worth)
