"""Hierarchical: full precision inside a node, a codec between nodes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.codecs import Codec
from laconic.errors import ConfigError
from laconic.exchanges._base import _CHUNKS, Call, Exchange
from laconic.exchanges._ending import destroy, on_gloo
from laconic.exchanges._nodes import Nodes, agreed_nodes, device_of, sorted_nodes
from laconic.exchanges._transport import Message, no_values, plain_mean, share, swap
from laconic.exchanges._wires import Sizes, chunks_of

_REST_GRAIN = 4  # plain values: parts start on 16-byte boundaries


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

    Bytes a rank sends: to other nodes inner's for 1/L of the tensor among K ranks (`sent_bytes`);
    inside, 2·(m-1)/m of the plain tensor (`local_bytes`). On nodes larger than the smallest one,
    ranks beyond L own nothing. One node is a plain mean; one rank a node is inner alone.

    `nodes` are the ranks of the group on each node, e.g. ((0, 1), (2, 3)). Without them every rank
    says on which node it is, from what torchrun sets: GROUP_RANK, else its rank less LOCAL_RANK.
    Without torchrun (LOCAL_WORLD_SIZE is not set) every rank counts as a node of its own. `inner`
    is the exchange between nodes, by default the codec's own. Node means go to the codec as fp32,
    or in x's dtype if that makes a shorter wire (none).
    """

    name: ClassVar[str] = "hierarchical"

    nodes: Nodes | None = None
    inner: Exchange | None = None

    def __post_init__(self) -> None:
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

    def mean(self, x: Tensor, codec: Codec, call: Call, rest: Tensor | None = None) -> None:
        self.prepare(call.group)
        inner, team = self._between(codec), _TEAMS[call.group][self.nodes]
        if team.nodes == call.size:
            inner.mean(x, codec, call, rest)
            return
        parts = chunks_of(x, team.lanes)
        plain = chunks_of(no_values(x) if rest is None else rest, team.lanes, _REST_GRAIN)
        near = replace(call, group=team.node or call.group)
        with call.traffic.inside_a_node():
            mine = _scatter(parts, plain, near, weight=team.nodes / call.size)
        if near.rank < team.lanes:
            if team.across is not None:
                far = _far(call, team, team.across, near.rank, parts)
                mine = _as_sent(mine, codec, x.dtype, call)
                _between_nodes(mine, inner, codec, far, plain[near.rank])
            parts[near.rank].copy_(mine)
        with call.traffic.inside_a_node():
            _gather(parts, plain, near)

    def _between(self, codec: Codec) -> Exchange:
        from laconic.exchanges._pair import default_exchange  # which itself knows this class

        return default_exchange(codec) if self.inner is None else self.inner

    def __str__(self) -> str:
        own = {"nodes": self.nodes, "inner": self.inner}
        said = ",".join(f"{key}={value}" for key, value in own.items() if value is not None)
        return f"{self.name}({said})" if said else self.name


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
    parts: Sequence[Tensor], rest: Sequence[Tensor], near: Call, *, weight: float
) -> Tensor:
    """This rank's part, added up over its node in fp32, times weight; rest likewise, in place."""
    own, x = near.rank, parts[0]
    messages = [Message(_bytes(x[:0]), no_values(x))] * near.size
    for j in range(len(parts)):
        if j != own:
            messages[j] = Message(_bytes(parts[j]), rest[j])
    owner = own < len(parts)
    mine, plain = (parts[own], rest[own]) if owner else (x[:0], no_values(x))
    others = [int(i != own) for i in range(near.size)]
    sizes = Sizes(tuple(_bytes(mine).numel() * other for other in others), known=True)
    total = near.scratch.take("node part", mine.numel(), x.device, torch.float32)
    total.copy_(mine).mul_(weight)  # in fp32 before it is weighed
    plain.mul_(weight)
    if near.size == 1:
        return total
    arrived = swap(messages, near, sizes, [plain.numel() * other for other in others])
    for i, message in enumerate(arrived):
        if owner and i != own:
            total.add_(message.wire.view(x.dtype), alpha=weight)
            plain.add_(message.rest, alpha=weight)
    return total


def _between_nodes(mine: Tensor, inner: Exchange, codec: Codec, far: Call, rest: Tensor) -> None:
    """Part and plain values become their means over nodes."""
    if mine.numel():
        inner.mean(mine, codec, far, rest if rest.numel() else None)
    else:
        plain_mean(rest, far)  # of a short tensor some owners have nothing


def _gather(parts: Sequence[Tensor], rest: Sequence[Tensor], near: Call) -> None:
    """Every owner's part and plain values become those of all ranks of the node."""
    if near.size == 1:
        return
    own, x, spare = near.rank, parts[0], near.size - len(parts)
    message = Message(_bytes(x[:0]), no_values(x))
    if own < len(parts):
        message = Message(_bytes(parts[own]), rest[own])
    sizes = Sizes((*(_bytes(part).numel() for part in parts), *[0] * spare), known=True)
    plain = [*(values.numel() for values in rest), *[0] * spare]
    for j, arrived in enumerate(share(message, near, sizes, plain)[: len(parts)]):
        if j != own:
            parts[j].copy_(arrived.wire.view(x.dtype))
            rest[j].copy_(arrived.rest)


def _far(
    call: Call, team: _Team, across: dist.ProcessGroup, lane: int, parts: Sequence[Tensor]
) -> Call:
    """The call of the owners of a part: its parameters, and draws that no other part has."""
    start = sum(part.numel() for part in parts[:lane])
    return replace(
        call,
        group=across,
        places=tuple(call.inside(start, start + parts[lane].numel())),
        first_chunk=call.first_chunk + lane * (_CHUNKS // team.lanes),
    )


def _as_sent(mine: Tensor, codec: Codec, dtype: torch.dtype, call: Call) -> Tensor:
    """fp32 as it is, unless its wire would be longer than that of x's dtype."""
    if codec.nbytes(1024, torch.float32) <= codec.nbytes(1024, dtype):
        return mine
    return call.scratch.take("node part as sent", mine.numel(), mine.device, dtype).copy_(mine)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _team(nodes: Nodes, group: dist.ProcessGroup) -> _Team:
    """The layout of nodes; where ranks are both beside and apart, with groups for either."""
    lanes = min(map(len, nodes))
    if len(nodes) in (1, group.size()):
        return _Team(len(nodes), lanes)
    widest = max(map(len, nodes))
    # a rank that owns nothing is in a group across, too: torch names groups that only members make
    # by how many groups a rank has, and these numbers must stay equal
    columns = tuple(tuple(node[j] for node in nodes if j < len(node)) for j in range(widest))
    return _Team(len(nodes), lanes, _own_group(nodes, group), _own_group(columns, group))


def _disband(team: _Team) -> None:
    """The group that it was made of is gone; on NCCL ranks would have to do this together."""
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
    """That of a group, which torch does not tell in public; None is torch's default."""
    options = getattr(group._get_backend(device_of(group)), "options", None)
    return getattr(options, "_timeout", None)
