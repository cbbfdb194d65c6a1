"""One rank of benchmarks.network: told what to train by lines of JSON, and answering likewise.

    {"prepare": "qsgd:bits=4"}  make the model anew, and take the steps that are not measured
    {"steps": 40}               measure so many
    {"reach": 0.88, ...}        train from scratch until so many test pictures are right
    {"report": true}            what "auto" has chosen, and why

Data: Fashion-MNIST, as Debian's package dataset-fashion-mnist has it.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import laconic as lc
from benchmarks import _fashion

BATCH = 64
FP32, FP16, COMPUTE = "fp32 (no hook)", "fp16 (torch's hook)", "compute alone"
SSD = "ssd "
ADAMW, UNITS = "adamw ", "units "  # before a codec: the optimizer, and that the codec knows it
COUNTED = ("sent_bytes", "exchange_seconds", "wire_seconds")
UNMEASURED = 3  # steps: DDP rebuilds its buckets after the first, and kernels are compiled
UNTIL_KAPPA = 12  # steps: the hook has measured how much gradients have in common
UNTIL_UNITS = 129  # steps: from the 128th on, an optimizer's units are renewed every 16 steps
_START_STEPS = 200
RACE_RATE, _RAMP = 0.1, 20  # the highest rate on the way to a goal, and steps up to it


class Worker:
    """Weights to start from, this rank's share of the data, and the model of the moment."""

    def __init__(self, start: Path, made: nn.Module | None = None) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        data, test = _fashion.load()
        self.test = test.pictures[rank::size].flatten(1), test.labels[rank::size]
        self.images, self.labels = data.pictures[rank::size].flatten(1), data.labels[rank::size]
        self.network = made or network()
        if start.exists():
            self.network.load_state_dict(torch.load(start))
        else:
            self.prepare(FP32)
            self.train(_START_STEPS)
            self.network = self.trained
            if rank == 0:
                torch.save(self.network.state_dict(), start)

    def prepare(self, strategy: str, rate: float = 0.05) -> None:
        """A model at the start, as the strategy wants it."""
        self.trained = copy.deepcopy(self.network)
        self.model: nn.Module = self.trained
        self.handle: Any = None
        self.optimizer: Any = torch.optim.SGD(self.trained.parameters(), lr=rate, momentum=0.9)
        if strategy.startswith(ADAMW):
            self.optimizer = torch.optim.AdamW(self.trained.parameters())
        strategy = strategy.removeprefix(ADAMW)
        known = self.optimizer if strategy.startswith(UNITS) else None
        strategy = strategy.removeprefix(UNITS)
        if strategy.startswith(SSD):
            self.optimizer = self.handle = self.delayed(strategy)
        elif strategy != COMPUTE:
            self.model = replicas = DistributedDataParallel(self.trained)
            if strategy == FP16:
                replicas.register_comm_hook(None, fp16_compress_hook)
            elif strategy != FP32:
                self.handle = lc.compress(replicas, strategy, optimizer=known)
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def delayed(self, strategy: str) -> lc.SSD:
        """ "ssd k=4" or "ssd k=4 dqsg:bits=4"."""
        _, period, *codec = strategy.split(" ")
        return lc.SSD(
            self.optimizer,
            self.trained,
            period=int(period.removeprefix("k=")),
            warmup_steps=0,
            codec=codec[0] if codec else "none",
            pull_codec=codec[0] if codec else None,
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        """Random images of this rank's share."""
        index = torch.randint(len(self.labels), (BATCH,), generator=self.generator)
        return self.images[index], self.labels[index]

    def train(self, steps: int, decay: Any = None) -> list[float]:
        """Seconds of every step."""
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            images, labels = self.batch()
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(images), labels).backward()
            self.optimizer.step()
            if decay is not None:
                decay.step()
            seconds.append(time.perf_counter() - start)
        return seconds

    def measure(self, steps: int) -> dict[str, Any]:
        """Seconds of every step, and what the hook's counters grew by."""
        before = self.counted()
        seconds, after = self.train(steps), self.counted()
        return {"seconds": seconds, **{name: after[name] - before[name] for name in after}}

    def counted(self) -> dict[str, float]:
        """The hook's counters; none without a hook of ours."""
        if self.handle is None:
            return {}
        stats = self.handle.stats()
        return {name: getattr(stats, name) for name in COUNTED}

    def reach(self, goal: float, every: int, most: int, seconds: float) -> dict[str, Any]:
        """Steps and seconds until the goal, looked at every so many steps; looking is not timed.

        All ranks decide alike: what is right is added up, and so are the seconds.
        """
        spent, steps, seen = 0.0, 0, []
        decay = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / _RAMP, 1 - step / most)
        )
        while steps < most and spent < seconds:
            start = time.perf_counter()
            self.train(every, decay)
            if isinstance(self.optimizer, lc.SSD):
                self.optimizer.wait()  # what is under way belongs to these steps
            spent = self.mean(time.perf_counter() - start) + spent
            steps += every
            seen.append((steps, spent, self.accuracy()))
            if seen[-1][2] >= goal:
                break
        sent = self.counted().get("sent_bytes")
        return {"seen": seen, "reached": seen[-1][2] >= goal, "sent_bytes": sent}

    def accuracy(self) -> float:
        """Of the test pictures, all ranks together; of global weights where there are several."""
        ssd = isinstance(self.optimizer, lc.SSD)
        pictures, labels = self.test
        with self.optimizer.global_weights() if ssd else nullcontext(), torch.no_grad():
            right = float((self.trained(pictures).argmax(1) == labels).float().mean())
        return self.mean(right)

    def mean(self, number: float) -> float:
        """Over ranks."""
        found = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(found)
        return float(found) / dist.get_world_size()

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """What the parent is told."""
        if "prepare" in job:
            self.prepare(job["prepare"])
            settled = UNTIL_UNITS if ADAMW in job["prepare"] else UNTIL_KAPPA
            return {"seconds": self.train(settled if self.handle else UNMEASURED)}
        if "reach" in job:
            self.network = network()
            self.prepare(job["strategy"], RACE_RATE)
            return self.reach(job["reach"], job["every"], job["most"], job["seconds"])
        if "report" in job:
            report = self.handle.report()
            return {"choice": self.handle.choice, "step": report.step, "line": str(report)}
        return self.measure(job["steps"])


def network() -> nn.Sequential:
    """1.86 million parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def serve(made: Callable[[], Worker]) -> None:
    """Answer until stdin ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    worker = made()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    serve(lambda: Worker(Path(sys.argv[1])))
