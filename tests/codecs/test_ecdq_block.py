"""ecdq with block=: a step, and a promise, for every run of so many values of a segment.

"False alarm" is the chance that a correct codec with ideal random numbers would fail a test.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from helpers import DTYPES, assert_same_bits, captured, device_of, gaussian, mostly_zero, student_t3
from scipy import stats
from torch import Tensor

import laconic as lc
from laconic._wire import HEADER_BYTES, Header, cut
from laconic.codecs._base import EncodeRequest
from laconic.codecs._ecdq import _check_runs
from laconic.kernels import using
from laconic.testing import check_codec

KEY = lc.Key(seed=9, tensor=4)
ERROR = 0.08
ALARM = 1e-6
SEGMENTS = (700, 9000, 1, 512, 1300)


def energy(x: Tensor) -> float:
    return float(x.double().square().sum())


def nmse(y: Tensor, x: Tensor) -> float:
    return energy(y.double() - x.double()) / energy(x)


def mixture(segments: tuple[int, ...] = SEGMENTS) -> Tensor:
    """Runs of 512 that differ by factors of up to a thousand."""
    values = student_t3(sum(segments))
    return values * 10.0 ** (torch.arange(len(values)) // 512 * 7 % 4 - 1.0)


def parsed(wire: lc.Wire, segments: tuple[int, ...] = ()) -> lc.Wire:
    """As a receiver has it."""
    what = {"key": wire.key, "shape": wire.shape, "dtype": wire.dtype}
    return lc.Wire.parse(wire.data.clone(), **what, segments=segments)


# --- the promise ---------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["{}", "rotate({}):block=1024"])
def test_a_large_run_leaves_its_neighbours_alone(spec: str) -> None:
    """Without block= they are lost: one step of the large run is many times their size.

    False alarm below 1e-9: the mean over draws of 4096 values' squares varies by half a percent.
    """
    x, size, draws = gaussian(8 * 4096), 4096, 10
    x[3 * size : 4 * size] *= 1e4
    for settings, lost in (("", True), (",block=4096", False), (",block=2048", False)):
        codec = lc.codec(spec.format(f"ecdq:error={ERROR}{settings}"))
        decoded = [codec.decode(codec.encode(x, lc.Key(step=draw))) for draw in range(draws)]
        for number, part in enumerate(x.split(size)):
            found = sum(nmse(y.split(size)[number], part) for y in decoded) / draws
            assert (found >= 1) == (lost and number != 3)  # zeros, or worse
            if not lost:
                assert 0.8 * ERROR < found < 1.05 * ERROR


def test_one_outlier_sets_the_step_of_its_run_only() -> None:
    x = gaussian(5 * 1024)
    x[2000] = 1e5
    codec = lc.ECDQ(error=ERROR, block=1024)
    steps = codec.encode(x, KEY).data[HEADER_BYTES:][: 5 * 4].view(torch.float32)
    assert steps[1] > 100 * steps[[0, 2, 3, 4]].max()


@pytest.mark.parametrize("subtract", ["auto", "always", "never"])
@pytest.mark.parametrize("block", [512, 1024, 4096])
def test_every_run_keeps_to_its_budget(block: int, subtract: str) -> None:
    """Exactly: the expected error of each, as it is known when runs are segments."""
    x, codec = mixture(), lc.ECDQ(error=ERROR, subtract=subtract, block=block)
    parts = cut(SEGMENTS, block)
    wire = codec.encode(x, KEY, segments=SEGMENTS)
    apart, spent = replace(codec, block=None), torch.zeros(len(parts), dtype=torch.float64)
    same = apart.encode(x, KEY, segments=parts, spent=spent)
    assert_same_bits(wire.data[HEADER_BYTES:], same.data[HEADER_BYTES:])
    for part, own in zip(x.split(parts), spent.tolist(), strict=True):
        assert own <= (1 + 1e-6) * ERROR * energy(part)


@pytest.mark.parametrize("spec", ["error=0.08", "step=2", "error=0.3,max_bits=2.5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_spent_is_the_mean_squared_error_of_each_segment(spec: str, dtype: torch.dtype) -> None:
    """False alarm 1e-6 for all segments together."""
    codec, draws, count = lc.codec(f"ecdq:{spec},block=512"), 300, len(SEGMENTS)
    x, spent = mixture(), torch.zeros(count, dtype=dtype)
    found = torch.zeros(draws, count, dtype=torch.float64)
    for draw in range(draws):
        y = codec.decode(codec.encode(x, lc.Key(step=draw), segments=SEGMENTS, spent=spent))
        errors = (y.double() - x.double()).split(SEGMENTS)
        found[draw] = torch.stack([error.square().sum() for error in errors])
    z = stats.norm.isf(ALARM / (2 * count))
    slack = z * found.std(0) / math.sqrt(draws) + 5e-3 * spent
    assert ((found.mean(0) - spent.double()).abs() <= slack).all()


@pytest.mark.parametrize("subtract", ["auto", "always", "never"])
def test_the_mean_is_x(subtract: str) -> None:
    """False alarm 1e-6 for all values together, by Bernstein's inequality: no variance > Δ²/4."""
    x, draws = mixture((3000,)), 400
    codec = lc.ECDQ(error=0.3, subtract=subtract, block=1024)
    total = torch.zeros(3000, dtype=torch.float64)
    for draw in range(draws):
        total += codec.decode(codec.encode(x, lc.Key(step=draw))).double() - x.double()
    steps = codec.encode(x, KEY).data[HEADER_BYTES:][:12].view(torch.float32).double()
    delta = steps.repeat_interleave(1024)[:3000]
    log = math.log(2 * len(x) / ALARM)
    bound = delta * (math.sqrt(draws / 2 * log) + 2 / 3 * log)
    assert (total.abs() <= bound + draws * delta * 2.0**-16).all()
    assert total.norm() <= 1.2 * math.sqrt(draws * 0.3 * energy(x))  # 1.0 if all of it is noise


def test_bounds() -> None:
    assert lc.ECDQ(error=ERROR, block=4096).variance_bound(10**9) == ERROR
    tight, wide = lc.ECDQ(error=1e-8, block=4096), lc.ECDQ(error=1e-8)
    assert tight.variance_bound(10**9) == pytest.approx(4096 / (12 * 32_000**2))
    assert tight.variance_bound(1000) == wide.variance_bound(1000)
    assert lc.ECDQ(error=ERROR, block=512, max_bits=3).variance_bound(10) is None


# --- bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("coder", "subtract"), [("bitmap", "auto"), ("fixed", "never")])
def test_the_body_is_that_of_segments_cut_by_hand(backend: str, coder: str, subtract: str) -> None:
    device = device_of(backend)
    segments, shares = (700, 1100, 1), (0.25, 1.0, 3.0)
    x = mixture(segments).to(device)
    codec, parts = lc.ECDQ(coder=coder, subtract=subtract, block=512), cut(segments, 512)
    whole = [number for number, length in enumerate(segments) for _ in cut((length,), 512)]
    spent, apart = (torch.zeros(n, dtype=torch.float64, device=device) for n in (3, len(parts)))
    wire = codec.encode(x, KEY, segments=segments, shares=shares, spent=spent)
    same = replace(codec, block=None).encode(
        x, KEY, segments=parts, shares=[shares[number] for number in whole], spent=apart
    )
    assert_same_bits(wire.data[HEADER_BYTES:], same.data[HEADER_BYTES:])
    assert codec.nbytes(len(x), segments=segments) == wire.buffer.numel() == same.buffer.numel()
    assert codec.least_nbytes(len(x), segments=segments) == wire.header.nbytes < wire.nbytes
    sums = torch.zeros(3, dtype=torch.float64).index_add(0, torch.tensor(whole), apart.cpu())
    torch.testing.assert_close(spent.cpu(), sums)
    assert_same_bits(codec.decode(wire), replace(codec, block=None).decode(same))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [512, 1536, 4096, 8192, 12_288])
@pytest.mark.parametrize("count", [1, 511, 512, 513, 4097, 20_000])
def test_round_trip(count: int, block: int, dtype: torch.dtype) -> None:
    """Of lengths that runs and chunks of 8192 do not divide."""
    x, codec = student_t3(count).to(dtype), lc.ECDQ(error=ERROR, block=block)
    wire = codec.encode(x, KEY)
    assert wire.nbytes <= wire.buffer.numel() == codec.nbytes(count, dtype)
    assert wire.length().tolist() == [wire.nbytes]
    y = codec.decode(parsed(wire))
    assert_same_bits(y, codec.decode(wire))
    trusted = codec.trust(wire.data.clone(), key=KEY, shape=x.shape, dtype=dtype)
    assert_same_bits(y, codec.decode(trusted))
    assert y.dtype == dtype and (count < 500 or nmse(y, x) < 1.3 * ERROR)


@pytest.mark.parametrize("wrapper", ["{}", "rotate({})", "feedback({})", "feedback(rotate({}))"])
def test_segments_through_wrappers(wrapper: str) -> None:
    x = mixture()
    make = lambda: lc.codec(wrapper.format("ecdq:error=0.05,block=512"))  # noqa: E731
    wire = make().encode(x, KEY, segments=SEGMENTS)
    got = parsed(wire, SEGMENTS)
    assert got.nbytes == wire.nbytes <= make().nbytes(len(x), segments=SEGMENTS)
    y = make().decode(got)
    assert_same_bits(y, make().decode(wire))
    if "feedback" not in wrapper:  # whose λ is one for all
        for a, b in zip(x.split(SEGMENTS), y.split(SEGMENTS), strict=True):
            assert len(a) == 1 or nmse(b, a) < 1.3 * 0.05


def test_max_bits_is_never_exceeded() -> None:
    codec = lc.ECDQ(error=1e-4, max_bits=2.5, block=1024)
    room = codec.nbytes(9000)
    assert room <= 64 + 9 * (4 + 12) + 9216 * 2.5 / 8
    for draw in range(20):
        assert codec.encode(mixture((9000,)), lc.Key(step=draw)).nbytes <= room


def test_wires_of_another_block_are_refused() -> None:
    """Those of runs as long as the tensor have the body of no block at all."""
    x = gaussian(3000)
    for wrapper in ("{}", "rotate({})", "feedback({})"):
        specs = [wrapper.format(f"ecdq{one}") for one in ("", ":block=1024", ":block=4096")]
        for spec in specs:
            wire = parsed(lc.codec(spec).encode(x, KEY))
            for other in specs:
                if other == spec:
                    assert lc.codec(other).decode(wire).isfinite().all()
                    continue
                with pytest.raises(lc.WireError, match="was not written by"):
                    lc.codec(other).decode(wire)


def test_headers_of_impossible_runs_are_refused() -> None:
    """One value each would need a table as long as the tensor."""
    wire = lc.ECDQ(block=512).encode(gaussian(3000), KEY)
    assert Header.unpack(wire.header.pack()) == wire.header
    for run in (1, 511, 513):
        with pytest.raises(lc.WireError, match=f"runs of {run} values"):
            Header.unpack(replace(wire.header, run=run).pack())


def test_nothing_changes_without_a_block() -> None:
    assert str(lc.ECDQ()) == "ecdq:error=0.08,coder=bitmap,subtract=auto"
    assert lc.codec("ecdq:block=tensor") == lc.ECDQ() == lc.ECDQ(block=None)
    assert lc.ECDQ().encode(gaussian(3000), KEY).header.run == 0


# --- ends and edges ------------------------------------------------------------------------


def test_empty_and_zeros() -> None:
    codec = lc.ECDQ(block=512)
    spent = torch.ones(1)
    empty = codec.encode(torch.empty(0), KEY, spent=spent)
    assert codec.decode(parsed(empty)).numel() == 0 and spent == 0
    zeros = codec.encode(torch.zeros(2000), KEY, spent=spent)
    assert (codec.decode(zeros) == 0).all() and spent == 0
    assert zeros.nbytes == 64 + 4 * (4 + 12)  # a step, two table entries and a word for each run


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_reaches_its_run_only(bad: float) -> None:
    x, spent = gaussian(3000), torch.zeros(2)
    x[1500] = bad
    y = lc.ECDQ(block=512).decode(
        lc.ECDQ(block=512).encode(x, KEY, segments=[2000, 1000], spent=spent)
    )
    assert y[1024:1536].isnan().all()
    assert y[:1024].isfinite().all() and y[1536:].isfinite().all()
    assert spent[0].isnan() and spent[1] > 0


def test_runs_start_anew_in_every_segment() -> None:
    assert cut(SEGMENTS, 4096) == (700, 4096, 4096, 808, 1, 512, 1300)
    assert list(accumulate(cut(SEGMENTS, 512)))[-1] == sum(SEGMENTS)
    wire = lc.ECDQ(block=4096).encode(mixture(), KEY, segments=SEGMENTS)
    assert wire.header.parts == cut(SEGMENTS, 4096) and wire.header.segments == SEGMENTS


def test_shares_in_a_tensor_are_those_of_a_tuple() -> None:
    """On CUDA they come so; here the codec is called behind the check that turns them into one."""
    x, codec, shares = mixture(), lc.ECDQ(block=512), (0.5, 0.25, 1.0, 2.0, 0.75)
    wire = codec.encode(x, KEY, segments=SEGMENTS, shares=shares)
    again = codec.encode(x, KEY, segments=SEGMENTS)
    assert again.nbytes != wire.nbytes
    body, given = again.buffer[HEADER_BYTES:], torch.tensor(shares, dtype=torch.float64)
    with using("reference"):
        codec._encode(EncodeRequest(x, KEY, body, again.header, None, shares=given))
    assert_same_bits(replace(again).data, wire.data)


@pytest.mark.parametrize("block", [0, -512, 100, 511, 513, 4000, 1 << 32, 512.0, True, "row"])
def test_bad_blocks(block: object) -> None:
    with pytest.raises(lc.ConfigError, match=r"block must be a multiple of 512 .* to 2147483648"):
        lc.ECDQ(block=block)  # pyright: ignore[reportArgumentType]


def test_more_runs_than_draws_can_count() -> None:
    assert lc.ECDQ(block=1 << 31).nbytes(1000) > 0
    _check_runs((1 << 28,), 512)
    with pytest.raises(lc.ConfigError, match="524289 runs.*524288: take a larger block"):
        lc.ECDQ(block=512).nbytes((1 << 28) + 1)


@pytest.mark.parametrize(
    "spec",
    [
        "ecdq:error=0.08,block=4096",
        "ecdq:error=0.08,block=512",
        "ecdq:step=1,coder=rans,block=512",
        "rotate(ecdq:error=0.08,block=512)",
    ],
)
def test_texts_and_the_contract(spec: str) -> None:
    codec = lc.codec(spec)
    assert lc.codec(str(codec)) == codec
    assert lc.codec(str(codec.at_share(0.5))) == codec.at_share(0.5)
    check_codec(spec, draws=64)


# --- what only a GPU can show --------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_neither_shares_nor_spent_wait_for_the_device() -> None:
    """A captured graph cannot hold a synchronisation; replays are equal to the last bit."""
    codec, segments = lc.ECDQ(error=0.05, block=4096), (300_000, 1000, 1, 99_999)
    x = mostly_zero(sum(segments)).cuda() + 1e-3 * gaussian(sum(segments)).cuda()
    shares = torch.tensor((0.5, 1.0, 2.0, 0.25), dtype=torch.float64)
    spent, out = torch.zeros(4, device="cuda"), torch.zeros_like(x)
    device_shares = shares.cuda()

    def work() -> None:
        wire = codec.encode(x, KEY, segments=segments, shares=device_shares, spent=spent)
        codec.decode(wire, out=out)

    work()
    expected, told, graph = out.clone(), spent.clone(), captured(work)
    for _ in range(3):
        out.zero_()
        spent.zero_()
        graph.replay()
        assert_same_bits(out, expected)
        assert_same_bits(spent, told)
    host = torch.zeros(4)
    wire = codec.encode(x.cpu(), KEY, segments=segments, shares=shares, spent=host)
    torch.testing.assert_close(host, told.cpu(), rtol=1e-4, atol=0)
    torch.testing.assert_close(codec.decode(wire), expected.cpu(), rtol=1e-4, atol=1e-4)
