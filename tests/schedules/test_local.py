"""Local SGD, post-local SGD and DiLoCo on 3 real processes, against trajectories made by hand."""

from __future__ import annotations

import copy
import threading
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import equal_everywhere
from test_ddp import batch, flat, network
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic as lc
from laconic.comm._context import ExchangeContext

SIZE = 3


def every(name: str, parameter: nn.Parameter) -> bool:
    """A policy: all is encoded."""
    return True


class One(nn.Module):
    """A model of one number w, with another loss on each rank.

    With lr = 0.5 a step is  rank 0: w + 3  (loss -6w),  rank 1: w/2  (w²/2),  rank 2: 0  (w²).
    """

    def __init__(self, start: float = 12.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start]))

    def forward(self) -> Tensor:
        w = self.w.sum()
        return (-6 * w, w * w / 2, w * w)[dist.get_rank()]


def follow(
    steps: int, start: float = 12.0, then: Any = None, **settings: Any
) -> tuple[list[float], list[float]]:
    """w of this rank after every step, and the common one; at the end after `then`, too."""
    model = One(start)
    opt = lc.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.5), model, codec="none", **settings)
    own, common = [], []
    for step in range(steps + (then is not None)):
        opt.zero_grad()
        if step < steps:
            model().backward()
            opt.step()
        else:
            then(opt)
        own.append(model.w.item())
        with opt.global_weights():
            common.append(model.w.item())
    return own, common


def golden(rank: int) -> dict[str, Any]:
    found = {
        "period 1": follow(3, period=1),
        "period 2": follow(4, period=2),
        "period 4": follow(4, 48.0, period=4),
        "nesterov": follow(4, period=2, outer=lc.Nesterov(lr=0.5, momentum=0.5)),
        "torch's nesterov": follow(
            4,
            period=2,
            outer=partial(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=True),
        ),
        "heavy ball": follow(4, period=2, outer=lc.HeavyBall(lr=0.5, momentum=0.5)),
        "warm-up": follow(3, period=2, warmup_steps=1),
        "overlap": follow(8, period=2, overlap=True),
        "overlap, nesterov": follow(
            6, period=2, overlap=True, outer=lc.Nesterov(lr=0.5, momentum=0.5)
        ),
        "overlap by 1": follow(5, period=2, overlap=True, overlap_steps=1),
        "synchronize": follow(2, period=4, then=lc.LocalSGD.synchronize),
        "synchronize, overlap": follow(3, period=2, overlap=True, then=lc.LocalSGD.synchronize),
        "all plain": follow(2, period=2, policy=lambda name, p: False),
        "encoded": follow(2, period=2, policy=every),
    }
    return found


def trained(
    rank: int, steps: int, model: nn.Module | None = None, inner: str = "SGD", **settings: Any
) -> tuple[nn.Module, lc.LocalSGD]:
    model = network() if model is None else model
    kinds: dict[str, Any] = {
        "plain": lambda p: torch.optim.SGD(p, lr=0.1),
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "decay": lambda p: torch.optim.SGD(
            p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
        ),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    }
    opt = lc.LocalSGD(kinds[inner](model.parameters()), model, **settings)
    proceed(rank, model, opt, 0, steps)
    return model, opt


def proceed(rank: int, model: nn.Module, opt: Any, first: int, last: int) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(first, last):
        x, y = batch(rank, step)
        opt.zero_grad()
        nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()
        opt.step()


def same_bits(rank: int) -> dict[str, Any]:
    """Equal after an exchange, different before it."""
    found = {}
    for spec in (
        "none",
        "fp16",
        "qsgd:bits=4",
        "ecdq:error=0.05",
        "ecdq:error=0.05@allgather",
        "global:bits=8",
        "feedback(qsgd-topk)",
    ):
        model, opt = trained(rank, 5, period=3, codec=spec, policy=every, outer=lc.Nesterov())
        before = equal_everywhere(model)
        proceed(rank, model, opt, 5, 6)
        found[spec] = not before and equal_everywhere(model)
        with opt.global_weights():
            kept = flat(model)
        found[spec] &= torch.equal(flat(model), kept)
    model, opt = trained(rank, 6, network().bfloat16(), period=3, codec="ecdq:error=0.05")
    found["bfloat16"] = equal_everywhere(model)
    model, opt = trained(rank, 7, inner="AdamW", period=3, codec="ecdq:error=0.05", overlap=True)
    with opt.global_weights():
        found["overlap"] = equal_everywhere(model)
    found["overlap"] &= not equal_everywhere(model)
    opt.synchronize()
    found["synchronize"] = equal_everywhere(model)
    return found


def like_synchronous(rank: int) -> dict[str, Any]:
    """What the docstring derives: period=1 with SGD is synchronous SGD, Adam is not."""
    found = {}
    cases: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
        ("plain", "plain", {}, {"lr": 0.1}),
        ("momentum", "SGD", {}, {"lr": 0.1, "momentum": 0.9}),
        (
            "decay",
            "decay",
            {},
            {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        ),
        (
            "outer",
            "plain",
            {"outer": lc.Nesterov(lr=0.7, momentum=0.8)},
            {"lr": 0.07, "momentum": 0.8, "nesterov": True},
        ),
    )
    for name, inner, settings, rate in cases:
        model, _ = trained(rank, 8, inner=inner, period=1, codec="none", **settings)
        ddp = DistributedDataParallel(network())
        proceed(rank, ddp, torch.optim.SGD(ddp.parameters(), **rate), 0, 8)
        found[name] = torch.allclose(flat(model), flat(ddp), atol=2e-6)
    model, _ = trained(rank, 8, inner="AdamW", period=1, codec="none")
    ddp = DistributedDataParallel(network())
    proceed(rank, ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-3), 0, 8)
    found["Adam differs"] = not torch.allclose(flat(model), flat(ddp), atol=2e-4)
    model, opt = trained(rank, 4, period=2, codec="none", warmup_steps=4)
    ddp = DistributedDataParallel(network())
    inner = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    proceed(rank, ddp, inner, 0, 4)
    found["warm-up"] = torch.allclose(flat(model), flat(ddp), atol=1e-6) and equal_everywhere(model)
    proceed(rank, model, opt, 4, 5)
    found["then local"] = not equal_everywhere(model)
    proceed(rank, model, opt, 5, 6)
    found["then common"] = equal_everywhere(model) and opt.stats().exchanges == 1
    return found


def broken(rank: int) -> dict[str, Any]:
    """A loss that is not finite on rank 1 at step 4: everyone goes back, and then goes on."""
    found = {}
    for name, settings in {
        "none": {"codec": "none"},
        "ecdq": {"codec": "ecdq:error=0.05"},
        "feedback": {"codec": "feedback(qsgd-topk)"},
        "plain part": {"codec": "ecdq:error=0.05", "policy": lambda name, p: name == "4.weight"},
        "overlap": {"codec": "ecdq:error=0.05", "overlap": True},
    }.items():
        model, opt = trained(rank, 4, period=2, **{"policy": every, **settings})
        opt.synchronize()
        before = flat(model).clone()
        x, y = batch(rank, 4)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        (loss * torch.nan if rank == 1 else loss).backward()
        opt.step()
        if settings.get("overlap"):
            proceed(rank, model, opt, 5, 8)  # one that is sent at step 6 lands at step 8
            with opt.global_weights():
                back = torch.equal(flat(model), before)
        else:
            proceed(rank, model, opt, 5, 6)
            back = torch.equal(flat(model), before)
        skipped = opt.stats().skipped
        proceed(rank, model, opt, 8, 14)
        opt.synchronize()
        moved = bool(flat(model).isfinite().all()) and not torch.equal(flat(model), before)
        momentum = [s["momentum_buffer"] for s in opt.state.values()]
        fine = all(bool(one.isfinite().all()) for one in momentum)
        found[name] = (back, skipped, opt.stats().skipped, moved, fine, equal_everywhere(model))
    model, opt = trained(rank, 1, period=2, codec="none", warmup_steps=4)
    before = flat(model).clone()
    total = torch.stack([p.sum() for p in model.parameters()]).sum()
    (total * (torch.inf if rank == 2 else 1)).backward()
    opt.step()
    found["warm-up"] = (torch.equal(flat(model), before), opt.stats().skipped)
    return found


def counted(rank: int) -> dict[str, Any]:
    """Bytes: exactly 1/period of DDP's without a codec, and far fewer with one."""
    found = {}
    for period in (1, 2, 4):
        model = nn.Linear(120, 30)  # 3630 values: thirds of 3600 and of 30 are whole
        opt = lc.LocalSGD(
            torch.optim.SGD(model.parameters(), lr=0.1), model, period=period, codec="none"
        )
        for _ in range(8):
            model(torch.ones(120)).sum().backward()
            opt.step()
        stats = opt.stats()
        found[period] = (stats.sent_bytes, stats.plain_bytes, stats.exchanges, stats.steps)
    _, opt = trained(rank, 8, period=4, codec="ecdq:error=0.08", policy=every)
    found["ecdq"] = opt.stats().ratio
    found["kappa"] = opt.stats().kappa
    return found


class WithBuffers(nn.Module):
    """Running statistics, a constant, a mask without a mean, an integer, and a frozen part."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.first, self.norm, self.last = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)
        self.register_buffer("table", torch.rand(7))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("flags", torch.tensor([True, bool(rank)]))
        self.register_buffer("seen", torch.zeros(1))
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1 + dist.get_rank()  # a new tensor every time
        return self.last(self.norm(self.first(x)))


def buffers(rank: int) -> dict[str, Any]:
    def gathered(x: Tensor) -> Tensor:
        every = [torch.empty_like(x) for _ in range(SIZE)]
        dist.all_gather(every, x)
        return torch.stack(every)

    found = {}
    model: Any = WithBuffers(rank)
    table: Any = WithBuffers(0).table
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    opt = lc.LocalSGD(inner, model, period=2, codec="none")
    for name in ("frozen", "flags", "table"):
        found[f"rank 0's {name}"] = torch.equal(getattr(model, name), getattr(WithBuffers(0), name))
    found["rank 0's weights"] = equal_everywhere(model)
    proceed(rank, model, opt, 0, 1)
    own = model.norm.running_mean.clone()
    found["own"] = not torch.equal(*gathered(own)[:2])
    alone = copy.deepcopy(model)
    proceed(rank, alone, torch.optim.SGD(alone.parameters(), lr=0.1), 1, 2)
    mean = gathered(alone.norm.running_var).mean(0)
    proceed(rank, model, opt, 1, 2)
    found["mean"] = torch.allclose(model.norm.running_var, mean, atol=1e-6)
    found["equal"] = torch.equal(*gathered(model.norm.running_var)[:2])
    found["table"] = torch.equal(model.table, table)
    found["mask"] = model.mask.tolist() == [0.0, -torch.inf]
    found["replaced"] = model.seen.tolist() == [4.0]  # mean of 2, 4, 6
    found["finite"] = opt.stats().skipped == 0

    model = WithBuffers()
    opt = lc.LocalSGD(
        torch.optim.SGD(model.norm.parameters(), lr=0.1), model, period=2, overlap=True
    )
    proceed(rank, model, opt, 0, 2)
    mean = gathered(model.norm.running_mean).mean(0)
    proceed(rank, model, opt, 2, 4)
    own = model.norm.running_mean.clone()
    found["overlap keeps own"] = not torch.equal(*gathered(own)[:2])
    with opt.global_weights():
        found["overlap shows the mean"] = torch.allclose(model.norm.running_mean, mean, atol=1e-6)
    found["and gives own back"] = torch.equal(model.norm.running_mean, own)
    mean = gathered(own).mean(0)
    proceed(rank, model, opt, 4, 6)
    with opt.global_weights():
        found["and the next"] = torch.allclose(model.norm.running_mean, mean, atol=1e-6)

    model = WithBuffers()
    opt = lc.LocalSGD(torch.optim.SGD(model.norm.parameters(), lr=0.1), model, warmup_steps=2)
    proceed(rank, model, opt, 0, 1)
    found["warm-up"] = torch.equal(*gathered(model.norm.running_mean)[:2])
    found["warm-up moves"] = bool(model.norm.running_mean.any())  # zero at first
    model = WithBuffers()
    opt = lc.LocalSGD(
        torch.optim.SGD(model.norm.parameters(), lr=0.1), model, period=1, buffers=False
    )
    proceed(rank, model, opt, 0, 1)
    found["not asked for"] = not torch.equal(*gathered(model.norm.running_mean)[:2])
    return found


def learning_rates(rank: int) -> dict[str, Any]:
    """torch's schedulers take the schedule, or the optimizer inside; nothing warns."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for which in ("schedule", "inside"):
            model = One()
            inner = torch.optim.SGD(model.parameters(), lr=0.5)
            opt = lc.LocalSGD(inner, model, period=2, codec="none")
            rates = torch.optim.lr_scheduler.StepLR(
                opt if which == "schedule" else inner, 2, gamma=0.5
            )
            for _ in range(4):
                opt.zero_grad()
                opt.step(lambda model=model: model().backward())
                rates.step()
            found[which] = (model.w.item(), opt.param_groups[0]["lr"], inner.param_groups[0]["lr"])
        torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1.0, total_steps=4)  # looks at defaults
    return found


def scaled(rank: int) -> dict[str, Any]:
    """GradScaler: an overflow on rank 1 skips a local step there, and a step of warm-up on all."""
    found = {}
    for warmup in (0, 4):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = lc.LocalSGD(inner, model, period=4, codec="none", warmup_steps=warmup)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
        plain = network()
        reference = lc.LocalSGD(
            torch.optim.SGD(plain.parameters(), lr=0.1),
            plain,
            period=4,
            codec="none",
            warmup_steps=warmup,
        )
        moved, near = [], False
        for step in range(4):
            before = flat(model).clone()
            x, y = batch(rank, step)
            overflow = step == 1 and rank == 1
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss * torch.inf if overflow else loss).backward()
            if step == 2:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            scaler.step(opt)
            scaler.update()
            moved.append(not torch.equal(before, flat(model)))
            if step == 0:
                proceed(rank, plain, reference, 0, 1)
                near = torch.allclose(flat(plain), flat(model), atol=1e-6)
        found[str(warmup)] = (moved, scaler.get_scale(), near, equal_everywhere(model))
    return found


@dataclass(frozen=True, kw_only=True)
class Watched(lc.ScatterReduce):
    """Keeps the calls; may wait until it is told to go on, or fail."""

    calls: list[ExchangeContext] = field(default_factory=list, compare=False)
    go: threading.Event | None = field(default=None, compare=False, repr=False)
    waited: list[bool] = field(default_factory=list, compare=False)
    fails: bool = False

    def mean(
        self,
        x: Tensor,
        codec: lc.Codec,
        context: ExchangeContext,
        uncompressed: Tensor | None = None,
    ) -> None:
        self.calls.append(context)
        if self.go is not None:
            self.waited.append(self.go.wait(20))
        if self.fails:
            raise RuntimeError("the network is down")
        super().mean(x, codec, context, uncompressed)


def watched(rank: int) -> dict[str, Any]:
    found = {}
    way = Watched()
    trained(rank, 6, period=2, exchange=way, policy=every, seed=5)
    found["draws"] = [(context.seed, context.step) for context in way.calls]
    found["places"] = [place.numel for place in way.calls[0].places]
    found["one memory"] = len({id(context.memory) for context in way.calls}) == 1
    for name, policy in {"default": None, "one": lambda name, p: name == "4.weight"}.items():
        other = Watched()
        trained(rank, 1, period=1, exchange=other, policy=policy)
        found[name] = [place.numel for place in other.calls[0].places]
    buffers = [
        {name: kept.data_ptr() for name, kept in context.scratch._kept.items()}
        for context in way.calls
    ]
    found["one scratch"] = buffers[0] == buffers[2]

    way = Watched(go=threading.Event())
    model, opt = trained(rank, 3, period=2, exchange=way, policy=every, overlap=True)
    found["behind"] = opt.stats().steps == 3  # step 2 started an exchange that is not over
    assert way.go is not None
    way.go.set()
    proceed(rank, model, opt, 3, 4)
    found["went on"] = way.waited[0]

    model, opt = trained(
        rank, 3, period=2, exchange=Watched(fails=True), policy=every, overlap=True
    )
    with pytest.raises(RuntimeError, match="network is down"):
        proceed(rank, model, opt, 3, 4)
    found["error surfaces"] = True
    return found


def refused(rank: int) -> dict[str, str]:
    """Sentences for what needs a process group; disagreement is told on all ranks."""
    found = {}

    def said(name: str, model: nn.Module, optimizer: Any = None, **settings: Any) -> None:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(lc.ConfigError) as caught:
            lc.LocalSGD(optimizer, model, **settings)
        found[name] = str(caught.value)

    said("ddp", DistributedDataParallel(network()))
    said("inside", nn.Sequential(DistributedDataParallel(network())))
    said("other", network(), torch.optim.SGD(network().parameters(), lr=0.1))
    said("double", network().double())
    said("policy", network(), policy=lc.Policy(rules={"*": "fp16"}))
    said("ranks", network(), period=2 + rank)
    said("outer of ranks", network(), outer=partial(torch.optim.SGD, lr=1 + rank))
    model, opt = trained(rank, 1, period=2, codec="none")
    opt.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(lc.ConfigError) as caught:
        proceed(rank, model, opt, 1, 2)
    found["grew"] = str(caught.value)
    _, opt = trained(rank, 0, codec="none", outer=lc.Nesterov())
    for name, spec in {"codec": "fp16", "outer": "none"}.items():
        with pytest.raises(lc.ConfigError) as caught:
            trained(rank, 0, codec=spec)[1].load_state_dict(opt.state_dict())
        found[f"state, {name}"] = str(caught.value)
    return found


def some_ranks(rank: int) -> bool:
    """Ranks 0 and 2 train, rank 1 does not."""
    group: Any = dist.new_group([0, 2])
    if rank == 1:
        return True
    model, _ = trained(rank, 4, period=2, codec="ecdq:error=0.05", policy=every, group=group)
    mine = flat(model)
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine, group=group)
    return torch.equal(*both)


MATHS = (golden, same_bits, like_synchronous, broken)
USES = (counted, buffers, learning_rates, scaled, watched, refused, some_ranks)
maths = ranks.shared(MATHS, SIZE)
uses = ranks.shared(USES, SIZE)


def of_all(answers: ranks.Answers, name: str) -> list[Any]:
    return [answers[rank, name] for rank in range(SIZE)]


def test_a_period_is_that_many_steps_and_then_the_mean(maths: ranks.Answers) -> None:
    for rank, found in enumerate(of_all(maths, "golden")):
        # period 1: x ← mean(x + 3, x/2, 0) = x/2 + 1
        assert found["period 1"][0] == pytest.approx([7, 4.5, 3.25])
        # period 2: 12 → 15, 6, 0 → mean(18, 3, 0) = 7 → 10, 3.5, 0 → mean(13, 1.75, 0)
        own, common = found["period 2"]
        assert own == pytest.approx([(15, 6, 0)[rank], 7, (10, 3.5, 0)[rank], 14.75 / 3])
        assert common == pytest.approx([12, 7, 7, 14.75 / 3])
        # period 4: 48 → mean(60, 3, 0) = 21
        assert found["period 4"][0][-1] == pytest.approx(21)
        for name in ("all plain", "encoded"):
            assert found[name][0][-1] == pytest.approx(7)


def test_synchronize_brings_all_progress_together(maths: ranks.Answers) -> None:
    for found in of_all(maths, "golden"):
        # two steps of a period of 4: mean(18, 3, 0)
        assert [one[-1] for one in found["synchronize"]] == pytest.approx([7, 7])
        # x_1 = 7 is under way, p = 3, -1.5, 0 since then: mean 0.5
        assert [one[-1] for one in found["synchronize, overlap"]] == pytest.approx([7.5, 7.5])


def test_the_outer_step_by_hand(maths: ranks.Answers) -> None:
    for found in of_all(maths, "golden"):
        # Nesterov, lr = β = 1/2: δ = 12 - 7 = 5, m = 5, x = 12 - (2.5 + 5)/2 = 8.25.
        # Then 8.25 → mean(14.25, 2.0625, 0) = 5.4375, δ = 2.8125, m = 5.3125,
        # x = 8.25 - (2.65625 + 2.8125)/2 = 5.515625
        for name in ("nesterov", "torch's nesterov"):
            assert found[name][0][1::2] == pytest.approx([8.25, 5.515625])
        # heavy ball: x = 12 - 5/2 = 9.5 → mean(15.5, 2.375, 0) = 5.958333, δ = 3.541667,
        # m = 6.041667, x = 9.5 - 3.0208333
        assert found["heavy ball"][0][1::2] == pytest.approx([9.5, 6.4791667])


def test_warm_up_averages_gradients_at_every_step(maths: ranks.Answers) -> None:
    for rank, found in enumerate(of_all(maths, "golden")):
        # at 12 gradients are -6, 12, 24: mean 10, x = 12 - 5 = 7; then a period of 2 as above
        own, common = found["warm-up"]
        assert own == pytest.approx([7, (10, 3.5, 0)[rank], 14.75 / 3])
        assert common == pytest.approx([7, 7, 14.75 / 3])


def test_overlap_keeps_the_steps_made_meanwhile(maths: ranks.Answers) -> None:
    for rank, found in enumerate(of_all(maths, "golden")):
        # boundary 1 (step 2): weights 18, 3, 0; δ = -6, 9, 12: mean 5, so x_1 = 7, used at step 4.
        # Steps 3, 4: 21 24 / 1.5 .75 / 0 0: p = 6, -2.25, 0. x_i = 7 + p = 13, 4.75, 7;
        # mean of -p is -1.25: x_2 = 8.25, used at step 6.
        # Steps 5, 6: 16 19 / 2.375 1.1875 / 0 0: p = 6, -3.5625, -7. x_i = 14.25, 4.6875, 1.25;
        # mean of -p is 4.5625/3: x_3 = 6.7291667, used at step 8.
        # Steps 7, 8: 17.25 20.25 / 2.34375 1.171875 / 0 0: p = 6, -3.515625, -1.25
        own, common = found["overlap"]
        steps = (
            (15, 18, 21, 13, 16, 14.25, 17.25, 12.7291667),
            (6, 3, 1.5, 4.75, 2.375, 4.6875, 2.34375, 3.2135417),
            (0, 0, 0, 7, 0, 1.25, 0, 5.4791667),
        )
        assert own == pytest.approx(steps[rank])
        assert common == pytest.approx([12, 12, 12, 7, 7, 8.25, 8.25, 6.7291667])
        # with Nesterov, lr = β = 1/2: m = 5, x_1 = 12 - 7.5/2 = 8.25; x_i = 8.25 + p; then
        # m = 2.5 - 1.25 = 1.25, x_2 = 8.25 - (0.625 - 1.25)/2 = 8.5625
        assert found["overlap, nesterov"][1][3::2] == pytest.approx([8.25, 8.5625])
        # used after one step: p = 3, -1.5, 0 on top of 7, then another step, and boundary 2:
        # 13, 2.75, 0: δ = 7 - these = -6, 4.25, 7: mean 1.75, x_2 = 5.25
        own, common = found["overlap by 1"]
        late = ((15, 18, 10, 13, 8.25), (6, 3, 5.5, 2.75, 3.875), (0, 0, 7, 0, 5.25))
        assert own == pytest.approx(late[rank])
        assert common == pytest.approx([12, 12, 7, 7, 5.25])


@pytest.mark.parametrize("job", ["same_bits", "like_synchronous"])
def test_what_must_hold(maths: ranks.Answers, job: str) -> None:
    for found in of_all(maths, job):
        assert found and all(found.values()), found


def test_buffers_become_their_mean(uses: ranks.Answers) -> None:
    for found in of_all(uses, "buffers"):
        assert found and all(found.values()), found


def test_what_is_not_finite_is_skipped_by_all(maths: ranks.Answers) -> None:
    for found in of_all(maths, "broken"):
        assert found.pop("warm-up") == (True, 1)
        for name, (back, before, after, moved, momentum, equal) in found.items():
            assert back and before == 1 and moved and momentum and equal, name
            # behind the exchange that is skipped, the rank sends steps that are lost, too
            assert after <= (2 if name == "overlap" else 1), name


def test_bytes_are_those_of_a_period(uses: ranks.Answers) -> None:
    ring = 2 * 2 * 4 * 3630 // 3
    for found in of_all(uses, "counted"):
        for period in (1, 2, 4):
            sent, *others = found[period]
            assert others == [ring * 8, 8 // period, 8]
            assert sent * period == found[1][0]
            assert sent == pytest.approx(ring * 8 / period, rel=0.01)  # and frames
        assert found["ecdq"] > 4 * 6
        assert 0 < found["kappa"] <= 1


def test_learning_rates_are_those_of_the_optimizer_inside(uses: ranks.Answers) -> None:
    for found in of_all(uses, "learning_rates"):
        # 7 as above; then with lr = 0.25: 7 → +1.5 twice; ·3/4 twice; ·1/2 twice
        mean = (10 + 7 * 9 / 16 + 7 / 4) / 3
        assert found["schedule"] == found["inside"] == (pytest.approx(mean), 0.125, 0.125)


def test_grad_scaler_skips_where_it_must(uses: ranks.Answers) -> None:
    for rank, found in enumerate(of_all(uses, "scaled")):
        scale = 32.0 if rank == 1 else 64.0
        assert found["0"] == ([True, rank != 1, True, True], scale, True, True)
        assert found["4"] == ([True, False, True, True], scale, True, True)


def test_the_exchange_is_called_as_it_should_be(uses: ranks.Answers) -> None:
    for found in of_all(uses, "watched"):
        assert found["draws"] == [(5, 1), (5, 2), (5, 3)]
        assert sum(found["places"]) == 64 * 192 + 192 * 192 + 192 * 10 + 192 + 192 + 10
        assert found["default"] == [64 * 192, 192 * 192] and found["one"] == [192 * 10]
        for name in ("one scratch", "one memory", "behind", "went on", "error surfaces"):
            assert found[name], name


def test_refusals_say_what_works(uses: ranks.Answers) -> None:
    for found in of_all(uses, "refused"):
        assert "not its DistributedDataParallel" in found["ddp"]
        assert "not its DistributedDataParallel" in found["inside"]
        assert "6 parameters that are not in the model" in found["other"]
        assert "float32, float16 or bfloat16" in found["double"]
        assert "True or False" in found["policy"]
        assert "rank 0: 2; rank 1: 3; rank 2: 4" in found["ranks"]
        assert "added or taken away since LocalSGD was made" in found["grew"]
        assert "codec none, not fp16" in found["state, codec"]
        assert "outer Nesterov, not None" in found["state, outer"]
        assert "rank 0: SGD [{'lr': 1, " in found["outer of ranks"]
        assert "rank 1: SGD [{'lr': 2, " in found["outer of ranks"]


def test_a_sub_group_trains(uses: ranks.Answers) -> None:
    assert all(of_all(uses, "some_ranks"))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"period": 0}, "period must be an integer from 1"),
        ({"period": True}, "period must be an integer from 1"),
        ({"warmup_steps": -1}, "warmup_steps must be an integer from 0"),
        ({"overlap": True, "overlap_steps": 9}, "from 1 to period=8"),
        ({"overlap": True, "overlap_steps": 0}, "from 1"),
        ({"overlap_steps": 2}, "goes with overlap=True"),
        ({"outer": "nesterov"}, "lc.Nesterov()"),
        ({}, "init_process_group"),
    ],
)
def test_bad_settings(settings: dict[str, Any], sentence: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(lc.ConfigError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        lc.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, **settings)


def test_what_it_wraps() -> None:
    model = nn.Linear(2, 2)
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(lc.ConfigError, match="wraps a torch optimizer"):
        lc.LocalSGD(model, model)  # pyright: ignore[reportArgumentType]
    with pytest.raises(lc.ConfigError, match="give a torch.nn.Module, not SGD"):
        lc.LocalSGD(opt, opt)
