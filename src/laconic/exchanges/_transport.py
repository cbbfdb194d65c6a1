"""Bytes between ranks, over whatever process group there is.

Messages are uint8 tensors, each starting on a 16-byte boundary where it arrives. Lengths that the
receiver cannot know travel first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._wire import ALIGN
from laconic.errors import WireError
from laconic.exchanges._base import Call
from laconic.exchanges._wires import Sizes


def padded(size: int) -> int:
    """Room for a message."""
    return -(-size // ALIGN) * ALIGN


def swap(messages: Sequence[Tensor], call: Call, sizes: Sizes) -> list[Tensor]:
    """Send messages[j] to rank j; what rank i sent here is the i-th of the result."""
    device = messages[0].device
    out = [padded(message.numel()) for message in messages]
    arriving = sizes.bytes if sizes.known else _swap_sizes(messages, call, sizes)
    room = [padded(size) for size in arriving]
    send = call.scratch.take("send", sum(out), device, torch.uint8)
    for part, message in zip(send.split(out), messages, strict=True):
        part[: message.numel()].copy_(message)
    receive = call.scratch.take("receive", sum(room), device, torch.uint8)
    with call.traffic.sending(sum(out) - out[call.rank]):
        dist.all_to_all_single(receive, send, room, out, group=call.group)
    return [part[:size] for part, size in zip(receive.split(room), arriving, strict=True)]


def share(message: Tensor, call: Call, sizes: Sizes) -> list[Tensor]:
    """Send one message to all; the i-th of the result is rank i's.

    Gloo's all-gather is several times slower than its all-to-all, which is used there.
    """
    if dist.get_backend(call.group) == "gloo":
        return swap([message] * call.size, call, sizes)
    arriving = sizes.bytes if sizes.known else _share_sizes(message, call, sizes)
    room = padded(max(arriving))
    send = call.scratch.take("send", room, message.device, torch.uint8)
    send[: message.numel()].copy_(message)
    receive = call.scratch.take("receive", room * call.size, message.device, torch.uint8)
    with call.traffic.sending(room * (call.size - 1)):
        dist.all_gather_into_tensor(receive, send, group=call.group)
    return [part[:size] for part, size in zip(receive.split(room), arriving, strict=True)]


def sum_in_place(payload: Tensor, call: Call) -> None:
    """The backend's all-reduce; bytes counted as those of a ring."""
    ring = 2 * (call.size - 1) / call.size
    with call.traffic.sending(ring * payload.numel() * payload.element_size()):
        dist.all_reduce(payload, group=call.group)


def gather_numbers(value: Tensor, call: Call) -> Tensor:
    """One fp32 number of every rank, in order; NaN arrives as NaN."""
    numbers = call.scratch.take("numbers", call.size, value.device, torch.float32)
    parts = list(numbers.split(1))
    with call.traffic.sending(4 * (call.size - 1)):
        dist.all_gather(parts, value.view(1), group=call.group)
    return numbers


def _swap_sizes(messages: Sequence[Tensor], call: Call, most: Sizes) -> tuple[int, ...]:
    device = messages[0].device
    mine = torch.tensor([message.numel() for message in messages], device=device)
    theirs = torch.empty_like(mine)
    with call.traffic.sending(8 * (call.size - 1)):
        dist.all_to_all_single(theirs, mine, group=call.group)
    return checked_sizes(theirs, most)


def _share_sizes(message: Tensor, call: Call, most: Sizes) -> tuple[int, ...]:
    mine = torch.tensor([message.numel()], device=message.device)
    theirs = torch.empty(call.size, dtype=torch.int64, device=message.device)
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
