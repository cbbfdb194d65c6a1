"""Does it learn as well? A LeNet-size network on Fashion-MNIST, 4 workers, every unbiased codec.

    python -m benchmarks.accuracy [--device cuda] [--seeds 3] [--epochs 4] [--save]

conv32 - conv64 - fc512 (1,663,370 parameters), 4 real processes over Gloo, batch 64 each, SGD with
momentum 0.9, one cycle of the learning rate up to 0.05. A seed sets the start, the order of the
data and all draws; every strategy sees the same three. The spread is that of fp32 over the seeds.
"""

from __future__ import annotations

import statistics
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import laconic as lc
from benchmarks import _fashion
from benchmarks._rows import command_line, keep

WORKERS, BATCH, RATE = 4, 64, 0.05
PLAIN = "plain DDP"
SPECS = (
    PLAIN,
    "fp16",
    "bf16",
    "qsgd:bits=4",
    "qsgd:bits=4,coder=elias",
    "dqsg:bits=4",
    "rotate(dqsg:bits=4)",
    "rotate(dqsg:bits=3)",
    "global:bits=8",
    "global:bits=8,subtract=true",
    "global:bits=4@ring",
    "global-exp:bits=8",
    "ecdq:error=0.08",
    "ecdq:error=0.3",
)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def train(spec: str, seed: int, epochs: int, device: str, data: Any) -> dict[str, Any]:
    rank = dist.get_rank()
    torch.manual_seed(seed)
    model = DistributedDataParallel(network().to(device))
    handle = None if spec == PLAIN else lc.compress(model, spec, seed=seed)
    train_part, test_part = data
    count = len(train_part.labels)
    per_epoch = count // (WORKERS * BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=epochs * per_epoch)
    for epoch in range(epochs):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(100 * seed + epoch))
        for index in order[: per_epoch * WORKERS * BATCH].view(-1, WORKERS, BATCH)[:, rank]:
            at = index.to(train_part.labels.device)
            optimizer.zero_grad()
            out = model(train_part.pictures[at])
            nn.functional.cross_entropy(out, train_part.labels[at]).backward()
            optimizer.step()
            rate.step()
    with torch.no_grad():
        right = sum(
            int((model.module(x).argmax(1) == y).sum())
            for x, y in zip(
                test_part.pictures.split(1000), test_part.labels.split(1000), strict=True
            )
        )
    row = {"strategy": spec, "seed": seed, "accuracy": right / len(test_part.labels)}
    row["fewer_bytes"] = handle.stats().ratio if handle else 1.0
    return row


def worker(rank: int, store: str, options: Any, seeds: list[int], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORKERS,
        timeout=timedelta(seconds=120),
    )
    data = [
        _fashion.Part(part.pictures.to(options.device), part.labels.to(options.device))
        for part in _fashion.load(options.data)
    ]
    for spec in SPECS:
        if "elias" in spec and options.device != "cpu":
            continue  # Elias coding does not run on CUDA
        for seed in seeds:
            row = train(spec, seed, options.epochs, options.device, data)
            if rank == 0:
                results.put(row)
                print(row, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Train all, say which stay within the spread of fp32."""
    parser = command_line(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, default=_fashion.FOLDER)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    context = mp.get_context("spawn")
    results: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        # one set of workers for each seed, side by side
        sets = [
            spawn(
                worker,
                args=(str(Path(folder) / f"store{seed}"), options, [seed], results),
                nprocs=WORKERS,
                join=False,
            )
            for seed in range(options.seeds)
        ]
        for one in sets:
            assert one is not None
            while not one.join():
                pass
    rows = []
    while not results.empty():
        rows.append(results.get())
    plain = [row["accuracy"] for row in rows if row["strategy"] == PLAIN]
    print(f"fp32: {min(plain):.4f} to {max(plain):.4f}")
    for spec in SPECS:
        found = [row["accuracy"] for row in rows if row["strategy"] == spec]
        if found:
            print(f"{spec:28} {statistics.mean(found):.4f} ({min(found):.4f} to {max(found):.4f})")
    keep("accuracy", rows, options)


if __name__ == "__main__":
    main()
