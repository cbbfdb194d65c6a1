"""Which ranks share a node: as given, or as torchrun's environment says."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable

import torch
import torch.distributed as dist

from laconic.errors import ConfigError

Nodes = tuple[tuple[int, ...], ...]  # the ranks of a group on each node, in order

_UNSET, _UNREADABLE = -1, -2  # in place of a node's number


def sorted_nodes(nodes: Iterable[Iterable[int]]) -> Nodes:
    """Nodes and their ranks in order; ConfigError unless each rank from 0 on is there once."""
    try:
        found = tuple(sorted(tuple(sorted(node)) for node in nodes))
        ranks = sorted(rank for node in found for rank in node)
    except TypeError:
        found, ranks = (), []
    if not found or not all(found) or ranks != list(range(len(ranks))):
        raise ConfigError(
            "hierarchical: nodes are tuples of ranks, each rank of the group once from 0 on, such "
            f"as ((0, 1), (2, 3)), not {nodes!r}"
        )
    return found


def agreed_nodes(nodes: Nodes | None, group: dist.ProcessGroup) -> Nodes:
    """The ranks of each node, known to all; ConfigError on every rank if they disagree."""
    check = zlib.crc32(repr(nodes).encode())
    number = _node_number() if nodes is None else 0
    rows = _every_rank((number, check), group)
    if len({row[1] for row in rows}) > 1:
        raise ConfigError("hierarchical: ranks were given different nodes; give all the same")
    size = group.size()
    if nodes is not None:
        if sum(map(len, nodes)) != size:
            raise ConfigError(
                f"hierarchical: nodes hold {sum(map(len, nodes))} ranks, but the group has {size}: "
                f"name each of 0 .. {size - 1} once"
            )
        return nodes
    return _by_number([row[0] for row in rows])


def _by_number(numbers: list[int]) -> Nodes:
    """Ranks of equal number share a node; where no rank has one, each is a node of its own."""
    unread = [rank for rank, number in enumerate(numbers) if number == _UNREADABLE]
    if unread:
        raise ConfigError(
            f"hierarchical: on ranks {unread} LOCAL_WORLD_SIZE is set, but neither GROUP_RANK nor "
            "LOCAL_RANK says which node it is; start with torchrun, or give nodes="
        )
    unset = [rank for rank, number in enumerate(numbers) if number == _UNSET]
    if unset and len(unset) < len(numbers):
        raise ConfigError(
            f"hierarchical: LOCAL_WORLD_SIZE is set, but not on ranks {unset}; start all ranks "
            "with torchrun, or give nodes="
        )
    if unset:
        return tuple((rank,) for rank in unset)
    members = {number: [] for number in numbers}
    for rank, number in enumerate(numbers):
        members[number].append(rank)
    return sorted_nodes(members.values())


def _node_number() -> int:
    """What torchrun says about this process's node. Errors are for all ranks: they must meet."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return _UNSET
    try:
        if "GROUP_RANK" in os.environ:
            number = int(os.environ["GROUP_RANK"])
        else:
            number = dist.get_rank() - int(os.environ["LOCAL_RANK"])
    except (KeyError, ValueError):
        return _UNREADABLE
    return number if number >= 0 else _UNREADABLE


def _every_rank(numbers: tuple[int, ...], group: dist.ProcessGroup) -> list[list[int]]:
    """The numbers of every rank, in order."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device_of(group))
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    return torch.stack(every).tolist()


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where tensors that a group exchanges may lie."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
