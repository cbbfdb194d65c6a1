"""The interface of schedules, used by itself: a loop that knows nothing but `lc.Schedule`."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from test_ddp import flat
from torch import Tensor, nn

import laconic as lc

SIZE, STEPS = 3, 5


def loss(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0])[:, 0] - batch[1]).square().mean()


def data(rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(rank))
    return x, x.sum(1)


def made(kind: str, model: nn.Module, rank: int) -> Any:
    if kind == "QSVRG":
        return lc.QSVRG(model, loss, data(rank), lr=0.1, steps=3)
    settings: dict[str, Any] = {
        "SSD": {"period": 2, "warmup_steps": 1},
        "SSD with a server": {"period": 2, "warmup_steps": 1, "servers": 1},
        "AsyncSGD": {"servers": 1},
        "LocalSGD": {"period": 2, "overlap": True},
    }[kind]
    schedules: Any = {"AsyncSGD": lc.AsyncSGD, "LocalSGD": lc.LocalSGD}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return schedules.get(kind, lc.SSD)(optimizer, model, **settings)


KINDS = ("SSD", "SSD with a server", "AsyncSGD", "LocalSGD", "QSVRG")


def proceed(opt: lc.Schedule, model: nn.Module, rank: int, steps: int) -> None:
    for _ in range(steps):
        opt.zero_grad()
        loss(model, data(rank)).backward()
        opt.step()


def used(kind: str, rank: int) -> dict[str, Any]:
    model = nn.Linear(4, 1)
    opt = made(kind, model, rank)
    found: dict[str, Any] = {"is one": isinstance(opt, lc.Schedule)}
    if getattr(opt, "serves", False):
        opt.wait()
        opt.serve()
        opt.close()
        return found
    proceed(opt, model, rank, STEPS)
    opt.wait()
    own = flat(model).clone()
    with opt.global_weights():
        found["finite"] = bool(flat(model).isfinite().all())
    found["own ones back"] = torch.equal(flat(model), own)
    stats = opt.stats()
    found["stats"] = (stats.steps, stats.plain_bytes > 0, stats.wire_seconds > 0)
    found["ratio"] = stats.ratio == stats.scalars()["laconic/ratio"]
    if kind != "AsyncSGD":  # whose order of updates is the network's
        state = opt.state_dict()
        opt.load_state_dict(state)
        found["loads"] = torch.equal(flat(model), own)
    opt.zero_grad()
    found["no gradients"] = all(p.grad is None for p in model.parameters())
    if getattr(opt, "servers", 0):
        opt.leave()
    opt.close()
    opt.close()
    return found


def every_kind(rank: int) -> dict[str, dict[str, Any]]:
    return {kind: used(kind, rank) for kind in KINDS}


found = ranks.shared([every_kind], SIZE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_knows_the_interface_alone(kind: str, found: ranks.Answers) -> None:
    for rank in range(SIZE):
        answers = found[rank, "every_kind"][kind]
        assert answers.pop("is one")
        if answers:
            assert answers.pop("stats") == (STEPS, True, True)
            assert all(answers.values()), answers


@pytest.mark.parametrize("kind", [lc.SSD, lc.AsyncSGD, lc.LocalSGD, lc.QSVRG])
def test_all_schedules_have_the_interface(kind: type) -> None:
    assert issubclass(kind, lc.Schedule)
    assert not issubclass(torch.optim.SGD, lc.Schedule)


def typed(
    a: lc.SSD, b: lc.AsyncSGD, c: lc.LocalSGD, d: lc.QSVRG
) -> tuple[lc.Schedule, lc.Schedule, lc.Schedule, lc.Schedule]:
    """The type checker compares signatures."""
    return a, b, c, d
