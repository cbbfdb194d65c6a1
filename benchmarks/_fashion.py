"""Fashion-MNIST from its four files, as Debian's dataset-fashion-mnist installs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from laconic.race._data import fashion_mnist

FOLDER = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class Part:
    """Pictures of 28 × 28, scaled to mean 0 and deviation 1, and their classes."""

    pictures: Tensor
    labels: Tensor


def load(folder: Path = FOLDER) -> tuple[Part, Part]:
    """Training and test part."""
    check(folder)
    data = fashion_mnist(folder)
    return Part(*data.training.at(slice(None))), Part(*data.testing.at(slice(None)))


def check(folder: Path = FOLDER) -> None:
    """Leave, saying what to do, unless the files are there."""
    if not (folder / "train-images-idx3-ubyte.gz").exists():
        raise SystemExit(
            f"Fashion-MNIST is not in {folder}: apt-get install dataset-fashion-mnist, or say "
            "where its four files are"
        )
