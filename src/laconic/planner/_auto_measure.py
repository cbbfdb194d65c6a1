"""Auto's measurements: times of steps, codecs on a step's gradients; and all ranks' numbers."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from laconic.codecs import Codec
from laconic.codecs._profiler import CodecProfiler
from laconic.comm._context import ExchangeContext
from laconic.comm._sums import gather_numbers, plain_mean
from laconic.comm._threads import CommLane
from laconic.exchanges import Exchange
from laconic.exchanges._budget import typical_shares
from laconic.integrations._buckets import Bucket, BucketLayout, CodecGroup, gathered
from laconic.integrations._ddp import start
from laconic.integrations._state import HookState
from laconic.planner._auto_decide import Candidate, CodecProfile, GradientProfile, Table

_MAX_STEPS = 128  # remembered
_MAX_VALUES = 1 << 22  # copied and encoded
_TIMED = 2  # runs, of which the faster one counts, after one that compiles


# Times of steps: the host's clock on a CPU; events on CUDA, which are read later, without a wait


@dataclass
class _Step:
    """Moments of a step: its first bucket's hook call, its last one's, the end of the exchange."""

    spec: str
    first: Any
    last: Any = None
    end: Any = None


class StepTimer:
    """Times of steps. A step lasts from one last bucket's hook call to the next one's."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._steps: deque[_Step] = deque(maxlen=_MAX_STEPS)

    def now(self) -> float:
        """Seconds, after all work on the device's current stream."""
        if self._cuda:
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter()

    def first(self, spec: str) -> None:
        """At the hook call of a step's first bucket."""
        self._steps.append(_Step(spec, self._stamp()))

    def last(self) -> None:
        """At that of its last one."""
        self._steps[-1].last = self._stamp()

    def end(self) -> None:
        """At the end of its exchange, on CUDA in the order of the current stream."""
        self._steps[-1].end = self._stamp()

    def times(self, spec: str, count: int) -> list[float]:
        """Seconds of a strategy's newest `count` steps, without its first; NaN for missing ones."""
        found = [
            _between(a.last, b.last)
            for a, b in pairwise(self._steps)
            if a.spec == b.spec == spec and a.last is not None and b.last is not None
        ]
        return _newest(found, count)

    def waits(self, spec: str, count: int) -> list[float]:
        """Seconds that the exchange was exposed, of the newest steps that have ended."""
        mine = [step for step in self._steps if step.spec == spec and step.end is not None]
        return _newest([_between(step.last, step.end) for step in mine], count)

    def spans(self, spec: str, count: int) -> list[float]:
        """Seconds from the first hook call of a step to its last."""
        mine = [step for step in self._steps if step.spec == spec and step.last is not None]
        return _newest([_between(step.first, step.last) for step in mine], count)

    def typical(self, spec: str) -> float:
        """The median step of a strategy, of those that the device has finished."""
        found = [seconds for seconds in self.times(spec, _MAX_STEPS) if math.isfinite(seconds)]
        return statistics.median(found) if found else math.nan

    def settle(self) -> None:
        """Wait for the device up to the newest hook call: all times are then known."""
        if self._cuda and self._steps and self._steps[-1].last is not None:
            self._steps[-1].last.synchronize()

    def _stamp(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _between(start: Any, end: Any) -> float:
    """Seconds; NaN where a device is not there yet."""
    if isinstance(start, float):
        return end - start
    return 1e-3 * start.elapsed_time(end) if start.query() and end.query() else math.nan


def _newest(values: list[float], count: int) -> list[float]:
    return [math.nan] * max(0, count - len(values)) + values[-count:]


# Codecs on the gradients of one step


@dataclass
class _Sample:
    """Values of this rank, with the arguments that codecs need."""

    values: Tensor
    segments: list[int]
    ranks: int
    norms: tuple[Tensor | None, ...]  # all ranks' common scale, where a codec has one
    group: int  # its first parameter


class GradientProfiler:
    """Buckets of one step become their mean in lanes' threads, and their norms are kept.

    The largest group of a step is copied before. While training continues, every candidate's codec
    encodes and decodes that copy: its error, bits and seconds.
    """

    def __init__(
        self, state: HookState, candidates: Sequence[Candidate], now: Callable[[], float]
    ) -> None:
        self._state, self._candidates, self._now = state, candidates, now
        self._norms: dict[int, Tensor] = {}  # own and mean, by the group's first parameter
        self._sizes: dict[int, tuple[int, int, int]] = {}  # encoded, plain, bytes of a value
        self._profiles: tuple[CodecProfile, ...] = ()
        self._ready: Future[Tensor] | None = None

    def measure(self, bucket: Bucket) -> None:
        """Count what would be encoded, and the rest; at a step before the one of `exchange`."""
        if bucket.index == 0:
            self._sizes.clear()
        buffer = bucket.buffer
        layout = self._state.layout(bucket.parameters)
        encoded = sum(one.numel for group in layout.groups for one in group.slices)
        sizes = encoded, buffer.numel() - encoded, buffer.element_size()
        self._sizes[bucket.index] = sizes

    def exchange(self, bucket: Bucket) -> Future[Tensor]:
        """Start a bucket's mean; the sample is taken from the one with most values to encode."""
        state, buffer = self._state, bucket.buffer
        layout = state.layout(bucket.parameters)
        lane = state.lanes[bucket.index % len(state.lanes)]
        largest = max(self._sizes, key=lambda index: self._sizes[index][0])
        copied = bucket.index == largest and self._sizes[largest][0] > 0
        samples: list[_Sample] = []
        done = start(lane, buffer, partial(self._average, lane, buffer, layout, copied, samples))
        if copied:
            profile = partial(self._profile, samples)
            self._ready = start(lane, buffer.new_empty(0), profile)
        return done

    def wait(self) -> GradientProfile:
        """The results, when complete; NaN for codecs if there was nothing to encode."""
        if self._ready is not None:
            self._ready.wait()
        norms = [norm.double().cpu() for norm in self._norms.values()]
        own, mean = torch.stack(norms).square().sum(0).tolist() if norms else (0.0, 0.0)
        sizes = self._sizes
        plain = {i: (encoded + rest) * width for i, (encoded, rest, width) in sizes.items()}
        total = max(1, sum(plain.values()))
        nothing = (CodecProfile(*[math.nan] * 5),) * len(self._candidates)
        found = GradientProfile(
            square=own,
            mean_square=mean,
            encoded=sum(encoded for encoded, _, _ in sizes.values()),
            uncompressed_bytes=sum(rest * width for _, rest, width in sizes.values()),
            plain_bytes=total,
            last_share=plain[max(plain)] / total if plain else 1.0,
            codecs=self._profiles or nothing,
        )
        self._norms, self._profiles, self._ready = {}, (), None
        return found

    def _average(
        self,
        lane: CommLane,
        buffer: Tensor,
        layout: BucketLayout,
        copied: bool,
        samples: list[_Sample],
    ) -> None:
        began = time.perf_counter()
        context = ExchangeContext(group=lane.group, traffic=lane.traffic)
        for group in layout.groups:
            norms = buffer.new_empty(2, dtype=torch.float32)
            self._norms[group.slices[0].number] = norms
            self._norm(buffer, group, norms[0])
        if copied:
            largest = max(layout.groups, key=lambda group: sum(one.numel for one in group.slices))
            samples.append(self._copy(buffer, largest, context))
        plain_mean(buffer, context)
        for group in layout.groups:
            self._norm(buffer, group, self._norms[group.slices[0].number][1])
        lane.seconds += time.perf_counter() - began

    def _units(self, buffer: Tensor, group: CodecGroup) -> AbstractContextManager[Tensor]:
        """The values that codecs would encode."""
        state = self._state
        return gathered(buffer, group.slices, state.session.scratch, state.preconditioner)

    def _norm(self, buffer: Tensor, group: CodecGroup, out: Tensor) -> None:
        with self._units(buffer, group) as x:
            torch.linalg.vector_norm(x, dtype=torch.float32, out=out)

    def _copy(self, buffer: Tensor, group: CodecGroup, context: ExchangeContext) -> _Sample:
        with self._units(buffer, group) as x:
            values = x[:_MAX_VALUES].clone()
        places = ExchangeContext(group=context.group, places=group.places).inside(0, values.numel())
        norms: list[Tensor | None] = []
        for one in self._candidates:
            norm, codec = None, one.codec
            if one.exchange.sums_wires and codec.shared_norm:
                norm = codec.global_norm(gather_numbers(codec.local_norm(values), context)).clone()
            norms.append(norm)
        segments = [place.numel for place in places]
        return _Sample(values, segments, context.size, tuple(norms), group.slices[0].number)

    def _profile(self, samples: list[_Sample]) -> None:
        sample = samples.pop()
        own, mean = self._norms[sample.group].tolist()
        power = (mean / own) ** 2 if own > 0 else 0.0
        kappa = min(power, 1.0) if power > 0 else 1 / sample.ranks  # also for NaN
        self._profiles = tuple(
            _profiled(one.codec, one.exchange, sample, norm, kappa, self._now)
            for one, norm in zip(self._candidates, sample.norms, strict=True)
        )


def _profiled(
    codec: Codec,
    exchange: Exchange,
    sample: _Sample,
    norm: Tensor | None,
    kappa: float,
    now: Callable[[], float],
) -> CodecProfile:
    """Encode as a rank does and, where the exchange encodes the mean, as an owner; and decode."""
    n, forms = sample.ranks, [codec]
    workers = n if exchange.sums_wires else 1
    if codec.budget is not None and exchange.encodes_mean(codec):
        forms = [codec.at_share(share) for share in typical_shares(n, kappa)]
    found, moments = [], []
    for form in forms:
        one = CodecProfiler(
            form, sample.values, workers=workers, segments=sample.segments or None, norm=norm
        )
        found.append(one.quality())  # compiles kernels, too
        target = torch.zeros_like(sample.values)
        one.read(one.encode(), target)
        runs = []
        for _ in range(_TIMED):
            began = now()
            wire = one.encode()
            between = now()
            one.read(wire, target)
            runs.append((between - began, now() - between))
        moments.append([min(part) for part in zip(*runs, strict=True)])
    count = sample.values.numel()
    encode, decode = (statistics.mean(part) / count for part in zip(*moments, strict=True))
    return CodecProfile(found[0].error, found[0].bits, found[-1].bits, encode, decode)


# Numbers of all ranks


class RankNumbers:
    """Every rank's numbers, on their way to all ranks: each in a row of its own among zeros."""

    def __init__(
        self,
        numbers: Sequence[float],
        group: dist.ProcessGroup,
        lane: CommLane | None,
        device: torch.device,
    ) -> None:
        rows = torch.zeros(group.size(), len(numbers), dtype=torch.float64)
        rows[group.rank()] = torch.tensor(numbers, dtype=torch.float64)
        self._rows = table = rows.to(device)
        if lane is None:
            self._work: Any = group.allreduce([table])
        else:
            self._work = start(lane, table, partial(self._sum, lane.group))

    def table(self) -> Table:
        """Wait for them."""
        self._work.wait()
        return self._rows.tolist()

    def _sum(self, group: dist.ProcessGroup) -> None:
        group.allreduce([self._rows]).wait()
