"""The DDP hook inside the training loops that people write, on 3 real processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import equal_everywhere
from test_ddp import batch, flat, network, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic as lc

ALL = lc.Policy(min_numel=0, min_dims=1)


def compiled(rank: int) -> dict[str, bool]:
    """aot_eager traces forward and backward as inductor does, and needs no compiler."""
    found = {}
    plain = DistributedDataParallel(network())
    train(plain, 4)
    for name, build in {
        "module": lambda: DistributedDataParallel(torch.compile(network(), backend="aot_eager")),
        "ddp": lambda: torch.compile(DistributedDataParallel(network()), backend="aot_eager"),
    }.items():
        model: Any = build()
        inside = getattr(model, "_orig_mod", model)
        handle = lc.compress(inside, "dqsg:bits=8")
        train(model, 4)
        near = torch.allclose(flat(inside), flat(plain), atol=0.02)
        found[name] = equal_everywhere(inside) and near and handle.stats().ratio > 3
    return found


def python_reducer(rank: int) -> dict[str, bool]:
    """A DDP of compiled autograd hands over single gradients: they must not stay local."""
    config = torch._dynamo.config  # pyright: ignore[reportPrivateImportUsage]
    old, config.optimize_ddp = config.optimize_ddp, "python_reducer"
    try:
        plain, model = (DistributedDataParallel(network()) for _ in range(2))
        handle = lc.compress(model, "ecdq:error=0.01")
        for one in (plain, model):
            train(one, 4)
    finally:
        config.optimize_ddp = old
    stats = handle.stats()
    return {
        "same bits": equal_everywhere(model),
        "near plain": torch.allclose(flat(model), flat(plain), atol=0.05),
        "encoded": stats.ratio > 2,
        "steps": stats.steps == 4,
    }


def grad_scaler(rank: int) -> dict[str, bool]:
    """An overflow on one rank is skipped on all, and halves the scale on all."""
    found = {}
    for spec in ("dqsg:bits=4", "ecdq:error=0.05", "global:bits=8", "fp16"):
        model = DistributedDataParallel(network())
        lc.compress(model, spec)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
        skipped = []
        for step in range(4):
            before = flat(model).clone()
            x, y = batch(rank, step)
            loss = nn.functional.cross_entropy(model(x), y)
            if step == 2 and rank == 1:
                loss = loss * torch.inf
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            skipped.append(torch.equal(before, flat(model)))
        right = skipped == [False, False, True, False] and scaler.get_scale() == 32.0
        found[spec] = right and equal_everywhere(model)
    return found


class Tied(nn.Module):
    """Embedding and output share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(200, 64)
        self.middle = nn.Linear(64, 64)
        self.out = nn.Linear(64, 200, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.middle(self.embed(tokens))))


class Mixed(nn.Module):
    """A half-precision and a full-precision part."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 192)
        self.second = nn.Linear(192, 192, dtype=dtype)
        self.third = nn.Linear(192, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.relu(self.first(x)).to(self.second.weight.dtype))
        return self.third(torch.relu(hidden.float()))


def kinds_of_models(rank: int) -> dict[str, bool]:
    found = {}
    tied = DistributedDataParallel(Tied())
    lc.compress(tied, "ecdq:error=0.05")
    optimizer = torch.optim.AdamW(tied.parameters(), lr=0.01)
    for step in range(4):
        tokens = torch.randint(200, (64,), generator=torch.Generator().manual_seed(step * 9 + rank))
        optimizer.zero_grad()
        nn.functional.cross_entropy(tied(tokens), tokens).backward()
        optimizer.step()
    found["tied"] = equal_everywhere(tied)

    for dtype in (torch.bfloat16, torch.float16):
        for spec in ("dqsg:bits=4", "ecdq:error=0.05", "global:bits=8", "fp16"):
            mixed = DistributedDataParallel(Mixed(dtype))
            lc.compress(mixed, spec, policy=ALL if dtype == torch.float16 else None)
            losses = train(mixed, 6)
            mine = torch.cat([p.detach().float().flatten() for p in mixed.parameters()])
            every = [torch.empty_like(mine) for _ in range(3)]
            dist.all_gather(every, mine)
            same = all(torch.equal(mine, other) for other in every)
            found[f"{dtype} {spec}"] = same and losses[-1] < losses[0]

    models = [DistributedDataParallel(network()) for _ in range(2)]
    handles = [
        lc.compress(model, spec)
        for model, spec in zip(models, ("dqsg:bits=4", "ecdq:error=0.05"), strict=True)
    ]
    x, y = batch(rank, 0)
    for _ in range(3):  # as a generator and its critic: both backwards, then both steps
        for model in models:
            nn.functional.cross_entropy(model(x), y).backward()
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    found["two models"] = all(equal_everywhere(model) for model in models)
    found["two counts"] = [handle.stats().steps for handle in handles] == [3, 3]
    return found


def rules(rank: int) -> dict[str, bool]:
    """Layers with codecs of their own in one bucket; what rules call plain is exact."""
    plain, model = (DistributedDataParallel(network()) for _ in range(2))
    policy = lc.Policy(rules={"4.*": False, "2.weight": "qsgd:bits=2"})
    handle = lc.compress(model, "dqsg:bits=8", policy=policy)
    x, y = batch(rank, 0)
    for one in (plain, model):
        nn.functional.cross_entropy(one(x), y).backward()
    errors = {
        name: float((a.grad - b.grad).norm() / b.grad.norm())  # pyright: ignore[reportOptionalMemberAccess, reportOperatorIssue]
        for (name, a), b in zip(model.module.named_parameters(), plain.parameters(), strict=True)
    }
    train(model, 3)
    return {
        "plain": max(errors["4.weight"], errors["4.bias"], errors["0.bias"]) < 1e-6,
        "coarse": errors["2.weight"] > 0.3,
        "fine": 1e-4 < errors["0.weight"] < 0.05,
        "same bits": equal_everywhere(model) and handle.stats().steps == 4,
    }


def kappa(rank: int) -> dict[str, Any]:
    """Equal batches have κ = 1: the first encoding may be n times coarser. It is found and kept."""
    found: dict[str, Any] = {}
    for name, seed in (("equal", 7), ("own", 100 + rank)):
        model = DistributedDataParallel(network())
        handle = lc.compress(model, "ecdq:error=0.05")
        sent = []
        for _ in range(20):
            before = handle.stats().sent_bytes
            train(model, 1, first=0, rank=seed)
            sent.append(handle.stats().sent_bytes - before)
        found[name] = {
            "kappa": handle.stats().kappa,
            "saved": 1 - sent[10] / sent[0],  # κ is used from the second step on
            "equal": equal_everywhere(model),
        }
    return found


def resume_with_kappa(rank: int) -> dict[str, bool]:
    """Stopped after 20 steps and taken up in new objects, 15 steps end at the same bits."""

    def start() -> tuple[DistributedDataParallel, Any]:
        model = DistributedDataParallel(network(), find_unused_parameters=True)  # never rebuilds
        return model, lc.compress(model, "ecdq:error=0.05", seed=5)

    model, handle = start()
    train(model, 20)
    weights, state = copy.deepcopy(model.module.state_dict()), handle.state_dict()
    train(model, 15, first=20)
    again, second = start()
    again.module.load_state_dict(weights)
    second.load_state_dict(state)
    train(again, 15, first=20)
    return {"equal": torch.equal(flat(model), flat(again))}


def nodes(rank: int) -> dict[str, bool]:
    model = DistributedDataParallel(network())
    lc.compress(model, "dqsg:bits=4", exchange=lc.Hierarchical(nodes=((0, 1), (2,))))
    train(model, 4)
    return {"equal": equal_everywhere(model)}


JOBS: list[Callable[[int], Any]] = [
    compiled,
    python_reducer,
    grad_scaler,
    kinds_of_models,
    rules,
    kappa,
    resume_with_kappa,
    nodes,
]


found = ranks.shared(JOBS, 3)


@pytest.mark.parametrize(
    "job",
    [
        "compiled",
        "python_reducer",
        "grad_scaler",
        "kinds_of_models",
        "rules",
        "resume_with_kappa",
        "nodes",
    ],
)
def test_training_loops(found: ranks.Answers, job: str) -> None:
    for rank in range(3):
        wrong = [name for name, good in found[rank, job].items() if not good]
        assert not wrong


def test_kappa_is_measured_and_saves_bytes(found: ranks.Answers) -> None:
    for rank in range(3):
        answer = found[rank, "kappa"]
        assert all(one["equal"] for one in answer.values())
        assert answer["equal"]["kappa"] == pytest.approx(1, abs=0.1)
        assert answer["equal"]["saved"] > 0.06  # n·κ = 3: 0.8 bits per value less, one way of two
        assert 1 / 3 - 0.05 < answer["own"]["kappa"] < 0.95
