"""What FSDP2's flat buffers are made of: the same slots in the shard of every rank.

FSDP concatenates the parameters of a module, each cut into n parts and padded to equal ones:
[rank 0: p0 | p1 | ...][rank 1: p0 | p1 | ...]. Padding is neither sent
nor read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laconic.codecs import Place
from laconic.codecs._memory import Scratch

_MANY = 10_000  # sums of sizes that are looked at to find parameters without a gradient


@dataclass(frozen=True, kw_only=True)
class Piece:
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

    piece: Piece
    start: int

    def of(self, shard: Tensor, rank: int) -> Tensor:
        """Its values in a rank's shard, a view."""
        return shard[self.start : self.start + self.piece.count(rank)]


Slots = tuple[Slot, ...]


@dataclass(frozen=True)
class Plan:
    """How a buffer travels: slots by the name of their codec, and slots that stay plain."""

    coded: tuple[tuple[str, Slots], ...]
    plain: Slots

    @staticmethod
    def of(pieces: Iterable[Piece]) -> Plan:
        """For a buffer that holds these parameters."""
        start, coded, plain = 0, {}, []
        for piece in pieces:
            target = plain if piece.choice is None else coded.setdefault(piece.choice, [])
            target.append(Slot(piece, start))
            start += piece.room
        return Plan(tuple((name, tuple(slots)) for name, slots in coded.items()), tuple(plain))

    @property
    def slots(self) -> Slots:
        """All of them."""
        return (*(slot for _, slots in self.coded for slot in slots), *self.plain)

    def without_empty(self, rank: int) -> Plan:
        """Without codecs that have nothing to do in a rank's shard."""
        return replace(self, coded=tuple(pair for pair in self.coded if count(pair[1], rank)))


def plan_for(pieces: Sequence[Piece], room: int) -> Plan | None:
    """The plan of a shard of `room` values that holds some of the pieces, in order.

    FSDP leaves out parameters without a gradient and does not say which. All sizes are positive, so
    nothing is left out if the sum is that of all; otherwise sizes tell, if only one choice of them
    fits. None if that is not so: nobody should guess.
    """
    gap = sum(piece.room for piece in pieces) - room
    absent = _choice([piece.room for piece in pieces], gap) if gap >= 0 else None
    if absent is None:
        return None
    return Plan.of(piece for i, piece in enumerate(pieces) if i not in absent)


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
            parameter=slot.piece.number,
            start=rank * slot.piece.room,
            numel=values,
            total=slot.piece.total,
        )
        for slot in slots
        if (values := slot.piece.count(rank))
    ]


def count(slots: Slots, rank: int) -> int:
    """Values in a rank's shard."""
    return sum(slot.piece.count(rank) for slot in slots)


class Gathered:
    """The slots of some ranks' shards, each shard's as one tensor: views where they lie together.

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
        self._pieces = [
            [part for slot in slots if (part := slot.of(shard, rank)).numel()]
            for shard, rank in zip(shards, ranks, strict=True)
        ]
        sizes = [count(slots, rank) for rank in ranks]
        runs = [_run(shard, own) for shard, own in zip(shards, self._pieces, strict=True)]
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
                _copy(self._pieces[i], self._split(i))

    def store(self, *which: int) -> None:
        """Copy parts back into the shards."""
        if not self.view:
            for i in which or range(len(self.parts)):
                _copy(self._split(i), self._pieces[i])

    def _split(self, i: int) -> list[Tensor]:
        return list(self.parts[i].split([piece.numel() for piece in self._pieces[i]]))


def _run(shard: Tensor, pieces: Sequence[Tensor]) -> Tensor | None:
    """The pieces as one view of the shard; None if something lies between them."""
    if not pieces:
        return shard[:0]
    start = pieces[0].storage_offset() - shard.storage_offset()
    stop = pieces[-1].storage_offset() + pieces[-1].numel() - shard.storage_offset()
    return shard[start:stop] if stop - start == sum(piece.numel() for piece in pieces) else None


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy many tensors; one launch for many on a GPU."""
    if sources:
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
