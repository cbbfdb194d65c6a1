"""The hook and the exchanges on CUDA tensors: Gloo with 4 ranks on one GPU, NCCL with one rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from test_ddp import equal_everywhere, flat, network
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic as lc

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
PAIRS = (
    "none",
    "fp16",
    "bf16",
    "qsgd:bits=4",
    "dqsg:bits=4",
    "dqsg:bits=4@allgather",
    "rotate(dqsg:bits=4)",
    "global:bits=8",
    "global:bits=8,subtract=true",
    "global:bits=8@ring",
    "global:bits=8,levels=1,norm=l2,coder=bitmap@sparse",
    "global-exp:bits=8",
    "ecdq:error=0.05",
    "feedback(ecdq:error=0.5)",
    "dqsg:bits=4@hierarchical",
)
FIXED = ("fp16", "qsgd:bits=4", "dqsg:bits=4", "rotate(dqsg:bits=4)", "global:bits=8")


@contextmanager
def host_never_waits() -> Iterator[None]:
    """Any wait of the host for the device raises."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def on_gpu(model: nn.Module, steps: int, rank: int, optimizer: Any = None) -> list[float]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(32, 64, generator=generator)
        y = x[:, :10].argmax(1).cuda()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.cuda()), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def exchanges_on_cuda(rank: int) -> dict[str, Any]:
    found = {}
    for text in PAIRS:
        model = DistributedDataParallel(network().cuda(), bucket_cap_mb=0.05)
        lc.compress(model, text)
        losses = on_gpu(model, 20, rank)
        found[text] = equal_everywhere(model) and losses[-1] < losses[0]
    return found


def like_the_cpu(rank: int) -> dict[str, bool]:
    """One step from one start: a GPU's mean has the CPU's bits."""
    found = {}
    for text in ("dqsg:bits=4", "ecdq:error=0.05", "global:bits=8"):
        gradients = []
        for device in ("cpu", "cuda"):
            model = DistributedDataParallel(nn.Linear(64, 192, bias=False).to(device))
            lc.compress(model, text)
            with torch.no_grad():
                model.module.weight.fill_(0.5)
            generator = torch.Generator().manual_seed(rank)
            aim = torch.randn(192, 64, generator=generator).to(device)
            (model.module.weight * 0).sum().backward()
            model.zero_grad()
            (model(torch.eye(64, device=device)).T * aim).sum().backward()
            weight = model.module.weight.grad
            assert weight is not None
            gradients.append(weight.cpu())
        found[text] = torch.equal(*gradients)
    return found


def schedules_on_cuda(rank: int) -> dict[str, bool]:
    found = {}
    for codec in ("none", "dqsg:bits=4", "ecdq:error=0.05"):
        for kind in (lc.SSD, lc.LocalSGD):
            model = network().cuda()
            inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            options: dict[str, Any] = {"warmup_steps": 2} if kind is lc.SSD else {"overlap": True}
            schedule: Any = kind(inner, model, period=3, codec=codec, **options)
            losses = on_gpu(model, 17, rank, schedule)
            with schedule.global_weights():
                found[f"{kind.__name__} {codec}"] = equal_everywhere(model)
            found[f"{kind.__name__} {codec} learns"] = losses[-1] < losses[0]
    return found


@needs_cuda
def test_gloo_with_four_ranks_on_one_gpu(tmp_path: Path) -> None:
    answers = ranks.run([exchanges_on_cuda, like_the_cpu, schedules_on_cuda], 4, tmp_path)
    wrong = [
        (rank, job, name)
        for (rank, job), found in answers.items()
        for name, good in found.items()
        if not good
    ]
    assert not wrong


@pytest.fixture
def nccl(tmp_path: Path) -> Any:
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@needs_cuda
def test_nccl_and_no_waiting_for_fixed_widths(nccl: None) -> None:
    for text in FIXED:
        model = DistributedDataParallel(network().cuda(), bucket_cap_mb=0.05)
        lc.compress(model, text, even_alone=True)
        on_gpu(model, 3, 0)
        x, y = torch.randn(32, 64).cuda(), torch.zeros(32, dtype=torch.int64).cuda()
        with host_never_waits():
            for _ in range(3):
                nn.functional.cross_entropy(model(x), y).backward()
        assert flat(model).isfinite().all()
    model = DistributedDataParallel(network().cuda())
    lc.compress(model, "ecdq:error=0.05", even_alone=True)
    on_gpu(model, 20, 0)
