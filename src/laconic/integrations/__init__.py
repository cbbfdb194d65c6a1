"""Integrations: laconic in the training loops people have.

`laconic.integrations.lightning` and `laconic.integrations.transformers` have callbacks; they are
imported by name only, because each imports its framework.
"""

from __future__ import annotations

from laconic.exchanges._policy import Policy
from laconic.integrations._checkpoint import AllRanks, PerRank
from laconic.integrations._compress import compress as compress  # lc.compress also takes auto
from laconic.integrations._ddp import comm_hook
from laconic.integrations._fsdp import FSDPHandle
from laconic.integrations._handle import (
    DictLogger,
    Handle,
    HasState,
    HasStats,
    MetricsLogger,
    ScalarLogger,
    Stats,
    log_stats,
)
from laconic.integrations._saving import load, save
from laconic.integrations._state import HookState

__all__ = [
    "AllRanks",
    "DictLogger",
    "FSDPHandle",
    "Handle",
    "HasState",
    "HasStats",
    "HookState",
    "MetricsLogger",
    "PerRank",
    "Policy",
    "ScalarLogger",
    "Stats",
    "comm_hook",
    "load",
    "log_stats",
    "save",
]
