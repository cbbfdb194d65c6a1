"""lc.save and lc.load: one file for all ranks, whole or not at all, that resumes exactly."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import equal
from test_ddp import flat
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic as lc

SIZE, CUT, STEPS = 3, 7, 12


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Linear(32, 5))


def everywhere(name: str, parameter: nn.Parameter) -> bool:
    return True


def data(rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(rank))
    return x, x[:, :5].argmax(1)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def ssd(model: nn.Module, rank: int) -> Any:
    return lc.SSD(adamw(model), model, period=3, warmup_steps=2, codec="feedback(qsgd:bits=2)")


def local(model: nn.Module, rank: int) -> Any:
    return lc.LocalSGD(
        adamw(model),
        model,
        period=4,
        codec="feedback(dqsg:bits=3)",
        overlap=True,
        outer=lc.Nesterov(),
        policy=everywhere,
    )


def svrg(model: nn.Module, rank: int) -> Any:
    model.eval()
    return lc.QSVRG(model, loss, data(rank), lr=0.05, steps=5, codec="feedback(qsgd:bits=2)")


KINDS: dict[str, Callable[[nn.Module, int], Any]] = {"ssd": ssd, "local": local, "svrg": svrg}


def take(model: nn.Module, opt: Any, first: int, last: int, rank: int) -> None:
    for step in range(first, last):
        x, y = data(10 * step + rank)
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()


def shared_folder(rank: int) -> Path:
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def everything(model: nn.Module, opt: Any) -> dict[str, Tensor]:
    own = {name: value.clone() for name, value in model.state_dict().items()}
    with opt.global_weights():
        return own | {"common": flat(model).clone()}


def resumed(rank: int) -> dict[str, Any]:
    folder, found = shared_folder(rank), {}
    for kind, make in KINDS.items():
        path = folder / f"{kind}.pt"
        model = network(0)
        opt = make(model, rank)
        take(model, opt, 0, CUT, rank)
        with opt.latest_weights():
            shown = flat(model).clone()
            content = {"model": model.state_dict(), "optimizer": opt, "step": CUT, "best": 0.5}
            lc.save(content, path)
        take(model, opt, CUT, STEPS, rank)
        other = network(100 + rank)
        again = make(other, rank)
        rest = lc.load({"optimizer": again}, path)
        take(other, again, rest["step"], STEPS, rank)
        found[kind] = {
            "same": equal(everything(model, opt), everything(other, again)),
            "step": rest["step"],
            "rest": sorted(rest),
        }
        if rank == 0:
            third = network(5)
            third.load_state_dict(rest["model"])
            found[kind]["model"] = torch.equal(flat(third), shown)
    return found


def with_objects(rank: int) -> dict[str, Any]:
    """A handle, a module and a scheduler, which are loaded in any order."""
    path = shared_folder(rank) / "some.pt"

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        ddp = DistributedDataParallel(nn.Linear(200, 60))
        handle = lc.compress(ddp, "feedback(qsgd:bits=2)")
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"handle": handle, "model": ddp.module, "scheduler": scheduler}, ddp, optimizer

    def go(ddp: Any, optimizer: Any, scheduler: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            ddp(torch.full((1, 200), 0.1 * step + rank)).square().sum().backward()
            optimizer.step()
            scheduler.step()

    content, ddp, optimizer = made(0)
    go(ddp, optimizer, content["scheduler"], range(4))
    lc.save({**content, "optimizer": optimizer}, path)
    go(ddp, optimizer, content["scheduler"], range(4, 8))
    other, again, sgd = made(3)
    rest = lc.load({**other, "optimizer": sgd}, path)
    go(again, sgd, other["scheduler"], range(4, 8))
    return {"same": torch.equal(flat(ddp), flat(again)), "rest": rest}


def said(act: Callable[[], object]) -> str:
    try:
        act()
    except (lc.LaconicError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def problems(rank: int) -> dict[str, Any]:
    folder, found = shared_folder(rank), {}
    path = folder / "good.pt"
    model = network(0)
    opt = local(model, rank)
    take(model, opt, 0, 3, rank)
    lc.save({"optimizer": opt, "step": 3}, path)
    before = path.read_bytes()
    nowhere = folder / "nothing" / "x.pt"
    found["nowhere"] = said(lambda: lc.save({"optimizer": opt}, nowhere))
    found["unsafe"] = said(lambda: lc.save({"optimizer": opt, "path": Path("/x")}, path))
    dist.barrier()
    found["kept"] = path.read_bytes() == before and os.listdir(folder) == ["good.pt"]
    found["missing"] = said(lambda: lc.load({"scheduler": opt}, path))
    found["absent"] = said(lambda: lc.load({"optimizer": opt}, folder / "absent.pt"))
    dist.barrier()
    if rank == 0:
        (folder / "cut.pt").write_bytes(before[: len(before) // 2])
        torch.save({"optimizer": opt.state_dict()}, folder / "one.pt")
    dist.barrier()
    found["cut"] = said(lambda: lc.load({"optimizer": opt}, folder / "cut.pt"))
    found["one"] = said(lambda: lc.load({"optimizer": opt}, folder / "one.pt"))
    pair: Any = dist.new_group([0, 1])
    if rank < 2:
        model = network(0)
        two = lc.LocalSGD(adamw(model), model, group=pair)
        found["fewer"] = said(lambda: lc.load({"optimizer": two}, path, group=pair))
        lc.save({"optimizer": two}, folder / "two.pt", group=pair)
        lc.load({"optimizer": two}, folder / "two.pt", group=pair)
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> ranks.Answers:
    jobs = (resumed, with_objects, problems)
    return ranks.run(jobs, SIZE, Path(tmp_path_factory.mktemp("saving")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_resumes_bit_for_bit(kind: str, found: ranks.Answers) -> None:
    for rank in range(SIZE):
        told = found[rank, "resumed"][kind]
        assert told["same"]
        assert told["step"] == CUT and told["rest"] == ["best", "model", "step"]
    assert found[0, "resumed"][kind]["model"]


def test_handles_and_other_objects_resume(found: ranks.Answers) -> None:
    for rank in range(SIZE):
        assert found[rank, "with_objects"] == {"same": True, "rest": {}}


def test_problems_are_told_on_all_ranks(found: ranks.Answers) -> None:
    for rank in range(SIZE):
        told = found[rank, "problems"]
        assert "nothing/x.pt" in told["nowhere"]
        assert "PosixPath" in told["unsafe"] and "numbers, strings, tensors" in told["unsafe"]
        assert told["kept"]  # the file that was there, and nothing beside it
        assert "optimizer, step, and no 'scheduler'" in told["missing"]
        assert "FileNotFoundError" in told["absent"]
        assert "cut.pt is not a file that lc.save wrote" in told["cut"]
        assert "what rank 0 has saved" in told["one"]
        assert rank == 2 or "of 3 ranks, and here are 2" in told["fewer"]
