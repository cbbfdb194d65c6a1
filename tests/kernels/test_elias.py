"""Elias codes: the reference's words on Numba, exact round trips, and refusal of anything else."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import numpy as np
import pytest

from laconic.errors import WireError
from laconic.kernels._coding import CHUNK, MAX_MAGNITUDE, WORK_WORDS, Kind, plane_words
from laconic.kernels._reference import elias as reference

fast = pytest.importorskip("laconic.kernels._numba.elias")
mix = pytest.importorskip("laconic.kernels._numba.group").mix

KEY = np.uint32(7), np.uint32(9)
FORMS = (0, 1, 2)
COUNTS = (1, 2, 63, 64, 65, 511, 513, 8191, 8192)


def rounded(sigma: float) -> Callable[[int], np.ndarray]:
    def make(count: int) -> np.ndarray:
        rng = np.random.default_rng(count)
        return np.floor(sigma * rng.standard_normal(count) + rng.random(count))

    return make


def heavy(count: int) -> np.ndarray:
    """Every power of two appears, mostly among small values."""
    q = np.random.default_rng(count).standard_cauchy(count) * 2
    return np.clip(np.rint(q), -MAX_MAGNITUDE, MAX_MAGNITUDE)


def alone(place: int, value: int) -> Callable[[int], np.ndarray]:
    return lambda count: np.where(np.arange(count) == place % count, value, 0)


INPUTS: dict[str, Callable[[int], np.ndarray]] = {
    "dense": rounded(1.0),
    "sparse": rounded(0.09),
    "very sparse": rounded(0.002),
    "wide": rounded(4.0),
    "very wide": rounded(3000.0),
    "heavy tails": heavy,
    "zeros": np.zeros,
    "first": alone(0, -1),
    "last": alone(-1, 1),
    "largest": alone(-1, MAX_MAGNITUDE),
    "smallest": alone(0, -MAX_MAGNITUDE),
    "all ones": np.ones,
    "all twos": lambda count: np.full(count, 2),  # where the dense code is the shorter one
    "all -6, once large": lambda count: alone(count // 2, 20_000)(count) - 6,
    "all largest": lambda count: np.full(count, MAX_MAGNITUDE),
}


def encode(
    chunks: list[np.ndarray], form: int, *, first: int = 0, last: int | None = None, to: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words from `to` on, ends and checks. Scratch and output are dirty before."""
    last = len(chunks) if last is None else last
    count = np.array([len(chunk) for chunk in chunks], np.int32)
    q = np.zeros((last - first, CHUNK), np.int16)
    for row, chunk in zip(q, chunks[first:last], strict=True):
        row[: len(chunk)] = chunk
    c = np.arange(len(chunks))
    out = np.full(to + (last - first) * 8300, 0xDEADBEEF, np.uint32)
    ends, checks = np.zeros(len(chunks), np.uint32), np.zeros(len(chunks), np.uint32)
    scratch = np.full(WORK_WORDS, 0xFFFFFFFF, np.uint32)
    marks, segment, stamps = (c * 3).astype(np.uint16), (c // 2).astype(np.int32), c * 5 + 1
    place = (count, segment, marks, stamps.astype(np.uint32))
    end = fast.CODER.encode(
        q.reshape(-1), first, last, place, KEY, form, scratch, (), out, to, ends, checks
    )
    assert np.all(out[:to] == 0xDEADBEEF) and np.all(out[end:] == 0xDEADBEEF)
    return out[to:end], ends, checks


def decode(words: np.ndarray, count: int, limit: int = MAX_MAGNITUDE) -> np.ndarray | None:
    """The integers of a single chunk, or None if it is refused.

    It lies between other words, twice: these must not matter, and what lies around q stays.
    """
    results = []
    for around in (0, 0xFFFFFFFF):
        payload = np.full(len(words) + 16, around, np.uint32)
        payload[8 : 8 + len(words)] = words
        ends = np.array([8, 8 + len(words)], np.uint32)
        q = np.full(3 * CHUNK, 0x5A5A, np.int16)
        counts, scratch = np.full(2, count, np.int32), np.zeros(0, np.uint32)
        own = q[CHUNK:]
        bad = fast.CODER.decode(payload, 1, 2, counts, ends, KEY, limit, scratch, (), own)
        used = -(-count // 512) * 512
        assert np.all(q[:CHUNK] == 0x5A5A) and np.all(q[CHUNK + used :] == 0x5A5A)
        assert bad in (-1, 1)
        if bad == -1:
            assert not q[CHUNK + count : CHUNK + used].any()
        results.append(q[CHUNK : CHUNK + count].copy() if bad == -1 else None)
    assert same(*results)
    return results[0]


def expected(words: list[int], kind: int, count: int) -> np.ndarray | None:
    """What the reference says of a stream: None for one that no encoder writes."""
    try:
        q = reference.decode(words, count, kind)
    except WireError:
        return None
    width = int(np.abs(q.astype(int)).max()).bit_length()
    return q if 1 + len(words) < plane_words(count, width) else None


def same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return a is b
    return np.array_equal(a, b)


def test_examples_of_the_docstring() -> None:
    assert doctest.testmod(reference) == doctest.TestResults(failed=0, attempted=2)


def test_every_code_word() -> None:
    """Written as the reference does, and read back, whatever follows."""
    for k in range(1, 1 << 16):
        code, entry = reference.omega(k), int(fast.omega(k))
        bits = int(code[::-1], 2)
        assert entry == len(code) | bits << 6
        for behind in (0, (1 << 64) - 1):
            word = np.uint64((bits | behind << len(code)) & (1 << 64) - 1)
            assert fast.read(word) == (k, len(code))
    too_large = int(reference.omega(1 << 16)[::-1], 2)
    assert fast.read(np.uint64(too_large))[0] == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("maker", INPUTS)
def test_words_are_those_of_the_reference(maker: str, form: int) -> None:
    for count in COUNTS:
        q = INPUTS[maker](count).astype(np.int16)
        got, _, _ = encode([q], form)
        kind, words = reference.encode(q, form)
        width = int(np.abs(q.astype(int)).max()).bit_length()
        if 1 + len(words) < plane_words(count, width):
            assert got.tolist() == [kind, *words], count
        else:
            assert got[0] == width << 8 and len(got) == plane_words(count, width), count
        assert same(decode(got, count), q), count
        assert np.array_equal(reference.decode(words, count, kind), q), count


def test_every_gap_and_level_next_to_a_power_of_two() -> None:
    edges = sorted({(1 << t) + d for t in range(16) for d in (-1, 0, 1)} & set(range(1, 32768)))
    for gap in [edge for edge in edges if edge < CHUNK]:
        for level in (1, 7, 8, MAX_MAGNITUDE):
            q = np.zeros(CHUNK, np.int16)
            q[0], q[gap] = 1, -level
            assert same(decode(encode([q], 1)[0], CHUNK), q), (gap, level)
    levels = np.array([sign * edge for edge in edges for sign in (1, -1)])
    q = np.full(CHUNK, 2, np.int16)
    q[100 : 100 + 20 * len(levels) : 20] = levels
    for form in FORMS:
        words, _, _ = encode([q], form)
        assert words[0] == (Kind.ELIAS_SPARSE if form == 1 else Kind.ELIAS_DENSE)
        assert same(decode(words, CHUNK), q)


def test_the_shorter_code_is_chosen_and_sparse_if_they_are_equal() -> None:
    """One and zeros: 14 + 1 + 1 + 1 bits against 4 + (count - 1)."""
    for count, kind in ((13, Kind.ELIAS_DENSE), (14, Kind.ELIAS_SPARSE)):
        q = alone(0, 1)(count).astype(np.int16)
        assert reference.encode(q)[0] == encode([q], 0)[0][0] == kind


def test_chunks_of_a_batch() -> None:
    """Any part of the chunks gives the same words, from any place on; marks and checks fit."""
    counts = (8192, 100, 8192, 1, 513)
    chunks = [rounded(1.0)(count).astype(np.int16) for count in counts]
    words, ends, checks = encode(chunks, 0)
    starts = [0, *ends[:-1].tolist()]
    part, part_ends, part_checks = encode(chunks, 0, first=1, last=4, to=77)
    assert np.array_equal(part, words[ends[0] : ends[3]])
    assert np.array_equal(part_ends[1:4], ends[1:4] - ends[0])
    assert np.array_equal(part_checks[1:4], checks[1:4])
    for c, (a, b) in enumerate(zip(starts, ends, strict=True)):
        assert words[a] >> 16 == 3 * c
        assert words[a + 1 : b].tolist() == reference.encode(chunks[c])[1]
        assert checks[c] == checksum(words[a:b], c, c // 2 * 5 + 1, len(chunks[c]))
    count = np.array(counts, np.int32)
    q = np.zeros(3 * CHUNK, np.int16)
    for first, last in ((0, 3), (3, 5)):
        assert decode_batch(words, first, last, count, ends, q) == -1
        for row, chunk in zip(q.reshape(3, CHUNK), chunks[first:last], strict=False):
            assert np.array_equal(row[: len(chunk)], chunk)
    words[starts[2]] ^= 1 << 4
    assert decode_batch(words, 0, 3, count, ends, q) == 2
    assert decode_batch(words, 3, 5, count, ends, q) == -1


def decode_batch(
    words: np.ndarray, first: int, last: int, count: np.ndarray, ends: np.ndarray, q: np.ndarray
) -> int:
    nothing = np.zeros(0, np.uint32)
    return fast.CODER.decode(words, first, last, count, ends, KEY, MAX_MAGNITUDE, nothing, (), q)


def checksum(words: np.ndarray, c: int, stamp: int, count: int) -> int:
    def fmix(h: int) -> int:
        h = (h ^ h >> 16) * 0x7FEB352D % 2**32
        h = (h ^ h >> 15) * 0x846CA68B % 2**32
        return h ^ h >> 16

    salt = (int(mix(np.uint32(c), *KEY)) ^ stamp) + count
    salted = ((salt + i * 0x9E3779B1) % 2**32 for i in range(len(words)))
    return sum(fmix(w ^ s) for w, s in zip(words.tolist(), salted, strict=True)) % 2**32


def test_ends_at_every_bit_of_a_word() -> None:
    """Padding is zero behind long code words, and is not taken for symbols behind short ones."""
    for ones in range(1, 40):
        q = np.zeros(CHUNK, np.int16)
        q[:ones] = 1
        far, two = q.copy(), q.copy()
        far[-1] = two[-2:] = -MAX_MAGNITUDE
        for chunk, form in ((q, 1), (far, 1), (two, 2)):
            words, _, _ = encode([chunk], form)
            assert (words[0], words[1:].tolist()) == reference.encode(chunk, form)
            assert same(decode(words, CHUNK), chunk)


@pytest.mark.parametrize("form", [1, 2])
def test_values_above_the_limit_are_refused(form: int) -> None:
    for value in (3, -3, 300, -300):
        q = rounded(0.5)(1000).astype(np.int16).clip(-2, 2)
        q[500] = value
        words, _, _ = encode([q], form)
        assert same(decode(words, 1000, limit=abs(value)), q)
        assert decode(words, 1000, limit=abs(value) - 1) is None


@pytest.mark.parametrize("form", [1, 2])
def test_first_words_that_no_encoder_writes_are_refused(form: int) -> None:
    q = rounded(1.0)(1000).astype(np.int16)
    words, _, _ = encode([q], form)
    kind = int(words[0])
    for head in (kind | 0xFFFF0000, kind):  # marks are the codec's
        assert same(decode(np.array([head, *words[1:]], np.uint32), 1000), q)
    for head in (*range(2), *range(4, 256), kind | 1 << 8, kind | 1 << 15, 5 - kind):
        assert decode(np.array([head, *words[1:]], np.uint32), 1000) is None, head
    assert decode(words[:1], 1000) is None
    assert same(decode(np.array([0], np.uint32), 1000), np.zeros(1000, np.int16))
    assert decode(np.array([16], np.uint32), 1000) is None


def test_streams_longer_than_bit_planes_are_refused() -> None:
    for q in (np.full(8192, MAX_MAGNITUDE, np.int16), np.zeros(8192, np.int16)):
        for form in (1, 2):
            kind, words = reference.encode(q, form)
            assert decode(np.array([kind, *words], np.uint32), len(q)) is None


@pytest.mark.parametrize("form", [1, 2])
@pytest.mark.parametrize("count", [3, 700, 8192])
def test_hostile_streams_are_refused_or_read_as_the_reference_reads_them(
    form: int, count: int
) -> None:
    rng = np.random.default_rng(count)
    seen = {True: 0, False: 0}

    def compare(kind: int, words: list[int]) -> None:
        want = expected(words, kind, count)
        assert same(decode(np.array([kind, *words], np.uint32), count), want)
        seen[want is None] += 1

    for maker in ("dense", "sparse", "heavy tails", "last", "largest"):
        q = INPUTS[maker](count).astype(np.int16)
        kind, words = reference.encode(q, form)
        compare(kind, words)
        compare(kind, words[:-1])
        compare(kind, [*words, 0])
        compare(kind, [*words, int(rng.integers(1 << 32))])
        for bit in {0, 5, 13, 14, 31, *rng.integers(0, 32 * len(words), 8).tolist()}:
            flipped = list(words)
            flipped[bit // 32] ^= 1 << bit % 32
            compare(kind, flipped)
        for bit in range(32):  # the end: last symbols and padding
            compare(kind, [*words[:-1], words[-1] ^ 1 << bit])
        other = words.copy()
        other[len(words) // 2 :] = rng.integers(0, 1 << 32, len(words) - len(words) // 2).tolist()
        compare(kind, other)
        longer = INPUTS[maker](CHUNK).astype(np.int16)
        compare(*reference.encode(longer, form))
    for level in (MAX_MAGNITUDE, MAX_MAGNITUDE + 1, 1 << 16):
        compare(*reference.encode(alone(-1, level)(count), form))
    for length in (1, 2, 3, 50, 800):
        for share in (0.1, 0.5, 0.9):  # of ones among the bits
            bits = rng.random((length, 32)) < share
            compare(1 + form, (bits @ (1 << np.arange(32))).tolist())
        compare(1 + form, [0] * length)
        compare(1 + form, [0xFFFFFFFF] * length)
    assert min(seen.values()) > 10


@pytest.mark.parametrize("numel", [1 << 14, 1 << 16])
def test_bits_of_gaussian_vectors_at_the_square_root_of_their_size(numel: int) -> None:
    """QSGD with the 2-norm and √B levels: 3.31, 2.94 and 2.76 bits, where the paper says 2.8."""
    rng = np.random.default_rng(numel)
    v = rng.standard_normal(numel)
    a = np.sqrt(numel) * np.abs(v) / np.linalg.norm(v)
    q = (np.sign(v) * np.floor(a + rng.random(numel))).astype(np.int16)
    bits = reference.lengths(q)
    for name, share in (("dense, all signs", 3.31), ("dense", 2.94), ("sparse", 2.76)):
        assert bits[name] / numel == pytest.approx(share, rel=0.01), name
    chunk = q[:CHUNK]
    assert reference.lengths(chunk)["sparse"] + 14 == len(reference.sparse(chunk))
    assert reference.lengths(chunk)["dense"] == len(reference.dense(chunk))
