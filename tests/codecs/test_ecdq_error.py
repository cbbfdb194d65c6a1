"""ecdq keeps its error on any input, says what it spends, and takes a budget per segment."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import assert_same_bits, gaussian, mostly_zero, student_t3
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import laconic as lc
from benchmarks._gradients import KINDS, gradients
from laconic.kernels import using
from laconic.kernels._reference.ecdq_steps import count_levels, sample_blocks

KEY = lc.Key(seed=9, tensor=4)
ERROR = 0.08
TINY = float(np.float32(1e-45))  # the smallest float there is

SHAPES: dict[str, Callable[[], Tensor]] = {
    **{kind: lambda kind=kind: gradients(kind, 1, 3)[0] for kind in KINDS},
    "another embedding": lambda: gradients("embedding", 2, 4)[1],
    "all equal": lambda: torch.full((150_000,), 0.37),
    "subnormal": lambda: (gaussian(30_000) * 1e4).round() * TINY,
    "a few bits above zero": lambda: (gaussian(30_000) * 20).round() * TINY,
    "huge": lambda: student_t3(30_000) * 1e36,
    "wide fp16": lambda: (gaussian(150_000) * 10.0 ** (torch.arange(150_000) % 9 - 5)).half(),
    "one block among many": lambda: torch.cat([torch.zeros(300_000), gaussian(100)]),
    "one value": lambda: gaussian(1),
}


def energy(x: Tensor) -> float:
    return float(x.double().square().sum())


def spent_by(codec: lc.Codec, x: Tensor, **options) -> Tensor:
    spent = torch.full((len(options.get("segments", (1,))),), math.nan, dtype=torch.float64)
    codec.encode(x, KEY, spent=spent, **options)
    return spent


# --- what is promised ----------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_the_error_is_kept_on_average(name: str) -> None:
    """False alarm: the mean over draws varies by less than a hundredth where it is near."""
    x = SHAPES[name]()
    codec, draws = lc.ECDQ(error=ERROR), max(4, min(200, 8_000_000 // x.numel()))
    found = [
        energy(codec.decode(codec.encode(x, lc.Key(step=draw))).double() - x.double())
        for draw in range(draws)
    ]
    assert sum(found) / draws <= 1.05 * ERROR * energy(x)


@pytest.mark.parametrize("subtract", ["auto", "always", "never"])
@pytest.mark.parametrize("name", SHAPES)
def test_no_more_is_spent_than_was_asked_for(name: str, subtract: str) -> None:
    x = SHAPES[name]()
    for error in (1e-3, ERROR, 2.0):
        codec = lc.ECDQ(error=error, subtract=subtract)
        if x.abs().max().double() > 32_000 * math.sqrt(energy(x) * error / x.numel()):
            continue  # integers of 16 bits do not go so far
        assert float(spent_by(codec, x)) <= (1 + 1e-6) * error * energy(x)


def test_nearly_all_is_spent() -> None:
    """A smaller error than asked for would cost bits."""
    for name in ("dense", "heavy_tailed", "block_sparse", "embedding", "outlier", "bf16_wide"):
        x = gradients(name, 1, 3)[0]
        assert float(spent_by(lc.ECDQ(error=ERROR), x)) >= 0.9 * ERROR * energy(x), name


@pytest.mark.parametrize(
    "kind", ["dense", "heavy_tailed", "embedding", "outlier", "tiny_plus_large", "bf16_wide"]
)
def test_bytes_are_those_of_the_best_step(kind: str) -> None:
    """The largest step that keeps to the budget, found by trying all."""
    x = gradients(kind, 1, 3)[0]
    steps = [lc.ECDQ(step=1.05**i) for i in range(-20, 120)]
    best = max(c.step or 0 for c in steps if float(spent_by(c, x)) <= ERROR * energy(x))
    wire = lc.ECDQ(error=ERROR).encode(x, KEY)
    assert wire.nbytes <= 1.1 * lc.ECDQ(step=best).encode(x, KEY).nbytes


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Blocks of several sizes and densities, in any order."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = draw(st.lists(st.tuples(st.integers(-30, 30), st.floats(0, 1)), min_size=1, max_size=5))
    count = draw(st.sampled_from((1, 100, 5000, 200_000, 400_001)))
    size, density = (np.array(column)[rng.integers(len(kinds), size=-(-count // 512))]
                     for column in zip(*kinds, strict=True))  # fmt: skip
    values = rng.standard_normal(count) * np.repeat(2.0**size, 512)[:count]
    if draw(st.booleans()):
        values = np.abs(values)
    return torch.from_numpy(
        (values * (rng.random(count) < np.repeat(density, 512)[:count])).astype(np.float32)
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    x=tensors(),
    error=st.sampled_from((1e-4, 0.08, 1.0)),
    subtract=st.sampled_from(("auto", "never")),
)
def test_any_mixture_of_blocks_keeps_to_its_budget(x: Tensor, error: float, subtract: str) -> None:
    if float(x.abs().max()) > 32_000 * math.sqrt(energy(x) * error / x.numel()):
        return  # integers of 16 bits do not go so far
    codec = lc.ECDQ(error=error, subtract=subtract)
    assert float(spent_by(codec, x)) <= (1 + 1e-6) * error * energy(x)


def test_a_sample_that_was_misled_costs_bits_not_error() -> None:
    """Blocks of equal energy: those looked at hold one value each, all others are dense.

    One value costs at most Δ²/4, a dense block 512·Δ²/12: the estimate is a hundred times too low.
    """
    blocks = 2000
    x = gaussian(512 * blocks).view(blocks, 512)
    x *= (512**0.5 / x.norm(dim=1, keepdim=True)) * 1.01  # of one level
    energies = x.double().square().sum(1).numpy()
    counts, highest = count_levels(energies)
    looked = sample_blocks(energies, counts, highest, ERROR**0.5 * 1.01 / 12).blocks
    x[looked] = 0.0
    x[looked, 7] = 512**0.5 * 1.01
    x = x.view(-1)
    spent = torch.zeros(1, dtype=torch.float64)
    wire = lc.ECDQ(error=ERROR).encode(x, KEY, spent=spent)
    assert 0.5 * ERROR * energy(x) < float(spent) <= (1 + 1e-6) * ERROR * energy(x)
    error = energy(lc.ECDQ(error=ERROR).decode(wire) - x)
    assert error == pytest.approx(float(spent), rel=0.02)
    with using("reference"):
        again = torch.zeros(1, dtype=torch.float64)
        plain = lc.ECDQ(error=ERROR).encode(x, KEY, spent=again)
    assert_same_bits(wire.data, plain.data)
    assert_same_bits(spent, again)


# --- what was spent ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("spec", ["error=0.08", "step=2", "error=0.3,max_bits=2.5"])
@pytest.mark.parametrize("subtract", ["auto", "always", "never"])
def test_spent_is_the_mean_squared_error(subtract: str, spec: str, dtype: torch.dtype) -> None:
    """False alarm 1e-6 for every segment."""
    codec, parts = lc.codec(f"ecdq:{spec},subtract={subtract}"), [3000, 1, 9000, 513]
    x = torch.cat([mostly_zero(3000), gaussian(1), student_t3(9000), 0.001 * gaussian(513)])
    spent, draws = torch.zeros(4, dtype=dtype), 300
    found = torch.zeros(draws, 4, dtype=torch.float64)
    for draw in range(draws):
        key = lc.Key(step=draw)
        y = codec.decode(codec.encode(x, key, segments=parts, spent=spent))
        errors = (y.double() - x.double()).split(parts)
        found[draw] = torch.stack([error.square().sum() for error in errors])
    z = stats.norm.isf(1e-6 / 8)
    slack = z * found.std(0) / math.sqrt(draws) + 5e-3 * spent
    assert ((found.mean(0) - spent.double()).abs() <= slack).all()


def test_spent_of_zeros_nothing_and_nan() -> None:
    x = torch.cat([torch.zeros(600), gaussian(600), torch.full((600,), math.nan)])
    spent = spent_by(lc.ECDQ(), x, segments=[600, 600, 600])
    assert spent[0] == 0 and spent[1] > 0 and spent[2].isnan()
    assert float(spent_by(lc.ECDQ(), torch.empty(0))) == 0


def test_spent_is_what_rotation_spends() -> None:
    """A rotation keeps lengths, segment by segment."""
    codec, parts = lc.codec("rotate(ecdq:error=0.05)"), [2000, 1500]
    x = torch.cat([student_t3(2000), 100 * mostly_zero(1500)])
    spent = torch.zeros(2)
    found = torch.zeros(2, dtype=torch.float64)
    for draw in range(100):
        y = codec.decode(codec.encode(x, lc.Key(step=draw), segments=parts, spent=spent))
        squares = [error.double().square().sum() for error in (y - x).split(parts)]
        found += torch.stack(squares) / 100
    torch.testing.assert_close(found, spent.double(), rtol=0.03, atol=0)
    assert codec.knows_error and not lc.codec("rotate(dqsg)").knows_error


def test_nothing_else_changes() -> None:
    x = student_t3(50_000)
    plain = lc.ECDQ().encode(x, KEY)
    assert_same_bits(lc.ECDQ().encode(x, KEY, spent=torch.zeros(1)).data, plain.data)
    assert_same_bits(lc.ECDQ().encode(x, KEY, shares=[1.0]).data, plain.data)


# --- shares --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "least"),
    [
        ("ecdq:error=0.08", 0.9),
        ("rotate(ecdq:error=0.08)", 0.9),
        ("ecdq:error=0.08,block=512", 0.8),
        ("rotate(ecdq:error=0.08,block=512)", 0.8),
    ],
)
def test_shares_are_the_segments_own(spec: str, least: float) -> None:
    codec, parts, shares = lc.codec(spec), [20_000, 700, 9000], (0.25, 1.0, 3.0)
    x = torch.cat([gaussian(20_000), 10 * student_t3(700), gaussian(9000)])
    spent = torch.zeros(3, dtype=torch.float64)
    codec.encode(x, KEY, segments=parts, shares=shares, spent=spent)
    for part, share, own in zip(x.split(parts), shares, spent.tolist(), strict=True):
        assert least * share < own / (0.08 * energy(part)) <= share * (1 + 1e-6)


def test_shares_of_one_are_a_smaller_error() -> None:
    x = student_t3(50_000)
    wire = lc.ECDQ(error=0.08).encode(x, KEY, shares=[0.25])
    assert_same_bits(wire.data, lc.ECDQ(error=0.02).encode(x, KEY).data)


def test_what_cannot_be_asked_for() -> None:
    x = gaussian(1000)
    for spec in ("ecdq:step=1", "dqsg", "rotate(dqsg)", "feedback(ecdq)", "fp16"):
        with pytest.raises(lc.ConfigError, match="no error budget"):
            lc.codec(spec).encode(x, KEY, shares=[0.5])
    for spec in ("dqsg", "rotate(dqsg)", "feedback(ecdq)", "fp16"):
        with pytest.raises(lc.ConfigError, match="spent="):
            lc.codec(spec).encode(x, KEY, spent=torch.zeros(1))
    for shares in ([0.5, 0.5], [], [0.0], [-1.0], [math.nan], [math.inf]):
        with pytest.raises(ValueError, match="shares"):
            lc.ECDQ().encode(x, KEY, shares=shares)
    for spent in (torch.zeros(2), torch.zeros(1).half(), torch.zeros(1, 1)):
        with pytest.raises(ValueError, match="spent must be"):
            lc.ECDQ().encode(x, KEY, spent=spent)


def test_bounds_are_promises_now() -> None:
    for subtract in ("auto", "always", "never"):
        assert lc.ECDQ(error=0.08, subtract=subtract).variance_bound(10**6) == 0.08
    assert lc.ECDQ(error=1e-8).variance_bound(10**9) == pytest.approx(1e9 / (12 * 32_000**2))
    assert lc.ECDQ(error=0.08, max_bits=4).variance_bound(10) is None
