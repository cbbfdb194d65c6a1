"""What one rank does alone: evaluation with the newest weights that it has."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from helpers import equal
from test_ddp import flat
from torch import Tensor, nn

import laconic as lc

SIZE, STEPS = 3, 14


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Linear(32, 5))


def everywhere(name: str, parameter: nn.Parameter) -> bool:
    return True


def made(kind: str, model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "SSD":
        return lc.SSD(optimizer, model, period=3, warmup_steps=2)
    overlap: dict[str, Any] = {"overlap": True, "overlap_steps": 2} if kind == "overlap" else {}
    return lc.LocalSGD(
        optimizer,
        model,
        period=4,
        warmup_steps=2,
        codec="dqsg:bits=4",
        policy=everywhere,
        **overlap,
    )


def take(opt: Any, model: nn.Module, rank: int, step: int) -> None:
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
    opt.step()


# steps since the pull, or since the boundary whose exchange was taken over, after every step
AGES = {
    "SSD": [0, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0],
    "LocalSGD": [0, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0],
    "overlap": [0, 0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 2, 3, 4],
}


def latest(rank: int) -> dict[str, Any]:
    """Weights and ages after every step, beside those of a run where all ranks look together."""
    found = {}
    for kind in AGES:
        model, twin = network(), network()
        opt, other = made(kind, model), made(kind, twin)
        common: list[Tensor] = []
        ages, same, own_again = [], [], []
        for step in range(STEPS):
            take(opt, model, rank, step)
            take(other, twin, rank, step)
            with other.global_weights():
                common.append(flat(twin).clone())
            if step % SIZE != rank:  # the others go on
                continue
            own = flat(model).clone()
            with opt.latest_weights() as old:
                ages.append((step, old))
                if kind == "SSD":  # every pull is of the weights of its step
                    same.append(torch.equal(flat(model), common[step - old]))
                else:
                    same.append(torch.equal(flat(model), common[step]))
            own_again.append(torch.equal(flat(model), own))
        found[kind] = ages, same, own_again
    return found


def undisturbed(rank: int) -> dict[str, bool]:
    """A run in which rank 1 looks after every step, and saves its state there, and one without."""
    found = {}
    for kind in AGES:
        model, twin = network(), network()
        opt, other = made(kind, model), made(kind, twin)
        states = []
        for step in range(STEPS):
            take(opt, model, rank, step)
            take(other, twin, rank, step)
            if rank == 1:
                with opt.latest_weights():
                    states.append(copy.deepcopy(opt.state_dict()))
        found[kind] = torch.equal(flat(model), flat(twin))
        if rank == 1:
            found[f"{kind} state"] = equal(_tensors(states[-1]), _tensors(other.state_dict()))
    return found


def _tensors(state: Any, path: str = "") -> dict[str, Tensor]:
    if isinstance(state, Tensor):
        return {path: state}
    items = state.items() if isinstance(state, dict) else ()
    return {name: one for k, v in items for name, one in _tensors(v, f"{path}/{k}").items()}


def refused_inside(rank: int) -> dict[str, str]:
    found = {}
    for kind in ("SSD", "LocalSGD"):
        model = network()
        opt = made(kind, model)
        for step in range(5):
            take(opt, model, rank, step)
        if rank == 0:
            with opt.latest_weights():
                try:
                    opt.step()
                except lc.ConfigError as error:
                    found[kind] = str(error)
        take(opt, model, rank, 5)  # nobody was left behind
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> ranks.Answers:
    jobs = (latest, undisturbed, refused_inside)
    return ranks.run(jobs, SIZE, Path(tmp_path_factory.mktemp("one")))


@pytest.mark.parametrize("kind", AGES)
def test_any_rank_sees_the_latest_weights(kind: str, found: ranks.Answers) -> None:
    told = {}
    for rank in range(SIZE):
        ages, same, own_again = found[rank, "latest"][kind]
        assert all(same) and all(own_again), (rank, same, own_again)
        told |= dict(ages)
    assert [told[step] for step in range(STEPS)] == AGES[kind]


@pytest.mark.parametrize("kind", AGES)
def test_looking_changes_nothing(kind: str, found: ranks.Answers) -> None:
    for rank in range(SIZE):
        assert found[rank, "undisturbed"][kind]
    assert found[1, "undisturbed"][f"{kind} state"]


@pytest.mark.parametrize("kind", ["SSD", "LocalSGD"])
def test_no_step_with_weights_that_are_only_shown(kind: str, found: ranks.Answers) -> None:
    assert "leave the with block first" in found[0, "refused_inside"][kind]
