"""Encoding and decoding inside an exchange: keys, places and lengths are known to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from laconic._key import Key
from laconic._wire import Wire
from laconic.codecs import Codec, Place
from laconic.errors import WireError
from laconic.exchanges._base import Call

_GRAIN = 512  # chunks start at multiples: blocks of scales are not cut for nothing


@dataclass(frozen=True)
class Sizes:
    """Bytes of the wires that arrive: known to all, or from `least` to so many each."""

    bytes: tuple[int, ...]
    known: bool
    least: tuple[int, ...] = ()  # nothing: no bound

    @property
    def smallest(self) -> tuple[int, ...]:
        """The fewest bytes of each."""
        return self.least or (0,) * len(self.bytes)

    @staticmethod
    def of(
        codec: Codec,
        counts: Sequence[int],
        places: Sequence[Sequence[Place]],
        dtype: torch.dtype,
    ) -> Sizes:
        """Of wires of so many values each; none for no values."""
        found = [
            codec.nbytes(count, dtype, segments_of(own)) if count else 0
            for count, own in zip(counts, places, strict=True)
        ]
        least = [
            codec.least_nbytes(count, dtype, segments_of(own)) if count else 0
            for count, own in zip(counts, places, strict=True)
        ]
        return Sizes(tuple(found), not codec.varies, tuple(least))


def chunk_edges(numel: int, ranks: int, grain: int = _GRAIN) -> list[int]:
    """Where the chunks that ranks own begin, and the end of the last."""
    size = -(-numel // (ranks * grain)) * grain
    return [min(size * j, numel) for j in range(ranks + 1)]


def chunks_of(x: Tensor, ranks: int, grain: int = _GRAIN) -> list[Tensor]:
    """The chunks that ranks own, as views."""
    edges = chunk_edges(x.numel(), ranks, grain)
    return [x[first:last] for first, last in pairwise(edges)]


def segments_of(places: Sequence[Place]) -> list[int] | None:
    """What a codec with one step a tensor needs to know."""
    return [place.numel for place in places] or None


def encode(
    codec: Codec,
    x: Tensor,
    key: Key,
    places: Sequence[Place],
    call: Call,
    **spending: Any,
) -> Wire:
    """x's wire, in a scratch buffer of that chunk and phase.

    `spending` are shares= and spent= of codecs with a budget.
    """
    segments = segments_of(places)
    room = codec.nbytes(x.numel(), x.dtype, segments)
    # n chunks of a tensor have n different remainders: none overwrites another
    name = f"wire {key.tensor % call.size} {key.phase}"
    buffer = call.scratch.take(name, room, x.device, torch.uint8)
    memory: dict[str, Any] = {"places": places} if codec.remembers and places else {}
    return codec.encode(x, key, out=buffer, segments=segments, **memory, **spending)


def decode(
    codec: Codec,
    message: Tensor,
    out: Tensor,
    key: Key,
    places: Sequence[Place],
    dtype: torch.dtype,
    call: Call,
    *,
    add: bool = False,
    weight: float = 1.0,
    workers: int = 1,
) -> None:
    """out (+)= weight · what `message` holds, a wire of out's length and of this dtype.

    On CUDA a header is read once: all later ones from the same rank are equal, because ranks do
    not change their settings, and reading it would wait for the device.
    """
    same = (codec, key.tensor, key.rank, key.phase, out.numel(), dtype, workers)
    segments = segments_of(places) if codec.segmented else None
    if segments is not None and len(segments) < 2:
        segments = None
    what: dict[str, Any] = {"key": key, "shape": out.shape, "dtype": dtype, "segments": segments}
    if same in call.known:
        wire = codec.trust(message, workers=workers, **what)
    else:
        wire = Wire.parse(message, **what)
        if wire.header.workers != workers:
            raise WireError(f"a wire for {wire.header.workers} workers came, not for {workers}")
        if message.is_cuda and not codec.remembers:
            call.known.add(same)
    codec.decode(wire, out=out, add=add, weight=weight)
