"""Run checks on several ranks: those of the process group, or new processes over Gloo."""

from __future__ import annotations

import pickle
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from laconic.testing._subject import RuleError

_PATIENCE_S = 60.0  # of a rank that waits for another one


def on_ranks(job: Callable[[], None], size: int) -> None:
    """Run job() on every rank: of the process group that there is, or of `size` processes.

    What one of them raises is raised here, RuleError as it is.
    """
    if dist.is_initialized():
        job()
        return
    try:
        pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RuleError(
            f"processes cannot be given what is to be checked: {error}. Define it at the top of a "
            "module, or call the check on all ranks of a process group"
        ) from error
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(["laconic.schedules", "laconic.testing"])  # imported once
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pairs = [context.Pipe(duplex=False) for _ in range(size)]
        started = [
            context.Process(target=_member, args=(job, rank, size, store, send), daemon=True)
            for rank, (_, send) in enumerate(pairs)
        ]
        try:
            for process, (_, send) in zip(started, pairs, strict=True):
                process.start()
                send.close()
            _await([receive for receive, _ in pairs])
        finally:
            for process in started:
                process.kill()
                process.join()


def _await(waiting: list[Connection]) -> None:
    """Until all have ended well; RuleError for the first that has not."""
    while waiting:
        ready = wait(waiting, timeout=2 * _PATIENCE_S)
        if not ready:
            raise RuleError("ranks do not end: one may wait for a message that is never sent")
        for one in ready:
            assert isinstance(one, Connection)
            waiting.remove(one)
            try:
                problem = one.recv()
            except EOFError:
                problem = "a rank ended without a result: its process was killed, or it crashed"
            if problem is not None:
                raise RuleError(problem)


def _member(job: Callable[[], None], rank: int, size: int, store: str, send: Connection) -> None:
    problem = None
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_PATIENCE_S),
        )
        job()
        dist.barrier()
    except RuleError as error:
        problem = str(error)
    except Exception:
        problem = f"on rank {rank} of {size}: {traceback.format_exc()}"
    with suppress(BrokenPipeError):
        send.send(problem)
    send.close()
    dist.destroy_process_group()
