"""QSGD: unbiased stochastic quantization with one scale per block, and its deterministic form."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from laconic._key import Key
from laconic._settings import one_of
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
)
from laconic.kernels import ScaleKind, backend, scratch_device

_KINDS = {"max": ScaleKind.MAX, "l2": ScaleKind.L2}
_EMPTY = -(1 << 31)  # slot without an entry


@dataclass(frozen=True, kw_only=True)
class QSGD(BlockQuantizer):
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
    subtracts: ClassVar[bool] = False

    bits: int = field(default=UNSET, metadata=BITS)
    levels: int = field(default=UNSET, metadata=LEVELS)
    norm: str = field(default="max", metadata=one_of("max", "l2"))
    block: int | None = field(default=512, metadata=BLOCK)
    coder: str = field(default=PLAIN, metadata=CODER)

    @property
    def _scale_kind(self) -> ScaleKind:
        return _KINDS[self.norm]

    def variance_bound(self, d: int) -> float | None:
        size = min(d, self.block or d)
        if self.norm == "l2":
            return min(size / self.levels**2, math.sqrt(size) / self.levels)
        return max_norm_bound(size, self.levels)


def max_norm_bound(size: int, levels: int) -> float:
    """Largest E‖v̂-v‖²/‖v‖² over v of `size` values scaled by its largest (see QSGD)."""
    return (math.sqrt(1 + max(size - 1, 0) / levels**2) - 1) / 2


@dataclass(frozen=True, kw_only=True)
class QSGDTopK(Codec):
    """`qsgd-topk`: the smallest set of largest entries whose sum reaches the 2-norm.

    With |v| sorted, k the smallest number with |v_1| + .. + |v_k| ≥ ‖v‖₂:

        Q(v)_i = ‖v‖₂·sign(v_i) for the k largest, 0 elsewhere

    1. k ≤ ceil(√d). Of vectors with top-k sum S and k-th entry m, Σv² is largest with k-1
       entries lowered to m: S² - 2S(k-1)m + ((k-1)² + d-1)m² ≤ S² iff d ≤ k², using S ≥ km.
       So the wire has ceil(√d) slots of 4 bytes, always: i for a positive entry at i, -i-1
       for a negative one, the least integer if unused.
    2. vᵀQ(v) = ‖v‖₂·Σ_I|v_i| ≥ ‖v‖². Biased: for deterministic gradient descent, or under
       error feedback. Equal magnitudes are taken in order of index.

    Alistarh et al., QSGD, NIPS 2017, section 3.3 and appendix. Differs from the paper: indices
    take a fixed 4 bytes each, about 32·√d bits.

    >>> import torch, laconic as lc
    >>> codec = lc.codec("qsgd-topk")
    >>> codec.decode(codec.encode(torch.tensor([3.0, 0.1, -4.0, 0.1]), lc.Key())).round().tolist()
    [5.0, 0.0, -5.0, 0.0]
    """

    name: ClassVar[str] = "qsgd-topk"
    id: ClassVar[int] = 8
    unbiased: ClassVar[bool] = False

    def variance_bound(self, d: int) -> float | None:
        return None

    def _header(
        self, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
    ) -> Header:
        return Header(
            codec=self.id,
            dtype=dtype,
            numel=numel,
            norm=ScaleKind.L2,
            body_bytes=4 * (_slots(numel) + min(numel, 1)),
        )

    def _write(
        self, x: Tensor, key: Key, body: Tensor, header: Header, norm: Tensor | float | None
    ) -> None:
        no_norm(self.name, norm)
        if x.numel() > -_EMPTY - 1:
            raise ValueError(f"qsgd-topk takes up to {-_EMPTY - 1} values, not {x.numel()}: split")
        scale, slots = _top_sections(body)
        backend(x.device).scales(x, scale, block=0, kind=ScaleKind.L2)
        index = backend(x.device).topk(x, slots.numel())
        place = scratch_device(x.device)
        values, index = x[index].to(place).to(torch.float64), index.to(place)
        before = values.abs().cumsum(0) - values.abs()
        entry = torch.where(values < 0, -index - 1, index)
        slots.copy_(torch.where(before < scale.to(place), entry, _EMPTY))

    def _read(self, wire: Wire, body: Tensor, into: DecodeTarget) -> None:
        scale, slots = _top_sections(body)
        index = torch.where(slots < 0, -slots - 1, slots)
        used = (slots != _EMPTY) & (index < wire.header.numel)
        bound = torch.finfo(into.out.dtype).max  # the norm may be too large for a 16-bit value
        value = (torch.where(slots < 0, -scale, scale) * into.weight).clamp(-bound, bound)
        if not into.add:
            into.out.zero_()
        value = torch.where(used, value, 0.0).to(into.out.dtype)
        into.out.index_add_(0, torch.where(used, index, 0), value)
        # a scale that is not finite reaches every value, not only the kept ones
        into.out.add_(torch.where(torch.isfinite(scale), 0.0, torch.nan).to(into.out.dtype))


def _top_sections(body: Tensor) -> tuple[Tensor, Tensor]:
    words = body.view(torch.int32)
    return words[-1:].view(torch.float32), words[:-1]


def _slots(numel: int) -> int:
    return math.isqrt(numel - 1) + 1 if numel else 0
