"""One step in which codecs are looked at: with real gradients, beside the training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from laconic._key import Key
from laconic._wire import Wire
from laconic.codecs import Codec, Place
from laconic.codecs._memory import Scratch
from laconic.exchanges import Call, Exchange
from laconic.exchanges._budget import typical_shares
from laconic.exchanges._lane import Lane
from laconic.exchanges._transport import gather_numbers, plain_mean
from laconic.exchanges._wires import segments_of
from laconic.integrations._ddp import gathered, start
from laconic.integrations._state import HookState, Load, Plan
from laconic.planner._auto_decide import Look

_MOST = 1 << 22  # values that are copied and encoded
_TIMED = 2  # runs, the faster one counts, behind one that compiles
_DECODINGS: Mapping[str, Callable[[int], float]] = {  # of a tensor's values on a rank
    "allreduce": lambda ranks: 1,
    "allgather": lambda ranks: ranks,
}
_SENT: Mapping[str, Callable[[int], float]] = {  # times what an all-reduce in a ring would send
    "allgather": lambda ranks: ranks / 2,
}


@dataclass
class _Sample:
    """Values of this rank, and what codecs need to know of them."""

    values: Tensor
    places: tuple[Place, ...]
    ranks: int
    norms: tuple[Tensor | None, ...]  # all ranks' common scale, where a codec has one
    tensor: int  # its load's first parameter
    kappa: float = 0.0  # ‖mean‖²/‖own‖², 1/n if that is not known


class Looking:
    """Buckets of one step become their mean in lanes' threads, and their norms are kept.

    The largest load of a step is copied before, and every codec encodes and decodes that copy when
    training has gone on: its error, bytes and seconds.
    """

    def __init__(
        self, state: HookState, pairs: Sequence[tuple[Codec, Exchange]], now: Callable[[], float]
    ) -> None:
        self._state, self._pairs, self._now = state, pairs, now
        self._norms: dict[int, Tensor] = {}  # own and mean, by the load's first parameter
        self._sample: _Sample | None = None
        self._looks: list[Look] = []
        self._ready: Future[Tensor] | None = None

    def hook(self, bucket: Any, largest: bool) -> Future[Tensor]:
        """Take a bucket; `largest` says that its load is the one to copy."""
        state, buffer = self._state, bucket.buffer()
        plan = state.plan(bucket.parameters())
        lane = state.lanes[bucket.index() % len(state.lanes)]
        done = start(lane, buffer, lambda: self._average(lane, buffer, plan, largest))
        if largest:
            self._ready = start(lane, buffer.new_empty(0), self._look)
        return done

    def wait(self) -> list[Look]:
        """A look at every codec; NaN where there was nothing to encode."""
        if self._ready is not None:
            self._ready.wait()
        nothing = Look(error=math.nan, bytes_per_value=math.nan, seconds_per_value=math.nan)
        return self._looks or [nothing] * len(self._pairs)

    def squares(self) -> tuple[float, float]:
        """‖x‖² and ‖mean‖² of all that would be encoded."""
        norms = [norm.double().cpu() for norm in self._norms.values()]
        own, mean = torch.stack(norms).square().sum(0).tolist() if norms else (0.0, 0.0)
        return own, mean

    def _average(self, lane: Lane, buffer: Tensor, plan: Plan, largest: bool) -> None:
        start = time.perf_counter()
        call = Call(group=lane.group, traffic=lane.traffic)
        for load in plan.loads:
            norms = buffer.new_empty(2, dtype=torch.float32)
            self._norms[load.pieces[0].number] = norms
            self._norm(buffer, load, norms[0])
        if largest:
            self._sample = self._copy(buffer, _largest(plan), call)
        plain_mean(buffer, call)
        for load in plan.loads:
            self._norm(buffer, load, self._norms[load.pieces[0].number][1])
        lane.seconds += time.perf_counter() - start

    def _units(self, buffer: Tensor, load: Load) -> AbstractContextManager[Tensor]:
        """What codecs would encode."""
        state = self._state
        return gathered(buffer, load.pieces, state.scratch, state.preconditioner)

    def _norm(self, buffer: Tensor, load: Load, out: Tensor) -> None:
        with self._units(buffer, load) as x:
            torch.linalg.vector_norm(x, dtype=torch.float32, out=out)

    def _copy(self, buffer: Tensor, load: Load, call: Call) -> _Sample:
        with self._units(buffer, load) as x:
            values = x[:_MOST].clone()
        places = Call(group=call.group, places=load.places).inside(0, values.numel())
        norms = []
        for codec, exchange in self._pairs:
            own: Any = codec
            shared = exchange.name == "allreduce" and hasattr(codec, "local_norm")
            numbers = gather_numbers(own.local_norm(values), call) if shared else None
            norms.append(own.global_norm(numbers).clone() if shared else None)
        return _Sample(values, tuple(places), call.size, tuple(norms), load.pieces[0].number)

    def _look(self) -> None:
        sample, self._sample = self._sample, None
        assert sample is not None
        own, mean = self._norms[sample.tensor].tolist()
        sample.kappa = _kappa(own, mean, sample.ranks)
        self._looks = [
            _look(codec, exchange, sample, norm, self._now)
            for (codec, exchange), norm in zip(self._pairs, sample.norms, strict=True)
        ]


def _kappa(own: float, mean: float, ranks: int) -> float:
    """‖mean‖²/‖own‖² from two-norms."""
    value = (mean / own) ** 2 if own > 0 else 0.0
    return min(value, 1.0) if value > 0 else 1 / ranks  # NaN is no value


def _largest(plan: Plan) -> Load:
    """The one with the most values."""
    return max(plan.loads, key=lambda load: sum(piece.numel for piece in load.pieces))


def _look(
    codec: Codec,
    exchange: Exchange,
    sample: _Sample,
    norm: Tensor | None,
    now: Callable[[], float],
) -> Look:
    """Encode as a rank does and as an owner does, where these differ, and decode."""
    n, x = sample.ranks, sample.values
    rank, owner = map(codec.at_share, typical_shares(n, sample.kappa))
    forms = [rank] if rank == owner or exchange.name in _DECODINGS else [rank, owner]
    space = Scratch()
    sizes, seconds, decoded = [], [], x.clone()
    for form in forms:
        wire = _encode(form, sample, norm, space)  # compiles, and takes room
        form.decode(wire, out=decoded)
        sizes.append(wire.data.numel())
        moments = []
        for _ in range(_TIMED):
            began = now()
            wire = _encode(form, sample, norm, space)
            between = now()
            form.decode(wire, out=decoded)
            moments.append((between - began, now() - between))
        encoding, decoding = (min(part) for part in zip(*moments, strict=True))
        seconds.append(encoding + _DECODINGS.get(exchange.name, lambda _: 2)(n) * decoding)
    error = float((decoded.float() - x).square().sum(dtype=torch.float64))
    total = float(x.float().square().sum(dtype=torch.float64))
    count, times = x.numel(), _SENT.get(exchange.name, lambda _: 1)(n)
    return Look(
        error=error / total if total > 0 else math.nan,
        bytes_per_value=times * sum(sizes) / len(sizes) / count,
        seconds_per_value=sum(seconds) / len(seconds) / count,
    )


def _encode(codec: Codec, sample: _Sample, norm: Tensor | None, space: Scratch) -> Wire:
    x, segments = sample.values, segments_of(sample.places)
    workers = sample.ranks if norm is not None else 1
    room = codec.nbytes(x.numel(), x.dtype, segments)
    out = space.take("wire", room, x.device, torch.uint8)
    return codec.encode(x, Key(), norm=norm, workers=workers, out=out, segments=segments)
