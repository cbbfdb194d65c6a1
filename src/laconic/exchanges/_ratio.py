"""How many times fewer bytes: what all statistics tell."""

from __future__ import annotations

from typing import Protocol


class Sent(Protocol):
    """Bytes that a rank has sent, and what plain synchronous training would have."""

    @property
    def sent_bytes(self) -> int: ...

    @property
    def plain_bytes(self) -> int: ...


class HasRatio:
    """Statistics with `ratio`."""

    @property
    def ratio(self: Sent) -> float:
        """How many times fewer bytes."""
        return self.plain_bytes / self.sent_bytes if self.sent_bytes else 1.0
