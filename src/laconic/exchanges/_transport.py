"""Bytes between ranks, over whatever process group there is.

A message is a frame (`_frame.py`), a wire and, behind it, values that travel as they are (fp32).
Each starts on a 16-byte boundary where it arrives. Lengths that the receiver cannot know travel
first. Nothing of any message is used before all of them were found to be what was awaited.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._wire import ALIGN, Wire
from laconic.exchanges import _frame
from laconic.exchanges._base import Call
from laconic.exchanges._device_frame import opened_on_device, seal_on_device
from laconic.exchanges._frame import FRAME_BYTES, Kind, Name, opened, seal
from laconic.exchanges._lengths import (
    checked_sizes,
    gather_single,
    share_lengths,
    swap_lengths,
)
from laconic.exchanges._lost import talking
from laconic.exchanges._turns import one_after_another, takes_turns
from laconic.exchanges._wires import Sizes, chunks_of

__all__ = [
    "Message",
    "checked_sizes",
    "gather_numbers",
    "joined",
    "no_values",
    "padded",
    "plain_mean",
    "share",
    "sum_in_place",
    "swap",
]

_AT_ONCE = 1 << 14  # bytes of all ranks' values together, which go to all in one message
_MOST_CHECKED = 1 << 20  # bytes of a sum of plain values that our own messages carry


@dataclass(frozen=True)
class Message:
    """The bytes of a wire, and plain fp32 values.

    `length` is there where only a device knows how many of the bytes count.
    """

    wire: Tensor
    rest: Tensor
    length: Tensor | None = None

    @staticmethod
    def of(wire: Wire | None, rest: Tensor) -> Message:
        """A wire, or nothing, to be sent."""
        if wire is None:
            return Message(torch.empty(0, dtype=torch.uint8, device=rest.device), rest)
        if wire.header.coder and wire.buffer.is_cuda:
            return Message(wire.buffer, rest, wire.length())
        return Message(wire.data, rest)

    def cut(self, size: int) -> Message:
        """With the length that has become known."""
        return Message(self.wire[:size], self.rest)

    @property
    def nbytes(self) -> int | Tensor:
        """Of the wire."""
        return self.wire.numel() if self.length is None else self.length

    def parts(self) -> tuple[Tensor, Tensor]:
        """As bytes."""
        return self.wire, self.rest.view(torch.uint8)


def no_values(like: Tensor) -> Tensor:
    """Plain values where there are none."""
    return torch.empty(0, dtype=torch.float32, device=like.device)


def padded(size: int) -> int:
    """Room for a message."""
    return -(-size // ALIGN) * ALIGN


def joined(parts: Iterable[Tensor], name: str, call: Call, device: torch.device) -> Tensor:
    """The parts one behind another in a scratch buffer, each on a 16-byte boundary."""
    parts = list(parts)
    ends = list(accumulate(padded(part.numel()) for part in parts))
    buffer = call.scratch.take(name, ends[-1] if ends else 0, device, torch.uint8)
    for end, part in zip(ends, parts, strict=True):
        if size := part.numel():
            start = end - padded(size)
            buffer[start : start + size].copy_(part)
    return buffer


def swap(
    messages: Sequence[Message],
    call: Call,
    sizes: Sizes,
    rest: Sequence[int],
    kind: Kind = Kind.SWAP,
) -> list[Message]:
    """Send messages[j] to rank j; what rank i sent here is the i-th of the result.

    `sizes` and `rest` tell how long the arriving wires are, and how many plain values follow each.
    """
    device, rank = messages[0].wire.device, call.rank
    wires = sizes.bytes
    if not sizes.known:
        mine, wires = swap_lengths([one.nbytes for one in messages], call, sizes, device)
        messages = [message.cut(size) for message, size in zip(messages, mine, strict=True)]
    out = [message_bytes(one.wire.numel(), one.rest.numel()) for one in messages]
    room = [message_bytes(size, count) for size, count in zip(wires, rest, strict=True)]
    send = call.scratch.take("send", sum(out), device, torch.uint8)
    receive = call.scratch.take("receive", sum(room), device, torch.uint8)
    leaving, arriving = list(send.split(out)), list(receive.split(room))
    for message, target in zip(messages, leaving, strict=True):
        _fill(target, message)
    _seal([(one, Name(kind, rank, j)) for j, one in enumerate(leaving)], call)
    with call.traffic.sending(sum(out) - out[rank]):
        if takes_turns(call, device):
            one_after_another(arriving, leaving, call)
        else:
            with talking(call):
                dist.all_to_all_single(receive, send, room, out, group=call.group)
    return _messages(arriving, wires, rest, call, kind, rank)


def share(
    message: Message, call: Call, sizes: Sizes, rest: Sequence[int], kind: Kind = Kind.SHARE
) -> list[Message]:
    """Send one message to all; the i-th of the result is rank i's.

    Gloo's all-gather is several times slower than its all-to-all, which is used there.
    """
    device, n, wires = message.wire.device, call.size, sizes.bytes
    if device.type != "cpu" and dist.get_backend(call.group) == "gloo":
        return swap([message] * n, call, sizes, rest, kind)
    if not sizes.known:
        wires = share_lengths(message.nbytes, call, sizes, device)
        message = message.cut(wires[call.rank])
    room = [message_bytes(size, count) for size, count in zip(wires, rest, strict=True)]
    name, longest = Name(kind, call.rank), max(room)
    in_turn = takes_turns(call, device)
    send = call.scratch.take("send", longest, device, torch.uint8)
    mine = send[: room[call.rank]]
    _fill(mine, message)
    _seal([(mine, name)], call)
    step = room if in_turn else [longest] * n
    receive = call.scratch.take("receive", sum(step), device, torch.uint8)
    arriving = list(receive.split(step))
    with call.traffic.sending(step[call.rank] * (n - 1)):
        if in_turn:
            one_after_another(arriving, [mine] * n, call)
        else:
            with talking(call):
                gather_single(receive, send, group=call.group)
    arriving = [part[:size] for part, size in zip(arriving, room, strict=True)]
    return _messages(arriving, wires, rest, call, kind, 0)


def message_bytes(wire: int, rest: int) -> int:
    """A message with its frame; none where there is nothing to say."""
    size = padded(wire) + padded(4 * rest)
    return FRAME_BYTES + size if size else 0


def _fill(target: Tensor, message: Message) -> None:
    """Wire and plain values behind the frame."""
    start = FRAME_BYTES
    for part in message.parts():
        if size := part.numel():
            target[start : start + size].copy_(part)
            start += padded(size)


def _seal(named: Sequence[tuple[Tensor, Name]], call: Call) -> None:
    some = [(data, name) for data, name in named if data.numel()]
    if some and some[0][0].is_cuda:
        seal_on_device(some, call)
        return
    for data, name in some:
        seal(data, call, name)


def _messages(
    parts: Sequence[Tensor],
    wires: Sequence[int],
    rest: Sequence[int],
    call: Call,
    kind: Kind,
    number: int,
) -> list[Message]:
    """Received bytes, checked, then taken apart. An own message has not left this rank."""
    named = [
        (part, Name(kind, i, number))
        for i, part in enumerate(parts)
        if part.numel() and i != call.rank
    ]
    if named and named[0][0].is_cuda:
        opened_on_device(named, call)
    else:
        for part, name in named:
            opened(part, call, name)
    found = []
    for part, size, count in zip(parts, wires, rest, strict=True):
        body = part[FRAME_BYTES:]
        start = padded(size)
        values = body[start : start + 4 * count].view(torch.float32)
        found.append(Message(body[:size], values))
    return found


def sum_in_place(payload: Tensor, call: Call) -> None:
    """The sum over ranks, in payload's own type.

    Plain values on the host travel in checked messages up to 1 MiB; else, and for integers, it is
    the backend's all-reduce, which nothing can check from outside. Its bytes count as a ring's.
    """
    floats = payload.dtype.is_floating_point and payload.numel() * payload.element_size()
    if floats and floats <= _MOST_CHECKED and _checks_sums(payload, call):
        _checked_sum(payload.view(-1), call)
        return
    ring = 2 * (call.size - 1) / call.size
    with call.traffic.sending(ring * payload.numel() * payload.element_size()), talking(call):
        dist.all_reduce(payload, group=call.group)
    _frame.arrived(_bytes(payload), call.rank, call)


def plain_mean(x: Tensor | None, call: Call) -> None:
    """x becomes its mean by the backend's all-reduce, in its own dtype; None stays.

    As DDP does it: divided first, so that halves overflow only where their mean does.
    """
    if x is not None and x.numel():
        x.mul_(1 / call.size)
        sum_in_place(x, call)


def gather_numbers(value: Tensor, call: Call, rest: Tensor | None = None) -> Tensor:
    """One fp32 number of every rank, in order; `rest` becomes its mean in the same message.

    Every rank puts its number into a slot of its own among zeros, and all are added: x + 0 is x,
    and NaN arrives as NaN (a MAX of Gloo's loses it).
    """
    count = 0 if rest is None else rest.numel()
    joint = call.scratch.take("numbers", count + call.size, value.device, torch.float32)
    plain, numbers = joint[:count], joint[count:]
    if rest is not None:
        torch.mul(rest, 1 / call.size, out=plain)
    numbers.zero_()
    numbers[call.rank : call.rank + 1].copy_(value.view(1))
    if _checks_sums(joint, call):
        _checked_sum(joint, call)
    else:
        sum_in_place(joint, call)
    if rest is not None:
        rest.copy_(plain)
    return numbers


def _checks_sums(x: Tensor, call: Call) -> bool:
    """Whether our own messages carry a sum: where each can be checked on the host."""
    return x.device.type == "cpu" and call.sums(x.device) and call.size > 1 and x.is_contiguous()


def _checked_sum(x: Tensor, call: Call) -> None:
    """x becomes its sum: whole to all, or if that is long in parts that each rank adds up.

    All ranks hold the same bits, because each part is added once, or by all in one order.
    """
    n, rank, grain = call.size, call.rank, ALIGN // x.element_size()
    if sums_at_once(x.numel() * x.element_size(), n):
        sizes = Sizes((_bytes(x).numel(),) * n, known=True)
        every = share(Message(_bytes(x), no_values(x)), call, sizes, [0] * n, Kind.SUM)
        x.copy_(every[0].wire.view(x.dtype))
        for one in every[1:]:
            x.add_(one.wire.view(x.dtype))
        return
    parts = chunks_of(x, n, grain)
    lengths = [_bytes(part).numel() for part in parts]
    none = no_values(x)
    away = [Message(_bytes(part if j != rank else part[:0]), none) for j, part in enumerate(parts)]
    sizes = Sizes(tuple(lengths[rank] if i != rank else 0 for i in range(n)), known=True)
    arrived = swap(away, call, sizes, [0] * n, Kind.PART)
    own = parts[rank]
    for i, one in enumerate(arrived):
        if i != rank:
            own.add_(one.wire.view(x.dtype))
    sizes = Sizes(tuple(lengths), known=True)
    for j, one in enumerate(share(Message(_bytes(own), none), call, sizes, [0] * n, Kind.SUM)):
        if j != rank:
            parts[j].copy_(one.wire.view(x.dtype))


def checked_sum_bytes(nbytes: float, ranks: int) -> float:
    """What a rank sends, on average, for a sum of so many bytes in our own messages."""
    others = ranks - 1
    if sums_at_once(nbytes, ranks):
        return others * (FRAME_BYTES + nbytes)
    return others * 2 * (FRAME_BYTES + nbytes / ranks)


def sums_at_once(nbytes: float, ranks: int) -> bool:
    """Whether so few bytes of every rank go to all."""
    return nbytes * ranks <= _AT_ONCE


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
