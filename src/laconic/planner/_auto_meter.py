"""When steps happen: host clock on a CPU, events on CUDA, which nobody waits for until asked."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

_KEPT = 128  # steps


@dataclass
class _Step:
    """Moments of a step: its first bucket's hook call, its last one's, the end of the exchange."""

    spec: str
    first: Any
    last: Any = None
    end: Any = None


class Meter:
    """Times of steps. A step lasts from one last bucket's hook call to the next one's."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._steps: deque[_Step] = deque(maxlen=_KEPT)

    def now(self) -> float:
        """Seconds; all that is on the device's current stream has happened."""
        if self._cuda:
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter()

    def first(self, spec: str) -> None:
        """The first bucket of a step is handed over."""
        self._steps.append(_Step(spec, self._stamp()))

    def last(self) -> None:
        """The last one is."""
        self._steps[-1].last = self._stamp()

    def end(self) -> None:
        """Its exchange is over, or on CUDA is so where the current stream now is."""
        self._steps[-1].end = self._stamp()

    def times(self, spec: str, count: int) -> list[float]:
        """Seconds of the newest so many steps of a strategy, behind its first; NaN for missing."""
        found = [
            _between(a.last, b.last)
            for a, b in pairwise(self._steps)
            if a.spec == b.spec == spec and a.last is not None and b.last is not None
        ]
        return _newest(found, count)

    def waits(self, spec: str, count: int) -> list[float]:
        """Seconds that the exchange was exposed, of the newest steps that have ended."""
        mine = [step for step in self._steps if step.spec == spec and step.end is not None]
        return _newest([_between(step.last, step.end) for step in mine], count)

    def spans(self, spec: str, count: int) -> list[float]:
        """Seconds from the first hook call of a step to its last."""
        mine = [step for step in self._steps if step.spec == spec and step.last is not None]
        return _newest([_between(step.first, step.last) for step in mine], count)

    def typical(self, spec: str) -> float:
        """The median step of a strategy, of those that the device is known to have done."""
        found = [seconds for seconds in self.times(spec, _KEPT) if math.isfinite(seconds)]
        return statistics.median(found) if found else math.nan

    def settle(self) -> None:
        """Wait until the device has come to the newest hook call: times are then all there."""
        if self._cuda and self._steps and self._steps[-1].last is not None:
            self._steps[-1].last.synchronize()

    def _stamp(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _between(start: Any, end: Any) -> float:
    """Seconds; NaN where a device has not come so far."""
    if isinstance(start, float):
        return end - start
    return 1e-3 * start.elapsed_time(end) if start.query() and end.query() else math.nan


def _newest(values: list[float], count: int) -> list[float]:
    return [math.nan] * max(0, count - len(values)) + values[-count:]
