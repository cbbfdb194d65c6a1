"""Chunks of a coded section: one loop for all coders, check sums, and bit planes.

The format is described in `kernels/_coding.py`. A coder is two functions, which write and read the
stream of one chunk; a chunk whose stream would not be shorter than bit planes is sent as these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from laconic.kernels._coding import BLOCK, CHUNK, LANES, MAX_MAGNITUDE
from laconic.kernels._numba.group import Words, mix
from laconic.kernels._numba.intrinsics import (
    Pointer,
    i16,
    i32,
    kernel,
    load,
    pointer,
    shl,
    shr,
    store,
    u32,
)


class Chunk(NamedTuple):
    """What a coder may want to know of a chunk."""

    number: int
    key: Words
    form: int  # asked for; 0 at reading
    tables: tuple


class Coder(NamedTuple):
    """The loops over chunks, compiled for a coder."""

    encode: Any
    decode: Any
    tables: Callable[[], tuple[tuple, tuple]]  # what its functions look up: to write, to read


def coder_of(name: str, put: Any, get: Any, tables: Any = lambda: ((), ())) -> Coder:
    """The loops over chunks for a coder's two functions.

    put(q, at, n, chunk, work) writes the stream of q[at : at+n] to the start of `work` (WORK_WORDS
    words) and returns its length in words and its kind; a length of -1 says that bit planes are
    not longer.

    get(words, at, length, kind, q, to, n, chunk, work) reads the stream words[at : at+length] into
    q[to:], and zeros to the end of the block; False if no encoder wrote it. The kind is bits 0 to
    15 of the chunk's first word.
    """

    def encode(
        q: np.ndarray,
        first: int,
        last: int,
        place: tuple[np.ndarray, ...],
        key: Words,
        form: int,
        work: np.ndarray,
        tables: tuple,
        out: np.ndarray,
        to: int,
        ends: np.ndarray,
        checks: np.ndarray,
    ) -> int:
        """Write chunks first .. last-1, of the integers from q[0] on, at out[to:].

        Place: the chunks' counts, segments and marks, the segments' stamps. Ends count from `to`.
        Returns where the next chunk starts.
        """
        count, segment, marks, stamps = place
        values, start = pointer(q), to
        for c in range(first, last):
            at, n, mark = (c - first) * CHUNK, int(count[c]), u32(marks[c])
            length, kind = put(values, at, n, Chunk(c, key, form, tables), work)
            salt = u32(salt_of(c, stamps[segment[c]], key) + u32(n))
            length = frame(pointer(work), length, kind, values, at, n, mark, pointer(out), to)
            checks[c] = check(pointer(out), to, length, salt)
            to += length
            ends[c] = u32(to - start)
        return to

    def decode(
        payload: np.ndarray,
        first: int,
        last: int,
        count: np.ndarray,
        ends: np.ndarray,
        key: Words,
        limit: int,
        work: np.ndarray,
        tables: tuple,
        q: np.ndarray,
    ) -> int:
        """Read chunks first .. last-1 into q[0:]; returns -1, or the first malformed one."""
        words, values = pointer(payload), pointer(q)
        for c in range(first, last):
            at, to, n = int(ends[c - 1]) if c else 0, (c - first) * CHUNK, int(count[c])
            length, head = int(ends[c]) - at - 1, load(words, at)
            if u32(head & u32(0xFF)) == u32(0):
                good = get_plane_form(words, at + 1, length, head, values, to, n)
            else:
                kind = int(u32(head & u32(0xFFFF)))
                chunk = Chunk(c, key, 0, tables)
                good = get(words, at + 1, length, kind, values, to, n, chunk, work)
            if not good or not acceptable(values, to, n, limit):
                return c
        return -1

    # the compiled functions are kept in files of these names
    encode.__qualname__, decode.__qualname__ = f"encode_{name}", f"decode_{name}"
    return Coder(kernel(encode), kernel(decode), tables)


# --- check sums ----------------------------------------------------------------------------


@kernel
def salt_of(c: int, stamp: np.uint32, key: Words) -> np.uint32:
    """What the check of chunk c starts from; the number of its values is added to it."""
    return u32(mix(u32(c), key[0], key[1]) ^ stamp)


@kernel
def check(words: Pointer, at: int, length: int, salt: np.uint32) -> np.uint32:
    """The check sum of words[at : at + length]."""
    total = u32(0)
    for i in range(length):
        h = u32(load(words, at + i) ^ u32(salt + u32(u32(i) * u32(0x9E3779B1))))
        h = u32(h ^ shr(h, u32(16)))
        h = u32(h * u32(0x7FEB352D))
        h = u32(h ^ shr(h, u32(15)))
        h = u32(h * u32(0x846CA68B))
        total = u32(total + u32(h ^ shr(h, u32(16))))
    return total


# --- bit planes ----------------------------------------------------------------------------


@kernel
def plane_words(count: int, width: int) -> int:
    """Words of so many integers in plane form, without the chunk's first word."""
    return (count + BLOCK - 1) // BLOCK * LANES * (1 + width) if width else 0


@kernel
def saves(length: int, q: Pointer, to: int, count: int) -> bool:
    """Whether a stream of this length is shorter than the bit planes of what it says."""
    return length < plane_words(count, width_of(q, to, count))


@kernel
def width_of(q: Pointer, at: int, count: int) -> int:
    """Bits of the largest magnitude."""
    every = i32(0)
    for j in range(count):
        every |= i32(abs(i32(load(q, at + j))))
    width = 0
    while every >> width:
        width += 1
    return width


@kernel
def frame(
    stream: Pointer,
    length: int,
    kind: int,
    q: Pointer,
    at: int,
    count: int,
    mark: np.uint32,
    out: Pointer,
    to: int,
) -> int:
    """Write a chunk at out[to:]: the stream, or bit planes of q[at:] if these are not longer.

    Returns its length. With length < 0 there is no stream.
    """
    width = width_of(q, at, count)
    planes = plane_words(count, width)
    if 0 <= length < planes:
        store(out, to, u32(u32(kind) | u32(mark << u32(16))))
        for i in range(length):
            store(out, to + 1 + i, load(stream, i))
        return 1 + length
    store(out, to, u32(u32(width << 8) | u32(mark << u32(16))))
    for row in range(0, planes, LANES * (1 + width)):
        put_planes(q, at, width, out, to + 1 + row)
        at += BLOCK
    return 1 + planes


@kernel
def put_planes(q: Pointer, at: int, width: int, out: Pointer, to: int) -> None:
    """The sign plane and `width` magnitude planes of 512 integers."""
    for j in range(LANES * (1 + width)):
        store(out, to + j, u32(0))
    for i in range(BLOCK // LANES):
        for g in range(LANES):
            v = i32(load(q, at + LANES * i + g))
            sign = u32(u32(v) >> u32(31))
            store(out, to + g, u32(load(out, to + g) | u32(sign << u32(i))))
        for p in range(width):
            row = to + LANES * (1 + p)
            for g in range(LANES):
                m = u32(abs(i32(load(q, at + LANES * i + g))))
                bit = u32(u32(m >> u32(p)) & u32(1))
                store(out, row + g, u32(load(out, row + g) | u32(bit << u32(i))))


@kernel
def get_planes(words: Pointer, at: int, width: int, q: Pointer, to: int) -> None:
    """512 integers from their planes."""
    for i in range(BLOCK // LANES):
        for g in range(LANES):
            m = i32(0)
            for p in range(width):
                w = load(words, at + LANES * (1 + p) + g)
                m |= shl(i32(u32(w >> u32(i)) & u32(1)), i32(p))
            minus = i32(u32(load(words, at + g) >> u32(i)) & u32(1))
            store(q, to + LANES * i + g, i16(i32(i32(m ^ i32(-minus)) + minus)))


@kernel
def get_plane_form(
    words: Pointer, at: int, length: int, head: np.uint32, q: Pointer, to: int, count: int
) -> bool:
    """A chunk of kind FIXED, whose stream is words[at : at + length]; False if it is malformed."""
    width = int(u32(head >> u32(8)) & u32(0xFF))
    blocks = (count + BLOCK - 1) // BLOCK
    if width > 15 or length != plane_words(count, width):
        return False
    if width == 0:
        clear(q, to, blocks * BLOCK)
        return True
    top = u32(0)
    for b in range(blocks):
        row = at + b * LANES * (1 + width)
        for g in range(LANES):
            some = u32(0)
            for p in range(1, 1 + width):
                some = u32(some | load(words, row + LANES * p + g))
            if u32(load(words, row + g) & u32(~some)):  # a negative zero
                return False
            top = u32(top | load(words, row + LANES * width + g))
        get_planes(words, row, width, q, to + b * BLOCK)
    return top != u32(0)  # else the width was not the smallest


@kernel
def clear(q: Pointer, to: int, count: int) -> None:
    """Zeros to q[to : to + count]."""
    for j in range(count):
        store(q, to + j, i16(0))


@kernel
def acceptable(q: Pointer, at: int, count: int, limit: int) -> bool:
    """No magnitude above limit, and zeros from `count` to the end of the block."""
    worst = i32(0)
    for j in range(count):
        worst = max(worst, i32(abs(i32(load(q, at + j)))))
    rest = i32(0)
    for j in range(count, (count + BLOCK - 1) // BLOCK * BLOCK):
        rest |= i32(load(q, at + j))
    return worst <= min(limit, MAX_MAGNITUDE) and rest == 0


# --- the coder of bit planes alone: every chunk as wide as its largest integer -------------


@kernel
def _put(q: Pointer, at: int, n: int, chunk: Chunk, work: np.ndarray) -> tuple[int, int]:
    """There is no stream."""
    return -1, 0


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
    """There is no stream."""
    return False


CODER = coder_of("fixed", _put, _get)
