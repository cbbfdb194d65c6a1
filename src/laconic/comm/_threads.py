"""Threads that communicate, the process groups they use, and the work that is in flight there."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any

import torch
import torch.distributed as dist

from laconic.comm._closing import abort, close_at_exit, destroy, failing, on_gloo
from laconic.comm._context import Traffic
from laconic.errors import ConfigError

_ON_GLOO = 2


class SerialThread:
    """Jobs run one after another, in the order they were given, in a thread of their own.

    A daemon, which nothing but `join` waits for: at exit Python would wait forever for others,
    before anything could end them.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._jobs = SimpleQueue()
        self._thread = Thread(target=_work, args=(self._jobs,), daemon=True, name=name)
        self._thread.start()

    def submit(self, job: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run it after all others."""
        future: Future[Any] = Future()
        self._jobs.put((future, job, arguments))
        return future

    def end(self) -> None:
        """End after what was submitted; does not wait."""
        self._jobs.put(None)

    def join(self) -> None:
        """Until it has ended; a job of its own does not wait for itself."""
        if self._thread is not current_thread():
            self._thread.join()


def _work(jobs: SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        _run(*job)
        del job  # or its tensors would live until the next one


def _run(future: Future[Any], job: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        future.set_result(job(*arguments))
    except BaseException as error:
        future.set_exception(error)


class CommLane:
    """Buckets that travel one after another, in the same order on all ranks.

    A thread, because a blocking collective inside a future's callback hangs on Gloo; a process
    group of its own, because collectives of one group must come in one order. `close` gives both
    back, on all ranks; so does, on Gloo, the end of the last reference.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._own = _Own(group)
        self.size, self.rank, self.traffic = group.size(), group.rank(), Traffic()
        self.plain_bytes, self.seconds = 0, 0.0
        self._failure: Exception | None = None
        weakref.finalize(self, self._own.drop).atexit = False
        close_at_exit(self)

    def fail(self, error: Exception) -> None:
        """Keep the first error of the thread."""
        self._failure = self._failure or error

    def failure(self) -> Exception | None:
        """What went wrong in the thread since the last call; ConfigError if it was closed."""
        self.check_open()
        failure, self._failure = self._failure, None
        return failure

    @property
    def group(self) -> dist.ProcessGroup:
        """Ours alone."""
        self.check_open()
        assert self._own.group is not None
        return self._own.group

    def check_open(self) -> None:
        """ConfigError after `close`."""
        if self._own.group is None:
            raise ConfigError(
                "this was closed, and its threads and process groups are gone: close() comes after "
                "the last step; make a new one to continue"
            )

    @property
    def thread(self) -> SerialThread:
        """Started when it is first needed."""
        if self._own.thread is None:
            self.check_open()
            self._own.thread = SerialThread("laconic-hook")
        return self._own.thread

    def close(self) -> None:
        """End the thread and destroy the group; call it on all ranks, once is enough.

        Waits for what is in flight, which ends within the group's time-out. Where the program
        fails, it is aborted: peers see that at once.
        """
        self._own.close()


class _Own:
    """What a lane gives back. Jobs that were submitted use the group until the thread has ended."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: dist.ProcessGroup | None = group
        self.thread: SerialThread | None = None

    def close(self) -> None:
        try:
            if failing():
                self._abort()
            if self.thread is not None:
                self.thread.end()
                self.thread.join()
        except BaseException:  # a Ctrl-C while waiting
            self._abort()
            raise
        self._destroy()

    def drop(self) -> None:
        """It is no longer in use: wait for nothing, ranks come here at different times."""
        if self.group is None:
            return
        give_back = self._destroy if on_gloo(self.group) else self._forget
        if self.thread is None:
            give_back()
            return
        self.thread.submit(give_back)
        self.thread.end()
        close_at_exit(self)  # or the thread may still be at it

    def _abort(self) -> None:
        if self.group is not None:
            abort(self.group)

    def _forget(self) -> None:
        self.group = None

    def _destroy(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            destroy(group)


def lanes(
    group: dist.ProcessGroup | None, device: torch.device, timeout_s: float
) -> tuple[CommLane, ...]:
    """As many as `lane_count` says, each with a process group of its own."""
    count = lane_count(group, device)
    return tuple(CommLane(own_group(group, timeout_s)) for _ in range(count))


def lane_count(group: dist.ProcessGroup | None, device: torch.device) -> int:
    """On Gloo two, so that one bucket is encoded or decoded while another one is on the wire.

    On CUDA one: kernels and transfers overlap by themselves there, and NCCL may dead-lock when two
    threads use two groups at once.
    """
    gloo = dist.get_backend(group) == "gloo" and device.type == "cpu"
    return _ON_GLOO if gloo else 1


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors that a group exchanges may lie."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def own_group(group: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup:
    """A group of the same ranks for us alone: others run their collectives in another thread.

    For a sub-group torch makes the name from its ranks and from how many groups a process has: all
    its ranks must have made as many (`destroy` keeps the count).
    """
    timeout = timedelta(seconds=timeout_s)
    if group is None or group is dist.group.WORLD:
        made = dist.new_group(timeout=timeout)
    else:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


class Work:
    """Work that was submitted. `wait` when it is needed; its errors are raised there."""

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


class CommStream:
    """Work in a lane's thread, overlapped with the main thread's; on CUDA, on a stream of its own.

    Jobs run one after another, in the order they were given.
    """

    def __init__(self, lane: CommLane, device: torch.device) -> None:
        self.lane, self._device = lane, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, job: Callable[[], None]) -> Work:
        """Start the job after what the current stream has been given so far."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.current_stream(self._device).record_event()
        return Work(self.lane.thread.submit(self._run, job, ready), self._device)

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


class InFlight:
    """Rounds run one after another; the last of even and of odd steps can be waited for."""

    def __init__(self, stream: CommStream) -> None:
        self._stream = stream
        self._works: list[Work | None] = [None, None]

    def start(self, step: int, job: Callable[[], None]) -> None:
        """The round of a step."""
        self._works[step % 2] = self._stream.submit(job)

    def wait(self, step: int) -> None:
        """Until the last round of even, or odd, steps is done."""
        work = self._works[step % 2]
        if work is not None:
            work.wait()

    def wait_for_all(self) -> None:
        """Until nothing is in flight."""
        self.wait(0)
        self.wait(1)

    def now(self, job: Callable[[], None]) -> None:
        """After all rounds, and wait for it."""
        self._stream.submit(job).wait()

    def raise_errors(self) -> None:
        """Those that have happened so far."""
        for work in self._works:
            if work is not None and work.failed:
                work.wait()
