"""Beyond what check_codec asks of every codec: error bounds, lengths, odd inputs, refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
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
    mostly_zero,
)
from torch import Tensor

import laconic as lc
from laconic.kernels import using

SIZES = (0, 1, 2, 127, 128, 129, 511, 513, 1000, 4099)
BLOCKS = ("1", "7", "64", "100", "128", "384", "512", "1024", "tensor")
SPECS = (
    "none",
    "fp16",
    "bf16",
    "qsgd",
    "qsgd:bits=2,block=128",
    "qsgd:bits=3",
    "qsgd:levels=5",
    "qsgd:bits=5",
    "qsgd:bits=6",
    "qsgd:bits=7",
    "qsgd:bits=8",
    "qsgd:norm=l2",
    "qsgd:levels=100,norm=l2,block=tensor",
    "dqsg",
    "dqsg:bits=2,block=100",
    "dqsg:bits=3",
    "dqsg:bits=7",
    "dqsg:bits=8,block=tensor",
    "ndqsg",
    "ndqsg:levels=63,ratio=5,block=512",
    "ndqsg:levels=10,ratio=125,alpha=0.75",
    "global",
    "global:bits=4",
    "global:bits=32",
    "global:norm=l2",
    "global:levels=3,norm=1.5/inf",
    "global-exp",
    "global-exp:bits=3",
    "global-exp:bits=5",
    "qsgd-topk",
    "ecdq:step=1",
    "ecdq:step=0.01",
    "ecdq:step=0.5,subtract=never,coder=fixed",
    "ecdq:step=0.5,block=512",
    "qsgd:coder=bitmap",
)
BLOCKWISE = ("qsgd", "qsgd:norm=l2", "dqsg", "ndqsg")
LOSSY_CAST = ("fp16", "bf16")
DETERMINISTIC = ("none", "fp16", "bf16", "qsgd-topk")
ONE_SCALE = tuple(spec for spec in SPECS if spec.startswith(("global", "qsgd-topk")))
KEY = lc.Key(seed=1, step=2, tensor=3, rank=4)
CODEC: Any = lc.codec
QSGD: Any = lc.QSGD


def with_block(spec: str, block: str) -> lc.Codec:
    return lc.codec(f"{spec}{',' if ':' in spec else ':'}block={block}")


def block_of(codec: lc.Codec, numel: int) -> int:
    return getattr(codec, "block", None) or max(numel, 1)


def scale_of(codec: lc.Codec, x: Tensor) -> Tensor:
    """The scale of every element, in float64, from the definition."""
    v = x.to(torch.float64).flatten()
    size = block_of(codec, v.numel())
    order = {"max": math.inf, "l2": 2.0, "1.5/inf": 1.5}[getattr(codec, "norm", "max")]
    norms = [torch.linalg.vector_norm(part, order) for part in v.split(size)]
    return torch.cat([norm.expand(size) for norm in norms])[: v.numel()]


def error_bound(codec: lc.Codec, x: Tensor) -> Tensor:
    """What |decoded - x| may be, element by element, before rounding to x's dtype."""
    v = x.to(torch.float64).flatten()
    if not v.numel():
        return v
    match codec:
        case lc.QSGD():
            return scale_of(codec, x) / codec.levels
        case lc.DQSG():
            return scale_of(codec, x) / codec.levels / 2
        case lc.NDQSG():  # side information x: y + α(w - ..) is off by α·(fine error)
            return codec.alpha * scale_of(codec, x) / codec.levels / 2
        case lc.Global():
            return scale_of(codec, x) / codec.levels_for(1)
        case lc.GlobalExp():
            return torch.maximum(v.abs(), v.abs().max() * 2.0 ** (1 - codec.levels_for(1)))
        case lc.FP16() | lc.BF16():
            sent = torch.float16 if codec.name == "fp16" else torch.bfloat16
            return v.abs() * torch.finfo(sent).eps / 2 + torch.finfo(sent).smallest_normal
        case lc.Uncompressed():
            return torch.zeros_like(v)
        case lc.ECDQ(step=float(f)):  # a step, where the dither is not subtracted
            return (f * v.square().mean().sqrt()).clamp(min=v.abs().max() / 32000).expand(len(v))
        case lc.QSGDTopK():
            return torch.linalg.vector_norm(v).expand(v.numel())
        case _:
            raise NotImplementedError(f"say here what error {codec} may make")


def assert_within_bound(codec: lc.Codec, x: Tensor, y: Tensor, what: object = "") -> None:
    bound = error_bound(codec, x) * (1 + 2.0**-14)  # fixed point and fp32 arithmetic
    info = torch.finfo(y.dtype)
    rounding = y.to(torch.float64).abs().flatten() * info.eps + info.smallest_normal * info.eps
    error = (y.to(torch.float64) - x.to(torch.float64)).abs().flatten()
    assert (error <= bound + rounding).all(), (what, codec, (error - bound).max())


def test_every_codec_is_tested_here() -> None:
    assert {lc.codec(spec).name for spec in SPECS} == set(lc.codecs())


# --- round trips ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_round_trip_keeps_shape_dtype_and_error_bound(spec: str, dtype: torch.dtype) -> None:
    codec = lc.codec(spec)
    assert codec.nbytes(0, dtype) == 64
    for numel in SIZES:
        x = gaussian(numel, seed=numel).to(dtype)
        wire = codec.encode(x, KEY)
        y = decode(codec, wire, x)
        assert y.shape == x.shape and y.dtype == dtype
        assert_within_bound(codec, x, y, numel)
        most = codec.nbytes(numel, dtype)
        assert wire.nbytes <= most if wire.header.coder else wire.nbytes == most
        assert wire.data.is_contiguous()
    zeros = -torch.zeros(1000, dtype=dtype)
    assert not decode(codec, codec.encode(zeros, KEY), zeros).any()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("spec", [*BLOCKWISE, "qsgd:bits=3", "dqsg:bits=8"])
def test_odd_blocks(spec: str, block: str) -> None:
    """Blocks smaller than, larger than, and not dividing the packing group of 128."""
    codec = with_block(spec, block)
    for numel, dtype in itertools.product(SIZES, DTYPES):
        # a different size for every block shows scales that are used for the wrong one
        x = (gaussian(numel, seed=numel) * torch.arange(1, numel + 1).pow(0.7)).to(dtype)
        y = decode(codec, codec.encode(x, KEY), x)
        assert_within_bound(codec, x, y, (numel, dtype))


@pytest.mark.parametrize("spec", SPECS)
def test_every_backend_keeps_the_contract(backend: str, spec: str) -> None:
    codec, device = lc.codec(spec), device_of(backend)
    interpreted = backend == "triton" and device.type == "cpu"  # slow: one size will do
    for numel in (600,) if interpreted else (1, 129, 600):
        x = gaussian(numel, seed=numel).to(device)
        y = decode(codec, codec.encode(x, KEY), x)
        assert y.device == x.device
        assert_within_bound(codec, x.cpu(), y.cpu(), (backend, numel))
        x[numel // 2] = math.nan
        assert not decode(codec, codec.encode(x, KEY), x).isfinite().all()


# --- lengths -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "numel", "body"),
    [
        ("none", 1000, 4000),
        ("fp16", 1000, 2000),
        ("bf16", 1001, 2002),
        # groups of 128 · 16·bits bytes, and 4 bytes a block
        ("qsgd:bits=4,block=512", 1000, 8 * 64 + 2 * 4),
        ("qsgd:bits=2,block=128", 129, 2 * 32 + 2 * 4),
        ("qsgd:bits=8,block=tensor", 128, 128 + 4),
        ("dqsg:bits=3,block=100", 1000, 8 * 48 + 10 * 4),
        ("dqsg:bits=7,block=1", 3, 112 + 3 * 4),
        # and a check byte for every 512 values
        ("ndqsg", 1000, 8 * 32 + 4 + 2),
        ("ndqsg:levels=63,ratio=5,block=512", 513, 5 * 48 + 2 * 4 + 2),
        ("global:bits=4", 1000, 8 * 64 + 4),
        ("global:bits=8", 1000, 1024 + 4),
        ("global:bits=32", 1000, 4000 + 4),
        ("global-exp:bits=8", 1000, 1024 + 4),
        ("global-exp:bits=3", 1000, 8 * 48 + 4),
        # ceil(√1000) = 32 slots and the norm
        ("qsgd-topk", 1000, 33 * 4),
        ("qsgd-topk", 1024, 33 * 4),
        ("qsgd-topk", 1025, 34 * 4),
    ],
)
def test_lengths(spec: str, numel: int, body: int) -> None:
    codec = lc.codec(spec)
    assert codec.nbytes(numel) == 64 + body
    assert codec.encode(gaussian(numel), KEY).data.numel() == 64 + body


# --- special values ------------------------------------------------------------------------


@pytest.mark.parametrize("spec", BLOCKWISE)
def test_a_zero_block_between_others_decodes_to_zeros(spec: str) -> None:
    codec = with_block(spec, "100")
    x = gaussian(1000)
    x[300:400] = 0
    y = decode(codec, codec.encode(x, KEY), x)
    assert not y[300:400].any() and y[200:300].any() and y[400:500].any()


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.startswith(("dqsg", "ndqsg"))])
def test_exact_zeros_stay_exact_where_no_dither_is_subtracted(spec: str) -> None:
    codec = lc.codec(spec)
    x = mostly_zero(1000)
    assert not decode(codec, codec.encode(x, KEY), x)[x == 0].any()


def huge(value: float) -> Tensor:
    x = gaussian(1000) * 1e37
    x[77] = value
    return x


@pytest.mark.parametrize("value", [3e38, -3e38, FLT_MAX, -FLT_MAX])
@pytest.mark.parametrize("spec", [s for s in SPECS if s not in LOSSY_CAST])
def test_huge_values_stay_finite_and_accurate(spec: str, value: float) -> None:
    codec = lc.codec(spec)
    x = huge(value)
    y = decode(codec, codec.encode(x, KEY), x)
    assert y.isfinite().all()
    if getattr(codec, "norm", "max") == "max" and codec.name != "qsgd-topk":
        assert_within_bound(codec, x, y)


@pytest.mark.parametrize("spec", [s for s in SPECS if s not in LOSSY_CAST])
def test_all_values_at_the_largest_float(spec: str) -> None:
    """The 2-norm does not fit fp32; decoded values must still be finite, and not tiny."""
    codec = lc.codec(spec)
    x = torch.full((1000,), FLT_MAX)
    y = decode(codec, codec.encode(x, KEY), x)
    assert y.isfinite().all() and y.max() > FLT_MAX / 4


@pytest.mark.parametrize("value", [65504.0, -65504.0])
@pytest.mark.parametrize("spec", [s for s in SPECS if s not in ("bf16", "qsgd-topk")])
def test_the_largest_half_stays_finite(spec: str, value: float) -> None:
    """A dithered value above 65504 is clamped, not turned into infinity.

    (bf16 rounds 65504 to 65536, and qsgd-topk's ‖v‖₂ is truly too large for fp16.)
    """
    codec = lc.codec(spec)
    x = torch.full((1000,), value, dtype=torch.float16)
    for step in range(5):
        y = decode(codec, codec.encode(x, lc.Key(step=step)), x)
        assert y.isfinite().all()


@pytest.mark.parametrize("scale", [1e-30, 1e-37, 1e-40, 1e-43])
@pytest.mark.parametrize("spec", [s for s in SPECS if s not in LOSSY_CAST])
def test_subnormals_are_as_accurate_as_others(spec: str, scale: float) -> None:
    """Only the grid of the subnormals, 2^-149, adds to the error. Flushing to zero would fail."""
    codec = lc.codec(spec)
    x = gaussian(1000) * scale
    y = decode(codec, codec.encode(x, KEY), x)
    assert_within_bound(codec, x, y)
    assert y.any()


@pytest.mark.parametrize("spec", [s for s in SPECS if s not in LOSSY_CAST])
def test_the_smallest_float_survives(spec: str) -> None:
    """±1e-45 (one unit of the subnormals) is the largest value: it must come back in the mean."""
    codec = lc.codec(spec)
    x = torch.tensor([1e-45, -1e-45, 0.0, 1e-45])
    total = torch.zeros(4)
    for step in range(64):
        y = decode(codec, codec.encode(x, lc.Key(step=step)), x)
        assert y.abs().max() <= 3 * x.abs().max()
        total += torch.sign(y) * torch.sign(x)
    assert (total[[0, 1, 3]] > 16).all() or spec == "qsgd-topk"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("spec", SPECS)
def test_a_value_that_is_not_finite_is_never_hidden(
    spec: str, bad: float, dtype: torch.dtype
) -> None:
    codec = lc.codec(spec)
    for numel, where in ((1, 0), (1000, 0), (1000, 300), (1000, 999), (513, 512)):
        x = gaussian(numel).to(dtype)
        x[where] = bad
        y = decode(codec, codec.encode(x, KEY), x)
        assert not y[where].isfinite()
        if codec.name in ("qsgd", "dqsg", "ndqsg"):
            first = where - where % block_of(codec, numel)
            block = slice(first, first + block_of(codec, numel))
            assert y[block].isnan().all()
            rest = torch.cat([y[: block.start], y[block.stop :]])
            assert rest.isfinite().all()
        elif spec in ONE_SCALE:
            assert y.isnan().all()


@pytest.mark.parametrize("spec", BLOCKWISE)
def test_a_bad_block_leaves_the_others_alone(spec: str) -> None:
    codec = with_block(spec, "100")
    x = gaussian(1000)
    clean = decode(codec, codec.encode(x, KEY), x)
    bad = x.clone()
    bad[350] = math.inf
    y = decode(codec, codec.encode(bad, KEY), x, **({"side": x} if spec == "ndqsg" else {}))
    assert y[300:400].isnan().all()
    assert_same_bits(y[:300], clean[:300])
    assert_same_bits(y[400:], clean[400:])


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_side_information_that_is_not_finite_shows(bad: float, add: bool) -> None:
    x = gaussian(1000)
    side = x.clone()
    side[5] = bad
    for codec in (lc.NDQSG(), lc.NDQSG(alpha=0.5)):
        y = codec.decode(codec.encode(x, KEY), side=side, out=torch.zeros(1000), add=add)
        assert not y[5].isfinite() and y[6:].isfinite().all()


# --- inputs as they come -------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_strides_and_gradient_history_do_not_matter(spec: str) -> None:
    codec = lc.codec(spec)
    base = gaussian(35 * 20).view(35, 20)
    wanted = codec.encode(base.t().contiguous(), KEY).data
    assert_same_bits(codec.encode(base.t(), KEY).data, wanted)
    leaf = base.t().contiguous().requires_grad_()
    for x in (leaf, leaf * 1.0):
        wire = codec.encode(x, KEY)
        assert not wire.data.requires_grad
        assert_same_bits(wire.data, wanted)
        assert not decode(codec, wire, base.t().contiguous()).requires_grad
    every_other = gaussian(200)[::2]
    assert_same_bits(
        codec.encode(every_other, KEY).data, codec.encode(every_other.clone(), KEY).data
    )


# --- out=, add=, weight= -------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_encode_reuses_out(spec: str) -> None:
    codec = lc.codec(spec)
    x = gaussian(1000)
    wanted = codec.encode(x, KEY).data
    buffer = torch.full((codec.nbytes(1000) + 100,), 255, dtype=torch.uint8)
    wire = codec.encode(x, KEY, out=buffer)
    assert wire.data.data_ptr() == buffer.data_ptr()
    assert_same_bits(wire.data, wanted)
    assert (buffer[codec.nbytes(1000) :] == 255).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_decode_into_out_of_any_dtype(spec: str, dtype: torch.dtype) -> None:
    """A wire of bf16 values decodes to fp32 without passing through bf16."""
    codec = lc.codec(spec)
    for sent in DTYPES:
        x = gaussian(1000).to(sent)
        wire = codec.encode(x, KEY)
        precise = decode(codec, wire, x, out=torch.empty(1000))
        assert_within_bound(codec, x, precise)
        out = torch.full((10, 100), 7.0, dtype=dtype)  # another shape of the same size
        y = decode(codec, wire, x, out=out)
        assert y.data_ptr() == out.data_ptr() and y.shape == out.shape
        assert_same_bits(y.flatten(), precise.to(dtype), (sent, dtype))
        if dtype == sent:
            assert_same_bits(y.flatten(), decode(codec, wire, x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", [1.0, 0.3, -2.0, 1 / 3])
@pytest.mark.parametrize("spec", SPECS)
def test_add_is_decode_then_add_in_fp32(spec: str, weight: float, dtype: torch.dtype) -> None:
    """Bitwise, for codecs with kernels; the casts' torch.add may fuse its multiplication."""
    codec = lc.codec(spec)
    x, start = gaussian(1000).to(dtype), gaussian(1000, seed=9).to(dtype)
    wire = codec.encode(x, KEY)
    scaled = decode(codec, wire, x, out=torch.empty(1000), weight=weight)
    wanted = (start.to(torch.float32) + scaled).to(dtype)
    out = start.clone()
    y = decode(codec, wire, x, out=out, add=True, weight=weight)
    assert y.data_ptr() == out.data_ptr()
    if codec.name in DETERMINISTIC:
        info = torch.finfo(dtype)
        torch.testing.assert_close(y, wanted, rtol=info.eps, atol=info.eps * 4)
    else:
        assert_same_bits(y, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_weight_multiplies_in_fp32(spec: str, dtype: torch.dtype) -> None:
    """Not in the wire's own type: a third in bf16 would be off by up to 2^-9."""
    codec = lc.codec(spec)
    x = gaussian(1000).to(dtype)
    wire = codec.encode(x, KEY)
    once = decode(codec, wire, x, out=torch.empty(1000))
    third = decode(codec, wire, x, out=torch.empty(1000), weight=1 / 3)
    # with α < 1 two terms are weighted, and may cancel
    cancels = getattr(codec, "alpha", 1.0) != 1.0
    torch.testing.assert_close(third, once / 3, rtol=2.0**-21, atol=1e-6 if cancels else 0)
    # powers of two are exact
    quarter = decode(codec, wire, x, out=torch.empty(1000), weight=0.25)
    assert_same_bits(quarter, once / 4)


# --- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.float64])
@pytest.mark.parametrize("spec", lc.codecs())
def test_other_tensors_are_refused_with_a_sentence(spec: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="float32, float16 or bfloat16 tensors, not torch"):
        lc.codec(spec).encode(torch.ones(10, dtype=dtype), KEY)
    with pytest.raises(TypeError, match="dense tensors"):
        lc.codec(spec).encode(torch.eye(3).to_sparse(), KEY)


@pytest.mark.parametrize("spec", lc.codecs())
def test_wrong_out_of_decode_is_refused(spec: str) -> None:
    codec = lc.codec(spec)
    x = gaussian(100)
    wire = codec.encode(x, KEY)
    with pytest.raises(ValueError, match="hold 100 values"):
        decode(codec, wire, x, out=torch.empty(99))
    with pytest.raises(ValueError, match="contiguous"):
        decode(codec, wire, x, out=torch.empty(200)[::2])
    with pytest.raises(ValueError, match="give out="):
        decode(codec, wire, x, add=True)
    with pytest.raises(TypeError, match="float32, float16 or bfloat16"):
        decode(codec, wire, x, out=torch.empty(100, dtype=torch.float64))


@pytest.mark.parametrize("spec", lc.codecs())
def test_wrong_out_of_encode_is_refused(spec: str) -> None:
    codec = lc.codec(spec)
    x = gaussian(100)
    size = codec.nbytes(100)
    whole = torch.empty(2 * size + 64, dtype=torch.uint8)
    shift = -whole.data_ptr() % 16
    for out in (
        torch.empty(size - 1, dtype=torch.uint8),
        torch.empty(size, dtype=torch.int8),
        torch.empty(2 * size, dtype=torch.uint8)[::2],
        torch.empty(1, size, dtype=torch.uint8),
        whole[shift + 1 : shift + 1 + size],
    ):
        with pytest.raises(ValueError, match="out must"):
            codec.encode(x, KEY, out=out)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("qsgd:bits=0", "bits must be an integer from 2 to 8, not 0"),
        ("qsgd:bits=1", "bits must be an integer from 2 to 8, not 1"),
        ("qsgd:bits=9", "bits must be an integer from 2 to 8, not 9"),
        ("qsgd:bits=4.5", "bits must be an integer"),
        ("qsgd:bits=four", "bits must be an integer"),
        ("qsgd:block=-1", "block must be a positive integer"),
        ("qsgd:block=0", "block must be a positive integer"),
        ("qsgd:block=1.5", "block must be a positive integer"),
        ("qsgd:levels=0", "levels must be an integer from 1 to 127, not 0"),
        ("qsgd:levels=128", "levels must be an integer from 1 to 127, not 128"),
        ("qsgd:levels=-3", "levels must be an integer from 1 to 127"),
        ("qsgd:bits=4,levels=8", "8 levels take 5 bits, not 4"),
        ("qsgd:bits=8,levels=7", "7 levels take 4 bits, not 8"),
        ("qsgd:norm=l1", "norm must be one of max, l2"),
        ("dqsg:bits=1", "bits must be an integer from 2 to 8, not 1"),
        ("dqsg:block=0", "block must be a positive integer"),
        ("dqsg:bits=2,levels=2", "2 levels take 3 bits, not 2"),
        ("ndqsg:levels=0", "levels must be an integer from 1 to 63"),
        ("ndqsg:ratio=4", "ratio must be odd"),
        ("ndqsg:ratio=1", "ratio must be an integer from 3"),
        ("ndqsg:alpha=0", "alpha must be a number above 0"),
        ("ndqsg:alpha=1.5", "alpha must be a number above 0"),
        ("ndqsg:alpha=nan", "alpha must be a number above 0"),
        ("ndqsg:block=-1", "block must be a positive integer"),
        ("global:bits=0", "bits must be one of 4, 8, 32"),
        ("global:bits=1", "bits must be one of 4, 8, 32"),
        ("global:bits=9", "bits must be one of 4, 8, 32"),
        ("global:bits=8.0", "bits must be one of 4, 8, 32"),
        ("global:levels=0", "levels must be an integer from 1"),
        ("global:levels=128", "at most 127 levels fit"),
        ("global:norm=0.5/2", "norm must be max, l2 or q/p"),
        ("global:norm=2", "norm must be max, l2 or q/p"),
        ("global:norm=l3", "norm must be max, l2 or q/p"),
        ("global-exp:bits=2", "bits must be an integer from 3 to 8"),
        ("global-exp:bits=9", "bits must be an integer from 3 to 8"),
        ("gsgd", "did you mean qsgd"),
        ("dqgs", "did you mean dqsg"),
        ("globalexp", "did you mean global-exp"),
        ("zip", "there are none, fp16"),
        ("", "there are none, fp16"),
        ("qsgd:bit=4", "did you mean bits"),
        ("qsgd:colour=red", "there are bits, levels, norm, block"),
        ("none:bits=4", "it has no settings"),
        ("qsgd:bits=4,bits=4", "given twice"),
        ("qsgd:bits", "settings look like bits=4"),
        ("qsgd:bits=", "settings look like bits=4"),
    ],
)
def test_bad_settings_say_what_is_allowed(spec: str, says: str) -> None:
    with pytest.raises(lc.ConfigError) as error:
        lc.codec(spec)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        *(lambda thing=thing: CODEC(thing) for thing in (5, None, ["qsgd"])),
        *(lambda name=name: QSGD(**{name: True}) for name in ("bits", "levels", "block")),
        lambda: lc.NDQSG(levels=True),
        lambda: lc.Global(bits=8, levels=True),
        lambda: lc.GlobalExp(bits=True),
    ],
)
def test_things_of_other_types_are_refused(make: Callable[[], lc.Codec]) -> None:
    with pytest.raises(lc.ConfigError, match="named by a spec|integer|bits must be one of"):
        make()


@pytest.mark.parametrize("workers", [0, -1, 1.5, "2"])
@pytest.mark.parametrize("spec", lc.codecs())
def test_workers_must_be_a_positive_integer(spec: str, workers: object) -> None:
    with pytest.raises(lc.ConfigError, match="workers must be a positive integer"):
        lc.codec(spec).encode(gaussian(10), KEY, workers=workers)  # pyright: ignore


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(lc.ConfigError, match="reference, numba, triton"), using("cuda"):
        pass


def test_ndqsg_needs_side_information_that_fits() -> None:
    codec, x = lc.NDQSG(), gaussian(1000)
    wire = codec.encode(x, KEY)
    with pytest.raises(TypeError, match="give side="):
        codec.decode(wire)
    with pytest.raises(ValueError, match="1000 values"):
        codec.decode(wire, side=x[:999])
    with pytest.raises(ValueError, match="failed must be a uint8 tensor of 2 values"):
        codec.decode(wire, side=x, failed=torch.zeros(3, dtype=torch.uint8))


# --- text ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec",
    [lc.codec(spec) for spec in SPECS]
    + [lc.NDQSG(alpha=1 / 3), lc.NDQSG(alpha=1), lc.QSGD(block=None), lc.Global(norm="2/inf")]
    + [lc.codec("feedback(ndqsg:alpha=0.3)"), lc.codec("feedback(feedback(rotate(dqsg)))")],
    ids=str,
)
def test_text_round_trips(codec: lc.Codec) -> None:
    assert lc.codec(str(codec)) == codec
    assert hash(lc.codec(str(codec))) == hash(codec)
    assert lc.codec(codec) is codec


def test_spaces_do_not_matter() -> None:
    assert lc.codec(" qsgd : bits = 8 , block = tensor ") == lc.QSGD(bits=8, block=None)


def test_bits_and_levels_complete_each_other() -> None:
    assert lc.QSGD(bits=4).levels == 7 and lc.QSGD(levels=7).bits == 4
    assert lc.DQSG(levels=3).bits == 3 and lc.DQSG(levels=1).bits == 2
    assert lc.QSGD(bits=4, levels=5).levels == 5
    assert lc.QSGD().bits == 4 and lc.DQSG().bits == 4


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        lc.QSGD().bits = 5  # pyright: ignore[reportAttributeAccessIssue]


# --- sums ----------------------------------------------------------------------------------

SUMMABLE = ("none", "fp16", "bf16", "global:bits=4", "global", "global:bits=32", "global:norm=l2")


def test_summable_says_which_codecs_sum() -> None:
    summing = {name for name in lc.codecs() if lc.codec(name).summable}
    assert summing == {"none", "fp16", "bf16", "global"}
    for name in set(lc.codecs()) - summing:
        wire = lc.codec(name).encode(gaussian(10), KEY)
        with pytest.raises(TypeError, match="cannot be summed"):
            _ = wire.payload
        with pytest.raises(TypeError, match="cannot be summed"):
            lc.codec(name).decode_sum(torch.zeros(10), [KEY])


def encode_all(codec: lc.Codec, xs: list[Tensor]) -> tuple[Tensor, list[lc.Wire], dict]:
    """Sum of payloads as a collective would add them, the wires, and options of decode_sum."""
    keys = [lc.Key(rank=rank) for rank in range(len(xs))]
    norm = None
    if isinstance(codec, lc.Global):
        norm = codec.global_norm(torch.cat([codec.local_norm(x) for x in xs]))
    wires = [
        codec.encode(x, key, norm=norm, workers=len(xs)) for x, key in zip(xs, keys, strict=True)
    ]
    total = wires[0].payload.clone()
    for wire in wires[1:]:
        total += wire.payload
    return total, wires, {"keys": keys, "norm": norm, "shape": xs[0].shape}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("spec", SUMMABLE)
def test_decode_sum_is_the_mean_of_decodes(spec: str, workers: int, dtype: torch.dtype) -> None:
    codec = lc.codec(spec)
    for shape in ((1,), (129,), (10, 100)):
        xs = [
            gaussian(math.prod(shape), seed=rank).view(shape).to(dtype) for rank in range(workers)
        ]
        total, wires, options = encode_all(codec, xs)
        mean = codec.decode_sum(total, **options)
        assert mean.shape == shape and mean.dtype == torch.float32
        wanted = torch.stack([codec.decode(w, out=torch.empty(shape)) for w in wires]).mean(0)
        # casts add up in the type they send
        eps = torch.finfo(wires[0].payload.dtype).eps if codec.name != "global" else 2.0**-22
        size = max(float(x.abs().max()) for x in xs) * (10 if spec == "global:norm=l2" else 1)
        torch.testing.assert_close(mean, wanted, rtol=0, atol=workers * eps * size)
        # onto something, with a weight, in the dtype asked for
        start = gaussian(math.prod(shape), seed=50).view(shape)
        out = start.clone()
        y = codec.decode_sum(total, **options, out=out, add=True, weight=0.5)
        assert y.data_ptr() == out.data_ptr()
        torch.testing.assert_close(out, start + mean / 2, rtol=1e-6, atol=1e-6)
        assert codec.decode_sum(total, **options, dtype=dtype).dtype == dtype


@pytest.mark.parametrize(
    ("bits", "most"), [(8, 127), (4, 7), (32, 300)], ids=["int8", "4 bit", "int32"]
)
def test_sums_never_wrap(bits: int, most: int) -> None:
    """All workers at ±max, for every number of workers that fits: the sum is exactly ±max."""
    codec = lc.Global(bits=bits)
    x = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 0.0] * 40) * 3.7
    for workers in range(1, most + 1) if most < 200 else (1, 2, 127, 128, 300):
        wires = [codec.encode(x, lc.Key(rank=r), norm=3.7, workers=workers) for r in range(workers)]
        total = wires[0].payload.clone()
        for wire in wires[1:]:
            total += wire.payload
        keys = [lc.Key(rank=r) for r in range(workers)]
        mean = codec.decode_sum(total, keys, norm=3.7, shape=x.shape)
        torch.testing.assert_close(mean, x, rtol=1e-5, atol=0, msg=f"{workers} workers")


@pytest.mark.parametrize(("bits", "most"), [(8, 127), (4, 7)])
def test_too_many_workers_are_refused(bits: int, most: int) -> None:
    codec = lc.Global(bits=bits)
    codec.encode(gaussian(10), KEY, norm=9.0, workers=most)
    with pytest.raises(lc.ConfigError, match=f"{bits} bits hold no sum of {most + 1} workers"):
        codec.encode(gaussian(10), KEY, norm=9.0, workers=most + 1)
    with pytest.raises(lc.ConfigError, match="at most 63 levels fit"):
        lc.Global(levels=64).encode(gaussian(10), KEY, norm=9.0, workers=2)


def test_exponents_need_headroom() -> None:
    assert lc.GlobalExp(bits=8).levels_for(1) == 126
    codec = lc.GlobalExp(bits=4)
    assert [codec.levels_for(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [6, 5, 4, 4, 3, 3, 2]
    with pytest.raises(lc.ConfigError, match="use bits=4"):
        lc.GlobalExp(bits=3).encode(gaussian(10), KEY, norm=9.0, workers=3)


@pytest.mark.parametrize("spec", ["global", "global:bits=4", "global:bits=32", "global-exp"])
@pytest.mark.parametrize("norm", [2.0, 1.0, 0.0, math.nan, math.inf])
def test_a_norm_that_is_too_small_shows(spec: str, norm: float) -> None:
    """A value above the shared scale is not clipped to a plausible number."""
    codec = lc.codec(spec)
    x = gaussian(1000).clamp(-1, 1)
    x[500] = -2.5
    for given in (norm, torch.tensor(norm)):
        for workers in (1, 2):
            y = codec.decode(codec.encode(x, KEY, norm=given, workers=workers))
            assert not y[500].isfinite()


def test_a_norm_below_by_rounding_is_accepted() -> None:
    """Another backend's 2-norm may differ in its last bits; no value may turn into NaN for it."""
    x = torch.tensor([1.0, -1.0, 0.5])
    for spec in ("global", "global:bits=32", "global-exp"):
        codec = lc.codec(spec)
        y = codec.decode(codec.encode(x, KEY, norm=float(np.nextafter(np.float32(1), 0))))
        torch.testing.assert_close(y[:2], x[:2], rtol=1e-4, atol=0)


def test_norms_are_refused_where_they_mean_nothing() -> None:
    x = gaussian(10)
    for name in set(lc.codecs()) - {"global", "global-exp"}:
        with pytest.raises(TypeError, match="norm="):
            lc.codec(name).encode(x, KEY, norm=1.0)
    for name in ("global", "global-exp"):
        codec = lc.codec(name)
        with pytest.raises(TypeError, match="give norm="):
            codec.encode(x, KEY, workers=2)
        with pytest.raises(ValueError, match="negative"):
            codec.encode(x, KEY, norm=-1.0)
        with pytest.raises(ValueError, match="one number"):
            codec.encode(x, KEY, norm=torch.ones(2))
    with pytest.raises(TypeError, match="give norm="):
        lc.Global().decode_sum(torch.zeros(10, dtype=torch.int8), [KEY])


def test_decode_sum_refuses_what_is_not_the_sum() -> None:
    codec, x = lc.Global(bits=8), gaussian(100)
    payload = codec.encode(x, KEY).payload
    with pytest.raises(TypeError, match="adds up torch.int8"):
        codec.decode_sum(payload.to(torch.int32), [KEY], norm=1.0)
    with pytest.raises(ValueError, match="of 99"):
        codec.decode_sum(payload, [KEY], norm=1.0, shape=(99,))
    packed = lc.Global(bits=4).encode(x, KEY).payload
    with pytest.raises(TypeError, match="give shape="):
        lc.Global(bits=4).decode_sum(packed, [KEY], norm=1.0)
    y = lc.Global(bits=4).decode_sum(packed, [KEY], norm=1.0, out=torch.empty(100))
    assert y.shape == (100,)


def test_fp16_sums_overflow_only_where_the_mean_does() -> None:
    for dtype in DTYPES:
        x = torch.tensor([60000.0, -60000.0, 1.0]).to(dtype)
        total, _, options = encode_all(lc.FP16(), [x] * 8)
        assert total.dtype == torch.float16 and total.isfinite().all()
        mean = lc.FP16().decode_sum(total, **options)
        torch.testing.assert_close(mean, x.to(torch.float32), rtol=2e-3, atol=0)


def test_a_single_fp16_wire_of_several_workers_decodes() -> None:
    """1e5 does not fit fp16, a quarter does: the wire holds it, so decode must return it."""
    x = torch.tensor([1e5, -3.0])
    wire = lc.FP16().encode(x, KEY, workers=4)
    torch.testing.assert_close(lc.FP16().decode(wire), x, rtol=1e-3, atol=0)


def test_a_value_too_large_for_fp16_becomes_infinite() -> None:
    y = lc.FP16().decode(lc.FP16().encode(torch.tensor([1e6, -1e6, 1.0]), KEY))
    assert y.tolist() == [math.inf, -math.inf, 1.0]


@pytest.mark.parametrize("norm", ["max", "l2", "1/1", "2/inf", "inf/2", "3/1.5"])
def test_norms_match_their_definition(norm: str) -> None:
    """‖x‖_{q,p} = (Σ_i ‖x_i‖_q^p)^(1/p), and never below the largest value."""
    named = {"max": (math.inf, math.inf), "l2": (2.0, 2.0)}
    q, p = named[norm] if norm in named else (float(part) for part in norm.split("/"))
    codec = lc.Global(norm=norm)
    for dtype in DTYPES:
        xs = [gaussian(1000, seed=rank).to(dtype) for rank in range(3)]
        local = [np.linalg.norm(x.double().numpy(), q) for x in xs]
        got = torch.cat([codec.local_norm(x) for x in xs])
        np.testing.assert_allclose(got.numpy(), local, rtol=1e-6)
        np.testing.assert_allclose(codec.global_norm(got), np.linalg.norm(local, p), rtol=1e-6)
        assert got.max() >= max(x.abs().max() for x in xs)
    big = torch.full((1000,), FLT_MAX)
    assert codec.local_norm(big).isfinite()
    assert codec.local_norm(torch.empty(0)).item() == 0
    for bad in (math.inf, math.nan):
        mixed = torch.cat([torch.ones(1), codec.local_norm(torch.tensor([1.0, bad]))])
        assert not codec.global_norm(mixed).isfinite()


def test_any_norm_survives_the_wire() -> None:
    codec = lc.Global(norm="1.1/3.3")
    x = gaussian(100)
    wire = codec.encode(x, KEY)
    again = lc.Wire.parse(wire.data, key=KEY, shape=x.shape, dtype=x.dtype)
    assert_same_bits(codec.decode(again), codec.decode(wire))


# --- global-exp's reduce -------------------------------------------------------------------


def test_reduce_may_write_over_either_input() -> None:
    codec = lc.GlobalExp(bits=5)
    for x in (gaussian(1000), gaussian(0)):
        a, b = (
            codec.encode(x * sign, lc.Key(rank=i), norm=9.0, workers=2)
            for i, sign in enumerate((1, -0.3))
        )
        wanted = codec.reduce(a, b, lc.Key(phase=1))
        first, second = a.data.clone(), b.data.clone()
        fresh = codec.reduce(a, b, lc.Key(phase=1), out=torch.empty_like(first))
        assert_same_bits(fresh.data, wanted.data)
        assert_same_bits(a.data, first)
        assert_same_bits(b.data, second)
        for target in ("a", "b"):
            a.data.copy_(first)
            b.data.copy_(second)
            out = a.data if target == "a" else b.data
            result = codec.reduce(a, b, lc.Key(phase=1), out=out)
            assert result.data.data_ptr() == out.data_ptr()
            assert_same_bits(result.data, wanted.data, target)


@pytest.mark.parametrize("target", ["new", "a", "b"])
@pytest.mark.parametrize("bad", ["a", "b"])
def test_reduce_keeps_a_scale_that_is_not_finite(bad: str, target: str) -> None:
    codec = lc.GlobalExp()
    a, b = (
        codec.encode(
            gaussian(100), lc.Key(rank=i), norm=math.nan if name == bad else 9.0, workers=2
        )
        for i, name in enumerate("ab")
    )
    out = {"new": None, "a": a.data, "b": b.data}[target]
    assert codec.decode(codec.reduce(a, b, lc.Key(phase=1), out=out)).isnan().all()


def test_reduce_draws_from_its_own_key_only() -> None:
    """The draws that encoded a or b would bias the sum."""
    codec = lc.GlobalExp()
    a, b = (
        codec.encode(gaussian(1000, seed=i), lc.Key(rank=i), norm=9.0, workers=2) for i in (0, 1)
    )
    first, second = (codec.reduce(a, b, lc.Key(phase=phase)) for phase in (1, 2))
    assert not torch.equal(first.data, second.data)
    other = replace(a, key=lc.Key(seed=99))
    assert_same_bits(codec.reduce(other, b, lc.Key(phase=1)).data, first.data)


def test_reduce_refuses_wires_that_do_not_fit() -> None:
    codec, x = lc.GlobalExp(bits=4), gaussian(100)
    a = codec.encode(x, KEY, norm=9.0, workers=2)
    for b in (
        lc.GlobalExp(bits=5).encode(x, KEY, norm=9.0, workers=2),
        codec.encode(x, KEY, norm=9.0, workers=3),
        codec.encode(x[:99], KEY, norm=9.0, workers=2),
        codec.encode(x.half(), KEY, norm=9.0, workers=2),
        lc.Global(bits=4).encode(x, KEY, norm=9.0, workers=2),
    ):
        with pytest.raises(lc.WireError, match="equal settings"):
            codec.reduce(a, b, lc.Key(phase=1))


@pytest.mark.parametrize("spec", ["none", "fp16", "bf16", "global:bits=8", "global:bits=4"])
def test_a_sum_that_cannot_be_one_raises(spec: str) -> None:
    codec = lc.codec(spec)
    norm = 1.0 if spec.startswith("global") else None
    wire = codec.encode(torch.ones(300), lc.Key(), norm=norm, workers=2)
    for payload, keys in ((wire.payload, []), (wire.payload[:-1], [lc.Key()] * 2)):
        with pytest.raises(ValueError, match="sum"):
            codec.decode_sum(payload, keys, norm=norm, shape=(300,))


def test_topk_of_halves_stays_finite_where_the_norm_does_not_fit() -> None:
    x = torch.full((400,), 60000.0, dtype=torch.float16)
    y = lc.codec("qsgd-topk").decode(lc.codec("qsgd-topk").encode(x, lc.Key()))
    assert y.isfinite().all() and y.max() == torch.finfo(torch.float16).max
