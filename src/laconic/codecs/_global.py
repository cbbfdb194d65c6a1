"""Global-QSGD, linear: one scale for all workers, so that integers add up in an all-reduce."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from laconic._key import Key
from laconic._wire import Header, Wire
from laconic.codecs._base import Codec, Into, check_sum, output
from laconic.codecs._coded import PLAIN, check_coder, coded_room, header_fields
from laconic.codecs._linear import body_bytes, is_integer, read, sections, write
from laconic.codecs._norms import as_scale, global_norm, local_norm, parse_norm, shared_scale
from laconic.codecs._qsgd import max_norm_bound
from laconic.codecs._strata import Draw, shared_key, stratum
from laconic.errors import ConfigError
from laconic.kernels import ScaleKind, backend
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

    bits: int = 8
    levels: int | None = None
    norm: str = "max"
    coder: str = PLAIN
    subtract: bool = False

    def __post_init__(self) -> None:
        if not is_integer(self.bits) or self.bits not in _PAYLOADS:
            raise ConfigError(f"global: bits must be 4, 8 or 32 (what adds up), not {self.bits!r}")
        levels = self.levels
        if levels is not None and not (is_integer(levels) and 1 <= levels <= MAX_LEVELS):
            raise ConfigError(f"global: levels must be from 1 to {MAX_LEVELS}, not {levels!r}")
        parse_norm(self.name, self.norm)
        check_coder(self.name, self.coder)
        if self.coder != PLAIN and self.bits == 32:
            raise ConfigError("global: a coder takes integers of up to 8 bits: give bits=8")
        if not isinstance(self.subtract, bool):
            raise ConfigError(f"global: subtract must be true or false, not {self.subtract!r}")
        self.levels_for(1)
        object.__setattr__(self, "summable", self.coder == PLAIN)  # coded integers do not add up

    def levels_for(self, workers: int) -> int:
        """s: as many levels as let the sum of `workers` codes fit, or what was asked for."""
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
        return local_norm(x, parse_norm(self.name, self.norm)[0])

    def global_norm(self, norms: Tensor) -> Tensor:
        """(Σ norms^p)^(1/p) of all workers' local norms."""
        return global_norm(norms, parse_norm(self.name, self.norm)[1])

    def variance_bound(self, d: int, workers: int = 1) -> float | None:
        """θ; for one worker the usual relative variance."""
        inner, outer = parse_norm(self.name, self.norm)
        s, size = self.levels_for(workers), workers * d
        if self.subtract:
            spread = _spread(d, inner) * _spread(workers, outer)
            return d * (spread / s) ** 2 / 12 * _worst_strata(workers)
        if math.isinf(inner) and math.isinf(outer):
            return max_norm_bound(size, s) / workers
        spread = _spread(d, inner) * _spread(workers, outer)
        return min(size * spread**2 / (4 * s**2), math.sqrt(size) * spread / s) / workers

    def decode_sum(
        self,
        payload: Tensor,
        keys: Sequence[Key],
        *,
        norm: Tensor | float | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
        add: bool = False,
        weight: float = 1.0,
    ) -> Tensor:
        """The mean over workers from the integer sum.

        `norm` is the one that all of them encoded with, from `global_norm` of every worker's
        `local_norm`: only so does a value that is not finite show here, because the sum of codes
        cannot carry it.
        """
        if not self.summable:
            raise TypeError(f"wires of {self} cannot be summed; decode each and add")
        if norm is None:
            raise TypeError("global decodes a sum with the scale it was encoded with: give norm=")
        if shape is None:
            if self.bits == 4 and out is None:
                raise TypeError("a sum of 4-bit codes does not say how many: give shape= or out=")
            shape = payload.shape if out is None else out.shape
        target = output(out, torch.Size(shape), dtype, payload.device, add)
        if payload.dtype != _PAYLOADS[self.bits]:
            raise TypeError(f"{self} adds up {_PAYLOADS[self.bits]}, not {payload.dtype}")
        count = packed_bytes(target.numel(), 4) if self.bits == 4 else target.numel()
        check_sum(self.name, payload, count, keys)
        stream = shared_key(keys).stream() if self.subtract else None
        if target.numel():
            workers = len(keys)
            levels = self.levels_for(workers)
            backend(payload.device).dequantize(
                payload.view(torch.uint8) if self.bits == 8 else payload,
                as_scale(norm, payload.device),
                target.view(-1),
                stream=stream,
                block=0,
                levels=levels,
                bits=self.bits,
                offset=128 if self.bits == 8 else workers * levels,
                weight=weight / workers,
                add=add,
                workers=workers,
            )
        return target

    def _header(
        self, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
    ) -> Header:
        inner, outer = parse_norm(self.name, self.norm)
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

    def _read(self, wire: Wire, body: Tensor, into: Into) -> None:
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
