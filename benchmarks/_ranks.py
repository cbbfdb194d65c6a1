"""Many ranks in one process: threads whose process groups pass tensors through memory.

Exchanges run on them as they are, so a table for 64 ranks needs neither hosts nor sockets. Sums are
taken in order of ranks. Bytes that leave a rank are counted apart: on the way out (all-to-all and
point-to-point) and on the way back (all-gather); a ring all-reduce is half of each.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Queue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.futures import Future

import laconic as lc
from laconic._scratch import Scratch
from laconic.comm._context import ExchangeContext, Traffic
from laconic.exchanges import Exchange, Hierarchical, pair
from laconic.exchanges._hierarchical import _TEAMS, _Team

Result = TypeVar("Result")
_PATIENCE_S = 300.0


class Switch:
    """What the ranks of a group have in common."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=_PATIENCE_S)
        self.lines: dict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)

    def meet(self, rank: int, mine: Any, take: Callable[[list[Any]], None]) -> None:
        """All bring something; each takes from it what it needs; then all go on."""
        self.slots[rank] = mine
        self.barrier.wait()
        take(self.slots)
        self.barrier.wait()


class Rank(dist.ProcessGroup):
    """One rank of a group in memory."""

    def __init__(self, switch: Switch, rank: int) -> None:
        super().__init__(rank, switch.size)
        self.switch, self.place = switch, rank
        self.out_bytes = self.back_bytes = 0.0
        self.sends: list[int] = []  # of these, point-to-point
        world: Any = distributed_c10d._world  # what dist.get_backend and get_global_rank look at
        world.pg_map[self] = ("memory", None)
        world.pg_group_ranks[self] = {i: i for i in range(switch.size)}

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.switch.size

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        (x,) = tensors

        def add(slots: list[Any]) -> None:
            if self.place == 0:
                for other in slots[1:]:
                    x.add_(other)

        half = (self.size() - 1) / self.size() * x.numel() * x.element_size()
        self.out_bytes, self.back_bytes = self.out_bytes + half, self.back_bytes + half
        self.switch.meet(self.place, x, add)
        self.switch.meet(self.place, x, lambda slots: x.copy_(slots[0]))
        return _done()

    def all_to_all_single(
        self, out: Tensor, x: Tensor, room: Sequence[int], sizes: Sequence[int], opts: Any = None
    ) -> Any:
        n, own = self.size(), self.place
        parts = x.split(list(sizes) or x.numel() // n)

        def take(slots: list[Any]) -> None:
            for i, target in enumerate(out.split(list(room) or out.numel() // n)):
                target.copy_(slots[i][own])

        self.out_bytes += (x.numel() - parts[own].numel()) * x.element_size()
        self.switch.meet(own, parts, take)
        return _done()

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        self.back_bytes += (self.size() - 1) * x.numel() * x.element_size()
        self.switch.meet(self.place, x, lambda slots: torch.cat(slots, out=out))
        return _done()

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        (x,) = tensors
        self.sends.append(x.numel() * x.element_size())
        self.out_bytes += self.sends[-1]
        self.switch.lines[self.place, peer].put(x.clone())
        return _done()

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        return _Arrival(self.switch.lines[peer, self.place], tensors[0])

    # names of before torch 2.12
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single

    def leave(self) -> None:
        """Forget this group."""
        world: Any = distributed_c10d._world
        world.pg_map.pop(self, None)
        world.pg_group_ranks.pop(self, None)


class _Arrival:
    """A receive: taken off its line when waited for."""

    def __init__(self, line: Queue[Tensor], target: Tensor) -> None:
        self.line, self.target = line, target

    def wait(self) -> None:
        self.target.copy_(self.line.get(timeout=_PATIENCE_S))


def _done() -> Any:
    future: Future[None] = Future()
    future.set_result(None)
    return torch._C._distributed_c10d._create_work_from_future(future)


def on_all(switches: Iterable[Switch], work: Sequence[Callable[[], Result]]) -> list[Result]:
    """Each function in a thread of its own, as a rank; their results, or the first error."""
    results: list[Any] = [None] * len(work)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work[rank]()
        except BaseException as error:
            errors.append(error)
            for switch in switches:  # or the others would wait for this rank
                switch.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@dataclass
class World:
    """Some ranks in memory, and what each remembers."""

    spec: str
    size: int
    nodes: tuple[tuple[int, ...], ...] = ()
    memories: list[lc.ExchangeMemory] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    far: list[Rank] = field(default_factory=list)  # of nodes: as they are in groups across

    def __post_init__(self) -> None:
        self.codec, self.way = pair(self.spec)
        self.switches = [Switch(self.size)]
        self.ranks = [Rank(self.switches[0], i) for i in range(self.size)]
        self.all_ranks = list(self.ranks)
        if self.nodes:
            self._apart()
        self.memories = self.memories or [lc.ExchangeMemory() for _ in self.ranks]
        self.traffic = [Traffic() for _ in self.ranks]
        self.scratch = [Scratch() for _ in self.ranks]

    def _apart(self) -> None:
        """Groups inside nodes and across, as `prepare` would make them."""
        wide = len(self.nodes[0])
        inside = [Switch(wide) for _ in self.nodes]
        across = [Switch(len(self.nodes)) for _ in range(wide)]
        for i, rank in enumerate(self.ranks):
            near, far = Rank(inside[i // wide], i % wide), Rank(across[i % wide], i // wide)
            _TEAMS[rank] = {self.nodes: _Team(len(self.nodes), wide, near, far)}
            self.all_ranks += [near, far]
            self.far.append(far)
        self.switches += inside + across
        self.way: Exchange = Hierarchical(nodes=self.nodes)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *problem: object) -> None:
        for rank in self.all_ranks:
            rank.leave()

    def calls(self, parts: Sequence[int], step: int, seed: int = 0) -> list[ExchangeContext]:
        places = tuple(
            lc.Place(parameter=i, start=0, numel=numel, total=numel)
            for i, numel in enumerate(parts)
        )
        each = zip(self.ranks, self.memories, self.scratch, self.traffic, strict=True)
        return [
            ExchangeContext(
                group=rank,
                seed=seed,
                step=step,
                places=places,
                memory=memory,
                scratch=scratch,
                traffic=traffic,
            )
            for rank, memory, scratch, traffic in each
        ]

    def mean(self, xs: Sequence[Tensor], parts: Sequence[int], step: int, seed: int = 0) -> Tensor:
        """What all ranks end with: the same bits."""
        results = [x.clone() for x in xs]
        for rank in self.all_ranks:
            rank.out_bytes = rank.back_bytes = 0.0
        calls = self.calls(parts, step, seed)
        work = [
            partial(self.way.mean, x, self.codec, context)
            for x, context in zip(results, calls, strict=True)
        ]
        on_all(self.switches, work)
        words = [x.view(torch.uint8) for x in results]
        assert all(torch.equal(words[0], other) for other in words), f"{self.spec}: ranks differ"
        return results[0]

    @property
    def sent(self) -> int:
        return self.traffic[0].sent_bytes
