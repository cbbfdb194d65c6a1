"""A thread that talks, and the process group that it talks on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any

import torch
import torch.distributed as dist

from laconic.errors import ConfigError
from laconic.exchanges._base import Traffic
from laconic.exchanges._ending import abort, close_at_exit, destroy, failing, on_gloo

_ON_GLOO = 2


class SerialThread:
    """Jobs run one after another, in the order they were given, in a thread of their own.

    A daemon, which nothing but `join` waits for: Python would wait without end for others, before
    anybody could tell them that it is over.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._jobs = SimpleQueue()
        self._thread = Thread(target=_work, args=(self._jobs,), daemon=True, name=name)
        self._thread.start()

    def submit(self, job: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run it behind all others."""
        future: Future[Any] = Future()
        self._jobs.put((future, job, arguments))
        return future

    def end(self) -> None:
        """End behind what was submitted; does not wait."""
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


class Lane:
    """Buckets that travel one after another, in the same order on all ranks.

    A thread, because a blocking collective inside a future's callback hangs on Gloo; a process
    group of its own, because collectives of one group must come in one order. `close` gives both
    back, on all ranks; so does, on Gloo, the end of the last reference.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._own = _Own(group)
        self.size, self.traffic = group.size(), Traffic()
        self.plain_bytes, self.seconds = 0, 0.0
        self._failure: Exception | None = None
        weakref.finalize(self, self._own.drop).atexit = False
        close_at_exit(self)

    def fail(self, error: Exception) -> None:
        """Keep the first error of the thread."""
        self._failure = self._failure or error

    def failure(self) -> Exception | None:
        """What went wrong in the thread since the last call."""
        failure, self._failure = self._failure, None
        return failure

    @property
    def group(self) -> dist.ProcessGroup:
        """Ours alone."""
        if self._own.group is None:
            raise ConfigError(
                "this was closed, and its threads and process groups are gone: close() comes after "
                "the last step; make a new one to go on"
            )
        return self._own.group

    @property
    def thread(self) -> SerialThread:
        """Started when it is first needed."""
        if self._own.thread is None:
            assert self.group is not None  # or it was closed
            self._own.thread = SerialThread("laconic-hook")
        return self._own.thread

    def close(self) -> None:
        """End the thread and destroy the group; call it on all ranks, once is enough.

        Waits for what is under way, which ends within the group's time-out. Where the program
        fails, it is broken off: peers see that at once.
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
        """Nobody uses it any more: wait for nothing, ranks come here at different times."""
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
) -> tuple[Lane, ...]:
    """As many as `lane_count` says, each with a process group of its own."""
    count = lane_count(group, device)
    return tuple(Lane(own_group(group, timeout_s)) for _ in range(count))


def lane_count(group: dist.ProcessGroup | None, device: torch.device) -> int:
    """On Gloo two, so that one bucket is encoded or decoded while another one is on the wire.

    On CUDA one: kernels and transfers overlap by themselves there, and NCCL may dead-lock when two
    threads use two groups at once.
    """
    gloo = dist.get_backend(group) == "gloo" and device.type == "cpu"
    return _ON_GLOO if gloo else 1


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
