"""Numbers that all ranks get to know, without waiting for them when they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from laconic.exchanges._lane import Lane
from laconic.integrations._ddp import start
from laconic.planner._auto_decide import Table


class Shared:
    """Every rank's numbers, on their way to all ranks: each in a row of its own among zeros."""

    def __init__(
        self,
        numbers: Sequence[float],
        group: dist.ProcessGroup,
        lane: Lane | None,
        device: torch.device,
    ) -> None:
        rows = torch.zeros(group.size(), len(numbers), dtype=torch.float64)
        rows[group.rank()] = torch.tensor(numbers, dtype=torch.float64)
        self._rows = table = rows.to(device)
        if lane is None:
            self._work: Any = group.allreduce([table])
        else:
            self._work = start(lane, table, lambda: _wait(lane.group.allreduce([table])))

    def table(self) -> Table:
        """Wait for them."""
        self._work.wait()
        return self._rows.tolist()


def _wait(work: Any) -> None:
    work.wait()
