"""Synchronous rounds against made-up requests: who is waited for, and who joins when."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import laconic as lc
from laconic.server._link import Flag, Frame, Kind
from laconic.server._request_queue import Request
from laconic.server._sync_server import COMMIT, FOLLOW, SyncServer


class Shard:
    """Counts updates; its weights are their number."""

    nested = None

    def __init__(self) -> None:
        self.updates: list[tuple[int, ...]] = []

    def mean(self, requests: list[Request]) -> None:
        self.updates.append(tuple(request.worker for request in requests))

    def step(self, settings: object, found_inf: bool) -> Flag:
        return Flag.SKIPPED if found_inf else Flag.NONE

    def weights(self, whose: int, *, remember: bool) -> torch.Tensor:
        return torch.full((4,), len(self.updates), dtype=torch.uint8)

    def last_sent(self, whose: int) -> torch.Tensor:
        return self.weights(whose, remember=False)


class Roles:
    def __init__(self, workers: int) -> None:
        self.workers = workers

    def rank_of(self, worker: int) -> int:
        return worker + 1


def asked(worker: int, kind: Kind, lost: str | None = None, **more: Any) -> Request:
    """A request without a body."""
    frame = Frame(kind=kind, **more)
    return Request(worker=worker, frame=frame, body=torch.empty(0), settings=[], lost=lost)


class Server:
    """A server that is fed one request at a time."""

    def __init__(self) -> None:
        self.shard: Any = Shard()
        self.server = SyncServer(self.shard, Roles(2), 0)  # pyright: ignore[reportArgumentType]

    def ask(self, worker: int, kind: Kind, lost: str | None = None, **more: Any) -> Any:
        """The future answer."""
        request = asked(worker, kind, lost, **more)
        self.server.handle(request, None)
        return request._answer

    def push(self, worker: int, step: int) -> Any:
        return self.ask(worker, Kind.PUSH, step=step)


def test_a_round_needs_every_member() -> None:
    server = Server()
    first = server.push(1, 0)
    assert not first.done()
    second = server.push(0, 0)
    assert first.done() and second.done() and server.shard.updates == [(0, 1)]
    server.ask(0, Kind.LEAVE)
    assert server.push(1, 1).done() and server.shard.updates[-1] == (1,)


def test_leaving_completes_a_round_that_waits_for_nobody_else() -> None:
    server = Server()
    waiting = server.push(1, 0)
    server.ask(0, Kind.LEAVE)
    assert waiting.done() and server.shard.updates == [(1,)]


def test_joining_is_at_the_same_step_on_all_servers() -> None:
    """Server 1 is ahead of server 0 by the round in which worker 2 joins."""
    one, two = Server(), Server()
    answers = [server.push(worker, 0) for server in (two,) for worker in (0, 1)]
    assert all(answer.done() for answer in answers) and two.server.step == 1
    late = one.push(0, 0)
    asked = one.ask(2, Kind.JOIN)
    first = asked.result()[0].step
    assert first == 1
    # server 0 has all pushes of step 0, and must not complete it: else step 1 may be pushed to
    # server 1, and completed there without worker 2
    later = one.push(1, 0)
    assert not late.done() and not later.done()
    two.ask(2, Kind.JOIN, number=FOLLOW, step=first)
    assert not later.done()
    one.ask(2, Kind.JOIN, number=COMMIT)
    assert late.done() and later.done() and one.server.step == 1
    for server in (one, two):
        frame, data = server.ask(2, Kind.PULL, step=first).result()
        assert frame.kind == Kind.DONE and data.tolist() == [1] * 4  # the weights of version 1
        server.push(0, 1)
        waiting = server.push(1, 1)
        assert not waiting.done()  # worker 2 is a member now
        server.push(2, 1)
        assert waiting.done() and server.shard.updates[-1] == (0, 1, 2)


def test_weights_for_a_worker_that_joins_wait_for_their_version() -> None:
    server = Server()
    first = server.ask(2, Kind.JOIN).result()[0].step
    server.ask(2, Kind.JOIN, number=COMMIT)
    asked = server.ask(2, Kind.PULL, step=first)
    server.push(0, 0)
    assert not asked.done()
    server.push(1, 0)
    assert asked.done()


def test_joining_when_all_others_have_left() -> None:
    server = Server()
    first = server.ask(2, Kind.JOIN).result()[0].step
    server.ask(0, Kind.LEAVE)
    server.ask(1, Kind.LEAVE)
    server.ask(2, Kind.JOIN, number=COMMIT)
    assert server.ask(2, Kind.PULL, step=first).done()
    assert server.push(2, first).done() and server.server.step == first + 1


def test_a_found_inf_gradient_is_told_to_all() -> None:
    server = Server()
    first = server.push(0, 0)
    second = server.ask(1, Kind.PUSH, step=0, flags=Flag.FOUND_INF)
    assert server.shard.updates == []  # nothing was added up
    assert all(one.result()[0].flags == Flag.SKIPPED for one in (first, second))


def test_a_lost_member_ends_all_and_one_that_has_left_does_not() -> None:
    server = Server()
    server.ask(0, Kind.LEAVE)
    server.ask(0, Kind.LEAVE, lost="it is gone")
    assert server.push(1, 0).done() and server.server.members == {1}
    said = r"worker 1 \(rank 2\) is lost at step 1, and synchronous .* without it: it is gone"
    with pytest.raises(lc.LostError, match=said):
        server.ask(1, Kind.LEAVE, lost="it is gone")


def test_losing_a_worker_that_joins_ends_all() -> None:
    server = Server()
    server.ask(2, Kind.JOIN)
    with pytest.raises(lc.LostError, match="worker 2"):
        server.ask(2, Kind.LEAVE, lost="it is gone")


@pytest.mark.parametrize(("worker", "step"), [(0, 1), (0, 7), (2, 0)])
def test_a_push_of_another_round_is_refused(worker: int, step: int) -> None:
    server = Server()
    with pytest.raises(lc.WireError, match=f"worker {worker} pushed step {step} in round 0"):
        server.push(worker, step)


def test_what_workers_never_send_is_refused() -> None:
    with pytest.raises(lc.WireError, match="DONE, which workers do not send"):
        Server().ask(0, Kind.DONE)
