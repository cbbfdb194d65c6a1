"""Exchanges: how encoded tensors travel and add up."""

from __future__ import annotations

from laconic._cost import EncodingError, Move, Pause, TensorLoad, Work
from laconic._scratch import Scratch
from laconic.comm._context import ExchangeContext, ExchangeMemory, Traffic
from laconic.exchanges._allgather import AllGather
from laconic.exchanges._allreduce import AllReduce
from laconic.exchanges._base import Exchange
from laconic.exchanges._error_report import ParameterBudget
from laconic.exchanges._hierarchical import Hierarchical
from laconic.exchanges._nested import Nested
from laconic.exchanges._pair import (
    default_exchange,
    exchange,
    exchanges,
    pair,
    register_exchange,
)
from laconic.exchanges._policy import Choice, Chooser, Policy
from laconic.exchanges._ring import Ring
from laconic.exchanges._scatter_reduce import ScatterReduce
from laconic.exchanges._sparse import Sparse
from laconic.exchanges._tree import Tree

__all__ = [
    "AllGather",
    "AllReduce",
    "Choice",
    "Chooser",
    "EncodingError",
    "Exchange",
    "ExchangeContext",
    "ExchangeMemory",
    "Hierarchical",
    "Move",
    "Nested",
    "ParameterBudget",
    "Pause",
    "Policy",
    "Ring",
    "ScatterReduce",
    "Scratch",
    "Sparse",
    "TensorLoad",
    "Traffic",
    "Tree",
    "Work",
    "default_exchange",
    "exchange",
    "exchanges",
    "pair",
    "register_exchange",
]
