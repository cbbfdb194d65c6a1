"""The sharded modules of a model: what their flat buffers hold, and how often each has reduced.

FSDP concatenates the parameters of a module, each cut into n parts and padded to equal ones:
[rank 0: p0 | p1 | ...][rank 1: p0 | p1 | ...]. Padding is neither sent nor read.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._scratch import Scratch, copy_all
from laconic.codecs import Place
from laconic.comm._context import ExchangeContext, ExchangeMemory, ExchangeSession
from laconic.errors import ConfigError

_LANES = 1 << 20  # more than ranks: keys of different parameters differ
_MANY = 10_000  # sums of sizes that are looked at to find parameters without a gradient


@dataclass(frozen=True, kw_only=True)
class ShardedParameter:
    """A parameter: how much of it every rank holds, and which codec is for it."""

    number: int  # among the model's parameters
    room: int  # values in each rank's shard, padding included
    total: int  # values of the parameter: what all ranks hold together
    choice: str | None  # a policy's name for its codec; None: travels as it is

    def count(self, rank: int) -> int:
        """Values without padding that a rank holds."""
        return max(0, min(self.room, self.total - rank * self.room))


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in every rank's shard."""

    parameter: ShardedParameter
    start: int

    def of(self, shard: Tensor, rank: int) -> Tensor:
        """Its values in a rank's shard, a view."""
        return shard[self.start : self.start + self.parameter.count(rank)]


Slots = tuple[Slot, ...]


@dataclass(frozen=True)
class ShardLayout:
    """How a buffer travels: slots by the name of their codec, and slots that stay plain."""

    coded: tuple[tuple[str, Slots], ...]
    plain: Slots

    @staticmethod
    def of(parameters: Iterable[ShardedParameter]) -> ShardLayout:
        """For a buffer that holds these parameters."""
        start, coded, plain = 0, {}, []
        for parameter in parameters:
            target = plain if parameter.choice is None else coded.setdefault(parameter.choice, [])
            target.append(Slot(parameter, start))
            start += parameter.room
        return ShardLayout(
            tuple((name, tuple(slots)) for name, slots in coded.items()), tuple(plain)
        )

    @property
    def slots(self) -> Slots:
        """All of them."""
        return (*(slot for _, slots in self.coded for slot in slots), *self.plain)

    def without_empty(self, rank: int) -> ShardLayout:
        """Without codecs that have nothing to do in a rank's shard."""
        return replace(self, coded=tuple(pair for pair in self.coded if count(pair[1], rank)))


def layout_for(parameters: Sequence[ShardedParameter], room: int) -> ShardLayout | None:
    """The layout of a shard of `room` values that holds some of the parameters, in order.

    FSDP leaves out parameters without a gradient and does not report which. All sizes are positive,
    so nothing is left out if the sum is that of all; otherwise it is inferred from the sizes if
    only one choice of them fits. None if it is ambiguous: nothing is guessed.
    """
    gap = sum(parameter.room for parameter in parameters) - room
    absent = _choice([parameter.room for parameter in parameters], gap) if gap >= 0 else None
    if absent is None:
        return None
    return ShardLayout.of(parameter for i, parameter in enumerate(parameters) if i not in absent)


def _choice(sizes: Sequence[int], total: int) -> tuple[int, ...] | None:
    """Which of the sizes add up to total; None if not just one choice of them does."""
    ways: dict[int, tuple[int, ...] | None] = {0: ()}
    for i, size in enumerate(sizes):
        for reached, chosen in list(ways.items()):
            above = reached + size
            if size and above <= total:
                ways[above] = None if chosen is None or above in ways else (*chosen, i)
        if len(ways) > _MANY:
            return None
    return ways.get(total)


def places(slots: Slots, rank: int) -> list[Place]:
    """What a rank's shard holds of which parameters."""
    return [
        Place(
            parameter=slot.parameter.number,
            start=rank * slot.parameter.room,
            numel=values,
            total=slot.parameter.total,
        )
        for slot in slots
        if (values := slot.parameter.count(rank))
    ]


def count(slots: Slots, rank: int) -> int:
    """Values in a rank's shard."""
    return sum(slot.parameter.count(rank) for slot in slots)


class SlotBuffers:
    """The slots of some ranks' shards, each shard's as one tensor: views where they are adjacent.

    `parts[i]` belongs to shards[i]; `load` copies values into it, `store` puts them back. Both do
    nothing where the part is a view.
    """

    def __init__(
        self,
        shards: Sequence[Tensor],
        ranks: Sequence[int],
        slots: Slots,
        dtype: torch.dtype,
        scratch: Scratch,
        name: str,
    ) -> None:
        self._slices = [
            [part for slot in slots if (part := slot.of(shard, rank)).numel()]
            for shard, rank in zip(shards, ranks, strict=True)
        ]
        sizes = [count(slots, rank) for rank in ranks]
        runs = [_run(shard, own) for shard, own in zip(shards, self._slices, strict=True)]
        self.view = shards[0].dtype == dtype and None not in runs
        if self.view:
            self.parts = [run for run in runs if run is not None]
        else:
            buffer = scratch.take(name, sum(sizes), shards[0].device, dtype)
            self.parts = list(buffer.split(sizes))

    def load(self, *which: int) -> None:
        """Copy the shards' values into parts: of all, or of those named."""
        if not self.view:
            for i in which or range(len(self.parts)):
                copy_all(self._split(i), self._slices[i])

    def store(self, *which: int) -> None:
        """Copy parts back into the shards."""
        if not self.view:
            for i in which or range(len(self.parts)):
                copy_all(self._slices[i], self._split(i))

    def _split(self, i: int) -> list[Tensor]:
        return list(self.parts[i].split([part.numel() for part in self._slices[i]]))


def _run(shard: Tensor, parts: Sequence[Tensor]) -> Tensor | None:
    """The parts as one view of the shard; None if something lies between them."""
    if not parts:
        return shard[:0]
    start = parts[0].storage_offset() - shard.storage_offset()
    stop = parts[-1].storage_offset() + parts[-1].numel() - shard.storage_offset()
    return shard[start:stop] if stop - start == sum(part.numel() for part in parts) else None


@dataclass
class Run:
    """What all sharded modules of a model share."""

    warmup_steps: int
    inside: ExchangeSession  # a shard group
    across: ExchangeSession  # replicas
    plain_bytes: int = 0
    exchange_seconds: float = 0.0
    closed: bool = False
    handle: Any = None  # lives as long as the model, also where nobody keeps it

    @staticmethod
    def of(seed: int, warmup_steps: int, verify: str) -> Run:
        """Exchanges in either direction remember what is theirs, and share all else."""
        inside = ExchangeSession(seed=seed, verify=verify)
        return Run(warmup_steps, inside, replace(inside, memory=ExchangeMemory()))

    @contextmanager
    def exchanging(self, plain_bytes: float) -> Iterator[None]:
        """Count what FSDP would have sent, and the time."""
        start = time.perf_counter()
        yield
        self.exchange_seconds += time.perf_counter() - start
        self.plain_bytes += round(plain_bytes)


@dataclass
class Unit:
    """A sharded module: torch's parameter group, what it holds, and how often it has reduced.

    `reductions` counts reduce-scatters and `means` all-reduces: each uses fresh random draws.
    """

    name: str
    group: Any  # FSDPParamGroup
    parameters: tuple[ShardedParameter, ...]
    run: Run
    shards: int = 1
    shard: int = 0
    replicas: int = 1
    replica: int = 0
    reductions: int = 0
    means: int = 0
    _layouts: dict[Hashable, ShardLayout | None] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of its mesh."""
        return tuple(self.group.mesh_info.mesh.mesh.flatten().tolist())

    def gradients(self, room: int) -> ShardLayout:
        """The layout of a shard of gradients; all plain, with a warning, if it cannot be known."""
        trained = tuple(param.sharded_param.requires_grad for param in self.group.fsdp_params)
        key = (trained, room)
        if key not in self._layouts:
            present = [
                parameter
                for parameter, is_in in zip(self.parameters, trained, strict=True)
                if is_in
            ]
            self._layouts[key] = layout_for(present, room)
            if self._layouts[key] is None:
                warnings.warn(
                    f"FSDP reduces {room} values per rank for {self.name or 'the root module'}, "
                    "and not for which parameters: these travel uncompressed. Some "
                    "have no gradient: set_reduce_scatter_unused_params(True), where torch has it, "
                    "gives them zeros",
                    stacklevel=2,
                )
        return self._layouts[key] or ShardLayout((), ())

    def weights(self, room: int) -> ShardLayout:
        """The layout of a shard of parameters; all plain if FSDP gathers something else."""
        if room not in self._layouts:
            whole = room == sum(parameter.room for parameter in self.parameters)
            self._layouts[room] = ShardLayout.of(self.parameters) if whole else None
        return self._layouts[room] or ShardLayout((), ())

    def context(
        self,
        session: ExchangeSession,
        group: dist.ProcessGroup,
        slots: Slots,
        step: int,
        lane: int,
        places: Sequence[Place] = (),
    ) -> ExchangeContext:
        """Keys by the first parameter (no other exchange of the step has it) and a lane.

        Lanes tell first encodings in each replica (whose errors must not be alike: they are
        averaged later), means of each shard between replicas, and weights apart.
        """
        if self.run.closed:
            raise ConfigError("this handle was closed: close() comes after the last step")
        tensor = slots[0].parameter.number * _LANES + lane
        return session.context(group, step=step, tensor=tensor, places=places)


def unit_of(name: str, group: Any, parameters: tuple[ShardedParameter, ...], run: Run) -> Unit:
    """A sharded module, on whatever mesh it is."""
    info = group.mesh_info
    return Unit(
        name=name,
        group=group,
        parameters=parameters,
        run=run,
        shards=getattr(info, "shard_mesh_size", 1),
        shard=getattr(info, "shard_mesh_rank", 0),
        replicas=getattr(info, "replicate_mesh_size", 1),
        replica=getattr(info, "replicate_mesh_rank", 0),
    )


def sharded_parameter(param: Any, number: int, text: str | None) -> ShardedParameter:
    """An FSDPParam; its part of a shard is padded to that of the first rank."""
    return ShardedParameter(
        number=number,
        room=param.padded_sharded_param_size.numel(),
        total=param._orig_size.numel(),
        choice=text,
    )
