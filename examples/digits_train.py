"""Four workers learn handwritten digits over thin links: accuracy, bytes, time.

    python examples/digits_train.py [--workers 4] [--steps 80] [--rate-mbit 50] [--json]

Real processes and real collectives (Gloo), each worker a host of its own in the lab: a network
namespace, with a link of --rate-mbit in each direction. Where a machine does not allow that, the
workers talk over the loopback interface instead; it is faster than any network, and compression
then costs time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import digits
import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic as lc
from laconic import lab

PLAIN = "plain DDP"
SSD = "SSD, period 4, "  # gradients at every step, weights at every fourth, behind the computation
SPECS = (
    PLAIN,
    "fp16",
    "qsgd:bits=4",
    "dqsg:bits=4",
    "global:bits=8",
    "ecdq:error=0.08",
    "ecdq:error=0.08,coder=rans",
    "feedback(qsgd-topk)",
    f"{SSD}ecdq:error=0.08",
)
TEST = 360  # digits kept for testing
UNTIMED = 10  # first steps
PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """One strategy's row, from rank 0; bytes and time are a step's."""

    strategy: str
    accuracy: float
    sent_bytes_per_step: float  # as laconic counts them; what a ring sends for plain DDP
    link_bytes_per_step: float | None  # as the kernel counts them, headers included
    step_ms: float
    same_bits: bool


# In a worker


class Training:
    """One strategy on one rank, from the same start as all others, on this rank's digits."""

    def __init__(self, spec: str) -> None:
        """Make the model; ranks compare their settings."""
        torch.manual_seed(0)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.data, self.network = digits.load(), digits.network()
        self.optimizer: Any = torch.optim.SGD(self.network.parameters(), lr=0.05, momentum=0.9)
        self.model: nn.Module = self.network
        self.handle: Any = None
        if spec.startswith(SSD):
            codec = spec.removeprefix(SSD)
            self.optimizer = self.handle = lc.SSD(
                self.optimizer, self.network, warmup_steps=0, codec=codec, pull_codec=codec
            )
        else:
            self.model = DistributedDataParallel(self.network)
            self.handle = None if spec == PLAIN else lc.compress(self.model, spec)

    def train(self, steps: int) -> dict[str, float]:
        """Bytes and mean time of a step."""
        own = slice(TEST + self.rank, None, self.size)
        share = digits.Digits(self.data.pixels[own], self.data.labels[own])
        generator = torch.Generator().manual_seed(self.rank)
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            digits.backward(self.model, share.batch(generator))
            self.optimizer.step()
            seconds.append(time.perf_counter() - start)
        values = sum(p.numel() for p in self.model.parameters())
        ring = 8 * values * (self.size - 1) / self.size
        return {
            "sent_bytes_per_step": self.handle.stats().sent_bytes / steps if self.handle else ring,
            "step_ms": 1e3 * statistics.mean(seconds[UNTIMED:] or seconds),
        }

    def test(self) -> dict[str, float]:
        """Accuracy on digits that nobody has seen, and whether all replicas hold the same bits."""
        delayed = isinstance(self.optimizer, lc.SSD)
        with self.optimizer.global_weights() if delayed else nullcontext(), torch.no_grad():
            guess = self.network(self.data.pixels[:TEST]).argmax(1)
            same = same_everywhere(self.network, self.size)
        right = (guess == self.data.labels[:TEST]).float().mean().item()
        return {"accuracy": right, "same_bits": same}


def same_everywhere(model: nn.Module, size: int) -> bool:
    """Whether all replicas hold the same bits."""
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(every, mine)
    return all(torch.equal(mine, other) for other in every)


def worker(steps: int) -> None:
    """One process. Every line of stdin is an order; every order is answered with a line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    training: Any = None
    for line in sys.stdin:
        order, answer = line.strip(), {}
        if order == "train":
            answer = training.train(steps)
        elif order == "test":
            answer = training.test()
        else:
            training = Training(order)
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


# In the parent


def warm() -> None:
    """Compile the kernels here, once: else every worker does, all at the same time."""
    x = torch.randn(20_000)
    for spec in SPECS[1:]:
        codec = lc.pair(spec.removeprefix(SSD))[0]
        codec.decode(codec.encode(x, lc.Key()), out=torch.zeros_like(x), add=True)


def ask(run: lab.Run, order: str) -> list[dict[str, Any]]:
    """Every rank's answer to an order."""
    run.send(order)
    return [json.loads(line) for line in run.receive(timeout_s=PATIENCE_S)]


def sent(net: lab.Network | lab.LoopbackNetwork) -> float | None:
    """Bytes that the first host has sent through its link, if it has one."""
    return net.counters()[0].sent_bytes if isinstance(net, lab.Network) else None


def measure(spec: str, steps: int, net: lab.Network | lab.LoopbackNetwork, run: lab.Run) -> Result:
    """Train with one strategy."""
    ask(run, spec)
    before = sent(net)
    trained = ask(run, "train")[0]
    after = sent(net)
    tested = ask(run, "test")
    return Result(
        strategy=spec,
        **trained,
        link_bytes_per_step=None if before is None or after is None else (after - before) / steps,
        accuracy=tested[0]["accuracy"],
        same_bits=all(one["same_bits"] for one in tested),
    )


def run_all(where: lab.Lab | lab.Loopback, steps: int) -> list[Result]:
    """Start the workers, and train with all strategies, one after another."""
    with where as net:
        run = net.start([sys.executable, __file__, "--worker", "--steps", str(steps)], talk=True)
        results = [measure(spec, steps, net, run) for spec in SPECS]
        run.wait(timeout_s=PATIENCE_S)
    return results


def table(results: list[Result]) -> Table:
    """The rows for a terminal."""
    view = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    view.add_column("strategy", no_wrap=True)
    link = [] if results[0].link_bytes_per_step is None else ["at the\nlink"]
    for heading in ("accuracy", "KB sent\na step", *link, "step\nms", "times\nfaster"):
        view.add_column(heading, justify="right")
    for one in results:
        at_link = one.link_bytes_per_step
        view.add_row(
            one.strategy,
            f"{one.accuracy:.1%}",
            f"{one.sent_bytes_per_step / 1e3:.1f}",
            *([] if at_link is None else [f"{at_link / 1e3:.1f}"]),
            f"{one.step_ms:.1f}",
            f"{results[0].step_ms / one.step_ms:.1f}x",
        )
    return view


def main() -> None:
    """Train, and say what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rate-mbit", type=float, default=50, help="of every link")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.steps)
        return
    lacking = lab.missing()
    hosts, rate = options.workers, options.rate_mbit
    where = lab.Loopback(hosts=hosts) if lacking else lab.Lab(hosts=hosts, rate_mbit=rate)
    warm()
    results = run_all(where, options.steps)
    same = all(one.same_bits for one in results)
    if options.json:
        print(json.dumps([asdict(one) for one in results], indent=1))
        sys.exit(not same)
    links = (
        f"an unshaped loopback, where compression costs time. {lacking}"
        if lacking
        else f"links of {rate:g} Mbit/s."
    )
    console = Console()
    console.print(
        f"{hosts} workers, {options.steps} steps, batches of {digits.BATCH} each, over {links}"
    )
    console.print(table(results))
    console.print(f"All replicas ended with the same bits: {'yes' if same else 'NO'}.")
    sys.exit(not same)


if __name__ == "__main__":
    main()
