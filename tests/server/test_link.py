"""Frames, settings and the queue of requests, in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import laconic as lc
from laconic.server._link import FRAME_BYTES, Flag, Frame, Kind, Link, body_check
from laconic.server._request_queue import (
    MOST_SETTINGS_BYTES,
    RequestQueue,
    pack_settings,
    unpack_settings,
)
from laconic.server._server_client import ServerClient

FRAME = Frame(
    kind=Kind.PUSH, flags=Flag.PULL | Flag.CODED, number=7, step=2**40, version=3, length=99
)


def test_frames_survive_the_journey() -> None:
    data = FRAME.pack()
    assert data.numel() == FRAME_BYTES == 44
    assert Frame.unpack(data) == FRAME


@pytest.mark.parametrize("place", [0, 4, 5, 8, 12, 20, 28, 35, 36, 39, 40, 43])
def test_an_altered_frame_is_refused(place: int) -> None:
    data = FRAME.pack()
    data[place] ^= 1
    with pytest.raises(lc.WireError, match="no frame"):
        Frame.unpack(data)


def test_an_unknown_kind_is_refused() -> None:
    class Strange:
        def __index__(self) -> int:
            return 77

    data = replace(FRAME, kind=Strange()).pack()  # pyright: ignore[reportArgumentType]
    with pytest.raises(lc.WireError, match="unknown kind"):
        Frame.unpack(data)


def test_a_body_is_not_read_beyond_its_room() -> None:
    link = Link.__new__(Link)
    link.peer = 3
    with pytest.raises(lc.WireError, match="rank 3 announced 99 bytes where 98 are the most"):
        link.body(FRAME, torch.empty(98, dtype=torch.uint8))


@pytest.mark.parametrize("size", [1, 3, 4, 99])
def test_a_damaged_body_is_refused(size: int) -> None:
    """Any one bit of it."""

    class Ready(Link):
        def __init__(self) -> None:
            self.peer = 3

        def _take(self, data: torch.Tensor, patient: bool) -> None:
            data.copy_(body)

    sent = torch.arange(size, dtype=torch.uint8)
    body = sent.clone()
    frame, room = replace(FRAME, length=size, check=body_check(sent)), torch.empty_like(sent)
    assert torch.equal(Ready().body(frame, room), sent)
    for bit in range(8 * size):
        body = sent.clone()
        body[bit // 8] ^= 1 << bit % 8
        with pytest.raises(lc.WireError, match="rank 3's PUSH at step 1099511627776 is damaged"):
            Ready().body(frame, room)


@pytest.mark.parametrize("nbytes", [0, 12, 20])
def test_weights_of_another_size_are_refused(nbytes: int) -> None:
    """Before anything is read: what is missing would stay as it was."""
    link, frame = Link.__new__(Link), Frame(kind=Kind.DONE, length=nbytes)
    link.peer = 3
    with pytest.raises(lc.WireError, match=f"rank 3 sent {nbytes} bytes of weights, not 16"):
        ServerClient._take_plain(ServerClient.__new__(ServerClient), link, frame, torch.zeros(4))


@pytest.mark.parametrize("error", [lc.LostError("gone"), ValueError("odd")])
@pytest.mark.parametrize("leaves", [False, True])
def test_whatever_ends_a_conversation_is_told(error: Exception, leaves: bool) -> None:
    """Also of a worker that has left: nobody waits for it, but its thread does not end unseen."""

    class Broken:
        peer, left = 1, leaves

        def receive(self, *, patient: bool) -> Frame:
            if self.left:
                self.left = False
                return Frame(kind=Kind.LEAVE)
            assert patient == leaves
            raise error

        def body(self, frame: Frame, room: torch.Tensor) -> torch.Tensor:
            return room[: frame.length]

        def send(self, frame: Frame, body: torch.Tensor | None) -> None:
            pass

    queue = RequestQueue([Broken()], 8, [])  # pyright: ignore[reportArgumentType]
    if leaves:
        queue.take().done()
    request = queue.take()
    assert request.worker == 0 and request.lost == str(error)
    queue.close()


def settings() -> list[dict[str, Any]]:
    return [
        {"lr": 0.1 + 0.2, "betas": (0.9, 0.999), "fused": None},
        {"lr": 1e-300, "nesterov": True},
    ]


def test_settings_keep_every_bit() -> None:
    assert unpack_settings(pack_settings(settings()), settings()) == settings()
    tensor = [{"lr": torch.tensor(0.25)}]
    assert unpack_settings(pack_settings(tensor), tensor) == [{"lr": 0.25}]


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(lc.ConfigError, match="numbers, strings and lists"):
        pack_settings([{"lr": object()}])
    with pytest.raises(lc.ConfigError, match="use fewer groups"):
        pack_settings([{"name": "x" * MOST_SETTINGS_BYTES}])
    with pytest.raises(lc.WireError, match="no JSON"):
        unpack_settings(torch.tensor([1, 2, 3], dtype=torch.uint8), settings())
    first, second = settings()
    others: list[Any] = [[first], [first, second, second], [second, first], [first, 1], {}, 1]
    for other in others:
        with pytest.raises(lc.WireError, match="other groups or names"):
            unpack_settings(pack_settings(other), settings())


def test_what_schedulers_note_stays_with_the_worker() -> None:
    noted = [{**group, "initial_lr": 0.5} for group in settings()]
    assert unpack_settings(pack_settings(noted), settings()) == settings()
