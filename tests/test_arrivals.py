"""Asynchronous serving against made-up requests: what is applied, who waits, who is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_rounds import Roles, asked

import laconic as lc
from laconic.server._arrivals import Arrivals
from laconic.server._desk import Request
from laconic.server._link import Flag, Frame, Kind


class Keeper:
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

    def step(self, settings: object, spoilt: bool) -> Flag:
        assert not spoilt
        return self.skips

    def weights(self, whose: int, *, remember: bool) -> torch.Tensor:
        return torch.tensor([len(self.added), whose, remember], dtype=torch.uint8)

    def difference(self, whose: int, step: int) -> torch.Tensor:
        if whose - 1 in self.unreadable:
            raise lc.WireError("to what?")
        return torch.tensor([len(self.added), whose, step], dtype=torch.uint8)

    def forget(self, whose: int) -> None:
        self.forgotten.append(whose)


class Server:
    """Arrivals that are fed one request at a time."""

    def __init__(self, most_delay: int = 8) -> None:
        self.keeper: Any = Keeper()
        self.arrivals = Arrivals(self.keeper, Roles(3), most_delay, 0)  # pyright: ignore[reportArgumentType]
        self.seen: list[int] = []

    def ask(self, worker: int, kind: Kind, lost: str | None = None, **more: Any) -> Any:
        """The future answer."""
        request = asked(worker, kind, lost, **more)
        self.arrivals.handle(request, self.seen.append)
        return request._answer

    def pull(self, worker: int, **more: Any) -> Any:
        return self.ask(worker, Kind.PULL, **more)

    def push(self, worker: int, version: int, flags: Flag = Flag.PULL, **more: Any) -> Any:
        return self.ask(worker, Kind.PUSH, version=version, flags=flags, **more)

    def lose(self, worker: int) -> None:
        self.ask(worker, Kind.LEAVE, lost="it is gone")

    @property
    def readers(self) -> dict[int, int]:
        return self.arrivals.order.readers


def sentence(answer: Any) -> str:
    """Of an answer that says what is wrong."""
    frame, data = answer.result(0)
    assert frame.kind == Kind.FAILED and frame.length == data.numel()
    return bytes(data.numpy()).decode()


def all_read(most_delay: int = 8) -> Server:
    server = Server(most_delay)
    assert all(server.pull(worker).done() for worker in range(3))
    return server


def test_every_gradient_is_an_update_and_says_how_old_it_was() -> None:
    server = all_read()
    for worker, delay in ((2, 0), (0, 1), (1, 2)):
        frame, data = server.push(worker, 0).result(0)
        assert (frame.kind, frame.number, frame.version) == (Kind.DONE, delay, delay + 1)
        assert data.tolist() == [delay + 1, worker + 1, 1] and frame.length == 3
    assert server.keeper.added == [2, 0, 1] and server.seen == [1, 2, 3]
    assert server.readers == {2: 1, 0: 2, 1: 3}
    assert {rank: one.most for rank, one in server.arrivals.delays.items()} == {3: 0, 1: 1, 2: 2}


def test_weights_are_answered_as_they_were_asked_for() -> None:
    server = all_read()
    frame, data = server.push(0, 0, Flag.PULL | Flag.CODED, step=7).result(0)
    assert data.tolist() == [1, 1, 7] and frame.version == 1
    server.keeper.skips = Flag.SHARD_SKIPPED
    frame, data = server.push(0, 1, Flag.NONE).result(0)
    assert data is None and (frame.length, frame.flags) == (0, Flag.SHARD_SKIPPED)
    assert 0 not in server.readers  # it has to read again
    frame, data = server.pull(0, flags=Flag.CODED, step=9).result(0)
    assert data.tolist() == [2, 1, 9] and frame.flags == Flag.NONE


def test_looking_is_not_reading() -> None:
    server = Server()
    frame, data = server.ask(1, Kind.PEEK).result(0)
    assert data.tolist() == [0, 2, 0] and frame.version == 0 and not server.readers


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_push_of_weights_that_were_not_read_loses_that_worker_alone(version: int) -> None:
    """Worker 0 has read version 1, and names one before it or versions to come."""
    server = all_read()
    server.push(0, 0)
    said = sentence(server.push(0, version))
    assert "worker 0 pushed a gradient of weights that it has not read" in said
    assert server.arrivals.lost == {1: said} and server.arrivals.members == {1, 2}
    assert server.keeper.added == [0] and server.keeper.forgotten == [1]
    assert server.seen == [1]  # a refused gradient is no update
    for worker in (1, 2):
        assert server.push(worker, 0).result(0)[0].kind == Kind.DONE
    assert server.keeper.added == [0, 1, 2]


def test_a_push_before_any_reading_loses_that_worker_alone() -> None:
    server = Server()
    assert "has not read" in sentence(server.push(2, 0))
    assert list(server.arrivals.lost) == [3] and not server.keeper.added
    assert server.pull(0).done() and server.push(0, 0).done()


def test_one_gradient_for_each_reading() -> None:
    server = all_read()
    server.push(0, 0, Flag.NONE)
    assert "has not read" in sentence(server.push(0, 0))


def test_a_gradient_that_cannot_be_decoded_loses_that_worker_alone() -> None:
    server = all_read()
    server.keeper.unreadable = {1}
    assert sentence(server.push(1, 0)) == "the check sum is wrong"
    assert server.arrivals.lost == {2: "the check sum is wrong"}
    assert server.arrivals.order.version == 0 and server.seen == []
    assert not server.arrivals.delays and set(server.readers) == {0, 2}
    assert server.push(0, 0).result(0)[0].version == 1 and server.seen == [1]


def test_a_difference_to_nothing_loses_that_worker_alone() -> None:
    server = Server()
    server.keeper.unreadable = {1}
    assert sentence(server.pull(1, flags=Flag.CODED)) == "to what?"
    assert server.arrivals.lost == {2: "to what?"} and not server.readers
    assert server.pull(0).done() and server.push(0, 0).done()


def test_what_workers_never_send_loses_that_worker_alone() -> None:
    server = all_read()
    assert "DONE, which workers do not send" in sentence(server.ask(1, Kind.DONE))
    assert server.arrivals.members == {0, 2} and server.push(0, 0).done()


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
    assert server.keeper.added == [0, 1, 2, 0]


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
    assert server.keeper.added == [0, 1, 0, 1]  # the older one first, though it came later
    assert server.arrivals.lost == ({3: "it is gone"} if how == "lost" else {})
    assert server.arrivals.members == ({0, 1, 2} if how == "reads again" else {0, 1})
    assert server.keeper.forgotten == ([] if how == "reads again" else [3])
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
    assert not held.done() and server.keeper.added == [0, 1, 2]
    server = Server(most_delay=0)
    server.pull(0)
    waiting = server.pull(1)
    server.lose(1)
    assert server.push(0, 0, Flag.NONE).done()
    assert not waiting.done() and not server.readers and server.pull(2).done()


def test_what_was_told_to_a_lost_worker_is_not_told_to_who_joins_in_its_place() -> None:
    server = Server(most_delay=0)
    server.pull(0)
    server.keeper.skips = Flag.SHARD_SKIPPED
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
    assert server.arrivals.lost == {} and server.arrivals.members == {0, 2} and not caplog.records
    server.ask(1, Kind.JOIN)
    server.lose(1)
    assert server.arrivals.lost == {2: "it is gone"}
    assert "worker 1 (rank 2) is lost, the others go on: it is gone" in caplog.text


def test_serving_ends_with_the_last_member() -> None:
    class Desk:
        """Three leave, one of them by being lost; a fourth request would not come."""

        def __init__(self) -> None:
            self.left = [(0, None), (1, "it is gone"), (2, None)]

        def take(self) -> Request:
            worker, lost = self.left.pop(0)
            frame = Frame(kind=Kind.LEAVE)
            return Request(worker=worker, frame=frame, body=torch.empty(0), settings=[], lost=lost)

    server, desk = Server(), Desk()
    server.arrivals.serve(desk, None)  # pyright: ignore[reportArgumentType]
    assert not desk.left and server.arrivals.lost == {2: "it is gone"}
