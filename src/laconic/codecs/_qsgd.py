"""QSGD: unbiased stochastic quantization, one scale a block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic._key import Key
from laconic._wire import Header, Wire
from laconic.codecs._base import Codec, Into
from laconic.codecs._coded import PLAIN, check_coder, coded_room, header_fields
from laconic.codecs._linear import (
    UNSET,
    body_bytes,
    check_block,
    check_choice,
    no_norm,
    read,
    set_width,
    write,
)
from laconic.kernels import ScaleKind

_KINDS = {"max": ScaleKind.MAX, "l2": ScaleKind.L2}


@dataclass(frozen=True, kw_only=True)
class QSGD(Codec):
    """`qsgd`: each value goes to one of its two neighbouring levels, at random, unbiased.

    Per block v of B values with scale N (max|v|, or ‖v‖₂) and s levels, Δ = N/s:

        q_i = floor(v_i/Δ + r_i),   r_i uniform on [0, 1)          v̂_i = Δ·q_i

    1. E[v̂_i] = v_i; Var[v̂_i] = Δ²·f(1-f) with f the fractional part of v_i/Δ.
    2. A code has b bits, s = 2^(b-1) - 1 (the sign is part of it); a block adds 4 bytes.
    3. N = max: E‖v̂-v‖² ≤ (√(1 + (B-1)/s²) - 1)/2 · ‖v‖², with equality when one value is N
       and all others are f·Δ, f = (√(1+c) - 1)/c, c = (B-1)/s².
       N = ‖v‖₂: E‖v̂-v‖² ≤ min(B/s², √B/s) · ‖v‖² (paper, Lemma 3.1).

    Alistarh et al., QSGD, NIPS 2017, section 3. Differs from the paper: the practical max-norm
    is the default, as in its experiments; r has 16 bits (15 at 8-bit codes), which biases a
    value by at most 2^-17 (2^-16) of Δ.

    >>> import torch, laconic as lc
    >>> codec = lc.codec("qsgd:levels=1,block=128")
    >>> wire = codec.encode(torch.tensor([2.0, 0.0, -2.0]), lc.Key())
    >>> codec.decode(wire).tolist()
    [2.0, 0.0, -2.0]
    """

    name: ClassVar[str] = "qsgd"
    id: ClassVar[int] = 3
    unbiased: ClassVar[bool] = True

    bits: int = UNSET
    levels: int = UNSET
    norm: str = "max"
    block: int | None = 512
    coder: str = PLAIN

    def __post_init__(self) -> None:
        set_width(self)
        check_choice(self.name, "norm", self.norm, ("max", "l2"))
        check_block(self.name, self.block)
        check_coder(self.name, self.coder)

    @property
    def even_noise(self) -> bool:
        return self.block is None

    def variance_bound(self, d: int) -> float | None:
        size = min(d, self.block or d)
        if self.norm == "l2":
            return min(size / self.levels**2, math.sqrt(size) / self.levels)
        return max_norm_bound(size, self.levels)

    def _header(
        self, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
    ) -> Header:
        return Header(
            codec=self.id,
            dtype=dtype,
            numel=numel,
            bits=self.bits,
            levels=self.levels,
            block=self.block or 0,
            norm=_KINDS[self.norm],
            body_bytes=body_bytes(numel, self.block or 0, self.bits, self.coder),
            **header_fields(self.coder),
        )

    def _room(self, header: Header) -> int:
        return coded_room(header, self.levels)

    def _write(
        self, x: Tensor, key: Key, body: Tensor, header: Header, norm: Tensor | float | None
    ) -> None:
        no_norm(self.name, norm)
        write(x, key, body, header, _KINDS[self.norm])

    def _read(self, wire: Wire, body: Tensor, into: Into) -> None:
        read(body, wire, into, subtract=False)


def max_norm_bound(size: int, levels: int) -> float:
    """Largest E‖v̂-v‖²/‖v‖² over v of `size` values scaled by its largest (see QSGD)."""
    return (math.sqrt(1 + max(size - 1, 0) / levels**2) - 1) / 2
