"""DQSG, whose dither is subtracted again and never sent, and NDQSG, its nested form."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from laconic._key import Key
from laconic._settings import between, check_settings, described, refused
from laconic._wire import Header, Wire
from laconic.codecs._base import Codec, DecodeTarget, no_norm
from laconic.codecs._linear import (
    BITS,
    BLOCK,
    CODER,
    LEVELS,
    PLAIN,
    UNSET,
    BlockQuantizer,
    body_bytes,
    check_block,
    coded_room,
    header_fields,
    lattice_of,
    read_codes,
    scratch,
    sections,
    write_codes,
)
from laconic.errors import ConfigError
from laconic.kernels import Modulo, ScaleKind, backend
from laconic.kernels._layout import checks

_MAX_LEVELS = 63  # keeps 16 fraction bits, and side information 64 fine steps wide


@dataclass(frozen=True, kw_only=True)
class DQSG(BlockQuantizer):
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
    subtracts: ClassVar[bool] = True

    bits: int = field(default=UNSET, metadata=BITS)
    levels: int = field(default=UNSET, metadata=LEVELS)
    block: int | None = field(default=512, metadata=BLOCK)
    coder: str = field(default=PLAIN, metadata=CODER)

    def variance_bound(self, d: int) -> float | None:
        return min(d, self.block or d) / (12 * self.levels**2)


@dataclass(frozen=True, kw_only=True)
class NDQSG(Codec):
    """`ndqsg`: send the position inside a coarse cell; the receiver knows which cell.

    Fine step D1 = max|g|/M, coarse step D2 = ρ·D1 (ρ odd), u uniform on (-½, ½), y = what the
    receiver already knows of g (say, the mean of other workers' gradients):

        r = round(α·g/D1 + u);  q = r - ρ·round(r/ρ) ∈ {-(ρ-1)/2 .. (ρ-1)/2}      sent: q
        w = (q - u)·D1 - α·y;   ĝ = y + α·(w - D2·round(w/D2))

    1. Right if |α(g - y) + e| < D2/2, e the fine error, uniform on ±D1/2. Then, for α = 1,
       ĝ = D1·(r - u): DQSG at the fine step, bit for bit, with ρ symbols instead of 2M + 1.
    2. Wrong otherwise, by a multiple of D2. The receiver cannot see that from q, so a byte per
       512 values carries Σ cell·(odd weight) mod 256. `decode(..., failed=)` fills a uint8
       tensor of `checks(numel)` entries: 1 where the check disagrees. A single wrong cell is
       always seen, several in one block are missed with probability of about 1/128.
    3. Unbiased while no decode fails; since that depends on y, `unbiased` is False.

    Abdi and Fekri, 2019, arXiv 1904.01197, section IV. Differs from the paper: the check.

    >>> import torch, laconic as lc
    >>> codec, key, g = lc.codec("ndqsg"), lc.Key(), torch.tensor([1.0, -0.4, 0.2])
    >>> y = codec.decode(codec.encode(g, key), side=g + 0.1)
    >>> bool((y - g).abs().max() <= 1 / 3 / 2)
    True
    """

    name: ClassVar[str] = "ndqsg"
    id: ClassVar[int] = 5
    unbiased: ClassVar[bool] = False
    side_information: ClassVar[bool] = True

    levels: int = field(default=3, metadata=between(1, _MAX_LEVELS))
    ratio: int = field(default=3, metadata=between(3, 2 * _MAX_LEVELS - 1))
    alpha: float = field(default=1.0, metadata=described("a number above 0 and up to 1"))
    block: int | None = field(default=None, metadata=BLOCK)
    coder: str = field(default=PLAIN, metadata=CODER)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.ratio % 2 == 0:
            raise ConfigError(f"ndqsg: ratio must be odd, not {self.ratio}")
        alpha = self.alpha
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= 1:
            raise refused(self, "alpha")
        object.__setattr__(self, "alpha", float(alpha))
        check_block(self)

    @property
    def bits(self) -> int:
        """Width of a code: ρ symbols."""
        return max(2, math.ceil(math.log2(self.ratio)))

    @property
    def nested(self) -> NDQSG:
        return self

    def checks(self, numel: int) -> int:
        """Number of check bytes, and of entries in `failed`."""
        return checks(numel)

    def variance_bound(self, d: int) -> float | None:
        return None

    def _header(
        self, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
    ) -> Header:
        size = checks(numel)
        if self.coder != PLAIN:
            size = -(-size // 4) * 4  # the table of chunks follows
        return Header(
            codec=self.id,
            dtype=dtype,
            numel=numel,
            bits=self.bits,
            levels=self.levels,
            block=self.block or 0,
            norm=ScaleKind.MAX,
            ratio=self.ratio,
            alpha=self.alpha,
            body_bytes=body_bytes(numel, self.block or 0, self.bits, self.coder) + size,
            **header_fields(self.coder, dithered=False),
        )

    def _room(self, header: Header) -> int:
        return coded_room(header, self.ratio // 2)

    def _write(
        self, x: Tensor, key: Key, body: Tensor, header: Header, norm: Tensor | float | None
    ) -> None:
        no_norm(self.name, norm)
        scales, check, codes = _sections(body, header)
        if header.coder:
            codes = scratch(header.numel, x.device)
        backend(x.device).nested_quantize(
            x,
            scales,
            check,
            codes,
            lattice_of(header),
            Modulo(header.ratio, header.alpha),
            stream=key.stream(),
            kind=ScaleKind.MAX,
        )
        if header.coder:
            codes -= _offset(header)
            write_codes(codes, body, header, key.stream())

    def _read(self, wire: Wire, body: Tensor, into: DecodeTarget) -> None:
        side = into.flat_side()
        scales, check, codes = _sections(body, wire.header)
        if wire.header.coder:
            stream, half = wire.key.stream(), self.ratio // 2
            codes, scales = read_codes(body, wire.header, stream, half, scales)
            codes += _offset(wire.header)
        failed = torch.empty_like(check) if into.failed is None else into.failed
        if failed.dtype != torch.uint8 or failed.shape != check.shape:
            raise ValueError(f"failed must be a uint8 tensor of {check.numel()} values")
        backend(body.device).nested_dequantize(
            codes,
            scales,
            check,
            side,
            failed,
            into.output,
            lattice_of(wire.header),
            Modulo(wire.header.ratio, wire.header.alpha),
            stream=wire.key.stream(),
        )


def _offset(header: Header) -> int:
    """A code of 8 bits, minus its q, modulo 256."""
    return (header.ratio // 2 + 128) % 256


def _sections(body: Tensor, header: Header) -> tuple[Tensor, Tensor, Tensor]:
    """Scales (fp32), checks and codes (bytes) as views of the body."""
    scales, codes = sections(body, header)
    start = 4 * scales.numel() if header.coder else header.body_bytes - checks(header.numel)
    return scales, body[start : start + checks(header.numel)], codes
