"""rotate(...): the same bits everywhere, orthonormal, unbiased, and small errors on heavy tails.

Keys are fixed, so a test passes always or never; where a test is statistical, it says how often
a right implementation with ideal random numbers would fail ("false alarm").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    DTYPES,
    FLT_MAX,
    assert_same_bits,
    decode,
    device_of,
    gaussian,
    kernels,
    mostly_zero,
    student_t3,
)
from scipy import integrate, linalg, special, stats
from torch import Tensor

import laconic as lc
from laconic._key import Stream
from laconic._wire import HEADER_BYTES
from laconic.codecs._linear import sections
from laconic.codecs._rotate import _signs
from laconic.kernels import Lattice, Output, Rotation, ScaleKind, using
from laconic.kernels import backend as kernels_of
from laconic.kernels._layout import blocks, packed_bytes
from laconic.kernels._reference.group import dither, draws

KEY = lc.Key(seed=3, step=5, tensor=7, rank=1)
STREAM, OTHER = KEY.stream(), lc.Key(seed=9).stream()
SIZES = (128, 256, 512, 1024, 2048, 4096)
LENGTHS = (1, 2, 3, 5, 127, 128, 129, 1000, 1023, 1024, 1025, 1500, 4095, 4097, 9999)
SPECS = (
    "rotate(none)",
    "rotate(fp16)",
    "rotate(qsgd:bits=4)",
    "rotate(qsgd:bits=3,norm=l2,block=128)",
    "rotate(qsgd:bits=4,block=100)",
    "rotate(dqsg:bits=4)",
    "rotate(dqsg:bits=8,block=2048)",
    "rotate(dqsg:bits=2,block=tensor)",
    "rotate(dqsg:bits=4,coder=bitmap)",
    "rotate(ndqsg:levels=7,ratio=15)",
    "rotate(ecdq:error=0.05)",
    "rotate(dqsg:bits=4):block=128",
    "rotate(dqsg:bits=4):block=4096",
)
FUSED = [
    f"rotate({inner}):block={size}"
    for inner, size in (
        ("dqsg:bits=4,block=512", 1024),
        ("dqsg:bits=2,block=4096", 128),
        ("qsgd:bits=8,block=128", 4096),
        ("qsgd:bits=3,norm=l2,block=1024", 512),
        ("dqsg:bits=5,block=1024", 1024),
    )
]


def pieces(length: int, size: int) -> list[int]:
    """Sizes of blocks, then of descending powers of two."""
    rest = length % size
    return [size] * (length // size) + [1 << k for k in reversed(range(12)) if rest >> k & 1]


def signs_of(length: int, unit: int = 0, stream: Stream = STREAM) -> np.ndarray:
    """±1 of every value of a segment, from the definition."""
    i = np.arange(length)
    draw = 32 * (unit + i // 1024) + i // 4 % 32
    bit = 31 - (4 * (i // 128 % 8) + i % 4)
    words = draws(stream, int(draw.max()) + 1, torch.device("cpu")).numpy()
    return 1.0 - 2.0 * ((words[draw] >> bit) & 1)


def dense(x: Tensor, size: int, unit: int = 0) -> Tensor:
    """H·D·x in double precision, by whole matrices."""
    v = x.double().numpy() * signs_of(x.numel(), unit)
    parts = np.split(v, np.cumsum(pieces(len(v), size))[:-1])
    turned = [linalg.hadamard(len(part)) @ part / math.sqrt(len(part)) for part in parts]
    return torch.from_numpy(np.concatenate(turned))


def rotated(x: Tensor, size: int, module: Any, segments: tuple[int, ...] = ()) -> Tensor:
    y = torch.full((x.numel(),), math.pi, device=x.device)
    module.rotate_into(x, y, Rotation(STREAM, size, segments))
    return y


def reference() -> ModuleType:
    module = kernels("reference")
    assert module is not None
    return module


def nmse(codec: lc.Codec | str, x: Tensor, seeds: int = 1) -> float:
    codec = lc.codec(codec)
    total = 0.0
    for seed in range(seeds):
        error = codec.decode(codec.encode(x, lc.Key(seed=seed))).double() - x.double()
        total += float(error.square().sum())
    return total / seeds / float(x.double().square().sum())


# --- the rotation itself -------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_hadamard_matrix_with_random_signs(size: int) -> None:
    for length in LENGTHS:
        x = gaussian(length, seed=length)
        y = rotated(x, size, reference())
        error = (y.double() - dense(x, size)).abs().max()
        assert error <= 1e-6 * x.norm(), (length, error)


def test_what_is_left_is_cut_into_descending_powers_of_two() -> None:
    assert pieces(1500, 1024) == [1024, 256, 128, 64, 16, 8, 4]
    x = torch.zeros(1500)
    x[1024 + 256 + 5] = 1.0  # in the piece of 128
    y = rotated(x, 1024, reference())
    assert y.nonzero().flatten().tolist() == list(range(1280, 1408))
    assert_same_bits(y[1280:1408].abs(), torch.full((128,), float(np.float32(128**-0.5))))


def test_segments_are_turned_one_by_one_with_draws_of_their_own() -> None:
    lengths, unit = (1, 2500, 1024, 130, 7), 0
    x = gaussian(sum(lengths))
    y = rotated(x, 1024, reference(), segments=lengths)
    for part, turned in zip(x.split(lengths), y.split(lengths), strict=True):
        want = dense(part, 1024, unit)
        assert (turned.double() - want).abs().max() <= 1e-6 * part.norm()
        unit += -(-part.numel() // 1024)


@pytest.fixture(params=["numba", "triton"])
def fast(request: pytest.FixtureRequest) -> Iterator[tuple[ModuleType, torch.device, bool]]:
    """Kernels, where their tensors live, and whether every call is slow."""
    module, device = kernels(request.param), device_of(request.param)
    if module is None:
        pytest.skip(f"the {request.param} kernels cannot be loaded here")
    with np.errstate(all="ignore"):  # Triton's interpreter warns where a GPU is silent
        yield module, device, request.param == "triton" and device.type == "cpu"


def rough(length: int, dtype: torch.dtype) -> Tensor:
    """Tame, huge, tiny, zero and bad values, some of each in different blocks."""
    x = gaussian(length, seed=length)
    for i, part in enumerate(x.split(512)):
        part *= (1.0, 1e-3, 0.0, 1e-36, 1e30, 1.0)[i % 6]
        if i % 6 == 5:
            part[part.numel() // 2] = (math.nan, math.inf, -math.inf)[i // 6 % 3]
    if dtype == torch.float16:
        x = x.clamp(-60000, 60000)
    # Triton's interpreter (not the GPU) misreads subnormal bfloat16
    return torch.where(x.abs() < torch.finfo(dtype).smallest_normal, 0.0, x).to(dtype)


def cases(slow: bool) -> Sequence[tuple[int, int, torch.dtype]]:
    every = list(itertools.product(SIZES, LENGTHS, DTYPES))
    few = [(128, 1500, DTYPES[0]), (512, 1025, DTYPES[1]), (1024, 2048, DTYPES[2])]
    return [*few, (1024, 1, DTYPES[0]), (4096, 5000, DTYPES[0])] if slow else every


def test_backends_rotate_to_the_same_bits_and_back(
    fast: tuple[ModuleType, torch.device, bool],
) -> None:
    module, device, slow = fast
    for size, length, dtype in cases(slow):
        x = rough(length, dtype)
        y = rotated(x, size, reference())
        assert_same_bits(rotated(x.to(device), size, module), y, (size, length, dtype))
        for add, weight in ((False, 1.0), (True, -0.3)):
            start = gaussian(length, seed=1).to(dtype)
            want, got = start.clone(), start.to(device, copy=True)
            turn = Rotation(STREAM, size)
            reference().rotate_back(y.clone(), Output(want, weight, add), turn)
            module.rotate_back(y.to(device, copy=True), Output(got, weight, add), turn)
            assert_same_bits(got, want, (size, length, dtype, add))


def test_backends_rotate_segments_to_the_same_bits(
    fast: tuple[ModuleType, torch.device, bool],
) -> None:
    module, device, slow = fast
    lengths = (1, 2500, 1024, 130, 7)
    x = gaussian(sum(lengths))
    for size in (1024,) if slow else SIZES:
        y = rotated(x, size, reference(), segments=lengths)
        got = rotated(x.to(device), size, module, segments=lengths)
        assert_same_bits(got, y, size)
        want, back = torch.empty_like(x), torch.empty_like(x, device=device)
        turn = Rotation(STREAM, size, lengths)
        reference().rotate_back(y, Output(want, 0.5), turn)
        module.rotate_back(got, Output(back, 0.5), turn)
        assert_same_bits(back, want, size)
        assert (want - 0.5 * x).abs().max() < 1e-5


def test_backends_fuse_to_the_bytes_of_the_reference(
    fast: tuple[ModuleType, torch.device, bool],
) -> None:
    """Rotation in the same pass as quantization: all widths, scale blocks and kinds."""
    module, device, slow = fast
    for number, (size, length, dtype) in enumerate(cases(slow)):
        block = (512, 128, 2048, 256, 1024, 4096)[number % 6]
        levels = (7, 1, 3, 127, 12)[number % 5]
        bits = (2 * levels).bit_length()
        kind = (ScaleKind.MAX, ScaleKind.L2)[number // 5 % 2]
        x = rough(length, dtype)
        turn, lattice = Rotation(STREAM, size), Lattice(block, levels, bits)
        out = [torch.zeros(packed_bytes(length, bits), dtype=torch.uint8) for _ in range(2)]
        scale = [torch.zeros(blocks(length, block)) for _ in range(2)]
        out[1], scale[1] = out[1].to(device), scale[1].to(device)
        for i, (run, where) in enumerate(((reference(), "cpu"), (module, device))):
            source = x.to(where)
            run.rotate_quantize(source, scale[i], out[i], turn, lattice, stream=OTHER, kind=kind)
        what = (size, length, dtype, block, bits)
        assert_same_bits(scale[1], scale[0], what)
        assert_same_bits(out[1], out[0], what)
        common = {"stream": (OTHER, None)[number % 2], "offset": lattice.offset}
        for add, weight in ((False, 1.0), (True, 1.7)):
            start = gaussian(length, seed=1).to(dtype)
            want, got = start.clone(), start.to(device, copy=True)
            for i, (run, target) in enumerate(((reference(), want), (module, got))):
                output = Output(target, weight, add)
                run.dequantize_rotate(out[i], scale[i], output, turn, lattice, **common)
            assert_same_bits(got, want, (*what, add))


@pytest.mark.parametrize("spec", FUSED)
def test_fused_and_unfused_make_the_same_bytes(spec: str, backend: str) -> None:
    """The wire inside is that of the rotated tensor, and it decodes to the same bits."""
    codec, device = lc.codec(spec), device_of(backend)
    assert isinstance(codec, lc.Rotate)
    for length in (4099,) if backend == "triton" else (1, 1000, 4096, 12_345):
        x = student_t3(length).to(device)
        wire = codec.encode(x, KEY)
        y, back = torch.empty_like(x), torch.empty_like(x)
        module = kernels_of(device)
        turn = Rotation(_signs(KEY), codec.block)
        module.rotate_into(x, y, turn)
        inner = codec.inner.encode(y, KEY)
        assert_same_bits(wire.data[HEADER_BYTES:], inner.data, length)
        codec.inner.decode(inner, out=y)
        module.rotate_back(y, Output(back, 0.25), turn)
        assert_same_bits(codec.decode(wire, weight=0.25), back, length)


# --- signs ---------------------------------------------------------------------------------


def test_signs_come_from_a_stream_of_their_own() -> None:
    """Codecs draw from key.stream(): no phase that users count up to gives the signs."""
    assert _signs(KEY) not in {replace(KEY, phase=phase).stream() for phase in range(100)}
    changed = [replace(KEY, **{name: 11}) for name in ("seed", "step", "tensor", "rank", "phase")]
    assert len({_signs(key) for key in (KEY, *changed)}) == 6


def test_signs_are_fair_and_independent_at_all_short_lags() -> None:
    """2^18 signs: their mean, and that of products at each lag; false alarm 1e-6 in all."""
    count = 1 << 18
    signs = signs_of(count)
    lags = [*range(1, 300), 512, 1024, 2048, 4096, 32768]
    limit = float(stats.norm.isf(1e-6 / 2 / (len(lags) + 1)))
    assert abs(signs.sum()) <= limit * math.sqrt(count)
    for lag in lags:
        z = (signs[lag:] * signs[:-lag]).sum() / math.sqrt(count - lag)
        assert abs(z) <= limit, (lag, z)


def test_signs_are_independent_of_the_dither() -> None:
    """Correlation with the dither of the same element; false alarm 1e-6."""
    count = 1 << 18
    words = draws(_signs(KEY), count // 32, torch.device("cpu")).numpy().reshape(-1, 1, 32, 1)
    bit = 31 - np.arange(32).reshape(8, 1, 4)
    signs = (1.0 - 2.0 * ((words >> bit) & 1)).reshape(-1)
    u = dither(KEY.stream(), count // 128, 16, torch.device("cpu")).numpy().reshape(-1)
    z = (signs * (u / 2**16 - 0.5)).sum() / math.sqrt(count / 12)
    assert abs(z) <= stats.norm.isf(1e-6 / 2)


# --- theorems ------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["dqsg:bits=4", "qsgd:bits=2", "dqsg:bits=3,block=100"])
def test_the_error_is_that_of_the_codec_inside_for_every_draw(inner: str) -> None:
    """‖x̂ - x‖ = ‖ŷ - y‖, and so the variance bound is the same."""
    codec, plain = lc.codec(f"rotate({inner})"), lc.codec(inner)
    x = student_t3(5000)
    y = torch.empty_like(x)
    for seed in range(5):
        key = lc.Key(seed=seed)
        kernels_of(x.device).rotate_into(x, y, Rotation(_signs(key), 1024))
        outside = codec.decode(codec.encode(x, key)) - x
        inside = plain.decode(plain.encode(y, key)) - y
        assert float(outside.norm()) == pytest.approx(float(inside.norm()), rel=1e-4)
    assert codec.variance_bound(5000) == plain.variance_bound(5000)


@pytest.mark.parametrize("make", [student_t3, mostly_zero, gaussian])
@pytest.mark.parametrize("inner", ["dqsg:bits=2", "qsgd:bits=2", "ecdq:step=2"])
def test_unbiased(inner: str, make: Callable[[int], Tensor]) -> None:
    """Mean error of each of 300 coordinates over 1500 keys; false alarm 1e-6 in all.

    An error is a mean over the 256 (or 32, 8, 4) values of its piece, so its mean over keys is
    normal; its variance is estimated.
    """
    codec, x, draws = lc.codec(f"rotate({inner})"), make(300), 1500
    assert codec.unbiased
    errors = torch.stack(
        [codec.decode(codec.encode(x, lc.Key(seed=1, step=step))) - x for step in range(draws)]
    ).double()
    t = errors.mean(0) / (errors.std(0) / math.sqrt(draws)).clamp(min=1e-7)
    limit = float(stats.t.isf(1e-6 / 2 / x.numel(), draws - 1))
    assert t.abs().max() <= limit, (t.abs().max(), limit)


def largest_square(count: int) -> float:
    """Mean of the largest of `count` squared standard normal values."""

    def beyond(t: float) -> float:
        return 2 * t * (1 - special.erf(t / math.sqrt(2)) ** count)

    return integrate.quad(beyond, 0, 12)[0]


@pytest.mark.parametrize("make", [gaussian, student_t3, mostly_zero])
@pytest.mark.parametrize(("bits", "levels"), [(4, 7), (3, 3), (2, 1)])
def test_nmse_is_that_of_gaussian_values_whatever_comes(
    make: Callable[[int], Tensor], bits: int, levels: int
) -> None:
    """0.018, 0.099 and 0.89 at 4, 3 and 2 bits and blocks of 512, to 3%.

    Where a few values have most of a block's energy, sums with random signs have thinner tails
    than Gaussian ones, and the error is less.
    """
    expected = largest_square(512) / (12 * levels**2)
    assert expected == pytest.approx({4: 0.0182, 3: 0.0988, 2: 0.890}[bits], rel=1e-2)
    found = nmse(f"rotate(dqsg:bits={bits})", make(1 << 17))
    assert (0.9 if make is student_t3 else 0.97) <= found / expected <= 1.03


def test_heavy_tails_lose_most_of_their_error() -> None:
    """Kurtosis in the thousands, as measured on real gradients of a CNN: 0.1 and more unrotated."""
    x = student_t3(1 << 16) ** 3
    assert nmse("dqsg:bits=4", x) > 0.08
    assert nmse("rotate(dqsg:bits=4)", x) < 0.02
    assert nmse("dqsg:bits=3", x) > 0.4
    assert nmse("rotate(dqsg:bits=3)", x) < 0.11


# --- the contract --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_round_trip_of_every_length_and_dtype(spec: str, dtype: torch.dtype) -> None:
    codec = lc.codec(spec)
    limit = {"rotate(none)": 1e-6, "rotate(fp16)": 1e-3}.get(spec, 0.3)
    if "bits=2" in spec or "norm=l2" in spec:
        limit = 2.5
    eps = torch.finfo(dtype).eps
    for shape in ((0,), (), (1,), (7, 11), (1023,), (1024,), (3, 1000), (4099,)):
        x = gaussian(torch.Size(shape).numel(), seed=len(shape)).view(shape).to(dtype)
        wire = codec.encode(x, KEY)
        y = decode(codec, wire, x)
        assert y.shape == x.shape and y.dtype == dtype
        error = (y.double() - x.double()).norm() / max(float(x.double().norm()), 1e-30)
        assert error <= limit + 2 * eps, (shape, error)
        assert wire.nbytes <= codec.nbytes(x.numel(), dtype)
        assert wire.header.coder or wire.nbytes == codec.nbytes(x.numel(), dtype)
        again = lc.Wire.parse(wire.data.clone(), key=KEY, shape=shape, dtype=dtype)
        assert_same_bits(decode(codec, again, x), y)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", SPECS)
def test_bad_values_surface(spec: str, bad: float, backend: str) -> None:
    """Nothing of a block with a bad value turns into a plausible number; other blocks live on."""
    if backend == "triton" and ("ecdq" in spec or "coder" in spec):
        pytest.skip("this coder has no Triton kernels")
    codec, x = lc.codec(spec), gaussian(9000)
    x[4097] = bad
    x = x.to(device_of(backend))
    y = decode(codec, codec.encode(x, KEY), torch.zeros_like(x))
    block = codec.block  # pyright: ignore[reportAttributeAccessIssue]
    start = 4097 // block * block
    assert not y[start : start + block].isfinite().any()
    one_scale = any(word in spec for word in ("tensor", "ecdq", "ndqsg"))
    assert bool(y[8500:].isfinite().all()) is not one_scale


def test_huge_values_stay_finite_where_their_norm_is(backend: str) -> None:
    codec = lc.codec("rotate(dqsg:bits=8)")
    x = torch.zeros(1024, device=device_of(backend))
    x[:2] = torch.tensor([2.4e38, -2.0e38])
    y = codec.decode(codec.encode(x, KEY))
    assert y.isfinite().all() and (y[:2] / x[:2] - 1).abs().max() < 0.1
    x[:] = FLT_MAX  # ‖x‖ is 32 times more than fp32 can hold
    assert codec.decode(codec.encode(x, KEY)).isnan().all()


def test_decoded_values_are_clamped_to_what_half_precision_holds(backend: str) -> None:
    codec, device = lc.codec("rotate(dqsg:bits=2)"), device_of(backend)
    x = torch.full((1024,), 65504.0, dtype=torch.float16, device=device)
    y = codec.decode(codec.encode(x, KEY))
    assert y.isfinite().all() and y.max() == 65504.0  # errors went both ways


def test_an_earlier_wire_is_written_over() -> None:
    codec = lc.codec("rotate(dqsg:bits=4)")
    first = codec.encode(gaussian(3000), KEY)
    want = codec.encode(student_t3(3000), KEY).data
    again = codec.encode(student_t3(3000), KEY, out=first)
    assert again.data.data_ptr() == first.data.data_ptr()
    assert_same_bits(again.data, want)


def test_side_information_is_turned_too() -> None:
    codec, plain = lc.codec("rotate(ndqsg:levels=7,ratio=3)"), lc.codec("ndqsg:levels=7,ratio=3")
    x = gaussian(3000)
    failed = torch.ones(plain.checks(3000), dtype=torch.uint8)  # pyright: ignore
    y = codec.decode(codec.encode(x, KEY), side=x + 0.1 * gaussian(3000, seed=4), failed=failed)
    assert not failed.any()
    assert float((y - x).square().sum() / x.square().sum()) < 0.03
    codec.decode(codec.encode(x, KEY), side=-x, failed=failed)
    assert failed.any()
    with pytest.raises(ValueError, match="side must"):
        codec.decode(codec.encode(x, KEY), side=x[:-1])
    with pytest.raises(TypeError, match="side"):
        codec.decode(codec.encode(x, KEY))


def test_segments_reach_the_codec_inside() -> None:
    codec = lc.codec("rotate(ecdq:error=0.05)")
    assert isinstance(codec, lc.Rotate) and codec.segmented
    assert not lc.codec("rotate(dqsg)").segmented
    lengths = (3000, 1, 2499)
    x = gaussian(sum(lengths))
    x[:3000] *= 1000  # its own step, or the rest would drown
    wire = codec.encode(x, KEY, segments=lengths)
    y = torch.empty_like(x)
    kernels_of(x.device).rotate_into(x, y, Rotation(_signs(KEY), 1024, lengths))
    inner = codec.inner.encode(y, KEY, segments=lengths)
    assert_same_bits(wire.data[HEADER_BYTES:], inner.data)
    options: dict[str, Any] = {"key": KEY, "shape": x.shape, "dtype": x.dtype, "segments": lengths}
    z = codec.decode(lc.Wire.parse(wire.data.clone(), **options))
    for part, got in zip(x.split(lengths), z.split(lengths), strict=True):
        assert (got - part).square().sum() <= 0.07 * part.square().sum() + 1e-9


def test_the_wire_inside_is_complete() -> None:
    codec = lc.codec("rotate(qsgd:bits=4)")
    assert isinstance(codec, lc.Rotate)
    wire = codec.encode(gaussian(2000), KEY)
    options: dict[str, Any] = {"key": KEY, "shape": (2000,), "dtype": torch.float32}
    inside = lc.Wire.parse(wire.data[HEADER_BYTES:].clone(), **options)
    assert codec.inner.decode(inside).isfinite().all()
    scales, _ = sections(inside.data[HEADER_BYTES:], inside.header)
    assert scales.numel() == 4 and inside.header == codec._inside(2000, ())[0]


def test_wires_of_other_codecs_and_damaged_headers_are_refused() -> None:
    codec, x = lc.codec("rotate(qsgd:bits=4)"), gaussian(2000)
    wire = codec.encode(x, KEY)
    for spec in ("rotate(dqsg:bits=4)", "rotate(qsgd:bits=4):block=512", "qsgd:bits=4"):
        with pytest.raises(lc.WireError):
            lc.codec(spec).decode(wire)
    # what a GPU can see without waiting: the header outside tells which codec is inside
    assert wire.header != lc.codec("rotate(dqsg:bits=4)").encode(x, KEY).header
    for place in range(2 * HEADER_BYTES):
        data = wire.data.clone()
        data[place] ^= 1
        with pytest.raises(lc.WireError):
            codec.decode(lc.Wire.parse(data, key=KEY, shape=x.shape, dtype=x.dtype))
    for length in (0, 64, 100, 128, wire.nbytes - 1):
        with pytest.raises(lc.WireError):
            lc.Wire.parse(wire.data[:length], key=KEY, shape=x.shape, dtype=x.dtype)


def test_settings() -> None:
    codec = lc.codec("rotate(dqsg:bits=3):block=512")
    assert codec == lc.Rotate(inner=lc.DQSG(bits=3), block=512) == lc.codec(str(codec))
    assert lc.Rotate(inner=lc.DQSG()).block == 1024
    assert not lc.codec("rotate(fp16)").unbiased and not codec.summable
    for block in (64, 8192, 1000, 0, 1024.0, True, None):
        with pytest.raises(lc.ConfigError, match="power of two"):
            lc.Rotate(inner=lc.DQSG(), block=block)  # pyright: ignore[reportArgumentType]
    for inner in (lc.Global(), lc.GlobalExp()):
        with pytest.raises(lc.ConfigError, match="share one scale.*rotate\\(dqsg"):
            lc.Rotate(inner=inner)
    with pytest.raises(lc.ConfigError, match="once is enough"):
        lc.codec("rotate(rotate(dqsg))")
    with pytest.raises(lc.ConfigError, match=r"write feedback\(rotate"):
        lc.codec("rotate(feedback(dqsg))")
    with pytest.raises(TypeError, match="norm="):
        codec.encode(gaussian(10), KEY, norm=1.0)
    with pytest.raises(TypeError, match="cannot be summed"):
        _ = codec.encode(gaussian(10), KEY).payload


def test_reference_on_request() -> None:
    """using("reference") reaches the rotation inside a codec."""
    codec, x = lc.codec("rotate(dqsg:bits=4)"), gaussian(5000)
    data = codec.encode(x, KEY).data
    with using("reference"):
        assert_same_bits(codec.encode(x, KEY).data, data)
