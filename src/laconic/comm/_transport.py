"""Bytes between ranks, over whatever process group there is.

A message is a frame (`_frame.py`), a wire and, after it, values that travel as they are (fp32).
Each starts on a 16-byte boundary where it arrives. Lengths that the receiver cannot know travel
first, each in a frame of its own. Nothing of any message is used before all of them were found to
be the expected ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._wire import ALIGN, Wire
from laconic.comm._context import ExchangeContext, Sizes
from laconic.comm._frame import FRAME_BYTES, Kind, Name, announce_all, announced, open_all, seal_all
from laconic.errors import LostError, WireError

_HOST = torch.device("cpu")
_PATIENCE_S = 30.0  # for a peer that has stopped for a moment
_SLOWEST = 1e4  # bytes per second
_OF_TRANSPORT = ("gloo", "nccl", "ucc", "connection", "timed out", "timeout", "socket")

# torch 2.13 calls it all_gather_single, and warns of the older name
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Message:
    """The bytes of a wire, and plain fp32 values.

    `length` is there where only a device knows how many of the bytes count.
    """

    wire: Tensor
    uncompressed: Tensor
    length: Tensor | None = None

    @staticmethod
    def of(wire: Wire | None, uncompressed: Tensor) -> Message:
        """A wire, or nothing, to be sent."""
        if wire is None:
            return Message(
                torch.empty(0, dtype=torch.uint8, device=uncompressed.device), uncompressed
            )
        if wire.header.coder and wire.buffer.is_cuda:
            return Message(wire.buffer, uncompressed, wire.length())
        return Message(wire.data, uncompressed)

    def cut(self, size: int) -> Message:
        """With the length that has become known."""
        return Message(self.wire[:size], self.uncompressed)

    @property
    def nbytes(self) -> int | Tensor:
        """Of the wire."""
        return self.wire.numel() if self.length is None else self.length

    def parts(self) -> tuple[Tensor, Tensor]:
        """As bytes."""
        return self.wire, self.uncompressed.view(torch.uint8)


def no_values(like: Tensor) -> Tensor:
    """Plain values where there are none."""
    return torch.empty(0, dtype=torch.float32, device=like.device)


def padded(size: int) -> int:
    """Room for a message."""
    return -(-size // ALIGN) * ALIGN


def joined(
    parts: Iterable[Tensor], name: str, context: ExchangeContext, device: torch.device
) -> Tensor:
    """The parts one after another in a scratch buffer, each on a 16-byte boundary."""
    parts = list(parts)
    ends = list(accumulate(padded(part.numel()) for part in parts))
    buffer = context.scratch.take(name, ends[-1] if ends else 0, device, torch.uint8)
    for end, part in zip(ends, parts, strict=True):
        if size := part.numel():
            start = end - padded(size)
            buffer[start : start + size].copy_(part)
    return buffer


def all_to_all(
    messages: Sequence[Message],
    context: ExchangeContext,
    sizes: Sizes,
    uncompressed: Sequence[int],
    kind: Kind = Kind.ALL_TO_ALL,
) -> list[Message]:
    """Send messages[j] to rank j; what rank i sent here is the i-th of the result.

    `sizes` tell how long the arriving wires are, `uncompressed` how many plain values follow each.
    """
    device, rank = messages[0].wire.device, context.rank
    wires = sizes.bytes
    if not sizes.known:
        mine, wires = _all_to_all_lengths([one.nbytes for one in messages], context, sizes, device)
        messages = [message.cut(size) for message, size in zip(messages, mine, strict=True)]
    out = [message_bytes(one.wire.numel(), one.uncompressed.numel()) for one in messages]
    room = [message_bytes(size, count) for size, count in zip(wires, uncompressed, strict=True)]
    send = context.scratch.take("send", sum(out), device, torch.uint8)
    receive = context.scratch.take("receive", sum(room), device, torch.uint8)
    leaving, arriving = list(send.split(out)), list(receive.split(room))
    for message, target in zip(messages, leaving, strict=True):
        _fill(target, message)
    seal_all([(one, Name(kind, rank, j)) for j, one in enumerate(leaving)], context)
    _all_to_all_bytes(receive, send, room, out, context)
    return _messages(arriving, wires, uncompressed, context, kind, rank)


def all_gather(
    message: Message,
    context: ExchangeContext,
    sizes: Sizes,
    uncompressed: Sequence[int],
    kind: Kind = Kind.ALL_GATHER,
) -> list[Message]:
    """Send one message to all; the i-th of the result is rank i's.

    Gloo's all-gather is several times slower than its all-to-all, which is used there.
    """
    device, n, wires = message.wire.device, context.size, sizes.bytes
    if device.type != "cpu" and dist.get_backend(context.group) == "gloo":
        return all_to_all([message] * n, context, sizes, uncompressed, kind)
    if not sizes.known:
        wires = _all_gather_lengths(message.nbytes, context, sizes, device)
        message = message.cut(wires[context.rank])
    room = [message_bytes(size, count) for size, count in zip(wires, uncompressed, strict=True)]
    name, longest = Name(kind, context.rank), max(room)
    in_turn = sends_in_turn(context, device)
    send = context.scratch.take("send", longest, device, torch.uint8)
    mine = send[: room[context.rank]]
    _fill(mine, message)
    seal_all([(mine, name)], context)
    step = room if in_turn else [longest] * n
    receive = context.scratch.take("receive", sum(step), device, torch.uint8)
    arriving = list(receive.split(step))
    with context.traffic.sending(step[context.rank] * (n - 1)):
        if in_turn:
            all_to_all_in_turn(arriving, [mine] * n, context)
        else:
            with peer_errors(context):
                _gather_single(receive, send, group=context.group)
    arriving = [part[:size] for part, size in zip(arriving, room, strict=True)]
    return _messages(arriving, wires, uncompressed, context, kind, 0)


def message_bytes(wire: int, uncompressed: int) -> int:
    """A message with its frame; none where there is nothing to say."""
    size = padded(wire) + padded(4 * uncompressed)
    return FRAME_BYTES + size if size else 0


def _fill(target: Tensor, message: Message) -> None:
    """Wire and plain values, after the frame."""
    start = FRAME_BYTES
    for part in message.parts():
        if size := part.numel():
            target[start : start + size].copy_(part)
            start += padded(size)


def _messages(
    parts: Sequence[Tensor],
    wires: Sequence[int],
    uncompressed: Sequence[int],
    context: ExchangeContext,
    kind: Kind,
    number: int,
) -> list[Message]:
    """Received bytes, checked, then taken apart. An own message has not left this rank."""
    others = [(part, Name(kind, i, number)) for i, part in enumerate(parts) if i != context.rank]
    open_all(others, context)
    found = []
    for part, size, count in zip(parts, wires, uncompressed, strict=True):
        body = part[FRAME_BYTES:]
        start = padded(size)
        values = body[start : start + 4 * count].view(torch.float32)
        found.append(Message(body[:size], values))
    return found


def _all_to_all_lengths(
    lengths: Sequence[int | Tensor], context: ExchangeContext, most: Sizes, device: torch.device
) -> tuple[list[int], tuple[int, ...]]:
    """Lengths of own wires, one to each rank, and of those that will arrive.

    The one wait for a device, where own lengths are known to a device only.
    """
    n = context.size
    frames = context.scratch.take("lengths", 2 * n * FRAME_BYTES, device, torch.uint8)
    mine, theirs = frames.split(n * FRAME_BYTES)
    announce_all(lengths, mine, context, [Name(Kind.SIZES, context.rank, j) for j in range(n)])
    each = [FRAME_BYTES] * n
    _all_to_all_bytes(theirs, mine, each, each, context)
    own, other = frames.to(_HOST).split(n * FRAME_BYTES)
    out = [announced(one, context, Name(Kind.SIZES, context.rank, j)) for j, one in _each(own)]
    return out, _checked(other, context, most, context.rank)


def _all_gather_lengths(
    length: int | Tensor, context: ExchangeContext, most: Sizes, device: torch.device
) -> tuple[int, ...]:
    """Lengths of the wires that all ranks send to all."""
    if dist.get_backend(context.group) == "gloo":
        return _all_to_all_lengths([length] * context.size, context, most, device)[1]
    mine = context.scratch.take("length", FRAME_BYTES, device, torch.uint8)
    theirs = context.scratch.take("lengths", context.size * FRAME_BYTES, device, torch.uint8)
    announce_all([length], mine, context, [Name(Kind.SIZES, context.rank)])
    with context.traffic.sending(FRAME_BYTES * (context.size - 1)), peer_errors(context):
        _gather_single(theirs, mine, group=context.group)
    return _checked(theirs.to(_HOST), context, most, 0)


def _checked(frames: Tensor, context: ExchangeContext, most: Sizes, number: int) -> tuple[int, ...]:
    found = [announced(one, context, Name(Kind.SIZES, i, number)) for i, one in _each(frames)]
    return checked_sizes(found, most, context)


def _each(frames: Tensor) -> list[tuple[int, Tensor]]:
    return list(enumerate(frames.split(FRAME_BYTES)))


def checked_sizes(
    sizes: Sequence[int], most: Sizes, context: ExchangeContext | None = None
) -> tuple[int, ...]:
    """WireError before anything is allocated, or a receive posted, for a false claim.

    A wire that is longer than announced would abort this process inside Gloo.
    """
    for rank, (size, least, limit) in enumerate(zip(sizes, most.smallest, most.bytes, strict=True)):
        if not least <= size <= limit:
            who = f"rank {rank}" if context is None else context.name_of(rank)
            raise WireError(
                f"{who} announced {size} bytes where {least} to {limit} are possible: are all "
                "ranks running the same settings?"
            )
    return tuple(sizes)


def _all_to_all_bytes(
    receive: Tensor, send: Tensor, room: list[int], out: list[int], context: ExchangeContext
) -> None:
    """out[j] bytes of `send` go to rank j, room[i] bytes of `receive` come from rank i."""
    with context.traffic.sending(sum(out) - out[context.rank]):
        if sends_in_turn(context, send.device):
            all_to_all_in_turn(receive.split(room), send.split(out), context)
            return
        with peer_errors(context):
            dist.all_to_all_single(receive, send, room, out, group=context.group)


def sends_in_turn(context: ExchangeContext, device: torch.device) -> bool:
    """Whether messages go one after another.

    Gloo's own sends to all ranks at once: n - 1 senders meet at every receiver, whose link then
    loses packets. One after another, the next rank first, a link has about one sender at a time,
    loses few, and more of its rate is used.
    """
    return device.type == "cpu" and dist.get_backend(context.group) == "gloo"


def all_to_all_in_turn(
    arriving: Sequence[Tensor], leaving: Sequence[Tensor], context: ExchangeContext
) -> None:
    """leaving[j] to rank j, arriving[i] from rank i.

    A rank begins its next message when that of the rank before it has arrived: all ranks take the
    same turns, so its own last one has then mostly been sent, too. Messages that leave are waited
    for last: Gloo reports a message that was on its way when the peer went only after a time-out,
    and one that was awaited at once. That time-out may be short for a peer whose own message has
    arrived: it has posted its receive before, so only the wire is waited for.
    """
    n, rank, group = context.size, context.rank, context.group
    arriving[rank].copy_(leaving[rank])
    before, after = ([(rank + way * k) % n for k in range(1, n)] for way in (-1, 1))
    awaited, left = {}, []
    for i in before:
        if arriving[i].numel():
            arriving[i][:FRAME_BYTES].zero_()  # no old frame may pass for a new one
            with peer_errors(context, i):
                awaited[i] = group.recv([arriving[i]], i, 0)
    for i, j in zip(before, after, strict=True):
        if leaving[j].numel():
            with peer_errors(context, j):
                left.append((j, group.send([leaving[j]], j, 0)))
        if i in awaited:
            with peer_errors(context, i):
                awaited[i].wait()
    limited = _takes_limits(group)
    for j, work in left:
        with peer_errors(context, j):
            if limited and j in awaited:
                work.wait(timedelta(seconds=_PATIENCE_S + leaving[j].numel() / _SLOWEST))
            else:
                work.wait()


def _takes_limits(group: Any) -> bool:
    """Whether its works can be waited for with a time-out: torch's own can, others' need not."""
    with suppress(RuntimeError):
        return isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    return False


@contextmanager
def peer_errors(context: ExchangeContext, peer: int | None = None) -> Iterator[None]:
    """Around what waits for rank `peer` of the group, or for all of it.

    When a rank ends, Gloo closes connections of the ranks that waited for it, and these close
    theirs: the rank that is named is the one that this rank lost first.
    """
    try:
        yield
    except RuntimeError as error:
        if not _about_ranks(error):
            raise
        late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        first_line = str(error).strip().partition("\n")[0]
        who = "another rank" if peer is None else context.name_of(peer)
        raise LostError(
            f"{who} {'did not answer in time' if late else 'is gone'} at step {context.step}: look "
            f"into the log of the rank that failed first ({first_line})"
        ) from error


def _about_ranks(error: RuntimeError) -> bool:
    """Whether a backend says that it could not send or receive."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(part in text for part in _OF_TRANSPORT)
