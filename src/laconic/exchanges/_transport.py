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

from laconic._wire import ALIGN
from laconic.errors import WireError
from laconic.exchanges._base import Call
from laconic.exchanges._wires import Sizes


@dataclass(frozen=True)
class Message:
    """The bytes of a wire, and plain fp32 values."""

    wire: Tensor
    rest: Tensor

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
    wires = sizes.bytes if sizes.known else _swap_sizes(messages, call, sizes)
    out = [sum(padded(part.numel()) for part in message.parts()) for message in messages]
    room = [padded(size) + padded(4 * count) for size, count in zip(wires, rest, strict=True)]
    send = joined((part for one in messages for part in one.parts()), "send", call, device)
    receive = call.scratch.take("receive", sum(room), device, torch.uint8)
    with call.traffic.sending(sum(out) - out[call.rank]):
        dist.all_to_all_single(receive, send, room, out, group=call.group)
    return _messages(receive.split(room), wires, rest)


def share(message: Message, call: Call, sizes: Sizes, rest: Sequence[int]) -> list[Message]:
    """Send one message to all; the i-th of the result is rank i's.

    Gloo's all-gather is several times slower than its all-to-all, which is used there.
    """
    if dist.get_backend(call.group) == "gloo":
        return swap([message] * call.size, call, sizes, rest)
    wires = sizes.bytes if sizes.known else _share_sizes(message, call, sizes)
    room = padded(max(wires)) + padded(4 * max(rest))
    device = message.wire.device
    send = call.scratch.take("send", room, device, torch.uint8)
    mine = joined(message.parts(), "message", call, device)
    send[: mine.numel()].copy_(mine)
    receive = call.scratch.take("receive", room * call.size, device, torch.uint8)
    with call.traffic.sending(room * (call.size - 1)):
        dist.all_gather_into_tensor(receive, send, group=call.group)
    return _messages(receive.split(room), wires, rest)


def sum_in_place(payload: Tensor, call: Call) -> None:
    """The backend's all-reduce; bytes counted as those of a ring."""
    ring = 2 * (call.size - 1) / call.size
    with call.traffic.sending(ring * payload.numel() * payload.element_size()):
        dist.all_reduce(payload, group=call.group)


def plain_mean(x: Tensor | None, call: Call) -> None:
    """x becomes its mean by the backend's all-reduce, in its own dtype; None stays."""
    if x is not None and x.numel():
        sum_in_place(x, call)
        x.mul_(1 / call.size)


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


def _swap_sizes(messages: Sequence[Message], call: Call, most: Sizes) -> tuple[int, ...]:
    device = messages[0].wire.device
    mine = torch.tensor([message.wire.numel() for message in messages], device=device)
    theirs = torch.empty_like(mine)
    with call.traffic.sending(8 * (call.size - 1)):
        dist.all_to_all_single(theirs, mine, group=call.group)
    return checked_sizes(theirs, most)


def _share_sizes(message: Message, call: Call, most: Sizes) -> tuple[int, ...]:
    mine = torch.tensor([message.wire.numel()], device=message.wire.device)
    theirs = torch.empty(call.size, dtype=torch.int64, device=mine.device)
    with call.traffic.sending(8 * (call.size - 1)):
        dist.all_gather_into_tensor(theirs, mine, group=call.group)
    return checked_sizes(theirs, most)


def checked_sizes(sizes: Tensor, most: Sizes) -> tuple[int, ...]:
    """WireError before anything is allocated for a false claim."""
    found = tuple(sizes.tolist())
    for rank, (size, limit) in enumerate(zip(found, most.bytes, strict=True)):
        if not 0 <= size <= limit:
            raise WireError(
                f"rank {rank} announced {size} bytes where {limit} are the most: are all ranks "
                "running the same settings?"
            )
    return found
