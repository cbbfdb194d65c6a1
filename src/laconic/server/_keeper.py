"""One server's chunk of the master weights: gradients in, weights out, as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic._wire import ALIGN
from laconic.codecs import NDQSG, Codec
from laconic.codecs._memory import Scratch
from laconic.errors import WireError
from laconic.exchanges._nesting import plain_codec
from laconic.server._chunk import HOST, PLAIN, Chunk
from laconic.server._desk import Request
from laconic.server._difference import projection, take_over
from laconic.server._flat import Flat
from laconic.server._link import Flag
from laconic.server._nests import Nests
from laconic.server._shard import Settings, Shard, settings_of

ALL = 0  # weights that all workers get: the same bytes, the same draws


class Keeper:
    """Master weights of a chunk, the optimizer on them, and what workers were sent of them."""

    def __init__(
        self, chunk: Chunk, flat: Flat, optimizer: Optimizer, codec: Codec, pull_codec: Codec
    ) -> None:
        self.chunk, self.codec, self.pull_codec = chunk, codec, pull_codec
        whole = flat.empty()
        flat.read(whole)
        weights = whole[chunk.first : chunk.last]
        self.shard = Shard(optimizer, weights, flat.parts(chunk.number))
        self.nests = Nests(codec, chunk) if isinstance(codec, NDQSG) else None
        self._sent: dict[int, Tensor] = {}  # what workers have, where differences are sent
        self._scratch = Scratch()

    @property
    def settings(self) -> Settings:
        """Those of the optimizer here."""
        return settings_of(self.shard.optimizer.param_groups)

    @property
    def most_bytes(self) -> int:
        """Of a gradient, however it is sent."""
        own = plain_codec(self.codec) if isinstance(self.codec, NDQSG) else self.codec
        return self.chunk.most_bytes(self.codec, own, PLAIN)

    def mean(self, requests: Sequence[Request]) -> None:
        """The mean of all members' gradients."""
        if self.nests is not None and not requests[0].frame.flags & Flag.PLAIN:
            self.nests.mean(requests, self.shard.mean)
            return
        for place, request in enumerate(requests):
            self.add(request, first=place == 0, weight=1 / len(requests))

    def add(self, request: Request, *, first: bool, weight: float) -> None:
        """Add a gradient to those of this update."""
        frame = request.frame
        codec = PLAIN if frame.flags & Flag.PLAIN else self.codec
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

    def step(self, settings: Settings, spoilt: bool) -> Flag:
        """One update, unless a gradient was spoilt or what came is not finite."""
        before = self.shard.skipped_steps, self.shard.skipped_shards
        self.shard.step(settings, torch.full((1,), float(spoilt), device=self.chunk.device))
        if self.shard.skipped_steps > before[0]:
            return Flag.SKIPPED
        return Flag.SHARD_SKIPPED if self.shard.skipped_shards > before[1] else Flag.NONE

    def weights(self, whose: int, *, remember: bool) -> Tensor:
        """As they are. `remember`: later differences start from here."""
        if remember:
            self.remember(whose)
        return self._bytes(self.shard.weights, f"weights {whose}")

    def remember(self, whose: int) -> None:
        """Workers have the weights as they are."""
        if self.pull_codec.name != "none":
            self._sent.setdefault(whose, torch.empty_like(self.shard.weights))
            self._sent[whose].copy_(self.shard.weights)

    def forget(self, whose: int) -> None:
        """They will not ask again."""
        self._sent.pop(whose, None)

    def last_sent(self, whose: int) -> Tensor:
        """What workers have."""
        return self._bytes(self._sent.get(whose, self.shard.weights), f"weights {whose}")

    def difference(self, whose: int, step: int) -> Tensor:
        """λ and Q(weights - what workers have), as in `pull_difference`."""
        if whose not in self._sent:
            raise WireError("a difference of weights was asked for, and none were sent before")
        was, weights = self._sent[whose], self.shard.weights
        change = self._scratch.take("change", was.numel(), was.device, torch.float32)
        found = self._scratch.take("found", was.numel(), was.device, torch.float32)
        torch.sub(weights, was, out=change)
        data = self.chunk.encode(change, self.pull_codec, step, whose, 1)
        self.chunk.decode(data, self.pull_codec, found, step, whose, 1)
        factor = projection(found, change).view(1)
        take_over(found, factor, was, out=was)
        room = self._scratch.take(f"coded {whose}", ALIGN + data.numel(), HOST, torch.uint8)
        room[:4].view(torch.float32).copy_(factor)
        room[4:ALIGN].zero_()
        room[ALIGN:].copy_(data)
        return room

    def _bytes(self, x: Tensor, name: str) -> Tensor:
        data = x.view(torch.uint8)
        return self._scratch.take(name, data.numel(), HOST, torch.uint8).copy_(data)

    def state_dict(self) -> dict[str, object]:
        return {
            "shard": self.shard.state_dict(),
            "sent": {whose: x.clone() for whose, x in self._sent.items()},
            "nests": None if self.nests is None else self.nests.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.shard.load_state_dict(state["shard"])
        if self.nests is not None:
            self.nests.load_state_dict(state["nests"])
        self._sent = {  # copies: they are written to
            int(whose): x.to(self.chunk.device, copy=True) for whose, x in state["sent"].items()
        }
