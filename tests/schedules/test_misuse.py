"""Calls that all ranks must make, made by one: an error on every rank, soon, that names them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from programs import Programs
from torch import Tensor, nn

import laconic as lc

SIZE, BEFORE = 3, 5
TIMEOUT_S = 300.0  # of schedules: no error may need it


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 10))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def data(rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(rank))
    return x, x[:, :10].argmax(1)


def everywhere(name: str, parameter: nn.Parameter) -> bool:
    return True


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def ssd(**settings: Any) -> Callable[[nn.Module, int], Any]:
    common: dict[str, Any] = {"period": 2, "warmup_steps": 2, "timeout_s": TIMEOUT_S}
    return lambda model, rank: lc.SSD(sgd(model), model, **{**common, **settings})


def local(**settings: Any) -> Callable[[nn.Module, int], Any]:
    common: dict[str, Any] = {"period": 2, "policy": everywhere, "timeout_s": TIMEOUT_S}
    return lambda model, rank: lc.LocalSGD(sgd(model), model, **{**common, **settings})


def svrg(model: nn.Module, rank: int) -> lc.QSVRG:
    return lc.QSVRG(model, loss, data(rank), lr=0.1, steps=30, timeout_s=TIMEOUT_S)


KINDS: dict[str, Callable[[nn.Module, int], Any]] = {
    "ssd": ssd(),  # lengths of wires are known
    "ssd ecdq": ssd(codec="ecdq:error=0.1"),  # and are not
    "ssd warm-up": ssd(warmup_steps=500),
    "local": local(codec="dqsg:bits=4"),
    "local ecdq": local(codec="ecdq:error=0.1", overlap=True),
    "local allgather": local(codec="qsgd:bits=4@allgather"),
    "local ring": local(codec="global:bits=4@ring"),
    "local tree": local(codec="global-exp@tree"),
    "svrg": svrg,
}


def step(opt: Any, model: nn.Module, rank: int) -> None:
    opt.zero_grad()
    loss(model, data(rank)).backward()
    opt.step()


def said(opt: Any, act: Callable[[], object]) -> str:
    """What it ends with, and that this takes no time-out. As if the process ended: it is closed."""
    start = time.monotonic()
    try:
        act()
    except (lc.WireError, lc.LostError, lc.ConfigError) as error:
        told = f"{type(error).__name__}: {error}"
    else:
        told = "no error"
    took = time.monotonic() - start
    return told if took < TIMEOUT_S / 2 else f"only after {took:.0f} s: {told}"


def alone(rank: int, opt: Any, model: nn.Module, call: Callable[[], object]) -> str:
    """Rank 0 makes a call, the others train on until they hear of it."""

    def go_on() -> None:
        for _ in range(6):
            step(opt, model, rank)
        opt.wait()

    return said(opt, call if rank == 0 else go_on)


def saves(rank: int) -> dict[str, str]:
    found = {}
    for name, make in KINDS.items():
        model = network()
        opt = make(model, rank)
        for _ in range(BEFORE):
            step(opt, model, rank)
        found[name] = alone(rank, opt, model, lc.AllRanks(opt).state_dict)
        dist.barrier()
    return found


def looks(rank: int) -> dict[str, str]:
    """Rank 0 enters global_weights() and the others train on; then the other way round."""
    found = {}
    for name in ("ssd", "ssd ecdq", "ssd warm-up"):
        for who in ("one", "others"):
            model = network()
            opt = KINDS[name](model, rank)
            for _ in range(BEFORE):
                step(opt, model, rank)
            enters = (rank == 0) == (who == "one")
            found[f"{name} {who}"] = alone(0 if enters else 1, opt, model, lambda o=opt: entered(o))
            dist.barrier()
    return found


def entered(opt: Any) -> None:
    with opt.global_weights():
        pass


def different_calls(rank: int) -> dict[str, str]:
    """One rank saves where the others look; all save, one of them a step later."""
    found = {}
    for name in ("ssd", "local"):
        model = network()
        opt = KINDS[name](model, rank)
        for _ in range(6 + (rank == 2 and name == "local")):  # no exchange at step 7
            step(opt, model, rank)
        if name == "ssd":
            act = lc.AllRanks(opt).state_dict if rank == 2 else lambda o=opt: entered(o)
        else:
            act = lc.AllRanks(opt).state_dict
        found[name] = said(opt, act)
        dist.barrier()
    return found


def resumed_alone(rank: int) -> dict[str, str]:
    """Rank 0 resumes from its own state, beyond warm-up; the others begin anew."""
    found = {}
    for name, make in KINDS.items():
        model = network()
        opt = make(model, rank)
        for _ in range(BEFORE):
            step(opt, model, rank)
        opt.wait()
        state = opt.state_dict()
        again = make(model := network(), rank)
        if rank == 0:
            again.load_state_dict(state)
        found[name] = alone(1, again, model, lambda: None)
        dist.barrier()
    return found


def gone(rank: int) -> dict[str, str]:
    """Rank 0 saves where the others have closed."""
    found = {}
    for name in ("ssd", "local"):
        model = network()
        opt = KINDS[name](model, rank)
        for _ in range(BEFORE):
            step(opt, model, rank)
        found[name] = said(opt, lc.AllRanks(opt).state_dict if rank == 0 else opt.close)
        dist.barrier()
    return found


JOBS = (saves, looks, different_calls, resumed_alone, gone)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> ranks.Answers:
    return ranks.run(JOBS, SIZE, Path(tmp_path_factory.mktemp("misuse")))


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_alone_saves(kind: str, found: ranks.Answers) -> None:
    told = [found[rank, "saves"][kind] for rank in range(SIZE)]
    assert "rank 0, came to lc.save()" in told[0] and "went on training" in told[0], told
    for rank in (1, 2):
        assert "rank 0 came to lc.save()" in told[rank], told
        assert f"rank {rank}, went on training" in told[rank] and "on all ranks" in told[rank]


@pytest.mark.parametrize("kind", ["ssd", "ssd ecdq", "ssd warm-up"])
def test_one_rank_alone_looks_at_global_weights(kind: str, found: ranks.Answers) -> None:
    one = [found[rank, "looks"][f"{kind} one"] for rank in range(SIZE)]
    others = [found[rank, "looks"][f"{kind} others"] for rank in range(SIZE)]
    assert "rank 1, rank 2 went on training" in one[0], one
    assert "rank 1 came to global_weights()" in others[0], others
    for rank in (1, 2):
        assert "rank 0 came to global_weights() after 5 steps" in one[rank], one
        assert "rank 0 went on training" in others[rank], others
    assert all("latest_weights()" in told for told in (*one, *others))


def test_ranks_that_make_different_calls_are_told(found: ranks.Answers) -> None:
    told = [found[rank, "different_calls"] for rank in range(SIZE)]
    for rank in (0, 1):
        assert "rank 2 came to lc.save() (lc.AllRanks) after 6 steps" in told[rank]["ssd"], told
        assert "rank 2 came to lc.save() (lc.AllRanks) after 7 steps" in told[rank]["local"], told
    assert "rank 0, rank 1 came to global_weights()" in told[2]["ssd"], told
    assert "rank 0, rank 1 came to lc.save() (lc.AllRanks) after 6" in told[2]["local"], told


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_alone_resumes(kind: str, found: ranks.Answers) -> None:
    told = [found[rank, "resumed_alone"][kind] for rank in range(SIZE)]
    assert "rank 1, rank 2 came to its first exchange" in told[0], told
    for rank in (1, 2):
        assert "rank 0 came to its first exchange" in told[rank], told
        assert "load one checkpoint on all" in told[rank], told


@pytest.mark.parametrize("kind", ["ssd", "local"])
def test_a_call_that_nobody_else_will_make_says_which_it_was(
    kind: str, found: ranks.Answers
) -> None:
    told = found[0, "gone"][kind]
    assert "LostError" in told and "This rank came to lc.save()" in told, told
    assert found[1, "gone"][kind] == found[2, "gone"][kind] == "no error"


SCRIPT = """
import os, torch, laconic as lc
from torch import nn
rank = int(os.environ["RANK"])
torch.distributed.init_process_group("gloo")
model = nn.Linear(40, 30)
opt = lc.SSD(torch.optim.SGD(model.parameters(), lr=0.1), model, period=2, warmup_steps=1)
for step in range(8):
    opt.zero_grad()
    model(torch.ones(1, 40)).square().mean().backward()
    opt.step()
    if step == 3 and rank == 0:
        with opt.global_weights():
            pass
"""


def test_every_process_says_it_before_it_ends(programs: Programs, tmp_path: Path) -> None:
    for run in programs.ends(SCRIPT, SIZE, folder=tmp_path, times=3):
        for rank, end in enumerate(run):
            assert end.code == 1, (rank, end)  # no signal: nothing was aborted
            assert "came to global_weights() after 4 steps" in end.text, (rank, end.text)
            assert f"rank {rank}" in end.text and "latest_weights()" in end.text
