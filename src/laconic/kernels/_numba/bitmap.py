"""The bitmap coder on the CPU: all lanes of a chunk at once.

The stream is described in `_reference/bitmap.py`.

A chunk's magnitudes, up to 15, are first cut into bit planes, a 32-bit word a lane. Counting them
down by one, in all lanes at once, gives the unary planes; bits are brought together (and apart)
by five rounds of shifts under masks (compress and expand of Warren, Hacker's Delight, 7-4 and
7-5), which vectorise over lanes.
"""

from __future__ import annotations

import numpy as np

from laconic.kernels._coding import (
    BLOCK,
    CHUNK,
    CLIP,
    LANES,
    MAX_MAGNITUDE,
    SCRATCH_WORDS,
    TAIL_BITS,
    Kind,
)
from laconic.kernels._numba.chunk import Chunk, coder_of
from laconic.kernels._numba.intrinsics import (
    Pointer,
    i16,
    i32,
    kernel,
    load,
    ones,
    pointer,
    sar,
    shl,
    shr,
    store,
    trailing,
    u32,
    u64,
)

_KIND = int(Kind.BITMAP)
_ROW = CHUNK // 32
# rows of 256 words in the scratch, behind the stream
_BITS, _SIGN, _MASK, _MOVE, _FIELD, _SIZE, _NEXT, _TAILS = (
    SCRATCH_WORDS + _ROW * row for row in (0, 4, 5, 6, 11, 12, 13, 14)
)


@kernel
def _put(q: Pointer, at: int, n: int, chunk: Chunk, work: np.ndarray) -> tuple[int, int]:
    """The stream of a chunk; see `coder_of`."""
    work, lanes = pointer(work), (n + BLOCK - 1) // BLOCK * LANES
    for b in range(lanes // LANES):
        _cut(q, at + b * BLOCK, work, b * LANES)
    _any_bit(work, lanes)
    store(work, 0, u32(0))
    for g in range(lanes):
        store(work, _FIELD + g, u32(1 if load(work, _MASK + g) else 0))
        store(work, _SIZE + g, u32(1))
    end = _append(work, 0, lanes)
    for g in range(lanes):
        mask = load(work, _MASK + g)
        store(work, _FIELD + g, mask)
        store(work, _SIZE + g, u32(32 if mask else 0))
    end = _append(work, end, lanes)
    total = _prepare(work, lanes)
    if total == 0:
        return 0, _KIND
    _compress(work, _SIGN, lanes)
    end = _append(work, end, lanes)
    for _ in range(CLIP - 1):
        _count_down(work, lanes)
        _compress(work, _NEXT, lanes)
        end = _append(work, end, lanes)
        _take_next(work, lanes)
        total = _prepare(work, lanes)
        if total == 0:
            break
    if total:
        _cut_tails(q, at, work, lanes)
        for plane in range(TAIL_BITS):
            for g in range(lanes):
                store(work, _FIELD + g, load(work, _TAILS + _ROW * plane + g))
            end = _append(work, end, lanes)
    return (end + 31) // 32, _KIND


@kernel
def _cut(q: Pointer, at: int, work: Pointer, lane: int) -> None:
    """Sign plane and four magnitude planes (clipped to 15) of a block."""
    for p in range(5):
        for g in range(LANES):
            store(work, _BITS + _ROW * p + lane + g, u32(0))
    a, b, c, d, s = (
        _BITS + lane,
        _BITS + _ROW + lane,
        _BITS + 2 * _ROW + lane,
        _BITS + 3 * _ROW + lane,
        _SIGN + lane,
    )
    for i in range(BLOCK // LANES):
        bit = i32(i)
        for g in range(LANES):
            v = i32(load(q, at + LANES * i + g))
            minus = sar(v, i32(31))
            m = min(i32(i32(v ^ minus) - minus), i32(CLIP))
            _or(work, s + g, shl(i32(minus & i32(1)), bit))
            _or(work, a + g, shl(i32(m & i32(1)), bit))
            _or(work, b + g, shl(i32(sar(m, i32(1)) & i32(1)), bit))
            _or(work, c + g, shl(i32(sar(m, i32(2)) & i32(1)), bit))
            _or(work, d + g, shl(sar(m, i32(3)), bit))


@kernel
def _or(work: Pointer, i: int, bits: np.int32) -> None:
    store(work, i, u32(load(work, i) | u32(bits)))


@kernel
def _any_bit(work: Pointer, lanes: int) -> None:
    """The mask of values that are not zero."""
    for g in range(lanes):
        low = u32(load(work, _BITS + g) | load(work, _BITS + _ROW + g))
        high = u32(load(work, _BITS + 2 * _ROW + g) | load(work, _BITS + 3 * _ROW + g))
        store(work, _MASK + g, u32(low | high))


@kernel
def _prepare(work: Pointer, lanes: int) -> int:
    """What moves in each round of compress and expand under the mask, and the mask's sizes."""
    total = 0
    for g in range(lanes):
        m = load(work, _MASK + g)
        size = ones(m)
        store(work, _SIZE + g, size)
        total += int(size)
        k = u32(u32(~m) << u32(1))
        for r in range(5):
            p = u32(k ^ u32(k << u32(1)))
            p = u32(p ^ u32(p << u32(2)))
            p = u32(p ^ u32(p << u32(4)))
            p = u32(p ^ u32(p << u32(8)))
            p = u32(p ^ u32(p << u32(16)))
            move = u32(p & m)
            store(work, _MOVE + _ROW * r + g, move)
            m = u32(u32(m ^ move) | shr(move, u32(1 << r)))
            k = u32(k & u32(~p))
    return total


@kernel
def _compress(work: Pointer, row: int, lanes: int) -> None:
    """Bits of a row under the mask, brought together at the low end, to the fields."""
    for g in range(lanes):
        x = u32(load(work, row + g) & load(work, _MASK + g))
        for r in range(5):
            t = u32(x & load(work, _MOVE + _ROW * r + g))
            x = u32(u32(x ^ t) | shr(t, u32(1 << r)))
        store(work, _FIELD + g, x)


@kernel
def _expand(work: Pointer, row: int, lanes: int) -> None:
    """The inverse: low bits of the fields back under the mask, to a row."""
    for g in range(lanes):
        x = load(work, _FIELD + g)
        for r in range(4, -1, -1):
            move = load(work, _MOVE + _ROW * r + g)
            t = u32(x << u32(1 << r))
            x = u32(u32(x & u32(~move)) | u32(t & move))
        store(work, row + g, u32(x & load(work, _MASK + g)))


@kernel
def _count_down(work: Pointer, lanes: int) -> None:
    """Magnitudes under the mask, minus one; `_NEXT` tells which are still above zero."""
    for g in range(lanes):
        borrow = load(work, _MASK + g)
        rest = u32(0)
        for p in range(4):
            t = load(work, _BITS + _ROW * p + g)
            low = u32(t ^ borrow)
            borrow = u32(borrow & u32(~t))
            store(work, _BITS + _ROW * p + g, low)
            rest = u32(rest | low)
        store(work, _NEXT + g, rest)


@kernel
def _count_up(work: Pointer, lanes: int) -> None:
    """Magnitudes in `_NEXT`, plus one."""
    for g in range(lanes):
        carry = load(work, _NEXT + g)
        for p in range(4):
            t = load(work, _BITS + _ROW * p + g)
            store(work, _BITS + _ROW * p + g, u32(t ^ carry))
            carry = u32(carry & t)


@kernel
def _take_next(work: Pointer, lanes: int) -> None:
    for g in range(lanes):
        store(work, _MASK + g, load(work, _NEXT + g))


@kernel
def _cut_tails(q: Pointer, at: int, work: Pointer, lanes: int) -> None:
    """Bit planes of |q| - 15 of the values under the mask, brought together: few have any."""
    for p in range(TAIL_BITS):
        for g in range(lanes):
            store(work, _TAILS + _ROW * p + g, u32(0))
    for g in range(lanes):
        mask, rank = load(work, _MASK + g), i32(0)
        while mask:
            i = int(trailing(mask))
            mask = u32(mask & u32(mask - u32(1)))
            rest = i32(i32(abs(i32(load(q, _place(at, g, i))))) - i32(CLIP))
            for p in range(TAIL_BITS):
                _or(work, _TAILS + _ROW * p + g, shl(i32(sar(rest, i32(p)) & i32(1)), rank))
            rank += i32(1)


@kernel
def _place(at: int, g: int, i: int) -> int:
    """Where value i of lane g lies in a chunk at `at`."""
    return at + g // LANES * BLOCK + LANES * i + g % LANES


@kernel
def _append(work: Pointer, end: int, lanes: int) -> int:
    """Put the fields, each of its size, behind bit `end` of the stream."""
    w, used = end >> 5, end & 31
    bits = u64(load(work, w)) if used else u64(0)
    for g in range(lanes):
        size = int(load(work, _SIZE + g))
        bits = u64(bits | u64(u64(load(work, _FIELD + g)) << u64(used)))
        used += size
        store(work, w, u32(bits & u64(0xFFFFFFFF)))
        full = used >> 5
        bits = u64(bits >> u64(32 * full))
        w += full
        used &= 31
    store(work, w, u32(bits & u64(0xFFFFFFFF)))
    return 32 * w + used


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
    """Decode words[at : at + length]; False if no encoder wrote it."""
    if kind != _KIND:
        return False
    work, lanes = pointer(work), (n + BLOCK - 1) // BLOCK * LANES
    bits = 32 * length
    for g in range(lanes):
        store(work, _SIZE + g, u32(1))
    end = _take(words, at, bits, 0, work, lanes)
    for g in range(lanes):
        store(work, _SIZE + g, u32(load(work, _FIELD + g) << u32(5)))
        store(work, _NEXT + g, load(work, _FIELD + g))
    end = _take(words, at, bits, end, work, lanes)
    for g in range(lanes):
        mask = load(work, _FIELD + g)
        if load(work, _NEXT + g) and not mask:
            return False
        store(work, _MASK + g, mask)
        store(work, _BITS + g, mask)
        for p in range(1, 4):
            store(work, _BITS + _ROW * p + g, u32(0))
    total = _prepare(work, lanes)
    end = _take(words, at, bits, end, work, lanes)
    if end < 0 or total == 0:
        return False
    _expand(work, _SIGN, lanes)
    for _ in range(CLIP - 1):
        end = _take(words, at, bits, end, work, lanes)
        if end < 0:
            return False
        _expand(work, _NEXT, lanes)
        _count_up(work, lanes)
        _take_next(work, lanes)
        total = _prepare(work, lanes)
        if total == 0:
            break
    for b in range(lanes // LANES):
        _join(work, b * LANES, q, to + b * BLOCK)
    if total:
        end = _add_tails(words, at, bits, end, work, lanes, q, to)
    if end < 0 or (end + 31) // 32 != length:
        return False
    return end & 31 == 0 or shr(load(words, at + length - 1), u32(end & 31)) == u32(0)


@kernel
def _take(words: Pointer, at: int, bits: int, end: int, work: Pointer, lanes: int) -> int:
    """Read fields of the sizes in the scratch from bit `end` on; -1 if there are too few bits."""
    total = 0
    for g in range(lanes):
        total += int(load(work, _SIZE + g))
    if end < 0 or end + total > bits:
        return -1
    last = at + (bits >> 5) - 1
    for g in range(lanes):
        size = int(load(work, _SIZE + g))
        w = min(at + (end >> 5), last)
        both = u64(u64(load(words, w)) | u64(u64(load(words, min(w + 1, last))) << u64(32)))
        field = u64(u64(both >> u64(end & 31)) & u64((u64(1) << u64(size)) - u64(1)))
        store(work, _FIELD + g, u32(field))
        end += size
    return end


@kernel
def _join(work: Pointer, lane: int, q: Pointer, to: int) -> None:
    """A block's integers from its planes."""
    a, b, c, d, s = (
        _BITS + lane,
        _BITS + _ROW + lane,
        _BITS + 2 * _ROW + lane,
        _BITS + 3 * _ROW + lane,
        _SIGN + lane,
    )
    for i in range(BLOCK // LANES):
        bit = u32(i)
        for g in range(LANES):
            m = u32(shr(load(work, a + g), bit) & u32(1))
            m = u32(m | u32(u32(shr(load(work, b + g), bit) & u32(1)) << u32(1)))
            m = u32(m | u32(u32(shr(load(work, c + g), bit) & u32(1)) << u32(2)))
            m = u32(m | u32(u32(shr(load(work, d + g), bit) & u32(1)) << u32(3)))
            minus = i32(u32(shr(load(work, s + g), bit) & u32(1)))
            store(q, to + LANES * i + g, i16(i32(i32(i32(m) ^ i32(-minus)) + minus)))


@kernel
def _add_tails(
    words: Pointer, at: int, bits: int, end: int, work: Pointer, lanes: int, q: Pointer, to: int
) -> int:
    """Add what magnitudes have above 15; -1 if the stream ends or a value is too large."""
    for plane in range(TAIL_BITS):
        end = _take(words, at, bits, end, work, lanes)
        if end < 0:
            return -1
        for g in range(lanes):
            store(work, _TAILS + _ROW * plane + g, load(work, _FIELD + g))
    for g in range(lanes):
        mask, rank = load(work, _MASK + g), u32(0)
        while mask:
            i = int(trailing(mask))
            mask = u32(mask & u32(mask - u32(1)))
            rest = u32(0)
            for p in range(TAIL_BITS):
                bit = u32(shr(load(work, _TAILS + _ROW * p + g), rank) & u32(1))
                rest = u32(rest | u32(bit << u32(p)))
            if rest > u32(MAX_MAGNITUDE - CLIP):
                return -1
            v = i32(load(q, _place(to, g, i)))
            store(q, _place(to, g, i), i16(i32(v + i32(rest)) if v > 0 else i32(v - i32(rest))))
            rank = u32(rank + u32(1))
    return end


CODER = coder_of("bitmap", _put, _get)
