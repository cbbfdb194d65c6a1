"""Integrations: laconic in the training loops people have.

`laconic.integrations.lightning` and `laconic.integrations.transformers` have callbacks; they are
imported by name only, because each imports its framework.
"""

from __future__ import annotations

from laconic.exchanges._policy import Policy
from laconic.integrations._common import Handle, Stats
from laconic.integrations._compress import compress
from laconic.integrations._ddp import comm_hook
from laconic.integrations._fsdp import FSDPHandle
from laconic.integrations._logging import log_stats
from laconic.integrations._per_rank import PerRank
from laconic.integrations._ranks import AllRanks
from laconic.integrations._state import HookState

__all__ = [
    "AllRanks",
    "FSDPHandle",
    "Handle",
    "HookState",
    "PerRank",
    "Policy",
    "Stats",
    "comm_hook",
    "compress",
    "log_stats",
]
