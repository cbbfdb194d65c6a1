"""Hostile streams for every coder. `make fuzz` runs a million each; the test suite a few thousand.

Kernels decode from memory that ends (or starts) at a page nobody may touch: one byte outside
their arrays stops the process. What they accept must be what an encoder writes.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

import laconic as lc
from laconic.coders import coder, coders
from laconic.kernels._coding import CHUNK, WORK_WORDS, Kind, table

PAGE = mmap.PAGESIZE
KEY = lc.Key(seed=3)
_C = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """An array with a forbidden page before it and one behind it."""

    def __init__(self, size: int, kind: type) -> None:
        self.kind = np.dtype(kind)
        pages = -(-size * self.kind.itemsize // PAGE)
        self.map = mmap.mmap(-1, (pages + 2) * PAGE)
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.room = pages * PAGE
        start = self.bytes.ctypes.data
        for page in (start, start + (pages + 1) * PAGE):
            if _C.mprotect(ctypes.c_void_p(page), PAGE, mmap.PROT_READ * 0):
                raise OSError(ctypes.get_errno(), "mprotect")

    def array(self, size: int, at_end: bool = True) -> np.ndarray:
        """`size` entries that end (or start) at a forbidden page."""
        length = size * self.kind.itemsize
        first = PAGE + (self.room - length if at_end else 0)
        return self.bytes[first : first + length].view(self.kind)


@dataclass(frozen=True)
class Sample:
    """Integers and their coded section."""

    q: np.ndarray
    words: np.ndarray  # ends, checks, payload

    @property
    def chunks(self) -> int:
        return table((len(self.q),)).chunks


def samples(name: str, rng: np.random.Generator, count: int) -> list[Sample]:
    """Valid sections of many shapes."""
    made = []
    for _ in range(count):
        n = int(rng.choice([1, 3, 100, 511, 512, 700, 1500, 8191, 8193, 9000]))
        spread = rng.choice([0.05, 0.4, 1.0, 6.0, 400.0])
        values = rng.standard_t(3, n) * spread * (rng.random(n) < rng.choice([0.02, 0.3, 1.0]))
        q = np.clip(np.rint(values), -32767, 32767).astype(np.int16)
        data = coder(name).encode(torch.from_numpy(q), KEY)
        made.append(Sample(q, data.numpy().view(np.uint32).copy()))
    return made


def altered(sample: Sample, rng: np.random.Generator) -> tuple[str, np.ndarray]:
    """The section, cut, lengthened, overwritten or with bits flipped."""
    words, chunks = sample.words.copy(), sample.chunks
    way = int(rng.integers(6))
    if way == 0:
        return "cut", words[: int(rng.integers(len(words)))]
    if way == 1:
        more = rng.integers(0, 1 << 32, int(rng.integers(1, 5)), dtype=np.uint32)
        return "lengthened", np.concatenate([words, more])
    if way == 2:
        words[2 * chunks :] = rng.integers(0, 1 << 32, len(words) - 2 * chunks, dtype=np.uint32)
        return "random", words
    if way == 3:
        words[: 2 * chunks] = rng.integers(0, 1 << 32, 2 * chunks, dtype=np.uint32)
        return "table", words
    for _ in range(int(rng.integers(1, 4))):
        words[int(rng.integers(len(words)))] ^= np.uint32(1 << int(rng.integers(32)))
    return "flipped", words


def through_the_interface(name: str, rng: np.random.Generator, pool: list[Sample]) -> None:
    """WireError, or the integers that were coded."""
    sample = pool[int(rng.integers(len(pool)))]
    how, words = altered(sample, rng)
    data = torch.from_numpy(words.view(np.uint8))
    try:
        q = coder(name).decode(data, len(sample.q), KEY)
    except lc.WireError:
        return
    assert np.array_equal(words, sample.words) or np.array_equal(q.numpy(), sample.q), (name, how)


class Hostile:
    """Streams with correct tables and check sums: only the decoder's own care is left."""

    def __init__(self, name: str) -> None:
        own = coder(name)
        module = {Kind.FIXED: "chunk", Kind.ELIAS_SPARSE: "elias"}.get(
            own.kind, own.kind.name.lower()
        )
        loops = import_module(f"laconic.kernels._numba.{module}").CODER
        self.name, self.coder = name, own
        self.decode: Callable[..., int] = loops.decode
        self.tables = loops.tables()[1]
        self.payload = Guarded(2 * 8193, np.uint32)
        self.q = Guarded(CHUNK, np.int16)
        self.scratch = Guarded(WORK_WORDS, np.uint32).array(WORK_WORDS)
        stream = KEY.stream()
        self.key = (np.uint32(stream.k0), np.uint32(stream.k1))

    def one(self, rng: np.random.Generator, pool: list[Sample]) -> None:
        sample = pool[int(rng.integers(len(pool)))]
        n = min(len(sample.q), CHUNK)
        end = int(sample.words[0])
        chunk = sample.words[2 * sample.chunks : 2 * sample.chunks + end].copy()
        chunk = self.alter(chunk, rng)
        at_end = bool(rng.integers(2))
        words = self.payload.array(len(chunk), at_end)
        words[:] = chunk
        q = self.q.array(-(-n // 512) * 512, at_end)
        q[:] = 77
        count, ends = np.array([n], np.int32), np.array([len(chunk)], np.uint32)
        limit = int(rng.choice([1, 7, 127, 32767]))
        rest = (self.key, limit, self.scratch, self.tables, q)
        bad = self.decode(words, 0, 1, count, ends, *rest)
        if bad >= 0:
            return
        assert np.abs(q[:n].astype(int)).max() <= limit and not q[n:].any()
        self.accepted(q[:n].copy(), chunk)

    def alter(self, chunk: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        way = int(rng.integers(5))
        if way == 0:
            return chunk[: int(rng.integers(1, len(chunk) + 1))]
        if way == 1:
            more = rng.integers(0, 1 << 32, int(rng.integers(1, 3)), dtype=np.uint32)
            return np.concatenate([chunk, more * np.uint32(rng.integers(2))])
        if way == 2:
            size = min(len(chunk) + int(rng.integers(3)), 8193)
            wild = rng.integers(0, 1 << 32, size, dtype=np.uint32)
            wild[0] = chunk[0]
            return wild
        where = (
            int(rng.integers(min(len(chunk), 24))) if way == 3 else int(rng.integers(len(chunk)))
        )
        chunk[where] ^= np.uint32(1 << int(rng.integers(32)))
        return chunk

    def accepted(self, q: np.ndarray, chunk: np.ndarray) -> None:
        """What was accepted decodes the same when an encoder writes it."""
        data = self.coder.encode(torch.from_numpy(q), KEY).numpy().view(np.uint32)
        again = data[2:]
        same_kind = (again[0] ^ chunk[0]) & 0xFF == 0
        # bits 16 .. 31 are the codec's; rans may have chosen other classes, planes another width
        if same_kind and self.coder.kind in (Kind.BITMAP, Kind.ELIAS_SPARSE):
            assert np.array_equal(again[1:], chunk[1:]), f"{self.name} accepts a second spelling"


def rounds(name: str, count: int, seed: int) -> Iterator[Any]:
    """`count` hostile streams of each sort."""
    rng = np.random.default_rng(seed)
    pool = samples(name, rng, 60)
    hostile = Hostile(name)
    for i in range(count):
        through_the_interface(name, rng, pool)
        hostile.one(rng, pool)
        if i % 5000 == 4999:
            pool = samples(name, rng, 60)
        yield i


def main() -> None:
    parser = argparse.ArgumentParser(description="Hostile streams for every coder.")
    parser.add_argument("--count", type=int, default=500_000, help="streams of each of two sorts")
    parser.add_argument("--coders", nargs="*", default=coders())
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"seed {options.seed}", flush=True)
    for name in options.coders:
        start = time.perf_counter()
        for _ in rounds(name, options.count, options.seed):
            pass
        seconds = time.perf_counter() - start
        print(f"{name}: {2 * options.count} streams, nothing found, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
