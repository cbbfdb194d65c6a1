"""Local rules that remember: trajectories worked out by hand, memories that resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as lc
from laconic import AdamRule, MomentumRule
from laconic.schedules import LocalRule, LocalStep
from laconic.schedules._rules import Replica
from laconic.sharding._flat_parameters import FlatParameters
from laconic.sharding._trained import Trained


class Number(nn.Module):
    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start]))


def alone(
    rule: LocalRule | None, period: int, start: float = 0.0
) -> tuple[Replica, FlatParameters]:
    model = Number(start)
    flat = FlatParameters(Trained([{"params": [model.w]}], model, "SSD").groups)
    return Replica(flat, rule, period), flat


def move(
    replica: Replica, g: float, lr: float, decay: float = 0.0, found_inf: float = 0.0, **more: Any
) -> float:
    groups = [{"lr": lr, "weight_decay": decay, **more}]
    replica.move(torch.tensor([g]), torch.tensor([found_inf]), groups)
    return replica.own.item()


def arrives(replica: Replica, weights: float) -> None:
    replica.next.fill_(weights)
    replica.coming = True


# Momentum ½, share 1, lr ½, period 2; no warm-up. g is given, M is what a pull brings; all of it is
# exact in fp32.
def test_momentum_rule_by_hand() -> None:
    replica, _ = alone(MomentumRule(momentum=0.5, share=1.0), 2)
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


def test_momentum_is_that_of_the_group_unless_it_is_given() -> None:
    groups = {"momentum": 0.5}
    replica, _ = alone(MomentumRule(), 2)
    assert move(replica, -4, 0.5, **groups) == 2  # v = -2
    arrives(replica, 4)
    assert move(replica, 1, 0.5, **groups) == 4.75  # v = -2 + ½·(2 - 4)/2 = -2.5; ½·v + ½ = -0.75
    assert move(replica, 0, 0.5, momentum=1.0) == 5.5  # a scheduler may cycle it: v = -0.75
    given, _ = alone(MomentumRule(momentum=0.0), 2)
    assert move(given, -4, 0.5, **groups) == 2 and move(given, 1, 0.5, **groups) == 1.5


def test_momentum_rule_follows_the_learning_rate() -> None:
    replica, _ = alone(MomentumRule(momentum=0.5), 4)
    assert move(replica, -4, 0.5) == 2  # v = -2
    assert move(replica, -2, 0.25) == 3  # v = ½·(½·(-2)) + ¼·(-2) = -1
    assert move(replica, 0, 0.5) == 4  # v = ½·(2·(-1)) = -1


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
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


@pytest.mark.parametrize(
    ("more", "warmup"), [({}, 8), ({"dampening": 0.5}, 8), ({"nesterov": True}, 0)]
)
def test_momentum_rule_is_what_owners_do(more: dict[str, Any], warmup: int) -> None:
    """One rank, steady lr: it follows the owners' SGD until rounding, from the warm-up's end on."""
    torch.manual_seed(0)
    owners = nn.Parameter(torch.randn(1))
    optimizer = torch.optim.SGD([owners], lr=0.05, momentum=0.9, weight_decay=0.1, **more)
    replica, _ = alone(MomentumRule(), 50, start=owners.item())
    for step in range(20):
        g = torch.randn(1)
        owners.grad = g.clone()
        optimizer.step()
        if step < warmup:
            replica.next.copy_(owners.detach())
            replica.take_as_they_are()
        else:
            own = move(replica, g.item(), 0.05, 0.1, momentum=0.9, **more)
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
    assert move(replica, 0, 0.5, found_inf=1.0) == 2  # v = -1
    assert move(replica, 0, 0.5) == 2.5  # v = -½


@pytest.mark.parametrize("rule", [MomentumRule(), AdamRule(), lc.DCASGD(adaptive=True), lc.GLU()])
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


@pytest.mark.parametrize("rule", [MomentumRule(), AdamRule()])
def test_a_worker_that_was_away_begins_again(rule: LocalRule) -> None:
    """What lies between its old weights and those that come is no velocity."""
    replica, fresh = alone(rule, 2)[0], alone(rule, 2, start=64.0)[0]
    for g in (1.0, 2.0):
        move(replica, g, 0.5, momentum=0.9)
    replica.next.fill_(64.0)
    replica.begin_again()
    for g in (1.0, -3.0):
        assert move(replica, g, 0.25, momentum=0.9) == move(fresh, g, 0.25, momentum=0.9)


@pytest.mark.parametrize("rule", [MomentumRule(), AdamRule()])
@pytest.mark.parametrize("more", [{}, {"nesterov": True}, {"decoupled": False}])
def test_it_may_write_over_what_was_seen(rule: LocalRule, more: dict[str, Any]) -> None:
    def after(out: Tensor | None) -> Tensor:
        seen = torch.tensor([1.5, 1.0])
        at = LocalStep(
            w=torch.tensor([1.0, 2.0]),
            g=torch.tensor([2.0, -1.0]),
            seen=seen,
            pulled=torch.tensor([0.0, 4.0]),
            velocity=torch.ones(2),
            square=torch.ones(2),
            fresh=True,
            period=4,
            lr=0.1,
            decay=0.01,
            momentum=0.9,
            **more,
        )
        found = seen if out is None else out
        rule.step(at, found)
        return found

    assert torch.equal(after(None), after(torch.empty(2)))


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), "fast"])
def test_momentum_is_checked(value: Any) -> None:
    with pytest.raises(lc.ConfigError, match="momentum must be"):
        MomentumRule(momentum=value)


@pytest.mark.parametrize("kind", [MomentumRule, AdamRule])
def test_a_share_that_turns_velocities_around_is_refused(kind: Any) -> None:
    for value in (2.0, 3):
        with pytest.raises(lc.ConfigError, match="share must be below 2, where a pull would turn"):
            kind(share=value)
    kind(share=1.9)


BAD_ADAM: dict[str, dict[str, Any]] = {
    "betas must be two numbers from 0, below 1": {"betas": (0.9, 1.0)},
    "not 0.9": {"betas": 0.9},
    "not .0.9, nan": {"betas": (0.9, float("nan"))},
    "not .0.9,": {"betas": (0.9,)},
    "eps must be a number from 0, or None, not -1": {"eps": -1},
    "gain must be a number from 0, not None": {"gain": None},
}


@pytest.mark.parametrize("message", BAD_ADAM)
def test_numbers_of_adam_rule_are_checked(message: str) -> None:
    with pytest.raises(lc.ConfigError, match=message):
        AdamRule(**BAD_ADAM[message])


# β₁ = β₂ = ½, ε = 0, lr ½, gain 2: v ← ½·v + ½·½·2·g/√ŝ = ½·(v + g/√ŝ). With β₂ = ½ the weight of
# g_i² in ŝ after t steps is 2ⁱ⁻¹/(2ᵗ - 1).
HALVES: dict[str, Any] = {"betas": (0.5, 0.5), "eps": 0.0}


def test_adam_rule_by_hand() -> None:
    replica, _ = alone(AdamRule(), 2)
    # ŝ = 25: v = ½·(0 + 1) = ½
    assert move(replica, 5, 0.5, **HALVES) == pytest.approx(-0.5, rel=1e-6)
    # ŝ = (25 + 2·1)/3 = 9: v = ½·(½ + ⅓) = 5/12
    assert move(replica, 1, 0.5, **HALVES) == pytest.approx(-11 / 12, rel=1e-6)
    arrives(replica, 1 / 12)
    # v = 5/12 + (-11/12 - 1/12)/2 = -1/12; ŝ = (25 + 2·1 + 4·9)/7 = 9: v = ½·(-1/12 - 1) = -13/24
    assert move(replica, -3, 0.5, **HALVES) == pytest.approx(15 / 24, rel=1e-6)
    # lr ¼, so v = ½·(-13/24); ŝ = (25 + 2·1 + 4·9 + 8·9)/15 = 9
    # v = ½·(-13/48) + ½·¼·2·1 = 11/96
    assert move(replica, 3, 0.25, **HALVES) == pytest.approx(60 / 96 - 11 / 96, rel=1e-6)


def test_adam_rule_takes_what_it_was_given() -> None:
    """Other betas and ε than the group's, no share and no gain."""
    replica, _ = alone(AdamRule(betas=(0.0, 0.5), eps=3.0, gain=1.0, share=0.0), 2)
    assert move(replica, 1, 1.0, betas=(0.9, 0.9), eps=0.0) == -0.25  # ŝ = 1: v = 1/(1 + 3)
    arrives(replica, 5)
    # ŝ = (1 + 2·13)/3 = 9: √13/(3 + 3)
    assert move(replica, 13**0.5, 1.0) == pytest.approx(5 - 13**0.5 / 6)


@pytest.mark.parametrize("decoupled", [True, False])
def test_weight_decay_of_adam_rule(decoupled: bool) -> None:
    """lr ½, decay ½, w = 8: v = ½·½·(2·g/√ŝ + ½·w), or with g + ½·w for g."""
    replica, _ = alone(AdamRule(), 4, start=8.0)
    more = {**HALVES, "decoupled_weight_decay": decoupled}
    # ŝ = g²: ¼·(2·1 + 4) = 1.5, or ŝ = (1 + 4)²: ¼·2·1
    first = move(replica, 1, 0.5, decay=0.5, **more)
    assert first == pytest.approx(6.5 if decoupled else 7.5, rel=1e-6)
    # ŝ = (1 + 2·1)/3 = 1: v = ½·1.5 + ¼·(2·1 + 3.25); or g = -2.75 + 3.75 = 1 and
    # ŝ = (25 + 2·1)/3 = 9: v = ½·½ + ¼·2·⅓
    second = move(replica, 1 if decoupled else -2.75, 0.5, decay=0.5, **more)
    wanted = 6.5 - 0.75 - 1.3125 if decoupled else 7.5 - 0.25 - 1 / 6
    assert second == pytest.approx(wanted, rel=1e-6)


def test_adam_rule_begins_with_steps_of_the_right_size() -> None:
    """Torch's betas: the first gradient after warm-up counts as 1, not as 1/√(1 - 0.999)."""
    replica, _ = alone(AdamRule(gain=1.0), 100)
    for step in range(1, 20):
        before = replica.own.item()
        move(replica, 7.0, 0.01)
        assert before - replica.own.item() == pytest.approx(0.01 * (1 - 0.9**step), rel=1e-3)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_rule_is_what_owners_do_where_gradients_are_of_one_size(kind: Any) -> None:
    """One rank and no gain: √s is then the same for all, and the rule follows torch's step."""
    owners = nn.Parameter(torch.ones(1))
    optimizer = kind([owners], lr=0.01, betas=(0.8, 0.99), weight_decay=0.0)
    group = {name: optimizer.param_groups[0][name] for name in ("betas", "eps")}
    replica, _ = alone(AdamRule(gain=1.0), 100, start=1.0)
    torch.manual_seed(0)
    for step in range(130):
        g = 0.5 if torch.rand(1) < 0.6 else -0.5
        owners.grad = torch.tensor([g])
        optimizer.step()
        if step < 100:
            replica.next.copy_(owners.detach())
            replica.take_as_they_are()
        else:
            assert move(replica, g, 0.01, **group) == pytest.approx(owners.item(), abs=2e-6)
