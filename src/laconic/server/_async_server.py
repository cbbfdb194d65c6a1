"""Asynchronous serving: every gradient is an update of its own, none too old."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from laconic.errors import WireError
from laconic.server._link import Flag, Frame, Kind, Roles
from laconic.server._request_queue import Request, failed
from laconic.server._shard_server import ShardServer

_log = logging.getLogger("laconic")


@dataclass
class Delays:
    """How old one worker's gradients were: updates between reading weights and being applied."""

    count: int = 0
    total: int = 0
    most: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def add(self, delay: int) -> None:
        self.count += 1
        self.total += delay
        self.most = max(self.most, delay)


class BoundedStaleness:
    """A gradient is applied at most τ updates after its weights were read.

    Weights have version v after v updates. The gradient of a worker that has read version r must be
    applied while the version is at most r + τ, its deadline. With deadlines of readers
    sorted, d_0 ≤ d_1 ≤ .., applying them one after another meets all of them if and only if

        d_p ≥ v + p    for all p                                                             (*)

    1. One more reader gets the latest deadline, v + τ, at place p = the number of readers: (*)
       holds if there were at most τ readers. More must wait before they read.
    2. A gradient may be applied if (*) holds for the others with v + 1. Else it must wait until the
       readers before it, who are slower, have been applied.

    The reader with the earliest deadline never waits, so there is always one that can
    continue. With τ ≥ workers - 1 no worker waits to read; with τ = 0 workers take turns.
    """

    def __init__(self, most: int) -> None:
        self.most, self.version = most, 0
        self.readers: dict[int, int] = {}

    def may_read(self) -> bool:
        """Whether one more worker may read now."""
        return len(self.readers) <= self.most

    def read(self, worker: int) -> int:
        """The version that the worker has read."""
        self.forget(worker)  # it goes after the others
        self.readers[worker] = self.version
        return self.version

    def may_apply(self, worker: int) -> bool:
        """Whether this reader's gradient may be applied now."""
        # in order of reading, which is that of deadlines
        others = [version for name, version in self.readers.items() if name != worker]
        return all(
            version + self.most >= self.version + 1 + place for place, version in enumerate(others)
        )

    def apply(self, worker: int) -> int:
        """One more update; how many there were since its weights were read."""
        delay = self.version - self.readers.pop(worker)
        self.version += 1
        return delay

    def forget(self, worker: int) -> None:
        """Its gradient will not be applied."""
        self.readers.pop(worker, None)


class AsyncServer:
    """Gradients are applied as they come, held back where `BoundedStaleness` says so.

    A lost worker is reported and forgotten: the others continue, and nothing of it is left but the
    updates that were complete.
    """

    def __init__(self, shard: ShardServer, roles: Roles, most_delay: int, version: int) -> None:
        self._shard, self._roles = shard, roles
        self.staleness = BoundedStaleness(most_delay)
        self.staleness.version = version
        self.members = set(range(roles.workers))
        self.lost: dict[int, str] = {}
        self.delays: dict[int, Delays] = {}
        self.held_seconds = 0.0
        self._pushed: list[Request] = []
        self._pulling: list[Request] = []
        self._applied: dict[int, tuple[Flag, int]] = {}  # of workers that wait for weights

    @property
    def updates(self) -> int:
        """So far."""
        return self.staleness.version

    @property
    def expects_requests(self) -> bool:
        """Until the last member has left or is lost."""
        return bool(self.members)

    def stats(self) -> dict[str, Any]:
        """Who is lost, and how late gradients were."""
        return {
            "lost": dict(self.lost),
            "delays": dict(self.delays),
            "held_seconds": self.held_seconds,
        }

    def handle(self, request: Request, each: Callable[[int], object] | None) -> None:
        """One request, and all updates that it lets happen."""
        if request.lost is not None:
            self._lose(request.worker, request.lost)
        else:
            self._guarded(self._hear, request)
        while (ready := self._next()) is not None:
            before = self.staleness.version
            self._guarded(self._apply, ready)
            if each is not None and self.staleness.version > before:
                each(self.staleness.version)
        self._answer_pulls()

    def _guarded(self, act: Callable[[Request], None], request: Request) -> None:
        """A worker whose message cannot be decoded is lost, too."""
        try:
            act(request)
        except WireError as error:
            request.reply(*failed(str(error)))
            self._lose(request.worker, str(error))

    def _lose(self, worker: int, why: str) -> None:
        rank = self._roles.rank_of(worker)
        if worker in self.members:
            self.lost[rank] = why
            _log.warning("worker %d (rank %d) is lost, the others continue: %s", worker, rank, why)
        self._part_with(worker)

    def _part_with(self, worker: int) -> None:
        self.members.discard(worker)
        self.staleness.forget(worker)
        self._shard.forget(worker + 1)
        self._applied.pop(worker, None)
        self._pulling = [request for request in self._pulling if request.worker != worker]
        self._pushed = [request for request in self._pushed if request.worker != worker]

    def _hear(self, request: Request) -> None:
        frame, worker = request.frame, request.worker
        if frame.kind == Kind.PUSH:
            if self.staleness.readers.get(worker) != frame.version:
                raise WireError(
                    f"worker {worker} pushed a gradient of weights that it has not read"
                )
            self._pushed.append(request)
        elif frame.kind == Kind.PULL:
            self.staleness.forget(worker)  # it may have thrown its gradient away
            self._pulling.append(request)
        elif frame.kind == Kind.READ:
            data = self._shard.weights(worker + 1, remember=False)
            self._reply(request, data=data)
        elif frame.kind == Kind.LEAVE:
            self._part_with(worker)
            request.done()
        elif frame.kind == Kind.JOIN:
            self.members.add(worker)
            request.done()
        else:
            raise WireError(f"worker {worker} sent {frame.kind.name}, which workers do not send")

    def _next(self) -> Request | None:
        """The oldest gradient that may be applied, if there is one."""
        waiting = sorted(self._pushed, key=lambda one: self.staleness.readers[one.worker])
        return next((one for one in waiting if self.staleness.may_apply(one.worker)), None)

    def _apply(self, request: Request) -> None:
        worker = request.worker
        self._pushed.remove(request)
        self._shard.add(request, first=True, weight=1.0)
        flags = self._shard.step(request.settings, False)
        delay = self.staleness.apply(worker)
        self.delays.setdefault(self._roles.rank_of(worker), Delays()).add(delay)
        if request.frame.flags & Flag.PULL:
            self._applied[worker] = flags, delay
            self._pulling.append(request)
        else:
            self._reply(request, flags=flags, number=delay)

    def _answer_pulls(self) -> None:
        while self._pulling and self.staleness.may_read():
            self._guarded(self._answer_pull, self._pulling.pop(0))

    def _answer_pull(self, request: Request) -> None:
        whose = request.worker + 1
        flags, delay = self._applied.pop(request.worker, (Flag.NONE, 0))
        if request.frame.flags & Flag.CODED:
            data = self._shard.delta(whose, request.frame.step)
        else:
            data = self._shard.weights(whose, remember=True)
        self.staleness.read(request.worker)
        self._reply(request, data=data, flags=flags, number=delay)

    def _reply(
        self,
        request: Request,
        *,
        data: Tensor | None = None,
        flags: Flag = Flag.NONE,
        number: int = 0,
    ) -> None:
        self.held_seconds += time.perf_counter() - request.arrived_at
        length = 0 if data is None else data.numel()
        frame = Frame(
            kind=Kind.DONE,
            flags=flags,
            number=number,
            version=self.staleness.version,
            length=length,
        )
        request.reply(frame, data)
