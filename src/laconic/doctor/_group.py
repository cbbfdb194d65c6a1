"""Process groups that can be made: of this process, or of all ranks, whose links are measured."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from laconic._records import record
from laconic._units import seconds
from laconic.comm._closing import wait_for_gloo_threads
from laconic.doctor._facts import Facts
from laconic.doctor._finding import Finding, fine, named, problem
from laconic.doctor._links import PairCost, measure
from laconic.doctor._meeting import first_line, within

_ROUNDS = 5
_CLOSING_S = 10.0


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """Of a backend on one rank: how long a tiny all-reduce took, or what is wrong."""

    backend: str
    reduce_s: float = 0.0
    wrong: str = ""
    stuck: bool = False  # a thread hangs inside torch
    links: tuple[PairCost, ...] = ()


def try_group(
    backend: str, store: Store, rank: int, size: int, timeout_s: float, links_s: float
) -> GroupState:
    """Make a group, reduce one number, measure links for about `links_s`. Nothing is raised."""
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank % torch.cuda.device_count())
    timeout = timedelta(seconds=timeout_s)

    def run() -> GroupState:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        group = dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup)
        found = GroupState(backend=backend, reduce_s=_reduce_s(device, size))
        if size > 1 and links_s:
            found = replace(found, links=tuple(measure(group, links_s)))
        dist.barrier()  # Gloo aborts a rank whose peer exits while it still listens
        return found

    try:
        found = within(2 * timeout_s + 10 * links_s, run)
    except TimeoutError as error:
        return GroupState(backend=backend, wrong=str(error), stuck=True)
    except Exception as error:  # torch's, of many types; what it says is the finding
        found = GroupState(backend=backend, wrong=first_line(error))
    try:
        if dist.is_initialized():
            within(_CLOSING_S, dist.destroy_process_group)
            wait_for_gloo_threads()
    except TimeoutError:
        return replace(found, stuck=True)
    return found


def check_groups(states: Sequence[tuple[int, GroupState]], size: int) -> Iterator[Finding]:
    """Of all backends that were tried."""
    for backend in dict.fromkeys(state.backend for _, state in states):
        mine = [(rank, state) for rank, state in states if state.backend == backend]
        wrong = {rank: state.wrong for rank, state in mine if state.wrong}
        if not wrong:
            slowest = max(state.reduce_s for _, state in mine)
            ranks = f"{size} rank{'s' * (size != 1)}"
            yield fine("group", f"{backend}, {ranks}: an all-reduce takes {seconds(slowest)}")
        for text in dict.fromkeys(wrong.values()):
            ranks = [rank for rank, told in wrong.items() if told == text]
            debug = "NCCL_DEBUG=INFO" if backend == "nccl" else "TORCH_CPP_LOG_LEVEL=INFO"
            yield problem(
                "group",
                f"{backend} on {named(ranks)}: {text}",
                f"see the lines on addresses; a firewall may close ports; {debug} shows more",
                ranks,
            )


def backends_to_try(rows: Sequence[Facts]) -> list[str]:
    """Gloo, and NCCL where each rank has a GPU of its own."""
    tried = [name for name in ("gloo",) if all(name in row.backends for row in rows)]
    if all("nccl" in row.backends and row.gpus >= row.local_ranks for row in rows):
        tried.append("nccl")
    return tried


def to_json(states: Sequence[GroupState]) -> str:
    """One line."""
    return json.dumps([asdict(state) for state in states])


def from_json(text: str) -> list[GroupState]:
    """ValueError for anything else."""
    return [record(GroupState, one) for one in json.loads(text)]


def _reduce_s(device: torch.device, size: int) -> float:
    """Of one number, the fastest of some rounds; RuntimeError if the sum is wrong."""
    best = float("inf")
    for _ in range(_ROUNDS):
        one = torch.ones(1, device=device)
        start = time.perf_counter()
        dist.all_reduce(one)
        total = float(one)
        best = min(best, time.perf_counter() - start)
        if total != size:
            raise RuntimeError(f"the sum of {size} ones is {total:g}")
    return best
