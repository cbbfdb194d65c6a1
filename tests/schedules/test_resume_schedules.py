"""Schedules resume exactly, whatever was loaded first, and refuse states that are not theirs."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import equal
from helpers import refusal as said
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.nn.parallel import DistributedDataParallel

import laconic as lc

SIZE, STEPS = 3, 12
dcp: Any = checkpoint
NESTED: dict[str, Any] = {
    "codec": "ndqsg:levels=3,block=64",
    "exchange": lc.Nested(side="previous", every=2),  # which remembers means
}


class Net(nn.Module):
    """A frozen part, tied weights, and every kind of buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm = nn.Linear(20, 16), nn.BatchNorm1d(16)
        self.middle, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 5)
        self.again = nn.Linear(16, 16, bias=False)
        self.again.weight = self.middle.weight
        self.frozen = nn.Parameter(torch.rand(7), requires_grad=False)
        self.register_buffer("lowest", torch.tensor(torch.inf))  # of an observer: finite later
        self.register_buffer("own", torch.zeros((), dtype=torch.int64))  # differs between ranks
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.lowest = torch.minimum(self.lowest, x.detach().float().min())
            self.own += 1 + (dist.get_rank() if dist.is_initialized() else 0)
            self.cache += x.detach().float().mean()
        x = self.norm(self.first(x)).tanh()
        return self.last(self.again(self.middle(x).tanh()))


def take(model: nn.Module, opt: Any, first: int, last: int, rank: int) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(8, 20, generator=generator)
        opt.zero_grad()
        nn.functional.cross_entropy(model(x.to(dtype)).float(), x[:, :5].argmax(1)).backward()
        opt.step()
        for group in opt.param_groups:  # as schedulers do
            group["lr"] *= 0.97


def everything(model: nn.Module, opt: Any) -> dict[str, Tensor]:
    """This rank's weights and buffers, and what all ranks have in common."""
    own = {name: value.clone() for name, value in model.state_dict().items()}
    own |= {"steps": torch.tensor(opt.stats().steps)}
    with opt.global_weights():
        return own | {f"common {name}": p.clone() for name, p in model.named_parameters()}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


ORDERS = ("model, make, state", "make, model, state", "make, state, model", "make, state")
Maker = Callable[[nn.Module], Any]


def resumed(make: Maker, cut: int, rank: int, dtype: torch.dtype, model_too: bool) -> list[str]:
    """The orders that do not end where the run that was not interrupted does."""
    model = Net(0).to(dtype)
    opt = make(model)
    take(model, opt, 0, cut, rank)
    saved = through_a_file({"model": model.state_dict(), "opt": opt.state_dict()})
    take(model, opt, cut, STEPS, rank)
    wanted, wrong = everything(model, opt), []
    for order in ORDERS:
        model = Net(100 + rank).to(dtype)  # other weights on every rank
        opt: Any = None
        frozen = saved["model"]["frozen"]
        for act in order.split(", "):
            if act == "make":
                model.frozen.data.copy_(frozen)  # is nobody's to keep
                opt = make(model)
                if order == ORDERS[0]:
                    take(Net(5), make(Net(5)), 0, 0, rank)  # others' schedules do not matter
            elif act == "model":
                model.load_state_dict(saved["model"])
            else:
                opt.load_state_dict(saved["opt"])
        take(model, opt, cut, STEPS, rank)
        if not equal(everything(model, opt), wanted):
            wrong.append(order)
    return wrong


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": [first], "lr": 1e-3}, {"params": others}], lr=1e-2)


def everywhere(name: str, parameter: nn.Parameter) -> bool:
    return True


def local(optimizer: Maker = sgd, **settings: Any) -> Maker:
    return lambda model: lc.LocalSGD(
        optimizer(model), model, **{"period": 4, "policy": everywhere, **settings}
    )


def ssd(optimizer: Maker = sgd, **settings: Any) -> Maker:
    return lambda model: lc.SSD(
        optimizer(model), model, **{"period": 3, "warmup_steps": 2, **settings}
    )


LOCAL: dict[str, Maker] = {
    "ecdq": local(codec="ecdq:error=0.05", outer=lc.Nesterov()),
    "feedback": local(adamw, codec="feedback(qsgd:bits=2)"),
    "overlap": local(codec="ecdq:error=0.05", overlap=True, outer=lc.HeavyBall()),
    "overlap by 3": local(
        adamw,
        codec="feedback(dqsg:bits=3)",
        overlap=True,
        overlap_steps=3,
        outer=partial(torch.optim.Adam, lr=0.01),
    ),
    "nested": local(**NESTED, period=2),
    "warm-up": local(codec="qsgd:bits=4", warmup_steps=6, overlap=True, overlap_steps=1),
}
CASES: dict[str, Maker] = {
    **{f"local {name}": make for name, make in LOCAL.items()},
    "ssd ecdq": ssd(codec="ecdq:error=0.1", pull_codec="qsgd:bits=4"),
    "ssd glu": ssd(adamw, local=lc.GLU(), codec="ecdq:error=0.1"),
    "ssd feedback": ssd(adamw, local=lc.DCASGD(adaptive=True), codec="feedback(qsgd-topk)"),
    "ssd AdamRule": ssd(two_groups, codec="ecdq:error=0.1"),
}


def orders(rank: int) -> dict[str, list[str]]:
    """Killed at a random step, the same on all ranks; in float32 and bfloat16."""
    draws = torch.Generator().manual_seed(7)
    found = {}
    for name, make in CASES.items():
        for dtype in (torch.float32, torch.bfloat16)[: 2 if name.endswith("ecdq") else 1]:
            cut = int(torch.randint(3, STEPS - 1, (), generator=draws))
            found[f"{name} {dtype} {cut}"] = resumed(make, cut, rank, dtype, True)
    for cut in (5, 9, 11):  # an exchange is under way at all of them
        found[f"overlap {cut}"] = resumed(LOCAL["overlap"], cut, rank, torch.float32, True)
    for cut in (5, 6, 7):  # all phases of a period
        found[f"AdamRule {cut}"] = resumed(CASES["ssd AdamRule"], cut, rank, torch.float32, True)
    return found


def with_a_server(rank: int) -> list[str]:
    """SSD's first rank keeps the weights; workers stop at step 5 and resume in any order."""

    def make(model: nn.Module) -> Any:
        return ssd(codec="feedback(ecdq:error=0.1)", pull_codec="qsgd:bits=4", servers=1)(model)

    def run(first: int, last: int, order: str, saved: Any = None) -> tuple[Any, Any]:
        model = Net(rank)
        opt: Any = None
        for act in order.split(", "):
            if act == "make":
                opt = make(model)
            elif act == "model":
                model.load_state_dict(saved["model"])
            else:
                opt.load_state_dict(saved["opt"])
        if opt.serves:
            opt.serve()
            state = opt.state_dict()
            return {"model": model.state_dict(), "opt": state}, state
        take(model, opt, first, last, rank)
        saved = {"model": model.state_dict(), "opt": opt.state_dict()}
        found = everything(model, opt)
        opt.leave()
        return through_a_file(saved), found

    _, at_once = run(0, 9, "make")
    saved, _ = run(0, 5, "make")
    wrong = []
    for order in ORDERS:
        _, later = run(5, 9, order, saved)
        if rank == 0:
            at_once["identity"] = later["identity"]
        if not equal(at_once, later):
            wrong.append(order)
    return wrong


def rows(rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(20 + 10 * rank, 6, generator=torch.Generator().manual_seed(rank))
    return x, x[:, :3].argmax(1)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def svrg(rank: int) -> list[str]:
    wrong = []
    specs = ("feedback(qsgd:bits=2)@scatter-reduce", "ecdq:error=0.1@scatter-reduce")
    for settings in ({}, *({"codec": spec} for spec in specs), NESTED):
        for cut in (3, 7):  # in an epoch of five steps, and in the next one
            wrong += [f"{settings} {cut} {order}" for order in _svrg(rank, cut, settings)]
    return wrong


def _svrg(rank: int, cut: int, settings: dict[str, Any]) -> list[str]:
    def made(seed: int) -> tuple[nn.Module, lc.QSVRG]:
        torch.manual_seed(seed)
        model = nn.Linear(6, 3)
        return model, lc.QSVRG(model, loss, rows(rank), lr=0.1, steps=5, **settings)

    def go(opt: lc.QSVRG, first: int) -> None:
        for _ in range(first, STEPS):
            opt.step()

    def ended(model: nn.Module, opt: lc.QSVRG) -> dict[str, Any]:
        return {**model.state_dict(), "loss": opt.stats().loss}

    model, opt = made(0)
    for _ in range(cut):
        opt.step()
    saved = through_a_file({"model": model.state_dict(), "opt": opt.state_dict()})
    go(opt, cut)
    wanted, wrong = ended(model, opt), []
    for order in ORDERS[1:]:
        other, opt = made(100 + rank)
        for act in order.split(", ")[1:]:
            if act == "model":
                other.load_state_dict(saved["model"])
            else:
                opt.load_state_dict(saved["opt"])
        go(opt, cut)
        if not equal(ended(other, opt), wanted):
            wrong.append(order)
    return wrong


def wrong_ranks(rank: int) -> dict[str, str]:
    """A state of another rank, and a state of three ranks on two."""
    pair: Any = dist.new_group([0, 1])
    found = {}
    for name, make in (("local", local), ("ssd", ssd)):
        opt = make(codec="none")(Net(0))
        states: list[Any] = [None] * SIZE
        dist.all_gather_object(states, opt.state_dict())
        found[f"{name} other"] = said(lambda opt=opt, s=states: opt.load_state_dict(s[rank - 1]))
        found[f"{name} plain"] = said(
            lambda opt=opt: opt.load_state_dict(opt.optimizer.state_dict())
        )
        if rank < 2:
            two = make(codec="none", group=pair)(Net(0))
            found[f"{name} fewer"] = said(lambda two=two, s=states: two.load_state_dict(s[rank]))
    model = nn.Linear(6, 3)
    state = lc.QSVRG(model, loss, rows(rank), lr=0.1, steps=5).state_dict()
    if rank < 2:
        two = lc.QSVRG(model, loss, rows(rank), lr=0.1, steps=5, group=pair)
        found["svrg fewer"] = said(lambda: two.load_state_dict(state))
    return found


def frozen(rank: int) -> dict[str, Any]:
    """Frozen parameters in the optimizer: of 11,000 values only the head's travel and move."""
    found = {}
    for codec in ("dqsg:bits=2", "global:bits=8,subtract=true", "none"):
        model: Any = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 9))
        model[0].requires_grad_(False)
        opt = lc.LocalSGD(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            period=2,
            codec=codec,
            policy=everywhere,
            outer=lc.Nesterov(),
        )
        kept = model[0].weight.clone()
        for step in range(6):
            opt.zero_grad()
            x = torch.randn(8, 100, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            opt.step()
        stats = opt.stats()
        found[codec] = (torch.equal(model[0].weight, kept), stats.plain_bytes, stats.sent_bytes)
    return found


class Odd(nn.Module):
    """What Gloo does not broadcast by itself: dtypes, and memory that is not in one piece."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(4, 2)
        self.wide = nn.Parameter(torch.rand(3, 5).t())
        self.exact = nn.Parameter(torch.rand(3, dtype=torch.float64), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 3))
        for name, dtype in {
            "int16": torch.int16,
            "complex64": torch.complex64,
            "tiny": torch.float8_e4m3fn,
            "yes": torch.bool,
            "uint16": torch.uint16,
        }.items():
            self.register_buffer(name, (10 * torch.rand(3, 2)).to(dtype).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() + self.wide.sum() + self.none.sum()


def odd_tensors(rank: int) -> dict[str, bool]:
    found = {}
    for name, make in {"local": local(codec="none", period=2), "ssd": ssd(codec="none")}.items():
        model = Odd(rank)
        opt = make(model)
        wanted = Odd(0).state_dict()
        start = model.state_dict()
        found[f"{name} starts"] = all(_same_bytes(start[key], wanted[key]) for key in wanted)
        for _ in range(4):
            opt.zero_grad()
            model(torch.ones(1, 4) * (1 + rank)).backward()
            opt.step()
        moved = float((model.wide - wanted["wide"]).detach().abs().min())
        found[f"{name} moves"] = moved > 0.01 and model.none.shape == (0, 3)
        other = Odd(7)
        again = make(other)
        again.load_state_dict(through_a_file(opt.state_dict()))
        same = [key for key in wanted if key != "exact"]
        found[f"{name} loads"] = all(
            _same_bytes(other.state_dict()[key], model.state_dict()[key]) for key in same
        )
    return found


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    raw = [x.detach().contiguous().view(-1).view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and torch.equal(*raw)


def distributed_checkpoint(rank: int) -> dict[str, Any]:
    """torch.distributed.checkpoint writes one value for a name, whatever ranks have under it."""
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    found: dict[str, Any] = {}
    cases = {
        "local": LOCAL["overlap by 3"],
        "ssd": CASES["ssd feedback"],
        "local ecdq": LOCAL["ecdq"],
    }
    for name, make in cases.items():
        for form in ("object", "async", "dict"):
            found[f"{name} {form}"] = _saved_by_dcp(make, rank, f"{folder[0]}/{name} {form}", form)
    pair: Any = dist.new_group([0, 1])
    opt = LOCAL["ecdq"](Net(0))
    dcp.save({"laconic": lc.PerRank(opt)}, checkpoint_id=f"{folder[0]}/three")
    dcp.save({"laconic": opt}, checkpoint_id=f"{folder[0]}/without")
    there: Any = {"laconic": opt}
    found["without"] = said(lambda: dcp.load(there, checkpoint_id=f"{folder[0]}/without"))
    if rank < 2:
        two = local(codec="none", group=pair)(Net(0))
        there = {"laconic": lc.PerRank(two, pair)}
        found["fewer"] = said(
            lambda: dcp.load(there, checkpoint_id=f"{folder[0]}/three", process_group=pair)
        )
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    return found


def _saved_by_dcp(make: Maker, rank: int, path: str, form: str) -> bool:
    """Whether a run through such a checkpoint ends as one without does."""
    model = Net(0)
    opt = make(model)
    take(model, opt, 0, 7, rank)
    held = {"model": model.state_dict(), "laconic": lc.PerRank(opt)}
    if form == "async":
        done: Any = dcp.async_save(held, checkpoint_id=path)
        take(model, opt, 7, STEPS, rank)  # behind it
        done.result()
    else:
        dcp.save(held, checkpoint_id=path)
        take(model, opt, 7, STEPS, rank)
    wanted = everything(model, opt)
    model = Net(9)
    opt = make(model)
    whole: Any = lc.PerRank(opt)
    held = {"model": model.state_dict(), "laconic": whole.state_dict() if form == "dict" else whole}
    dcp.load(held, checkpoint_id=path)
    if form == "dict":
        whole.load_state_dict(held["laconic"])
    take(model, opt, 7, STEPS, rank)
    return equal(everything(model, opt), wanted)


def other_shapes(rank: int) -> str:
    model = nn.Linear(4, 2)
    model.register_buffer("table", torch.zeros(3 + rank))
    return said(lambda: lc.LocalSGD(sgd(model), model))


def one_file(rank: int) -> dict[str, Any]:
    """All ranks' states by AllRanks: schedules, and handles with and without a memory."""
    found: dict[str, Any] = {}
    make = LOCAL["overlap by 3"]
    model = Net(0)
    opt = make(model)
    take(model, opt, 0, 7, rank)
    every: list[Any] = [lc.AllRanks(opt).state_dict()]
    dist.broadcast_object_list(every)
    take(model, opt, 7, STEPS, rank)
    other = Net(9)
    other.frozen.data.copy_(model.frozen)  # is nobody's to keep
    again = make(other)
    lc.AllRanks(again).load_state_dict(every[0])
    take(other, again, 7, STEPS, rank)
    found["same"] = equal(everything(other, again), everything(model, opt))
    fewer = {"states": every[0]["states"][:2]}
    found["local"] = said(lambda: lc.AllRanks(again).load_state_dict(fewer))
    found["rank 1's"] = said(lambda: lc.AllRanks(again).load_state_dict({}))
    codec = local(codec="none")(Net(9))
    found["codec"] = said(lambda: lc.AllRanks(codec).load_state_dict(every[0]))
    for spec in ("feedback(qsgd:bits=2)", "ndqsg@nested", "dqsg:bits=4", "ecdq:error=0.08"):
        ddp = DistributedDataParallel(nn.Linear(200, 200))
        handle = lc.compress(ddp, spec)
        for _ in range(3):
            ddp(torch.ones(1, 200)).sum().backward()
        every = [lc.AllRanks(handle).state_dict()]
        dist.broadcast_object_list(every)
        fewer = {"states": every[0]["states"][:2]}
        new = lc.compress(DistributedDataParallel(nn.Linear(200, 200)), spec)
        found[spec] = said(lambda new=new, few=fewer: lc.AllRanks(new).load_state_dict(few))
        found[f"{spec} steps"] = new.state_dict()["step"]
    return found


JOBS = (orders, with_a_server, svrg, wrong_ranks, frozen, odd_tensors, other_shapes)
FILES = (distributed_checkpoint, one_file)
found = ranks.shared(JOBS, SIZE)
files = ranks.shared(FILES, SIZE)


def test_the_order_of_loading_does_not_matter(found: ranks.Answers) -> None:
    for rank in range(SIZE):
        assert len(found[rank, "orders"]) == len(CASES) + 2 + 3 + 3
        for case, wrong in found[rank, "orders"].items():
            assert not wrong, (rank, case, wrong)
        assert not found[rank, "with_a_server"] and not found[rank, "svrg"]


def test_states_know_their_ranks(found: ranks.Answers) -> None:
    for rank in range(SIZE):
        told = found[rank, "wrong_ranks"]
        for name in ("local", "ssd"):
            assert f"rank {(rank - 1) % SIZE}, loaded by rank {rank}" in told[f"{name} other"]
            assert "what state_dict() of a schedule returned" in told[f"{name} plain"]
        for name in ("local", "ssd", "svrg") if rank < 2 else ():
            assert "ranks 3, not 2" in told[f"{name} fewer"]
            assert "before making the schedule" in told[f"{name} fewer"]


def test_frozen_parameters_do_not_travel(found: ranks.Answers) -> None:
    for rank in range(SIZE):
        for codec, (kept, plain, sent) in found[rank, "frozen"].items():
            assert kept, codec
            assert plain == 6 * round(2 * 2 / 3 * 4 * 909)
            assert sent <= plain // 2 + 3 * 4000  # every other step, with headers and frames


def test_tensors_of_any_dtype_start_equal(found: ranks.Answers) -> None:
    for rank in range(SIZE):
        assert all(found[rank, "odd_tensors"].values()), found[rank, "odd_tensors"]
        assert "table (rank 0: (3,) torch.float32; rank 1: (4,)" in found[rank, "other_shapes"]


def test_distributed_checkpoints_hold_every_ranks_state(files: ranks.Answers) -> None:
    refusals = []
    for rank in range(SIZE):
        told = files[rank, "distributed_checkpoint"]
        fewer = told.pop("fewer", "")
        refusals.append(told.pop("without"))
        assert all(told.values()) and len(told) == 9, told
        assert rank == 2 or "saved on 3 ranks, and these are 2" in fewer
    # one rank's was written, of each name; whichever it was, the others say so
    assert sum("lc.PerRank" in one for one in refusals) >= SIZE - 1, refusals


def test_one_file_holds_every_ranks_state(files: ranks.Answers) -> None:
    for rank in range(SIZE):
        told = files[rank, "one_file"]
        assert told["same"]
        assert "of 2 ranks, and here are 3" in told["local"]
        assert "what rank 0 has saved" in told["rank 1's"]
        assert (
            "codec feedback(dqsg:bits=3,levels=3,block=512,coder=fixed), not none" in told["codec"]
        )
        for spec in ("feedback(qsgd:bits=2)", "ndqsg@nested"):
            assert "Resume on 2 ranks" in told[spec] and told[f"{spec} steps"] == 0
        for spec in ("dqsg:bits=4", "ecdq:error=0.08"):
            assert (told[spec], told[f"{spec} steps"]) == ("", 3)


# In one process


MAKERS: dict[str, Maker] = {"LocalSGD": local(codec="none"), "SSD": ssd(codec="none")}
both = pytest.mark.parametrize("kind", MAKERS)


def small() -> Any:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def step(model: nn.Module, opt: Any) -> None:
    opt.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    opt.step()


@both
@pytest.mark.usefixtures("alone")
def test_parameters_that_come_later_are_noticed(kind: str) -> None:
    model = small()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    opt = MAKERS[kind](model)
    opt = (lc.SSD if kind == "SSD" else lc.LocalSGD)(optimizer, model, warmup_steps=0)
    step(model, opt)
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.5})
    with pytest.raises(lc.ConfigError, match=f"added or taken away since {kind} was made"):
        step(model, opt)
    with pytest.raises(lc.ConfigError, match="before making"):
        opt.add_param_group({"params": list(model[1].parameters())})


@both
@pytest.mark.parametrize("later", ["frozen", "unfrozen"])
@pytest.mark.usefixtures("alone")
def test_freezing_in_the_middle_is_noticed(kind: str, later: str) -> None:
    model = small()
    model[1].bias.requires_grad_(later == "frozen")
    opt = MAKERS[kind](model)
    step(model, opt)
    model[1].bias.requires_grad_(later == "unfrozen")
    with pytest.raises(lc.ConfigError, match=rf"1.bias was {later} .* after {kind} was made"):
        step(model, opt)
    model[1].bias.requires_grad_(later == "frozen")
    step(model, opt)


@pytest.mark.usefixtures("alone")
def test_svrg_notices_what_is_frozen_later() -> None:
    model = nn.Linear(6, 3)
    opt = lc.QSVRG(model, loss, rows(0), lr=0.1, steps=2)
    opt.epoch()
    model.bias.requires_grad_(False)
    with pytest.raises(lc.ConfigError, match=r"bias was frozen .* after QSVRG"):
        opt.epoch()


@both
@pytest.mark.usefixtures("alone")
def test_weights_that_are_loaded_too_late_are_noticed(kind: str) -> None:
    model, other = small(), small()
    opt = MAKERS[kind](model)
    model.load_state_dict(other.state_dict())
    with pytest.raises(lc.ConfigError, match=r"0.weight was changed .*load weights before making"):
        step(model, opt)
    model = small()
    opt = MAKERS[kind](model)
    model.load_state_dict(model.state_dict())  # the same values
    step(model, opt)
    state = opt.state_dict()
    opt.load_state_dict(state)
    model.load_state_dict(other.state_dict())
    with pytest.raises(lc.ConfigError, match="0.weight was changed"):
        step(model, opt)


@both
@pytest.mark.usefixtures("alone")
def test_a_state_can_be_loaded_twice(kind: str) -> None:
    """Training does not change what was saved, or what was loaded."""
    model = small()
    opt = MAKERS[kind](model)
    step(model, opt)
    state, ends = opt.state_dict(), []
    for _ in range(3):
        for _ in range(5):
            step(model, opt)
        ends.append(everything(model, opt))
        opt.load_state_dict(state)
    assert equal(ends[0], ends[1]) and equal(ends[0], ends[2])


@pytest.mark.usefixtures("alone")
def test_the_optimizer_inside_ssd_may_load_its_settings() -> None:
    model = small()
    optimizer = sgd(model)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.0
    opt = lc.SSD(optimizer, model, warmup_steps=1)
    optimizer.load_state_dict(saved)
    before = model[0].weight.clone()
    step(model, opt)
    assert torch.equal(model[0].weight, before) and opt.param_groups[0]["lr"] == 0.0
    rate = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
    optimizer.param_groups[0]["lr"] = 0.3
    assert opt.param_groups[0]["lr"] == 0.3
    del rate
    other = small()
    stepped = sgd(other)
    other(torch.ones(1, 3)).sum().backward()
    stepped = torch.optim.Adam(other.parameters())
    stepped.step()
    model = small()
    adam = torch.optim.Adam(model.parameters())
    opt = lc.SSD(adam, model)
    adam.load_state_dict(stepped.state_dict())
    with pytest.raises(lc.ConfigError, match="has taken steps already"):
        step(model, opt)


def _complex() -> Any:
    model = small()
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    return model


def _double() -> Any:
    model = small()
    model[1].double()
    return model


def _shared() -> Any:
    model = small()
    model.twin = nn.Parameter(model[0].weight.data[1:])
    return model


def _lazy() -> Any:
    return nn.Sequential(nn.LazyLinear(4))


def _sparse() -> Any:
    model = small()
    model.matrix = nn.Parameter(torch.eye(3).to_sparse())
    return model


def _sparse_buffer() -> Any:
    model = small()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    return model


REFUSED: dict[str, Callable[[], Any]] = {
    r"phase is torch.complex64, .* torch.view_as_real\(..\)": _complex,
    r"1.weight is torch.float64, .* \(model.float\(\)\)": _double,
    r"0.weight and twin share memory .* tie them": _shared,
    "0.weight has no shape yet": _lazy,
    "0.weight is on the meta device": lambda: small().to("meta"),
    "matrix is a torch.sparse_coo tensor": _sparse,
    "graph is a torch.sparse_coo tensor": _sparse_buffer,
    "no parameters with values": lambda: nn.ParameterList([nn.Parameter(torch.empty(0, 2))]),
}


def _svrg_of(model: nn.Module) -> Any:
    return lc.QSVRG(model, loss, rows(0), lr=0.1, steps=2)


@pytest.mark.parametrize("kind", [*MAKERS, "QSVRG"])
@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.usefixtures("alone")
def test_parameters_that_cannot_travel_are_named(kind: str, message: str) -> None:
    model = REFUSED[message]()
    with pytest.raises(lc.ConfigError, match=message):
        {**MAKERS, "QSVRG": _svrg_of}[kind](model)


@both
@pytest.mark.usefixtures("alone")
def test_what_cannot_travel_may_be_frozen(kind: str) -> None:
    for build in (_complex, _double):
        model = build()
        model.requires_grad_(False)
        model[0].requires_grad_(True)
        opt = MAKERS[kind](model)
        opt.zero_grad()
        model[0](torch.ones(1, 3)).sum().backward()
        opt.step()


@both
@pytest.mark.usefixtures("alone")
def test_views_of_one_tensor_that_do_not_overlap_are_taken(kind: str) -> None:
    """As in RNNs and optimizers that flatten parameters; and empty groups."""
    model, room = small(), torch.zeros(26)
    for p, part in zip(model.parameters(), room.split([12, 4, 8, 2]), strict=True):
        part.copy_(p.detach().flatten())
        p.data = part.view(p.shape)
    groups = [{"params": []}, {"params": list(model.parameters()), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    kinds: dict[str, Any] = {"LocalSGD": lc.LocalSGD, "SSD": lc.SSD}
    opt = kinds[kind](optimizer, model, warmup_steps=1)
    before = room.clone()
    step(model, opt)
    assert not torch.equal(room, before)


@pytest.mark.usefixtures("alone")
def test_sparse_layers_are_refused_where_gradients_travel() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    with pytest.raises(lc.ConfigError, match=r"0.weight has sparse gradients, which warm-up"):
        lc.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, warmup_steps=3)
    lc.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model[0].requires_grad_(False)
    lc.SSD(torch.optim.SGD(model.parameters(), lr=0.1), model)


@pytest.mark.usefixtures("alone")
def test_optimizers_that_need_a_closure_are_refused() -> None:
    model = small()
    with pytest.raises(lc.ConfigError, match="LBFGS evaluates its closure several times"):
        lc.LocalSGD(torch.optim.LBFGS(model.parameters()), model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["local ecdq", "local feedback", "local overlap", "ssd feedback"])
@pytest.mark.usefixtures("alone")
def test_a_gpu_resumes_from_a_state_on_the_cpu(name: str) -> None:
    def go(model: nn.Module, opt: Any, first: int, last: int) -> None:
        for number in range(first, last):
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(number)).cuda()
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
            opt.step()

    model = Net(0).cuda()
    opt = CASES[name](model)
    go(model, opt, 0, 7)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, map_location="cpu", weights_only=True)
    go(model, opt, 7, STEPS)
    other = Net(9).cuda()
    other.frozen.data.copy_(model.frozen)
    again = CASES[name](other)
    again.load_state_dict(saved)
    go(other, again, 7, STEPS)
    assert equal(everything(other, again), everything(model, opt))
