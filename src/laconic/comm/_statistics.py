"""Statistics with a compression ratio, and as scalars for loggers."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any


class CompressionStats:
    """Statistics with `ratio`, and with `scalars` for loggers."""

    sent_bytes: int  # by this rank
    plain_bytes: int  # that plain synchronous training would have sent

    @property
    def ratio(self) -> float:
        """How many times fewer bytes."""
        return self.plain_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def __str__(self) -> str:
        """What is known, the ratio first."""
        numbers = self.scalars(prefix="").items()
        known = ", ".join(
            f"{name}={value:.{0 if value % 1 == 0 else 3}f}" for name, value in numbers
        )
        return f"{type(self).__name__}({known})"

    def scalars(self, prefix: str = "laconic/") -> dict[str, float]:
        """All that is known and finite, by name; what `log_dict`, `wandb.log` and others take.

        `{"laconic/ratio": 7.1, "laconic/sent_bytes": 53120.0, ..}`: counts and bytes since the
        start, not since the last call.
        """
        numbers = {"ratio": self.ratio, **_numbers(self)}
        return {f"{prefix}{name}": value for name, value in numbers.items() if math.isfinite(value)}


def _numbers(stats: Any) -> dict[str, float]:
    """Fields and own properties that are numbers, those of dataclasses inside included."""
    found: dict[str, float] = {}
    properties = [name for name, one in vars(type(stats)).items() if isinstance(one, property)]
    for name in [*(field.name for field in fields(stats)), *properties]:
        value = getattr(stats, name)
        if is_dataclass(value):
            found |= {f"{name}/{inner}": one for inner, one in _numbers(value).items()}
        elif isinstance(value, (int, float)):
            found[name] = float(value)
    return found
