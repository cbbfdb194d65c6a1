"""Global-QSGD, exponential: powers of two under one shared scale, added by a tree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic._key import Key
from laconic._wire import HEADER_BYTES, Header, Wire
from laconic.codecs._base import Codec, Into, buffer
from laconic.codecs._linear import body_bytes, is_integer, sections
from laconic.codecs._norms import global_norm, local_norm, shared_scale
from laconic.errors import ConfigError, WireError
from laconic.kernels import ScaleKind, backend


@dataclass(frozen=True, kw_only=True)
class GlobalExp(Codec):
    """`global-exp`: sign and exponent of each value, and sums that stay signs and exponents.

    N = max over workers and values, L levels: ±N·{1, ½, ¼, .., 2^(1-L)} and 0. With
    y = |x|/N = f·2^e, 1 ≤ f < 2:

        up to 2^(e+1) with probability f - 1, else 2^e;   below 2^(1-L): to it or to 0

    `reduce(a, b, key)` adds two encoded wires: 2^a ± 2^b goes to a neighbouring power of two,
    unbiased (`kernels/_reference/natural.py` has the rule). A balanced tree of n wires climbs
    at most ceil(log2 n) exponents, so that many codes are kept free above N; one more code
    means "not a number": an overflow (a chain can climb further than a tree) is never a
    plausible value.

    1. L = 2^(bits-1) - 2 - ceil(log2 n).
    2. E‖x̂-x‖² ≤ (1/8 + min(√d·ℓ, d·ℓ²/4))·‖x‖², ℓ = 2^(1-L), for one worker; each reduction
       multiplies 1 + the relative variance by at most 9/8.

    Xin et al., Global-QSGD, 2025, arXiv 2305.18627, section 4 (exponential dithering). Differs
    from the released code: any number of workers, 3 to 8 bits, draws that differ by rank, the
    overflow code.

    >>> import torch, laconic as lc
    >>> codec, x = lc.codec("global-exp:bits=4"), torch.tensor([1.0, -0.5, 0.0])
    >>> a, b = (codec.encode(x, lc.Key(rank=i), norm=1.0, workers=2) for i in range(2))
    >>> codec.decode(codec.reduce(a, b, lc.Key(phase=1)), weight=0.5).tolist()
    [1.0, -0.5, 0.0]
    """

    name: ClassVar[str] = "global-exp"
    id: ClassVar[int] = 7
    unbiased: ClassVar[bool] = True

    bits: int = 8

    def __post_init__(self) -> None:
        if not is_integer(self.bits) or not 3 <= self.bits <= 8:
            raise ConfigError(f"global-exp: bits must be from 3 to 8, not {self.bits!r}")

    def levels_for(self, workers: int) -> int:
        """L: the exponents left for one value beside the headroom of a tree of `workers`."""
        levels = (1 << (self.bits - 1)) - 2 - (workers - 1).bit_length()
        if levels < 1:
            raise ConfigError(
                f"global-exp: {self.bits} bits leave no level beside the headroom of {workers} "
                f"workers; use bits={self.bits + 1}"
                if self.bits < 8
                else f"global-exp: the headroom of {workers} workers does not fit 8 bits"
            )
        return levels

    def local_norm(self, x: Tensor) -> Tensor:
        """max|x| of this worker, one fp32 value on x's device; not finite if x is not."""
        return local_norm(x, math.inf)

    def global_norm(self, norms: Tensor) -> Tensor:
        """The largest of all workers' local norms."""
        return global_norm(norms, math.inf)

    def variance_bound(self, d: int) -> float | None:
        step = 2.0 ** (1 - self.levels_for(1))
        return 1 / 8 + min(math.sqrt(d) * step, d * step**2 / 4)

    def reduce(self, a: Wire, b: Wire, key: Key, out: Tensor | None = None) -> Wire:
        """The sum of two encoded wires, encoded; decodes with weight=1/n to the mean of n.

        `key` must be fresh: a draw that encoded a or b would bias the sum. `out` (uint8) takes
        the result; it may be a.data or b.data.
        """
        if a.header != b.header or a.data.device != b.data.device:
            raise WireError("reduce adds two wires of equal settings, on one device")
        self._check(a)
        self._check(b)
        data = buffer(out, a.nbytes, a.data.device)
        data[:HEADER_BYTES].copy_(a.data[:HEADER_BYTES])
        if a.header.numel:
            (first, x), (second, y), (scale, z) = (
                sections(wire[HEADER_BYTES:], a.header) for wire in (a.data, b.data, data)
            )
            # a scale that is not finite in either stays so
            torch.maximum(first, second, out=scale)
            backend(data.device).natural_reduce(x, y, z, stream=key.stream(), bits=self.bits)
        return Wire(buffer=data, key=key, shape=a.shape, dtype=a.dtype, header=a.header)

    def _header(
        self, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
    ) -> Header:
        return Header(
            codec=self.id,
            dtype=dtype,
            numel=numel,
            bits=self.bits,
            levels=self.levels_for(workers),
            workers=workers,
            norm=ScaleKind.GIVEN,
            inner=math.inf,
            outer=math.inf,
            body_bytes=body_bytes(numel, 0, self.bits),
        )

    def _write(
        self, x: Tensor, key: Key, body: Tensor, header: Header, norm: Tensor | float | None
    ) -> None:
        scale, codes = sections(body, header)
        scale.copy_(shared_scale(self, x, header.workers, norm))
        backend(x.device).natural_quantize(
            x, scale, codes, stream=key.stream(), levels=header.levels, bits=header.bits
        )

    def _read(self, wire: Wire, body: Tensor, into: Into) -> None:
        scale, codes = sections(body, wire.header)
        backend(body.device).natural_dequantize(
            codes,
            scale,
            into.out,
            levels=wire.header.levels,
            bits=wire.header.bits,
            weight=into.weight,
            add=into.add,
        )
