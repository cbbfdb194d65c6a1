"""Whether all ranks agree: on their settings, and on the weights that they hold."""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._key import Key
from laconic.comm._context import ExchangeContext
from laconic.comm._transport import peer_errors
from laconic.errors import ConfigError, ReplicaError
from laconic.kernels import backend

_WORD = 4
_ABSENT = -(1 << 62)  # instead of the digest of a rank that has none to show


def require_same_settings(
    settings: dict[str, str], group: dist.ProcessGroup, device: torch.device
) -> None:
    """ConfigError on every rank, naming ranks and difference, unless all have these settings."""
    found = [json.loads(text) for text in gather_texts(json.dumps(settings), group, device)]
    problems = []
    for name in sorted(set().union(*found)):
        values: dict[str, list[int]] = {}
        for rank, one in enumerate(found):
            values.setdefault(str(one.get(name, "nothing")), []).append(rank)
        if len(values) > 1:
            said = "; ".join(
                f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {value}"
                for value, ranks in values.items()
            )
            problems.append(f"{name} ({said})")
    if problems:
        raise ConfigError(f"ranks disagree on {'; and on '.join(problems)}")


def gather_texts(text: str, group: dist.ProcessGroup | None, device: torch.device) -> list[str]:
    """Every rank's text: plain bytes, no objects are unpickled."""
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    sizes = [
        torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=device), group=group)
    longest = max(int(size) for size in sizes)
    if longest > 1 << 26:
        raise ConfigError(f"a rank announced settings of {longest} bytes")
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    every = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(every, padded, group=group)
    return [
        bytes(data[: int(size)].tolist()).decode() for data, size in zip(every, sizes, strict=True)
    ]


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
    context = ExchangeContext(group=group, step=step)
    every = [torch.empty_like(found).view(1) for _ in range(context.size)]
    with peer_errors(context):
        dist.all_gather(every, found.view(1), group=group)
    holders: dict[int, list[int]] = {}
    for rank, value in enumerate(torch.cat(every).tolist()):
        if value != _ABSENT:
            holders.setdefault(value, []).append(rank)
    if len(holders) > 1:
        raise ReplicaError(_message(what, sorted(holders.values(), key=len, reverse=True), context))


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


def _message(what: str, sets: list[list[int]], context: ExchangeContext) -> str:
    """The largest set first; without a majority nothing says which ranks are right."""
    named = [_ranks(ranks, context) for ranks in sets]
    fix = "load all ranks from one checkpoint"
    if len(sets[0]) == len(sets[1]):
        return f"{what} differ at step {context.step}: {' from '.join(named)}; {fix}"
    return (
        f"{what} differ at step {context.step}: {', '.join(named[1:])} from the {len(sets[0])} "
        f"that agree ({named[0]}); {fix}, and look for what these ranks do on their own: a seed, "
        "data in buffers, a parameter outside of DDP"
    )


def _ranks(ranks: list[int], context: ExchangeContext) -> str:
    names = [context.name_of(rank).removeprefix("rank ") for rank in ranks]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
