"""A parameter server: some ranks keep the weights, all others compute gradients."""

from __future__ import annotations

from laconic.server._async_server import Delays
from laconic.server._serving import ServerStats

__all__ = ["Delays", "ServerStats"]
