"""Jobs on several real processes: started once, every job's answer checked on its own."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import PATIENCE_S

PATIENCE = timedelta(seconds=PATIENCE_S)
Job = Callable[[int], Any]
Answers = dict[tuple[int, str], Any]


def processes() -> Any:
    """Starts processes by forking one that has imported torch and loaded kernels (`warm`).

    Importing takes seconds of a core, for each of several hundred ranks. It keeps the environment
    that it was first started with.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    with pytest.MonkeyPatch.context() as patch:  # where it looks for `warm`
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    return context


def run(jobs: Sequence[Job], size: int, folder: Path) -> Answers:
    """job(rank) of every job on every rank, over Gloo; a job that raises fails the caller."""
    context = processes()
    results = context.Queue()
    started = [
        context.Process(target=_worker, args=(rank, size, str(folder / "store"), jobs, results))
        for rank in range(size)
    ]
    for process in started:
        process.start()
    answers = {}
    try:
        for _ in range(size * len(jobs)):
            rank, name, value, problem = pickle.loads(results.get(timeout=PATIENCE_S))
            assert problem is None, f"rank {rank}, {name}: {problem}"
            answers[rank, name] = value
        for process in started:
            process.join(PATIENCE_S)
            assert process.exitcode == 0
    finally:
        for process in started:
            process.kill()
    return answers


@contextmanager
def member(rank: int, size: int, store: str) -> Iterator[None]:
    """One of `size` ranks over Gloo, in a process of its own."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=PATIENCE,
    )
    torch.set_num_threads(1)
    yield
    dist.barrier()
    dist.destroy_process_group()


def _put(results: Any, *answer: Any) -> None:
    # torch's queues send a descriptor of a tensor, lost if its sender ends before it is read
    results.put(pickle.dumps(answer))


def _worker(rank: int, size: int, store: str, jobs: Sequence[Job], results: Any) -> None:
    with member(rank, size, store):
        try:
            for name, answer in answered(jobs, rank):
                _put(results, rank, name, answer, None)
        except BaseException:  # those of pytest.fail, too
            _put(results, rank, "a job", None, traceback.format_exc())
            results.close()
            results.join_thread()
            os._exit(1)  # peers may wait for this rank


def answered(jobs: Sequence[Job], rank: int) -> Iterator[tuple[str, Any]]:
    """Each job's name and its answer; ranks begin a job together."""
    for job in jobs:
        yield job.__name__, job(rank)
        dist.barrier()


def shared(jobs: Sequence[Job], size: int) -> Any:
    """A fixture: the answers of jobs on so many ranks, started once for a module."""

    @pytest.fixture(scope="module")
    def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
        return run(jobs, size, tmp_path_factory.mktemp("ranks"))

    return answers


def shared_in_groups(
    job: Job, outcomes: Callable[[Any], Any], groups: Sequence[tuple[int, ...]]
) -> Any:
    """The same of a job that is `in_groups`: for each group in turn, what its ranks found."""
    answers: Answers = {}

    @pytest.fixture(scope="module", params=groups, ids=lambda members: f"{len(members)} ranks")
    def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
        if not answers:
            folder = tmp_path_factory.mktemp("ranks")
            alone(outcomes, folder)
            answers.update(run([job], 1 + max(map(max, groups)), folder))
        return [answers[rank, job.__name__][len(request.param)] for rank in request.param]

    return found


def in_groups(
    outcomes: Callable[[Any], Any], groups: Sequence[tuple[int, ...]], rank: int
) -> dict[int, Any]:
    """What a rank finds in each group that it is in, by the group's size."""
    found = {}
    for members in groups:
        group = dist.new_group(list(members))
        if rank in members:
            found[len(members)] = outcomes(group)
    return found


def alone(outcomes: Callable[[Any], Any], folder: Path) -> None:
    """Once in a world of one: kernels are compiled before ranks would wait for each other."""
    with member(0, 1, str(folder / "alone")):
        outcomes(dist.group.WORLD)
