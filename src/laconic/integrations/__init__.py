"""Integrations: laconic in the training loops people have."""

from __future__ import annotations

from laconic.exchanges._policy import Policy
from laconic.integrations._common import Handle, Stats
from laconic.integrations._compress import compress
from laconic.integrations._ddp import comm_hook
from laconic.integrations._fsdp import FSDPHandle
from laconic.integrations._state import HookState

__all__ = ["FSDPHandle", "Handle", "HookState", "Policy", "Stats", "comm_hook", "compress"]
