"""One server's chunk of the master weights: gradients in, weights out, as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic._scratch import Scratch
from laconic._wire import ALIGN, Wire
from laconic.codecs import NDQSG, Codec, Place, Uncompressed
from laconic.comm._context import (
    ExchangeContext,
    ExchangeMemory,
    ExchangeSession,
    decode,
    encode,
    segments_of,
)
from laconic.comm._threads import CommLane
from laconic.errors import WireError
from laconic.exchanges._nested import Nesting
from laconic.exchanges._side_information import (
    RatioController,
    SideInformation,
    in_first_group,
    plain_codec,
)
from laconic.server._link import Flag
from laconic.server._request_queue import Request
from laconic.sharding._flat_parameters import FlatParameters
from laconic.sharding._shard import Settings, Shard, apply_delta, projection, settings_of

NO_CODEC = Uncompressed()
HOST = torch.device("cpu")
_EVERY = 16  # steps between calibrations of ndqsg
ALL = 0  # weights that all workers get: the same bytes, the same draws


class Chunk:
    """Chunk `number` of a flat vector, as it travels between any worker and its server."""

    def __init__(
        self,
        flat: FlatParameters,
        number: int,
        lane: CommLane,
        seed: int,
        memory: ExchangeMemory | None = None,
    ) -> None:
        self.number, self.device = number, flat.device
        self._lane, self._places = lane, flat.places
        self._session = ExchangeSession(seed=seed, memory=memory or ExchangeMemory())
        self.first, self.last = flat.edges[number], flat.edges[number + 1]
        self.places: list[Place] = self.context(0).inside(self.first, self.last)

    def context(self, step: int) -> ExchangeContext:
        """What names the draws of a step; scratch and trusted headers are kept."""
        return self._session.context(self._lane.group, step=step, places=self._places)

    def most_bytes(self, *codecs: Codec) -> int:
        """Of a wire under any of these."""
        count = self.last - self.first
        segments = segments_of(self.places)
        return max(one.nbytes(count, torch.float32, segments) for one in codecs) if count else 0

    def encode(self, x: Tensor, codec: Codec, step: int, rank: int, phase: int) -> Tensor:
        """A wire's bytes, on the host."""
        if not x.numel():
            return torch.empty(0, dtype=torch.uint8)
        context = self.context(step)
        wire = encode(codec, x, context.key(rank, self.number, phase), self.places, context)
        return self.on_host(wire.data, "leaving")

    def decode(
        self,
        data: Tensor,
        codec: Codec,
        out: Tensor,
        step: int,
        rank: int,
        phase: int,
        *,
        add: bool = False,
        weight: float = 1.0,
    ) -> None:
        """out (+)= weight · what a wire holds."""
        if not out.numel():
            return
        context = self.context(step)
        key = context.key(rank, self.number, phase)
        wire = self.on_device(data)
        places, dtype = self.places, torch.float32
        decode(codec, wire, out, key, places, dtype, context, add=add, weight=weight)

    def on_host(self, data: Tensor, name: str) -> Tensor:
        if data.device == HOST:
            return data
        return self._session.scratch.take(name, data.numel(), HOST, torch.uint8).copy_(data)

    def on_device(self, data: Tensor) -> Tensor:
        if self.device == HOST:
            return data
        return self._session.scratch.take("arrived", data.numel(), self.device, torch.uint8).copy_(
            data
        )


class ShardServer:
    """Master weights of a chunk, the optimizer on them, and what workers were sent of them."""

    def __init__(
        self,
        chunk: Chunk,
        flat: FlatParameters,
        optimizer: Optimizer,
        codec: Codec,
        pull_codec: Codec,
    ) -> None:
        self.chunk, self.codec, self.pull_codec = chunk, codec, pull_codec
        weights = flat.read(flat.empty())[chunk.first : chunk.last]
        self.shard = Shard(optimizer, weights, flat.parts(chunk.number))
        self.nested = None if codec.nested is None else NestedMean(codec.nested, chunk)
        self._sent: dict[int, Tensor] = {}  # what workers have, where deltas are sent
        self._scratch = Scratch()

    @property
    def settings(self) -> Settings:
        """Those of the optimizer here."""
        return settings_of(self.shard.optimizer.param_groups)

    @property
    def most_bytes(self) -> int:
        """Of a gradient, however it is sent."""
        nested = self.codec.nested
        own = self.codec if nested is None else plain_codec(nested)
        return self.chunk.most_bytes(self.codec, own, NO_CODEC)

    def mean(self, requests: Sequence[Request]) -> None:
        """The mean of all members' gradients."""
        if self.nested is not None and not requests[0].frame.flags & Flag.PLAIN:
            self.nested.mean(requests, self.shard.mean)
            return
        for place, request in enumerate(requests):
            self.add(request, first=place == 0, weight=1 / len(requests))

    def add(self, request: Request, *, first: bool, weight: float) -> None:
        """Add a gradient to those of this update."""
        frame = request.frame
        codec = NO_CODEC if frame.flags & Flag.PLAIN else self.codec
        self.chunk.decode(
            request.body,
            codec,
            self.shard.mean,
            frame.step,
            request.worker,
            0,
            add=not first,
            weight=weight,
        )

    def step(self, settings: Settings, found_inf: bool) -> Flag:
        """One update, unless a gradient was not finite (found_inf), or the mean is not."""
        before = self.shard.skipped_steps, self.shard.skipped_shards
        self.shard.step(settings, torch.full((1,), float(found_inf), device=self.chunk.device))
        if self.shard.skipped_steps > before[0]:
            return Flag.SKIPPED
        return Flag.SHARD_SKIPPED if self.shard.skipped_shards > before[1] else Flag.NONE

    def weights(self, whose: int, *, remember: bool) -> Tensor:
        """As they are. `remember`: later deltas start from here."""
        if remember:
            self.remember(whose)
        return self._bytes(self.shard.weights, f"weights {whose}")

    def remember(self, whose: int) -> None:
        """Workers have the weights as they are."""
        if not self.pull_codec.lossless:
            self._sent.setdefault(whose, torch.empty_like(self.shard.weights))
            self._sent[whose].copy_(self.shard.weights)

    def forget(self, whose: int) -> None:
        """These workers will not pull again."""
        self._sent.pop(whose, None)

    def last_sent(self, whose: int) -> Tensor:
        """What workers have."""
        return self._bytes(self._sent.get(whose, self.shard.weights), f"weights {whose}")

    def delta(self, whose: int, step: int) -> Tensor:
        """λ and Q(weights - what workers have), as in `schedules._master.pull_delta`."""
        if whose not in self._sent:
            raise WireError("a delta of weights was requested, and no weights were sent before")
        was, weights = self._sent[whose], self.shard.weights
        delta = self._scratch.take("delta", was.numel(), was.device, torch.float32)
        found = self._scratch.take("found", was.numel(), was.device, torch.float32)
        torch.sub(weights, was, out=delta)
        data = self.chunk.encode(delta, self.pull_codec, step, whose, 1)
        self.chunk.decode(data, self.pull_codec, found, step, whose, 1)
        factor = projection(found, delta).view(1)
        apply_delta(found, factor, was, out=was)
        message = self._scratch.take(f"coded {whose}", ALIGN + data.numel(), HOST, torch.uint8)
        message[:4].view(torch.float32).copy_(factor)
        message[4:ALIGN].zero_()
        message[ALIGN:].copy_(data)
        return message

    def _bytes(self, x: Tensor, name: str) -> Tensor:
        data = x.view(torch.uint8)
        return self._scratch.take(name, data.numel(), HOST, torch.uint8).copy_(data)

    def state_dict(self) -> dict[str, object]:
        return {
            "shard": self.shard.state_dict(),
            "sent": {whose: x.clone() for whose, x in self._sent.items()},
            "nests": None if self.nested is None else self.nested.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.shard.load_state_dict(state["shard"])
        if self.nested is not None:
            self.nested.load_state_dict(state["nests"])
        self._sent = {  # copies: they are written to
            int(whose): x.to(self.chunk.device, copy=True) for whose, x in state["sent"].items()
        }


class NestedMean:
    """The mean of ndqsg's wires; the server's answer to a push has the ratio of the next one.

    P1 are the first ⌈n/2⌉ of the members; they get the widest ratio, dqsg. P2 get the ratio of
    `RatioController`, and at every 16th step the widest, too: that is a calibration. P1 is decoded
    first, then P2 in order, y being the mean of everything before.
    """

    def __init__(self, codec: NDQSG, chunk: Chunk) -> None:
        self._codec, self._chunk, self._scratch = codec, chunk, Scratch()
        self.control = RatioController(codec)
        self.ratios: dict[int, int] = {}  # of each worker's next push

    @property
    def _end(self) -> int:
        return self.control.ratios[-1]

    def tell(self, members: Sequence[int], step: int) -> None:
        """Every member's ratio for its push of a step."""
        calibrates = step % _EVERY == 0
        self.ratios = {
            worker: self._end
            if calibrates or in_first_group(place, len(members))
            else self.control.ratio
            for place, worker in enumerate(members)
        }

    def ratio_of(self, worker: int) -> int:
        """The ratio that was sent to this worker; before that, the widest."""
        return self.ratios.get(worker, self._end)

    def mean(self, requests: Sequence[Request], out: Tensor) -> None:
        """out = the mean of all that was pushed at a step; then decide about the next."""
        calibrates = requests[0].frame.step % _EVERY == 0
        firsts = self._firsts(requests, calibrates)
        side_information = SideInformation(
            self._codec,
            out,
            workers=len(requests),
            control=self.control,
            side=None if firsts else torch.zeros_like(out),
            calibrates=calibrates,
            scratch=self._scratch,
        )
        side_information.start(None)
        if out.numel():
            for first in (True, False):
                for request in requests:
                    if (request.worker in firsts) == first:
                        side_information.add(self._wire(request, out), first=first)
        side_information.finish()
        self.control.decide()

    def _firsts(self, requests: Sequence[Request], calibrates: bool) -> set[int]:
        """P1: those that send plainly. If all of them have left, nothing is known: y = 0."""
        workers = [request.worker for request in requests]
        # all do, and a calibration compares P2
        if calibrates or self.control.ratio == self._end:
            return {w for place, w in enumerate(workers) if in_first_group(place, len(workers))}
        return {worker for worker in workers if self.ratio_of(worker) == self._end}

    def stats(self) -> Nesting:
        """Of this server."""
        ratio = self.control.ratio
        return Nesting(
            ratio=ratio, failures=self.control.failures, correlation=self.control.correlation
        )

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to resume bit for bit."""
        return {"control": self.control.state_dict(), "told": dict(self.ratios)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state_dict."""
        self.control.load_state_dict(state["control"])
        self.ratios = {int(worker): int(ratio) for worker, ratio in state["told"].items()}

    def _wire(self, request: Request, out: Tensor) -> Wire:
        frame, chunk = request.frame, self._chunk
        key = chunk.context(frame.step).key(request.worker, chunk.number)
        data = chunk.on_device(request.body)
        return Wire.parse(data, key=key, shape=out.shape, dtype=torch.float32)
