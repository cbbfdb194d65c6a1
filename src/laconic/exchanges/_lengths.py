"""Lengths that receivers cannot know: they travel first, each in a frame of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import WireError
from laconic.exchanges._base import Call
from laconic.exchanges._device_frame import announce_on_device
from laconic.exchanges._frame import FRAME_BYTES, Kind, Name, announce, announced
from laconic.exchanges._lost import talking
from laconic.exchanges._turns import one_after_another, takes_turns
from laconic.exchanges._wires import Sizes

# torch 2.13 calls it all_gather_single, and warns of the older name
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_HOST = torch.device("cpu")


def swap_lengths(
    lengths: Sequence[int | Tensor], call: Call, most: Sizes, device: torch.device
) -> tuple[list[int], tuple[int, ...]]:
    """Lengths of own wires, one to each rank, and of those that will arrive.

    The one wait for a device, where own lengths are known to a device only.
    """
    n = call.size
    frames = call.scratch.take("lengths", 2 * n * FRAME_BYTES, device, torch.uint8)
    mine, theirs = frames.split(n * FRAME_BYTES)
    _announce(lengths, mine, call, [Name(Kind.SIZES, call.rank, j) for j in range(n)])
    with call.traffic.sending(FRAME_BYTES * (n - 1)):
        if takes_turns(call, device):
            one_after_another(theirs.split(FRAME_BYTES), mine.split(FRAME_BYTES), call)
        else:
            with talking(call):
                dist.all_to_all_single(theirs, mine, group=call.group)
    own, other = frames.to(_HOST).split(n * FRAME_BYTES)
    out = [announced(one, call, Name(Kind.SIZES, call.rank, j)) for j, one in _each(own)]
    return out, _checked(other, call, most, call.rank)


def share_lengths(
    length: int | Tensor, call: Call, most: Sizes, device: torch.device
) -> tuple[int, ...]:
    """Lengths of the wires that all ranks send to all."""
    if dist.get_backend(call.group) == "gloo":
        return swap_lengths([length] * call.size, call, most, device)[1]
    mine = call.scratch.take("length", FRAME_BYTES, device, torch.uint8)
    theirs = call.scratch.take("lengths", call.size * FRAME_BYTES, device, torch.uint8)
    _announce([length], mine, call, [Name(Kind.SIZES, call.rank)])
    with call.traffic.sending(FRAME_BYTES * (call.size - 1)), talking(call):
        gather_single(theirs, mine, group=call.group)
    return _checked(theirs.to(_HOST), call, most, 0)


def _announce(
    lengths: Sequence[int | Tensor], out: Tensor, call: Call, names: Sequence[Name]
) -> None:
    if out.is_cuda:
        announce_on_device(lengths, out, call, names)
        return
    for length, (j, frame) in zip(lengths, _each(out), strict=True):
        announce(int(length), frame, call, names[j])


def _checked(frames: Tensor, call: Call, most: Sizes, number: int) -> tuple[int, ...]:
    found = [announced(one, call, Name(Kind.SIZES, i, number)) for i, one in _each(frames)]
    return checked_sizes(found, most, call)


def _each(frames: Tensor) -> list[tuple[int, Tensor]]:
    return list(enumerate(frames.split(FRAME_BYTES)))


def checked_sizes(sizes: Sequence[int], most: Sizes, call: Call | None = None) -> tuple[int, ...]:
    """WireError before anything is allocated, or a receive posted, for a false claim.

    A wire that turns out longer than announced would end this process inside Gloo.
    """
    for rank, (size, least, limit) in enumerate(zip(sizes, most.smallest, most.bytes, strict=True)):
        if not least <= size <= limit:
            who = f"rank {rank}" if call is None else call.name_of(rank)
            raise WireError(
                f"{who} announced {size} bytes where {least} to {limit} are possible: are all "
                "ranks running the same settings?"
            )
    return tuple(sizes)
