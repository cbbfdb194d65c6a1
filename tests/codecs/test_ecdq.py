"""ecdq: unbiased, its error where it was asked for, its ceiling hard, its wires safe.

"False alarm" is the chance that a correct codec with ideal random numbers would fail a test.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    DTYPES,
    INPUTS,
    assert_same_bits,
    gaussian,
    kernel_threads,
    mostly_zero,
    student_t3,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import laconic as lc
from laconic.kernels import using
from laconic.kernels._reference.ecdq import fixed_point

KEY = lc.Key(seed=9, tensor=4)
DRAWS = 800
ALARM = 1e-6


def step_of(wire: lc.Wire) -> float:
    return float(wire.data[64:68].view(torch.float32))


def nmse(y: Tensor, x: Tensor) -> float:
    return float((y.double() - x.double()).square().sum() / x.double().square().sum())


def variances(x: Tensor, step: float, subtract: str) -> Tensor:
    """Of every value, as the docstring of ECDQ says."""
    phi = (x.double() / step) % 1
    kept = phi * (1 - phi)
    if subtract == "never":
        return step**2 * kept
    if subtract == "always":
        return torch.full_like(kept, step**2 / 12)
    parts = [
        torch.full_like(part, 1 / 12) if part.mean() > 1 / 12 else part for part in kept.split(512)
    ]
    return step**2 * torch.cat(parts)


@pytest.mark.parametrize("subtract", ["auto", "always", "never"])
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("step", [0.5, 3.0])
def test_the_mean_is_x_and_the_variance_is_what_the_docstring_says(
    name: str, subtract: str, step: float
) -> None:
    """False alarm 1e-6 each for the mean of every value and the sum of squared errors."""
    x = INPUTS[name](1200)
    codec = lc.ECDQ(step=step, subtract=subtract)
    total, squares = torch.zeros(1200).double(), torch.zeros(DRAWS).double()
    for draw in range(DRAWS):
        wire = codec.encode(x, lc.Key(step=draw))
        error = codec.decode(wire).double() - x.double()
        total += error
        squares[draw] = error.square().sum()
    delta = step_of(codec.encode(x, KEY))
    variance = variances(x, delta, subtract)
    # Bernstein's inequality, per value, over both signs and all values
    log = math.log(2 * len(x) / ALARM)
    bound = torch.sqrt(2 * DRAWS * variance * log) + 2 / 3 * delta * log
    slack = DRAWS * (delta * 2.0**-16 + x.abs().double() * 2.0**-22)
    assert (total.abs() <= bound + slack).all()
    z = stats.norm.isf(ALARM / 2)
    expected = float(variance.sum())
    assert abs(float(squares.mean()) - expected) <= (
        z * float(squares.std()) / math.sqrt(DRAWS) + 2e-3 * expected + len(x) * delta**2 * 2.0**-15
    )


def test_a_choice_that_looks_at_q_would_be_biased() -> None:
    """Why the mark is set before the dither is drawn: x = 0.2 steps, in a block of its own.

    Subtract if q = 0, keep if q = 1: the mean is off by 0.08 of a step.
    """
    x, u = 0.2, torch.linspace(-0.5, 0.5, 100_001, dtype=torch.float64)
    q = torch.round(x + u)
    after = torch.where(q == 0, q - u, q).mean()
    before = (q - u).mean()
    assert abs(float(before) - x) < 1e-3 < 0.07 < abs(float(after) - x)


def test_a_step_that_looks_at_the_length_would_be_biased() -> None:
    """Why max_bits= is met before the dither is drawn: redraw until few values are non-zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.full((64,), 0.3)
    kept = []
    while len(kept) < 4000:
        q = torch.floor(x + torch.rand(64, generator=generator))
        if q.sum() <= 19:  # about its mean
            kept.append(q.mean())
    assert float(torch.stack(kept).mean()) < 0.3 - 0.01


@pytest.mark.parametrize("error", [0.003, 0.02, 0.08, 0.3])
@pytest.mark.parametrize("name", ["gaussian", "student-t3", "90%-zero"])
def test_error_is_the_error_after_the_choice(name: str, error: float) -> None:
    x = INPUTS[name](60_000)
    got = nmse((codec := lc.ECDQ(error=error)).decode(codec.encode(x, KEY)), x)
    assert 0.9 * error < got < 1.05 * error


def test_error_on_a_constant_is_never_above() -> None:
    """The error of a constant jumps with the step: 0 where it is a multiple, Δ²/12 between."""
    x = torch.full((5000,), 0.37)
    for error in (1e-3, 0.02, 0.08, 0.3, 2.0):
        codec = lc.ECDQ(error=error)
        assert nmse(codec.decode(codec.encode(x, KEY)), x) <= 1.05 * error


def test_zeros_cost_nothing_and_stay_zero() -> None:
    x = mostly_zero(100_000)
    codec = lc.ECDQ(error=0.08)
    wire = codec.encode(x, KEY)
    dense = lc.ECDQ(error=0.08).encode(gaussian(100_000), KEY)
    assert wire.nbytes < dense.nbytes / 2
    blocks = torch.zeros(8192)
    blocks[5000:5003] = 1.0
    y = codec.decode(codec.encode(blocks, KEY))
    assert (y[:4608] == 0).all() and (y[5120:] == 0).all()
    empty = codec.encode(torch.zeros(100_000), KEY)
    assert (codec.decode(empty) == 0).all()
    assert empty.nbytes == 64 + 4 + 12 * 13  # header, step, and 13 chunks of one word each


@pytest.mark.parametrize("coder", ["fixed", "bitmap"])
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("max_bits", [2.0, 2.5, 3.75, 6.0])
def test_max_bits_is_never_exceeded_and_stays_unbiased(
    name: str, max_bits: float, coder: str
) -> None:
    x = INPUTS[name](9000)
    codec = lc.ECDQ(error=1e-4, max_bits=max_bits, coder=coder)
    room = codec.nbytes(9000)
    assert room <= 64 + 4 + 2 * 12 + 9216 * max_bits / 8
    total = torch.zeros(9000).double()
    for draw in range(60):
        wire = codec.encode(x, lc.Key(step=draw))
        assert wire.nbytes <= room
        total += codec.decode(wire).double()
    delta = step_of(codec.encode(x, KEY))
    log = math.log(2 * len(x) / ALARM)
    bound = delta * (math.sqrt(60 / 2 * log) + 2 / 3 * log)  # variance is at most Δ²/4
    assert ((total - 60 * x.double()).abs() <= bound).all()


def test_max_bits_changes_nothing_where_it_is_not_needed() -> None:
    x = gaussian(20_000)
    free, bound = lc.ECDQ(error=0.08), lc.ECDQ(error=0.08, max_bits=8)
    assert_same_bits(free.encode(x, KEY).data, bound.encode(x, KEY).data)


def test_segments_have_steps_of_their_own() -> None:
    parts = [700, 9000, 1, 512]
    x = gaussian(sum(parts)) * torch.repeat_interleave(
        torch.tensor([1e-6, 1.0, 50.0, 3e4]), torch.tensor(parts)
    )
    codec = lc.ECDQ(error=0.05)
    wire = codec.encode(x, KEY, segments=parts)
    assert wire.nbytes <= wire.buffer.numel() == codec.nbytes(len(x), segments=parts)
    assert codec.nbytes(len(x)) < codec.nbytes(len(x), segments=parts)
    y = codec.decode(wire)
    for a, b in zip(x.split(parts), y.split(parts), strict=True):
        if len(a) > 1:
            assert 0.8 * 0.05 < nmse(b, a) < 1.2 * 0.05
    again = lc.Wire.parse(wire.data.clone(), key=KEY, shape=x.shape, dtype=x.dtype, segments=parts)
    assert_same_bits(codec.decode(again), y)
    # without segments the smallest would be lost in the largest one's step
    assert nmse(codec.decode(codec.encode(x, KEY))[:700], x[:700]) >= 1
    for wrong in (None, [9000, 700, 1, 512], [10_213]):
        with pytest.raises(lc.WireError):
            codec.decode(
                lc.Wire.parse(wire.data, key=KEY, shape=x.shape, dtype=x.dtype, segments=wrong)
            )


def test_bad_segments_are_refused() -> None:
    for parts in ([5, 6], [10, 0], [11, -1]):
        with pytest.raises(ValueError, match="segments must"):
            lc.ECDQ().encode(gaussian(10), KEY, segments=parts)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_reaches_its_whole_segment(bad: float) -> None:
    x = gaussian(20_000)
    x[15_000] = bad
    codec = lc.ECDQ()
    y = codec.decode(codec.encode(x, KEY, segments=[9000, 11_000]))
    assert y[9000:].isnan().all() and y[:9000].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1.0, 1e30, 3e38])
def test_all_magnitudes_and_dtypes(dtype: torch.dtype, size: float) -> None:
    x = (gaussian(3000).clamp(-1, 1) * size).to(dtype)
    if not x.isfinite().all():
        pytest.skip("beyond the dtype")
    codec = lc.ECDQ(error=0.01)
    y = codec.decode(codec.encode(x, KEY))
    assert y.dtype == dtype and y.isfinite().all()
    if x.any() and float(x.abs().max()) > 100 * torch.finfo(dtype).smallest_normal:
        assert nmse(y, x) < 0.013
    one = codec.decode(codec.encode(x[:1], KEY))
    assert abs(float(one - x[0])) <= 0.2 * abs(float(x[0])) + torch.finfo(dtype).smallest_normal


def test_one_large_value_among_many_small_ones_keeps_its_size() -> None:
    """The step is at least max/32000: integers stay within 16 bits whatever the error asks."""
    x = gaussian(1 << 20) * 1e-3
    x[12345] = 1e4
    codec = lc.ECDQ(error=1e-8)
    wire = codec.encode(x, KEY)
    assert step_of(wire) >= 1e4 / 32001
    y = codec.decode(wire)
    assert float(y[12345]) == pytest.approx(1e4, rel=1e-4)
    assert (y - x).abs().max() <= step_of(wire)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_byte(threads: int) -> None:
    x = student_t3(300_000)
    codec = lc.ECDQ()
    one = codec.encode(x, KEY)
    y = codec.decode(one)
    with kernel_threads(threads):
        many = codec.encode(x, KEY)
        assert_same_bits(many.data, one.data)
        assert_same_bits(codec.decode(many), y)


def test_the_wrong_key_is_found() -> None:
    codec, x = lc.ECDQ(), gaussian(5000)
    data = codec.encode(x, KEY).data
    with pytest.raises(lc.WireError, match="key"):
        codec.decode(
            lc.Wire.parse(data, key=lc.Key(seed=9, tensor=5), shape=x.shape, dtype=x.dtype)
        )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(place=st.integers(64, 10**9), change=st.integers(1, 255))
def test_every_altered_byte_is_found(place: int, change: int) -> None:
    codec, x = lc.ECDQ(), student_t3(9000)
    data = codec.encode(x, KEY).data.clone()
    data[64 + place % (len(data) - 64)] ^= change
    with pytest.raises(lc.WireError):
        codec.decode(lc.Wire.parse(data, key=KEY, shape=x.shape, dtype=x.dtype))


def test_a_damaged_wire_leaves_the_output_alone() -> None:
    codec, x = lc.ECDQ(), gaussian(30_000)
    wire = codec.encode(x, KEY)
    wire.data[-5] ^= 1
    out = torch.ones(30_000)
    with pytest.raises(lc.WireError, match="chunk 3"):
        codec.decode(wire, out=out, add=True)
    assert (out == 1).all()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("ecdq:error=0.1,step=1", "one of error= and step="),
        ("ecdq:error=0", "error must be a number from"),
        ("ecdq:error=high", "error must be a number from"),
        ("ecdq:step=-1", "step must be a number from"),
        ("ecdq:max_bits=1", "max_bits must be a number from 2"),
        ("ecdq:coder=huffman", "ecdq: coder must be one of fixed"),
        ("ecdq:coder=bitmpa", "did you mean bitmap"),
        ("ecdq:subtract=maybe", "subtract must be one of"),
        ("dqsg:coder=huffman", "dqsg: coder must be one of fixed"),
        ("global:bits=32,coder=bitmap", "bits=8"),
    ],
)
def test_bad_settings(text: str, match: str) -> None:
    with pytest.raises(lc.ConfigError, match=match):
        lc.codec(text)


def test_bounds() -> None:
    assert lc.ECDQ(step=1.0).variance_bound(10) == pytest.approx(1 / 12)
    assert lc.ECDQ(error=0.1, subtract="always").variance_bound(10) == 0.1
    assert lc.ECDQ(step=1.0, subtract="never").variance_bound(10) is None
    assert lc.ECDQ(step=1.0, max_bits=4).variance_bound(10) is None


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(
    "settings_", [{"error": 0.08}, {"error": 1e-6}, {"step": 1.0, "max_bits": 2.5}]
)
def test_numba_chooses_the_steps_of_the_reference(name: str, settings_: dict) -> None:
    x = INPUTS[name](20_000)
    codec = lc.ECDQ(**settings_)
    fast = step_of(codec.encode(x, KEY))
    with using("reference"):
        plain = step_of(codec.encode(x, KEY))
    assert fast == pytest.approx(plain, rel=1e-6)


def test_fixed_point_rounds_to_nearest() -> None:
    t = fixed_point(torch.tensor([0.0, 1.0, -1.0, 0.5 / 65536, -0.51 / 65536]), torch.tensor(1.0))
    assert t.tolist() == [0, 65536, -65536, 1, -1]


def test_a_share_of_the_budget() -> None:
    assert lc.ECDQ(error=0.08).at_share(0.5) == lc.ECDQ(error=0.04)
    assert lc.ECDQ(step=1.0).at_share(0.5) == lc.ECDQ(step=1.0)
    assert lc.codec("rotate(ecdq:error=0.08)").at_share(0.5) == lc.codec("rotate(ecdq:error=0.04)")
    assert lc.codec("dqsg").at_share(0.5) == lc.codec("dqsg")
