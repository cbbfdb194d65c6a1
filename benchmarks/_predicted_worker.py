"""One rank of benchmarks.predicted: as that of benchmarks.network, but it can probe, too.

{"probe": ["fp16", ...], "seconds": 20}    what this cluster and this model cost, as a probe's JSON
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._network_worker import Worker
from laconic.planner import Setup, probe


def made(name: str) -> nn.Module:
    """A network of that name; all take flat pictures."""
    torch.manual_seed(0)
    if name == "cnn":  # 0.82 million parameters, and the most computation
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(3136, 256), nn.ReLU(), nn.Linear(256, 10)),
        )
    width = {"mlp": 1024, "wide": 2048}[name]  # 1.9 and 5.8 million
    return nn.Sequential(
        *(nn.Linear(784, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, 10),
    )


def probed(worker: Worker, codecs: list[str], seconds: float) -> dict[str, Any]:
    """What a probe finds, with this rank's data."""
    worker.prepare("compute alone")

    def loss(model: nn.Module) -> Tensor:
        images, labels = worker.batch()
        return nn.functional.cross_entropy(model(images), labels)

    setup = Setup(worker.trained, loss, worker.optimizer)
    return asdict(probe(setup, codecs=codecs, patience_s=seconds))


def main() -> None:
    """Answer until the parent has heard enough."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    worker = Worker(Path(sys.argv[2]), made(sys.argv[1]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if "probe" in job:
            answer = probed(worker, job["probe"], job["seconds"])
        else:
            answer = worker.answer(job)
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
