"""QSGD's deterministic form: the few largest entries, all at one magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic._key import Key
from laconic._wire import Header, Wire
from laconic.codecs._base import Codec, Into
from laconic.codecs._linear import no_norm
from laconic.kernels import ScaleKind, backend

_EMPTY = -(1 << 31)  # slot without an entry


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
        scale, slots = _sections(body)
        backend(x.device).scales(x, scale, block=0, kind=ScaleKind.L2)
        index = backend(x.device).largest_entries(x, slots.numel())
        values = x[index].to(torch.float64)
        before = values.abs().cumsum(0) - values.abs()
        entry = torch.where(values < 0, -index - 1, index)
        slots.copy_(torch.where(before < scale, entry, _EMPTY))

    def _read(self, wire: Wire, body: Tensor, into: Into) -> None:
        scale, slots = _sections(body)
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


def _sections(body: Tensor) -> tuple[Tensor, Tensor]:
    words = body.view(torch.int32)
    return words[-1:].view(torch.float32), words[:-1]


def _slots(numel: int) -> int:
    return math.isqrt(numel - 1) + 1 if numel else 0
