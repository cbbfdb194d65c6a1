"""Spec strings such as "dqsg:bits=4@scatter-reduce" to a codec and its exchange."""

from __future__ import annotations

from typing import TypeVar

from laconic._spec import check_kind, from_spec
from laconic.codecs import Codec, codec
from laconic.errors import ConfigError
from laconic.exchanges._allgather import AllGather
from laconic.exchanges._allreduce import AllReduce
from laconic.exchanges._base import Exchange
from laconic.exchanges._hierarchical import Hierarchical
from laconic.exchanges._nested import Nested
from laconic.exchanges._ring import Ring
from laconic.exchanges._scatter_reduce import ScatterReduce
from laconic.exchanges._sparse import Sparse
from laconic.exchanges._tree import Tree

_Kind = TypeVar("_Kind", bound=type[Exchange])

_BY_NAME: dict[str, type[Exchange]] = {
    kind.name: kind
    for kind in (AllReduce, ScatterReduce, AllGather, Tree, Ring, Sparse, Hierarchical, Nested)
}


def exchange(spec: str | Exchange) -> Exchange:
    """The exchange that a spec such as "ring:pieces=8" names; an exchange is returned as is."""
    return spec if isinstance(spec, Exchange) else from_spec("exchange", spec, _BY_NAME)


def exchanges() -> list[str]:
    """The names that `exchange` accepts."""
    return list(_BY_NAME)


def register_exchange(kind: _Kind) -> _Kind:
    """Let `exchange`, and so `lc.compress`, know an exchange of your own by its name; a decorator.

    `kind` is a frozen dataclass and a subclass of `Exchange`. Register it on every rank, where the
    module that holds it is imported. `laconic.testing.check_exchange` says whether it keeps what
    users rely on.
    """
    check_kind(kind, Exchange, "register_exchange", _BY_NAME.values())
    _BY_NAME[kind.name] = kind
    return kind


def default_exchange(own: Codec) -> Exchange:
    """allreduce for codecs that sum, tree for those that add in pairs, nested for ndqsg.

    scatter-reduce for all others.
    """
    if own.summable:
        return AllReduce()
    if own.nested is not None:
        return Nested()
    return Tree() if own.pairwise else ScatterReduce()


def pair(spec: str | Codec, name: str | Exchange | None = None) -> tuple[Codec, Exchange]:
    """Codec and exchange; ConfigError, with advice, if they do not fit.

    >>> own, way = pair("dqsg:bits=4@allgather")
    >>> str(way)
    'allgather'
    """
    if isinstance(spec, str) and "@" in spec:
        if name is not None:
            raise ConfigError(f"{spec!r} names its exchange; leave exchange= out")
        spec, name = spec.rsplit("@", 1)
    own = codec(spec)
    way = default_exchange(own) if name is None else exchange(name)
    way.check(own)
    return own, way
