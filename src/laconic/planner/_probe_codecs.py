"""What codecs cost on this device, and what they make of gradients: real ones, or Gaussian."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from laconic._key import Key
from laconic.codecs import Codec, codec
from laconic.exchanges import Call
from laconic.exchanges._budget import typical_shares
from laconic.exchanges._transport import sum_in_place
from laconic.planner._clock import Clock
from laconic.planner._cluster import CodecCost
from laconic.planner._line import FREE, Line, fit

# values of a sample: enough for any error, and for a speed behind what a call takes to start
_MOST_ON_CPU, _MOST_ON_GPU = 1 << 22, 1 << 26
_NMSE_KEYS = 4
_COLD = 1 << 23  # values
_REDUCED, _TURNS = 1 << 19, 2  # values that are added up, and how often


@dataclass(frozen=True)
class Sample:
    """Gradients to measure codecs with: this rank's, the mean of all, and the cuts between tensors.

    `kappa` is ‖mean‖²/(average ‖own‖²) over ranks.
    """

    own: Tensor
    mean: Tensor
    segments: tuple[int, ...]
    kappa: float

    @staticmethod
    def gaussian(device: torch.device, workers: int) -> Sample:
        """Independent values on all ranks, where no model is given."""
        values = _most_values(device) // 4
        x = torch.randn(values, device=device)
        return Sample(x, x, (values,), 1 / workers)

    def head(self, values: int) -> Sample:
        """The first values only."""
        kept, left = [], values
        for segment in self.segments:
            if left > 0:
                kept.append(min(segment, left))
            left -= segment
        return Sample(self.own[:values], self.mean[:values], tuple(kept), self.kappa)


def probe_codec(spec: str, sample: Sample, clock: Clock, patience_s: float) -> CodecCost:
    """Bits, errors and lines of one codec; all ranks at once, because they may share cores."""
    own: Any = codec(spec)
    n = clock.group.size()
    sample = sample.head(min(_most_values(clock.device), sample.own.numel()))
    first, back = map(own.at_share, typical_shares(n, sample.kappa))
    workers = n if own.summable or hasattr(own, "reduce") else 1
    tool = _Tool(first, workers, clock)
    bits, error = tool.quality(sample.own, sample)
    bits_back, error_back = _Tool(back, workers, clock).quality(sample.mean, sample)
    bits_once = bits
    if own.budget is not None:
        bits_once = _Tool(own, workers, clock).quality(sample.own, sample)[0]
    encode, decode = tool.lines(sample, patience_s / 2)
    return CodecCost(
        spec=str(own),
        bits_out=clock.mean(bits),
        bits_back=clock.mean(bits_back),
        bits_once=clock.mean(bits_once),
        error=clock.mean(error),
        error_back=clock.mean(error_back),
        encode=encode,
        decode=decode,
        norm=tool.norm_line(sample, patience_s / 4),
        reduce=tool.reduce_line(sample, patience_s / 4),
    )


class _Tool:
    """A codec with what it needs around it."""

    def __init__(self, own: Codec, workers: int, clock: Clock) -> None:
        self.codec: Any = own
        self.workers, self.clock = workers, clock
        self.shared = hasattr(own, "local_norm")

    def key(self, step: int = 0) -> Key:
        return Key(seed=1, step=step, rank=self.clock.group.rank())

    def encoding(self, x: Tensor, segments: Sequence[int]) -> dict[str, Any]:
        """Arguments of encode, a buffer among them."""
        what: dict[str, Any] = {}
        if self.codec.segmented and len(segments) > 1:
            what["segments"] = list(segments)
        if self.shared:
            norms = self.codec.local_norm(x).view(1).expand(self.workers)
            what |= {"norm": self.codec.global_norm(norms), "workers": self.workers}
        room = self.codec.nbytes(x.numel(), x.dtype, what.get("segments"))
        what["out"] = torch.empty(room, dtype=torch.uint8, device=x.device)
        return what

    def quality(self, x: Tensor, sample: Sample) -> tuple[float, float]:
        """Bits a value, and the mean of ‖Q(x) - x‖²/‖x‖² over a few keys."""
        what, power = self.encoding(x, sample.segments), float(x.float().square().sum())
        bits, lost = 0.0, 0.0
        for step in range(_NMSE_KEYS):
            wire = self.codec.encode(x, self.key(step), **what)
            decoded = self.codec.decode(wire)
            bits += 8 * wire.nbytes / max(1, x.numel())
            lost += float((decoded.float() - x.float()).square().sum())
        return bits / _NMSE_KEYS, lost / _NMSE_KEYS / power if power else 0.0

    def lines(self, sample: Sample, patience_s: float) -> tuple[Line, Line]:
        """Of encode and decode."""
        sizes = _sizes(sample.own.numel())
        each = patience_s / (2 * len(sizes))
        encoded, decoded = [], []
        for size in sizes:
            part = sample.head(size)
            what = self.encoding(part.own, part.segments)
            cold = _copies(part.own)
            make = lambda what=what, cold=cold: self.codec.encode(next(cold), self.key(), **what)  # noqa: E731
            encoded.append((size, self.clock.throughput(make, each)))
            wire = self.codec.encode(part.own, self.key(), **what)
            read = self._reading(wire, what, part.own)
            decoded.append((size, self.clock.throughput(read, each)))
        return fit(encoded), fit(decoded)

    def _reading(self, wire: Any, what: dict[str, Any], x: Tensor) -> Any:
        cold = _copies(torch.zeros_like(x))
        if self.codec.summable:
            payload, keys = wire.payload, [self.key()] * self.workers
            norm = what.get("norm")
            return lambda: self.codec.decode_sum(
                payload, keys, norm=norm, shape=x.shape, dtype=x.dtype, out=next(cold)
            )
        return lambda: self.codec.decode(wire, out=next(cold), add=True, weight=0.5)

    def norm_line(self, sample: Sample, patience_s: float) -> Line:
        """Of the read that a shared scale takes."""
        if not self.shared:
            return FREE
        sizes = _sizes(sample.own.numel())
        points = []
        for size in sizes:
            x = sample.own[:size]
            look = lambda x=x: self.codec.local_norm(x)  # noqa: E731
            points.append((size, self.clock.throughput(look, patience_s / len(sizes))))
        return fit(points)

    def reduce_line(self, sample: Sample, patience_s: float) -> Line:
        """Of adding two wires, where the codec can; else of a backend that adds payloads."""
        if self.codec.summable:
            return self._adding(sample)
        if not hasattr(self.codec, "reduce"):
            return FREE
        sizes = _sizes(sample.own.numel())
        points = []
        for size in sizes:
            x = sample.own[:size]
            what = self.encoding(x, (size,))
            what.pop("out")
            one, two = (self.codec.encode(x, self.key(step), **what) for step in (0, 1))
            add = lambda one=one, two=two: self.codec.reduce(one, two, self.key(2))  # noqa: E731
            points.append((size, self.clock.throughput(add, patience_s / len(sizes))))
        return fit(points)

    def _adding(self, sample: Sample) -> Line:
        """How much longer an all-reduce of payloads takes than one of as many bytes of fp32.

        Backends add halves and bytes one by one; a link that is slower than that hides the rest.
        """
        x = sample.own[:_REDUCED]
        payload = torch.zeros_like(self.codec.encode(x, self.key(), **self.encoding(x, ())).payload)
        plain = torch.zeros(payload.numel() * payload.element_size() // 4, device=x.device)
        call = Call(group=self.clock.group)
        more = 0.0
        for _ in range(_TURNS):
            for one, sign in ((payload, 1), (plain, -1)):
                seconds = self.clock.seconds(lambda one=one: sum_in_place(one, call), 0.0)
                more += sign * seconds / _TURNS
        return Line(start_s=0.0, per_s=x.numel() / more) if more > 0 else FREE


def _most_values(device: torch.device) -> int:
    return _MOST_ON_CPU if device.type == "cpu" else _MOST_ON_GPU


def _copies(x: Tensor) -> Iterator[Tensor]:
    """One after another, for ever: together they fill more than a cache, as gradients do."""
    count = max(1, _COLD // max(1, x.numel()))
    return cycle(x.repeat(count).split(x.numel() or 1))


def _sizes(most: int) -> list[int]:
    """Up to three, a factor of 8 apart."""
    return sorted({max(1, min(most, size)) for size in (most, most // 8, most // 64, 512)})[-3:]
