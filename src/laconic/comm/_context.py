"""The context of an exchange (group, keys, buffers, memory), and encoding and decoding in it."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._key import Key
from laconic._scratch import Scratch
from laconic._wire import Wire
from laconic.codecs import Codec, Place, Residuals
from laconic.errors import ConfigError, WireError

_CHUNKS = 1 << 20  # more than ranks: keys of different chunks differ
_GRAIN = 512  # chunks start at multiples: blocks of scales are not cut for nothing
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


class ExchangeMemory:
    """All that one caller's exchanges remember between steps; per rank, except budgets.

    `residuals` are what codecs with error feedback have not sent yet. `kept` has the rest, by keys
    that exchanges choose: objects with a `state_dict`, or their loaded states until first use.
    Under `BUDGET` it is what is known of each parameter's error, a hint that any rank may load.
    """

    BUDGET = "budget"

    def __init__(self) -> None:
        self.residuals = Residuals()
        self.kept: dict[Hashable, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, on every rank, to resume bit for bit."""
        # what was not used since it was loaded is still a state
        kept = {
            key: one if isinstance(one, Mapping) else one.state_dict()
            for key, one in self.kept.items()
        }
        return {
            "residuals": self.residuals.state_dict(),
            "budget": kept.pop(self.BUDGET, None),
            "exchange memory": kept,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a dictionary that has, among others, the entries of `state_dict`."""
        residuals = state.get("residuals")
        self.residuals.load_state_dict(_older(state) if residuals is None else residuals)
        self.kept = dict(state.get("exchange memory") or {})
        if state.get("budget") is not None:
            self.kept[self.BUDGET] = state["budget"]

    def reset(self) -> None:
        """Forget everything."""
        self.residuals.reset()
        self.kept = {}


def _older(state: Mapping[str, Any]) -> dict[str, Any]:
    """The residuals of a state saved when codecs kept them, one codec's or those of several."""
    kept = state.get("memory") or {}
    several = [one for one in kept.values() if isinstance(one, Mapping)]
    return {key: value for one in several or [kept] for key, value in one.items()}


@dataclass(frozen=True, kw_only=True)
class ExchangeContext:
    """One exchange of one tensor: among which ranks, and what names its draws.

    `tensor` is a number that all ranks give this tensor and no other one at this step; `places` say
    which parameters it holds, for codecs with a step or a residual for each. `first_chunk` is the
    number of its first chunk: sub-groups that share a tensor's parts draw with chunks of their own.
    `memory` is what codecs and exchanges remember of these tensors: give the same one at every
    step. It has the residuals of error feedback and, for codecs with a budget (`error=`), how much
    of each parameter's gradient ranks have in common.
    `verify` says whether messages carry a check sum of all their bytes, or only of their frames:
    "sum", "none", or "auto", which is "sum" for tensors on the CPU. All ranks give the same.
    `passes` of backward were made since an optimizer stepped this rank's model, if that is known:
    ranks whose numbers differ get an error.
    """

    group: dist.ProcessGroup
    seed: int = 0
    step: int = 0
    tensor: int = 0
    first_chunk: int = 0
    places: tuple[Place, ...] = ()
    trusted_headers: set[Hashable] = field(
        default_factory=set, compare=False
    )  # wires that were as expected
    memory: ExchangeMemory = field(default_factory=ExchangeMemory, compare=False)
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


@dataclass(kw_only=True)
class ExchangeSession:
    """What the exchanges of one caller share from step to step; `context` is one exchange of them.

    Exchanges that use other groups in turn, or count as another's traffic, may share a session.
    """

    seed: int = 0
    verify: str = "auto"
    memory: ExchangeMemory = field(default_factory=ExchangeMemory)
    trusted_headers: set[Hashable] = field(default_factory=set)
    scratch: Scratch = field(default_factory=Scratch)
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        checked_verify(self.verify)

    def context(
        self,
        group: dist.ProcessGroup,
        *,
        step: int = 0,
        tensor: int = 0,
        places: Sequence[Place] = (),
        passes: int | None = None,
        traffic: Traffic | None = None,
    ) -> ExchangeContext:
        """One exchange of one tensor among this group's ranks."""
        return ExchangeContext(
            group=group,
            seed=self.seed,
            step=step,
            tensor=tensor,
            places=tuple(places),
            trusted_headers=self.trusted_headers,
            memory=self.memory,
            scratch=self.scratch,
            traffic=traffic or self.traffic,
            verify=self.verify,
            passes=passes,
        )


def checked_verify(verify: str) -> str:
    """ConfigError unless it is one of the ways to check messages."""
    if verify not in VERIFY:
        raise ConfigError(f"verify is one of {', '.join(VERIFY)}, not {verify!r}")
    return verify


@dataclass(frozen=True)
class Sizes:
    """Bytes of the wires that arrive: known to all, or between `least` and `bytes`."""

    bytes: tuple[int, ...]
    known: bool
    least: tuple[int, ...] = ()  # empty: no bound

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
        """Of wires of `counts` values; none for no values."""
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
    """The segments of a codec with one step per tensor."""
    return [place.numel for place in places] or None


def encode(
    codec: Codec,
    x: Tensor,
    key: Key,
    places: Sequence[Place],
    context: ExchangeContext,
    **spending: Any,
) -> Wire:
    """x's wire, in a scratch buffer for its chunk and phase.

    `spending` are shares= and spent= of codecs with a budget.
    """
    segments = segments_of(places)
    room = codec.nbytes(x.numel(), x.dtype, segments)
    # n chunks of a tensor have n different remainders: none overwrites another
    name = f"wire {key.tensor % context.size} {key.phase}"
    buffer = context.scratch.take(name, room, x.device, torch.uint8)
    if codec.residuals:
        spending |= {"places": places or None, "residuals": context.memory.residuals}
    return codec.encode(x, key, out=buffer, segments=segments, **spending)


def decode(
    codec: Codec,
    message: Tensor,
    out: Tensor,
    key: Key,
    places: Sequence[Place],
    dtype: torch.dtype,
    context: ExchangeContext,
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
    if same in context.trusted_headers:
        wire = codec.trust(message, workers=workers, **what)
    else:
        wire = Wire.parse(message, **what)
        if wire.header.workers != workers:
            raise WireError(f"a wire for {wire.header.workers} workers arrived, not for {workers}")
        if message.is_cuda:
            context.trusted_headers.add(same)
    codec.decode(wire, out=out, add=add, weight=weight)
