"""Simulated workers are the product: the same weights as real processes over Gloo, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ranks
import torch
from torch import Tensor, nn

import laconic as lc
from benchmarks._local_rules import RULES
from benchmarks._simulated import Packed, Setting, Slot, begun

STEPS, WARMUP = 13, 3
SETTINGS = {
    "sync": Setting(name="", kind="sync", rate=0.1),
    "glu": Setting(name="", kind="ssd", period=2, rule=RULES["glu"], rate=0.1),
    "dcasgd": Setting(name="", kind="ssd", period=3, rule=RULES["dcasgd"], rate=0.1),
    "none": Setting(name="", kind="ssd", period=4, rate=0.1),
    "momentum": Setting(name="", kind="ssd", period=3, rule=lc.MomentumRule(), rate=0.1),
    "adam": Setting(name="", kind="ssd", period=4, rule=lc.AdamRule(), rate=0.01, adam=True),
    "coded": Setting(
        name="", kind="ssd", period=3, rule=RULES["glu"], rate=0.1, codec="ecdq:error=0.1"
    ),
    "local": Setting(name="", kind="local", period=4, rate=0.1),
    "diloco": Setting(name="", kind="local", period=4, outer=lc.Nesterov(), rate=0.1),
}


class Small:
    """2458 values; two workers own 1536 and 922."""

    workers, steps, epoch, device = 2, STEPS, WARMUP, torch.device("cpu")

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 10))

    def start(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return Packed(self.model(), self.workers).weights

    def plan(self, seed: int) -> Tensor:
        return torch.arange(STEPS)[:, None] + 100 * seed

    def losses(self, models: Sequence[nn.Module], now: Tensor) -> Iterator[Tensor]:
        for rank, model in enumerate(models):
            yield self.loss(model, int(now), rank)

    def loss(self, model: nn.Module, number: int, rank: int) -> Tensor:
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(2 * number + rank))
        return nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))

    def score(self, weights: Tensor) -> float:
        return 0.0


def rate_at(t: int) -> float:
    return 0.1 / (1 + t)


def product(rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Own and global weights after all steps, of a real rank."""
    return {name: _trained(one, rank) for name, one in SETTINGS.items()}


def _trained(one: Setting, rank: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    task = Small()
    model = task.model()
    optimizer = one.optimizer(list(model.parameters()))
    warmup = STEPS if one.kind == "sync" else WARMUP
    more: dict[str, Any] = {"period": one.period, "warmup_steps": warmup, "seed": 1}
    if one.kind == "local":
        opt: Any = lc.LocalSGD(optimizer, model, outer=one.outer, codec="none", **more)
    else:
        opt = lc.SSD(optimizer, model, local=one.rule, codec=one.codec, **more)
    for t in range(STEPS):
        opt.param_groups[0]["lr"] = rate_at(t)
        opt.zero_grad()
        task.loss(model, t + 100, rank).backward()
        opt.step()
    own = _flat(model)
    with opt.global_weights():
        return own, _flat(model)


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


real = ranks.shared([product], 2)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_simulation_is_the_product(name: str, real: ranks.Answers) -> None:
    slot = Slot(Small(), graph=False)
    run = begun(slot, SETTINGS[name], seed=1)
    for t in range(STEPS):
        run.step(t, rate_at(t))
    for rank in range(2):
        own, masters = real[rank, "product"][name]
        assert torch.equal(run.result(), masters)
        assert torch.equal(slot.flats[rank].weights, own)
