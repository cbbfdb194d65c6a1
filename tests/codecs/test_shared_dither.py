"""global with subtract=true: n workers share a scale and a draw; n dithers are taken off."""

from __future__ import annotations

import math
from collections import Counter
from importlib import import_module

import pytest
import torch
from helpers import DTYPES, assert_same_bits, device_of, gaussian, mostly_zero
from torch import Tensor

import laconic as lc
from laconic.codecs._shared import stratum
from laconic.kernels import Dither, Lattice, Output, using
from laconic.kernels._layout import dither_centre, fraction_bits

WIDTHS = (4, 8, 32)


def keys_of(workers: int, step: int = 0) -> list[lc.Key]:
    return [lc.Key(seed=3, step=step, tensor=5, rank=rank) for rank in range(workers)]


def added(codec: lc.Global, xs: list[Tensor], norm: Tensor | float, step: int = 0) -> Tensor:
    """The sum of payloads, as a collective adds them."""
    total = None
    for x, key in zip(xs, keys_of(len(xs), step), strict=True):
        part = codec.encode(x, key, norm=norm, workers=len(xs)).payload
        total = part.clone() if total is None else total.add_(part)
    assert total is not None
    return total


def mean_of(codec: lc.Global, xs: list[Tensor], norm: Tensor | float, step: int = 0) -> Tensor:
    total = added(codec, xs, norm, step)
    return codec.decode_sum(total, keys_of(len(xs), step), norm=norm, shape=xs[0].shape)


def shared_norm(codec: lc.Global, xs: list[Tensor]) -> Tensor:
    return codec.global_norm(torch.cat([codec.local_norm(x) for x in xs]))


# --- the arithmetic --------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [7, 15, 16])
def test_the_dithers_of_all_strata_add_up_to_one_draw(fraction: int) -> None:
    """Hermite's identity on the grid, for every draw, whatever n is."""
    grid = 1 << fraction
    r = torch.arange(grid)
    for n in (*range(1, 20), 63, 64, 100, 127, 1000):
        total = torch.zeros_like(r)
        for place in range(n):
            total += 2 * ((r + place * grid // n) % grid) + 1 - grid
        assert torch.equal(total, 2 * (n * r % grid) - dither_centre(n, fraction)), n


def test_every_rank_gets_a_stratum_of_its_own_in_an_order_dealt_by_the_key() -> None:
    orders = Counter()
    for step in range(600):
        found = [stratum(key, 3, 42) for key in keys_of(3, step)]
        assert {draw.key for draw in found} == {lc.Key(seed=3, step=step, tensor=5, rank=3)}
        assert sorted(draw.shift for draw in found) == [0, (1 << 16) // 3, (2 << 16) // 3]
        orders[tuple(draw.shift for draw in found)] += 1
    # six orders, 100 each but for 5 standard deviations of a binomial count
    assert len(orders) == 6 and all(abs(count - 100) < 46 for count in orders.values())


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_decoded_sum_is_the_mean_of_decoded_wires(bits: int, backend: str) -> None:
    codec, device = lc.Global(bits=bits, subtract=True), device_of(backend)
    for workers, count in ((1, 129), (2, 1), (3, 1000), (5, 128), (7, 300)):
        xs = [gaussian(count, seed=rank).to(device) for rank in range(workers)]
        norm, keys = shared_norm(codec, xs), keys_of(workers)
        wires = [
            codec.encode(x, k, norm=norm, workers=workers) for x, k in zip(xs, keys, strict=True)
        ]
        wanted = torch.stack([codec.decode(wire) for wire in wires]).mean(0)
        mean = mean_of(codec, xs, norm)
        torch.testing.assert_close(mean, wanted, rtol=0, atol=float(norm) * 2.0**-20)
        # the error of every wire, and so of their mean, is at most half a level
        half = float(norm) / codec.levels_for(workers) / 2 + float(norm) * 2.0**-20
        for x, wire in zip(xs, wires, strict=True):
            assert float((codec.decode(wire) - x).abs().max()) <= half
        assert float((mean - torch.stack(xs).mean(0)).abs().max()) <= half


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", WIDTHS)
def test_all_backends_make_the_same_bits(bits: int, dtype: torch.dtype, backend: str) -> None:
    codec, device = lc.Global(bits=bits, subtract=True), device_of(backend)
    for workers, count in ((1, 0), (2, 1), (3, 1153), (4, 64), (7, 2049)):
        xs = [gaussian(count, seed=rank).to(dtype) for rank in range(workers)]
        keys, start, results = keys_of(workers), gaussian(count, seed=9), []
        with using("reference"):
            norm = shared_norm(codec, xs)
        for name, place in (("reference", torch.device("cpu")), (backend, device)):
            with using(name):
                wires = [
                    codec.encode(x.to(place), key, norm=norm.to(place), workers=workers)
                    for x, key in zip(xs, keys, strict=True)
                ]
                total = wires[0].payload.clone()
                for wire in wires[1:]:
                    total += wire.payload
                out = start.to(place, dtype, copy=True)
                options = {"norm": norm.to(place), "out": out, "add": True, "weight": 0.7}
                codec.decode_sum(total, keys, **options)
                plain = codec.decode_sum(total, keys, norm=norm.to(place), shape=(count,))
                results.append([*(w.data for w in wires), codec.decode(wires[-1]), plain, out])
        for got, want in zip(results[1], results[0], strict=True):
            assert_same_bits(got, want, (workers, count))


def test_sums_of_very_many_workers_decode_to_the_same_bits(backend: str) -> None:
    """A sum of codes, in 2^-(F+1) of a level, needs more than 32 bits; so may workers·r."""
    device = device_of(backend)
    q = torch.randint(-(2**31), 2**31, (1000,), generator=torch.Generator().manual_seed(0))
    for workers in (1000, 70_001, 1 << 20, (1 << 25) + 65_535):
        levels = lc.Global(bits=32).levels_for(workers)
        dither = Dither(lc.Key().stream(), workers=workers)
        results = []
        for name, place in (("reference", torch.device("cpu")), (backend, device)):
            out = torch.empty(1000, device=place)
            import_module(f"laconic.kernels._{name}").dequantize(
                q.to(place, torch.int32),
                torch.ones(1, device=place),
                Output(out, 1 / workers),
                Lattice(0, levels, 32),
                dither=dither,
                offset=0,
            )
            results.append(out)
        assert_same_bits(results[1], results[0], workers)


# --- bias and variance -----------------------------------------------------------------------


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_the_mean_is_unbiased(bits: int, workers: int) -> None:
    """200 keys; the limits are five standard deviations of what they bound."""
    codec, steps, count = lc.Global(bits=bits, subtract=True), 200, 2000
    xs = [gaussian(count, seed=7 + rank) for rank in range(workers)]
    norm, exact = shared_norm(codec, xs), torch.stack(xs).double().mean(0)
    level = float(norm) / codec.levels_for(workers)
    error = torch.zeros(count, dtype=torch.float64)
    for step in range(steps):
        error += mean_of(codec, xs, norm, step).double() - exact
    error /= steps
    # values are rounded to 2^-F of a level before they are dithered
    grid = level * 2.0 ** -(fraction_bits(codec.levels_for(workers)) + 1)
    worst = math.sqrt(codec_variance(workers) * level**2 / steps)
    assert float(error.abs().max()) <= 5 * worst + grid
    assert abs(float(error.mean())) <= 5 * worst / math.sqrt(count) + grid


def codec_variance(workers: int) -> float:
    """The bound of docs/codecs.md, in squared levels."""
    return min(workers, 1 + 1 / workers + 1 / (workers - 1)) / (12 * workers)


def variance(workers: int, xs: list[Tensor], steps: int, bits: int = 8) -> float:
    """Measured, as a multiple of Δ²/(12n)."""
    codec = lc.Global(bits=bits, subtract=True)
    norm, exact = shared_norm(codec, xs), torch.stack(xs).double().mean(0)
    unit = (float(norm) / codec.levels_for(workers)) ** 2 / (12 * workers)
    errors = [
        (mean_of(codec, xs, norm, step).double() - exact).square().mean() for step in range(steps)
    ]
    return float(torch.stack(errors).mean()) / unit


@pytest.mark.parametrize("workers", [2, 3, 4, 7, 8, 16])
def test_independent_gradients_have_the_variance_of_independent_dithers(workers: int) -> None:
    own = [gaussian(40_000, seed=rank) for rank in range(workers)]
    assert variance(workers, own, 4) == pytest.approx(1, rel=0.02)
    common = gaussian(40_000, seed=99)
    assert variance(workers, [x + common for x in own], 4) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("workers", [2, 3, 4, 7, 8, 16])
def test_equal_gradients_have_the_variance_of_a_step_n_times_finer(workers: int) -> None:
    x = gaussian(40_000)
    assert variance(workers, [x] * workers, 4) == pytest.approx(1 / workers, rel=0.02)
    zeros = torch.zeros(40_000)
    zeros[0] = 1.0
    assert variance(workers, [zeros] * workers, 4) == pytest.approx(1 / workers, rel=0.02)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_the_worst_gradients_stay_within_the_bound(workers: int) -> None:
    """x_i = -i·Δ/n undoes strata that stand in order of ranks: all errors are then equal.

    In an order dealt anew by every key it does not, but for two workers, who have one order.
    """
    levels = lc.Global().levels_for(workers)
    xs = []
    for rank in range(workers):
        x = torch.full((2000,), ((0.5 - rank / workers) % 1 - 0.5) / levels)
        x[0] = 1.0
        xs.append(x)
    limit = 12 * workers * codec_variance(workers)
    found = variance(workers, xs, 300)
    assert found <= limit * 1.1
    assert found >= (1.9 if workers == 2 else 1.0)


def test_the_bound_on_the_relative_variance_holds() -> None:
    for spec in (
        "global:subtract=true",
        "global:subtract=true,norm=l2",
        "global:subtract=true,norm=1.5/1",
    ):
        codec = lc.codec(spec)
        assert isinstance(codec, lc.Global)
        for workers in (1, 3, 5):
            for make in (gaussian, mostly_zero):
                xs = [make(500, seed=rank) for rank in range(workers)]
                norm, exact = shared_norm(codec, xs), torch.stack(xs).mean(0)
                errors = [(mean_of(codec, xs, norm, k) - exact).square().sum() for k in range(40)]
                theta = codec.variance_bound(500, workers=workers)
                assert theta is not None
                size = sum(float(x.square().sum()) for x in xs) / workers
                # one worker with a two-norm attains it: five deviations of 40 samples of 500
                assert float(torch.stack(errors).mean()) <= theta * size * 1.04
    lone = torch.zeros(500)
    lone[3] = 2.0
    codec = lc.Global(subtract=True)
    got = variance(1, [lone], 200) * (2 / 127) ** 2 / 12 * 500 / 4
    assert got == pytest.approx(codec.variance_bound(500), rel=0.05)


# --- edges -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "most"), [(4, 7), (8, 127), (32, 300)])
def test_sums_never_wrap(bits: int, most: int) -> None:
    """All workers at ±max: every code is exactly ±s, and the mean is within half a level."""
    codec = lc.Global(bits=bits, subtract=True)
    x = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 0.0] * 40) * 3.7
    for workers in {1, 2, 3, 4, 5, most // 2, most - 1, most}:
        levels = codec.levels_for(workers)
        total = added(codec, [x] * workers, 3.7)
        if bits != 4:
            assert torch.equal(total[:240].long(), (x / 3.7).round().long() * workers * levels)
        mean = codec.decode_sum(total, keys_of(workers), norm=3.7, shape=x.shape)
        limit = 3.7 / levels / 2 / workers * 1.001 + 1e-5
        assert float((mean - x).abs().max()) <= limit, workers


@pytest.mark.parametrize("bits", WIDTHS)
def test_what_is_not_finite_and_what_is_zero(bits: int, backend: str) -> None:
    codec, device = lc.Global(bits=bits, subtract=True), device_of(backend)
    xs = [gaussian(200, seed=rank).to(device) for rank in range(3)]
    for bad in (math.nan, math.inf):
        xs[1][77] = bad
        norm = shared_norm(codec, xs)
        assert not mean_of(codec, xs, norm).isfinite().any()
        wire = codec.encode(xs[1], lc.Key(rank=1), norm=norm, workers=3)
        assert not codec.decode(wire).isfinite().any()
    xs[1][77] = 100.0  # above the scale: no code
    wire = codec.encode(xs[1], lc.Key(rank=1), norm=5.0, workers=3)
    assert not codec.decode(wire).isfinite().any()
    zeros = [torch.zeros(200, device=device)] * 3
    assert not mean_of(codec, zeros, shared_norm(codec, zeros)).any()


def test_one_worker_is_dqsg_with_one_scale() -> None:
    x, key = gaussian(1000), lc.Key(seed=1, rank=6)
    for codec, other in (
        (lc.Global(subtract=True), "dqsg:bits=8,block=tensor"),
        (lc.Global(subtract=True, coder="rans"), "dqsg:bits=8,block=tensor,coder=rans"),
    ):
        wire, theirs = codec.encode(x, key), lc.codec(other).encode(x, key)
        assert_same_bits(wire.data[64:], theirs.data[64:])
        assert_same_bits(codec.decode(wire), lc.codec(other).decode(theirs))
        parsed = lc.Wire.parse(wire.data.clone(), key=key, shape=x.shape, dtype=x.dtype)
        assert_same_bits(codec.decode(parsed), codec.decode(wire))


def test_coded_wires_of_several_workers_have_dithers_of_their_own() -> None:
    """They are decoded one by one, and a coder models the integers by the key's own draws."""
    codec = lc.codec("global:bits=8,subtract=true,coder=bitmap")
    assert not codec.summable
    x = gaussian(4000)
    errors = [codec.decode(codec.encode(x, key, norm=5.0, workers=2)) - x for key in keys_of(2)]
    level = 5.0 / 63
    # strata of equal values have a covariance of -1/24
    assert abs(float((errors[0] * errors[1]).mean())) < 0.1 * level**2 / 12


def test_the_wire_says_that_its_dither_is_subtracted() -> None:
    x, key = gaussian(100), lc.Key(rank=1)
    plain, other = lc.Global(), lc.Global(subtract=True)
    wire = other.encode(x, key, norm=9.0, workers=2)
    parsed = lc.Wire.parse(wire.data.clone(), key=key, shape=x.shape, dtype=x.dtype)
    assert float((other.decode(parsed) - x).abs().max()) <= 9 / 63 / 2 * 1.001
    for reader, written in ((plain, parsed), (other, plain.encode(x, key, norm=9.0, workers=2))):
        with pytest.raises(lc.WireError, match="not written by"):
            reader.decode(written)


def test_keys_that_are_not_those_of_the_sum_are_refused() -> None:
    codec, x = lc.Global(subtract=True), gaussian(100)
    total = added(codec, [x] * 3, 9.0)
    keys = keys_of(3)
    same = codec.decode_sum(total, keys[::-1], norm=9.0)
    assert_same_bits(same, codec.decode_sum(total, keys, norm=9.0))
    for wrong in ([keys[0], keys[1], keys[1]], [*keys[:2], lc.Key(rank=2)]):
        with pytest.raises(ValueError, match="differ in rank= only, from 0 to 2"):
            codec.decode_sum(total, wrong, norm=9.0)
    with pytest.raises(ValueError, match="ranks are 0 to 2, not 3"):
        codec.encode(x, lc.Key(rank=3), norm=9.0, workers=3)


def test_the_setting_is_on_or_off() -> None:
    codec = lc.codec("global:bits=4,subtract=true")
    assert codec == lc.Global(bits=4, subtract=True) == lc.codec(str(codec))
    assert lc.codec("global:subtract=false") == lc.Global() == lc.codec(str(lc.Global()))
    for wrong in ("maybe", "1"):
        with pytest.raises(lc.ConfigError, match="subtract must be one of true, false"):
            lc.codec(f"global:subtract={wrong}")
