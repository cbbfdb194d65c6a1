"""Texts such as "dqsg:bits=4@scatter-reduce" to a codec and the exchange that carries it."""

from __future__ import annotations

from difflib import get_close_matches

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

_BY_NAME: dict[str, type[Exchange]] = {
    kind.name: kind
    for kind in (AllReduce, ScatterReduce, AllGather, Tree, Ring, Sparse, Hierarchical, Nested)
}


def exchange(name: str | Exchange) -> Exchange:
    """The exchange of that name; an exchange is returned as is."""
    if isinstance(name, Exchange):
        return name
    kind = _BY_NAME.get(name.strip())
    if kind is None:
        close = get_close_matches(name, _BY_NAME, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"no exchange is called {name!r}; {hint}there are {', '.join(_BY_NAME)}")
    return kind()


def exchanges() -> list[str]:
    """The names that `exchange` accepts."""
    return list(_BY_NAME)


def default_exchange(own: Codec) -> Exchange:
    """allreduce for codecs that sum, tree for those that add in pairs, nested for ndqsg.

    scatter-reduce for all others.
    """
    if own.summable:
        return AllReduce()
    if own.name == "ndqsg":
        return Nested()
    return Tree() if hasattr(own, "reduce") else ScatterReduce()


def pair(spec: str | Codec, name: str | Exchange | None = None) -> tuple[Codec, Exchange]:
    """Codec and exchange; ConfigError, with advice, if they do not go together.

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
