"""Replicas of shards on 2×2 real ranks: gradient accumulation, and replicas that train alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import equal, refusal
from test_fsdp import (
    CODED,
    batch,
    close,
    compressed,
    equal_everywhere,
    error,
    full,
    gradients,
    mesh_2x2,
    network,
    shard,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import laconic as lc
from laconic.integrations._checkpoint import unpacked

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"),
    reason="FSDP2's collectives can be replaced from torch 2.9 on",
)

PARTS = 3  # micro-batches of a step


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).float(), y)


def parts(step: int) -> list[tuple[Tensor, Tensor]]:
    return [batch(dist.get_rank(), PARTS * step + i) for i in range(PARTS)]


def whole(step: int) -> tuple[Tensor, Tensor]:
    """The batch that these are parts of."""
    xs, ys = zip(*parts(step), strict=True)
    return torch.cat(xs), torch.cat(ys)


def accumulate(model: Any, handle: lc.FSDPHandle, step: int = 0) -> None:
    for i, (x, y) in enumerate(parts(step)):
        with handle.accumulate(last=i == PARTS - 1):
            (loss(model, x, y) / PARTS).backward()


def made(spec: str | None, between: str | None = None, **options: Any) -> tuple[Any, Any]:
    model = shard(network(), mesh=mesh_2x2(), **options)
    return (model, None) if spec is None else compressed(spec, model, between=between)


def sums_are_exchanged_once(rank: int) -> dict[str, bool]:
    """The gradient of the big batch, by as many bytes as one backward sends."""
    big, _ = made(None)
    loss(big, *whole(0)).backward()
    want, found = gradients(big), {}
    for spec, bound in (("none", 1e-12), ("dqsg:bits=8", 1e-3), ("ecdq:error=0.05", 0.06)):
        for between in ("replicas", "shards", "both"):
            name = f"{spec}, {between}: "
            once, handle = made(spec, between)
            loss(once, *whole(0)).backward()
            sent = handle.stats().sent_bytes
            model, handle = made(spec, between)
            accumulate(model, handle)
            got, stats = gradients(model), handle.stats()
            errors = {k: error(got[k], want[k]) for k in want}
            found[name + "one exchange"] = stats.steps == 1
            found[name + "its bytes"] = 0.97 * sent < stats.sent_bytes < 1.03 * sent
            found[name + "near"] = all(errors[k] < bound for k in CODED)
            found[name + "encoded"] = spec == "none" or all(errors[k] > 1e-9 for k in CODED)
            found[name + "rest"] = all(errors[k] < 1e-11 for k in want if k not in CODED)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in (1, 2):
                optimizer.step()
                optimizer.zero_grad()
                accumulate(model, handle, step)
                found[name + f"step {step}"] = handle.stats().steps == 1 + step
            optimizer.step()
            found[name + "equal"] = equal_everywhere(full(model))
    return found


def sums_are_those_of_torch(rank: int) -> dict[str, bool]:
    """To the bit, with codec none; its flags are as before, after an error, too."""
    plain, _ = made(None)
    for i, (x, y) in enumerate(parts(0)):
        plain.set_requires_all_reduce(i == PARTS - 1)
        (loss(plain, x, y) / PARTS).backward()
    model, handle = made("none")
    accumulate(model, handle)
    want, got = gradients(plain), gradients(model)
    found = {"bits": all(torch.equal(got[name], want[name]) for name in want)}

    def flags() -> list[tuple[bool, bool]]:
        groups = [unit.group for unit in handle._units]
        return [(group.reduce_grads, group.all_reduce_grads) for group in groups]

    for before in ((True, True), (True, False), (False, False)):
        model.set_requires_gradient_sync(before[0])
        model.set_requires_all_reduce(before[1])
        try:
            with handle.accumulate(last=False):
                assert not any(inside for _, inside in flags())
                raise InterruptedError
        except InterruptedError:
            found[f"flags {before}"] = flags() == [before] * 3
    return found


def sums_have_the_reduce_dtype(rank: int) -> dict[str, bool]:
    """bfloat16 between replicas, too, where reduce_dtype says so."""
    found, sent = {}, {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
        plain, _ = made(None, mp_policy=policy)
        for i, (x, y) in enumerate(parts(0)):
            plain.set_requires_all_reduce(i == PARTS - 1)
            (loss(plain, x.bfloat16(), y) / PARTS).backward()
        model, handle = made("none", mp_policy=policy)
        for i, (x, y) in enumerate(parts(0)):
            with handle.accumulate(last=i == PARTS - 1):
                (loss(model, x.bfloat16(), y) / PARTS).backward()
        want, got, stats = gradients(plain), gradients(model), handle.stats()
        bound = 2**-14 if name == "bf16" else 1e-12
        found[f"{name}: near"] = all(error(got[k], want[k]) < bound for k in want)
        sent[name], found[f"{name}: no more bytes"] = stats.sent_bytes, stats.ratio > 0.9
    found["half of the bytes"] = 0.5 * sent["fp32"] <= sent["bf16"] < 0.55 * sent["fp32"]
    return found


def a_step_without_exchange_is_named(rank: int) -> dict[str, bool]:
    """FSDP has not given the sums to the parameters, so the optimizer would pass over them."""

    def told(step: Callable[[Any, Any], None], between: str | None = None) -> str:
        model, handle = made("dqsg:bits=4", between)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, handle)
        try:
            optimizer.step()
        except lc.ConfigError as problem:
            return str(problem)
        return ""

    def never_last(model: Any, handle: Any) -> None:
        for x, y in parts(0):
            with handle.accumulate(last=False):
                loss(model, x, y).backward()

    def turned_off(model: Any, handle: Any) -> None:
        model.set_requires_all_reduce(False)
        loss(model, *parts(0)[0]).backward()

    def others(model: Any, handle: Any) -> None:
        never_last(model, handle)
        other = nn.Linear(2, 2)
        other(torch.ones(2)).sum().backward()
        torch.optim.SGD(other.parameters()).step()
        accumulate(model, handle)

    half = told(never_last, "shards")
    return {
        "shards": "last=True" in half and "not exchanged" in half,
        "replicas": "accumulate(last=True)" in told(never_last),
        "turned off": "set_requires_all_reduce(True)" in told(turned_off),
        "others": told(others) == "",
        "fine": told(lambda model, handle: accumulate(model, handle)) == "",
    }


# LocalSGD between replicas

H = 3  # steps between two exchanges


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def alone(spec: str, **options: Any) -> tuple[Any, lc.LocalSGD]:
    model = shard(network(), mesh=mesh_2x2())
    return model, lc.LocalSGD(sgd(model.parameters()), model, codec=spec, **options)


def run(model: Any, optimizer: Any, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        found = loss(model, *batch(dist.get_rank(), step))
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    return losses


def by_hand(steps: int, period: int, outer: lc.Nesterov | None) -> dict[str, Tensor]:
    """The same on whole models in one process: two replicas, each of the mean of two batches."""
    models = [network() for _ in range(2)]
    optimizers = [sgd(model.parameters()) for model in models]
    common = [p.detach().clone() for p in models[0].parameters()]
    momenta = [torch.zeros_like(p) for p in common]
    for step in range(steps):
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for one in range(2):
                (loss(model, *batch(2 * replica + one, step)) / 2).backward()
            optimizer.step()
        if (step + 1) % period == 0:
            for x, m, a, b in zip(
                common, momenta, *(one.parameters() for one in models), strict=True
            ):
                moved = x - (a.detach() + b.detach()) / 2
                if outer is None:
                    x.sub_(moved)
                else:
                    outer.step(x, moved, m)
                a.detach().copy_(x)
                b.detach().copy_(x)
    return {name: p.detach() for name, p in models[0].named_parameters()}


def replicas_train_alone(rank: int) -> dict[str, bool]:
    """What whole models would, with codec none; equal at exchanges, and different between."""
    found = {}
    for name, outer in (("mean", None), ("DiLoCo", lc.Nesterov())):
        model, optimizer = alone("none", period=H, outer=outer)
        run(model, optimizer, 2 * H)
        found[f"{name}: by hand"] = near(full(model), by_hand(2 * H, H, outer))
        found[f"{name}: equal"] = equal_everywhere(full(model))
        run(model, optimizer, 1, first=2 * H)
        found[f"{name}: alone"] = not equal_everywhere(full(model))
        found[f"{name}: exchanges"] = optimizer.stats().exchanges == 2
        optimizer.close()
    plain = shard(network(), mesh=mesh_2x2())
    run(plain, sgd(plain.parameters()), 4)
    for options in ({"period": 1}, {"period": H, "warmup_steps": 4}):
        model, optimizer = alone("none", **options)
        run(model, optimizer, 4)
        found[f"{options}: synchronous"] = near(full(model), full(plain))
    lc.LocalSGD(sgd(model.parameters()), model, codec="none").close()  # one after another
    model.zero_grad()  # and FSDP averages gradients between replicas again
    plain.zero_grad()
    for one in (model, plain):
        loss(one, *batch(rank, 9)).backward()
    found["closed"] = near(gradients(model), gradients(plain))
    return found


def near(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], atol=1e-5) for k in a)


def progress_is_encoded(rank: int) -> dict[str, bool]:
    found = {}
    for spec in ("ecdq:error=0.08", "feedback(qsgd:bits=4)"):
        for overlap in (False, True):
            model, optimizer = alone(spec, period=H, outer=lc.Nesterov(), overlap=overlap)
            losses, name = run(model, optimizer, 8 * H), f"{spec}, {overlap}: "
            found[name + "learns"] = sum(losses[-H:]) < 0.8 * sum(losses[:H])
            optimizer.synchronize()
            found[name + "equal"] = equal_everywhere(full(model))
            found[name + "bytes"] = optimizer.stats().ratio > 4 * H
            optimizer.close()
    model, optimizer = alone("ecdq:error=0.08", period=H)
    x = batch(0, 99)[0]
    run(model, optimizer, H + 1)
    weights, own = full(model), model(x).detach()  # forward leaves the root's weights whole
    with optimizer.global_weights():
        common = model(x).detach()
        found["common"] = equal_everywhere({"": common}) and not torch.equal(common, own)
    found["own again"] = torch.equal(model(x), own)
    model.reshard()
    found["own weights"] = equal(full(model), weights)
    return found


def what_a_shard_resumes_from(rank: int) -> dict[str, bool]:
    """Each rank's own state; that of another shard is refused."""
    found = {}
    for name, kind in (("sgd", sgd), ("adam", lambda some: torch.optim.AdamW(some, lr=1e-3))):
        made = [shard(network(), mesh=mesh_2x2()) for _ in range(2)]
        first, again = (
            lc.LocalSGD(kind(one.parameters()), one, codec="feedback(qsgd:bits=4)", period=H)
            for one in made
        )
        run(made[0], first, H + 1)
        state = lc.PerRank(first).state_dict()
        every: list[Any] = [None] * 4
        dist.all_gather_object(every, state)
        run(made[0], first, H, first=H + 1)
        lc.PerRank(again).load_state_dict(state)
        run(made[1], again, H, first=H + 1)
        want, got = full(made[0]), full(made[1])
        found[name] = equal(got, want)
        try:  # of the other shard
            other = rank ^ 1
            again.load_state_dict(unpacked(every[other][f"rank {other}"]))
            found[f"{name}: refused"] = False
        except lc.ConfigError as problem:
            found[f"{name}: refused"] = "shard" in str(problem)
    return found


def infinity_in_one_shard_reaches_all(rank: int) -> dict[str, bool]:
    """No shard makes the outer step if the mean of another one is not finite."""
    model, optimizer = alone("dqsg:bits=8", period=H)
    run(model, optimizer, H)
    before = full(model)
    run(model, optimizer, H - 1, first=H)
    optimizer.zero_grad()
    loss(model, *batch(rank, 2 * H)).backward()
    if rank == 3:
        model.second.linear.weight.grad.to_local().fill_(torch.inf)
    optimizer.step()
    found = {
        "skipped": optimizer.stats().skipped == 1,
        "back": equal(full(model), before),
    }
    run(model, optimizer, H, first=2 * H)
    return found | {"goes on": all(bool(x.isfinite().all()) for x in full(model).values())}


def meshes_and_refusals(rank: int) -> dict[str, bool]:
    mesh, found = mesh_2x2(), {}
    pairs = {name: mesh[name].get_group() for name in ("replicate", "shard")}

    model = shard(network(), mesh=mesh["shard"])  # each replica by itself
    optimizer = lc.LocalSGD(
        sgd(model.parameters()), model, codec="none", period=H, group=pairs["replicate"]
    )
    run(model, optimizer, H)
    found["1-D"] = near(full(model), by_hand(H, H, None))

    def local(one: Any, **options: Any) -> lc.LocalSGD:
        return lc.LocalSGD(sgd(one.parameters()), one, codec="none", **options)

    def mixed() -> Any:
        one = network()
        shard(one.first, nested=False, mesh=mesh["shard"])
        return shard(one, nested=False, mesh=mesh)

    def ignoring() -> Any:
        one = network()
        return shard(one, nested=False, mesh=mesh, ignored_params={one.wide})

    def scaled() -> None:
        model, optimizer = alone("none")
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss(model, *batch(rank, 0))).backward()
        scaler.step(optimizer)

    def refused_averages() -> None:
        """A schedule that was refused has changed nothing."""
        model = shard(network(), mesh=mesh)
        plain = shard(network(), mesh=mesh)
        refused = refusal(lambda: local(model, period=2 if rank else 3))
        for one in (model, plain):
            loss(one, *batch(rank, 0)).backward()
        found["refused, and averages"] = "period" in refused and close(
            gradients(model), gradients(plain)
        )

    refused_averages()
    flat, encoded = shard(network(), mesh=mesh["shard"]), made("none")[0]
    apart, _ = alone("none")
    cases: dict[str, Callable[[], Any]] = {
        "1-D mesh": lambda: local(flat),
        "hold the same shard": lambda: local(flat, group=pairs["shard"]),
        "hold the same shard as": lambda: local(encoded_not(), group=dist.group.WORLD),
        'between="shards"': lambda: local(encoded),
        "lc.LocalSGD exchanges": lambda: lc.compress(apart, "none"),
        "different meshes": lambda: local(mixed()),
        "wide is not sharded": lambda: local(ignoring()),
        "use lc.LocalSGD": lambda: lc.SSD(torch.optim.SGD(flat.parameters(), lr=0.1), flat),
        "train in bfloat16": scaled,
    }

    def encoded_not() -> Any:
        return shard(network(), mesh=mesh)

    for words, case in cases.items():
        found[words] = words in refusal(case)

    both, handle = made("dqsg:bits=8", "shards")  # gradients inside, progress between
    optimizer = local(both, period=1)
    run(both, optimizer, 2)
    found["encoded between shards"] = handle.stats().steps == 2 and equal_everywhere(full(both))
    return found


JOBS: list[Any] = [
    sums_are_exchanged_once,
    sums_are_those_of_torch,
    sums_have_the_reduce_dtype,
    a_step_without_exchange_is_named,
    replicas_train_alone,
    progress_is_encoded,
    what_a_shard_resumes_from,
    infinity_in_one_shard_reaches_all,
    meshes_and_refusals,
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> ranks.Answers:
    return ranks.run(JOBS, 4, tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("job", [job.__name__ for job in JOBS])
def test_on_ranks(found: ranks.Answers, job: str) -> None:
    for rank in range(4):
        wrong = [name for name, good in found[rank, job].items() if not good]
        assert not wrong, f"rank {rank}"
