"""The draws: uniform, and independent across everything that a key and a counter name.

All inputs are fixed, so a test passes always or never. "False alarm" is the chance that ideal
random numbers would fail it; every statistical test here uses 1e-6 for each comparison.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats

import laconic as lc
from laconic._key import Stream
from laconic.kernels._reference.group import dither, draws

CPU = torch.device("cpu")
ALARM = 1e-6
COUNT = 1 << 20
KEYS = [lc.Key(), lc.Key(seed=1, step=12345, tensor=6, rank=3, phase=1), lc.Key(seed=(1 << 64) - 1)]

# (name, shift): 8 bits taken from the top, the middle, and the bottom of a draw
CELLS = [("top", 24), ("high half", 16), ("low half's top", 8), ("bottom", 0)]

GOLDEN = 0x9E3779B1
FIELDS = ("seed", "step", "tensor", "rank", "phase")


def sample(key: lc.Key, count: int = COUNT) -> np.ndarray:
    return draws(key.stream(), count, CPU).numpy()


def assert_uniform(cells: np.ndarray, kinds: int, what: object) -> None:
    """Chi-square, both tails: too even is as suspicious as too uneven."""
    counts = np.bincount(cells, minlength=kinds)
    assert counts.size == kinds
    p = stats.chisquare(counts).pvalue
    assert ALARM / 2 < p < 1 - ALARM / 2, f"{what}: p = {p:.2e}"


def assert_independent(a: np.ndarray, b: np.ndarray, what: object) -> None:
    """Pairs of 4-bit cells are uniform on the 16×16 square: at the top, and at the bottom."""
    for name, shift in (("high bits", 28), ("bits 12-15", 12), ("low bits", 0)):
        pair = ((a >> shift) & 15) << 4 | ((b >> shift) & 15)
        assert_uniform(pair, 256, f"{what}, {name}")


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize(("name", "shift"), CELLS)
def test_draws_are_uniform(key: lc.Key, name: str, shift: int) -> None:
    """2^20 draws in cells of 8 bits and of 4 bits; false alarm 1e-6 each."""
    h = sample(key)
    assert_uniform((h >> shift) & 0xFF, 256, f"{name}, 8 bits")
    assert_uniform((h >> shift) & 0xF, 16, f"{name}, low 4 of 8 bits")
    assert_uniform((h >> shift + 4) & 0xF, 16, f"{name}, high 4 of 8 bits")


LAGS = [1, 2, 3, 16, 32, 63, 64, 65, 100, 128, 512, 1024, 4096, 8192, 65536]


@pytest.mark.parametrize("lag", LAGS)
def test_neighbouring_draws_are_independent(lag: int) -> None:
    """2^20 pairs at each lag and key; false alarm 1e-6 each."""
    for key in KEYS:
        h = sample(key, COUNT + lag)
        assert_independent(h[:-lag], h[lag:], (key, lag))


@pytest.mark.parametrize("lag", [128, 1024])
def test_without_the_golden_step_the_test_above_fails(lag: int) -> None:
    """Why draws multiply their counter: on the counter itself two rounds are not enough."""
    worst = 1.0
    counters = torch.arange(COUNT + lag)
    inverse = pow(GOLDEN, -1, 1 << 32)  # undoes the step
    for key in KEYS:
        k0, k1 = (torch.tensor(part) for part in key.stream())
        h = _mix(k0, k1, counters * inverse & 0xFFFFFFFF).numpy()
        for shift in (28, 12, 0):
            a, b = (h >> shift & 15)[:-lag], (h >> shift & 15)[lag:]
            worst = min(worst, stats.chisquare(np.bincount(a << 4 | b, minlength=256)).pvalue)
    assert worst < 1e-12


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("difference", [1, 2, 1 << 16, 1 << 40])
def test_streams_whose_keys_differ_in_one_field_are_independent(
    field: str, difference: int
) -> None:
    """2^20 pairs (same counter, two keys); false alarm 1e-6 each.

    Ranks that drew alike would multiply the error of the mean by their number.
    """
    for base in (0, 5):
        first, second = (lc.Key(**{field: base + add}) for add in (0, difference))
        assert_independent(sample(first), sample(second), (first, second))


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("counter", [0, 1, 63, 1000])
def test_one_element_over_consecutive_keys_is_uniform_and_independent(
    field: str, counter: int
) -> None:
    """One counter under 2^15 consecutive steps (ranks, ..) and its pairs; false alarm 1e-6 each.

    This is the sequence whose mean makes one coordinate of a gradient unbiased over steps.
    """
    streams = [lc.Key(**{field: value}).stream() for value in range(1 << 15)]
    k = torch.tensor(streams)
    # draws() takes one stream: evaluate the same mix on a column of streams
    h = torch.cat(
        [draws(Stream(*pair), counter + 1, CPU)[-1:] for pair in k[:64].tolist()]
        + [_mix(k[64:, 0], k[64:, 1], counter)]
    ).numpy()
    assert_uniform(h >> 24, 256, "top")
    assert_uniform(h >> 8 & 0xFF, 256, "low half's top")
    assert_independent(h[:-1], h[1:], "next key")


def _mix(k0: torch.Tensor, k1: torch.Tensor, counter: torch.Tensor | int) -> torch.Tensor:
    """The documented 32-bit part of `laconic._key`, on arrays of streams or counters."""
    mask = 0xFFFFFFFF
    h = (k0 + counter * GOLDEN) & mask
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & mask
    h = h ^ (h >> 15)
    h = h ^ k1
    h = (h * 0x846CA68B) & mask
    return h ^ (h >> 16)


def test_the_two_halves_of_a_draw_are_independent() -> None:
    """2^20 pairs at the halves' top and bottom 4 bits; false alarm 1e-6 each.

    Elements j and j + 64 of a group take the two halves of one draw.
    """
    for key in KEYS:
        h = sample(key)
        low, high = h & 0xFFFF, h >> 16
        for a, b in itertools.product((12, 0), repeat=2):
            pair = ((low >> a) & 15) << 4 | ((high >> b) & 15)
            assert_uniform(pair, 256, (key, a, b))


def test_flipping_any_counter_bit_flips_every_output_bit_half_of_the_time() -> None:
    """Avalanche: 2^15 counters × 32 input bits × 32 output bits; false alarm 1e-6 over all."""
    count = 1 << 15
    z = stats.norm.isf(ALARM / 2 / 32 / 32)
    counters = torch.from_numpy(np.random.default_rng(4).integers(0, 1 << 32, count))
    for key in KEYS:
        k0, k1 = (torch.tensor(part) for part in key.stream())
        base = _mix(k0, k1, counters)
        for bit in range(32):
            changed = (base ^ _mix(k0, k1, counters ^ (1 << bit))).numpy()
            rate = ((changed[:, None] >> np.arange(32)) & 1).mean(0)
            assert np.abs(rate - 0.5).max() < z * 0.5 / count**0.5, (key, bit)


def test_flipping_a_key_bit_flips_every_stream_bit_half_of_the_time() -> None:
    """Avalanche of the 64-bit part: 256 keys × 5 fields × 64 bits; false alarm 1e-6 over all."""
    rng = np.random.default_rng(5)
    count = 256
    z = stats.norm.isf(ALARM / 2 / (5 * 64 * 64))
    bases = rng.integers(0, 1 << 63, (count, 5)).tolist()
    for position, bit in itertools.product(range(5), range(64)):
        flips = np.zeros(64)
        for base in bases[:count]:
            other = list(base)
            other[position] ^= 1 << bit
            a, b = (
                _word(lc.Key(**dict(zip(FIELDS, parts, strict=True)))) for parts in (base, other)
            )
            flips += np.unpackbits(np.array([a ^ b], dtype=">u8").view(np.uint8))
        assert np.abs(flips / count - 0.5).max() < z * 0.5 / count**0.5, (position, bit)


def _word(key: lc.Key) -> int:
    stream = key.stream()
    return stream.k1 << 32 | stream.k0


def _grid() -> Iterator[lc.Key]:
    for values in itertools.product(range(10), repeat=5):
        yield lc.Key(**dict(zip(FIELDS, values, strict=True)))


def test_keys_on_a_grid_have_distinct_streams() -> None:
    """10^5 keys of small fields, where a careless hash (a sum, a xor) collides at once."""
    words = [_word(key) for key in _grid()]
    assert len(set(words)) == len(words) == 100_000


def test_stream_words_are_uniform_on_a_grid() -> None:
    """10^5 keys, 8 cells of 8 bits; false alarm 1e-6 each."""
    words = np.array([_word(key) for key in _grid()], dtype=np.uint64)
    for shift in range(0, 64, 8):
        cells = (words >> np.uint64(shift) & np.uint64(0xFF)).astype(np.int64)
        assert_uniform(cells, 256, shift)


def test_a_key_tells_its_fields_apart() -> None:
    """The same numbers in another order are another key."""
    orders = set(itertools.permutations((0, 1, 2, 3, 4)))
    words = {_word(lc.Key(**dict(zip(FIELDS, order, strict=True)))) for order in orders}
    assert len(words) == len(orders)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [-1, 1 << 64, 1.0, "1", None, True, np.int64(3)])
def test_bad_key_fields_raise(field: str, value: object) -> None:
    with pytest.raises(lc.ConfigError, match=f"Key.{field} must be an integer from 0 to"):
        lc.Key(**{field: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("field", FIELDS)
def test_the_largest_key_fields_are_accepted(field: str) -> None:
    assert lc.Key(**{field: (1 << 64) - 1}).stream() != lc.Key().stream()


def test_dither_of_an_element_is_the_documented_half_of_its_draw() -> None:
    """Element j of a group: the low half of draw 64·group + j; element j + 64: the high half."""
    key = lc.Key(seed=3)
    h = sample(key, 64 * 3).tolist()
    for fraction in (16, 15, 7):
        r = dither(key.stream(), 3, fraction, CPU).tolist()
        for group in range(3):
            for j in range(64):
                draw = h[64 * group + j]
                assert r[group][j] == (draw & 0xFFFF) >> (16 - fraction)
                assert r[group][j + 64] == (draw >> 16) >> (16 - fraction)


def test_counters_wrap_at_32_bits() -> None:
    """Products and sums are taken modulo 2^32, as in every kernel."""
    stream = Stream(-2 * GOLDEN % (1 << 32), 0x12345678)
    assert draws(stream, 4, CPU).tolist()[2:] == draws(Stream(0, 0x12345678), 2, CPU).tolist()


def test_streams_are_not_shifted_copies_of_each_other() -> None:
    """Two streams whose counters overlap still draw differently: the second word sees to it.

    2^16 pairs for each of 8 second words; correlation 0.05 is 12 sigma, a copy has 1.
    """
    rng = np.random.default_rng(6)
    for first, second in rng.integers(0, 1 << 32, (8, 2)).tolist():
        a = draws(Stream(1000, first), (1 << 16) + 5, CPU).numpy()
        b = draws(Stream((1000 + 5 * GOLDEN) % (1 << 32), second), 1 << 16, CPU).numpy()
        assert (a[5:] == b).mean() < 1e-3
        assert abs(np.corrcoef(a[5:], b)[0, 1]) < 0.05


def test_golden_values() -> None:
    """Frozen: a change would break wires between versions, and runs that resume."""
    assert lc.Key().stream() == (1801442398, 2024692378)
    assert lc.Key(seed=0, step=7, tensor=3, rank=1).stream() == (2935712569, 2360678965)
    assert lc.Key(seed=1, step=2, tensor=3, rank=4, phase=5).stream() == (2089975772, 1101587429)
    assert draws(Stream(0, 0), 4, CPU).tolist() == [0, 1834104592, 2889141741, 593034902]
    h = draws(Stream(2935712569, 2360678965), 4, CPU).tolist()
    assert h == [1473209829, 4223298512, 3120568877, 813955447]
