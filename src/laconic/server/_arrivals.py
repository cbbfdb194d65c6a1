"""Asynchronous serving: every gradient is an update of its own, none too old."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from laconic.errors import WireError
from laconic.server._desk import Desk, Request, failed
from laconic.server._keeper import Keeper
from laconic.server._link import Flag, Frame, Kind
from laconic.server._order import Order
from laconic.server._roles import Roles

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


class Arrivals:
    """Gradients are applied as they come, held back where `Order` says so.

    A lost worker is reported and forgotten: the others go on, and nothing of it is left but the
    updates that were complete.
    """

    def __init__(self, keeper: Keeper, roles: Roles, most_delay: int, version: int) -> None:
        self._keeper, self._roles = keeper, roles
        self.order = Order(most_delay)
        self.order.version = version
        self.members = set(range(roles.workers))
        self.lost: dict[int, str] = {}
        self.delays: dict[int, Delays] = {}
        self.held_seconds = 0.0
        self._pushed: list[Request] = []
        self._pulling: list[Request] = []
        self._applied: dict[int, tuple[Flag, int]] = {}  # of workers that wait for weights

    def serve(self, desk: Desk, each: Callable[[int], object] | None) -> None:
        """Until the last member has left or is lost."""
        while self.members:
            self.handle(desk.take(), each)

    def handle(self, request: Request, each: Callable[[int], object] | None) -> None:
        """One request, and all updates that it lets happen."""
        if request.lost is not None:
            self._lose(request.worker, request.lost)
        else:
            self._guarded(self._hear, request)
        while (ready := self._next()) is not None:
            before = self.order.version
            self._guarded(self._apply, ready)
            if each is not None and self.order.version > before:
                each(self.order.version)
        self._answer_pulls()

    def _guarded(self, act: Callable[[Request], None], request: Request) -> None:
        """A worker that sends what nobody can understand is lost, too."""
        try:
            act(request)
        except WireError as error:
            request.reply(*failed(str(error)))
            self._lose(request.worker, str(error))

    def _lose(self, worker: int, why: str) -> None:
        rank = self._roles.rank_of(worker)
        if worker in self.members:
            self.lost[rank] = why
            _log.warning("worker %d (rank %d) is lost, the others go on: %s", worker, rank, why)
        self._part_with(worker)

    def _part_with(self, worker: int) -> None:
        self.members.discard(worker)
        self.order.forget(worker)
        self._keeper.forget(worker + 1)
        self._applied.pop(worker, None)
        self._pulling = [request for request in self._pulling if request.worker != worker]
        self._pushed = [request for request in self._pushed if request.worker != worker]

    def _hear(self, request: Request) -> None:
        frame, worker = request.frame, request.worker
        if frame.kind == Kind.PUSH:
            if self.order.readers.get(worker) != frame.version:
                raise WireError(
                    f"worker {worker} pushed a gradient of weights that it has not read"
                )
            self._pushed.append(request)
        elif frame.kind == Kind.PULL:
            self.order.forget(worker)  # it may have thrown its gradient away
            self._pulling.append(request)
        elif frame.kind == Kind.PEEK:
            data = self._keeper.weights(worker + 1, remember=False)
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
        waiting = sorted(self._pushed, key=lambda one: self.order.readers[one.worker])
        return next((one for one in waiting if self.order.may_apply(one.worker)), None)

    def _apply(self, request: Request) -> None:
        worker = request.worker
        self._pushed.remove(request)
        self._keeper.add(request, first=True, weight=1.0)
        flags = self._keeper.step(request.settings, False)
        delay = self.order.apply(worker)
        self.delays.setdefault(self._roles.rank_of(worker), Delays()).add(delay)
        if request.frame.flags & Flag.PULL:
            self._applied[worker] = flags, delay
            self._pulling.append(request)
        else:
            self._reply(request, flags=flags, number=delay)

    def _answer_pulls(self) -> None:
        while self._pulling and self.order.may_read():
            self._guarded(self._answer_pull, self._pulling.pop(0))

    def _answer_pull(self, request: Request) -> None:
        whose = request.worker + 1
        flags, delay = self._applied.pop(request.worker, (Flag.NONE, 0))
        if request.frame.flags & Flag.CODED:
            data = self._keeper.difference(whose, request.frame.step)
        else:
            data = self._keeper.weights(whose, remember=True)
        self.order.read(request.worker)
        self._reply(request, data=data, flags=flags, number=delay)

    def _reply(
        self,
        request: Request,
        *,
        data: Tensor | None = None,
        flags: Flag = Flag.NONE,
        number: int = 0,
    ) -> None:
        self.held_seconds += time.perf_counter() - request.came
        length = 0 if data is None else data.numel()
        frame = Frame(
            kind=Kind.DONE, flags=flags, number=number, version=self.order.version, length=length
        )
        request.reply(frame, data)
