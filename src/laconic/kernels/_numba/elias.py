"""Elias omega codes, sparse or dense; the streams are described in the reference.

Writing looks up whole code words, read-ready (first bit lowest), as entries  length | bits << 6.
Reading looks up the next 13 bits, which hold up to two symbols of the sparse code or four of the
dense one. Rare symbols, in no table, take the slow path: one code word at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from laconic.kernels._coding import BLOCK, MAX_MAGNITUDE, Kind
from laconic.kernels._numba.chunk import Chunk, clear, coder_of, plane_words, saves, width_of
from laconic.kernels._numba.intrinsics import Pointer, i16, kernel, load, pointer, store, u32, u64
from laconic.kernels._reference.elias import omega as omega_word

i64 = np.int64

SPARSE, DENSE = int(Kind.ELIAS_SPARSE), int(Kind.ELIAS_DENSE)
HEADER = 14  # bits of the number of non-zeros

GAP, LEVEL = 64, 7  # the largest of SYMBOLS
VALUE = 31  # the largest of VALUES
WINDOW = 13  # bits that index PAIRS and RUNS: four of them fit into the 57 bits of a window
PAIR_GAP, RUN_VALUE = 31, 15  # the largest that fit into their fields


def _symbol(gap: int, v: int) -> str:
    return omega_word(gap) + "01"[v < 0] + omega_word(abs(v))


def _value(v: int) -> str:
    return omega_word(abs(v) + 1) + ("01"[v < 0] if v else "")


def _bits(code: str) -> int:
    return int(code[::-1] or "0", 2)


def _entry(code: str) -> int:
    return len(code) | _bits(code) << 6


def _fill(table: np.ndarray, code: str, entry: int) -> None:
    """Give an entry to all indices that start with this code."""
    table[_bits(code) :: 1 << len(code)] = entry


def _symbols() -> np.ndarray:
    table = np.zeros((GAP + 1, 2 * LEVEL + 2), np.uint32)
    for gap in range(1, GAP + 1):
        for v in range(1, LEVEL + 1):
            table[gap, LEVEL + v] = _entry(_symbol(gap, v))
            table[gap, LEVEL - v] = _entry(_symbol(gap, -v))
    return table.reshape(-1)


def _heads() -> np.ndarray:
    """From the first 7 bits of a code word: bits of its last group | bits before it << 5."""
    table = np.zeros(128, np.uint8)
    for k in range(2, 16):
        size, code = k.bit_length(), omega_word(k)
        _fill(table, code, size | (len(code) - 1 - size) << 5)
        if k > 3:
            _fill(table, code[:-1] + "1", (k + 1) | (len(code) - 1) << 5)
    return table


def _pairs() -> np.ndarray:
    """length:6 | place:5 | value:4 | place:5 | value:4 | advance:6 | symbols:2.

    Where there is one symbol, the second value is a zero that lies behind it.
    """
    table = np.zeros(1 << WINDOW, np.uint32)
    levels = [v for v in range(-LEVEL, LEVEL + 1) if v]
    every = [(_symbol(g, v), g, v & 15) for g in range(1, PAIR_GAP + 1) for v in levels]
    every = [symbol for symbol in every if len(symbol[0]) <= WINDOW]
    for first, g, v in every:
        one = len(first) | g - 1 << 6 | v << 11
        _fill(table, first, one | g << 15 | g << 24 | 1 << 30)
        for second, h, w in every:
            size = len(first) + len(second)
            if size <= WINDOW:
                two = len(second) + one | g + h - 1 << 15 | w << 20 | g + h << 24 | 2 << 30
                _fill(table, first + second, two)
    return table


def _runs() -> np.ndarray:
    """length:6 | values:3 | four values of 5 bits, zeros where there are fewer."""
    table = np.zeros(1 << WINDOW, np.uint32)
    every = [(_value(v), v & 31) for v in range(-RUN_VALUE, RUN_VALUE + 1)]

    def extend(code: str, n: int, values: int) -> None:
        for more, v in every:
            if len(code + more) <= WINDOW:
                longer = values | v << 9 + 5 * n
                _fill(table, code + more, len(code + more) | n + 1 << 6 | longer)
                if n < 3:
                    extend(code + more, n + 1, longer)

    extend("", 0, 0)
    return table


SYMBOLS = _symbols()
VALUES = np.array([_entry(_value(v)) for v in range(-VALUE, VALUE + 1)], np.uint32)
PREFIXES = np.array([0, 0] + [_entry(omega_word(n - 1)[:-1]) for n in range(2, 17)], np.uint32)
GROWTH = np.array([len(omega_word(1 << t)) - len(omega_word((1 << t) - 1)) for t in range(1, 16)])
HEADS, PAIRS, RUNS = _heads(), _pairs(), _runs()

_BYTE, _LONG, _TRUE = ir.IntType(8), ir.IntType(64), ir.Constant(ir.IntType(1), 1)


def _long_at(builder: Any, base: Any, byte: Any) -> Any:
    place = builder.gep(builder.bitcast(base, _BYTE.as_pointer()), [byte], inbounds=True)
    return builder.bitcast(place, _LONG.as_pointer())


@intrinsic
def load_long(typing: Any, a: Any, byte: Any) -> Any:
    """The eight bytes from a given byte of a on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_long_at(builder, *args), align=1)

    return types.uint64(a, types.intp), generate


@intrinsic
def store_long(typing: Any, a: Any, byte: Any, v: Any) -> Any:
    """Write eight bytes from a given byte of a on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _long_at(builder, *args[:2]), align=1)
        return context.get_dummy_value()

    return types.void(a, types.intp, types.uint64), generate


@intrinsic
def at_least(typing: Any, q: Any, i: Any, edge: Any) -> Any:
    """Bit j: |q[i + j]| ≥ edge > 0, for j < 64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base, index, bound = args
        vector, zero = ir.VectorType(ir.IntType(16), 64), ir.Constant(ir.IntType(32), 0)
        place = builder.bitcast(builder.gep(base, [index], inbounds=True), vector.as_pointer())
        v = builder.load(place, align=2)
        lanes = builder.insert_element(ir.Constant(vector, ir.Undefined), bound, zero)
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), 64), None)
        bounds = builder.shuffle_vector(lanes, lanes, everywhere)
        above = builder.icmp_signed(">=", v, bounds)
        below = builder.icmp_signed("<=", v, builder.neg(bounds))
        return builder.bitcast(builder.or_(above, below), _LONG)

    return types.uint64(q, types.intp, types.int16), generate


@intrinsic
def likely(typing: Any, condition: Any) -> Any:
    """The condition, which holds mostly: the other branch is moved out of the way."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bit = ir.IntType(1)
        expect = builder.module.declare_intrinsic(
            "llvm.expect", [bit], ir.FunctionType(bit, [bit, bit])
        )
        return builder.call(expect, [args[0], _TRUE])

    return types.boolean(types.boolean), generate


@intrinsic
def population(typing: Any, v: Any) -> Any:
    """How many bits of v are set."""
    return types.int64(types.uint64), lambda c, b, s, args: b.ctpop(args[0])


@intrinsic
def lowest(typing: Any, v: Any) -> Any:
    """Place of the lowest one of v > 0."""
    return types.int64(types.uint64), lambda c, b, s, args: b.cttz(args[0], _TRUE)


@intrinsic
def leading_zeros(typing: Any, v: Any) -> Any:
    """Zeros above the highest one of v > 0."""
    return types.int64(types.uint64), lambda c, b, s, args: b.ctlz(args[0], _TRUE)


@intrinsic
def reverse(typing: Any, v: Any) -> Any:
    """The bits of v in opposite order."""
    return types.uint64(types.uint64), lambda c, b, s, args: b.bitreverse(args[0])


@kernel
def omega(k: int) -> np.uint64:
    """Entry of Elias omega of k ≥ 1."""
    if k == 1:
        return u64(1)
    size = 64 - leading_zeros(u64(k))
    prefix = u64(load(pointer(PREFIXES), size))
    binary = reverse(u64(k)) >> u64(64 - size)
    return joined(prefix, u64(size + 1) | binary << u64(6))


@kernel
def joined(a: np.uint64, b: np.uint64) -> np.uint64:
    """Entry of code a, then code b."""
    size = a & u64(63)
    return (size + (b & u64(63))) | ((a >> u64(6)) | (b >> u64(6)) << size) << u64(6)


@kernel
def signed(code: np.uint64, v: int) -> np.uint64:
    """Entry of a code and the sign of v."""
    return joined(code, u64(65 if v < 0 else 1))


@kernel
def symbol(gap: int, v: int) -> np.uint64:
    """Entry of a non-zero in the sparse code, 44 bits at most."""
    if likely(gap <= GAP and -LEVEL <= v <= LEVEL):
        return u64(load(pointer(SYMBOLS), gap * (2 * LEVEL + 2) + LEVEL + v))
    return joined(signed(omega(gap), v), omega(abs(v)))


@kernel
def value(v: int) -> np.uint64:
    """Entry of a value in the dense code, 24 bits at most."""
    if likely(abs(v) <= VALUE):
        return u64(load(pointer(VALUES), v + VALUE))
    return signed(omega(abs(v) + 1), v)


@kernel
def put_sparse(q: Pointer, at: int, count: int, nonzeros: int, out: Pointer) -> int:
    """Write the sparse code; returns its bits."""
    pending, size, byte, last = u64(nonzeros), u64(HEADER), 0, -1
    for start in range(0, count, 64):
        mask = at_least(q, at + start, i16(1))
        while mask:
            i = start + lowest(mask)
            mask &= mask - u64(1)
            entry = symbol(i - last, i64(load(q, at + i)))
            last = i
            pending |= (entry >> u64(6)) << size
            size += entry & u64(63)
            store_long(out, byte, pending)
            byte += i64(size >> u64(3))
            pending >>= size & u64(56)
            size &= u64(7)
    store_long(out, byte, pending)  # the padding, too
    return 8 * byte + i64(size)


@kernel
def put_dense(q: Pointer, at: int, count: int, out: Pointer) -> None:
    """Write the dense code. A zero behind an odd count adds a zero bit, which is padding."""
    pending, size, byte = u64(0), u64(0), 0
    for i in range(at, at + count, 2):
        entry = joined(value(i64(load(q, i))), value(i64(load(q, i + 1))))
        pending |= (entry >> u64(6)) << size
        size += entry & u64(63)
        store_long(out, byte, pending)
        byte += i64(size >> u64(3))
        pending >>= size & u64(56)
        size &= u64(7)
    store_long(out, byte, pending)


@kernel
def measure(q: Pointer, at: int, count: int, width: int) -> tuple[int, int, int]:
    """Number of non-zeros, bits of the sparse code if all gaps were 1, bits of the dense code.

    Code words grow with the powers of two:  |omega(k)| = 1 + Σ_t growth(t)·[k ≥ 2^t],  t ≥ 1.
    """
    nonzeros, sparse, dense = 0, 0, 0
    for t in range(width):
        levels, values = 0, 0
        for i in range(at, at + count, 64):
            levels += population(at_least(q, i, i16(1 << t)))
            values += population(at_least(q, i, i16((2 << t) - 1)))
        if t == 0:
            nonzeros = levels
        else:
            sparse += levels * GROWTH[t - 1]
        dense += values * GROWTH[t]
    return nonzeros, HEADER + 3 * nonzeros + sparse, count + nonzeros + dense


@kernel
def _put(q: Pointer, at: int, n: int, chunk: Chunk, work: np.ndarray) -> tuple[int, int]:
    """Write the code that `form` asks for; 0: the shorter one, 1: sparse, 2: dense.

    Often it is known before anything is written that bit planes are not longer.
    """
    out, count, form = pointer(work), n, chunk.form
    width = width_of(q, at, count)
    planes = 32 * plane_words(count, width)  # bits
    nonzeros, least, dense = measure(q, at, count, width)
    if form == 1 or (form == 0 and least <= dense):
        if least >= planes:
            return -1, SPARSE
        sparse = put_sparse(q, at, count, nonzeros, out)
        if form == 1 or sparse <= dense:
            return (sparse + 31) >> 5, SPARSE
    if dense >= planes:
        return -1, DENSE
    put_dense(q, at, count, out)
    return (dense + 31) >> 5, DENSE


@kernel
def window(words: Pointer, at: int, length: int, bit: int) -> np.uint64:
    """The next bits of the stream words[at : at + length]: 57, or up to its end and then zeros.

    Near the end the last eight bytes are read; of a single word, with the chunk's word before it.
    Behind the end the bits are arbitrary: readers go on, and are found out by where they arrive.
    """
    byte = min(bit >> 3, 4 * length - 8)
    return load_long(words, 4 * at + byte) >> u64((bit - 8 * byte) & 63)


@kernel
def read(bits: np.uint64) -> tuple[int, int]:
    """A code word's number (0 if it has 2^16 or more) and length."""
    head = u64(load(pointer(HEADS), i64(bits & u64(127))))
    size, before = head & u64(31), head >> u64(5)
    k = i64(reverse(bits >> before) >> u64(1) >> (u64(63) - size))
    if (bits >> (before + size)) & u64(1):
        k = 0
    elif size == u64(0):
        k = 1
    return k, i64(before + size) + 1


@kernel
def field(entry: np.uint64, low: int, size: int) -> np.int16:
    """A signed field of an entry."""
    return i16(i64(entry << u64(64 - size - low)) >> (64 - size))


@kernel
def get_sparse(words: Pointer, at: int, length: int, q: Pointer, to: int, count: int) -> int:
    """Read the sparse code into q[to:], which holds zeros; returns its bits, or -1."""
    left, bit, place = i64(load(words, at) & u32((1 << HEADER) - 1)), HEADER, 0
    while left:
        # four entries are at most 8 symbols and 4·31 values; an unknown one changes nothing
        while left >= 8 and place <= count - 128:
            bits, entry = window(words, at, length, bit), u64(0)
            for _ in range(4):
                entry = u64(load(pointer(PAIRS), i64(bits & u64((1 << WINDOW) - 1))))
                store(q, to + place + (i64(entry >> u64(6)) & 31), field(entry, 11, 4))
                store(q, to + place + (i64(entry >> u64(15)) & 31), field(entry, 20, 4))
                place += i64(entry >> u64(24)) & 63
                left -= i64(entry >> u64(30))
                bit += i64(entry & u64(63))
                bits >>= entry & u64(63)
            if entry == u64(0):
                break
        if left == 0:
            break
        bits = window(words, at, length, bit)
        gap, size = read(bits)
        minus = (bits >> u64(size)) & u64(1)
        level, more = read(bits >> u64(size + 1))
        place += gap
        if gap == 0 or place > count or not 0 < level <= MAX_MAGNITUDE:
            return -1
        store(q, to + place - 1, i16(-level if minus else level))
        bit += size + 1 + more
        left -= 1
    return bit


@kernel
def get_dense(words: Pointer, at: int, length: int, q: Pointer, to: int, count: int) -> int:
    """Read the dense code into q[to : to + count]; returns its bits, or -1."""
    bit, place = 0, 0
    while place < count:
        while place <= count - 16:
            bits, entry = window(words, at, length, bit), u64(0)
            for _ in range(4):
                entry = u64(load(pointer(RUNS), i64(bits & u64((1 << WINDOW) - 1))))
                for j in range(4):
                    store(q, to + place + j, field(entry, 9 + 5 * j, 5))
                place += i64(entry >> u64(6)) & 7
                bit += i64(entry & u64(63))
                bits >>= entry & u64(63)
            if entry == u64(0):
                break
        if place == count:
            break
        bits = window(words, at, length, bit)
        k, size = read(bits)
        minus = (bits >> u64(size)) & u64(1)
        if not 0 < k <= MAX_MAGNITUDE + 1:
            return -1
        store(q, to + place, i16(1 - k if minus else k - 1))
        bit += size + (k > 1)
        place += 1
    return bit


@kernel
def _get(
    words: Pointer,
    at: int,
    length: int,
    kind: int,
    q: Pointer,
    to: int,
    n: int,
    chunk: Chunk,
    work: np.ndarray,
) -> bool:
    """Read the stream words[at : at + length]; False if no encoder has written it."""
    if length == 0 or (kind != SPARSE and kind != DENSE):
        return False
    end = (n + BLOCK - 1) // BLOCK * BLOCK
    if kind == SPARSE:
        clear(q, to, end)
        bits = get_sparse(words, at, length, q, to, n)
    else:
        clear(q, to + n, end - n)
        bits = get_dense(words, at, length, q, to, n)
    if bits < 0 or (bits + 31) >> 5 != length:
        return False
    if bits & 31 and window(words, at, length, bits) != u64(0):
        return False
    return saves(length, q, to, n)


CODER = coder_of("elias", _put, _get)
