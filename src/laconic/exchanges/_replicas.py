"""Whether all ranks hold the same weights: eight bytes of each rank are compared."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._key import Key
from laconic.errors import ReplicaError
from laconic.exchanges._base import Call
from laconic.exchanges._lost import talking
from laconic.kernels import backend

_WORD = 4
_ABSENT = -(1 << 62)  # instead of the digest of a rank that has none to show


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """64 bits of all bits of these tensors, as an int64 scalar on the first one's device.

        digest = Σ_t check(words of tensor t; salts of t)     in two halves of 32 bits each

    with `words_check`, whose sum over words goes in any order, and two salts for each tensor. Equal
    bits give equal digests, on any device; others the same one with probability 2^-64. Values that
    are equal but have other bits, as 0 and -0, differ. Nothing waits for the device.

    >>> a, b = torch.zeros(3), torch.ones(2)
    >>> int(digest([a, b])) == int(digest([a.clone(), b])), int(digest([a])) == int(digest([b]))
    (True, False)
    """
    total: Tensor | None = None
    for number, tensor in enumerate(tensors):
        one = _digest(tensor.detach(), number)
        total = one if total is None else total + one.to(total.device, non_blocking=True)
    return torch.zeros((), dtype=torch.int64) if total is None else total


def absent(found: Tensor) -> Tensor:
    """What a rank shows that takes no part in this, in place of its digest."""
    return torch.full_like(found, _ABSENT)


def compare(found: Tensor, group: dist.ProcessGroup, step: int = 0, what: str = "replicas") -> None:
    """ReplicaError on every rank, naming those that differ from most, unless all digests are equal.

    Eight bytes of every rank travel. Waits for the other ranks, and for the device.
    """
    call = Call(group=group, step=step)
    every = [torch.empty_like(found).view(1) for _ in range(call.size)]
    with talking(call):
        dist.all_gather(every, found.view(1), group=group)
    holders: dict[int, list[int]] = {}
    for rank, value in enumerate(torch.cat(every).tolist()):
        if value != _ABSENT:
            holders.setdefault(value, []).append(rank)
    if len(holders) > 1:
        raise ReplicaError(_said(what, sorted(holders.values(), key=len, reverse=True), call))


def _digest(tensor: Tensor, number: int) -> Tensor:
    words = _words(tensor)
    stream = Key(tensor=number, rank=tensor.numel()).stream()
    check = backend(words.device).words_check
    return check(words, stream.k0) + (check(words, stream.k1) << 32)


def _words(tensor: Tensor) -> Tensor:
    """The bits as int32, filled up with zeros."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    missing = -flat.numel() % _WORD
    if missing or flat.storage_offset() % _WORD:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return flat.view(torch.int32)


def _said(what: str, sets: list[list[int]], call: Call) -> str:
    """The most first; no majority means that nobody can say who is right."""
    named = [_ranks(ranks, call) for ranks in sets]
    mend = "load all ranks from one checkpoint"
    if len(sets[0]) == len(sets[1]):
        return f"{what} differ at step {call.step}: {' from '.join(named)}; {mend}"
    return (
        f"{what} differ at step {call.step}: {', '.join(named[1:])} from the {len(sets[0])} that "
        f"agree ({named[0]}); {mend}, and look for what these ranks do on their own: a seed, data "
        "in buffers, a parameter outside of DDP"
    )


def _ranks(ranks: list[int], call: Call) -> str:
    names = [call.name_of(rank).removeprefix("rank ") for rank in ranks]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
