"""Global-QSGD: one scale for all workers, so that encoded gradients add up.

Linear levels add up in an all-reduce, powers of two in a tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from laconic._key import Key
from laconic._settings import between, check_settings, one_of
from laconic._wire import HEADER_BYTES, Header, Wire
from laconic.codecs._base import Codec, DecodeTarget, buffer, check_sum
from laconic.codecs._linear import (
    CODER,
    PLAIN,
    body_bytes,
    coded_room,
    header_fields,
    lattice_of,
    read,
    sections,
    write,
)
from laconic.codecs._qsgd import max_norm_bound
from laconic.codecs._shared import (
    NORM,
    Draw,
    as_scale,
    global_norm,
    local_norm,
    parse_norm,
    shared_key,
    shared_scale,
    stratum,
)
from laconic.errors import ConfigError, WireError
from laconic.kernels import Dither, Lattice, Output, ScaleKind, backend
from laconic.kernels._layout import MAX_LEVELS, packed_bytes

_PAYLOADS = {4: torch.uint8, 8: torch.int8, 32: torch.int32}


@dataclass(frozen=True, kw_only=True)
class Global(Codec):
    """`global`: linear levels of one shared scale; the wires of n workers can be added.

    N = ‖x‖_{q,p} = (Σ_i ‖x_i‖_q^p)^(1/p) over workers i, s levels, Δ = N/s:

        q_i = floor(x_i/Δ + r_i)       sent, added as integers       mean = Δ·Σ_i q_i / n

    1. Unbiased; the sum lies in -n·s .. n·s, so s = floor((2^(bits-1) - 1)/n) never wraps.
       int8 and int32 are what collectives add. 4 bits travel as uint8, two codes in offset
       form to a byte: a byte sum cannot carry into its neighbour, because 2·n·s ≤ 14.
    2. E‖mean^ - mean‖² ≤ (θ/n)·Σ‖x_i‖². As n·d values under one scale: with max-norm
       θ = (√(1 + (nd-1)/s²) - 1)/(2n); with q, p ≥ 2, θ = min(d/(4s²), √(d/n)/s).
    3. Coarse for many workers: s = 1 at n = 64 and 8 bits.

    `norm` is "max", "l2" or "q/p". `encode` takes the shared scale as `norm=`: all workers
    pass the same number, made from their `local_norm(x)` by `global_norm(...)`. Without it a
    wire is scaled by its own tensor and cannot be added to others.

    `subtract=True` is DQSG under the shared scale: the same integers travel, receivers take the
    dithers u_i = r_i - ½ off again, mean = Δ·(Σ_i q_i - Σ_i u_i)/n.

    4. One draw u serves all workers, each in its stratum: u_i = frac(u + p_i/n) - ½, the places
       p_i dealt anew for every key. Then Σ u_i = frac(n·u) - ½: one draw decodes a sum, too.
       Each u_i is uniform, so the mean is unbiased and |q_i| ≤ s as before.
    5. The variance of a value, whatever it is: Δ²/(12n²) where all workers have the same value
       (zero, say), Δ²/(12n) where values spread over several Δ, and never more than
       Δ²/(12n)·min(n, 1 + 1/n + 1/(n-1)) (docs/codecs.md). Not subtracting: Δ²·f(1-f)/n, Δ²/(6n)
       on average, but nothing on zeros.
    6. Wires that are not added (one worker, or a coder) have dithers of their own, as in dqsg.

    Xin et al., Global-QSGD, 2025, arXiv 2305.18627, section 4. Differs from the released code:
    s is floored (127/n un-floored wraps), draws differ between ranks, any n. Abdi and Fekri, 2019,
    arXiv 1904.01197, section III, for the subtracted dither; one scale and strata are ours.

    >>> import torch, laconic as lc
    >>> codec, x = lc.codec("global:bits=8"), torch.tensor([1.0, -1.0])
    >>> keys = [lc.Key(rank=rank) for rank in range(2)]
    >>> wires = [codec.encode(x, key, norm=1.0, workers=2) for key in keys]
    >>> codec.decode_sum(wires[0].payload + wires[1].payload, keys, norm=1.0).tolist()
    [1.0, -1.0]
    """

    name: ClassVar[str] = "global"
    id: ClassVar[int] = 6
    unbiased: ClassVar[bool] = True
    summable: ClassVar[bool] = True
    shared_norm: ClassVar[bool] = True

    bits: int = field(default=8, metadata=one_of(*_PAYLOADS))  # what adds up
    levels: int | None = field(default=None, metadata=between(1, MAX_LEVELS))
    norm: str = field(default="max", metadata=NORM)
    coder: str = field(default=PLAIN, metadata=CODER)
    subtract: bool = field(default=False, metadata=one_of(True, False))

    def __post_init__(self) -> None:
        check_settings(self)
        parse_norm(self)
        if self.coder != PLAIN and self.bits == 32:
            raise ConfigError("global: a coder takes integers of up to 8 bits: give bits=8")
        self.levels_for(1)
        summable = self.coder == PLAIN  # coded integers do not add up
        object.__setattr__(self, "summable", summable)
        object.__setattr__(self, "integer_sum", summable and not self.subtract)
        two_norm = parse_norm(self) == (2.0, 2.0)
        object.__setattr__(self, "sparse_sum", two_norm and not summable)

    def levels_for(self, workers: int) -> int:
        """s: as many levels as let the sum of `workers` codes fit, or `levels`."""
        most = ((1 << (self.bits - 1)) - 1) // workers
        if most < 1:
            fits = next(bits for bits in sorted(_PAYLOADS) if (1 << (bits - 1)) - 1 >= workers)
            raise ConfigError(
                f"global: {self.bits} bits hold no sum of {workers} workers; use bits={fits}, or "
                "an exchange that requantizes (scatter-reduce, hierarchical)"
            )
        if self.levels is not None and self.levels > most:
            raise ConfigError(
                f"global: {workers} workers at {self.levels} levels overflow {self.bits} bits; "
                f"at most {most} levels fit"
            )
        return self.levels or min(most, MAX_LEVELS)

    def check_workers(self, workers: int) -> None:
        self.levels_for(workers)

    @property
    def even_noise(self) -> bool:
        return True

    def local_norm(self, x: Tensor) -> Tensor:
        """‖x‖_q of this worker, one fp32 value on x's device; NaN if x is not finite."""
        return local_norm(x, parse_norm(self)[0])

    def global_norm(self, norms: Tensor) -> Tensor:
        """(Σ norms^p)^(1/p) of all workers' local norms."""
        return global_norm(norms, parse_norm(self)[1])

    def variance_bound(self, d: int, workers: int = 1) -> float | None:
        """θ; for one worker the usual relative variance."""
        inner, outer = parse_norm(self)
        s, size = self.levels_for(workers), workers * d
        if self.subtract:
            spread = _spread(d, inner) * _spread(workers, outer)
            return d * (spread / s) ** 2 / 12 * _worst_strata(workers)
        if math.isinf(inner) and math.isinf(outer):
            return max_norm_bound(size, s) / workers
        spread = _spread(d, inner) * _spread(workers, outer)
        return min(size * spread**2 / (4 * s**2), math.sqrt(size) * spread / s) / workers

    def _sum_shape(self, payload: Tensor) -> Sequence[int]:
        if self.bits == 4:
            raise TypeError(
                "the number of values of a sum of 4-bit codes is not known: give shape= or out="
            )
        return payload.shape

    def _read_sum(
        self,
        payload: Tensor,
        keys: Sequence[Key],
        norm: Tensor | float | None,
        into: DecodeTarget,
    ) -> None:
        """`norm` is the one that all workers encoded with, from `global_norm` of their local norms:
        only so does a value that is not finite show here, because the sum of codes cannot carry it.
        """
        if norm is None:
            raise TypeError("global decodes a sum with the scale it was encoded with: give norm=")
        if payload.dtype != _PAYLOADS[self.bits]:
            raise TypeError(f"{self} adds up {_PAYLOADS[self.bits]}, not {payload.dtype}")
        numel, workers = into.out.numel(), len(keys)
        check_sum(self.name, payload, packed_bytes(numel, 4) if self.bits == 4 else numel)
        stream = shared_key(keys).stream() if self.subtract else None
        if not numel:
            return
        levels = self.levels_for(workers)
        backend(payload.device).dequantize(
            payload.view(torch.uint8) if self.bits == 8 else payload,
            as_scale(norm, payload.device),
            Output(into.out, into.weight / workers, into.add),
            Lattice(0, levels, self.bits),
            dither=None if stream is None else Dither(stream, workers=workers),
            offset=128 if self.bits == 8 else workers * levels,
        )

    def _header(
        self, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
    ) -> Header:
        inner, outer = parse_norm(self)
        return Header(
            codec=self.id,
            dtype=dtype,
            numel=numel,
            bits=self.bits,
            levels=self.levels_for(workers),
            workers=workers,
            norm=ScaleKind.GIVEN,
            ratio=int(self.subtract),
            inner=float(np.float32(inner)),  # as the header holds it
            outer=float(np.float32(outer)),
            payload_dtype=_PAYLOADS[self.bits] if self.summable else None,
            body_bytes=body_bytes(numel, 0, self.bits, self.coder),
            **header_fields(self.coder),
        )

    def _room(self, header: Header) -> int:
        return coded_room(header, header.levels)

    def _write(
        self, x: Tensor, key: Key, body: Tensor, header: Header, norm: Tensor | float | None
    ) -> None:
        scale, _ = sections(body, header)
        scale.copy_(shared_scale(self, x, header.workers, norm))
        draw = self._draw(key, header)
        write(x, draw.key, body, header, ScaleKind.GIVEN, draw.shift)

    def _read(self, wire: Wire, body: Tensor, into: DecodeTarget) -> None:
        draw = self._draw(wire.key, wire.header)
        wire = replace(wire, key=draw.key)
        read(body, wire, into, subtract=self.subtract, shift=draw.shift)

    def _draw(self, key: Key, header: Header) -> Draw:
        """Strata where wires will be added, else the key's own draws."""
        if self.subtract and self.summable and header.workers > 1:
            return stratum(key, header.workers, header.levels)
        return Draw(key)


def _spread(count: int, order: float) -> float:
    """max ‖v‖_order/‖v‖₂ over v of `count` values: 1 for norms of order 2 and more."""
    return count ** max(1 / order - 0.5, 0)


def _worst_strata(workers: int) -> float:
    """Variance of the sum of n strata over that of n independent dithers, at most."""
    return min(workers, 1 + 1 / workers + 1 / (workers - 1)) if workers > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class GlobalExp(Codec):
    """`global-exp`: sign and exponent of each value, and sums that stay signs and exponents.

    N = max over workers and values, L levels: ±N·{1, ½, ¼, .., 2^(1-L)} and 0. With
    y = |x|/N = f·2^e, 1 ≤ f < 2:

        up to 2^(e+1) with probability f - 1, else 2^e;   below 2^(1-L): to it or to 0

    `reduce(a, b, key)` adds two encoded wires: 2^a ± 2^b goes to a neighbouring power of two,
    unbiased (`kernels/_reference/exponential.py` has the rule). A balanced tree of n wires climbs
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
    shared_norm: ClassVar[bool] = True
    pairwise: ClassVar[bool] = True

    bits: int = field(default=8, metadata=between(3, 8))

    def __post_init__(self) -> None:
        check_settings(self)

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
            backend(data.device).exponential_reduce(x, y, z, stream=key.stream(), bits=self.bits)
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
        backend(x.device).exponential_quantize(
            x, scale, codes, lattice_of(header), stream=key.stream()
        )

    def _read(self, wire: Wire, body: Tensor, into: DecodeTarget) -> None:
        scale, codes = sections(body, wire.header)
        lattice = lattice_of(wire.header)
        backend(body.device).exponential_dequantize(codes, scale, into.output, lattice)
