"""Which form a device runs: its own kernels, or the better of torch on it and copies to the CPU.

For a device that has no kernels of ours:

1. Can tensors be copied to the CPU and back? If not, the torch reference is all that there is.
2. Does torch have all that the kernels need there, and does it make the same bytes as on the CPU?
   Devices lack float64 or shifts of int64, or flush subnormal numbers. If not: staged.
3. What quantizes and dequantizes VALUES values in less time, torch or staged?
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import cast

import torch
from torch import Tensor

from laconic._key import Stream
from laconic.kernels import _reference
from laconic.kernels._layout import ScaleKind, blocks, checks, code_offset, groups, packed_bytes
from laconic.kernels._protocol import Dither, Kernels, Lattice, Modulo, Output, Rotation

FORMS = ("reference", "numba", "triton", "staged", "torch")
STAGED = ("staged", "torch")  # forms that code on the CPU, where their scratch is then
VALUES = 1 << 20  # of the measurement

_log = logging.getLogger("laconic")
_BY_DEVICE = {"cpu": "numba", "cuda": "triton"}
_ROUNDS, _PATIENCE_S = 3, 0.2
_TRIED = 1000  # values of the trial: no multiple of a block
_STREAM = Stream(0x2545F491, 0x9E3779B9)
_MAX, _GIVEN = ScaleKind.MAX, ScaleKind.GIVEN


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A form, and why. Seconds are those of the measurement, if one was made."""

    form: str
    why: str
    torch_s: float | None = None
    staged_s: float | None = None


@lru_cache
def choice(device: torch.device) -> Choice:
    """The form for a device, found once in a process."""
    own = _BY_DEVICE.get(device.type)
    if own == "triton" and find_spec("triton") is None:
        _log.warning(f"kernels for {device.type} need Triton, or are slow: pip install triton")
    elif own is not None:
        return Choice(form=own, why="kernels of its own")
    x = _values()
    try:
        there = x.to(device)
        copied = torch.equal(there.cpu(), x)
    except (RuntimeError, NotImplementedError, AssertionError) as error:  # as on meta
        return Choice(form="reference", why=f"its tensors cannot be copied: {_line(error)}")
    if not copied:
        return Choice(form="reference", why="its tensors change when they are copied")
    if (problem := _missing(there, x)) is not None:
        return Choice(form="staged", why=problem)
    seconds = {form: _seconds(load(form), device) for form in STAGED}
    form = min(seconds, key=lambda form: seconds[form])
    return Choice(
        form=form,
        why=f"measured on {VALUES} values",
        torch_s=seconds["torch"],
        staged_s=seconds["staged"],
    )


@lru_cache
def load(form: str) -> Kernels:
    """The module, looked up once: every encode and decode asks for it."""
    return cast(Kernels, import_module(f"laconic.kernels._{form}"))


def _missing(there: Tensor, x: Tensor) -> str | None:
    """Why torch on the device does not do, or None."""
    wanted = dict(outcomes(_reference, x))
    try:
        for kernel, got in outcomes(_reference, there):
            if not torch.equal(got.cpu(), wanted[kernel]):
                return f"torch makes other bytes there, in {kernel}"
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return f"torch lacks an operation there: {_line(error)}"
    return None


def _seconds(kernels: Kernels, device: torch.device) -> float:
    """Of the fastest of some rounds; the first is not counted."""
    x, lattice = torch.linspace(-1, 1, VALUES).to(device), Lattice(512, 7, 4)
    scale = torch.empty(blocks(VALUES, 512), device=device)
    codes = torch.empty(packed_bytes(VALUES, 4), dtype=torch.uint8, device=device)
    found = list[float]()
    while len(found) < 2 or (len(found) <= _ROUNDS and sum(found) < _PATIENCE_S):
        start = time.perf_counter()
        kernels.quantize(x, scale, codes, lattice, dither=Dither(_STREAM), kind=_MAX)
        kernels.dequantize(codes, scale, Output(x), lattice, dither=Dither(_STREAM), offset=7)
        x[:1].cpu()  # until the device has done it
        found.append(time.perf_counter() - start)
    return min(found[1:])


def _values() -> Tensor:
    """Of all sizes from subnormal to large, zeros, and blocks that are not finite."""
    x = torch.linspace(-3, 3, _TRIED) ** 5
    for first, factor in ((0, 1e-44), (128, 1e-30), (256, 0.0), (384, 1e30), (512, torch.inf)):
        x[first : first + 128] *= factor
    return x


def outcomes(kernels: Kernels, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What each kernel writes that `_torch` runs on the device, as bytes or integers.

    Two-norms are found, too, but not compared: their last bit depends on the order of adding.
    """
    n, device, lattice = x.numel(), x.device, Lattice(128, 7, 4)
    byte = {"dtype": torch.uint8, "device": device}
    scale, norm = (torch.empty(blocks(n, 128), device=device) for _ in range(2))
    codes, own, back, mixed = (torch.empty(packed_bytes(n, 4), **byte) for _ in range(4))
    out = torch.zeros(n, dtype=torch.bfloat16, device=device)
    plain = Dither(_STREAM)

    kernels.scales(x, norm, block=128, kind=ScaleKind.L2)
    kernels.scales(x, scale, block=128, kind=_MAX)
    yield "scales", _bits(scale)
    kernels.quantize(x, scale, codes, lattice, dither=plain, kind=_MAX)
    yield "quantize", codes
    kernels.dequantize(codes, scale, Output(out, 0.3, True), lattice, dither=plain, offset=7)
    yield "dequantize", _bits(out)
    kernels.accumulate(x, Output(out, 0.3, True))
    yield "accumulate", _bits(out)

    ones, y, one = (
        torch.ones(1, device=device),
        torch.linspace(-1, 1, n).to(device),
        Lattice(0, 7, 4),
    )
    kernels.quantize(y, ones, own, one, dither=plain, kind=_GIVEN)
    sums = torch.empty(packed_bytes(n, 5), **byte)
    kernels.add_codes(own, own, sums, one, numel=n, width=4, wider=5)
    yield "add_codes", sums
    read = torch.empty(n, dtype=torch.int32, device=device)
    kernels.read_sums(sums, read, width=5, offset=2 * code_offset(7, 4))
    yield "read_sums", read

    kernels.exponential_quantize(y, ones, own, Lattice(0, 6, 4), stream=_STREAM)
    yield "exponential_quantize", own
    kernels.exponential_dequantize(own, ones, Output(out), Lattice(0, 6, 4))
    yield "exponential_dequantize", _bits(out)
    kernels.exponential_reduce(own, own, back, stream=_STREAM, bits=4)
    yield "exponential_reduce", back

    exponents = torch.empty((4, n // 4), dtype=torch.int8, device=device)
    known = kernels.row_exponents(
        y.view(4, -1).square(), exponents, factor=1.5, share=0.1, epsilon=1e-8
    )
    yield "row_exponents", known.to(torch.int8) + exponents
    kernels.times_powers(x, exponents.view(-1), out, inverse=True)
    yield "times_powers", _bits(out)

    nested, modulo = Lattice(128, 63, 3), Modulo(5, 0.9)
    seen, failed = (torch.empty(checks(n), **byte) for _ in range(2))
    cells = torch.empty(packed_bytes(n, 3), **byte)
    kernels.nested_quantize(x, scale, seen, cells, nested, modulo, stream=_STREAM, kind=_MAX)
    yield "nested_quantize", torch.cat([seen, cells])
    kernels.nested_dequantize(
        cells, scale, seen, x, failed, Output(out), nested, modulo, stream=_STREAM
    )
    yield "nested_dequantize", _bits(out)

    turned, rotation = torch.empty(n, device=device), Rotation(_STREAM, 128, (n,))
    kernels.rotate_into(y, turned, rotation)
    yield "rotate_into", _bits(turned)
    kernels.rotate_back(turned, Output(out), rotation)
    yield "rotate_back", _bits(out)
    kernels.rotate_quantize(y, scale, mixed, rotation, lattice, stream=_STREAM, kind=_MAX)
    yield "rotate_quantize", mixed
    kernels.dequantize_rotate(
        mixed, scale, Output(out), rotation, lattice, stream=_STREAM, offset=7
    )
    yield "dequantize_rotate", _bits(out)

    yield "topk", kernels.topk(y, 30)
    yield "words_check", kernels.words_check(_bits(x), 7)
    yield "message_check", kernels.message_check(codes[: groups(n) * 16], 7)
    yield "payload_check", kernels.payload_check(read, 7)


def _bits(x: Tensor) -> Tensor:
    """As integers; all NaNs count as one."""
    kind = torch.int32 if x.dtype == torch.float32 else torch.int16
    return torch.where(x.isnan(), torch.zeros_like(x), x).view(kind) + x.isnan()


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
