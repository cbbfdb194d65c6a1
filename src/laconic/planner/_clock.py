"""Seconds of things that all ranks do at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

_MOST = 64


def usual(seconds: Sequence[float]) -> float:
    """The mean without the slowest tenth.

    Not the median: where ranks share cores, a thing runs undisturbed or takes twice as long, and
    a mean of both is what steps take.
    """
    kept = sorted(seconds)[: max(1, round(0.9 * len(seconds)))]
    return statistics.mean(kept)


@dataclass(frozen=True)
class Clock:
    """Measures on all ranks of a group; every rank learns the same numbers."""

    group: dist.ProcessGroup
    device: torch.device

    def seconds(self, action: Callable[[], object], patience_s: float) -> float:
        """Of an action in which ranks talk: all start together. Their usual time.

        As many repetitions as `patience_s` allows, 3 to 64; the first two are not counted.
        """
        self._once(action)
        first = self.mean(self._once(action))
        count = max(3, min(_MOST, round(patience_s / max(first, 1e-6))))
        return self.mean(usual([self._once(action) for _ in range(count)]))

    def throughput(self, action: Callable[[], object], patience_s: float) -> float:
        """Seconds of an action on which all ranks work, each for itself, so long.

        The mean over a long loop: where ranks share cores, short actions run undisturbed or not at
        all, and a median would see the former.
        """
        action()
        self._meet()
        start, count = time.perf_counter(), 0
        while count < 3 or time.perf_counter() - start < patience_s:
            action()
            count += 1
        self.finish()
        return self.mean((time.perf_counter() - start) / count)

    def mean(self, value: float) -> float:
        """Over ranks."""
        one = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(one, group=self.group)
        return float(one) / self.group.size()

    def finish(self) -> None:
        """Until the device has done all it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _meet(self) -> None:
        self.mean(0.0)
        self.finish()

    def _once(self, action: Callable[[], object]) -> float:
        self._meet()
        return self.timed(action)

    def timed(self, action: Callable[[], object]) -> float:
        """This rank's seconds of it, once."""
        start = time.perf_counter()
        action()
        self.finish()
        return time.perf_counter() - start
