"""A thread that talks, and the process group that it talks on."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from laconic.exchanges._base import Traffic

_ON_GLOO = 2


class Lane:
    """Buckets that travel one after another, in the same order on all ranks.

    A thread, because a blocking collective inside a future's callback hangs on Gloo; a process
    group of its own, because collectives of one group must come in one order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.traffic = group, Traffic()
        self.plain_bytes, self.seconds = 0, 0.0
        self._failure: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Keep the first error of the thread."""
        self._failure = self._failure or error

    def failure(self) -> Exception | None:
        """What went wrong in the thread since the last call."""
        failure, self._failure = self._failure, None
        return failure

    @cached_property
    def thread(self) -> ThreadPoolExecutor:
        """Started when it is first needed."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="laconic-hook")
        weakref.finalize(self, pool.shutdown, wait=False)
        return pool


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

    For a sub-group torch makes the name from its ranks and from how many groups of these ranks a
    process has: all its ranks must have made as many.
    """
    timeout = timedelta(seconds=timeout_s)
    if group is None or group is dist.group.WORLD:
        made = dist.new_group(timeout=timeout)
    else:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
