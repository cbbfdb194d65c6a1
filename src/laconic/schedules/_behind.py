"""Work in a lane's thread, behind the main thread's; on CUDA, on a stream of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from laconic.exchanges._lane import Lane


class Ticket:
    """Work that was handed over. `wait` once it is needed; its errors are raised there."""

    def __init__(self, future: Future[Any], device: torch.device) -> None:
        self._future, self._device = future, device

    def wait(self) -> None:
        """Until it is done: what it wrote may be used from here on."""
        event = self._future.result()
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    @property
    def failed(self) -> bool:
        """Whether waiting would raise at once."""
        return self._future.done() and self._future.exception() is not None


class Behind:
    """Jobs run one after another, in the order they were given."""

    def __init__(self, lane: Lane, device: torch.device) -> None:
        self.lane, self._device = lane, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def give(self, job: Callable[[], None]) -> Ticket:
        """Start the job after what the current stream has been given so far."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.current_stream(self._device).record_event()
        return Ticket(self.lane.thread.submit(self._run, job, ready), self._device)

    @torch.no_grad()
    def _run(self, job: Callable[[], None], ready: Any) -> Any:
        start = time.perf_counter()
        try:
            if self._stream is None or ready is None:
                job()
                return None
            with torch.cuda.stream(self._stream):
                ready.wait()
                job()
                return self._stream.record_event()
        finally:
            self.lane.seconds += time.perf_counter() - start


class Turns:
    """Rounds run one after another; the last even and the last odd one can be waited for."""

    def __init__(self, behind: Behind) -> None:
        self._behind = behind
        self._tickets: list[Ticket | None] = [None, None]

    def start(self, step: int, job: Callable[[], None]) -> None:
        """The round of a step."""
        self._tickets[step % 2] = self._behind.give(job)

    def wait(self, step: int) -> None:
        """Until the last round of even, or odd, steps is done."""
        ticket = self._tickets[step % 2]
        if ticket is not None:
            ticket.wait()

    def wait_for_all(self) -> None:
        """Until nothing is on its way."""
        self.wait(0)
        self.wait(1)

    def now(self, job: Callable[[], None]) -> None:
        """Behind all rounds, and wait for it."""
        self._behind.give(job).wait()

    def raise_errors(self) -> None:
        """Those that have happened so far."""
        for ticket in self._tickets:
            if ticket is not None and ticket.failed:
                ticket.wait()
