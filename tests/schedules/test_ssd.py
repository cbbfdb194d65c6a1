"""SSD-SGD on real processes: trajectories worked out by hand, delays, skips, bytes, resuming."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import refusal
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR

import laconic as lc
from laconic.schedules import LocalRule, LocalStep
from laconic.sharding._shard import ELEMENTWISE

# A model of one number. Rank i's loss is ½(w - a_i)², a = (0, 4), so g_i = W_i - a_i; two ranks
# (of three, in a group of their own), both start at 0. Every row: W of rank 0, W of rank 1, M,
# after steps 0, 1, 2, .. All numbers are sums of few powers of two, so fp32 is exact.
TARGETS = (0.0, 4.0, 0.0)
Rows = tuple[tuple[float, float, float], ...]

GOLDEN: dict[str, tuple[dict[str, Any], dict[str, Any], Rows]] = {
    # M ← M - ½·ḡ. Weights are those of the pull before: g is one step late.
    "period 1": (
        {"period": 1, "local": None},
        {"lr": 0.5},
        (
            (0, 0, 1),  # ḡ(0) = -2: M = 1; the pull comes a step later
            (1, 1, 2),  # ḡ(0) = -2 again; M = 1 is taken over
            (2, 2, 2.5),  # ḡ(1) = -1
            (2.5, 2.5, 2.5),  # ḡ(2) = 0
            (2.5, 2.5, 2.25),  # ḡ(2.5) = ½
        ),
    ),
    # Pulls start at steps 1 and 3 and are taken over at 2 and 4.
    "period 2": (
        {"period": 2, "local": None},
        {"lr": 0.5},
        ((0, 0, 1), (0, 0, 2), (2, 2, 3), (2, 2, 3), (3, 3, 3)),  # ḡ: -2, -2, -2, 0, 0
    ),
    # Two synchronous steps (ḡ(0) = -2, ḡ(1) = -1), then ḡ(1.5) = -½ three times; the pull that
    # starts at step 3 is taken over at 4.
    "warm-up": (
        {"period": 2, "local": None, "warmup_steps": 2},
        {"lr": 0.5},
        ((1, 1, 1), (1.5, 1.5, 1.5), (1.5, 1.5, 1.75), (1.5, 1.5, 2), (2, 2, 2.25)),
    ),
    # W ← w - ½·g
    "local sgd": (
        {"period": 2, "local": lc.LocalSGDRule()},
        {"lr": 0.5},
        (
            (0, 2, 1),  # g = (0, -4)
            (0, 3, 1.5),  # g = (0, -2)
            (1.5, 2, 1.75),  # g = (0, -1), w = M = 1.5
            (0.75, 3, 1.875),  # g = (1.5, -2)
            (1.5, 2.375, 1.9375),  # g = (0.75, -1), w = M = 1.875
        ),
    ),
    # lr = ¼: Δ = h·[½·g + ¼·(w_pre - w)], h = 1 at step 2, else ½; w_pre = 0, from step 3 on 0.875
    "glu": (
        {"period": 2, "local": lc.GLU()},
        {"lr": 0.25},
        (
            (0, 1, 0.5),  # g = (0, -4), w_pre - w = 0: Δ = (0, -1)
            (0, 1.875, 0.875),  # g = (0, -3), w_pre - w = (0, -1): Δ = (0, -0.875)
            (1.09375, 2.15625, 1.140625),  # g = (0, -2.125), w = 0.875: Δ = ½g - 0.21875
            # g = (1.09375, -1.84375), w_pre - w = (-0.21875, -1.28125)
            # Δ = ½·(0.546875 - 0.0546875, -0.921875 - 0.3203125) = (0.24609375, -0.62109375)
            (0.84765625, 2.77734375, 1.234375),
        ),
    ),
    # weight decay ½: M ← ¾·M - ½·ḡ; Δ = h·[½·(2g + ½·½·w) + ½·(w_pre - w)]
    "glu with weight decay": (
        {"period": 1, "local": lc.GLU()},
        {"lr": 0.5, "weight_decay": 0.5},
        (
            (0, 2, 1),  # g = (0, -4), h = ½: Δ = ½g
            (1.375, 3.375, 1.25),  # g = (0, -2), w = 1, w_pre = 0: Δ = g + ⅛ - ½
            (-0.15625, 1.84375, 0.75),  # g = (1.375, -0.625), w = 1.25, w_pre = 1: Δ = g + 1/32
        ),
    ),
    # momentum ½ (the optimizer's), share ½: v ← ½·v + ¼·g, at a pull v ← v + ½·(W - M)/2 before.
    # m is ½·m + ḡ, M ← M - ¼·m. Means of W are M at every step.
    "momentum": (
        {"period": 2},
        {"lr": 0.25, "momentum": 0.5},
        (
            (0, 1, 0.5),  # g = (0, -4): v = (0, -1)
            (0, 2.25, 1.125),  # g = (0, -3): v = (0, -½ - ¾)
            # g = (0, -1.75), w = 1.125, W - w = (-1.125, 1.125): v = (-0.28125, -1.25 + 0.28125),
            # then ½·v + ¼·g = (-0.140625, -0.921875)
            (1.265625, 2.046875, 1.65625),
        ),
    ),
    # W ← w - ½·(g + ½·g²·(w - W)): as local sgd until the pull of step 3 is taken over at step 4
    "dc-asgd": (
        {"period": 4, "local": lc.DCASGD(strength=0.5)},
        {"lr": 0.5},
        (
            (0, 2, 1),
            (0, 3, 1.5),
            (0, 3.5, 1.75),
            (0, 3.75, 1.875),
            # g = (0, -¼), w = 1.875, w - W = (1.875, -1.875): ½g²(w - W) = (0, -0.05859375)
            (1.875, 2.029296875, 1.9375),
            (0.9375, 3.0146484375, 1.96142578125),  # g = (1.875, -1.970703125)
        ),
    ),
    # the local rate is half of lr: W ← w - ¼·g
    "local rate": (
        {"period": 4, "local": lc.LocalSGDRule(local_lr_scale=0.5)},
        {"lr": 0.5},
        ((0, 1, 1), (0, 1.75, 1.75)),  # g = (0, -4), (0, -3)
    ),
}


class Number(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))


def golden_rows(rank: int) -> dict[str, list[tuple[float, float]]]:
    found = {}
    # rank 2 is alone: names of groups are made of how many groups a process has
    members = [0, 1] if rank < 2 else [2]
    group: Any = dist.new_group(members, use_local_synchronization=True)
    common: dict[str, Any] = {"warmup_steps": 0, "codec": "none", "group": group}
    for name, (settings, of_optimizer, rows) in GOLDEN.items():
        model = Number()
        optimizer = torch.optim.SGD(model.parameters(), **of_optimizer)
        opt = lc.SSD(optimizer, model, **{**common, **settings})
        found[name] = []
        for _ in rows:
            opt.zero_grad()
            (0.5 * (model.w - TARGETS[rank]).square()).backward()
            opt.step()
            own = model.w.item()
            with opt.global_weights():
                found[name].append((own, model.w.item()))
            assert model.w.item() == own
    return found


def network(dtype: torch.dtype = torch.float32, seed: int | None = None) -> nn.Sequential:
    """2458 values: three ranks own 1024, 1024 and 410."""
    # ranks start from the first one's weights
    torch.manual_seed(dist.get_rank() if seed is None else seed)
    return nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 10)).to(dtype)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x[:, :10].argmax(1)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    dtype = next(model.parameters()).dtype
    return nn.functional.cross_entropy(model(x.to(dtype)).float(), y)


def train(
    opt: torch.optim.Optimizer, model: nn.Module, first: int, last: int, rank: int
) -> list[float]:
    losses = []
    for step in range(first, last):
        opt.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


def masters(opt: lc.SSD, model: nn.Module) -> Tensor:
    with opt.global_weights():
        return flat(model)


def shard_of(opt: lc.SSD) -> Any:
    """This rank's part of the master weights; there is no server."""
    owners: Any = opt._master
    return owners.shard


def same_everywhere(x: Tensor) -> bool:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x)
    return all(torch.equal(x, other) for other in every)


def two_groups(model: nn.Module, kind: Any) -> torch.optim.Optimizer:
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    more: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    groups = [{"params": first, "lr": 0.02}, {"params": second, "weight_decay": 0.1}]
    return kind(groups, lr=0.05, **more)


def delayed_sgd(rank: int) -> dict[str, float]:
    """Period 1 without local steps is M ← optimizer(M, mean g(M before)), by plain simulation."""
    found = {}
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        model = network()
        optimizer = two_groups(model, kind)
        opt = lc.SSD(optimizer, model, period=1, warmup_steps=0, local=None, codec="none")
        master = copy.deepcopy(model)
        used = copy.deepcopy(model)
        reference = two_groups(master, kind)
        # a scheduler may sit on the optimizer that was given, or on the schedule
        schedulers = [
            ExponentialLR(optimizer if kind is torch.optim.SGD else opt, 0.9),
            ExponentialLR(reference, 0.9),
        ]
        for step in range(8):
            train(opt, model, step, step + 1, rank)
            used.zero_grad()
            (sum(loss_of(used, i, step) for i in range(3)) / 3).backward()  # pyright: ignore
            used.load_state_dict(master.state_dict())  # what the next gradient will be of
            for p, q in zip(master.parameters(), used.parameters(), strict=True):
                p.grad = q.grad
            reference.step()
            for scheduler in schedulers:
                scheduler.step()
        found[kind.__name__] = float((masters(opt, model) - flat(master)).abs().max())
        found[kind.__name__ + " own"] = float((flat(model) - flat(used)).abs().max())
        found[kind.__name__ + " moved"] = float((flat(master) - flat(network())).abs().max())
    return found


def warm_up_is_ddp(rank: int) -> dict[str, Any]:
    found = {}
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        model = network()
        plain = DistributedDataParallel(network())
        opt = lc.SSD(two_groups(model, kind), model, warmup_steps=6, codec="dqsg:bits=2")
        reference = two_groups(plain.module, kind)
        for step in range(6):
            train(opt, model, step, step + 1, rank)
            reference.zero_grad()
            loss_of(plain, rank, step).backward()
            reference.step()
        found[kind.__name__] = (
            float((flat(model) - flat(plain)).abs().max()),
            same_everywhere(flat(model)),
            torch.equal(masters(opt, model), flat(model)),
        )
    return found


CODECS: tuple[tuple[str, str | None], ...] = (
    ("none", None),
    ("qsgd:bits=4", "qsgd:bits=4"),
    ("ecdq:error=0.08", "ecdq:error=0.08"),
    ("feedback(qsgd-topk)", "bf16"),
    ("rotate(dqsg:bits=3)", "dqsg:bits=2"),
)


def owners_agree(rank: int) -> dict[str, Any]:
    found = {}
    for codec, pull_codec in CODECS:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        opt = lc.SSD(optimizer, model, period=3, warmup_steps=3, codec=codec, pull_codec=pull_codec)
        losses = train(opt, model, 0, 42, rank)  # the last step has taken over a pull
        whole = masters(opt, model)
        moved = (whole - opt._replica.own).norm()
        found[f"{codec} {pull_codec}"] = {
            "first": sum(losses[:3]),
            "last": sum(losses[-3:]),
            "same": same_everywhere(whole),
            "own chunk": torch.equal(opt.flat.chunks(whole)[rank], shard_of(opt).weights),
            "pulled the same": same_everywhere(opt._replica.pulled),
            "pulled near": float((whole - opt._replica.pulled).norm() / moved),
            "own differ": same_everywhere(opt._replica.own),
        }
    return found


def lossy_pulls_forget(rank: int) -> dict[str, list[float]]:
    """Masters that stand still: what ranks have pulled comes nearer with every pull."""
    found = {}
    for pull_codec in ("dqsg:bits=2", "ecdq:error=0.5", "qsgd-topk"):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = lc.SSD(
            optimizer,
            model,
            period=1,
            warmup_steps=0,
            local=None,
            codec="none",
            pull_codec=pull_codec,
        )
        train(opt, model, 0, 3, rank)
        optimizer.param_groups[0]["lr"] = 0.0
        distances = []
        for step in range(3, 24):
            train(opt, model, step, step + 1, rank)
            distances.append(float((masters(opt, model) - opt._replica.pulled).norm()))
        found[pull_codec] = distances[1:]  # at the first one M has still moved
    return found


def bytes_of(rank: int) -> dict[int, int]:
    """1536 values on 3 ranks, 40 steps."""
    found = {}
    for period in (1, 2, 4):
        model = nn.Linear(1536, 1, bias=False)
        opt = lc.SSD(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            period=period,
            warmup_steps=0,
            codec="none",
        )
        for _ in range(40):
            opt.zero_grad()
            model(torch.ones(1, 1536)).sum().backward()
            opt.step()
        opt.wait()
        stats = opt.stats()
        assert (stats.steps, stats.pulls) == (40, 40 // period)
        assert stats.plain_bytes == 40 * 2 * 2 * 1536 * 4 // 3
        found[period] = stats.sent_bytes
    return found


def poisoned(rank: int) -> dict[str, Any]:
    """A NaN, or an infinity, on one rank at one step: that step never happens on any."""
    found = {}
    for codec in ("none", "qsgd:bits=4", "ecdq:error=0.1"):
        for at in (1, 4, 5):  # warm-up; a pull is taken over; a pull starts
            model = network()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            opt = lc.SSD(optimizer, model, period=2, warmup_steps=2, codec=codec)
            train(opt, model, 0, at, rank)
            before, own = masters(opt, model), flat(model)
            opt.zero_grad()
            loss_of(model, rank, at).backward()
            if rank == 1:
                bad = next(model.parameters()).grad
                assert bad is not None
                bad[3, 3] = float("nan" if at % 2 else "inf")
            opt.step()
            stayed = torch.equal(masters(opt, model), before)
            # the rank itself makes no local step either, but may take over a pull
            if at == 4:
                own = before
            still = torch.equal(flat(model), own) if rank == 1 else True
            train(opt, model, at + 1, at + 4, rank)
            moved = not torch.equal(masters(opt, model), before)
            found[f"{codec} {at}"] = (
                stayed,
                still,
                moved,
                bool(flat(model).isfinite().all()),
                opt.stats().skipped_steps,
            )
    return found


def error_of_pushes(rank: int) -> dict[str, float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    opt = lc.SSD(optimizer, model, period=2, warmup_steps=2, codec="ecdq:error=0.1")
    train(opt, model, 0, 8, rank)
    opt.wait()
    return opt.stats().scalars(prefix="")


def overflowing(rank: int) -> tuple[int, int, bool, bool]:
    """Finite gradients, too large for fp16: only the owner of that chunk can see it."""
    model = network()
    opt = lc.SSD(torch.optim.SGD(model.parameters(), lr=1e-7), model, warmup_steps=0, codec="fp16")
    before = masters(opt, model)
    opt.zero_grad()
    loss_of(model, rank, 0).backward()
    first = next(model.parameters()).grad
    assert first is not None
    first[0, 0] = 1e6  # rank 0 owns it
    opt.step()
    after = masters(opt, model)
    stats = opt.stats()
    finite = bool(after.isfinite().all())
    moved = not torch.equal(after[1024:], before[1024:])
    return stats.skipped_steps, stats.skipped_shards, finite, moved


def scaled(rank: int) -> dict[str, Any]:
    """GradScaler: an overflow on rank 2 is skipped on all, and scales may differ afterwards."""
    ends = []
    for scale in (1.0, 1024.0):
        model = network()
        opt = lc.SSD(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            period=2,
            warmup_steps=2,
            codec="none",
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        for step in range(8):
            opt.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            if step == 5:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if step == 3 and rank == 2:
                bad = next(model.parameters()).grad
                assert bad is not None
                bad[0, 0] = float("inf")
            scaler.step(opt)
            scaler.update()
        ends.append(masters(opt, model))
    return {
        "same": same_everywhere(ends[1]),
        "as without": float((ends[0] - ends[1]).abs().max()),
        "skipped": opt.stats().skipped_steps,
        "scale": scaler.get_scale(),
    }


def other_forms(rank: int) -> dict[str, Any]:
    """bf16 models have fp32 masters; a group of ranks 0 and 2; a failing thread; one rank late."""
    model = network(torch.bfloat16)
    opt = lc.SSD(torch.optim.SGD(model.parameters(), lr=0.1), model, period=2, warmup_steps=2)
    losses = train(opt, model, 0, 20, rank)
    found: dict[str, Any] = {
        "bf16 falls": losses[-1] < losses[0],
        "bf16 rounded": torch.equal(flat(model), opt._replica.own.bfloat16().float()),
        "master": shard_of(opt).weights.dtype == torch.float32,
        "pair": True,
    }
    if rank != 1:
        pair: Any = dist.new_group([0, 2], use_local_synchronization=True)
        small = network()
        opt = lc.SSD(torch.optim.Adam(small.parameters()), small, warmup_steps=2, group=pair)
        model = small
        train(opt, small, 0, 9, rank)
        every = [torch.empty(2458), torch.empty(2458)]
        dist.all_gather(every, masters(opt, small), group=pair)
        found["pair"] = torch.equal(*every)

    def broken(*_: object) -> None:
        raise RuntimeError("the disk is on fire")

    shard_of(opt).step = broken
    found["raised"] = []
    for what in (lambda: train(opt, model, 0, 3, rank), opt.wait):
        try:
            what()
        except RuntimeError as error:
            found["raised"].append(str(error))
    return found


def disagreeing(rank: int) -> str:
    model = Number()
    return refusal(lambda: lc.SSD(sgd(model), model, period=2 + rank))


three = ranks.shared(
    [
        golden_rows,
        disagreeing,
        delayed_sgd,
        warm_up_is_ddp,
        owners_agree,
        lossy_pulls_forget,
        bytes_of,
        error_of_pushes,
        poisoned,
        overflowing,
        scaled,
        other_forms,
    ],
    3,
)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_trajectory_worked_out_by_hand(three: ranks.Answers, name: str) -> None:
    rows = [
        (a, b, m)
        for (a, m), (b, _) in zip(
            three[0, "golden_rows"][name], three[1, "golden_rows"][name], strict=True
        )
    ]
    assert rows == [tuple(row) for row in GOLDEN[name][2]]
    assert [m for _, m in three[1, "golden_rows"][name]] == [m for _, _, m in rows]


def test_ranks_that_disagree_say_so(three: ranks.Answers) -> None:
    for rank in range(3):
        assert "period (rank 0: 2; rank 1: 3; rank 2: 4)" in three[rank, "disagreeing"]


def test_period_one_is_delayed_training(three: ranks.Answers) -> None:
    for rank in range(3):
        found = three[rank, "delayed_sgd"]
        for kind in ("SGD", "AdamW"):
            assert found[kind] < 1e-6 and found[kind + " own"] < 1e-6
            assert found[kind + " moved"] > 1e-2


def test_warm_up_is_ddp(three: ranks.Answers) -> None:
    for rank in range(3):
        for distance, same, master in three[rank, "warm_up_is_ddp"].values():
            assert distance < 1e-6 and same and master


@pytest.mark.parametrize("case", [f"{codec} {pull}" for codec, pull in CODECS])
def test_owners_and_ranks_agree(three: ranks.Answers, case: str) -> None:
    for rank in range(3):
        found = three[rank, "owners_agree"][case]
        assert found["same"] and found["own chunk"] and found["pulled the same"]
        assert not found["own differ"]  # that is: they do
        assert found["last"] < 0.7 * found["first"]
        assert found["pulled near"] < 2


def test_lossy_pulls_do_not_accumulate_errors(three: ranks.Answers) -> None:
    for codec, distances in three[0, "lossy_pulls_forget"].items():
        assert all(b <= a for a, b in pairwise(distances)), codec
        assert distances[-1] < 0.5 * distances[0], (codec, distances)


def test_statistics_tell_the_error_of_pushes(three: ranks.Answers) -> None:
    for rank in range(3):
        stats = three[rank, "error_of_pushes"]
        assert stats["error_budget"] == 0.1
        assert 0 < stats["error_mean"] <= stats["error_largest"] <= 0.11


def test_bytes_are_those_of_the_formula(three: ranks.Answers) -> None:
    """(1 + 1/k)·(n-1)/n·M a step; wires have 80 bytes of heads, a push 16 of flag."""
    whole, steps, peers = 4 * 1536, 40, 2
    for rank in range(3):
        for period, sent in three[rank, "bytes_of"].items():
            pulls = steps // period
            values = sent - peers * ((80 + 16) * steps + 80 * pulls)
            assert values == (steps + pulls) * whole * 2 // 3


def test_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(three: ranks.Answers) -> None:
    for rank in range(3):
        for case, answers in three[rank, "poisoned"].items():
            assert answers == (True, True, True, True, 1), (rank, case)


def test_an_overflowing_wire_does_not_reach_the_masters(three: ranks.Answers) -> None:
    for rank in range(3):
        assert three[rank, "overflowing"] == (0, 1 if rank == 0 else 0, True, True)


def test_grad_scaler(three: ranks.Answers) -> None:
    for rank in range(3):
        found = three[rank, "scaled"]
        assert found["same"] and found["skipped"] == 1 and found["as without"] < 1e-6
        assert found["scale"] == (512.0 if rank == 2 else 1024.0)


def test_other_forms(three: ranks.Answers) -> None:
    for rank in range(3):
        found = three[rank, "other_forms"]
        assert found.pop("raised") == ["the disk is on fire"] * 2
        assert all(found.values()), found


def moment(fresh: bool, square: Tensor | None = None) -> LocalStep:
    w, seen = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 1.0])
    return LocalStep(
        w=w,
        g=torch.tensor([2.0, -1.0]),
        seen=seen if fresh else w,
        pulled=torch.tensor([0.0, 4.0]),
        square=square,
        fresh=fresh,
        period=4,
        lr=0.1,
        decay=0.01,
    )


def test_adaptive_delay_compensation() -> None:
    square, at = torch.tensor([1.0, 0.0]), moment(True)
    out = torch.empty(2)
    lc.DCASGD(adaptive=True, strength=2.0).step(moment(True, square), out)
    mean = 0.95 * torch.tensor([1.0, 0.0]) + 0.05 * at.g**2
    torch.testing.assert_close(square, mean)
    extra = 2.0 / (mean + 1e-7).sqrt() * at.g**2 * (at.w - at.seen)
    torch.testing.assert_close(out, 0.1 * (at.g + extra + 0.01 * at.w))


@pytest.mark.parametrize("rule", [lc.GLU(), lc.DCASGD(), lc.DCASGD(adaptive=True)])
def test_a_rule_may_write_over_what_was_seen(rule: LocalRule) -> None:
    squares = torch.ones(2), torch.ones(2)
    out, at = torch.empty(2), moment(True, squares[0] if rule.remembers else None)
    rule.step(at, out)
    again = moment(True, squares[1] if rule.remembers else None)
    rule.step(again, again.seen)
    assert torch.equal(again.seen, out)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


BAD_SETTINGS: dict[str, dict[str, Any]] = {
    "period must be an integer from 1, not 0": {"period": 0},
    "warmup_steps must be an integer from 0, not 1.5": {"warmup_steps": 1.5},
    "seed must be an integer from 0, not -1": {"seed": -1},
    "timeout_s must be a positive number": {"timeout_s": 0},
    "local must be .auto., MomentumRule": {"local": "glu"},
    "AdamRule makes the steps of Adam and AdamW, and the optimizer is SGD: local=.auto. takes": {
        "local": lc.AdamRule()
    },
    "leave out what follows the @": {"codec": "dqsg:bits=4@ring"},
    "ndqsg needs a server": {"codec": "ndqsg"},
    "feedback would add it twice": {"pull_codec": "feedback(qsgd:bits=2)"},
}


@pytest.mark.parametrize("message", BAD_SETTINGS)
@pytest.mark.usefixtures("alone")
def test_bad_settings_are_refused(message: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(lc.ConfigError, match=message):
        lc.SSD(sgd(model), model, **BAD_SETTINGS[message])


def _stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return optimizer


BAD_OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "LBFGS cannot be cut among ranks": lambda model: torch.optim.LBFGS(model.parameters()),
    "Adafactor cannot be cut": lambda model: torch.optim.Adafactor(model.parameters()),
    "give a torch optimizer": lambda model: model,
    "has taken steps already": _stepped,
    "2 parameters that are not in the model": lambda _: sgd(nn.Linear(2, 2)),
    "give -loss instead": lambda model: torch.optim.SGD(model.parameters(), maximize=True),
}


@pytest.mark.parametrize("message", BAD_OPTIMIZERS)
@pytest.mark.usefixtures("alone")
def test_optimizers_that_cannot_work_are_refused(message: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(lc.ConfigError, match=message):
        lc.SSD(BAD_OPTIMIZERS[message](model), model)


@pytest.mark.usefixtures("alone")
def test_models_that_exchange_by_themselves_are_refused() -> None:
    inner = nn.Linear(2, 2)
    for model in (DistributedDataParallel(inner), nn.Sequential(DistributedDataParallel(inner))):
        with pytest.raises(lc.ConfigError, match="give the module itself"):
            lc.SSD(sgd(inner), model)
    sharded: Any = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(lc.ConfigError, match="which FSDP cuts"):
        lc.SSD(sgd(sharded), sharded)


def test_a_process_group_is_needed() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(lc.ConfigError, match="init_process_group"):
        lc.SSD(sgd(model), model)


@pytest.mark.usefixtures("alone")
def test_misuse_of_a_schedule() -> None:
    model = nn.Linear(2, 2)
    opt = lc.SSD(sgd(model), model, warmup_steps=0)
    with pytest.raises(lc.ConfigError, match="takes no closure"):
        opt.step(lambda: None)
    with pytest.raises(lc.ConfigError, match="weight has no gradient"):
        opt.step()
    with pytest.raises(lc.ConfigError, match="before making the schedule"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with opt.global_weights(), pytest.raises(lc.ConfigError, match="leave the with block"):
        opt.step()
    model(torch.ones(2)).sum().backward()
    model.bias.requires_grad_(False)
    with pytest.raises(lc.ConfigError, match="bias was frozen .* after SSD was made"):
        opt.step()
    model.bias.requires_grad_(True)
    opt.step()
    other = lc.SSD(sgd(model), model, warmup_steps=0, period=3)
    with pytest.raises(lc.ConfigError, match="period 4, not 3"):
        other.load_state_dict(opt.state_dict())


@pytest.mark.usefixtures("alone")
def test_schedulers_of_the_optimizer_see_that_it_steps() -> None:
    """Without a warning, that is."""
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    opt, rate = lc.SSD(optimizer, model, warmup_steps=1), ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        opt.zero_grad()
        model(torch.ones(2)).sum().backward()
        opt.step()
        rate.step()
    assert opt.param_groups[0]["lr"] == 0.1 * 0.5**3


@pytest.mark.usefixtures("alone")
def test_a_sparse_gradient_is_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(lc.ConfigError, match="weight has sparse gradients, .* sparse=False"):
        lc.SSD(sgd(model), model)
    model.sparse = False
    opt = lc.SSD(sgd(model), model)
    nn.functional.embedding(torch.tensor([1]), model.weight, sparse=True).sum().backward()
    with pytest.raises(lc.ConfigError, match="weight has sparse gradients"):
        opt.step()


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
@pytest.mark.usefixtures("alone")
def test_every_allowed_optimizer_steps_as_it_does_alone(kind: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    more: dict[str, Any] = {"initial_accumulator_value": 0.5} if kind is torch.optim.Adagrad else {}
    reference = kind(plain.parameters(), lr=0.01, **more)
    opt = lc.SSD(kind(model.parameters(), lr=0.01, **more), model, warmup_steps=4)
    for _ in range(4):
        x = torch.randn(4, 3)
        for net, one in ((model, opt), (plain, reference)):
            one.zero_grad()
            net(x).square().sum().backward()
            one.step()
    assert torch.equal(flat(model), flat(plain))


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
@pytest.mark.usefixtures("alone")
def test_the_rule_fits_the_optimizer(kind: Any) -> None:
    model = nn.Linear(2, 2)
    wanted = {"SGD": lc.MomentumRule(), "Adam": lc.AdamRule(), "AdamW": lc.AdamRule()}
    opt = lc.SSD(kind(model.parameters(), lr=0.1), model)
    assert opt.local == wanted.get(kind.__name__)
    assert opt._settings()["local"] == str(opt.local)
    assert lc.SSD(kind(model.parameters(), lr=0.1), model, local=lc.GLU()).local == lc.GLU()
    if kind is not torch.optim.SGD:
        with pytest.raises(lc.ConfigError, match="MomentumRule makes the steps of SGD, and the"):
            lc.SSD(kind(model.parameters(), lr=0.1), model, local=lc.MomentumRule())


@pytest.mark.parametrize("kind", [lc.GLU, lc.DCASGD, lc.LocalSGDRule, lc.MomentumRule, lc.AdamRule])
def test_rules_check_their_numbers(kind: Any) -> None:
    for value in (-1.0, float("nan"), "fast"):
        with pytest.raises(lc.ConfigError, match="local_lr_scale must be a number from 0"):
            kind(local_lr_scale=value)


@pytest.mark.usefixtures("alone")
def test_training_goes_on_while_pushes_are_on_their_way() -> None:
    """A thread that is held up does not stop the main one, until its weights are needed."""
    model = Number()
    opt = lc.SSD(sgd(model), model, warmup_steps=0, period=2, local=None, codec="none")
    masters: Any = opt._master
    gate, run = threading.Event(), masters._run

    def held(one: Any) -> None:
        assert gate.wait(20)
        run(one)

    masters._run = held
    for slope in (1.0, 2.0, 4.0):
        if slope == 4.0:
            assert model.w.item() == 0.0
            assert not any(ticket._future.done() for ticket in masters.in_flight._works)
            threading.Timer(0.3, gate.set).start()  # step 2 needs what has not come yet
        opt.zero_grad()
        (slope * model.w).backward()
        opt.step()
    torch.testing.assert_close(model.w.item(), -0.1 * (1.0 + 2.0))  # both gradients are intact
    with opt.global_weights():
        torch.testing.assert_close(model.w.item(), -0.1 * (1.0 + 2.0 + 4.0))
