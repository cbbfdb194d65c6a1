"""How threads and process groups end: by `close()`, at exit, or with their owner.

A thread that is inside torch while the interpreter ends aborts the process: it asks for the GIL,
Python ends it there, and C++ does not let a thread end inside its destructors ("terminate called
without an active exception"). So no thread of ours may be left by then, and none may wait there
for peers that are not coming. A thread of torch's may: DDP keeps its process group, whose Gloo
threads ask for the GIL when they drop the last operation, after its waiter has resumed.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Protocol
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_CPU = torch.device("cpu")
_SOON = timedelta(milliseconds=1)
_UNUSED_TAG = 0x1AC0
_GLOO_THREAD = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_PATIENCE_S = 2.0  # for a Gloo thread to drop what it has finished
_c10d: Any = distributed_c10d


class Closable(Protocol):
    """What owns threads or process groups."""

    def close(self) -> None:
        """Give them back; once is enough."""
        ...


_open: list[ref[Any]] = []


def close_at_exit(owner: Closable) -> None:
    """Unless it is gone before the process ends; what was made last is closed first."""
    _watch(os.getpid())
    _open[:] = [one for one in _open if one() is not None]
    _open.append(ref(owner))


@lru_cache(maxsize=1)
def _watch(process: int) -> None:
    """Once for a process: threads do not survive a fork."""
    atexit.register(_close_all, process)
    # children of multiprocessing end without atexit, but with this
    Finalize(None, _close_all, args=(process,), exitpriority=100)


def _close_all(process: int) -> None:
    if process == os.getpid():
        while _open:
            owner = _open.pop()()
            if owner is not None:
                owner.close()
        wait_for_gloo_threads()


def wait_for_gloo_threads() -> None:
    """Until torch's Gloo threads are idle, as between operations; where there is a /proc.

    The GIL is free while this waits, so that a thread that asks for it gets it.
    """
    end, idle = time.monotonic() + _PATIENCE_S, 0
    while idle < 2 and time.monotonic() < end:
        idle = idle + 1 if all(map(_is_idle, _gloo_threads())) else 0
        time.sleep(0.001)


def _gloo_threads() -> list[Path]:
    """Those of this process, by their folders in /proc."""
    found = []
    for task in _TASKS.glob("*"):
        with suppress(OSError):  # it has just ended
            found += [task] if (task / "comm").read_text().strip() == _GLOO_THREAD else []
    return found


def _is_idle(task: Path) -> bool:
    """Whether a thread waits without a time limit, for work; who asks for the GIL has a limit.

    /proc has the call that a thread sleeps in: its number and arguments, and of futex, which all
    locks are made of, the fourth argument is the limit, 0 for none.
    """
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has just ended
        return True
    try:
        call = (task / "syscall").read_text().split()
    except OSError:  # so it has, or the kernel does not tell
        call = []
    return state == "S" and (len(call) < 5 or call[4] == "0x0")


def failing() -> bool:
    """Whether an error is being handled, or has ended the program: peers may never answer."""
    return sys.exc_info()[0] is not None or hasattr(sys, "last_type")


def break_off(backend: Any) -> None:
    """End what a Gloo backend is waiting for: here with an error, on its peers with another.

    Its own `abort` does nothing. A message that does not come in time does: Gloo then closes the
    connections of the whole group.
    """
    if backend.size() > 1:
        with suppress(RuntimeError):
            peer = (backend.rank() + 1) % backend.size()
            backend.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(_SOON)


def abort(group: dist.ProcessGroup) -> None:
    """End what a process group is waiting for, on any backend."""
    with suppress(RuntimeError):  # NCCL has no backend for host memory
        break_off(group._get_backend(_CPU))
    if not on_gloo(group):
        with suppress(RuntimeError):
            group.abort()


def on_gloo(group: dist.ProcessGroup) -> bool:
    """Whether its backend is Gloo; others take part in ending a group, all ranks at once."""
    return group.name() == "gloo"


def destroy(group: dist.ProcessGroup) -> None:
    """A process group of ours, unless torch has destroyed it with all others.

    torch names some groups by how many a process has, and a name must not come again: a gravestone
    keeps the count.
    """
    world = _c10d._world
    if group in world.pg_map:
        name = world.pg_names[group]
        dist.destroy_process_group(group)
        world.pg_names[_Gravestone()] = name


class _Gravestone:
    """What torch asks of every group when it destroys them all."""

    def shutdown(self) -> None:
        pass

    abort = shutdown

    def _get_backend(self, device: torch.device) -> None:
        raise RuntimeError("this process group was destroyed")
