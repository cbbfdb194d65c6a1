"""Links between workers and servers, and the frames on them: a header, then a body."""

from __future__ import annotations

import struct
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntEnum, IntFlag
from threading import Thread, current_thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from laconic.comm._closing import break_off, close_at_exit
from laconic.comm._context import Traffic
from laconic.comm._threads import CommLane, own_group
from laconic.errors import ConfigError, LostError, WireError
from laconic.kernels import backend

_MAGIC = b"LCSV"
# magic, kind, flags, nothing | number | step, version, length | check of body | crc of all before
_LAYOUT = struct.Struct("<4sBBHIQQQI")
_CRC = struct.Struct("<I")
FRAME_BYTES = _LAYOUT.size + _CRC.size
_FOR_EVER = timedelta(days=365)
_made: Counter[tuple[int, int]] = Counter()  # links between two ranks; as many on both sides
_c10d: Any = distributed_c10d


class Kind(IntEnum):
    """The kind of a frame. Workers send requests, servers one answer to each."""

    SETTINGS = 1  # learning rates and the like, from now on; has no answer
    PUSH = 2  # a gradient
    PULL = 3  # the weights that a worker steps from
    READ = 4  # the weights as they are, exactly
    JOIN = 5
    LEAVE = 6
    DONE = 7  # a server's answer, perhaps with weights
    FAILED = 8  # a server's answer: a sentence


class Flag(IntFlag):
    """How a gradient was encoded, and what is wanted back."""

    NONE = 0
    PLAIN = 1  # the gradient is as it is, whatever the codec
    PULL = 2  # answer with weights
    CODED = 4  # encoded, as differences
    FOUND_INF = 8  # not finite: no server may step with it
    SKIPPED = 16  # a server's: it did not step, because of a worker's FOUND_INF
    SHARD_SKIPPED = 32  # a server's: it did not step, because of a gradient too large for its wire


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A header of 44 bytes; `check` is that of the body that follows."""

    kind: Kind
    flags: Flag = Flag.NONE
    number: int = 0
    step: int = 0
    version: int = 0
    length: int = 0
    check: int = 0

    def pack(self) -> Tensor:
        numbers = self.number, self.step, self.version, self.length, self.check
        head = _LAYOUT.pack(_MAGIC, self.kind, self.flags, 0, *numbers)
        return torch.frombuffer(bytearray(head + _CRC.pack(zlib.crc32(head))), dtype=torch.uint8)

    @staticmethod
    def unpack(data: Tensor) -> Frame:
        """WireError unless `pack` could have made it."""
        head = bytes(data.numpy())
        magic, kind, flags, _, number, step, version, length, check = _LAYOUT.unpack_from(head)
        (crc,) = _CRC.unpack_from(head, _LAYOUT.size)
        if magic != _MAGIC or crc != zlib.crc32(head[: _LAYOUT.size]):
            raise WireError(
                "received bytes that are no frame: is another program on this process group?"
            )
        try:
            return Frame(
                kind=Kind(kind),
                flags=Flag(flags),
                number=number,
                step=step,
                version=version,
                length=length,
                check=check,
            )
        except ValueError as error:
            raise WireError(f"received a frame of unknown kind: {error}") from None


def body_check(body: Tensor) -> int:
    """A check sum of bytes on the host: any flipped bit is seen; 0 of none."""
    if not body.numel():
        return 0
    whole = body.numel() // 4 * 4
    words, tail = body[:whole], bytes(body[whole:].tolist())
    if words.storage_offset() % 4:
        words = words.clone()
    check = backend(body.device).words_check(words.view(torch.int32), body.numel())
    return int(check) ^ zlib.crc32(tail)


class Link:
    """One worker, one server, and a Gloo group of these two.

    A group for each pair: when a message does not arrive, Gloo closes all connections of its group,
    and a lost worker must not take the others along. Bodies are host memory: Gloo reads no other.
    """

    def __init__(self, rank: int, peer: int, timeout: timedelta) -> None:
        low, high = min(rank, peer), max(rank, peer)
        _made[low, high] += 1
        # not dist.new_group: its names count all groups of a process, which differ between ranks
        name = f"laconic/{low}-{high}/{_made[low, high]}"
        store = _c10d.PrefixStore(name, _c10d._get_default_store())  # the job's own
        self._gloo = _c10d.ProcessGroupGloo(store, int(rank == high), 2, timeout)
        self.peer, self._there = peer, int(rank == low)
        self.traffic = Traffic()  # of this link alone: links have threads of their own
        self._works: list[tuple[Any, Tensor]] = []

    @property
    def _group(self) -> Any:
        if self._gloo is None:
            raise ConfigError(f"the link to rank {self.peer} was closed: close() comes last")
        return self._gloo

    def close(self) -> None:
        """Waiting threads get a LostError, here and on the peer."""
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            break_off(gloo)

    def start(self, frame: Frame, body: Tensor | None = None) -> None:
        """Send; the body may not be touched before `finish`, or before the peer has answered."""
        if frame.length != (0 if body is None else body.numel()):
            raise ValueError(f"{frame} with a body of {0 if body is None else body.numel()} bytes")
        parts = [frame.pack()]
        if body is not None:
            parts = [replace(frame, check=body_check(body)).pack(), body]
        for part in parts:
            if part.numel():
                with self.traffic.sending(part.numel()), self._lost():
                    self._works.append((self._group.send([part], self._there, 0), part))

    def finish(self) -> None:
        """Until all is sent."""
        with self.traffic.sending(0), self._lost():
            for work, _ in self._works:
                work.wait()
        self._works.clear()

    def send(self, frame: Frame, body: Tensor | None = None) -> None:
        """Send, and wait until it is sent."""
        self.start(frame, body)
        self.finish()

    def receive(self, *, patient: bool = False) -> Frame:
        """The next header; `patient` waits without a time-out, until the peer is gone."""
        data = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        self._take(data, patient)
        return Frame.unpack(data)

    def body(self, frame: Frame, room: Tensor) -> Tensor:
        """What follows the header, in `room`; WireError if that is too small, or it is damaged."""
        if frame.length > room.numel():
            raise WireError(
                f"rank {self.peer} announced {frame.length} bytes where {room.numel()} are the "
                "most: are all ranks running the same settings?"
            )
        data = room[: frame.length]
        if frame.length:
            self._take(data, False)
        if body_check(data) != frame.check:
            raise WireError(
                f"rank {self.peer}'s {frame.kind.name} at step {frame.step} is damaged, and was "
                "not used: its check sum does not match; if this happens again, look for a faulty "
                "link or memory"
            )
        return data

    def answer(self) -> Frame:
        """The server's answer; LostError with its sentence if it has failed."""
        frame = self.receive()
        if frame.kind == Kind.FAILED:
            text = bytes(self.body(frame, torch.empty(4096, dtype=torch.uint8)).numpy())
            raise LostError(text.decode(errors="replace"))
        if frame.kind != Kind.DONE:
            raise WireError(f"rank {self.peer} answered {frame.kind.name}")
        return frame

    def _take(self, data: Tensor, patient: bool) -> None:
        with self.traffic.sending(0), self._lost():
            work: Any = self._group.recv([data], self._there, 0)
            work.wait(_FOR_EVER) if patient else work.wait()

    @contextmanager
    def _lost(self) -> Iterator[None]:
        """Gloo's errors, which are RuntimeErrors, become LostErrors that name the peer."""
        try:
            yield
        except RuntimeError as error:
            why = "did not answer in time" if "imed out" in str(error) else "is gone"
            raise LostError(f"rank {self.peer} {why} ({error})") from error


class Roles:
    """The first `servers` ranks of a group serve, all others work.

    Servers are numbered 0, 1, .. and own the chunks of that number; workers are numbered 0, 1, ..
    too. `links` are this rank's: to all workers, or to all servers, by their numbers.
    """

    def __init__(self, group: dist.ProcessGroup | None, servers: int, timeout_s: float) -> None:
        size = dist.get_world_size(group)
        if servers >= size:  # before a group is made, which others may still be connecting to
            raise ConfigError(
                f"{servers} servers among {size} ranks leave no worker: start more ranks, or take "
                "fewer servers"
            )
        self.lane, self.servers = CommLane(own_group(group, timeout_s)), servers
        self.workers = size - servers
        rank = self.group.rank()
        self.serves = rank < servers
        self.number = rank if self.serves else rank - servers
        self.links = self._link(timedelta(seconds=timeout_s))
        self.threads: list[Thread] = []  # that wait at links
        weakref.finalize(self, _hang_up, self.links, self.threads).atexit = False
        close_at_exit(self)

    @property
    def group(self) -> dist.ProcessGroup:
        """Of all servers and workers."""
        return self.lane.group

    def close(self) -> None:
        """End what is in flight, the links, the threads that wait there, and the group."""
        self.lane.close()
        _hang_up(self.links, self.threads)

    def _link(self, timeout: timedelta) -> list[Link]:
        ranks = dist.get_process_group_ranks(self.group)
        peers = ranks[self.servers :] if self.serves else ranks[: self.servers]
        # both sides make their links in order of ranks, so some pair can always proceed
        return [Link(dist.get_rank(), peer, timeout) for peer in peers]

    def traffic(self) -> Traffic:
        """Of all links together."""
        found = Traffic()
        for link in self.links:
            found.sent_bytes += link.traffic.sent_bytes
            found.wire_seconds += link.traffic.wire_seconds
        return found

    def rank_of(self, worker: int) -> int:
        """A worker's global rank, for messages."""
        return dist.get_global_rank(self.group, self.servers + worker)


def _hang_up(links: Sequence[Link], threads: list[Thread]) -> None:
    for link in links:
        link.close()
    while threads:
        thread = threads.pop()
        if thread is not current_thread():
            thread.join()
