"""Numba and Triton against the torch reference: the same bytes, and the same bits decoded.

The reference always runs on the CPU. Where two backends round differently, most elements still
agree: the dither hides one unit of 2^-16. So the ties below are built around the dither, such
that every element would show it.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    DTYPES,
    FLT_MAX,
    PATIENCE_S,
    assert_same_bits,
    covering,
    decode,
    device_of,
    gaussian,
    kernel_threads,
    kernels,
)
from torch import Tensor

import laconic as lc
from laconic._key import Stream
from laconic.kernels import Dither, Lattice, Modulo, Output, ScaleKind, using
from laconic.kernels._layout import (
    LIFT,
    TINY,
    blocks,
    checks,
    code_offset,
    fixed_bits,
    fraction_bits,
    groups,
    packed_bytes,
)
from laconic.kernels._reference.group import dither, pack, unpack

CPU = torch.device("cpu")
KEY = lc.Key(seed=7, step=3, tensor=2, rank=1)
STREAM = KEY.stream()
REFERENCE = kernels("reference")
assert REFERENCE is not None
GIVEN, MAX, L2 = ScaleKind.GIVEN, ScaleKind.MAX, ScaleKind.L2
WEIGHTS = (1.0, 0.3)
Put = Callable[[Tensor], Tensor]  # a copy on the device of the kernels


@dataclass(frozen=True)
class Fast:
    """A fast backend, and where its tensors live."""

    name: str
    module: ModuleType
    device: torch.device

    @property
    def interpreted(self) -> bool:
        """Triton without a GPU: a call takes 20 to 100 ms, whatever its size."""
        return self.name == "triton" and self.device.type == "cpu"

    def some(self, salt: object, *axes: Iterable[Any], count: int = 2) -> list[tuple]:
        """The product of the axes; interpreted, a few of it that differ from test to test."""
        cases = list(itertools.product(*axes))
        if self.interpreted:
            return random.Random(repr(salt)).sample(cases, min(count, len(cases)))
        return cases

    def input(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x as dtype. Triton's interpreter (not the GPU) misreads subnormal bfloat16."""
        x = x.to(dtype)
        if self.interpreted and dtype == torch.bfloat16:
            x = torch.where(x.abs() < torch.finfo(dtype).smallest_normal, 0.0, x)
        return x

    def both(self, run: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Any]:
        """run(kernels, to_device, ..) on the reference and on this backend."""
        return (
            run(_reference(), Tensor.clone, *args, **options),
            run(self.module, self.put, *args, **options),
        )

    def put(self, x: Tensor) -> Tensor:
        """A copy on the backend's device."""
        return x.to(self.device, copy=True)


def _reference() -> ModuleType:
    assert REFERENCE is not None
    return REFERENCE


def fast_backend(name: str) -> Iterator[Fast]:
    module = kernels(name)
    if module is None:
        pytest.skip(f"the {name} kernels cannot be loaded here")
    # the interpreter computes with NumPy, which warns where a GPU is silent
    with np.errstate(all="ignore"):
        yield Fast(name, module, device_of(name))


@pytest.fixture(params=["numba", "triton", "staged"])
def fast(request: pytest.FixtureRequest) -> Iterator[Fast]:
    yield from fast_backend(request.param)


def compare(results: tuple[dict[str, Tensor], dict[str, Tensor]], what: object) -> None:
    """Equal bits of everything that a kernel wrote."""
    wanted, got = results
    for name, value in wanted.items():
        assert_same_bits(got[name].cpu(), value, f"{name} of {what}")


# --- inputs --------------------------------------------------------------------------------


def rough(count: int, block: int) -> Tensor:
    """Blocks of every size from subnormal to the largest float, zeros, and bad values."""
    x = gaussian(count, seed=count)
    size = block or max(count, 1)
    scales = (1.0, 1e-45, 2.0**-61, 3e-39, 0.0, 1e37, 2.0**-59, math.nan, 1e-30, math.inf, 1e30)
    for i, part in enumerate(x.split(size)):
        part *= scales[i % len(scales)]
        if i % len(scales) in (1, 6):  # exactly at both sides of the limit, and the least float
            part[0] = (1e-45, 2.0**-60)[i % 2]
        if i % len(scales) == 2:
            part[0] = float(np.nextafter(np.float32(TINY), np.float32(0)))
        if i % len(scales) == 5:
            part[-1] = -FLT_MAX
    return x


def quantize(
    module: ModuleType,
    put: Put,
    x: Tensor,
    lattice: Lattice,
    *,
    kind: ScaleKind,
    scale: Tensor | None = None,
) -> dict[str, Tensor]:
    """Into one buffer, codes then scales, as a wire holds them."""
    bits = lattice.bits
    size = 4 * x.numel() if bits == 32 else packed_bytes(x.numel(), bits)
    count = blocks(x.numel(), lattice.block)
    body = put(torch.full((size + 4 * count,), 0xAA, dtype=torch.uint8))
    codes = body[:size].view(torch.int32) if bits == 32 else body[:size]
    scales = body[size:].view(torch.float32)
    if scale is not None:
        scales.copy_(scale)
    module.quantize(put(x), scales, codes, lattice, dither=Dither(STREAM), kind=kind)
    return {"codes": codes, "scales": scales}


def dequantize(
    module: ModuleType,
    put: Put,
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    lattice: Lattice,
    *,
    offset: int,
    stream: Stream | None = None,
    weight: float = 1.0,
    add: bool = False,
) -> dict[str, Tensor]:
    target = put(out)
    dither = None if stream is None else Dither(stream)
    output = Output(target, weight, add)
    module.dequantize(put(codes), put(scales), output, lattice, dither=dither, offset=offset)
    return {"out": target}


# --- whole codecs --------------------------------------------------------------------------

SPECS = (
    "qsgd:bits=2,block=128",
    "qsgd:bits=3,block=100",
    "qsgd:bits=4,block=512",
    "qsgd:bits=5,block=7",
    "qsgd:bits=6,block=1",
    "qsgd:bits=7,block=384",
    "qsgd:bits=8,block=tensor",
    "dqsg:bits=2,block=256",
    "dqsg:bits=3,block=64",
    "dqsg:bits=4,block=1024",
    "dqsg:bits=8,block=512",
    "dqsg:levels=5,block=tensor",
    "ndqsg",
    "ndqsg:levels=63,ratio=5,block=512",
    "ndqsg:levels=7,ratio=125,alpha=0.75,block=100",
    "ndqsg:levels=3,ratio=9,alpha=0.9,block=32",
    "global:bits=4",
    "global:bits=8",
    "global:bits=32",
    "global-exp:bits=3",
    "global-exp:bits=4",
    "global-exp:bits=8",
)
KINDS = {"gaussian": lambda n, b: gaussian(n, seed=n), "rough": rough}


SIZES = (1, 2, 127, 128, 129, 511, 513, 1000, 4099)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_wires_are_equal_and_decode_equally(fast: Fast, spec: str, kind: str) -> None:
    codec = lc.codec(spec)
    block = getattr(codec, "block", None) or 0
    numels = (300 if block in (1, 7) else 1000,) if fast.interpreted else SIZES
    for dtype, numel in fast.some((spec, kind), DTYPES, numels, count=1):
        x = fast.input(KINDS[kind](numel, block), dtype)
        with using("reference"):
            wanted = codec.encode(x, KEY)
        with using(fast.name):
            wire = codec.encode(x.to(fast.device), KEY)
        assert_same_bits(wire.data.cpu(), wanted.data, (numel, dtype, "wire"))
        side = fast.input(x.nan_to_num(nan=1.0) + gaussian(numel, seed=5).to(dtype), dtype)
        for weight, add in fast.some((spec, kind), WEIGHTS, (False, True)):
            out = gaussian(numel, seed=6).to(dtype)
            options: dict[str, Any] = {"weight": weight, "add": add}
            with using("reference"):
                a = codec.decode(wanted, side=side, out=out.clone(), **options)
            with using(fast.name):
                target = out.to(fast.device, copy=True)
                b = codec.decode(wire, side=side.to(fast.device), out=target, **options)
            assert_same_bits(b.cpu(), a, (numel, dtype, options))


@pytest.mark.parametrize("spec", SPECS)
def test_wires_decode_equally_into_other_dtypes(fast: Fast, spec: str) -> None:
    codec = lc.codec(spec)
    for sent, target in fast.some(spec, DTYPES, DTYPES, count=1):
        x = gaussian(300).to(sent)
        results = []
        for name, device in (("reference", CPU), (fast.name, fast.device)):
            with using(name):
                wire = codec.encode(x.to(device), KEY)
                out = torch.empty(300, dtype=target, device=device)
                results.append(decode(codec, wire, x.to(device), out=out, weight=0.3).cpu())
        assert_same_bits(results[1], results[0], (sent, target))


# --- scales --------------------------------------------------------------------------------

BLOCKS = (0, 1, 7, 64, 100, 128, 384, 512, 1024, 4096)


def find_scales(
    module: ModuleType, put: Put, x: Tensor, *, block: int, kind: ScaleKind, behind: int = 0
) -> Tensor:
    """Scales of all but the last `behind` values."""
    numel = x.numel() - behind
    out = put(torch.full((blocks(numel, block),), 77.0))
    module.scales(put(x)[:numel], out, block=block, kind=kind)
    return out.cpu()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", BLOCKS)
def test_scales(fast: Fast, block: int, kind: str) -> None:
    """Equal for the largest magnitude; within one unit in the last place for the 2-norm."""
    numel = min(4099, 30 * block) if fast.interpreted and block else 4099
    for dtype, which in fast.some((block, kind), DTYPES, (MAX, L2)):
        x = fast.input(KINDS[kind](numel, block), dtype)
        wanted, got = fast.both(find_scales, x, block=block, kind=which)
        assert torch.equal(wanted.isfinite(), got.isfinite())
        ok = wanted.isfinite()
        ulps = (wanted[ok].view(torch.int32) - got[ok].view(torch.int32)).abs()
        assert (ulps <= (0 if which is MAX else 1)).all()
        # never below the largest magnitude, or rounding would exceed the top level
        largest = torch.stack([part.float().abs().max() for part in x.split(block or numel)])
        assert (got[ok] >= largest[ok]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [0, 100, 128])
def test_blocks_that_are_not_finite_have_equal_bytes(
    fast: Fast, block: int, dtype: torch.dtype
) -> None:
    """A NaN has many forms, and conversions from 16 bits choose differently: one must be sent."""
    for bad, place in fast.some((block, dtype), (math.nan, math.inf), (150, 299)):
        x = gaussian(300).to(dtype)
        x[place] = bad  # torch converts the end of a tensor with other code than its middle
        results = fast.both(quantize, x, Lattice(block, 7, 4), kind=MAX)
        for name in ("codes", "scales"):
            wanted, got = (result[name].cpu().view(torch.uint8) for result in results)
            assert_same_bits(got, wanted, (name, bad, place))


@pytest.mark.parametrize("numel", [1, 2, 129, 1000])
@pytest.mark.parametrize("block", [0, 100, 128, 512])
def test_l2_norms_of_short_blocks(fast: Fast, block: int, numel: int) -> None:
    """A tail's scale must not see the padding, nor what lies behind the tensor."""
    whole = torch.full((numel + 512,), 1e30)
    whole[:numel] = gaussian(numel)
    wanted, got = fast.both(find_scales, whole, block=block, kind=L2, behind=512)
    torch.testing.assert_close(got, wanted, rtol=2.0**-22, atol=0)


# --- linear --------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [1, 2, 3, 7, 31, 63, 64, 127])
@pytest.mark.parametrize("block", [0, 100, 128, 512])
def test_quantize_with_given_scales(fast: Fast, levels: int, block: int) -> None:
    """2-norms may differ in the last bit; under equal scales all bytes are equal."""
    bits = fixed_bits(levels)
    for (numel,) in fast.some((levels, block), (129, 1000), count=1):
        x = gaussian(numel)
        scale = torch.zeros(blocks(numel, block))
        _reference().scales(x, scale, block=block, kind=L2)
        lattice = Lattice(block, levels, bits)
        results = fast.both(quantize, x, lattice, kind=GIVEN, scale=scale)
        compare(results, (numel, lattice))
        wanted = results[0]
        for weight, add, subtract, dtype in fast.some(
            (levels, block), WEIGHTS, (False, True), (False, True), DTYPES
        ):
            out = gaussian(numel, seed=3).to(dtype)
            decoded = fast.both(
                dequantize,
                wanted["codes"],
                wanted["scales"],
                out,
                lattice,
                stream=STREAM if subtract else None,
                offset=code_offset(levels, bits),
                weight=weight,
                add=add,
            )
            compare(decoded, (numel, lattice, weight, add, subtract, dtype))


@pytest.mark.parametrize("levels", [1, 100, 1000, 32767])
def test_wide_codes(fast: Fast, levels: int) -> None:
    for x in (gaussian(1000), gaussian(129).half(), gaussian(129).bfloat16()):
        scale = x.float().abs().max().view(1)
        lattice = Lattice(0, levels, 32)
        results = fast.both(quantize, x, lattice, kind=GIVEN, scale=scale)
        compare(results, levels)
        codes = results[0]["codes"] * 50  # as sums of many
        for weight, add in fast.some(levels, WEIGHTS, (False, True)):
            out = gaussian(x.numel(), seed=3).to(x.dtype)
            given = (codes, scale, out, lattice)
            decoded = fast.both(dequantize, *given, offset=0, weight=weight, add=add)
            compare(decoded, (levels, weight, add))


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize(
    "scale", [1.0, 0.0, -0.0, 1e-45, 2.0**-61, FLT_MAX, math.inf, math.nan, -1.0]
)
def test_given_scales_that_do_not_fit(fast: Fast, bits: int, scale: float) -> None:
    """One value above the scale makes it NaN, and its own code zero; a hair above is clamped."""
    levels = {4: 7, 8: 127, 32: 1000}[bits]
    base = gaussian(400).clamp(-1, 1)
    unit = scale if math.isfinite(scale) and scale > 0 else 1.0
    sizes = (1.0, 1 + 2.0**-17, 1 + 2.0**-15, 1.5, math.inf, math.nan)
    for (largest,) in fast.some((bits, scale), sizes):
        x = base * unit
        x[130] = -torch.tensor(largest) * unit
        lattice = Lattice(0, levels, bits)
        results = fast.both(quantize, x, lattice, kind=GIVEN, scale=torch.tensor([scale]))
        compare(results, (scale, largest))


@pytest.mark.parametrize("workers", [1, 3, 7])
@pytest.mark.parametrize("bits", [4, 8])
def test_sums_of_codes(fast: Fast, bits: int, workers: int) -> None:
    """8-bit sums come without padding: the last group is short."""
    levels = (2 ** (bits - 1) - 1) // workers
    generator = torch.Generator().manual_seed(workers)
    for (numel,) in fast.some((bits, workers), (1, 127, 128, 129, 1000)):
        most = workers * levels
        q = torch.randint(-most, most + 1, (groups(numel), 128), generator=generator)
        if bits == 8:
            offset = 128
            codes = pack(q + 128, 8).view(-1)[:numel].clone()
        else:
            offset = most
            codes = pack(q + most, 4).view(-1)
        for add, dtype in fast.some((bits, workers), (False, True), DTYPES):
            out = gaussian(numel).to(dtype)
            given = (codes, torch.tensor([0.7]), out, Lattice(0, levels, bits))
            decoded = fast.both(dequantize, *given, offset=offset, weight=1 / workers, add=add)
            compare(decoded, (numel, add, dtype))
            if not add and dtype == torch.float32:  # and the reference itself is right
                wanted = q.view(-1)[:numel].double() * 0.7 / levels / workers
                torch.testing.assert_close(decoded[0]["out"].double(), wanted, rtol=1e-6, atol=0)


# --- ties ----------------------------------------------------------------------------------


def preimage(target: Tensor, scale: float, gain: float) -> tuple[Tensor, Tensor]:
    """x whose product with gain/scale, the factor rounded down, is exactly `target`; and where
    there is one."""
    s = np.float32(scale)
    lift = np.float32(LIFT if s < TINY else 1.0)
    factor = np.nextafter(np.float32(gain) / np.float32(s * lift), np.float32(0), dtype=np.float32)
    wanted = target.numpy()
    x = (wanted.astype(np.float64) / float(factor) / float(lift)).astype(np.float32)
    found = np.zeros(wanted.shape, bool)
    for ulps in (0, 1, -1, 2, -2, 3, -3):
        candidate = (x.view(np.int32) + np.int32(ulps)).view(np.float32)
        hit = ((candidate * lift) * factor == wanted) & ~found & (np.abs(candidate) <= s)
        x[hit] = candidate[hit]
        found |= hit
    return torch.from_numpy(np.where(found, x, np.float32(0))), torch.from_numpy(found)


def tie_inputs(levels: int, scale: float, gain: float, seed: int) -> Tensor:
    """Values half a unit of fixed point from two, of which one rounds up and one down.

    Element j has dither r: with t = m·2^F - 1 - r the code is m - 1, with one more it is m.
    """
    fraction = fraction_bits(levels)
    r = dither(STREAM, 4, fraction, CPU).view(-1)
    generator = torch.Generator().manual_seed(seed)
    m = torch.randint(-levels + 1, levels + 1, r.shape, generator=generator)
    t = (m << fraction) - 1 - r
    x, found = preimage((t.double() + 0.5).to(torch.float32), scale, gain)
    x[0] = scale  # sets the scale, where it is found
    assert found.float().mean() > 0.3
    return x


@pytest.mark.parametrize("scale", [1.0, 0.7, 2.0**-30, 1e-30, 3e38])
@pytest.mark.parametrize("levels", [1, 3, 7, 63, 127])
def test_rounding_ties_of_quantize(fast: Fast, levels: int, scale: float) -> None:
    """Half to even: every element sits where another rounding changes its code."""
    gain = float(levels << fraction_bits(levels))
    x = tie_inputs(levels, scale, gain, seed=levels)
    bits = fixed_bits(levels)
    for ((kind, block),) in fast.some((levels, scale), ((MAX, 0), (MAX, 512), (GIVEN, 0))):
        lattice = Lattice(block, levels, bits)
        results = fast.both(quantize, x, lattice, kind=kind, scale=torch.tensor([scale]))
        compare(results, (levels, scale, kind, block))


def test_ties_are_where_rounding_matters() -> None:
    """The inputs have teeth: rounding half up instead of to even changes many codes."""
    levels, fraction = 7, 16
    x = tie_inputs(levels, 1.0, float(levels << fraction), seed=levels)
    factor = np.nextafter(np.float32(levels << fraction), np.float32(0), dtype=np.float32)
    y = torch.from_numpy(x.numpy() * factor).double()
    r = dither(STREAM, 4, fraction, CPU).view(-1)
    to_even, up = y.round().long(), (y + 0.5).floor().long()
    changed = ((to_even + r) >> fraction) != ((up + r) >> fraction)
    assert changed.sum() > 60


@pytest.mark.parametrize("levels", [1000, 32767])
def test_rounding_ties_of_wide_codes(fast: Fast, levels: int) -> None:
    x = tie_inputs(levels, 1.0, float(levels << fraction_bits(levels)), seed=1)
    results = fast.both(quantize, x, Lattice(0, levels, 32), kind=GIVEN, scale=torch.ones(1))
    compare(results, levels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_ties_of_16_bit_outputs(fast: Fast, dtype: torch.dtype) -> None:
    """Decoded values halfway between two halves, normal and subnormal, near the largest."""
    eps = torch.finfo(dtype).eps
    tiny = torch.finfo(dtype).smallest_normal * eps
    largest = torch.finfo(dtype).max
    scales = [1 + eps / 2, 1 + 3 * eps / 2, 2 - eps / 2, 3 + eps, tiny / 2, 3 * tiny / 2]
    scales += [5 * tiny / 2, tiny / 4]
    scales += [largest, largest * (1 - eps / 4), largest * (1 - 3 * eps / 4)]
    scales += [float(np.nextafter(np.float32(tiny / 2), np.float32(1)))]
    scale = torch.tensor(scales)
    if fast.interpreted and dtype == torch.bfloat16:  # see Fast.input
        scale = scale.clamp(min=torch.finfo(dtype).smallest_normal)
    q = torch.tensor([1, -1, 0, 1]).repeat(len(scales))
    codes = pack(torch.nn.functional.pad(q + 1, (0, -q.numel() % 128)).view(-1, 128), 2).view(-1)
    smallest = 0.0 if fast.interpreted else -tiny
    for start, weight in itertools.product((None, 0.0, 1.0, smallest), (1.0, 2.0)):
        out = torch.full(q.shape, start or 0.0, dtype=dtype)
        given = (codes, scale, out, Lattice(4, 1, 2))
        decoded = fast.both(dequantize, *given, offset=1, weight=weight, add=start is not None)
        compare(decoded, (start, weight))
        if start is None and weight == 1.0:  # torch's own conversion, as a second opinion
            wanted = (q.view(-1, 4) * scale[:, None]).clamp(-largest, largest).to(dtype).view(-1)
            assert_same_bits(decoded[0]["out"], wanted)


@pytest.mark.parametrize("weight", [1.0, 0.3, 3.0, -1.0, 0.0, 1e10, 1e-30, 1e-45])
def test_decoding_at_extreme_scales_and_weights(fast: Fast, weight: float) -> None:
    """Products that overflow are clamped, those that underflow round once, NaN stays NaN."""
    scales = [1.0, 1e-45, 1e-40, 2.0**-61, 2.0**-60, 1e-30, 1e30, 3e38, FLT_MAX, 0.0]
    scales += [math.inf, math.nan, -1.0, 512.0, 1e36]
    scale = torch.tensor(scales)
    generator = torch.Generator().manual_seed(1)
    numel = 40 * len(scales)
    codes = torch.randint(0, 256, (packed_bytes(numel, 4),), generator=generator).to(torch.uint8)
    for stream, dtype, add in fast.some(weight, (None, STREAM), DTYPES, (False, True), count=4):
        if fast.interpreted and dtype == torch.bfloat16 and not add:
            continue  # see Fast.input
        out = gaussian(numel).to(dtype)
        given = (codes, scale, out, Lattice(40, 7, 4))
        decoded = fast.both(dequantize, *given, stream=stream, offset=7, weight=weight, add=add)
        compare(decoded, (weight, dtype, add))


@pytest.mark.parametrize("scale", [1.0, 1e-30, FLT_MAX, math.inf, math.nan])
@pytest.mark.parametrize("block", [0, 128, 512])
def test_scales_shared_by_whole_groups(fast: Fast, block: int, scale: float) -> None:
    """The fast path of aligned blocks, one of them bad, over all widths."""
    for bits, stream in fast.some((block, scale), range(2, 9), (None, STREAM)):
        levels = 2 ** (bits - 1) - 1
        scales = torch.full((blocks(1000, block),), 0.5)
        scales[-1] = scale
        generator = torch.Generator().manual_seed(bits)
        size = packed_bytes(1000, bits)
        codes = torch.randint(0, 256, (size,), generator=generator).to(torch.uint8)
        given = (codes, scales, torch.empty(1000), Lattice(block, levels, bits))
        decoded = fast.both(dequantize, *given, stream=stream, offset=code_offset(levels, bits))
        compare(decoded, (bits, block, scale))


# --- exponential ---------------------------------------------------------------------------


def exponential_quantize(
    module: ModuleType, put: Put, x: Tensor, scale: float, *, levels: int, bits: int
) -> dict[str, Tensor]:
    codes = put(torch.full((packed_bytes(x.numel(), bits),), 0xAA, dtype=torch.uint8))
    scales = put(torch.tensor([scale]))
    module.exponential_quantize(put(x), scales, codes, Lattice(0, levels, bits), stream=STREAM)
    return {"codes": codes, "scales": scales}


@pytest.mark.parametrize("bits", range(3, 9))
def test_exponential_quantize(fast: Fast, bits: int) -> None:
    top = 2 ** (bits - 1) - 1
    wide = gaussian(600) * torch.logspace(-39, 0, 600)  # all exponents down to subnormal
    special = torch.tensor([1.0, -1.0, 0.0, -0.0, 2.0**-100, 1e-45, 0.75, 2.0, math.inf, math.nan])
    values = ((wide / 5).clamp(-1, 1), special, gaussian(129).clamp(-1, 1).half())
    scales = (1.0, 0.7, 1e-30, 3e-45, 3e38, 0.0, math.inf, math.nan)
    for levels, scale, x in fast.some(bits, {1, top - 1}, scales, values, count=6):
        factor = scale if math.isfinite(scale) and scale else 1.0
        results = fast.both(exponential_quantize, x * factor, scale, levels=levels, bits=bits)
        compare(results, (bits, levels, scale))


@pytest.mark.parametrize("levels", [5, 60, 126])
def test_rounding_ties_of_exponential_quantize(fast: Fast, levels: int) -> None:
    """Small values half a unit from two; larger ones at the last mantissa bit that is kept."""
    r = dither(STREAM, 4, 16, CPU).view(-1)
    small = (65535 - r).double() + 0.5
    x, found = preimage((small * 2.0 ** -(levels + 15)).to(torch.float32), 1.0, 1.0)
    assert found.float().mean() > 0.3
    exponent = (torch.arange(512) % (levels - 1)) + 128 - levels
    words = (exponent << 23) | ((65535 - r) << 7)
    low = torch.tensor([63, 64, 65, 127])[torch.arange(512) % 4]
    y, landed = preimage((words | low).to(torch.int32).view(torch.float32), 1.0, 1.0)
    assert landed.float().mean() > 0.3
    for values in (x, -x, y, -y):
        results = fast.both(exponential_quantize, values, 1.0, levels=levels, bits=8)
        compare(results, levels)


def exponential_dequantize(
    module: ModuleType,
    put: Put,
    codes: Tensor,
    scale: Tensor,
    out: Tensor,
    *,
    levels: int,
    bits: int,
    weight: float,
    add: bool,
) -> dict[str, Tensor]:
    target = put(out)
    output, lattice = Output(target, weight, add), Lattice(0, levels, bits)
    module.exponential_dequantize(put(codes), put(scale), output, lattice)
    return {"out": target}


@pytest.mark.parametrize("bits", range(3, 9))
def test_exponential_dequantize(fast: Fast, bits: int) -> None:
    """Every code, the one for "not a number" too."""
    codes = torch.arange(512).remainder(1 << bits).view(4, 128)
    packed = pack(codes, bits).view(-1)
    top = 2 ** (bits - 1) - 1
    scales = (1.0, 1e-40, 1e30, FLT_MAX, math.nan)
    for levels, scale, weight, add, dtype, numel in fast.some(
        bits, {1, top - 1}, scales, WEIGHTS, (False, True), DTYPES, (512, 385), count=4
    ):
        if fast.interpreted and dtype == torch.bfloat16 and not add:
            continue  # see Fast.input
        options: dict[str, Any] = {"levels": levels, "bits": bits, "weight": weight, "add": add}
        out = gaussian(numel).to(dtype)
        results = fast.both(exponential_dequantize, packed, torch.tensor([scale]), out, **options)
        compare(results, (scale, dtype, numel, options))


def exponential_reduce(
    module: ModuleType, put: Put, a: Tensor, b: Tensor, *, bits: int, target: str
) -> dict[str, Tensor]:
    first, second = put(a), put(b)
    out = {"new": torch.full_like(first, 0xAA), "a": first, "b": second}[target]
    module.exponential_reduce(first, second, out, stream=STREAM, bits=bits)
    return {"out": out}


@pytest.mark.parametrize("target", ["new", "a", "b"])
@pytest.mark.parametrize("bits", range(3, 9))
def test_exponential_reduce(fast: Fast, bits: int, target: str) -> None:
    """All pairs of random codes; also onto either input."""
    generator = torch.Generator().manual_seed(bits)
    a, b = (
        torch.randint(0, 256, (packed_bytes(1000, bits),), generator=generator).to(torch.uint8)
        for _ in range(2)
    )
    for (second,) in fast.some((bits, target), (b, a, torch.zeros_like(a)), count=1):
        results = fast.both(exponential_reduce, a, second, bits=bits, target=target)
        compare(results, (bits, target))


# --- nested --------------------------------------------------------------------------------


def nested_quantize(
    module: ModuleType, put: Put, x: Tensor, lattice: Lattice, modulo: Modulo
) -> dict[str, Tensor]:
    codes = put(torch.full((packed_bytes(x.numel(), lattice.bits),), 0xAA, dtype=torch.uint8))
    check = put(torch.full((checks(x.numel()),), 0xAA, dtype=torch.uint8))
    scales = put(torch.full((blocks(x.numel(), lattice.block),), 77.0))
    module.nested_quantize(put(x), scales, check, codes, lattice, modulo, stream=STREAM, kind=MAX)
    return {"codes": codes, "check": check, "scales": scales}


def nested_dequantize(
    module: ModuleType,
    put: Put,
    sent: dict[str, Tensor],
    side: Tensor,
    out: Tensor,
    lattice: Lattice,
    modulo: Modulo,
    *,
    weight: float = 1.0,
    add: bool = False,
) -> dict[str, Tensor]:
    target = put(out)
    failed = put(torch.full_like(sent["check"], 0xAA))
    module.nested_dequantize(
        *(put(sent[name]) for name in ("codes", "scales", "check")),
        put(side),
        failed,
        Output(target, weight, add),
        lattice,
        modulo,
        stream=STREAM,
    )
    return {"out": target, "failed": failed}


def nested_options(levels: int, ratio: int, alpha: float, block: int) -> tuple[Lattice, Modulo]:
    bits = max(2, math.ceil(math.log2(ratio)))
    return Lattice(block, levels, bits), Modulo(ratio, alpha)


@pytest.mark.parametrize(
    ("levels", "ratio", "alpha", "block"),
    [
        (3, 3, 1.0, 0),
        (3, 3, 1.0, 512),
        (63, 5, 0.9, 100),
        (10, 125, 0.5, 128),
        (7, 9, 1.0, 7),
        (20, 33, 1.0, 1024),
        (1, 17, 0.99, 384),
    ],
)
def test_nested(fast: Fast, levels: int, ratio: int, alpha: float, block: int) -> None:
    """Near, far and bad side information, in every dtype."""
    options = nested_options(levels, ratio, alpha, block)
    for numel, kind in fast.some(options, (129, 1500), KINDS):
        x = KINDS[kind](numel, block)
        results = fast.both(nested_quantize, x, *options)
        compare(results, (numel, kind, options))
        side = x + gaussian(numel, seed=4)
        side[5], side[60], side[128] = math.nan, math.inf, -1e38
        for weight, add, dtype in fast.some((options, kind), WEIGHTS, (False, True), DTYPES):
            out, near = gaussian(numel).to(dtype), fast.input(side, dtype)
            decoded = fast.both(
                nested_dequantize, results[0], near, out, *options, weight=weight, add=add
            )
            compare(decoded, (numel, kind, weight, add, dtype))


@pytest.mark.parametrize("levels", [3, 63])
@pytest.mark.parametrize("ratio", [3, 5])
def test_rounding_ties_of_nested(fast: Fast, levels: int, ratio: int) -> None:
    """Encoded values, and side information, half a unit from where the cell changes."""
    fraction = fraction_bits(levels)
    gain = float(levels << fraction)
    options = nested_options(levels, ratio, 1.0, 0)
    x = tie_inputs(levels, 1.0, gain, seed=2)
    results = fast.both(nested_quantize, x, *options)
    compare(results, "encode")
    r = dither(STREAM, 4, fraction, CPU).view(-1)
    q = unpack(results[0]["codes"].view(4, -1), options[0].bits).view(-1).long() - (ratio - 1) // 2
    w = (q << (fraction + 1)) - (2 * r + 1) + (1 << fraction)
    # with ty = k the cell is one, with k + 1 the next; k modulo the period, nearest to x
    period = ratio << fraction
    k = (w + period - 1) // 2
    t = (x.double() * gain).long()
    k = k + period * torch.round((t - k) / period).long()
    side, found = preimage((k.double() + 0.5).to(torch.float32), 1.0, gain)
    assert found.float().mean() > 0.2
    decoded = fast.both(nested_dequantize, results[0], side, torch.empty(512), *options)
    compare(decoded, "decode")
    # teeth: a nudge of the side information to either side of the tie decodes differently
    below, above = (
        nested_dequantize(
            _reference(),
            Tensor.clone,
            results[0],
            torch.where(found, side * factor, side),
            torch.empty(512),
            *options,
        )["out"]
        for factor in (1 - 2.0**-20, 1 + 2.0**-20)
    )
    assert (below != above).sum() > 50


# --- large tensors: several threads, several programs --------------------------------------

LARGE = (
    "qsgd:bits=4,block=512",
    "qsgd:bits=3,block=100",
    "qsgd:bits=2,block=4096",
    "qsgd:bits=8,block=tensor",
    "dqsg:bits=4,block=8192",
    "dqsg:bits=2,block=7",
    "ndqsg:levels=5,ratio=5,block=1000",
    "ndqsg",
    "global:bits=4",
    "global:bits=8",
    "global:bits=32",
    "global-exp:bits=5",
)


def large(fast: Fast) -> int:
    """Several parts for the CPU's threads; several programs, if few, for the interpreter."""
    return 2 * 4096 + 77 if fast.interpreted else 4 * (1 << 15) + 77


@pytest.mark.parametrize("spec", LARGE)
def test_parts_of_a_large_tensor_fit_together(fast: Fast, spec: str) -> None:
    """Each thread takes whole groups; blocks and check bytes may cross their borders."""
    codec, numel = lc.codec(spec), large(fast)
    x = gaussian(numel) * torch.arange(numel).sin()

    def run(name: str, device: torch.device) -> dict[str, Tensor]:
        with using(name):
            wire = codec.encode(x.to(device), KEY)
            written = {"wire": wire.data, "out": decode(codec, wire, x.to(device))}
            if isinstance(codec, lc.GlobalExp):
                written["sum"] = codec.reduce(wire, wire, lc.Key(phase=1)).data
        return written

    wanted = run("reference", CPU)
    for count in (1,) if fast.name == "triton" else (1, 2, 3):
        with kernel_threads(count):
            compare((wanted, run(fast.name, fast.device)), (spec, count))


@pytest.mark.parametrize(
    ("spec", "part", "bad"),
    covering(
        ("global", "global-exp", "dqsg:block=tensor"),
        ("first", "middle", "last"),
        (math.nan, math.inf),
    ),
)
def test_a_bad_value_in_any_part_of_a_large_tensor_is_seen(
    fast: Fast, spec: str, part: str, bad: float
) -> None:
    codec, numel = lc.codec(spec), large(fast)
    place = {"first": 0, "middle": numel // 2, "last": numel - 1}[part]
    x = gaussian(numel).to(fast.device)
    x[place] = bad
    with using(fast.name), kernel_threads(3):
        assert codec.decode(codec.encode(x, KEY)).isnan().all()
        if spec != "dqsg:block=tensor":  # and under a norm that someone else computed
            assert not codec.decode(codec.encode(x, KEY, norm=9.0))[place].isfinite()


def round_trip(module: ModuleType, put: Put, x: Tensor, stream: Stream) -> dict[str, Tensor]:
    """4-bit codes of x under one scale, and what they decode to."""
    codes = put(torch.zeros(packed_bytes(x.numel(), 4), dtype=torch.uint8))
    scales, out = put(torch.zeros(1)), put(torch.zeros(x.numel()))
    lattice, dither = Lattice(0, 7, 4), Dither(stream)
    module.quantize(put(x), scales, codes, lattice, dither=dither, kind=MAX)
    module.dequantize(codes, scales, Output(out), lattice, dither=dither, offset=7)
    return {"codes": codes, "out": out}


def test_streams_reach_kernels_whole(fast: Fast) -> None:
    """Words above 2^31 are unsigned: streams at the ends of the range."""
    high, ones = 0x80000000, 0xFFFFFFFF
    for stream in (Stream(0, 0), Stream(ones, ones), Stream(high, 1), Stream(1, high)):
        compare(fast.both(round_trip, gaussian(300), stream), stream)


# --- compiled code -------------------------------------------------------------------------


def test_compiled_kernels_follow_their_sources(tmp_path: Path) -> None:
    """Numba caches machine code by the file of the outer function, and inlines helpers of others.

    After an edit or a `git pull` that changes a helper only, a stale kernel would write bytes
    that other ranks read differently.
    """
    if kernels("numba") is None:
        pytest.skip("the numba kernels cannot be loaded here")
    package = tmp_path / "laconic"
    source = Path(lc.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    script = (
        f"import torch, laconic as lc; assert lc.__file__.startswith({str(tmp_path)!r}); "
        "print(lc.codec('global-exp').encode(torch.ones(300).cumsum(0), lc.Key()).data.tolist())"
    )

    def encoded() -> str:
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = encoded()
    assert encoded() == first
    helper = package / "kernels" / "_numba" / "group.py"
    text = helper.read_text()
    assert "0x7FEB352D" in text
    helper.write_text(text.replace("0x7FEB352D", "0x7FEB3529"))
    assert encoded() != first
