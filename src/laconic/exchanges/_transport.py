"""Bytes between ranks, over whatever process group there is.

A message is a wire and, behind it, values that travel as they are (fp32). Both start on a 16-byte
boundary where they arrive. Lengths that the receiver cannot know travel first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._wire import ALIGN, Wire
from laconic.errors import WireError
from laconic.exchanges._base import Call
from laconic.exchanges._wires import Sizes

# torch 2.13 calls it all_gather_single, and warns of the older name
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
    messages: Sequence[Message], call: Call, sizes: Sizes, rest: Sequence[int]
) -> list[Message]:
    """Send messages[j] to rank j; what rank i sent here is the i-th of the result.

    `sizes` and `rest` tell how long the arriving wires are, and how many plain values follow each.
    """
    device = messages[0].wire.device
    wires = sizes.bytes
    if not sizes.known:
        mine, wires = _swap_sizes(messages, call, sizes)
        messages = [message.cut(size) for message, size in zip(messages, mine, strict=True)]
    out = [sum(padded(part.numel()) for part in message.parts()) for message in messages]
    room = [padded(size) + padded(4 * count) for size, count in zip(wires, rest, strict=True)]
    send = joined((part for one in messages for part in one.parts()), "send", call, device)
    receive = call.scratch.take("receive", sum(room), device, torch.uint8)
    with call.traffic.sending(sum(out) - out[call.rank]):
        _all_to_all(receive, send, room, out, call)
    return _messages(receive.split(room), wires, rest)


def _all_to_all(
    receive: Tensor, send: Tensor, room: Sequence[int], out: Sequence[int], call: Call
) -> None:
    """out[j] bytes to rank j, room[i] from rank i.

    Gloo's own sends to all ranks at once: n - 1 senders meet at every receiver, whose link then
    loses packets. One after another, the next rank first, a link has about one sender at a time,
    loses few, and more of its rate is used.
    """
    if send.is_cuda or dist.get_backend(call.group) != "gloo":
        dist.all_to_all_single(receive, send, room, out, group=call.group)
        return
    n, rank, group = call.size, call.rank, call.group
    arriving, leaving = receive.split(list(room)), send.split(list(out))
    arriving[rank].copy_(leaving[rank])
    before, behind = ([(rank + way * k) % n for k in range(1, n)] for way in (-1, 1))
    awaited = [group.recv([arriving[i]], i, 0) for i in before if room[i]]
    for j in behind:
        if out[j]:
            group.send([leaving[j]], j, 0).wait()
    for work in awaited:
        work.wait()


def share(message: Message, call: Call, sizes: Sizes, rest: Sequence[int]) -> list[Message]:
    """Send one message to all; the i-th of the result is rank i's.

    Gloo's all-gather is several times slower than its all-to-all, which is used there.
    """
    if dist.get_backend(call.group) == "gloo":
        return swap([message] * call.size, call, sizes, rest)
    wires = sizes.bytes
    if not sizes.known:
        wires = _share_sizes(message, call, sizes)
        message = message.cut(wires[call.rank])
    room = padded(max(wires)) + padded(4 * max(rest))
    device = message.wire.device
    send = call.scratch.take("send", room, device, torch.uint8)
    mine = joined(message.parts(), "message", call, device)
    send[: mine.numel()].copy_(mine)
    receive = call.scratch.take("receive", room * call.size, device, torch.uint8)
    with call.traffic.sending(room * (call.size - 1)):
        _gather_single(receive, send, group=call.group)
    return _messages(receive.split(room), wires, rest)


def sum_in_place(payload: Tensor, call: Call) -> None:
    """The backend's all-reduce; bytes counted as those of a ring."""
    ring = 2 * (call.size - 1) / call.size
    with call.traffic.sending(ring * payload.numel() * payload.element_size()):
        dist.all_reduce(payload, group=call.group)


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
    sum_in_place(joint, call)
    if rest is not None:
        rest.copy_(plain)
    return numbers


def _messages(parts: Sequence[Tensor], wires: Sequence[int], rest: Sequence[int]) -> list[Message]:
    """Received bytes, taken apart."""
    found = []
    for part, size, count in zip(parts, wires, rest, strict=True):
        start = padded(size)
        values = part[start : start + 4 * count].view(torch.float32)
        found.append(Message(part[:size], values))
    return found


def _swap_sizes(
    messages: Sequence[Message], call: Call, most: Sizes
) -> tuple[Sequence[int], tuple[int, ...]]:
    """Lengths of own wires and of those that will arrive. The one wait for a device."""
    both = call.scratch.take("sizes", 2 * call.size, messages[0].wire.device, torch.int64)
    mine, theirs = both.split(call.size)
    _measure(messages, mine)
    with call.traffic.sending(8 * (call.size - 1)):
        dist.all_to_all_single(theirs, mine, group=call.group)
    found = both.tolist()
    return found[: call.size], checked_sizes(found[call.size :], most)


def _share_sizes(message: Message, call: Call, most: Sizes) -> tuple[int, ...]:
    device = message.wire.device
    mine = call.scratch.take("size", 1, device, torch.int64)
    theirs = call.scratch.take("sizes", call.size, device, torch.int64)
    _measure([message], mine)
    with call.traffic.sending(8 * (call.size - 1)):
        _gather_single(theirs, mine, group=call.group)
    return checked_sizes(theirs.tolist(), most)


def _measure(messages: Sequence[Message], out: Tensor) -> None:
    """Lengths of wires, on their device."""
    if all(message.length is None for message in messages):
        out.copy_(torch.tensor([message.wire.numel() for message in messages]))
        return
    for message, place in zip(messages, out.split(1), strict=True):
        if message.length is None:
            place.fill_(message.wire.numel())
        else:
            place.copy_(message.length)


def checked_sizes(sizes: Sequence[int], most: Sizes) -> tuple[int, ...]:
    """WireError before anything is allocated for a false claim."""
    for rank, (size, limit) in enumerate(zip(sizes, most.bytes, strict=True)):
        if not 0 <= size <= limit:
            raise WireError(
                f"rank {rank} announced {size} bytes where {limit} are the most: are all ranks "
                "running the same settings?"
            )
    return tuple(sizes)
