"""Replicas of shards: bytes between replicas, exchanges per step, and the loss, against fp32.

    python -m benchmarks.hsdp [--save] [--steps 120] [--seeds 3]

Four processes over Gloo, a 2-D mesh of 2 replicas of 2 shards; an MLP (64-512-512-10) on
scikit-learn's digits, 4 micro-batches of 8 on every rank in each step, SGD with momentum. Bytes are
what rank 0 sends between replicas for each step of the optimizer; fp32 travels as a ring. Curves
are means of the loss over tenths of the steps. Every strategy sees, for each seed, the weights and
batches that fp32 sees: differences are paired, and shown from the lowest to the highest of all
seeds and tenths. The loss is that of the last tenth.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic as lc
from benchmarks._rows import command_line, keep, markdown

RANKS, PARTS, BATCH = 4, 4, 8
EVERY, ONCE = "fp32, every micro-batch", "fp32, once per step"
LOCAL = "local "
HEAD = (
    "| between replicas | bytes per step | fewer | exchanges per step | loss at the end "
    "| curve against fp32 | accuracy % |"
)
STRATEGIES = (
    ONCE,
    EVERY,
    "ecdq:error=0.08",
    "dqsg:bits=4",
    f"{LOCAL}ecdq:error=0.08",
)
PERIOD, TENTHS = 8, 10


class Member:
    """One rank, and its part of the data."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        digits: Any = load_digits()  # 1797 of them, of 8 x 8 pixels; 360 are for testing
        x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
        mine = slice(360 + dist.get_rank(), None, RANKS)
        self.x, self.y, self.test = x[mine], y[mine], (x[:360], y[:360])

    def model(self, seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )
        for layer in model:
            fully_shard(layer, mesh=self.mesh)
        return fully_shard(model, mesh=self.mesh)

    def train(self, strategy: str, seed: int, steps: int) -> dict[str, Any]:
        """All steps of one strategy; what it sent, and how well it learnt."""
        model: Any = self.model(seed)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if strategy.startswith(LOCAL):
            handle = optimizer = lc.LocalSGD(
                optimizer,
                model,
                codec=strategy.removeprefix(LOCAL),
                period=PERIOD,
                outer=lc.Nesterov(),
            )
            parts = lambda last: nullcontext()  # noqa: E731
        else:
            fp32 = strategy in (EVERY, ONCE)
            handle = made = lc.compress(model, "none" if fp32 else strategy, seed=seed)
            assert isinstance(made, lc.FSDPHandle)
            parts = partial(_all, made) if strategy == EVERY else partial(_once, made)
        losses = [self.step(model, optimizer, parts, seed, step) for step in range(steps)]
        stats: Any = handle.stats()
        exchanges = stats.exchanges if strategy.startswith(LOCAL) else stats.steps
        with optimizer.global_weights() if strategy.startswith(LOCAL) else nullcontext():
            right = float((model(self.test[0]).argmax(1) == self.test[1]).float().mean())
        curve = torch.tensor(losses).view(TENTHS, -1).mean(1)
        dist.all_reduce(curve)
        return {
            "sent": stats.sent_bytes / steps,
            "exchanges": exchanges / steps,
            "curve": [value / RANKS for value in curve.tolist()],
            "accuracy": right,
        }

    def step(self, model: Any, optimizer: Any, parts: Any, seed: int, step: int) -> float:
        """One step of the optimizer; the loss of its batch."""
        optimizer.zero_grad()
        own, total = 100_000 * seed + RANKS * step + dist.get_rank(), 0.0
        rows = torch.randint(
            len(self.x), (PARTS, BATCH), generator=torch.Generator().manual_seed(own)
        )
        for i, some in enumerate(rows):
            with parts(last=i == PARTS - 1):
                loss = nn.functional.cross_entropy(model(self.x[some]), self.y[some]) / PARTS
                loss.backward()
            total += float(loss.detach())
        optimizer.step()
        return total


def _once(handle: lc.FSDPHandle, *, last: bool) -> Any:
    return handle.accumulate(last=last)


def _all(handle: lc.FSDPHandle, *, last: bool) -> Any:
    return nullcontext()


def member(rank: int, store: str, steps: int, seeds: int, answers: Any) -> None:
    """All runs on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=300),
    )
    own, rows = Member(), []
    for strategy in STRATEGIES:
        runs = [own.train(strategy, seed, steps) for seed in range(seeds)]
        rows.append({"strategy": strategy, "steps": steps, "runs": runs})
    if rank == 0:
        answers.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def _range(values: list[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def main() -> None:
    """Run all, print and keep."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    context = mp.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        given = (store, options.steps, options.seeds, answers)
        started = mp.spawn(  # pyright: ignore[reportPrivateImportUsage]
            member, given, RANKS, join=False
        )
        assert started is not None
        rows = answers.get(timeout=3600)
        while not started.join():
            pass
    first, cells = rows[0]["runs"], []
    for row in rows:
        runs = row["runs"]
        row["sent"] = sum(one["sent"] for one in runs) / len(runs)
        row["fewer"] = rows[0]["sent"] / row["sent"]
        pairs = [zip(a["curve"], b["curve"], strict=True) for a, b in zip(runs, first, strict=True)]
        apart = [own - fp32 for pair in pairs for own, fp32 in pair]
        cells.append(
            (
                f"`{row['strategy']}`",
                f"{row['sent']:,.0f}",
                f"{row['fewer']:.2g}×" if row["fewer"] < 10 else f"{row['fewer']:.0f}×",
                f"{runs[0]['exchanges']:.3g}",
                _range([one["curve"][-1] for one in runs], ".4f"),
                _range(apart, "+.4f"),
                _range([100 * one["accuracy"] for one in runs], ".1f"),
            )
        )
    print(markdown(HEAD, cells))
    keep("hsdp", rows, options)


if __name__ == "__main__":
    main()
