"""The contract that every exchange keeps: a tensor on each rank → their mean, the same bits."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._key import Key
from laconic.codecs import Codec, Place
from laconic.codecs._memory import Scratch
from laconic.errors import ConfigError

_CHUNKS = 1 << 20  # more than ranks: keys of different chunks differ
VERIFY = ("auto", "sum", "none")


@dataclass
class Traffic:
    """What this rank has sent so far, and how long it was in collectives, waiting included.

    An exchange that knows which ranks share a node counts what stays inside one as `local_bytes`;
    `sent_bytes` is all the rest, and with any other exchange everything.
    """

    sent_bytes: int = 0
    wire_seconds: float = 0.0
    local_bytes: int = 0

    @contextmanager
    def sending(self, count: float) -> Iterator[None]:
        """Count bytes, and the time of the enclosed collective (on CUDA: of its launch)."""
        start = time.perf_counter()
        yield
        self.wire_seconds += time.perf_counter() - start
        self.sent_bytes += round(count)

    @contextmanager
    def inside_a_node(self) -> Iterator[None]:
        """What is sent in here stays inside a node."""
        before = self.sent_bytes
        yield
        self.local_bytes += self.sent_bytes - before
        self.sent_bytes = before


@dataclass(frozen=True, kw_only=True)
class Call:
    """One exchange of one tensor: among whom, and what names its draws.

    `tensor` is a number that all ranks give this tensor and no other one at this step; `places` say
    which parameters it holds, for codecs with a step or a memory for each. `first_chunk` is the
    number of its first chunk: sub-groups that share a tensor's parts draw with chunks of their own.
    `memory` is what an exchange remembers of its tensors: give the same one at every step. Codecs
    with a budget (`error=`) find there how much of each parameter's gradient ranks have in common.
    `verify` says whether messages carry a check sum of all their bytes, or only of their frames:
    "sum", "none", or "auto", which is "sum" for tensors on the CPU. All ranks give the same.
    `passes` of backward were made since an optimizer stepped this rank's model, if that is known:
    ranks whose numbers differ are told so.
    """

    group: dist.ProcessGroup
    seed: int = 0
    step: int = 0
    tensor: int = 0
    first_chunk: int = 0
    places: tuple[Place, ...] = ()
    known: set[Hashable] = field(default_factory=set, compare=False)  # wires that were as expected
    memory: dict[Hashable, Any] = field(default_factory=dict, compare=False)  # kept by the caller
    scratch: Scratch = field(default_factory=Scratch, compare=False)
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    verify: str = "auto"
    passes: int | None = None

    def __post_init__(self) -> None:
        checked_verify(self.verify)

    def sums(self, device: torch.device) -> bool:
        """Whether messages of tensors there carry a check sum of all their bytes."""
        return self.verify == "sum" or (self.verify == "auto" and device.type == "cpu")

    def name_of(self, rank: int) -> str:
        """What an error calls a rank of this group: its number among all ranks."""
        return f"rank {dist.get_global_rank(self.group, rank)}"

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
        tensor = self.tensor * _CHUNKS + self.first_chunk + chunk
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


def checked_verify(verify: str) -> str:
    """ConfigError unless it is one of the ways to check messages."""
    if verify not in VERIFY:
        raise ConfigError(f"verify is one of {', '.join(VERIFY)}, not {verify!r}")
    return verify


def saved_memory(memory: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
    """What exchanges remember, for a state_dict; as it was loaded, where it was not used since."""
    return {
        key: kept if isinstance(kept, Mapping) else kept.state_dict()
        for key, kept in memory.items()
    }


class Exchange(ABC):
    """How encoded tensors travel and add up. Subclasses are frozen dataclasses: settings only."""

    name: ClassVar[str]

    @abstractmethod
    def check(self, codec: Codec) -> None:
        """ConfigError, with a pair that works, if this exchange cannot carry the codec."""

    def prepare(self, group: dist.ProcessGroup) -> None:  # noqa: B027 (most have nothing to do)
        """Make what `mean` needs beside the group itself, such as sub-groups; once, on all ranks.

        Call it where all ranks of the group make groups in the same order, before the first mean:
        process groups made later, in a thread of communication, may come in another order on
        another rank and hang. `mean` does it where that was forgotten.
        """

    def check_group(self, codec: Codec, group: dist.ProcessGroup) -> None:
        """ConfigError if the codec cannot serve so many ranks; after `prepare`."""
        codec.check_workers(1)

    def check_units(self, codec: Codec) -> None:  # noqa: B027 (most remember no values)
        """ConfigError, with what works, if values must not change their units between steps."""

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
