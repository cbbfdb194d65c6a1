"""The rANS coder on the CPU. The stream is described in `_reference/rans.py`.

What depends on neighbours (states, words) runs serially, four states at once; all else, the
dither's bins and the way between values and symbols, is done for a group at a time and vectorises.
"""

from __future__ import annotations

import numpy as np

from laconic.kernels._coding import BLOCK, BLOCKS, CHUNK, LANES, Kind
from laconic.kernels._layout import GROUP
from laconic.kernels._numba.chunk import Chunk, clear, coder_of, saves
from laconic.kernels._numba.group import Words, mix
from laconic.kernels._numba.intrinsics import (
    Pointer,
    i16,
    i32,
    kernel,
    load,
    pointer,
    sar,
    shl,
    shr,
    store,
    u32,
    u64,
    word_scratch,
)
from laconic.kernels._reference.rans import (
    CLASSES,
    ESCAPE,
    LARGEST,
    LOWEST,
    PRECISION,
    RECIPROCAL,
    ROWS,
    SLOTS,
    STATES,
    UNIT,
    model,
)

u16 = np.uint16
_KIND = int(Kind.RANS)
_HEAD = 2 * STATES  # words of the states
_LONGEST = BLOCKS * LANES * 16  # planes are never longer than this


@kernel
def _put(q: Pointer, at: int, n: int, chunk: Chunk, work: np.ndarray) -> tuple[int, int]:
    """The stream of chunk c; see `coder_of`.

    Words fill the scratch from its end, to p; a value takes at most one for its symbol, one if it
    escapes, and 12 bits, so that there is room for all. A stream that is too long is not used.
    """
    words, top = pointer(work.view(u16)), 2 * len(work) - 1
    c, key, form, (records, classes, bounds) = chunk
    records, classes, bounds = pointer(records), pointer(classes), pointer(bounds)
    store(words, top, u16(0))
    states, kinds, index, turn = word_scratch(), word_scratch(), word_scratch(), word_scratch()
    groups = (n + GROUP - 1) // GROUP
    for g in range(groups):
        store(kinds, g, _class_of(q, at + g * GROUP, min(GROUP, n - g * GROUP), bounds))
    for k in range(STATES):
        store(states, k, i32(LOWEST))
    p = top
    for g in range(groups - 1, -1, -1):
        a, size, last = at + g * GROUP, min(GROUP, n - g * GROUP), g == groups - 1
        kind = int(load(kinds, g))
        if kind:
            row = 4 * (form * CLASSES + kind)
            span, shift = load(classes, row + 2), load(classes, row + 3)
            known = load(classes, row + 1) != i32(0)
            _contexts(known, c * CHUNK + g * GROUP, key, i32(CLASSES), index, turn)
            escapes = _to_symbols(q, a, span, shift, index, turn)
            p = _put_rest(q, a, size, span, shift, escapes, words, p)
            base = int(load(classes, row)) * CLASSES
            p = _put_symbols(index, base, size, last, states, records, words, p)
        before = int(load(kinds, g - 1)) if g else UNIT
        x, p = _push(_state(states, 0), (ROWS + before) * CLASSES + kind, records, words, p)
        store(states, 0, i32(u32(x)))
        if last:
            for k in range(1, STATES):
                if p < top:
                    store(states, k, i32(i32(1 << 16) | i32(load(words, p))))
                    p += 1
    odd = (top - p) % 2
    for k in range(STATES - 1, -1, -1):
        flag = form if k == 0 else (odd if k == 1 else 0)
        word = u32(u32(load(states, k)) | u32(flag << 31))
        p -= 2
        store(words, p, u16(word))
        store(words, p + 1, u16(u32(word >> u32(16))))
    length = (top - p + 1) // 2
    for i in range(2 * length):
        store(words, i, load(words, p + i))
    return length, _KIND


@kernel
def _get(
    source: Pointer,
    at: int,
    length: int,
    kind: int,
    q: Pointer,
    to: int,
    n: int,
    chunk: Chunk,
    work: np.ndarray,
) -> bool:
    """The values of chunk c; False if no encoder wrote the stream."""
    if kind != _KIND or not STATES <= length < _LONGEST:
        return False
    # a copy: a group of a hostile stream may read past the end before that is noticed
    for i in range(length):
        store(pointer(work), i, load(source, at + i))
    words, end = pointer(work.view(u16)), 2 * length
    c, key, _, (slots, classes, bounds) = chunk
    slots, classes, bounds = pointer(slots), pointer(classes), pointer(bounds)
    states, index, turn = word_scratch(), word_scratch(), word_scratch()
    for k in range(STATES):
        high = load(words, 2 * k + 1)
        start = i32(u32(u32(load(words, 2 * k)) | u32(u32(high & u16(0x7FFF)) << u32(16))))
        if start < i32(LOWEST) or (k > 1 and high > u16(0x7FFF)):
            return False
        store(states, k, start)
    form = int(load(words, 1) >> u16(15))
    if load(words, 3) > u16(0x7FFF):
        end -= 1
        if load(words, end) != u16(0):
            return False
    p, before = _HEAD, UNIT
    groups = (n + GROUP - 1) // GROUP
    for g in range(groups):
        a, size, last = to + g * GROUP, min(GROUP, n - g * GROUP), g == groups - 1
        if last:
            p = _give_back(states, words, p, end)
            if p < 0:
                return False
        x, symbol, p = _pull(_state(states, 0), (ROWS + before) * SLOTS, slots, words, p)
        store(states, 0, i32(u32(x)))
        own = before = int(symbol)
        if own:
            row = 4 * (form * CLASSES + own)
            span, shift = load(classes, row + 2), load(classes, row + 3)
            known = load(classes, row + 1) != i32(0)
            _contexts(known, c * CHUNK + g * GROUP, key, i32(SLOTS), index, turn)
            base = int(load(classes, row)) * SLOTS
            p = _get_symbols(index, base, size, last, states, slots, words, p)
            escapes = _from_symbols(index, turn, q, a)
            p = _get_rest(q, a, size, span, shift, escapes, index, words, p)
            if p < 0 or _class_of(q, a, size, bounds) != i32(own):
                return False
        else:
            clear(q, a, GROUP)
        if p > end:
            return False
    done = groups * GROUP
    clear(q, to + done, (n + BLOCK - 1) // BLOCK * BLOCK - done)
    return p == end and load(states, 0) == i32(LOWEST) and saves(length, q, to, n)


@kernel
def _class_of(q: Pointer, at: int, size: int, bounds: Pointer) -> np.int32:
    """The class of a group, which is filled up with zeros."""
    total = i32(0)
    for j in range(GROUP):
        total = i32(total + i32(abs(i32(load(q, at + j)))))
    if total == i32(0):
        return i32(0)
    if size < GROUP:
        total = i32(int(total) * GROUP // size)
    kind = i32(1)
    for i in range(CLASSES - 2):
        kind = i32(kind + i32(load(bounds, i) <= total))
    return kind


@kernel
def _contexts(
    known: bool, e: int, key: Words, unit: np.int32, index: Pointer, turn: Pointer
) -> None:
    """index = unit·bin of 128 values from e on, turn = -1 where the bin is a mirror image."""
    if not known:
        for j in range(GROUP):
            store(index, j, i32(0))
            store(turn, j, i32(0))
        return
    p0 = u32(e >> 1)
    for j in range(GROUP // 2):
        h = mix(u32(p0 + u32(j)), key[0], key[1])
        a, b = sar(shl(i32(h), i32(16)), i32(31)), sar(i32(h), i32(31))
        store(turn, j, a)
        store(turn, j + GROUP // 2, b)
        a, b = i32(i32(shr(h, u32(13))) ^ a), i32(i32(shr(h, u32(29))) ^ b)
        store(index, j, i32(i32(a & i32(3)) * unit))
        store(index, j + GROUP // 2, i32(i32(b & i32(3)) * unit))


@kernel
def _to_symbols(
    q: Pointer, at: int, span: np.int32, shift: np.int32, index: Pointer, turn: Pointer
) -> np.int32:
    """Add to index the symbols of 128 values; returns how many escape."""
    escapes = i32(0)
    for j in range(GROUP):
        t = load(turn, j)
        v = i32(i32(sar(i32(load(q, at + j)), shift) ^ t) - t)
        beyond = i32(abs(v)) > span
        symbol = i32(ESCAPE) if beyond else i32(v + i32(LARGEST))
        store(index, j, i32(load(index, j) + symbol))
        escapes = i32(escapes + i32(beyond))
    return escapes


@kernel
def _from_symbols(index: Pointer, turn: Pointer, q: Pointer, to: int) -> np.int32:
    """128 values from their symbols; returns how many escape."""
    escapes = i32(0)
    for j in range(GROUP):
        t, symbol = load(turn, j), load(index, j)
        v = i32(i32(i32(symbol - i32(LARGEST)) ^ t) - t)
        store(q, to + j, i16(v))
        escapes = i32(escapes + i32(symbol == i32(ESCAPE)))
    return escapes


@kernel
def _put_rest(
    q: Pointer,
    at: int,
    size: int,
    span: np.int32,
    shift: np.int32,
    escapes: np.int32,
    words: Pointer,
    p: int,
) -> int:
    """Escaped values and low bits before words[p]."""
    if shift:
        p -= (size * int(shift) + 15) // 16
        bits, have, to = u64(0), u64(0), p
        for j in range(size):
            low = u64(i32(load(q, at + j)) & i32(shl(i32(1), shift) - i32(1)))
            bits |= low << have
            have += u64(shift)
            if have >= u64(16):
                store(words, to, u16(bits))
                bits, have, to = bits >> u64(16), have - u64(16), to + 1
        if have:
            store(words, to, u16(bits))
    if escapes:
        for j in range(size - 1, -1, -1):
            v = sar(i32(load(q, at + j)), shift)
            if i32(abs(v)) > span:
                p -= 1
                store(words, p, u16(v))
    return p


@kernel
def _get_rest(
    q: Pointer,
    to: int,
    size: int,
    span: np.int32,
    shift: np.int32,
    escapes: np.int32,
    symbols: Pointer,
    words: Pointer,
    p: int,
) -> int:
    """Escaped values and low bits from words[p]; -1 if no encoder wrote these."""
    if escapes:
        for j in range(size):
            if load(symbols, j) == i32(ESCAPE):
                v = i16(load(words, p))
                p += 1
                if i32(abs(i32(v))) <= span:
                    return -1
                store(q, to + j, v)
    if shift:
        bits, have = u64(0), u64(0)
        for j in range(size):
            if have < u64(shift):
                bits |= u64(load(words, p)) << have
                have += u64(16)
                p += 1
            low = i32(i32(bits) & i32(shl(i32(1), shift) - i32(1)))
            bits, have = bits >> u64(shift), have - u64(shift)
            v = i32(shl(i32(load(q, to + j)), shift) | low)
            if i32(abs(v)) >= i32(1 << 15):
                return -1
            store(q, to + j, i16(v))
        if bits:
            return -1
    return p


@kernel
def _put_symbols(
    index: Pointer,
    base: int,
    size: int,
    last: bool,
    states: Pointer,
    records: Pointer,
    words: Pointer,
    p: int,
) -> int:
    """A group's symbols before words[p]."""
    x0, x1, x2, x3 = _state(states, 0), _state(states, 1), _state(states, 2), _state(states, 3)
    if last:
        for j in range(size - 1, -1, -1):
            x0, p = _push(x0, base + int(load(index, j)), records, words, p)
    else:
        for j in range(GROUP - STATES, -1, -STATES):
            x3, p = _push(x3, base + int(load(index, j + 3)), records, words, p)
            x2, p = _push(x2, base + int(load(index, j + 2)), records, words, p)
            x1, p = _push(x1, base + int(load(index, j + 1)), records, words, p)
            x0, p = _push(x0, base + int(load(index, j)), records, words, p)
    _keep(states, x0, x1, x2, x3)
    return p


@kernel
def _get_symbols(
    index: Pointer,
    base: int,
    size: int,
    last: bool,
    states: Pointer,
    slots: Pointer,
    words: Pointer,
    p: int,
) -> int:
    """A group's symbols, in the place of their contexts, from words[p]."""
    x0, x1, x2, x3 = _state(states, 0), _state(states, 1), _state(states, 2), _state(states, 3)
    if last:
        for j in range(size):
            x0, s0, p = _pull(x0, base + int(load(index, j)), slots, words, p)
            store(index, j, s0)
        for j in range(size, GROUP):
            store(index, j, i32(LARGEST))
    else:
        for j in range(0, GROUP, STATES):
            x0, s0, p = _pull(x0, base + int(load(index, j)), slots, words, p)
            x1, s1, p = _pull(x1, base + int(load(index, j + 1)), slots, words, p)
            x2, s2, p = _pull(x2, base + int(load(index, j + 2)), slots, words, p)
            x3, s3, p = _pull(x3, base + int(load(index, j + 3)), slots, words, p)
            store(index, j, s0)
            store(index, j + 1, s1)
            store(index, j + 2, s2)
            store(index, j + 3, s3)
    _keep(states, x0, x1, x2, x3)
    return p


@kernel
def _state(states: Pointer, k: int) -> np.uint64:
    return u64(u32(load(states, k)))


@kernel
def _keep(states: Pointer, x0: np.uint64, x1: np.uint64, x2: np.uint64, x3: np.uint64) -> None:
    store(states, 0, i32(u32(x0)))
    store(states, 1, i32(u32(x1)))
    store(states, 2, i32(u32(x2)))
    store(states, 3, i32(u32(x3)))


@kernel
def _push(x: np.uint64, i: int, records: Pointer, words: Pointer, p: int) -> tuple[np.uint64, int]:
    """The state with the symbol of record i; a word goes before words[p] if it must."""
    times, other = load(records, 2 * i), load(records, 2 * i + 1)
    store(words, p - 1, u16(x))
    full = u64(x >= (other & u64(0xFFFFFFFF)))
    x >>= full << u64(4)
    x += (other >> u64(32) & u64(0xFFFF)) + (x * times >> u64(RECIPROCAL)) * (other >> u64(48))
    return x, p - int(full)


@kernel
def _pull(
    x: np.uint64, table: int, slots: Pointer, words: Pointer, p: int
) -> tuple[np.uint64, np.int32, int]:
    """The state without its symbol, the symbol, and where the next word is."""
    slot = u64(load(slots, table + int(x & u64(SLOTS - 1))))
    x = (slot >> u64(20)) * (x >> u64(PRECISION)) + (slot >> u64(8) & u64(0xFFF))
    empty = x < u64(LOWEST)
    more = x << u64(16) | u64(load(words, p))
    return more if empty else x, i32(slot & u64(0xFF)), p + int(empty)


@kernel
def _give_back(states: Pointer, words: Pointer, p: int, end: int) -> int:
    """States 1 to 3 put their words before words[p]; -1 if they are not what an encoder makes."""
    for k in range(STATES - 1, 0, -1):
        x = load(states, k)
        if sar(x, i32(16)) == i32(1):
            p -= 1
            store(words, p, u16(x))
        elif x != i32(LOWEST) or p != end:
            return -1
    return p


def _tables() -> tuple[tuple, tuple]:
    """Made on first use, which takes a moment."""
    own = model()
    return (own.records, own.classes, own.bounds), (own.slots, own.classes, own.bounds)


CODER = coder_of("rans", _put, _get, _tables)
