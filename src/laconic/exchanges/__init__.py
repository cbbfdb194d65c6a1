"""Exchanges: how encoded tensors travel and add up."""

from __future__ import annotations

from laconic.exchanges._allgather import AllGather
from laconic.exchanges._allreduce import AllReduce
from laconic.exchanges._base import Call, Exchange, Traffic
from laconic.exchanges._hierarchical import Hierarchical
from laconic.exchanges._nested import Nested
from laconic.exchanges._pair import default_exchange, exchange, exchanges, pair
from laconic.exchanges._ring import Ring
from laconic.exchanges._scatter_reduce import ScatterReduce
from laconic.exchanges._sparse import Sparse
from laconic.exchanges._tree import Tree

__all__ = [
    "AllGather",
    "AllReduce",
    "Call",
    "Exchange",
    "Hierarchical",
    "Nested",
    "Ring",
    "ScatterReduce",
    "Sparse",
    "Traffic",
    "Tree",
    "default_exchange",
    "exchange",
    "exchanges",
    "pair",
]
