"""Integrations: laconic in the training loops people have."""

from __future__ import annotations

from laconic.integrations._ddp import HookState, Stats, comm_hook, compress
from laconic.integrations._policy import Policy

__all__ = ["HookState", "Policy", "Stats", "comm_hook", "compress"]
