"""A codec on a sample: what encoding and decoding take, bits per value, and the error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic._key import Key
from laconic._wire import Wire
from laconic.codecs._base import Codec


@dataclass(frozen=True)
class Quality:
    """What a codec makes of a sample, as the mean over a few keys."""

    bits: float  # per value, headers, scales and tables included
    error: float  # ‖decoded - x‖²/‖x‖²; NaN where x is 0


class CodecProfiler:
    """Encodes and decodes a sample with all that its codec needs: keys, segments, scale, buffer.

    Where wires are added while encoded, the sample is that of one of `workers` ranks. `norm` is the
    scale that they share; by default all ranks' samples are taken to be as large as this one.
    """

    def __init__(
        self,
        codec: Codec,
        x: Tensor,
        *,
        workers: int = 1,
        segments: Sequence[int] | None = None,
        norm: Tensor | None = None,
        rank: int = 0,
    ) -> None:
        self.codec, self.x = codec, x
        self.workers = workers if codec.summable or codec.pairwise else 1
        self._rank = rank
        self._settings: dict[str, Any] = {}
        if codec.segmented and segments is not None and len(segments) > 1:
            self._settings["segments"] = list(segments)
        if codec.shared_norm:
            if norm is None:
                norm = codec.global_norm(codec.local_norm(x).view(1).expand(self.workers))
            self._settings |= {"norm": norm, "workers": self.workers}
        room = codec.nbytes(x.numel(), x.dtype, self._settings.get("segments"))
        self._buffer = torch.empty(room, dtype=torch.uint8, device=x.device)

    def key(self, step: int = 0) -> Key:
        """Names this rank's draws."""
        return Key(seed=1, step=step, rank=self._rank)

    def encode(self, x: Tensor | None = None, *, step: int = 0, out: Wire | None = None) -> Wire:
        """The sample, or other values of its length and scale; valid until the next call."""
        values = self.x if x is None else x
        buffer = self._buffer if out is None else out
        return self.codec.encode(values, self.key(step), out=buffer, **self._settings)

    def decode(self, wire: Wire, **target: Any) -> Tensor:
        """With the best side information, where the codec takes some: the sample itself."""
        side = self.x if self.codec.side_information else None
        return self.codec.decode(wire, side=side, **target)

    def read(self, wire: Wire, out: Tensor) -> Tensor:
        """As an exchange does with what arrives: decode a sum, or decode and add."""
        if not self.codec.summable:
            return self.decode(wire, out=out, add=True, weight=0.5)
        return self.codec.decode_sum(
            wire.payload,
            [self.key()] * self.workers,
            norm=self._settings.get("norm"),
            shape=out.shape,
            dtype=out.dtype,
            out=out,
        )

    def quality(self, keys: int = 1) -> Quality:
        """Bits and error, as the mean over `keys` keys."""
        exact = self.x.float()
        power = float(exact.square().sum(dtype=torch.float64))
        bits, lost = 0.0, 0.0
        for step in range(keys):
            wire = self.encode(step=step)
            bits += 8 * wire.nbytes / max(1, self.x.numel())
            off = self.decode(wire).float() - exact
            lost += float(off.square_().sum(dtype=torch.float64))
        return Quality(bits / keys, lost / keys / power if power else math.nan)
