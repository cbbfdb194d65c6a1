"""One worker of a race. Every line of stdin is an order, and is answered with a line.

{"probe": ["fp16", ..], "seconds": 8}   what links, codecs and this network cost, as a probe's JSON
{"prepare": "ecdq"}                     a strategy, at the start
{"train": 5}                            so many steps; seconds, loss, and what counters grew by
{"test": true}                          accuracy on the test set
{"finish": true}                        a digest of the weights, and what auto chose
{"quantize": true}                      what codecs make of this network's gradients
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from laconic.comm._closing import wait_for_gloo_threads
from laconic.planner import Setup, probe
from laconic.race._data import load, made
from laconic.race._quantize import quantized
from laconic.race._result import Settings
from laconic.race._strategies import entry, turned_on

_RAMP = 5  # steps of learning-rate warm-up
_AT_ONCE = 1000  # test images
_TIMEOUT = timedelta(seconds=120)


class Worker:
    """A rank with its share of the data; one strategy after another."""

    def __init__(self, settings: Settings, folder: Path | None) -> None:
        """Read the data."""
        self.settings = settings
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        data = load(settings.data, folder)
        self.tests = len(data.testing)
        self.training = data.training.share(self.rank, self.size)
        self.testing = data.testing.share(self.rank, self.size)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Random images of this rank's share."""
        index = torch.randint(len(self.training), (self.settings.batch,), generator=self.generator)
        return self.training.at(index)

    def begin(self) -> None:
        """The network and the optimizer as all strategies find them, and the same batches."""
        self.network = made(self.settings.data, self.settings.seed)
        self.plain = torch.optim.SGD(self.network.parameters(), lr=self.settings.lr, momentum=0.9)
        self.generator = torch.Generator().manual_seed(1000 * self.settings.seed + self.rank)

    def prepare(self, name: str) -> dict[str, Any]:
        """Turn a strategy on; ranks compare their settings."""
        self.begin()
        self.model, self.optimizer, self.handle, self.schedule = turned_on(
            entry(name), self.network, self.plain, self.settings.seed
        )
        steps = self.settings.steps
        self.decay = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / _RAMP, 1 - step / steps)
        )
        return {}

    def train(self, steps: int) -> dict[str, Any]:
        """Some steps, until nothing of them is in flight."""
        before = self.counted()
        dist.barrier()
        start, loss = time.perf_counter(), torch.zeros(())
        for _ in range(steps):
            pictures, labels = self.batch()
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(pictures), labels)
            loss.backward()
            self.optimizer.step()
            self.decay.step()
        if self.schedule is not None:
            self.schedule.wait()
        seconds, after = time.perf_counter() - start, self.counted()
        grown = {name: after[name] - before[name] for name in after}
        return {"seconds": seconds, "loss": loss.item(), **grown}

    def counted(self) -> dict[str, float]:
        """Counters so far; plain DDP has none."""
        if self.handle is None:
            return {}
        stats = self.handle.stats()
        return {
            name: getattr(stats, name)
            for name in ("sent_bytes", "exchange_seconds", "wire_seconds")
        }

    @torch.no_grad()
    def test(self) -> dict[str, Any]:
        """All ranks together, each a share of the images; of the global weights."""
        right = torch.zeros(())
        with self.shared_weights():
            for first in range(0, len(self.testing), _AT_ONCE):
                pictures, labels = self.testing.at(slice(first, first + _AT_ONCE))
                right += (self.network(pictures).argmax(1) == labels).sum()
        dist.all_reduce(right)
        return {"accuracy": right.item() / self.tests}

    def shared_weights(self) -> Any:
        """Replicas of schedules differ between steps."""
        return nullcontext() if self.schedule is None else self.schedule.global_weights()

    @torch.no_grad()
    def finish(self) -> dict[str, Any]:
        """A digest of the weights, what auto chose, and the error that was made."""
        weights = sha256()
        with self.shared_weights():
            for parameter in self.network.parameters():
                weights.update(parameter.detach().numpy().tobytes())
        stats = self.handle.stats() if self.handle is not None else None
        return {
            "weights": weights.hexdigest(),
            "choice": getattr(self.handle, "choice", None),
            "error": getattr(stats, "error_mean", None),
            "error_budget": getattr(stats, "error_budget", None),
        }

    def probe(self, codecs: list[str], seconds: float) -> dict[str, Any]:
        """Links, device, codecs and this network, without any strategy."""
        self.begin()

        def loss(model: nn.Module) -> Tensor:
            pictures, labels = self.batch()
            return cross_entropy(model(pictures), labels)

        setup = Setup(self.network, loss, self.plain)
        return asdict(probe(setup, codecs=codecs, patience_s=seconds))

    def quantize(self) -> dict[str, Any]:
        """On the first rank, of a gradient after some steps of its own."""
        if self.rank:
            return {}
        self.begin()
        for _ in range(20):
            pictures, labels = self.batch()
            self.plain.zero_grad()
            cross_entropy(self.network(pictures), labels).backward()
            self.plain.step()
        return {"codecs": [asdict(one) for one in quantized(self.network, self.size)]}

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """The answer to an order."""
        if "probe" in order:
            return self.probe(order["probe"], order["seconds"])
        if "prepare" in order:
            return self.prepare(order["prepare"])
        if "train" in order:
            return self.train(order["train"])
        if "test" in order:
            return self.test()
        return self.finish() if "finish" in order else self.quantize()


def tell(answer: dict[str, Any]) -> None:
    """A line to the race."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer until the race has ended."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    folder = given.pop("folder")
    worker = Worker(Settings(**given), folder and Path(folder))
    tell({"ready": True})
    for line in sys.stdin:
        tell(worker.answer(json.loads(line)))
    dist.destroy_process_group()
    wait_for_gloo_threads()  # those of plain DDP


if __name__ == "__main__":
    main()
