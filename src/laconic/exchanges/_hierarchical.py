"""Hierarchical: full precision inside a node, a codec between nodes."""

from __future__ import annotations

import os
import weakref
import zlib
from ast import literal_eval
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._cost import Cluster, EncodingError, Move, Task, TensorLoad, Work
from laconic._settings import described
from laconic.codecs import Codec
from laconic.comm._closing import destroy, on_gloo
from laconic.comm._context import _CHUNKS, ExchangeContext, Sizes, chunks_of
from laconic.comm._sums import plain_mean
from laconic.comm._threads import device_of
from laconic.comm._transport import (
    Message,
    all_gather,
    all_to_all,
    no_values,
)
from laconic.errors import ConfigError
from laconic.exchanges._base import Exchange
from laconic.exchanges._scatter_reduce import ScatterReduce

_PLAIN_GRAIN = 4  # plain values: parts start on 16-byte boundaries


@dataclass(frozen=True, kw_only=True)
class Hierarchical(Exchange):
    """`hierarchical`: links inside a node are fast; only what leaves it is encoded.

    n ranks on K nodes; L, the lanes, is the number of ranks on the smallest node. x is cut into L
    parts, and the j-th rank of every node owns part j.

    1. Inside node k every rank sends part j as it is to its owner, who adds in fp32:
       y_k = (K/n)·Σ_{i in k} x_i. For nodes of equal size that is the mean of node k.
    2. Between nodes the K owners of part j exchange it with `inner` and the codec (an exchange of K
       ranks): mean over k of y_k = Σ_i x_i / n, the mean over ranks whatever the sizes of nodes.
    3. Inside a node every owner sends its part to all, as it is.

    Owners of a part end with the same bits, and only they send it on: so do all ranks. Only step 2
    loses anything: the error is inner's, with K in place of n and y_k in place of x_i. For
    scatter-reduce it is e1/(K·κ') + e2 of the mean, κ' = ‖mean‖²/(average ‖y_k‖²): 1/K for
    independent nodes, 1 for equal ones; `error=` stays the budget of the mean. With nodes of m
    ranks ‖y_k‖² is ‖x‖²/m for independent gradients (the error of n flat ranks) and ‖x‖² for equal
    ones (e1/K, not e1/n). Codecs whose levels are shared by all workers (global) gain: they share
    them among K, not n.

    Bytes per rank: to other nodes inner's for 1/L of the tensor among K ranks (`sent_bytes`);
    inside, 2·(m-1)/m of the plain tensor (`local_bytes`). On nodes larger than the smallest one,
    ranks beyond L own nothing. One node is a plain mean; one rank per node is inner alone.

    `nodes` are the ranks of the group on each node, e.g. ((0, 1), (2, 3)), in a spec
    "hierarchical:nodes=((0,1),(2,3))". Without them every rank
    reports its node from what torchrun sets: GROUP_RANK, else its rank less LOCAL_RANK.
    Without torchrun (LOCAL_WORLD_SIZE is not set) every rank counts as a node of its own. `inner`
    is the exchange between nodes, by default the codec's own. Node means go to the codec as fp32,
    or in x's dtype if that makes a shorter wire (none).
    """

    name: ClassVar[str] = "hierarchical"

    nodes: Nodes | None = field(
        default=None, metadata=described("lists of ranks, such as ((0, 1), (2, 3))")
    )
    inner: Exchange | None = None  # in specs "inner=ring" or "inner=(ring:pieces=8)"

    def __post_init__(self) -> None:
        if isinstance(self.inner, str):
            from laconic.exchanges._pair import exchange  # which itself knows this class

            object.__setattr__(self, "inner", exchange(self.inner))
        if isinstance(self.inner, Hierarchical):
            raise ConfigError("hierarchical: inner must be a flat exchange, such as scatter-reduce")
        if self.nodes is not None:
            object.__setattr__(self, "nodes", sorted_nodes(self.nodes))

    def check(self, codec: Codec) -> None:
        self._between(codec).check(codec)

    def check_units(self, codec: Codec) -> None:
        self._between(codec).check_units(codec)

    def prepare(self, group: dist.ProcessGroup) -> None:
        """Find out which ranks share a node, and make the groups; once for a group and `nodes`."""
        kept = _TEAMS.setdefault(group, {})
        if self.nodes not in kept:
            kept[self.nodes] = team = _team(agreed_nodes(self.nodes, group), group)
            weakref.finalize(group, _disband, team).atexit = False

    def check_group(self, codec: Codec, group: dist.ProcessGroup) -> None:
        team = _TEAMS[group][self.nodes]
        if team.nodes > 1:
            self._between(codec).check_group(codec, team.across or group)

    def mean(
        self, x: Tensor, codec: Codec, context: ExchangeContext, uncompressed: Tensor | None = None
    ) -> None:
        self.prepare(context.group)
        inner, team = self._between(codec), _TEAMS[context.group][self.nodes]
        if team.nodes == context.size:
            inner.mean(x, codec, context, uncompressed)
            return
        parts = chunks_of(x, team.lanes)
        plain = chunks_of(
            no_values(x) if uncompressed is None else uncompressed, team.lanes, _PLAIN_GRAIN
        )
        near = replace(context, group=team.node or context.group)
        with context.traffic.inside_a_node():
            mine = _scatter(parts, plain, near, weight=team.nodes / context.size)
        if near.rank < team.lanes:
            if team.across is not None:
                far = _far(context, team, team.across, near.rank, parts)
                mine = _as_sent(mine, codec, x.dtype, context)
                _between_nodes(mine, inner, codec, far, plain[near.rank])
            parts[near.rank].copy_(mine)
        with context.traffic.inside_a_node():
            _gather(parts, plain, near)

    def cost(self, load: TensorLoad, cluster: Cluster) -> list[Task]:
        """Tasks of a bucket: X_in((L-1)/L·(w·d + 4p)), inner's with d/L, p/L and K, X_in again.

        L ranks on each of K nodes. Inside a node values travel as they are, w bytes each.
        """
        inside, between = cluster.inside, cluster.between
        if inside is None or between is None:
            raise ConfigError("hierarchical needs nodes with several workers")
        lanes = inside.ranks
        d, p = load.encoded, load.plain
        local = (lanes - 1) / lanes * (load.value_bytes * d + 4 * p)
        step = Move(inside.all_to_all.start_s, local / inside.all_to_all.per_s)
        add = Work(cluster.device.copy.seconds(d))  # lanes parts of 1/lanes each
        part = replace(load, encoded=d / lanes, plain=p / lanes)
        across = replace(cluster, workers=cluster.nodes, per_node=1, flat=between)
        return [step, add, *self._between(load.codec).cost(part, across), step]

    def mean_error(self, one: EncodingError, codec: Codec | None = None) -> float:
        """NMSE of the mean: inner's, with K nodes of m for n ranks and κ' for κ.

        Gradients with a common part of power share φ and independent rests have κ = φ + (1-φ)/n;
        means of nodes of m then have κ' = κ/(φ + (1-φ)/m).
        """
        n, nodes, kappa = one.workers, one.workers // one.per_node, one.agreement
        if nodes < 2:
            return 0.0
        common = max(0.0, n * kappa - 1) / (n - 1)
        apart = kappa / (common + (1 - common) / one.per_node)
        inner = replace(one, workers=nodes, kappa=apart, per_node=1)
        return self._between(codec).mean_error(inner)

    def planned(self, codec: Codec, cluster: Cluster) -> bool:
        """Where nodes hold several workers."""
        return cluster.inside is not None

    def encodes_mean(self, codec: Codec) -> bool:
        return self._between(codec).encodes_mean(codec)

    def workers_added(self, codec: Codec, cluster: Cluster) -> int:
        return cluster.nodes

    def _between(self, codec: Codec | None) -> Exchange:
        from laconic.exchanges._pair import default_exchange  # which itself knows this class

        if self.inner is not None:
            return self.inner
        return ScatterReduce() if codec is None else default_exchange(codec)


@dataclass(frozen=True)
class _Team:
    """How many nodes and owners there are, and the groups that this rank is in."""

    nodes: int
    lanes: int
    node: dist.ProcessGroup | None = None  # None: the whole group is one node
    across: dist.ProcessGroup | None = None  # ranks with the same place in their nodes


# outside of the settings, which are compared, printed and copied; a group's entry ends with it
_TEAMS: WeakKeyDictionary[dist.ProcessGroup, dict[Nodes | None, _Team]] = WeakKeyDictionary()


def _scatter(
    parts: Sequence[Tensor], uncompressed: Sequence[Tensor], near: ExchangeContext, *, weight: float
) -> Tensor:
    """This rank's part, added up over its node in fp32, times weight; rest likewise, in place."""
    own, x = near.rank, parts[0]
    messages = [Message(_bytes(x[:0]), no_values(x))] * near.size
    for j in range(len(parts)):
        if j != own:
            messages[j] = Message(_bytes(parts[j]), uncompressed[j])
    owner = own < len(parts)
    mine, plain = (parts[own], uncompressed[own]) if owner else (x[:0], no_values(x))
    others = [int(i != own) for i in range(near.size)]
    sizes = Sizes(tuple(_bytes(mine).numel() * other for other in others), known=True)
    total = near.scratch.take("node part", mine.numel(), x.device, torch.float32)
    total.copy_(mine).mul_(weight)  # in fp32 before it is weighed
    plain.mul_(weight)
    if near.size == 1:
        return total
    arrived = all_to_all(messages, near, sizes, [plain.numel() * other for other in others])
    for i, message in enumerate(arrived):
        if owner and i != own:
            total.add_(message.wire.view(x.dtype), alpha=weight)
            plain.add_(message.uncompressed, alpha=weight)
    return total


def _between_nodes(
    mine: Tensor, inner: Exchange, codec: Codec, far: ExchangeContext, uncompressed: Tensor
) -> None:
    """Part and plain values become their means over nodes."""
    if mine.numel():
        inner.mean(mine, codec, far, uncompressed if uncompressed.numel() else None)
    else:
        plain_mean(uncompressed, far)  # of a short tensor some owners have nothing


def _gather(parts: Sequence[Tensor], uncompressed: Sequence[Tensor], near: ExchangeContext) -> None:
    """Every owner's part and plain values become those of all ranks of the node."""
    if near.size == 1:
        return
    own, x, spare = near.rank, parts[0], near.size - len(parts)
    message = Message(_bytes(x[:0]), no_values(x))
    if own < len(parts):
        message = Message(_bytes(parts[own]), uncompressed[own])
    sizes = Sizes((*(_bytes(part).numel() for part in parts), *[0] * spare), known=True)
    plain = [*(values.numel() for values in uncompressed), *[0] * spare]
    for j, arrived in enumerate(all_gather(message, near, sizes, plain)[: len(parts)]):
        if j != own:
            parts[j].copy_(arrived.wire.view(x.dtype))
            uncompressed[j].copy_(arrived.uncompressed)


def _far(
    context: ExchangeContext,
    team: _Team,
    across: dist.ProcessGroup,
    lane: int,
    parts: Sequence[Tensor],
) -> ExchangeContext:
    """The context of a part's owners: its parameters, and draws that no other part has."""
    start = sum(part.numel() for part in parts[:lane])
    return replace(
        context,
        group=across,
        places=tuple(context.inside(start, start + parts[lane].numel())),
        first_chunk=context.first_chunk + lane * (_CHUNKS // team.lanes),
    )


def _as_sent(mine: Tensor, codec: Codec, dtype: torch.dtype, context: ExchangeContext) -> Tensor:
    """fp32 as it is, unless its wire would be longer than that of x's dtype."""
    if codec.nbytes(1024, torch.float32) <= codec.nbytes(1024, dtype):
        return mine
    return context.scratch.take("node part as sent", mine.numel(), mine.device, dtype).copy_(mine)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _team(nodes: Nodes, group: dist.ProcessGroup) -> _Team:
    """The layout of nodes; where ranks are both beside and apart, with groups for either."""
    lanes = min(map(len, nodes))
    if len(nodes) in (1, group.size()):
        return _Team(len(nodes), lanes)
    widest = max(map(len, nodes))
    # a rank that owns nothing is in a group across, too: torch names a group that only its members
    # make by how many groups a rank has made, and these numbers must stay equal
    columns = tuple(tuple(node[j] for node in nodes if j < len(node)) for j in range(widest))
    return _Team(len(nodes), lanes, _own_group(nodes, group), _own_group(columns, group))


def _disband(team: _Team) -> None:
    """Its parent group is gone; on NCCL ranks would have to do this together."""
    for group in (team.node, team.across):
        if group is not None and on_gloo(group):
            destroy(group)


def _own_group(parts: Nodes, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a group for each part; the one that this rank is in.

    All ranks of the world make all groups, if all are here; else members make theirs among them.
    """
    everyone = group.size() == dist.get_world_size()
    found = None
    for part in parts:
        if not everyone and group.rank() not in part:
            continue
        made = dist.new_group(
            [dist.get_global_rank(group, rank) for rank in part],
            timeout=_timeout(group),
            backend=dist.get_backend(group),
            use_local_synchronization=not everyone,
        )
        if group.rank() in part:
            found = made
    assert isinstance(found, dist.ProcessGroup)
    return found


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """That of a group, for which torch has no public API; None is torch's default."""
    options = getattr(group._get_backend(device_of(group)), "options", None)
    return getattr(options, "_timeout", None)


Nodes = tuple[tuple[int, ...], ...]  # the ranks of a group on each node, in order

_UNSET, _UNREADABLE = -1, -2  # in place of a node's number


def sorted_nodes(nodes: str | Iterable[Iterable[int]]) -> Nodes:
    """Nodes and their ranks in order; ConfigError unless each rank from 0 on is there once.

    >>> sorted_nodes("(0,1),(2,3)")
    ((0, 1), (2, 3))
    """
    try:
        given = literal_eval(nodes) if isinstance(nodes, str) else nodes
        found = tuple(sorted(tuple(sorted(node)) for node in given))
        ranks = sorted(rank for node in found for rank in node)
    except (TypeError, ValueError, SyntaxError):
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
    """This process's node, from torchrun's variables; errors are raised on all ranks later."""
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
