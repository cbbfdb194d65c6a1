"""The theorems behind the codecs, measured: mean, variance, distribution, bounds, failure rates.

Keys are fixed, so a test passes always or never; "false alarm" is the chance that a correct
codec with ideal random numbers would fail. It is 1e-6 for every test unless it says otherwise,
Bonferroni-corrected over coordinates. Coordinates are judged by Bernstein's inequality, which
holds for rare events too (a value far below a level goes up once in a thousand draws), sums over
coordinates by the normal distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import INPUTS, assert_same_bits, decode, gaussian, mostly_zero, student_t3
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import laconic as lc
from laconic.kernels import backend
from laconic.kernels._layout import fraction_bits
from laconic.kernels._reference.group import dither, pack, unpack

ALARM = 1e-6
Z = float(stats.norm.isf(ALARM / 2))
CPU = torch.device("cpu")
SIZE = 512  # coordinates
COPIES = 8  # of the vector in one tensor: as many draws from one encode
STEPS = 400
DRAWS = COPIES * STEPS


# --- what theory says of one coordinate ----------------------------------------------------


@dataclass(frozen=True)
class Error:
    """Moments of the error of every coordinate, and what fixed-point and fp32 may add."""

    variance: Tensor
    fourth: Tensor
    largest: Tensor
    bias: Tensor

    def of_mean(self, others: list[Error]) -> Error:
        """Of the mean of independent errors."""
        errors = [self, *others]
        n = len(errors)
        v = torch.stack([e.variance for e in errors])
        fourth = torch.stack([e.fourth for e in errors]).sum(0)
        fourth = fourth + 3 * (v.sum(0) ** 2 - (v**2).sum(0))
        return Error(
            v.sum(0) / n**2,
            fourth / n**4,
            torch.stack([e.largest for e in errors]).mean(0),
            torch.stack([e.bias for e in errors]).mean(0),
        )


def two_point(step: Tensor, f: Tensor, bias: Tensor) -> Error:
    """Up by (1-f)·step with probability f, else down by f·step."""
    p = f * (1 - f)
    return Error(step**2 * p, step**4 * p * (1 - 3 * f + 3 * f**2), step, bias)


def linear_error(x: Tensor, scale: Tensor, levels: int, subtracted: bool) -> Error:
    step = (scale / levels).expand_as(x)
    # half a unit of fixed point, and some roundings of values up to levels·step
    bias = step * (2.0 ** -(fraction_bits(levels) + 1) + levels * 2.0**-21)
    if subtracted:
        return Error(step**2 / 12, step**4 / 80, step / 2, bias)
    position = x / step
    return two_point(step, position - position.floor(), bias)


def natural_error(x: Tensor, scale: Tensor, levels: int) -> Error:
    y = x.abs() / scale
    lowest = 2.0 ** (1 - levels)
    below = torch.where(y < lowest, 0.0, 2.0 ** torch.floor(torch.log2(y)))
    step = torch.where(y < lowest, lowest, below)
    return two_point(step * scale, (y - below) / step, step * scale * 2.0**-16)


def expected_error(codec: lc.Codec, xs: list[Tensor]) -> Error:
    """Of the decoded mean of workers that hold xs, in float64."""
    xs = [x.double() for x in xs]
    match codec:
        case lc.QSGD() | lc.DQSG():
            (x,) = xs
            order = 2.0 if getattr(codec, "norm", "max") == "l2" else math.inf
            scale = torch.linalg.vector_norm(x, order)
            errors = [linear_error(x, scale, codec.levels, isinstance(codec, lc.DQSG))]
        case lc.Global():
            order = 2.0 if codec.norm == "l2" else math.inf
            scale = torch.linalg.vector_norm(torch.cat(xs), order)
            if codec.norm == "l2":  # all copies are one tensor
                scale = scale * math.sqrt(COPIES)
            errors = [linear_error(x, scale, codec.levels_for(len(xs)), False) for x in xs]
        case lc.GlobalExp():
            scale = torch.cat(xs).abs().max()
            errors = [natural_error(x, scale, codec.levels_for(len(xs))) for x in xs]
        case _:
            raise NotImplementedError(codec)
    return errors[0].of_mean(errors[1:])


# --- what is measured ----------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Mean error and mean squared error of every coordinate."""

    mean: Tensor
    square: Tensor


def decoded_means(codec: lc.Codec, xs: list[Tensor]) -> Iterator[Tensor]:
    """The decoded mean of the workers' tensors, under one key after another."""
    norm = None
    if isinstance(codec, lc.Global | lc.GlobalExp):
        norm = codec.global_norm(torch.cat([codec.local_norm(x) for x in xs]))
    for step in range(STEPS):
        keys = [lc.Key(step=step, rank=rank) for rank in range(len(xs))]
        wires = [
            codec.encode(x, key, norm=norm, workers=len(xs))
            for x, key in zip(xs, keys, strict=True)
        ]
        if len(wires) == 1:
            yield codec.decode(wires[0])
        else:
            total = wires[0].payload.clone()
            for wire in wires[1:]:
                total += wire.payload
            yield codec.decode_sum(total, keys, norm=norm, shape=xs[0].shape)


def measure(codec: lc.Codec, xs: list[Tensor]) -> Measured:
    """DRAWS draws of the error."""
    truth = torch.stack(xs).double().mean(0)
    mean, square = torch.zeros(SIZE).double(), torch.zeros(SIZE).double()
    for y in decoded_means(codec, [x.repeat(COPIES) for x in xs]):
        error = y.double().view(COPIES, SIZE) - truth
        mean += error.sum(0)
        square += (error**2).sum(0)
    return Measured(mean / DRAWS, square / DRAWS)


def bernstein(variance: Tensor, largest: Tensor) -> Tensor:
    """How far the mean of DRAWS draws strays, but for a chance of ALARM over all coordinates."""
    log = math.log(2 * SIZE / ALARM)
    rare = largest * log / (3 * DRAWS)
    return rare + (rare**2 + 2 * variance * log / DRAWS).sqrt()


UNBIASED = [
    *((f"qsgd:bits={bits},norm={norm}", 1) for bits in (2, 4, 8) for norm in ("max", "l2")),
    *((f"dqsg:bits={bits},block={b}", 1) for bits in (2, 4, 8) for b in (512, "tensor")),
    ("dqsg:levels=3", 1),
    ("global:bits=4", 1),
    ("global:bits=4", 3),
    ("global:bits=8", 1),
    ("global:bits=8", 4),
    ("global:bits=8", 50),
    ("global:bits=8,norm=l2", 4),
    ("global:bits=32", 1),
    ("global:bits=32", 4),
    ("global:bits=32,levels=5", 4),
    ("global-exp:bits=3", 1),
    ("global-exp:bits=4", 1),
    ("global-exp:bits=8", 1),
]


def test_every_unbiased_codec_is_tested_here() -> None:
    tested = {lc.codec(spec).name for spec, _ in UNBIASED} | {"ecdq"}  # in test_ecdq.py
    assert tested == {name for name in lc.codecs() if lc.codec(name).unbiased} - {"none"}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(("spec", "workers"), UNBIASED)
def test_mean_and_variance(spec: str, workers: int, name: str) -> None:
    """3,200 draws of 512 coordinates; false alarm 1e-6 for each of the five assertions.

    The mean error is zero, the variance is the formula's, coordinate by coordinate and summed,
    and the total is within the codec's bound.
    """
    codec = lc.codec(spec)
    xs = [INPUTS[name](SIZE, seed=100 + rank) for rank in range(workers)]
    theory, found = expected_error(codec, xs), measure(codec, xs)

    assert (found.mean.abs() <= bernstein(theory.variance, theory.largest) + theory.bias).all()
    # a gain that is not 1 shows in the sum before it shows in one coordinate
    drift = (found.mean * torch.stack(xs).double().mean(0).sign()).sum().abs()
    assert drift <= Z * (theory.variance.sum() / DRAWS).sqrt() + theory.bias.sum()

    squares = theory.fourth - theory.variance**2  # variance of the squared error
    slack = 2 * theory.largest * theory.bias
    strays = (found.square - theory.variance).abs()
    assert (strays <= bernstein(squares, theory.largest**2) + slack).all()
    spread = Z * (squares.sum() / DRAWS).sqrt() + slack.sum()
    assert (found.square.sum() - theory.variance.sum()).abs() <= spread

    second_moment = sum(float(x.double().square().sum()) for x in xs) / workers
    if isinstance(codec, lc.Global):  # the whole tensor has one scale: the bound sees the copies
        bound = codec.variance_bound(SIZE * COPIES, workers)
    else:
        bound = codec.variance_bound(SIZE * (1 if getattr(codec, "block", None) else COPIES))
    assert bound is not None
    assert found.square.sum() <= bound * second_moment + spread


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_max_norm_bound_is_attained(bits: int) -> None:
    """QSGD's extremal vector: one value N, all others f·Δ. 3,200 draws, false alarm 1e-6."""
    codec = lc.QSGD(bits=bits)
    c = (SIZE - 1) / codec.levels**2
    x = torch.full((SIZE,), (math.sqrt(1 + c) - 1) / c / codec.levels)
    x[17] = -1.0
    theory, found = expected_error(codec, [x]), measure(codec, [x])
    bound = codec.variance_bound(SIZE)
    assert bound is not None
    spread = Z * float(((theory.fourth - theory.variance**2).sum() / DRAWS).sqrt())
    norm = float(x.double().square().sum())
    assert abs(float(found.square.sum()) - bound * norm) <= spread + 1e-4 * bound * norm
    assert spread < 0.1 * bound * norm  # so that the test says something


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_dqsgs_bound_is_attained_by_a_single_value(bits: int) -> None:
    """E‖v̂-v‖² = B/(12·M²)·‖v‖². 3,200 draws, false alarm 1e-6."""
    codec = lc.DQSG(bits=bits)
    x = torch.zeros(SIZE)
    x[5] = 3.0
    theory, found = expected_error(codec, [x]), measure(codec, [x])
    bound = SIZE / (12 * codec.levels**2)
    assert codec.variance_bound(SIZE) == bound
    spread = Z * float(((theory.fourth - theory.variance**2).sum() / DRAWS).sqrt())
    assert abs(float(found.square.sum()) - bound * 9) <= spread


def test_globals_bound_is_attained_by_workers_that_share_the_extremal_vector() -> None:
    """n·d values under one scale, one of them N. 3,200 draws, false alarm 1e-6."""
    codec, workers = lc.Global(bits=8), 4
    s, size = codec.levels_for(workers), workers * SIZE * COPIES
    c = (size - 1) / s**2
    xs = [torch.full((SIZE * COPIES,), (math.sqrt(1 + c) - 1) / c / s) for _ in range(workers)]
    xs[2][1000] = 1.0
    truth = torch.stack(xs).double().mean(0)
    totals = torch.stack([(y.double() - truth).square().sum() for y in decoded_means(codec, xs)])
    second_moment = sum(float(x.double().square().sum()) for x in xs)
    bound = codec.variance_bound(SIZE * COPIES, workers)
    assert bound is not None
    wanted = bound / workers * second_moment
    spread = Z * float(totals.std() / math.sqrt(STEPS))
    assert abs(float(totals.mean()) - wanted) <= spread and spread < 0.05 * wanted


# --- the distribution of dqsg's error ------------------------------------------------------

MANY = 1 << 16


def errors(codec: lc.Codec, x: Tensor, key: lc.Key) -> np.ndarray:
    """Decode minus truth, in units of the step of one scale for all."""
    step = float(x.double().abs().max()) / codec.levels  # pyright: ignore
    y = codec.decode(codec.encode(x, key))
    return ((y.double() - x.double()) / step).numpy()


def dependence(codec: lc.Codec, x: Tensor) -> float:
    """p-value: errors in 8 cells do not depend on where in its level x lies, nor on its size."""
    step = float(x.double().abs().max()) / codec.levels  # pyright: ignore
    error = errors(codec, x, lc.Key(step=3))
    cell = np.clip((error + 0.5) * 8, 0, 7).astype(int)
    place = x.double().numpy() / step
    worst = 1.0
    for feature in ((place % 1) * 8, np.abs(place) / np.abs(place).max() * 8):
        row = np.clip(feature, 0, 7).astype(int)
        table = np.bincount(row * 8 + cell, minlength=64).reshape(8, 8)
        table = table[table.sum(1) >= 80]  # ten expected in every cell
        wanted = table.sum(1, keepdims=True) / 8
        chi = float(((table - wanted) ** 2 / wanted).sum())
        worst = min(worst, float(stats.chi2.sf(chi, 7 * len(table))))
    return worst


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_dqsgs_error_is_uniform(bits: int, name: str) -> None:
    """Kolmogorov-Smirnov on 65,536 errors; false alarm 1e-6."""
    error = errors(lc.DQSG(bits=bits, block=None), INPUTS[name](MANY), lc.Key(step=1))
    assert np.abs(error).max() <= 0.5 + 1e-4
    assert stats.kstest(error, stats.uniform(-0.5, 1).cdf).pvalue > ALARM


@pytest.mark.parametrize("name", ["gaussian", "student-t3", "90%-zero"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_dqsgs_error_does_not_depend_on_the_value(bits: int, name: str) -> None:
    """65,536 errors, chi-square against two features of x; false alarm 1e-6 each."""
    x = INPUTS[name](MANY)
    assert dependence(lc.DQSG(bits=bits, block=None), x) > ALARM


def test_qsgds_error_depends_on_the_value() -> None:
    """So the test above has teeth: the same rounding without subtraction fails it at once."""
    assert dependence(lc.QSGD(bits=4, block=None), gaussian(MANY)) < 1e-100


# --- ranks, and phases ---------------------------------------------------------------------

NOISY = ["qsgd", "dqsg", "global", "global-exp", "ndqsg"]


def error_of(name: str, x: Tensor, key: lc.Key) -> Tensor:
    codec = lc.codec(name)
    return decode(codec, codec.encode(x, key), x).double() - x.double()


def correlation(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt())


@pytest.mark.parametrize("field", ["rank", "step", "tensor", "phase", "seed"])
@pytest.mark.parametrize("name", NOISY)
def test_errors_under_different_keys_are_uncorrelated(name: str, field: str) -> None:
    """65,536 pairs of errors on equal gradients; false alarm 1e-6."""
    x = gaussian(MANY)
    a, b = (error_of(name, x, lc.Key(**{field: value})) for value in (0, 1))
    # products of errors have unequal weights: their own spread, not 1/√n
    limit = Z * float((a * b).square().sum().sqrt() / (a.square().sum() * b.square().sum()).sqrt())
    assert abs(correlation(a, b)) < limit < 0.1


@pytest.mark.parametrize("name", NOISY)
def test_errors_average_away_over_ranks_and_not_under_equal_keys(name: str) -> None:
    """4 workers, equal gradients: a quarter of the error; with one key for all, all of it.

    65,536 coordinates put the ratio within 5% (false alarm below 1e-6).
    """
    x = gaussian(MANY)
    alone = error_of(name, x, lc.Key()).square().sum()
    mean = torch.stack([error_of(name, x, lc.Key(rank=rank)) for rank in range(4)]).mean(0)
    assert float(mean.square().sum() / alone) == pytest.approx(1 / 4, rel=0.05)
    alike = torch.stack([error_of(name, x, lc.Key(rank=0)) for _ in range(4)]).mean(0)
    assert float(alike.square().sum() / alone) == pytest.approx(1, rel=1e-6)


# --- global-exp: reduce --------------------------------------------------------------------


def reduce_codes(a: Tensor, b: Tensor, bits: int, key: lc.Key) -> Tensor:
    """exponential_reduce on unpacked codes, in whole groups."""
    x, y = (pack(codes.view(-1, 128), bits).view(-1) for codes in (a, b))
    out = torch.empty_like(x)
    backend(CPU).exponential_reduce(x, y, out, stream=key.stream(), bits=bits)
    return unpack(out.view(-1, 16 * bits), bits).view(-1)


def test_every_pair_of_4_bit_codes_is_added_without_bias() -> None:
    """All 15 × 15 pairs, 4,096 coins each, against the exact probabilities; false alarm 1e-6.

    Unbiased pairs with fresh coins make any tree unbiased.
    """
    bits, top, coins = 4, 7, 4096
    codes = [c for c in range(16) if c != 8]  # a negative zero is never written
    pairs = [(a, b) for a in codes for b in codes]
    a, b = (torch.tensor(side).repeat_interleave(coins) for side in zip(*pairs, strict=True))
    result = reduce_codes(a, b, bits, lc.Key(phase=1)).view(len(pairs), coins)
    for (first, second), got in zip(pairs, result.numpy(), strict=True):
        large, little = sorted((first, second), key=lambda c: c & top, reverse=True)
        high, low = large & top, little & top
        sign = large & 8
        if high == top:
            assert (got & top == top).all()  # not a number stays so
            continue
        if low == 0:
            assert (got == (sign | high if high else 0)).all()
            continue
        opposite = (large ^ little) & 8
        if opposite and high == low:
            assert (got == 0).all()
            continue
        total = 2.0**high + (-(2.0**low) if opposite else 2.0**low)
        below, above = (high - 1, high) if opposite else (high, high + 1)
        share = (total - 2.0**below) / (2.0**above - 2.0**below)  # of `above`
        assert np.isin(got, [sign | below, sign | above]).all(), (first, second)
        ups = int((got == sign | above).sum())
        p = stats.binomtest(ups, coins, share).pvalue
        assert p > ALARM / len(pairs), (first, second, ups, share)


def test_distant_exponents_move_with_the_right_probability() -> None:
    """8-bit codes up to 40 exponents apart, 2^18 coins each; false alarm 1e-6."""
    coins, gaps = 1 << 18, [0, 1, 2, 5, 9, 13, 31, 32, 33, 40]
    high = 100
    low = torch.tensor([high - gap for gap in gaps]).repeat_interleave(coins)
    for sign in (0, 128):
        result = reduce_codes(torch.full_like(low, high), low | sign, 8, lc.Key(phase=2))
        for gap, got in zip(gaps, result.view(-1, coins), strict=True):
            moves = int((got != high).sum())
            share = min(1.0, 2.0 ** (1 - gap)) if sign else 2.0**-gap
            assert stats.binomtest(moves, coins, share).pvalue > ALARM / 2 / len(gaps), gap


def reduce_tree(codec: lc.GlobalExp, wires: list[lc.Wire], step: int) -> lc.Wire:
    """Neighbours in pairs, level by level; an odd one waits."""
    hop = 0
    while len(wires) > 1:
        paired = []
        for a, b in zip(wires[::2], wires[1::2], strict=False):
            hop += 1
            paired.append(codec.reduce(a, b, lc.Key(step=step, rank=hop, phase=1)))
        wires = paired + (wires[-1:] if len(wires) % 2 else [])
    return wires[0]


def reduce_chain(codec: lc.GlobalExp, wires: list[lc.Wire], step: int) -> lc.Wire:
    total = wires[0]
    for hop, wire in enumerate(wires[1:]):
        total = codec.reduce(total, wire, lc.Key(step=step, rank=hop, phase=1))
    return total


@pytest.mark.parametrize("make", [gaussian, student_t3, mostly_zero])
@pytest.mark.parametrize("n", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_sums_of_exponents_are_unbiased(shape: str, n: int, make) -> None:
    """160 draws of 1,024 coordinates; t-tests of three projections, false alarm 1e-6 each.

    A chain climbs an exponent at every hop at worst, so it gets headroom for 2^(n-1) workers.
    """
    codec = lc.GlobalExp(bits=8)
    xs = [make(1024, seed=rank) for rank in range(n)]
    mean = torch.stack(xs).double().mean(0)
    norm = codec.global_norm(torch.cat([codec.local_norm(x) for x in xs]))
    reduce, workers = (reduce_tree, n) if shape == "tree" else (reduce_chain, 2 ** (n - 1))
    misses = []
    for step in range(160):
        wires = [
            codec.encode(x, lc.Key(step=step, rank=rank), norm=norm, workers=workers)
            for rank, x in enumerate(xs)
        ]
        misses.append(codec.decode(reduce(codec, wires, step), weight=1 / n).double() - mean)
    error = torch.stack(misses)
    assert error.isfinite().all()
    for weights in (mean, mean.sign(), torch.ones(1024).double()):
        along = error @ weights
        t = float(along.mean() / along.std()) * math.sqrt(160)
        assert abs(t) < stats.t.isf(ALARM / 2, 159)
    # a gain of 0.95 would show: the test is finer than that
    assert float((error @ mean).std()) / math.sqrt(160) * Z < 0.05 * float(mean.square().sum())


@pytest.mark.parametrize("n", [4, 16])
def test_error_of_a_tree_is_within_the_papers_bound(n: int) -> None:
    """(9/8)^(log2 n + 1) - 1 for independent Gaussian gradients; measured 0.24 and 0.42."""
    codec = lc.GlobalExp(bits=8)
    xs = [gaussian(1 << 14, seed=rank) for rank in range(n)]
    mean = torch.stack(xs).double().mean(0)
    norm = codec.global_norm(torch.cat([codec.local_norm(x) for x in xs]))
    wires = [codec.encode(x, lc.Key(rank=r), norm=norm, workers=n) for r, x in enumerate(xs)]
    error = codec.decode(reduce_tree(codec, wires, 0), weight=1 / n).double() - mean
    nmse = float(error.square().sum() / mean.square().sum())
    assert nmse < (9 / 8) ** (math.log2(n) + 1) - 1
    assert nmse == pytest.approx({4: 0.24, 16: 0.42}[n], rel=0.1)


@pytest.mark.parametrize(("bits", "most"), [(8, 64), (5, 64), (4, 32), (3, 2)])
def test_trees_never_overflow(bits: int, most: int) -> None:
    """All workers at ±max, every number of workers up to `most`: powers of two are exact."""
    codec = lc.GlobalExp(bits=bits)
    x = torch.tensor([1.0, -1.0] * 64)
    for n in range(1, most + 1):
        wires = [codec.encode(x, lc.Key(rank=r), norm=1.0, workers=n) for r in range(n)]
        total = codec.decode(reduce_tree(codec, wires, n))
        assert total.isfinite().all()
        assert (total.abs() <= 2 ** (n - 1).bit_length()).all()
        if n & (n - 1) == 0:
            assert torch.equal(total, n * x)


def test_a_chain_without_headroom_overflows_to_nan_and_never_to_a_number() -> None:
    """8 values of max 1 in a chain with headroom for 2: above 2 there is only "not a number"."""
    codec = lc.GlobalExp(bits=4)
    wires = [codec.encode(torch.ones(1024), lc.Key(rank=r), norm=1.0, workers=2) for r in range(8)]
    total = codec.decode(reduce_chain(codec, wires, 0))
    assert total.isnan().any()
    assert (total[total.isfinite()] <= 2).all()


# --- ndqsg ---------------------------------------------------------------------------------

NESTED = [(3, 3, None), (3, 3, 512), (10, 5, None), (63, 125, 100), (1, 9, 64), (63, 3, None)]


def fine_step(g: Tensor, levels: int, block: int | None) -> Tensor:
    size = block or g.numel()
    steps = [part.abs().max().expand(part.numel()) / levels for part in g.split(size)]
    return torch.cat(steps)


@pytest.mark.parametrize(("levels", "ratio", "block"), NESTED)
def test_ndqsg_is_dqsg_at_the_fine_step_while_side_information_is_near(
    levels: int, ratio: int, block: int | None
) -> None:
    """|g - y| up to (ρ-1)/2 fine steps: |g - y + e| < D2/2 whatever e is. Bit for bit."""
    nested = lc.NDQSG(levels=levels, ratio=ratio, block=block)
    fine = lc.DQSG(levels=levels, block=block)
    for seed, make in enumerate((gaussian, student_t3, mostly_zero)):
        g = make(5000)
        reach = (ratio - 1) / 2 * fine_step(g, levels, block) * (1 - 1e-3)
        noise = torch.empty(5000).uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))
        for side in (g + reach * noise, g + reach, g - reach, g):
            key = lc.Key(step=seed)
            failed = torch.full((nested.checks(5000),), 9, dtype=torch.uint8)
            y = nested.decode(nested.encode(g, key), side=side, failed=failed)
            # + 0 because a block of zeros decodes to zeros of either sign
            assert_same_bits(y + 0, fine.decode(fine.encode(g, key)) + 0)
            assert not failed.any()


def wrong_cells(codec: lc.NDQSG, g: Tensor, side: Tensor, key: lc.Key) -> Tensor:
    """By how many coarse cells each decoded value is off."""
    fine = lc.DQSG(levels=codec.levels, block=codec.block)
    right = fine.decode(fine.encode(g, key)).double()
    got = codec.decode(codec.encode(g, key), side=side).double()
    coarse = fine_step(g, codec.levels, codec.block).double() * codec.ratio
    off = (got - right) / coarse
    assert (off - off.round()).abs().max() < 1e-3  # a failure costs a multiple of D2
    return off.round()


@pytest.mark.parametrize("ratio", [3, 5])
@pytest.mark.parametrize("beyond", [-0.6, -0.4, -0.1, 0.0, 0.1, 0.4, 0.6])
def test_cells_fail_as_often_as_the_fine_error_reaches_over_the_edge(
    ratio: int, beyond: float
) -> None:
    """y = g ± δ·D1 fails with probability δ + ½ - ρ/2. 65,536 cells, false alarm 1e-6."""
    codec = lc.NDQSG(levels=3, ratio=ratio)
    g = gaussian(MANY)
    step = fine_step(g, 3, None)
    for sign in (1, -1):
        off = wrong_cells(codec, g, g + sign * (ratio / 2 + beyond) * step, lc.Key(step=1))
        chance = min(1.0, max(0.0, beyond + 0.5))
        assert set(off.unique().tolist()) <= {0.0, float(sign)}
        count = int((off != 0).sum())
        if chance in (0.0, 1.0):
            assert count == chance * MANY
        else:
            assert stats.binomtest(count, MANY, chance).pvalue > ALARM


def test_cells_fail_as_predicted_under_gaussian_side_information() -> None:
    """The rate a planner would predict from the distance of y. 65,536 cells, false alarm 1e-6."""
    codec = lc.NDQSG()
    g = gaussian(MANY)
    for spread in (0.5, 1.0, 2.0):
        delta = gaussian(MANY, seed=77) * spread
        off = wrong_cells(codec, g, g + delta * fine_step(g, 3, None), lc.Key(step=2))
        # a distance may also lie whole coarse cells away: e shifts it by at most one
        chance = (delta.double().abs() + 0.5 - 1.5).clamp(0, 1)
        spread_of_count = float((chance * (1 - chance)).sum().sqrt())
        assert abs(float((off != 0).sum() - chance.sum())) < Z * spread_of_count + 1


def side_with_wrong_cells(g: Tensor, step: Tensor, ratio: int, places: Tensor) -> Tensor:
    """g, but one coarse cell away at `places` (up or down): these must fail, others cannot.

    Inwards near the end of the range: side information beyond 64 steps is cut, which helps it.
    """
    side = g.clone()
    sign = torch.where(torch.arange(places.numel()) % 3 == 0, -1.0, 1.0)
    away = g[places] / step[places] + sign * ratio
    sign = torch.where(away.abs() > 63, -sign, sign)
    side[places] += sign * ratio * step[places]
    return side


def flags(codec: lc.NDQSG, g: Tensor, side: Tensor, key: lc.Key) -> Tensor:
    failed = torch.full((codec.checks(g.numel()),), 9, dtype=torch.uint8)
    codec.decode(codec.encode(g, key), side=side, failed=failed)
    return failed


@pytest.mark.parametrize(
    ("levels", "ratio", "block"),
    [(3, 3, None), (3, 3, 512), (63, 25, 100), (1, 9, 64), (63, 3, None)],
)
def test_failed_marks_exactly_the_blocks_with_one_wrong_cell(
    levels: int, ratio: int, block: int | None
) -> None:
    """400 check blocks of 512, every second with one wrong cell, at every place in turn."""
    codec = lc.NDQSG(levels=levels, ratio=ratio, block=block)
    g = gaussian(400 * 512 - 100)
    g = g.clamp(-2, 2)  # one value must not make the step so large that all others are zeros
    step = fine_step(g, levels, block)
    for shift in (0, 101, 411):
        places = torch.arange(0, 399, 2) * 512 + (torch.arange(0, 399, 2) + shift) % 512
        side = side_with_wrong_cells(g, step, ratio, places)
        wrong = wrong_cells(codec, g, side, lc.Key()).nonzero().flatten()
        assert set(wrong.tolist()) == set(places.tolist())
        failed = flags(codec, g, side, lc.Key())
        assert failed[::2].tolist() == [1] * 200 and not failed[1::2].any()


@pytest.mark.parametrize("cells", [2, 3, 4, 7])
def test_blocks_with_several_wrong_cells_are_rarely_missed(cells: int) -> None:
    """4,000 check blocks; false alarm 1e-6. An odd number is never missed, an even one 1/128."""
    codec, count = lc.NDQSG(), 4000
    g = gaussian(count * 512).clamp(-2, 2)
    rng = np.random.default_rng(cells)
    inside = np.stack([rng.choice(512, cells, replace=False) for _ in range(count)])
    places = torch.from_numpy((np.arange(count)[:, None] * 512 + inside).ravel())
    side = side_with_wrong_cells(g, fine_step(g, 3, None), 3, places)
    missed = int((flags(codec, g, side, lc.Key(step=cells)) == 0).sum())
    if cells % 2:
        assert missed == 0
    else:
        assert stats.binomtest(missed, count, 1 / 128).pvalue > ALARM


@pytest.mark.parametrize("alpha", [0.3, 0.75, 0.99, 1.0])
@pytest.mark.parametrize("ratio", [3, 7])
def test_ndqsg_computes_its_formula(alpha: float, ratio: int) -> None:
    """ĝ = y + α·(w - D2·round(w/D2)) in float64, right and wrong cells alike."""
    codec, key = lc.NDQSG(levels=5, ratio=ratio, alpha=alpha), lc.Key(step=9)
    g = gaussian(4096)
    side = g + gaussian(4096, seed=8)
    u = dither(key.stream(), 32, 16, CPU).view(-1).double()
    u = (u + 0.5) / 2**16 - 0.5
    x, y = g.double(), side.double()
    d1 = x.abs().max() / 5
    place = alpha * x / d1 + u
    r = place.round()
    q = r - ratio * (r / ratio).round()
    w = (q - u) * d1 - alpha * y
    cells = w / (ratio * d1)
    wanted = y + alpha * (w - ratio * d1 * cells.round())
    got = codec.decode(codec.encode(g, key), side=side).double()
    # near a tie, fixed point and float64 may round to different sides
    clear = ((place % 1 - 0.5).abs() > 1e-4) & ((cells % 1 - 0.5).abs() > 1e-4)
    assert clear.double().mean() > 0.99
    torch.testing.assert_close(got[clear], wanted[clear], rtol=1e-4, atol=1e-4)


# --- qsgd-topk -----------------------------------------------------------------------------


def check_topk(v: Tensor) -> int:
    """All documented properties; returns k."""
    codec = lc.QSGDTopK()
    q = codec.decode(codec.encode(v, lc.Key()))
    x = v.double()
    norm = float(torch.linalg.vector_norm(x))
    kept = q.nonzero().flatten()
    k = kept.numel()
    size = x.abs().numpy()
    order = np.argsort(-size, kind="stable")  # ties by index
    assert set(kept.tolist()) == set(order[:k].tolist())
    # signs, and one magnitude
    np.testing.assert_allclose(q[kept].double(), x[kept].sign() * norm, rtol=2.0**-22)
    # k is the smallest that reaches the norm (which is rounded to fp32)
    sums = np.concatenate([[0.0], np.cumsum(size[order])])
    assert sums[k] >= norm * (1 - 2.0**-22)
    assert k == 0 or sums[k - 1] < norm * (1 + 2.0**-22)
    assert k <= math.isqrt(max(v.numel() - 1, 0)) + 1
    assert float(x @ q.double()) >= norm**2 * (1 - 2.0**-21)
    return k


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1000, 4096, 4097])
def test_topk_on_random_vectors(size: int) -> None:
    for seed in range(5):
        for make in (gaussian, student_t3, mostly_zero):
            check_topk(make(size, seed=seed))


@pytest.mark.parametrize("k", [1, 2, 3, 10, 31, 64])
def test_topk_on_adversarial_vectors(k: int) -> None:
    """Equal values need the most entries: exactly k of k² values, k + 1 of one more."""
    assert check_topk(torch.full((k * k,), 0.3)) == k
    if k > 1:
        assert check_topk(torch.full((k * k + 1,), 0.3)) == k + 1
        assert check_topk(torch.full((k * k - 1,), 0.3)) == k
    d = torch.arange(1, k * k + 1)
    for power in (0.25, 0.5, 1.0, 2.0):
        check_topk(d.pow(-power) * torch.where(d % 2 == 0, -1.0, 1.0))
    spike = torch.full((k * k,), 1e-3)
    spike[k // 2] = -1.0
    check_topk(spike)


def test_topk_breaks_ties_by_index() -> None:
    """Nine equal magnitudes: the norm is three of them, and the first three are sent."""
    v = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0])
    q = lc.QSGDTopK().decode(lc.QSGDTopK().encode(v, lc.Key()))
    assert q.tolist() == [3.0, -3.0, 3.0, 0, 0, 0, 0, 0, 0]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=150))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_topk_on_small_integers(values: list[int]) -> None:
    """Ties everywhere, zeros, and sums that equal the norm exactly."""
    check_topk(torch.tensor(values, dtype=torch.float32))
