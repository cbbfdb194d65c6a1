"""One rank of benchmarks.predicted: as that of benchmarks.network, but it can probe, too.

{"probe": ["fp16", ...], "seconds": 20}    what this cluster and this model cost, as a probe's JSON
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._network_worker import Worker, serve
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


class Prober(Worker):
    """A rank that can probe."""

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """What the parent is told."""
        return self.probed(job["probe"], job["seconds"]) if "probe" in job else super().answer(job)

    def probed(self, codecs: list[str], seconds: float) -> dict[str, Any]:
        """What a probe finds, with this rank's data."""
        self.prepare("compute alone")

        def loss(model: nn.Module) -> Tensor:
            images, labels = self.batch()
            return nn.functional.cross_entropy(model(images), labels)

        setup = Setup(self.trained, loss, self.optimizer)
        return asdict(probe(setup, codecs=codecs, patience_s=seconds))


if __name__ == "__main__":
    serve(lambda: Prober(Path(sys.argv[2]), made(sys.argv[1])))
