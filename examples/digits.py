"""A small network that learns scikit-learn's handwritten digits, and its gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

BATCH = 128
LARGE = 10_000  # elements; smaller tensors are not worth compressing


@dataclass(frozen=True)
class Digits:
    """Handwritten digits as vectors of 64 pixels in 0..1, and their labels."""

    pixels: Tensor
    labels: Tensor

    def batch(self, generator: torch.Generator) -> Digits:
        """A random mini-batch."""
        index = torch.randint(len(self.labels), (BATCH,), generator=generator)
        return Digits(self.pixels[index], self.labels[index])


def load() -> Digits:
    """The 1797 digits that scikit-learn ships."""
    bunch: Any = load_digits()
    pixels = torch.from_numpy(bunch.data).float() / 16
    return Digits(pixels, torch.from_numpy(bunch.target))


def network() -> nn.Module:
    """64-256-256-10: the first two matrices are large enough to be compressed."""
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def backward(model: nn.Module, batch: Digits) -> float:
    """Leave the gradients of a mini-batch in the model; return its loss."""
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(batch.pixels), batch.labels)
    loss.backward()
    return loss.item()


def train(model: nn.Module, digits: Digits, steps: int, generator: torch.Generator) -> float:
    """Plain SGD with momentum; returns the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss = math.nan
    for _ in range(steps):
        loss = backward(model, digits.batch(generator))
        optimizer.step()
    return loss


def large_gradients(model: nn.Module) -> Tensor:
    """The gradients of all large matrices, end to end."""
    gradients = (parameter.grad for parameter in model.parameters())
    return torch.cat(
        [
            gradient.flatten()
            for gradient in gradients
            if gradient is not None and gradient.dim() > 1 and gradient.numel() >= LARGE
        ]
    )


def measured_gradients(
    model: nn.Module, digits: Digits, batches: int, generator: torch.Generator
) -> list[Tensor]:
    """The gradients of several mini-batches at the same weights."""
    gradients = []
    for _ in range(batches):
        backward(model, digits.batch(generator))
        gradients.append(large_gradients(model))
    return gradients
