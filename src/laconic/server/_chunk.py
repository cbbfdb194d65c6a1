"""A chunk of a flat vector as it travels between workers and its server."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from laconic.codecs import Codec, Place, Uncompressed
from laconic.codecs._memory import Scratch
from laconic.exchanges import Call
from laconic.exchanges._lane import Lane
from laconic.exchanges._wires import decode, encode, segments_of
from laconic.server._flat import Flat

PLAIN = Uncompressed()
HOST = torch.device("cpu")


class Chunk:
    """Chunk `number` of a flat vector, as it travels between any worker and its server."""

    def __init__(self, flat: Flat, number: int, lane: Lane, seed: int) -> None:
        self.number, self.device = number, flat.device
        self._lane, self._seed, self._places = lane, seed, flat.places
        self._scratch = Scratch()
        self._known: set[Hashable] = set()
        self.first, self.last = flat.edges[number], flat.edges[number + 1]
        self.places: list[Place] = self.call(0).inside(self.first, self.last)

    def call(self, step: int) -> Call:
        """What names the draws of a step; scratch and what is known are kept."""
        return Call(
            group=self._lane.group,
            seed=self._seed,
            step=step,
            places=self._places,
            known=self._known,
            scratch=self._scratch,
        )

    def most_bytes(self, *codecs: Codec) -> int:
        """Of a wire under any of these."""
        count = self.last - self.first
        segments = segments_of(self.places)
        return max(one.nbytes(count, torch.float32, segments) for one in codecs) if count else 0

    def encode(self, x: Tensor, codec: Codec, step: int, rank: int, phase: int) -> Tensor:
        """A wire's bytes, on the host."""
        if not x.numel():
            return torch.empty(0, dtype=torch.uint8)
        call = self.call(step)
        wire = encode(codec, x, call.key(rank, self.number, phase), self.places, call)
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
        call = self.call(step)
        key = call.key(rank, self.number, phase)
        wire = self.on_device(data)
        places, dtype = self.places, torch.float32
        decode(codec, wire, out, key, places, dtype, call, add=add, weight=weight)

    def on_host(self, data: Tensor, name: str) -> Tensor:
        if data.device == HOST:
            return data
        return self._scratch.take(name, data.numel(), HOST, torch.uint8).copy_(data)

    def on_device(self, data: Tensor) -> Tensor:
        if self.device == HOST:
            return data
        return self._scratch.take("arrived", data.numel(), self.device, torch.uint8).copy_(data)
