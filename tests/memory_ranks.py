"""Ranks as threads of one process: a process group in memory that behaves like Gloo.

Exchanges run on it as they are. What Gloo does when a rank ends, this does: whoever waits for it,
or for one that has waited for it, gets a RuntimeError at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist
from helpers import PATIENCE_S
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.futures import Future


class Hub:
    """What ranks of a group have in common: a line from each rank to each, for either purpose."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lines, self.meetings = _lines(size), _lines(size)

    def meet(self, rank: int, mine: Sequence[Tensor]) -> list[Any]:
        """What all ranks bring, in order."""
        for peer in range(self.size):
            self.meetings[rank, peer].put([one.clone() for one in mine])
        return [taken(self.meetings[peer, rank]) for peer in range(self.size)]

    def leave(self, rank: int) -> None:
        """This rank has ended; what it has sent still arrives."""
        for peer in range(self.size):
            self.lines[rank, peer].put(None)
            self.meetings[rank, peer].put(None)


def _lines(size: int) -> dict[tuple[int, int], Queue[Any]]:
    return {(i, j): Queue() for i in range(size) for j in range(size)}


def taken(line: Queue[Any]) -> Any:
    """What comes next; as Gloo's, an error if nothing will."""
    found = line.get(timeout=PATIENCE_S)
    if found is None:
        line.put(None)
        raise RuntimeError("[gloo/transport/memory] Connection closed by peer")
    return found


_Group: Any = dist.ProcessGroup  # its stubs are stricter than what calls it


class MemoryGroup(_Group):
    """One rank of it."""

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(rank, hub.size)
        self.hub, self.place = hub, rank

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.hub.size

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        (x,) = tensors
        first, *others = (one for (one,) in self.hub.meet(self.place, [x]))
        x.copy_(first)
        for other in others:
            x.add_(other)
        return _done()

    def all_to_all_single(
        self, out: Tensor, x: Tensor, room: Sequence[int], sizes: Sequence[int], opts: Any = None
    ) -> Any:
        n, own = self.size(), self.place
        every = self.hub.meet(own, x.split(list(sizes) or x.numel() // n))
        for parts, target in zip(every, out.split(list(room) or out.numel() // n), strict=True):
            target.copy_(parts[own])
        return _done()

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        torch.cat([one for (one,) in self.hub.meet(self.place, [x])], out=out)
        return _done()

    def allgather(self, out: list[list[Tensor]], x: list[Tensor], opts: Any = None) -> Any:
        for target, (value,) in zip(out[0], self.hub.meet(self.place, x), strict=True):
            target.copy_(value)
        return _done()

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        self.hub.lines[self.place, peer].put(tensors[0].clone())
        return _done()

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        return _Arrival(self.hub.lines[peer, self.place], tensors[0])

    # names of before torch 2.12
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single


class _Arrival:
    """A receive. As in Gloo, a shorter message than the posted one leaves the rest as it was."""

    def __init__(self, line: Queue[Any], target: Tensor) -> None:
        self.line, self.target = line, target

    def wait(self) -> None:
        data = taken(self.line)
        self.target[: data.numel()].copy_(data)


def _done() -> Any:
    future: Future[None] = Future()
    future.set_result(None)
    c10d: Any = torch._C
    return c10d._distributed_c10d._create_work_from_future(future)


@contextmanager
def memory_groups(size: int) -> Iterator[list[MemoryGroup]]:
    """A group of so many ranks, known to torch.distributed as Gloo's."""
    hub, world = Hub(size), distributed_c10d._world
    groups = [MemoryGroup(hub, rank) for rank in range(size)]
    for group in groups:
        world.pg_map[group] = ("gloo", None)  # pyright: ignore[reportArgumentType]
        world.pg_group_ranks[group] = {i: i for i in range(size)}
    try:
        yield groups
    finally:
        for group in groups:
            world.pg_map.pop(group, None)
            world.pg_group_ranks.pop(group, None)


def on_all(groups: Sequence[MemoryGroup], work: Callable[[MemoryGroup], Any]) -> list[Any]:
    """What every rank's work returns, or raises."""
    outcomes: list[Any] = [None] * len(groups)

    def run(group: MemoryGroup) -> None:
        try:
            outcomes[group.place] = work(group)
        except Exception as error:
            outcomes[group.place] = error
            group.hub.leave(group.place)

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
