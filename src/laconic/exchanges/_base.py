"""The contract that every exchange keeps: a tensor on each rank → their mean, the same bits."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor

from laconic._key import Key
from laconic.codecs import Codec, Place
from laconic.codecs._memory import Scratch

_CHUNKS = 1 << 20  # more than ranks: keys of different chunks differ


@dataclass
class Traffic:
    """What this rank has sent so far, and how long it was in collectives, waiting included."""

    sent_bytes: int = 0
    wire_seconds: float = 0.0

    @contextmanager
    def sending(self, count: float) -> Iterator[None]:
        """Count bytes, and the time of the enclosed collective (on CUDA: of its launch)."""
        start = time.perf_counter()
        yield
        self.wire_seconds += time.perf_counter() - start
        self.sent_bytes += round(count)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One exchange of one tensor: among whom, and what names its draws.

    `tensor` is a number that all ranks give this tensor and no other one at this step; `places` say
    which parameters it holds, for codecs with a step or a memory for each.
    """

    group: dist.ProcessGroup
    seed: int = 0
    step: int = 0
    tensor: int = 0
    places: tuple[Place, ...] = ()
    scratch: Scratch = field(default_factory=Scratch, compare=False)
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return self.group.rank()

    def key(self, rank: int, chunk: int = 0, phase: int = 0) -> Key:
        """Names the encoding of a chunk by a rank: first (phase 0) or of a mean (phase 1)."""
        tensor = self.tensor * _CHUNKS + chunk
        return Key(seed=self.seed, step=self.step, tensor=tensor, rank=rank, phase=phase)

    def inside(self, start: int, stop: int) -> list[Place]:
        """The places of values start .. stop-1."""
        found, first = [], 0
        for place in self.places:
            low, high = max(start, first), min(stop, first + place.numel)
            if low < high:
                found.append(
                    Place(
                        parameter=place.parameter,
                        start=place.start + low - first,
                        numel=high - low,
                        total=place.total,
                    )
                )
            first += place.numel
        return found


class Exchange(ABC):
    """How encoded tensors travel and add up. Subclasses are frozen dataclasses: settings only."""

    name: ClassVar[str]

    @abstractmethod
    def check(self, codec: Codec) -> None:
        """ConfigError, with a pair that works, if this exchange cannot carry the codec."""

    @abstractmethod
    def mean(self, x: Tensor, codec: Codec, call: Call, rest: Tensor | None = None) -> None:
        """Replace flat x by the mean over the group: the same bits on every rank.

        `rest`, flat and fp32, holds the values that are not worth encoding: they become their mean
        too, exact but for fp32 rounding, and travel in x's messages where the exchange can.
        All ranks call with the same codec settings, lengths, dtype and call, in the same order.
        Waits for other ranks on the host where the backend does (Gloo).
        """

    def __str__(self) -> str:
        """The text that names this exchange."""
        return self.name
