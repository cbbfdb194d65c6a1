"""DQSG: quantization with a dither that is subtracted again and never sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic._key import Key
from laconic._wire import Header, Wire
from laconic.codecs._base import Codec, Into
from laconic.codecs._coded import PLAIN, check_coder, coded_room, header_fields
from laconic.codecs._linear import UNSET, body_bytes, check_block, no_norm, read, set_width, write
from laconic.kernels import ScaleKind


@dataclass(frozen=True, kw_only=True)
class DQSG(Codec):
    """`dqsg`: the receiver regenerates the sender's dither and takes it off.

    Per block of B values (or the whole tensor), Δ = max|v|/M, u uniform on (-½, ½):

        q_i = round(v_i/Δ + u_i) ∈ {-M .. M}           v̂_i = Δ·(q_i - u_i)

    1. The error is uniform on ±Δ/2 and independent of v, so E[v̂] = v, Var[v̂_i] = Δ²/12.
       QSGD makes the same q and does not subtract: Δ²·f(1-f), Δ²/6 on average, but nothing
       on exact zeros. Mostly-zero or heavy-tailed gradients are better off with qsgd.
    2. u is a hash of (seed, step, tensor, rank, element): both sides compute it.
    3. E‖v̂-v‖² = B·Δ²/12 ≤ B/(12·M²) · ‖v‖², with equality for a single non-zero value.

    Abdi and Fekri, 2019, arXiv 1904.01197, section III. Differs from the paper: u lies on a
    grid of 2^16 points (2^15 at 8-bit codes) that is symmetric about zero; the variance is
    (1 - 4^-16)·Δ²/12.

    >>> import torch, laconic as lc
    >>> codec, key = lc.codec("dqsg:bits=8,block=tensor"), lc.Key(step=1)
    >>> y = codec.decode(codec.encode(torch.tensor([1.0, -0.5]), key))
    >>> bool((y - torch.tensor([1.0, -0.5])).abs().max() <= 1 / 127 / 2)
    True
    """

    name: ClassVar[str] = "dqsg"
    id: ClassVar[int] = 4
    unbiased: ClassVar[bool] = True

    bits: int = UNSET
    levels: int = UNSET
    block: int | None = 512
    coder: str = PLAIN

    def __post_init__(self) -> None:
        set_width(self)
        check_block(self.name, self.block)
        check_coder(self.name, self.coder)

    @property
    def even_noise(self) -> bool:
        return self.block is None

    def variance_bound(self, d: int) -> float | None:
        return min(d, self.block or d) / (12 * self.levels**2)

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
            norm=ScaleKind.MAX,
            body_bytes=body_bytes(numel, self.block or 0, self.bits, self.coder),
            **header_fields(self.coder),
        )

    def _room(self, header: Header) -> int:
        return coded_room(header, self.levels)

    def _write(
        self, x: Tensor, key: Key, body: Tensor, header: Header, norm: Tensor | float | None
    ) -> None:
        no_norm(self.name, norm)
        write(x, key, body, header, ScaleKind.MAX)

    def _read(self, wire: Wire, body: Tensor, into: Into) -> None:
        read(body, wire, into, subtract=True)
