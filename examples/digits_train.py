"""Four workers learn handwritten digits with several codecs: accuracy, bytes, time.

    python examples/digits_train.py [--workers 4] [--steps 150] [--json]

Real processes, real collectives (Gloo) over the loopback interface, which is not shaped: the times
are those of a very fast network. The last column says how long a step's bytes would take on a link
of 100 Mbit/s; it is computed from the measured bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import digits
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import laconic as lc

PLAIN = "plain DDP"
SPECS = (
    PLAIN,
    "fp16",
    "qsgd:bits=4",
    "dqsg:bits=4",
    "global:bits=8",
    "ecdq:error=0.08",
    "ecdq:error=0.08,coder=rans",
    "feedback(qsgd-topk)",
)
LINK = 100e6  # bits a second
TEST = 360  # digits kept for testing


@dataclass(frozen=True, kw_only=True)
class Result:
    """One strategy's row, from rank 0."""

    strategy: str
    accuracy: float
    sent_bytes_per_step: float
    step_ms: float
    same_bits: bool

    @property
    def link_ms(self) -> float:
        """What a step's bytes take at 100 Mbit/s."""
        return 8 * self.sent_bytes_per_step / LINK * 1e3


def train(spec: str, rank: int, size: int, steps: int) -> Result:
    """Train from the same start on this rank's share of the digits."""
    torch.manual_seed(0)
    data, model = digits.load(), DistributedDataParallel(digits.network())
    handle = None if spec == PLAIN else lc.compress(model, spec)
    own = digits.Digits(data.pixels[TEST:][rank::size], data.labels[TEST:][rank::size])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        digits.backward(model, own.batch(generator))
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    with torch.no_grad():
        right = model.module(data.pixels[:TEST]).argmax(1) == data.labels[:TEST]
    values = sum(p.numel() for p in model.parameters())
    sent = handle.stats().sent_bytes / steps if handle else 8 * values * (size - 1) / size
    return Result(
        strategy=spec,
        accuracy=right.float().mean().item(),
        sent_bytes_per_step=sent,
        step_ms=1e3 * sorted(seconds)[steps // 2],
        same_bits=same_everywhere(model, size),
    )


def same_everywhere(model: nn.Module, size: int) -> bool:
    """Whether all replicas hold the same bits."""
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(every, mine)
    return all(torch.equal(mine, other) for other in every)


def worker(rank: int, size: int, steps: int, store: str, results: Any) -> None:
    """One process: all strategies, one after another."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    for spec in SPECS:
        result = train(spec, rank, size, steps)
        if rank == 0:
            results.put(result)
    dist.barrier()
    dist.destroy_process_group()


def run(size: int, steps: int) -> list[Result]:
    """Start the workers and collect rank 0's results."""
    results: Any = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        spawn(worker, args=(size, steps, store, results), nprocs=size)
    return [results.get() for _ in SPECS]


def table(results: list[Result]) -> Table:
    """The rows for a terminal."""
    view = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    view.add_column("strategy", no_wrap=True)
    for heading in ("accuracy", "KB sent\na step", "fewer\nbytes", "step\nms", "at 100 Mbit/s\nms"):
        view.add_column(heading, justify="right")
    plain = results[0].sent_bytes_per_step
    for one in results:
        view.add_row(
            one.strategy,
            f"{one.accuracy:.1%}",
            f"{one.sent_bytes_per_step / 1e3:.1f}",
            f"{plain / one.sent_bytes_per_step:.1f}x",
            f"{one.step_ms:.1f}",
            f"{one.link_ms:.1f}",
        )
    return view


def main() -> None:
    """Train, and say what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = run(options.workers, options.steps)
    if options.json:
        print(json.dumps([asdict(one) for one in results], indent=1))
        return
    console = Console()
    console.print(
        f"{options.workers} workers, {options.steps} steps, batches of {digits.BATCH} each, over "
        "an unshaped loopback: step times are of a fast network, the last column is computed from "
        "the bytes."
    )
    console.print(table(results))
    same = all(one.same_bits for one in results)
    console.print(f"All replicas ended with the same bits: {'yes' if same else 'NO'}.")
    sys.exit(not same)


if __name__ == "__main__":
    main()
