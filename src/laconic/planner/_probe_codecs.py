"""Costs of codecs on this device, and their bits and errors on gradients, real or Gaussian."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from laconic._cost import FREE, CodecCost, LinearCost
from laconic.codecs import Codec, codec
from laconic.codecs._profiler import CodecProfiler, Quality
from laconic.comm._context import ExchangeContext
from laconic.comm._sums import sum_in_place
from laconic.exchanges._budget import typical_shares
from laconic.planner._probe_cluster import Action, Clock, fitted

# values of a sample: enough for any error, and for a speed beside what a call takes to start
_MAX_ON_CPU, _MAX_ON_GPU = 1 << 22, 1 << 26
_KEYS = 4  # over which errors are averaged
_COLD = 1 << 23  # values that no cache holds
_REDUCED, _TURNS = 1 << 19, 2  # values that are added up, and how often


@dataclass(frozen=True)
class Sample:
    """Gradients to measure codecs with: this rank's, the mean of all, and the cuts between tensors.

    `kappa` is κ, the gradient agreement: ‖mean‖²/(average ‖own‖²) over ranks.
    """

    own: Tensor
    mean: Tensor
    segments: tuple[int, ...]
    kappa: float

    @staticmethod
    def gaussian(device: torch.device, workers: int) -> Sample:
        """Independent values on all ranks, where no model is given."""
        values = _max_values(device) // 4
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
    """Bits, errors and costs of one codec; all ranks at once, because they may share cores."""
    own = codec(spec)
    sample = sample.head(min(_max_values(clock.device), sample.own.numel()))
    first, back = map(own.at_share, typical_shares(clock.group.size(), sample.kappa))
    out = _quality(first, sample.own, sample, clock)
    returned = _quality(back, sample.mean, sample, clock)
    once = out if own.budget is None else _quality(own, sample.own, sample, clock)
    line = partial(_codec_line, first, sample, clock)
    return CodecCost(
        spec=str(own),
        bits_out=clock.mean(out.bits),
        bits_back=clock.mean(returned.bits),
        bits_once=clock.mean(once.bits),
        error=clock.mean(out.error),
        error_back=clock.mean(returned.error),
        encode=line(_encoding, patience_s / 4),
        decode=line(_decoding, patience_s / 4),
        norm=line(_norm, patience_s / 4) if own.shared_norm else FREE,
        reduce=_slower_sum(first, sample, clock)
        if own.summable
        else line(_reducing, patience_s / 4)
        if own.pairwise
        else FREE,
    )


def _profiler(own: Codec, x: Tensor, sample: Sample, clock: Clock) -> CodecProfiler:
    n, rank = clock.group.size(), clock.group.rank()
    return CodecProfiler(own, x, workers=n, segments=sample.segments, rank=rank)


def _quality(own: Codec, x: Tensor, sample: Sample, clock: Clock) -> Quality:
    found = _profiler(own, x, sample, clock).quality(_KEYS)
    return replace(found, error=0.0) if math.isnan(found.error) else found


def _codec_line(
    own: Codec,
    sample: Sample,
    clock: Clock,
    kind: Callable[[CodecProfiler], Action],
    patience_s: float,
) -> LinearCost:
    """Of up to three sizes, a factor of 8 apart."""
    most = sample.own.numel()
    sizes = sorted({max(1, min(most, size)) for size in (most, most // 8, most // 64, 512)})[-3:]

    def action_of(size: int) -> Action:
        part = sample.head(size)
        return kind(_profiler(own, part.own, part, clock))

    return fitted(sizes, clock, patience_s, action_of)


def _encoding(own: CodecProfiler) -> Action:
    cold = _copies(own.x)
    return lambda: own.encode(next(cold))


def _decoding(own: CodecProfiler) -> Action:
    wire, cold = own.encode(), _copies(torch.zeros_like(own.x))
    return lambda: own.read(wire, next(cold))


def _norm(own: CodecProfiler) -> Action:
    return lambda: own.codec.local_norm(own.x)


def _reducing(own: CodecProfiler) -> Action:
    """Adding two wires."""
    one = own.encode()
    one = replace(one, buffer=one.buffer.clone())
    two = own.encode(step=1)
    return lambda: own.codec.reduce(one, two, own.key(2))


def _slower_sum(own: Codec, sample: Sample, clock: Clock) -> LinearCost:
    """How much longer an all-reduce of payloads takes than one of as many bytes of fp32.

    Backends add halves and bytes one by one; a link that is slower than that hides the rest.
    """
    part = sample.head(_REDUCED)
    payload = torch.zeros_like(_profiler(own, part.own, part, clock).encode().payload)
    plain = torch.zeros(payload.numel() * payload.element_size() // 4, device=payload.device)
    context = ExchangeContext(group=clock.group)
    more = 0.0
    for _ in range(_TURNS):
        for one, sign in ((payload, 1), (plain, -1)):
            seconds = clock.seconds(partial(sum_in_place, one, context), 0.0)
            more += sign * seconds / _TURNS
    return LinearCost(start_s=0.0, per_s=part.own.numel() / more) if more > 0 else FREE


def _max_values(device: torch.device) -> int:
    return _MAX_ON_CPU if device.type == "cpu" else _MAX_ON_GPU


def _copies(x: Tensor) -> Iterator[Tensor]:
    """One after another, for ever: together they fill more than a cache, as gradients do."""
    count = max(1, _COLD // max(1, x.numel()))
    return cycle(x.repeat(count).split(x.numel() or 1))
