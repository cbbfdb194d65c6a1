"""Local rules that remember: trajectories worked out by hand, memories that resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as lc
from laconic.schedules import LocalRule, Moment
from laconic.schedules._replica import Replica
from laconic.schedules._rules import MomentumRule
from laconic.server._flat import Flat


class Number(nn.Module):
    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start]))


def alone(rule: LocalRule | None, period: int, start: float = 0.0) -> tuple[Replica, Flat]:
    model = Number(start)
    flat = Flat([{"params": [model.w]}], model, 1)
    return Replica(flat, rule, period), flat


def move(replica: Replica, g: float, lr: float, decay: float = 0.0, spoilt: float = 0.0) -> float:
    groups = [{"lr": lr, "weight_decay": decay}]
    replica.move(torch.tensor([g]), torch.tensor([spoilt]), groups)
    return replica.own.item()


def arrives(replica: Replica, weights: float) -> None:
    replica.next.fill_(weights)
    replica.coming = True


# Momentum ½, lr ½, period 2; no warm-up. g is given, M is what a pull brings; all exact in fp32.
def test_momentum_rule_by_hand() -> None:
    replica, _ = alone(MomentumRule(momentum=0.5), 2)
    assert move(replica, -4, 0.5) == 2  # v = ½·0 + ½·(-4) = -2
    assert move(replica, -6, 0.5) == 6  # v = ½·(-2) + ½·(-6) = -4
    arrives(replica, 3)
    assert move(replica, 1, 0.5) == 3.75  # v = -4 + (6 - 3)/2 = -2.5; ½·v + ½·1 = -0.75
    assert move(replica, 1, 0.5) == 3.625  # v = ½·(-0.75) + ½·1 = 0.125
    arrives(replica, 2)
    assert move(replica, 0, 0.5) == 1.53125  # v = 0.125 + 1.625/2 = 0.9375; ½·v = 0.46875


def test_momentum_rule_without_a_share() -> None:
    replica, _ = alone(MomentumRule(momentum=0.5, share=0.0), 2)
    assert move(replica, -4, 0.5) == 2  # v = -2
    arrives(replica, 3)
    assert move(replica, 1, 0.5) == 3.5  # v = ½·(-2) + ½·1 = -½


def test_momentum_rule_follows_the_learning_rate() -> None:
    replica, _ = alone(MomentumRule(momentum=0.5), 4)
    assert move(replica, -4, 0.5) == 2  # v = -2
    assert move(replica, -2, 0.25) == 3  # v = ½·(½·(-2)) + ¼·(-2) = -1
    assert move(replica, 0, 0.5) == 4  # v = ½·(2·(-1)) = -1


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_mean_over_ranks_of_momentum_rule_is_what_owners_have(share: float) -> None:
    """At every step, with gradients that differ, two warm-up steps, and pulls one step late."""
    torch.manual_seed(0)
    size, period, warmup = 3, 4, 2
    owners = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([owners], lr=0.05, momentum=0.9, weight_decay=0.1)
    rule = MomentumRule(momentum=0.9, share=share)
    replicas = [alone(rule, period, start=1.0)[0] for _ in range(size)]
    spread = []
    for t in range(25):
        lr = optimizer.param_groups[0]["lr"] = 0.05 if t < 5 else 0.05 / t
        gradients = [2 * replica.own.item() + torch.randn(1).item() for replica in replicas]
        if t >= warmup:
            for replica, g in zip(replicas, gradients, strict=True):
                move(replica, g, lr, 0.1)
        owners.grad = torch.tensor([sum(gradients) / size])
        optimizer.step()
        for replica in replicas:
            if t < warmup or (t - warmup + 1) % period == 0:
                arrives(replica, owners.item())
            if t < warmup:
                replica.take_as_they_are()
        own = torch.cat([replica.own for replica in replicas])
        assert own.mean().item() == pytest.approx(owners.item(), abs=1e-5)
        spread.append(own.std().item())
    assert max(spread[:warmup]) == 0 and min(spread[warmup:]) > 1e-4


def test_momentum_rule_goes_on_from_the_last_step_of_warm_up() -> None:
    replica, _ = alone(MomentumRule(momentum=0.5), 2)
    for weights in (1.0, 3.0):
        replica.next.fill_(weights)
        replica.take_as_they_are()
    assert move(replica, 0, 0.5) == 4  # v = 1 - 3 = -2; ½·v = -1
    assert move(replica, 2, 0.5) == 3.5  # v = ½·(-1) + ½·2 = 0.5


def test_momentum_rule_with_weight_decay() -> None:
    replica, _ = alone(MomentumRule(momentum=0.5), 4, start=2.0)
    assert move(replica, 1, 0.5, decay=0.25) == 1.25  # v = ½·(1 + ¼·2) = 0.75
    assert move(replica, 0, 0.5, decay=0.25) == 0.71875  # v = 0.375 + ½·¼·1.25 = 0.53125


def test_momentum_rule_is_what_owners_do() -> None:
    """One rank, steady lr: it follows the owners' SGD until rounding, from the warm-up's end on."""
    torch.manual_seed(0)
    owners = nn.Parameter(torch.randn(1))
    optimizer = torch.optim.SGD([owners], lr=0.05, momentum=0.9, weight_decay=0.1)
    replica, _ = alone(MomentumRule(momentum=0.9), 50, start=owners.item())
    for step in range(20):
        g = torch.randn(1)
        owners.grad = g.clone()
        optimizer.step()
        if step < 8:
            replica.next.copy_(owners.detach())
            replica.take_as_they_are()
        else:
            own = move(replica, g.item(), 0.05, 0.1)
            assert own == pytest.approx(owners.item(), abs=1e-6)


def test_without_momentum_it_is_a_plain_step() -> None:
    rules = MomentumRule(momentum=0.0), lc.LocalSGDRule()
    first, second = (alone(rule, 2, start=1.0)[0] for rule in rules)
    for g in (1.0, -2.0, 4.0):
        assert move(first, g, 0.25, 0.5) == move(second, g, 0.25, 0.5)
        for replica in (first, second):
            arrives(replica, g)


def test_a_step_that_is_thrown_away_does_not_move_weights() -> None:
    replica, _ = alone(MomentumRule(momentum=0.5), 4)
    assert move(replica, -4, 0.5) == 2  # v = -2
    assert move(replica, 0, 0.5, spoilt=1.0) == 2  # v = -1
    assert move(replica, 0, 0.5) == 2.5  # v = -½


@pytest.mark.parametrize("rule", [MomentumRule(), lc.DCASGD(adaptive=True), lc.GLU()])
def test_memories_are_saved(rule: LocalRule) -> None:
    first, _ = alone(rule, 3, start=1.0)
    for g in (1.0, 2.0):
        move(first, g, 0.1)
    arrives(first, 0.5)
    saved = first.state_dict()
    second, _ = alone(rule, 3)
    second.load_state_dict(saved)
    assert set(saved["memory"]) == set(rule.remembers)
    then = {name: memory.item() for name, memory in saved["memory"].items()}
    for g in (3.0, -1.0, 0.5):
        assert move(first, g, 0.05) == move(second, g, 0.05)
    assert {name: memory.item() for name, memory in saved["memory"].items()} == then


def test_it_may_write_over_what_was_seen() -> None:
    def after(out: Tensor | None) -> Tensor:
        seen = torch.tensor([1.5, 1.0])
        at = Moment(
            w=torch.tensor([1.0, 2.0]),
            g=torch.tensor([2.0, -1.0]),
            seen=seen,
            pulled=torch.tensor([0.0, 4.0]),
            velocity=torch.ones(2),
            fresh=True,
            period=4,
            lr=0.1,
            decay=0.01,
        )
        found = seen if out is None else out
        MomentumRule().step(at, found)
        return found

    assert torch.equal(after(None), after(torch.empty(2)))


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), "fast"])
def test_momentum_is_checked(value: Any) -> None:
    with pytest.raises(lc.ConfigError, match="momentum must be"):
        MomentumRule(momentum=value)
