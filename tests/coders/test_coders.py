"""Every coder: the same integers back, the same bytes from every backend, damage is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import kernel_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import laconic as lc
from laconic.coders import coder, coders
from laconic.kernels import using
from laconic.kernels._coding import CHUNK, plane_words, table

KEY = lc.Key(seed=11, step=2)
COUNTS = (1, 2, 127, 511, 512, 513, 8191, 8192, 8193, 20_000)


KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "dense": lambda rng, n: np.floor(rng.standard_normal(n) + rng.random(n)),
    "sparse": lambda rng, n: KINDS["dense"](rng, n) * (rng.random(n) < 0.05),
    "heavy": lambda rng, n: rng.standard_cauchy(n) * 2,
    "zero": lambda rng, n: np.zeros(n),
    "lone": lambda rng, n: np.where(np.arange(n) == n // 2, -32767, 0),
    "largest": lambda rng, n: rng.choice([-32767, 32767], n),
    "uniform": lambda rng, n: rng.integers(-200, 201, n),
    "constant": lambda rng, n: np.full(n, 15),
    "alternating": lambda rng, n: np.where(np.arange(n) % 2, 14, -16),
}


def integers(kind: str, count: int) -> Tensor:
    values = KINDS[kind](np.random.default_rng(count), count)
    return torch.from_numpy(np.clip(np.rint(values), -32767, 32767).astype(np.int16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", coders())
def test_the_same_integers_come_back(name: str, kind: str) -> None:
    for count in COUNTS:
        q = integers(kind, count)
        data = coder(name).encode(q, KEY)
        assert torch.equal(coder(name).decode(data, count, KEY), q)
        width = int(q.abs().max()).bit_length()
        parts = table((count,)).count.tolist()
        assert data.numel() <= sum(8 + 4 * plane_words(size, width) for size in parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", coders())
def test_numba_writes_the_bytes_of_the_reference(name: str, kind: str) -> None:
    for count in (1, 300, 9000):
        q = integers(kind, count)
        data = coder(name).encode(q, KEY)
        with using("reference"):
            assert torch.equal(coder(name).encode(q, KEY), data)
            assert torch.equal(coder(name).decode(data, count, KEY), q)


@pytest.mark.parametrize("name", coders())
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    values=st.lists(st.one_of(st.integers(-2, 2), st.integers(-32767, 32767)), max_size=700),
    repeat=st.integers(1, 14),
)
def test_any_integers_come_back(name: str, values: list[int], repeat: int) -> None:
    q = torch.tensor(values * repeat, dtype=torch.int16)
    assert torch.equal(coder(name).decode(coder(name).encode(q), len(q)), q)


@pytest.mark.parametrize("name", coders())
def test_bytes_are_integers_too(name: str) -> None:
    q = integers("dense", 3000).to(torch.int8)
    back = coder(name).decode(coder(name).encode(q), 3000, dtype=torch.int8)
    assert back.dtype == torch.int8 and torch.equal(back, q)


@pytest.mark.parametrize("name", coders())
def test_threads_change_no_byte(name: str) -> None:
    q = integers("heavy", 300_000)
    data = coder(name).encode(q, KEY)
    with kernel_threads(3):
        assert torch.equal(coder(name).encode(q, KEY), data)
        assert torch.equal(coder(name).decode(data, 300_000, KEY), q)


@pytest.mark.parametrize("name", coders())
def test_every_altered_bit_is_found(name: str) -> None:
    """Table, check sums and chunks; a change within one word is seen always."""
    q = integers("dense", 600)
    data = coder(name).encode(q, KEY)
    for place in range(data.numel()):
        for bit in range(8):
            other = data.clone()
            other[place] ^= 1 << bit
            with pytest.raises(lc.WireError):
                coder(name).decode(other, 600, KEY)


@pytest.mark.parametrize("name", coders())
def test_the_wrong_count_key_limit_or_length_is_found(name: str) -> None:
    q = integers("dense", 9000)
    data = coder(name).encode(q, KEY)
    for count in (0, 1, 8999, 9001, 8192, 8193, 80_000, 1 << 62):
        with pytest.raises(lc.WireError):
            coder(name).decode(data, count, KEY)
    with pytest.raises(lc.WireError, match="key"):
        coder(name).decode(data, 9000, lc.Key())
    with pytest.raises(lc.WireError, match="not what an encoder writes"):
        coder(name).decode(data, 9000, KEY, limit=2)
    for wrong in (data[:-4], data[:-1], data[:8], data[:0], torch.cat([data, data[:4]])):
        with pytest.raises(lc.WireError):
            coder(name).decode(wrong, 9000, KEY)


@pytest.mark.parametrize("name", coders())
def test_nothing_is_coded_as_nothing(name: str) -> None:
    empty = coder(name).encode(torch.empty(0, dtype=torch.int16))
    assert empty.numel() == 0 and coder(name).decode(empty, 0).numel() == 0


def test_bytes_may_start_anywhere() -> None:
    q = integers("dense", 600)
    data = coder("bitmap").encode(q)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), data])[1:]
    assert torch.equal(coder("bitmap").decode(shifted, 600), q)


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="int8 or int16"):
        coder("bitmap").encode(torch.zeros(3))
    with pytest.raises(ValueError, match="-32767 to 32767"):
        coder("bitmap").encode(torch.tensor([-32768], dtype=torch.int16))
    with pytest.raises(TypeError, match="int8 or int16"):
        coder("bitmap").decode(torch.zeros(12, dtype=torch.uint8), 1, dtype=torch.int32)
    with pytest.raises(lc.WireError, match="contiguous"):
        coder("bitmap").decode(torch.zeros(3, 4, dtype=torch.uint8), 1)
    with pytest.raises(lc.ConfigError, match="did you mean rans"):
        coder("ranz")


SPECS = (
    "qsgd:bits=4",
    "qsgd:levels=1,norm=l2,block=tensor",
    "dqsg:bits=2,block=100",
    "dqsg:bits=8",
    "ndqsg",
    "ndqsg:levels=63,ratio=125",
    "global:bits=8",
    "global:bits=4",
)


@pytest.mark.parametrize("name", coders())
@pytest.mark.parametrize("spec", SPECS)
def test_a_coder_under_a_codec_changes_the_bytes_but_not_the_values(spec: str, name: str) -> None:
    plain = lc.codec(spec)
    coded = lc.codec(f"{spec}{',' if ':' in spec else ':'}coder={name}")
    assert lc.codec(str(coded)) == coded
    for count in (1, 300, 9000):
        x = torch.from_numpy(np.random.default_rng(count).standard_t(3, count).astype(np.float32))
        side: dict[str, Any] = {"side": x + 0.01} if plain.name == "ndqsg" else {}
        wire = coded.encode(x, KEY)
        want = plain.decode(plain.encode(x, KEY), **side)
        assert torch.equal(coded.decode(wire, **side), want)
        assert wire.nbytes <= coded.nbytes(count)
        again = lc.Wire.parse(wire.data.clone(), key=KEY, shape=x.shape, dtype=x.dtype)
        assert torch.equal(coded.decode(again, **side), want)


def test_coded_integers_cannot_be_summed() -> None:
    codec = lc.codec("global:bits=8,coder=bitmap")
    assert not codec.summable and lc.codec("global:bits=8").summable
    wire = codec.encode(torch.ones(10), KEY)
    with pytest.raises(TypeError, match="cannot be summed"):
        _ = wire.payload
    with pytest.raises(TypeError, match="cannot be summed"):
        codec.decode_sum(torch.zeros(10, dtype=torch.int8), [KEY], norm=1.0)


def test_chunks_do_not_cross_segments() -> None:
    where = table((8193, 5, 16_384))
    assert where.start.tolist() == [0, 8192, 8193, 8198, 8198 + 8192]
    assert where.count.tolist() == [8192, 1, 5, CHUNK, CHUNK]
    assert where.segment.tolist() == [0, 0, 1, 2, 2]
