"""Threads, sockets and process groups are given back; programs end with the code they should."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import End, Programs
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

import laconic as lc
from laconic.comm import _closing

BEGIN = """
import torch, torch.distributed as dist, laconic as lc
from torch import nn
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = nn.Linear(200, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def compute(model=model):
    model(torch.randn(4, 200)).square().mean().backward()
"""


Ends = Callable[..., list[list[End]]]


@pytest.fixture
def ends(programs: Programs, tmp_path: Path) -> Ends:
    """How ranks end, in several runs of what comes after BEGIN."""
    return lambda script, *ranks, **options: programs.ends(
        BEGIN + script, *ranks, folder=tmp_path, **options
    )


def codes(runs: list[list[End]]) -> list[list[int]]:
    for run in runs:
        for one in run:
            assert "terminate called" not in one.text
    return [[one.code for one in run] for run in runs]


# Programs end


def test_a_server_and_its_workers_end_without_a_barrier(ends: Ends) -> None:
    """The server's threads wait for workers that have left, and these end just then."""
    script = """
opt = lc.AsyncSGD(optimizer, model)
if opt.serves:
    opt.serve()
else:
    for _ in range(3):
        compute(), opt.step(), opt.zero_grad()
    opt.leave()
dist.destroy_process_group()
"""
    assert codes(ends(script, 3, times=6)) == [[0, 0, 0]] * 6


def test_a_worker_may_go_on_long_after_its_server_has_ended(ends: Ends) -> None:
    script = """
import pathlib, time
opt = lc.AsyncSGD(optimizer, model)
if opt.serves:
    opt.serve()
    server = __import__("os").getpid()
    pathlib.Path("server.new").write_text(str(server))
    pathlib.Path("server.new").rename("server")
else:
    opt.leave()
    while not pathlib.Path("server").exists():
        time.sleep(0.01)
    server = int(pathlib.Path("server").read_text())
    with __import__("contextlib").suppress(OSError):  # gone, once it has been waited for
        while "State:\\tZ" not in pathlib.Path(f"/proc/{server}/status").read_text():
            time.sleep(0.01)
"""
    assert codes(ends(script, 2)) == [[0, 0]]


@pytest.mark.parametrize("destroy", [False, True])
def test_what_is_under_way_when_a_program_ends_does_not_abort_it(ends: Ends, destroy: bool) -> None:
    script = """
opt = lc.SSD(optimizer, model, warmup_steps=0)
other = nn.Linear(200, 100)
local = lc.LocalSGD(torch.optim.SGD(other.parameters(), lr=0.01), other, period=1, overlap=True)
for _ in range(3):
    compute(), opt.step(), opt.zero_grad()
    compute(other), local.step(), local.zero_grad()
"""
    script += "dist.destroy_process_group()\n" * destroy
    assert codes(ends(script, 2, times=3)) == [[0, 0]] * 3


def test_gloo_s_own_threads_are_waited_for(ends: Ends) -> None:
    """DDP keeps its group. Its threads run last here, as on a machine with much else to do."""
    script = """
import os, pathlib
from torch.nn.parallel import DistributedDataParallel
first = DistributedDataParallel(nn.Linear(200, 100))
lc.compress(first, "dqsg", policy=lc.Policy(min_numel=0)).close()
plain = DistributedDataParallel(model)
for task in pathlib.Path("/proc/self/task").iterdir():
    os.sched_setaffinity(int(task.name), {min(os.sched_getaffinity(0))})
    if (task / "comm").read_text() == "pt_gloo_runloop\\n":
        os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
compute(plain)
dist.destroy_process_group()
"""
    assert codes(ends(script, 2, times=5)) == [[0, 0]] * 5


LOCK, GIL = "202 0x7f 0x189 0x0 0x0 0x0 0xff", "202 0x7f 0x189 0x0 0x7fee 0x0 0xff"


@pytest.mark.parametrize(
    ("name", "state", "call", "idle"),
    [
        ("pt_gloo_runloop", "S", LOCK, True),
        ("pt_gloo_runloop", "S", GIL, False),  # asks for it again after a time limit
        ("pt_gloo_runloop", "R", "running", False),
        ("python", "R", "running", True),
        ("pt_gloo_runloop", "S", None, True),  # it has ended meanwhile
    ],
)
def test_a_thread_that_asks_for_the_gil_is_not_idle(
    name: str,
    state: str,
    call: str | None,
    idle: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = tmp_path / "7"
    task.mkdir()
    (task / "comm").write_text(f"{name}\n")
    (task / "stat").write_text(f"7 ({name}) {state} 1 2")
    if call is not None:
        (task / "syscall").write_text(f"{call}\n")
    monkeypatch.setattr(_closing, "_TASKS", tmp_path)
    assert all(map(_closing._is_idle, _closing._gloo_threads())) == idle


def test_the_last_steps_exchange_is_waited_for(ends: Ends) -> None:
    """A rank that is ahead at the end of the program takes part in what the others still need."""
    script = """
import time
opt = lc.LocalSGD(optimizer, model, period=1, overlap=True, overlap_steps=1)
compute(), opt.step()
if rank == 0:
    store = dist.distributed_c10d._get_default_store()
    store.wait(["the other one has ended, as far as it can"])
    opt.synchronize.__self__._mean.wait()
else:
    import threading
    def tell():
        threading.main_thread().join()
        store = dist.distributed_c10d._get_default_store()
        store.set("the other one has ended, as far as it can", "yes")
    threading.Thread(target=tell).start()
"""
    assert codes(ends(script, 2)) == [[0, 0]]


SCHEDULES = {
    "ssd": "opt = lc.SSD(optimizer, model, warmup_steps=0)",
    "local": "opt = lc.LocalSGD(optimizer, model, period=1, overlap=True)",
    "ddp": """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(model)
handle = lc.compress(model, "dqsg", policy=lc.Policy(min_numel=0))
opt = optimizer""",
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("error", ["RuntimeError('mine')", "KeyboardInterrupt"])
def test_an_error_on_one_rank_ends_it_at_once_and_then_the_others(
    ends: Ends, name: str, error: str
) -> None:
    """Well before the five minutes in which they would wait for each other."""
    script = f"""
{SCHEDULES[name]}
for step in range(10**9):
    if rank == 0 and step == 3:
        raise {error}
    compute(model), opt.step(), opt.zero_grad()
"""
    (run,) = ends(script, 2)
    first, second = run
    assert first.code in (1, -2) and error[:12] in first.text
    assert second.code == 1 and second.later_s < 250
    assert all("terminate called" not in one.text for one in run)


def test_an_error_while_peers_never_come_ends_a_rank_at_once(ends: Ends) -> None:
    """Rank 0's exchange is under way and rank 1 never starts it."""
    script = """
opt = lc.LocalSGD(optimizer, model, period=1, overlap=True)
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    compute(), opt.step()
    raise RuntimeError("mine")
import pathlib, os, time
parent = os.getppid()
def peers_are_gone():
    states = [pathlib.Path(f"/proc/{one}/stat").read_text() for one in siblings()]
    return all(") Z " in state for state in states)
def siblings():
    children = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(one) for one in children if int(one) != os.getpid()]
deadline = time.monotonic() + 280
while not peers_are_gone():
    assert time.monotonic() < deadline
    time.sleep(0.01)
"""
    (run,) = ends(script, 2)
    assert [one.code for one in run] == [1, 0], run


# What was taken is given back


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(200, 100)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(model: nn.Module, opt: Any = None) -> None:
    model(torch.randn(4, 200)).square().mean().backward()
    if opt is not None:
        opt.step()


def ddp(spec: str) -> tuple[Callable[[], object], Any]:
    model = DistributedDataParallel(linear()[0])
    handle = lc.compress(model, spec)
    return lambda: train(model), handle


def scheduled(make: Callable[..., Any], **options: Any) -> tuple[Callable[[], object], Any]:
    model, optimizer = linear()
    opt = make(optimizer, model, **options)
    return lambda: train(model, opt), opt


def svrg() -> tuple[Callable[[], object], Any]:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    made = lc.QSVRG(linear()[0], loss, torch.randn(8, 200), lr=0.01, steps=2)
    return made.epoch, made


OWNERS: dict[str, Callable[[], tuple[Callable[[], object], Any]]] = {
    "compress": lambda: ddp("dqsg"),
    "auto": lambda: ddp("auto"),
    "ssd": lambda: scheduled(lc.SSD, warmup_steps=0),
    "local": lambda: scheduled(lc.LocalSGD, period=1, overlap=True),
    "svrg": svrg,
}


def held() -> tuple[int, int, int]:
    """Threads, open files, and process groups that torch knows."""
    gc.collect()
    groups = dist.distributed_c10d._world.pg_map
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(groups)


@pytest.mark.parametrize("name", OWNERS)
def test_close_gives_back_what_was_taken(alone: None, name: str) -> None:
    step, owner = OWNERS[name]()
    step()
    owner.close()
    del step, owner  # but for what torch keeps
    before = held()
    step, owner = OWNERS[name]()
    step()
    assert held() > before
    owner.close()
    owner.close()
    assert held() == before
    with pytest.raises((lc.ConfigError, RuntimeError), match=r"closed.*make a new one"):
        step()


@pytest.mark.parametrize("name", OWNERS)
def test_so_does_dropping_it(alone: None, name: str) -> None:
    def use() -> None:
        step, _ = OWNERS[name]()
        step()

    use()
    threads_end()
    before = held()
    for _ in range(5):
        use()
    threads_end()
    assert held() == before


def threads_end() -> None:
    """Those of ours that nobody uses any more."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "laconic-hook":
            thread.join(30)


def test_torch_may_destroy_all_groups_first(alone: None) -> None:
    step, owner = OWNERS["ssd"]()
    step()
    owner.wait()
    closed = OWNERS["ssd"]()[1]
    closed.close()
    dist.destroy_process_group()
    owner.close()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    OWNERS["ssd"]()[0]()
