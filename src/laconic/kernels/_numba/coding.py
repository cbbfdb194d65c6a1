"""Coded sections on the CPU: chunks go through a cache-sized buffer, threads share the chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from threading import local

import numpy as np
from torch import Tensor

from laconic._key import Stream
from laconic.errors import WireError
from laconic.kernels._coding import (
    CHUNK,
    WORK_WORDS,
    Kind,
    Section,
    Table,
    plane_words,
    table,
)
from laconic.kernels._numba.chunk import Coder, check, salt_of
from laconic.kernels._numba.group import Words, words
from laconic.kernels._numba.intrinsics import i16, kernel, load, pointer, store, u32
from laconic.kernels._pool import split
from laconic.kernels._protocol import Coding

_BATCH = 8  # chunks that are quantized, then coded: 128 KiB of integers stay in the cache
_MOST = plane_words(CHUNK, 15)  # words of the longest chunk
_MODULES = {
    Kind.FIXED: "chunk",
    Kind.BITMAP: "bitmap",
    Kind.ELIAS_SPARSE: "elias",
    Kind.RANS: "rans",
}

Fill = Callable[[np.ndarray, int, int], None]


class _Scratch(local):
    """Buffers of a thread, kept."""

    def __init__(self) -> None:
        self.integers = np.empty(_BATCH * CHUNK, np.int16)
        self.words = np.empty(WORK_WORDS, np.uint32)


_scratch = _Scratch()
_unused: list[np.ndarray] = []  # staging buffers; pages that were never written take no memory


def _staging(words: int) -> np.ndarray:
    """A buffer for a part: not a thread's, because one thread may do several parts of a tensor."""
    try:
        kept = _unused.pop()
    except IndexError:
        kept = np.empty(0, np.uint32)
    return kept if len(kept) >= words else np.empty(words, np.uint32)


def encode_integers(q: Tensor, section: Section, coding: Coding) -> None:
    """See `Kernels`."""
    where, data = table((q.numel(),)), q.numpy()
    marks, stamps = np.zeros(where.chunks, np.uint16), np.zeros(1, np.uint32)

    def fill(batch: np.ndarray, first: int, last: int) -> None:
        _copy_in(data, where.start, where.count, first, last, batch)

    encode_chunks(fill, where, marks, stamps, coding, section)


def decode_integers(section: Section, q: Tensor, coding: Coding, *, limit: int) -> None:
    """See `Kernels`."""
    where, data = table((q.numel(),)), q.numpy()
    marks = encoded_marks(section, where, np.zeros(1, np.uint32), coding.stream)
    if marks.any():
        raise WireError("the wire's chunks carry marks that its codec does not write")

    def use(batch: np.ndarray, first: int, last: int) -> None:
        _copy_out(batch, where.start, where.count, first, last, data)

    decode_chunks(use, where, coding, limit, section)


def encode_chunks(
    fill: Fill,
    where: Table,
    marks: np.ndarray,
    stamps: np.ndarray,
    coding: Coding,
    section: Section,
) -> None:
    """Code what `fill` writes for each batch; each thread's chunks end up next to each other."""
    ends, checks, payload = _views(section)
    coder, key, form = _coder(coding.kind), words(coding.stream), coding.form
    place, tables = (where.count, where.segment, marks, stamps), coder.tables()[0]
    # a short payload (a ceiling on the wire) is written only once the length is known
    direct = len(payload) >= where.chunks * _MOST

    def part(first: int, last: int) -> tuple[int, int, np.ndarray | None]:
        own = direct and first == 0
        out = payload if own else _staging((last - first) * _MOST)
        to, q, work = 0, _scratch.integers, _scratch.words
        for c in range(first, last, _BATCH):
            d = min(c + _BATCH, last)
            fill(q, c, d)
            at = to
            to = coder.encode(q, c, d, place, key, form, work, tables, out, at, ends, checks)
            ends[c:d] += u32(at)
        return first, to, None if own else out

    position = 0
    parts = split(part, where.chunks, CHUNK)
    for i, (first, length, staging) in enumerate(parts):
        last = parts[i + 1][0] if i + 1 < len(parts) else where.chunks
        if position + length > len(payload):
            raise AssertionError("the coded chunks are longer than their bound")
        if staging is not None:
            payload[position : position + length] = staging[:length]
            _unused.append(staging)
            ends[first:last] += u32(position)
        position += length


def decode_chunks(use: Fill, where: Table, coding: Coding, limit: int, section: Section) -> None:
    """Decode batches and hand each to `use`; WireError at the first malformed chunk."""
    ends, _, payload = _views(section)
    coder, key, count = _coder(coding.kind), words(coding.stream), where.count
    tables = coder.tables()[1]

    def part(first: int, last: int) -> int:
        q, work = _scratch.integers, _scratch.words
        for c in range(first, last, _BATCH):
            d = min(c + _BATCH, last)
            bad = coder.decode(payload, c, d, count, ends, key, limit, work, tables, q)
            if bad >= 0:
                return bad
            use(q, c, d)
        return -1

    for bad in split(part, where.chunks, CHUNK):
        if bad >= 0:
            raise WireError(f"chunk {bad} of the wire is not what an encoder writes")


def encoded_marks(section: Section, where: Table, stamps: np.ndarray, stream: Stream) -> np.ndarray:
    """The marks of all chunks, after their places and check sums were verified."""
    ends, checks, payload = _views(section)
    marks = np.empty(where.chunks, np.uint16)
    args = (payload, ends, checks, where.count, where.segment, stamps, words(stream), marks)
    found = split(lambda a, b: _verify(*args, a, b), where.chunks, CHUNK)
    for bad in found:
        if bad >= 0:
            raise WireError(
                f"chunk {bad} of the wire is damaged, or the key is not the one it was encoded with"
            )
    return marks


def _views(section: Section) -> tuple[np.ndarray, ...]:
    parts = (section.ends, section.checks, section.payload)
    return tuple(part.numpy().view(np.uint32) for part in parts)


@lru_cache
def _coder(kind: Kind) -> Coder:
    """Loaded, and compiled, on first use."""
    return import_module(f"laconic.kernels._numba.{_MODULES[kind]}").CODER


@kernel
def _verify(
    payload: np.ndarray,
    ends: np.ndarray,
    checks: np.ndarray,
    count: np.ndarray,
    segment: np.ndarray,
    stamps: np.ndarray,
    key: Words,
    marks: np.ndarray,
    first: int,
    last: int,
) -> int:
    """-1, or the first of chunks first .. last-1 that lies outside, is too long, or altered."""
    words = pointer(payload)
    for c in range(first, last):
        at = int(ends[c - 1]) if c else 0
        length = int(ends[c]) - at
        blocks = (int(count[c]) + 511) // 512
        if length < 1 or length > 1 + blocks * 256 or int(ends[c]) > len(payload):
            return c
        salt = u32(salt_of(c, stamps[segment[c]], key) + u32(count[c]))
        if check(words, at, length, salt) != checks[c]:
            return c
        mark = u32(load(words, at) >> u32(16))
        if u32(mark >> u32(blocks)):
            return c
        marks[c] = mark
    return -1


@kernel
def _copy_in(
    data: np.ndarray, start: np.ndarray, count: np.ndarray, first: int, last: int, q: np.ndarray
) -> None:
    """Chunks of integers into the batch, filled up with zeros."""
    data, q = pointer(data), pointer(q)
    for c in range(first, last):
        n, to, at = int(count[c]), (c - first) * CHUNK, int(start[c])
        for j in range(n):
            store(q, to + j, i16(load(data, at + j)))
        for j in range(n, CHUNK if n % 512 else n):
            store(q, to + j, i16(0))


@kernel
def _copy_out(
    q: np.ndarray, start: np.ndarray, count: np.ndarray, first: int, last: int, data: np.ndarray
) -> None:
    """The batch into an array of int16 or int8."""
    for c in range(first, last):
        at, to = (c - first) * CHUNK, int(start[c])
        for j in range(int(count[c])):
            data[to + j] = q[at + j]
