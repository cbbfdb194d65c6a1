"""Synchronous serving: one update for each round of pushes, one from every member."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laconic.errors import LostError, WireError
from laconic.server._link import Flag, Frame, Kind, Roles
from laconic.server._request_queue import Request
from laconic.server._shard_server import ALL, ShardServer

COMMIT, FOLLOW = 1, 2  # `number` of the later messages of a worker that joins


class SyncServer:
    """Update t is made of the pushes of all members at step t, added in order of workers.

    Leaving takes effect with the worker's next step, on all servers alike, because it replaces a
    push. A worker that joins must do so at the same step T everywhere:

    1. It asks server 0, which is in the middle of step t and answers T = t + 1, and does not
       complete t until 3. Workers push to all servers and wait for all answers before they push
       again: no worker pushes T anywhere.
    2. It sends T to all other servers. They cannot have completed T, though perhaps t.
    3. It confirms to server 0, and requests the weights of version T from all.

    A lost worker ends the training of all: its part of the mean is missing.
    """

    def __init__(self, shard: ShardServer, roles: Roles, step: int) -> None:
        self.step = step
        self._shard, self._roles = shard, roles
        self.members = set(range(roles.workers))
        self._joining: dict[int, int] = {}  # first steps of workers to come
        self._held: set[int] = set()  # workers between 1 and 3
        self._pushed: dict[int, Request] = {}
        self._pulling: list[Request] = []

    @property
    def updates(self) -> int:
        """So far."""
        return self.step

    @property
    def expects_requests(self) -> bool:
        """Until the last member has left."""
        return bool(self.members or self._joining)

    def stats(self) -> dict[str, Any]:
        """Nothing beside what all servers report."""
        return {}

    def handle(self, request: Request, each: Callable[[int], object] | None) -> None:
        """One request, and all rounds that it completes."""
        if request.lost is not None:
            self._lose(request.worker, request.lost)
            return
        self._hear(request)
        while self._round_is_full():
            self._complete()
            if each is not None:
                each(self.step)
        self._answer_pulls()

    def _lose(self, worker: int, why: str) -> None:
        """LostError, unless the worker had left before."""
        if worker in self.members or worker in self._joining:
            rank = self._roles.rank_of(worker)
            raise LostError(
                f"worker {worker} (rank {rank}) is lost at step {self.step}, and synchronous "
                f"training cannot continue without it: {why}"
            )

    def _hear(self, request: Request) -> None:
        frame, worker = request.frame, request.worker
        if frame.kind == Kind.PUSH:
            self._check(request)
            self._pushed[worker] = request
        elif frame.kind == Kind.PULL:
            self._pulling.append(request)
        elif frame.kind == Kind.READ:
            self._with_weights(request, self._shard.weights(worker + 1, remember=False))
        elif frame.kind == Kind.LEAVE:
            self.members.discard(worker)
            request.done()
            self._skip_to_joiners()
        elif frame.kind == Kind.JOIN:
            self._join(request)
        else:
            raise WireError(f"worker {worker} sent {frame.kind.name}, which workers do not send")

    def _check(self, request: Request) -> None:
        if request.worker not in self.members or request.frame.step != self.step:
            raise WireError(
                f"worker {request.worker} pushed step {request.frame.step} in round {self.step}"
            )

    def _join(self, request: Request) -> None:
        frame, worker = request.frame, request.worker
        if frame.number == COMMIT:
            self._held.discard(worker)
            request.done()
            self._skip_to_joiners()
            return
        if frame.number != FOLLOW:
            self._held.add(worker)
        first = frame.step if frame.number == FOLLOW else self.step + 1
        self._joining[worker] = first
        self._admit()  # this server may be at that step already
        request.done(step=first)
        self._skip_to_joiners()

    def _skip_to_joiners(self) -> None:
        """With no members left, no worker pushes the steps before one joins."""
        if not self.members and self._joining and not self._held:
            self.step = min(self._joining.values())
            self._admit()

    def _admit(self) -> None:
        for worker, first in list(self._joining.items()):
            if first == self.step:
                self.members.add(worker)
                del self._joining[worker]

    def _round_is_full(self) -> bool:
        return bool(self.members) and not self._held and self.members <= self._pushed.keys()

    def _complete(self) -> None:
        requests = [self._pushed.pop(worker) for worker in sorted(self.members)]
        found_inf = any(request.frame.flags & Flag.FOUND_INF for request in requests)
        if not found_inf:
            self._shard.mean(requests)
        flags = self._shard.step(requests[0].settings, found_inf)
        self.step += 1
        self._admit()
        if self._shard.nested is not None:
            self._shard.nested.tell(sorted(self.members), self.step)
        weights = self._weights(requests[0].frame)
        for request in requests:
            if weights is None:
                request.done(flags=flags, step=self.step, number=self._ratio(request))
            else:
                self._with_weights(request, weights, flags)

    def _weights(self, frame: Frame) -> Any:
        """The same bytes for all: they ask for the same at the same step."""
        if not frame.flags & Flag.PULL:
            return None
        if frame.flags & Flag.CODED:
            return self._shard.delta(ALL, frame.step)
        return self._shard.weights(ALL, remember=True)

    def _answer_pulls(self) -> None:
        """Those of workers that join at this step: what all others have."""
        for request in list(self._pulling):
            if request.frame.step == self.step and not self._held:
                self._with_weights(request, self._shard.last_sent(ALL))
                self._pulling.remove(request)

    def _with_weights(self, request: Request, data: Any, flags: Flag = Flag.NONE) -> None:
        frame = Frame(
            kind=Kind.DONE,
            flags=flags,
            number=self._ratio(request),
            step=self.step,
            length=data.numel(),
        )
        request.reply(frame, data)

    def _ratio(self, request: Request) -> int:
        """NDQSG's, for the worker's next push."""
        nested = self._shard.nested
        return 0 if nested is None else nested.ratio_of(request.worker)
