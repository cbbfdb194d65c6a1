"""Asynchronous serving against made-up requests: what is applied, who waits, who is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sync_server import Roles, asked

import laconic as lc
from laconic.server._async_server import AsyncServer, BoundedStaleness
from laconic.server._link import Flag, Kind
from laconic.server._request_queue import Request


class Shard:
    """Notes whose gradients it applied; its weights are their number."""

    def __init__(self) -> None:
        self.added: list[int] = []
        self.forgotten: list[int] = []
        self.unreadable: set[int] = set()  # workers whose wires are broken
        self.skips = Flag.NONE

    def add(self, request: Request, *, first: bool, weight: float) -> None:
        assert first and weight == 1.0
        if request.worker in self.unreadable:
            raise lc.WireError("the check sum is wrong")
        self.added.append(request.worker)

    def step(self, settings: object, found_inf: bool) -> Flag:
        assert not found_inf
        return self.skips

    def weights(self, whose: int, *, remember: bool) -> torch.Tensor:
        return torch.tensor([len(self.added), whose, remember], dtype=torch.uint8)

    def delta(self, whose: int, step: int) -> torch.Tensor:
        if whose - 1 in self.unreadable:
            raise lc.WireError("to what?")
        return torch.tensor([len(self.added), whose, step], dtype=torch.uint8)

    def forget(self, whose: int) -> None:
        self.forgotten.append(whose)


class Server:
    """A server that is fed one request at a time."""

    def __init__(self, most_delay: int = 8) -> None:
        self.shard: Any = Shard()
        self.server = AsyncServer(self.shard, Roles(3), most_delay, 0)  # pyright: ignore[reportArgumentType]
        self.seen: list[int] = []

    def ask(self, worker: int, kind: Kind, lost: str | None = None, **more: Any) -> Any:
        """The future answer."""
        request = asked(worker, kind, lost, **more)
        self.server.handle(request, self.seen.append)
        return request._answer

    def pull(self, worker: int, **more: Any) -> Any:
        return self.ask(worker, Kind.PULL, **more)

    def push(self, worker: int, version: int, flags: Flag = Flag.PULL, **more: Any) -> Any:
        return self.ask(worker, Kind.PUSH, version=version, flags=flags, **more)

    def lose(self, worker: int) -> None:
        self.ask(worker, Kind.LEAVE, lost="it is gone")

    @property
    def readers(self) -> dict[int, int]:
        return self.server.staleness.readers


def sentence(answer: Any) -> str:
    """Of an answer that says what is wrong."""
    frame, data = answer.result(0)
    assert frame.kind == Kind.FAILED and frame.length == data.numel()
    return bytes(data.numpy()).decode()


def all_read(most_delay: int = 8) -> Server:
    server = Server(most_delay)
    assert all(server.pull(worker).done() for worker in range(3))
    return server


@given(st.integers(0, 9), st.integers(1, 7), st.lists(st.tuples(st.integers(0, 6), st.booleans())))
def test_no_gradient_is_too_old_and_somebody_can_always_continue(
    most: int, workers: int, moves: list[tuple[int, bool]]
) -> None:
    """Workers read, are applied and drop out in any order, as far as the rules let them."""
    order = BoundedStaleness(most)
    for number, drops in moves:
        worker = number % workers
        if drops:
            order.forget(worker)
        elif worker not in order.readers:
            if order.may_read():
                order.read(worker)
        elif order.may_apply(worker):
            assert order.apply(worker) <= most
        # whoever read first is never held back, so no set of workers can wait for each other
        if order.readers:
            oldest = min(order.readers, key=lambda one: order.readers[one])
            assert order.may_apply(oldest)
        else:
            assert order.may_read()


def test_without_a_need_nobody_waits() -> None:
    """Four workers and τ = 3: all may read, and be applied in any order."""
    order = BoundedStaleness(3)
    for worker in range(4):
        assert order.may_read()
        order.read(worker)
    for delay, worker in enumerate((2, 0, 3, 1)):
        assert order.may_apply(worker)
        assert order.apply(worker) == delay


def test_with_no_delay_workers_take_turns() -> None:
    order = BoundedStaleness(0)
    order.read(0)
    assert not order.may_read()
    assert order.may_apply(0) and order.apply(0) == 0 and order.may_read()


def test_a_fast_worker_waits_for_a_slow_one() -> None:
    order = BoundedStaleness(1)
    order.read(0)  # the slow one
    order.read(1)
    assert order.may_apply(1) and order.apply(1) == 0
    order.read(1)
    assert not order.may_apply(1)  # worker 0 would be two updates late
    assert order.apply(0) == 1
    assert order.may_apply(1) and order.apply(1) == 1


def test_every_gradient_is_an_update_and_says_how_old_it_was() -> None:
    server = all_read()
    for worker, delay in ((2, 0), (0, 1), (1, 2)):
        frame, data = server.push(worker, 0).result(0)
        assert (frame.kind, frame.number, frame.version) == (Kind.DONE, delay, delay + 1)
        assert data.tolist() == [delay + 1, worker + 1, 1] and frame.length == 3
    assert server.shard.added == [2, 0, 1] and server.seen == [1, 2, 3]
    assert server.readers == {2: 1, 0: 2, 1: 3}
    assert {rank: one.most for rank, one in server.server.delays.items()} == {3: 0, 1: 1, 2: 2}


def test_weights_are_answered_as_they_were_asked_for() -> None:
    server = all_read()
    frame, data = server.push(0, 0, Flag.PULL | Flag.CODED, step=7).result(0)
    assert data.tolist() == [1, 1, 7] and frame.version == 1
    server.shard.skips = Flag.SHARD_SKIPPED
    frame, data = server.push(0, 1, Flag.NONE).result(0)
    assert data is None and (frame.length, frame.flags) == (0, Flag.SHARD_SKIPPED)
    assert 0 not in server.readers  # it has to read again
    frame, data = server.pull(0, flags=Flag.CODED, step=9).result(0)
    assert data.tolist() == [2, 1, 9] and frame.flags == Flag.NONE


def test_looking_is_not_reading() -> None:
    server = Server()
    frame, data = server.ask(1, Kind.READ).result(0)
    assert data.tolist() == [0, 2, 0] and frame.version == 0 and not server.readers


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_push_of_weights_that_were_not_read_loses_that_worker_alone(version: int) -> None:
    """Worker 0 has read version 1, and names one before it or versions to come."""
    server = all_read()
    server.push(0, 0)
    said = sentence(server.push(0, version))
    assert "worker 0 pushed a gradient of weights that it has not read" in said
    assert server.server.lost == {1: said} and server.server.members == {1, 2}
    assert server.shard.added == [0] and server.shard.forgotten == [1]
    assert server.seen == [1]  # a refused gradient is no update
    for worker in (1, 2):
        assert server.push(worker, 0).result(0)[0].kind == Kind.DONE
    assert server.shard.added == [0, 1, 2]


def test_a_push_before_any_reading_loses_that_worker_alone() -> None:
    server = Server()
    assert "has not read" in sentence(server.push(2, 0))
    assert list(server.server.lost) == [3] and not server.shard.added
    assert server.pull(0).done() and server.push(0, 0).done()


def test_one_gradient_for_each_reading() -> None:
    server = all_read()
    server.push(0, 0, Flag.NONE)
    assert "has not read" in sentence(server.push(0, 0))


def test_a_gradient_that_cannot_be_decoded_loses_that_worker_alone() -> None:
    server = all_read()
    server.shard.unreadable = {1}
    assert sentence(server.push(1, 0)) == "the check sum is wrong"
    assert server.server.lost == {2: "the check sum is wrong"}
    assert server.server.staleness.version == 0 and server.seen == []
    assert not server.server.delays and set(server.readers) == {0, 2}
    assert server.push(0, 0).result(0)[0].version == 1 and server.seen == [1]


def test_a_difference_to_nothing_loses_that_worker_alone() -> None:
    server = Server()
    server.shard.unreadable = {1}
    assert sentence(server.pull(1, flags=Flag.CODED)) == "to what?"
    assert server.server.lost == {2: "to what?"} and not server.readers
    assert server.pull(0).done() and server.push(0, 0).done()


def test_what_workers_never_send_loses_that_worker_alone() -> None:
    server = all_read()
    assert "DONE, which workers do not send" in sentence(server.ask(1, Kind.DONE))
    assert server.server.members == {0, 2} and server.push(0, 0).done()


def test_a_gradient_waits_for_slower_readers() -> None:
    """τ = 2, three readers of version 0: the last of them must be applied at version 2."""
    server = all_read(2)
    again = server.push(0, 0)
    assert again.done() and server.readers == {1: 0, 2: 0, 0: 1}
    held = server.push(0, 1)
    assert not held.done() and server.seen == [1]
    server.push(1, 0)
    assert server.seen == [1, 2] and not held.done()
    server.push(2, 0)  # its deadline was version 2
    assert server.seen == [1, 2, 3, 4] and held.result(0)[0].number == 2
    assert server.shard.added == [0, 1, 2, 0]


@pytest.mark.parametrize("how", ["lost", "leaves", "reads again"])
def test_nobody_waits_for_a_reader_that_is_gone(how: str) -> None:
    server = all_read(2)
    server.push(0, 0)
    server.push(1, 0)
    held = [server.push(1, 2), server.push(0, 1)]  # worker 2 must be next
    assert not any(one.done() for one in held)
    if how == "lost":
        server.lose(2)
    elif how == "leaves":
        assert server.ask(2, Kind.LEAVE).result(0)[0].kind == Kind.DONE
    else:
        assert server.pull(2).done()
    assert all(one.done() for one in held)
    assert server.shard.added == [0, 1, 0, 1]  # the older one first, though it came later
    assert server.server.lost == ({3: "it is gone"} if how == "lost" else {})
    assert server.server.members == ({0, 1, 2} if how == "reads again" else {0, 1})
    assert server.shard.forgotten == ([] if how == "reads again" else [3])
    assert (2 in server.readers) == (how == "reads again")


def test_a_worker_that_waits_to_read_is_let_in_when_a_reader_is_lost() -> None:
    server = Server(most_delay=0)  # one after another
    assert server.pull(0).done()
    waiting = server.pull(1)
    assert not waiting.done() and set(server.readers) == {0}
    server.lose(0)
    assert waiting.done() and set(server.readers) == {1}


def test_a_lost_worker_leaves_nothing_behind() -> None:
    """Neither what it pushed and what waits, nor what it wants to read."""
    server = all_read(2)
    server.push(0, 0)
    held = server.push(0, 1)
    server.lose(0)
    server.push(1, 0)
    server.push(2, 0)
    assert not held.done() and server.shard.added == [0, 1, 2]
    server = Server(most_delay=0)
    server.pull(0)
    waiting = server.pull(1)
    server.lose(1)
    assert server.push(0, 0, Flag.NONE).done()
    assert not waiting.done() and not server.readers and server.pull(2).done()


def test_what_was_told_to_a_lost_worker_is_not_told_to_who_joins_in_its_place() -> None:
    server = Server(most_delay=0)
    server.pull(0)
    server.shard.skips = Flag.SHARD_SKIPPED
    other = server.pull(1)  # in the queue before worker 0, which then waits for weights
    assert not server.push(0, 0).done() and other.done()
    server.lose(0)
    server.ask(0, Kind.JOIN)
    waiting = server.pull(0)
    server.ask(1, Kind.LEAVE)
    frame, _ = waiting.result(0)
    assert frame.flags == Flag.NONE and frame.number == 0


def test_losing_a_worker_that_has_left_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    server = all_read()
    server.ask(1, Kind.LEAVE)
    server.lose(1)
    assert server.server.lost == {} and server.server.members == {0, 2} and not caplog.records
    server.ask(1, Kind.JOIN)
    server.lose(1)
    assert server.server.lost == {2: "it is gone"}
    assert "worker 1 (rank 2) is lost, the others continue: it is gone" in caplog.text


def test_requests_are_expected_until_the_last_member_has_left() -> None:
    """Three leave, one of them by being lost."""
    server = Server()
    for worker, lost in ((0, None), (1, "it is gone"), (2, None)):
        assert server.server.expects_requests
        server.ask(worker, Kind.LEAVE, lost=lost)
    assert not server.server.expects_requests and server.server.lost == {2: "it is gone"}
