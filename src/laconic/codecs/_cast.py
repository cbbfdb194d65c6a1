"""none, fp16, bf16: the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from laconic._key import Key
from laconic._wire import Header, Wire
from laconic.codecs._base import Codec, DecodeTarget, check_sum, no_norm


class _Cast(Codec):
    """Send the values in another float type, or as they are.

    A wire in fp16 that is to be added to others is divided by their number first, so that the
    sum overflows only where the mean does; elsewhere division waits for `decode_sum`. A value
    too large for fp16 becomes infinite, which GradScaler and NaN checks see.
    """

    summable: ClassVar[bool] = True
    _sent: ClassVar[torch.dtype | None] = None

    def variance_bound(self, d: int) -> float | None:
        return None

    def _read_sum(
        self,
        payload: Tensor,
        keys: Sequence[Key],
        norm: Tensor | float | None,
        into: DecodeTarget,
    ) -> None:
        no_norm(self.name, norm)
        check_sum(self.name, payload, into.out.numel())
        weight = into.weight if payload.dtype == torch.float16 else into.weight / len(keys)
        replace(into, weight=weight).put(payload)

    def _header(
        self, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
    ) -> Header:
        sent = self._sent or dtype
        return Header(
            codec=self.id,
            dtype=dtype,
            numel=numel,
            body_bytes=numel * sent.itemsize,
            payload_dtype=sent,
            bits=8 * sent.itemsize,
            workers=workers,
        )

    def _write(
        self, x: Tensor, key: Key, body: Tensor, header: Header, norm: Tensor | float | None
    ) -> None:
        no_norm(self.name, norm)
        payload = body.view(self._sent or x.dtype)
        if header.workers > 1 and payload.dtype == torch.float16:
            torch.mul(x, 1.0 / header.workers, out=payload)
        else:
            payload.copy_(x)

    def _read(self, wire: Wire, body: Tensor, into: DecodeTarget) -> None:
        payload, workers = wire.payload, wire.header.workers
        if workers > 1 and payload.dtype == torch.float16:
            into = replace(into, weight=into.weight * workers)
        into.put(payload)


@dataclass(frozen=True, kw_only=True)
class Uncompressed(_Cast):
    """`none`: the values as they are. The baseline of every test and plot."""

    name: ClassVar[str] = "none"
    id: ClassVar[int] = 0
    unbiased: ClassVar[bool] = True
    lossless: ClassVar[bool] = True

    def variance_bound(self, d: int) -> float | None:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class FP16(_Cast):
    """`fp16`: half precision, rounded to nearest (so not unbiased)."""

    name: ClassVar[str] = "fp16"
    id: ClassVar[int] = 1
    unbiased: ClassVar[bool] = False
    _sent: ClassVar[torch.dtype | None] = torch.float16


@dataclass(frozen=True, kw_only=True)
class BF16(_Cast):
    """`bf16`: bfloat16, rounded to nearest (so not unbiased)."""

    name: ClassVar[str] = "bf16"
    id: ClassVar[int] = 2
    unbiased: ClassVar[bool] = False
    _sent: ClassVar[torch.dtype | None] = torch.bfloat16
