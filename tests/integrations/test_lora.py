"""Adapters of PEFT: encoded although each is small; those that come too late are named."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from helpers import equal_everywhere
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic as lc

WIDTH = 768


def base() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(r=rank, target_modules=["0", "2"]), model)


def trained_by(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int = 0) -> float:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(16, WIDTH, generator=generator)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def fine_tuned(rank: int, r: int) -> dict[str, Any]:
    model = DistributedDataParallel(with_adapters(base(), r))
    frozen = model.module.get_parameter("0.base_layer.weight").clone()
    optimizer = trained_by(model)
    handle = lc.compress(model, "ecdq:error=0.08", optimizer=optimizer)
    losses = [step(model, optimizer, rank, number) for number in range(12)]
    return {
        "ratio": handle.stats().ratio,
        "same": equal_everywhere(model),
        "base": torch.equal(frozen, model.module.get_parameter("0.base_layer.weight")),
        "losses": (losses[0], losses[-1]),
    }


def rank_8(rank: int) -> dict[str, Any]:
    return fine_tuned(rank, 8)


def rank_128(rank: int) -> dict[str, Any]:
    return fine_tuned(rank, 128)


def refusal(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> str:
    try:
        step(model, optimizer, rank)
    except lc.ConfigError as found:
        return str(found)
    return "no error"


def added_after_ddp(rank: int) -> str:
    model = DistributedDataParallel(base())
    lc.compress(model, "ecdq")
    with_adapters(model.module, 8)
    return refusal(model, trained_by(model), rank)


def unfrozen_after_ddp(rank: int) -> str:
    model = base()
    weight: Any = model[2].weight
    weight.requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    lc.compress(wrapped, "ecdq")
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    step(wrapped, optimizer, rank)
    weight.requires_grad_(True)
    optimizer.add_param_group({"params": [weight]})  # seen although this one was known
    return refusal(wrapped, optimizer, rank)


def add_late(model: Any, _: Any, out: torch.Tensor) -> torch.Tensor:
    return out + model.late


def added_after_fsdp(rank: int) -> str:
    model: Any = base()
    fully_shard(model)
    lc.compress(model, "ecdq")
    model.register_parameter("late", nn.Parameter(torch.zeros(WIDTH)))
    model.register_forward_hook(add_late)
    return refusal(model, trained_by(model), rank)


def frozen_for_a_moment(rank: int) -> bool:
    """While compress was called, and not when DDP wrapped the model: it is averaged."""
    model: Any = base()
    wrapped = DistributedDataParallel(model)
    model[2].weight.requires_grad_(False)
    lc.compress(wrapped, "ecdq")
    model[2].weight.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        step(wrapped, optimizer, rank, number)
    return equal_everywhere(wrapped)


def left_out_on_purpose(rank: int) -> int:
    model: Any = base()
    model.register_parameter("late", nn.Parameter(torch.zeros(WIDTH)))
    model.register_forward_hook(add_late)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["late"])
    wrapped = DistributedDataParallel(model)
    handle = lc.compress(wrapped, "ecdq")
    step(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    return handle.stats().steps


JOBS = [rank_8, rank_128, added_after_ddp]
OTHERS = [unfrozen_after_ddp, added_after_fsdp, left_out_on_purpose, frozen_for_a_moment]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> ranks.Answers:
    pytest.importorskip("peft")
    return ranks.run(JOBS, 2, tmp_path_factory.mktemp("peft"))


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> ranks.Answers:
    return ranks.run(OTHERS, 2, tmp_path_factory.mktemp("changed"))


@pytest.mark.parametrize(("name", "fewer"), [("rank_8", 5), ("rank_128", 5)])
def test_adapters_are_encoded(name: str, fewer: float, adapted: ranks.Answers) -> None:
    for rank in range(2):
        answer = adapted[rank, name]
        assert answer["ratio"] > fewer  # the first step is not encoded
        assert answer["same"] and answer["base"]
        assert answer["losses"][1] < answer["losses"][0]


def test_adapters_added_after_ddp_are_named(adapted: ranks.Answers) -> None:
    for rank in range(2):
        found = adapted[rank, "added_after_ddp"]
        assert "0.lora_A.default.weight" in found and "2.lora_B.default.weight" in found
        assert "after DistributedDataParallel(model)" in found and "then compress" in found


@pytest.mark.parametrize(
    ("name", "parameter", "wrapper"),
    [
        ("unfrozen_after_ddp", "2.weight", "DistributedDataParallel(model)"),
        ("added_after_fsdp", "late", "fully_shard(model)"),
    ],
)
def test_what_trains_too_late_is_named(
    name: str, parameter: str, wrapper: str, changed: ranks.Answers
) -> None:
    for rank in range(2):
        found = changed[rank, name]
        assert found.startswith(f"{parameter}: ") and f"after {wrapper}" in found


def test_what_ddp_was_told_to_ignore_is_not_late(changed: ranks.Answers) -> None:
    assert changed[0, "left_out_on_purpose"] == changed[1, "left_out_on_purpose"] == 1


def test_what_was_frozen_while_compress_was_called_is_not_late(changed: ranks.Answers) -> None:
    assert changed[0, "frozen_for_a_moment"] and changed[1, "frozen_for_a_moment"]
