"""What is learnt from each data set: a network of about half a million parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Course:
    """A network for a data set, and settings that teach it."""

    network: Callable[[], nn.Module]
    words: str
    steps: int
    batch: int  # of a worker
    lr: float
    target: float


def _perceptron(*widths: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for inside, outside in itertools.pairwise(widths):
            layers += [nn.Linear(inside, outside), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return make


def _convolutions() -> nn.Module:
    widths = (3, 32, 64, 128)
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(widths):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    head = nn.Flatten(), nn.Linear(128 * 4 * 4, 192), nn.ReLU(), nn.Linear(192, 10)
    return nn.Sequential(*layers, *head)


COURSES = {
    "digits": Course(
        network=_perceptron(64, 672, 672, 10),
        words="perceptron 64-672-672-10",
        steps=80,
        batch=32,
        lr=0.2,
        target=0.97,
    ),
    "fashion-mnist": Course(
        network=_perceptron(784, 512, 256, 10),
        words="perceptron 784-512-256-10",
        steps=200,
        batch=32,
        lr=0.1,
        target=0.84,
    ),
    "cifar10": Course(
        network=_convolutions,
        words="three convolutions of 32, 64 and 128 channels, a hidden layer of 192",
        steps=400,
        batch=32,
        lr=0.05,
        target=0.5,
    ),
}


def made(data: str, seed: int) -> nn.Module:
    """The network at its start, the same on all ranks and for all strategies."""
    torch.manual_seed(seed)
    return COURSES[data].network()
