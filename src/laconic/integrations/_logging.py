"""Statistics to a logger, by one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from laconic.exchanges._ratio import HasRatio


class HasStats(Protocol):
    """A handle of `lc.compress`, or a schedule such as `lc.SSD`."""

    def stats(self) -> HasRatio:
        """What was done so far."""
        ...


def log_stats(handle: HasStats, add_scalar: Callable[..., Any], step: int | None = None) -> None:
    """Hand `handle.stats()` to a function of name, value and step, one number after another.

    `lc.log_stats(handle, writer.add_scalar, step)` with TensorBoard's SummaryWriter. Loggers that
    take all at once are given `handle.stats().scalars()`: wandb.log, Lightning's log_dict,
    Accelerator.log. Without `step` the count of the statistics is used.
    """
    scalars = handle.stats().scalars(prefix="")
    at = int(scalars.get("steps", 0)) if step is None else step
    for name, value in scalars.items():
        add_scalar(f"laconic/{name}", value, at)
