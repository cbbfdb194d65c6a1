"""Replicas of shards on 2×2 real ranks: gradient accumulation, with one exchange per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from test_fsdp import (
    CODED,
    batch,
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


JOBS: list[Any] = [
    sums_are_exchanged_once,
    sums_are_those_of_torch,
    sums_have_the_reduce_dtype,
    a_step_without_exchange_is_named,
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> ranks.Answers:
    return ranks.run(JOBS, 4, tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("job", [job.__name__ for job in JOBS])
def test_on_ranks(found: ranks.Answers, job: str) -> None:
    for rank in range(4):
        wrong = [name for name, good in found[rank, job].items() if not good]
        assert not wrong, f"rank {rank}"
