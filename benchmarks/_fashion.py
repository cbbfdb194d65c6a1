"""Fashion-MNIST from its four files, as Debian's dataset-fashion-mnist installs them."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FOLDER = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class Part:
    """Pictures of 28 × 28, scaled to mean 0 and deviation 1, and their classes."""

    pictures: Tensor
    labels: Tensor


def load(folder: Path = FOLDER) -> tuple[Part, Part]:
    """Training and test part."""
    check(folder)
    return _part(folder, "train"), _part(folder, "t10k")


def check(folder: Path = FOLDER) -> None:
    """Leave, saying what to do, unless the files are there."""
    if not (folder / "train-images-idx3-ubyte.gz").exists():
        raise SystemExit(
            f"Fashion-MNIST is not in {folder}: apt-get install dataset-fashion-mnist, or say "
            "where its four files are"
        )


def _part(folder: Path, name: str) -> Part:
    pictures = _idx(folder / f"{name}-images-idx3-ubyte.gz").reshape(-1, 1, 28, 28)
    labels = _idx(folder / f"{name}-labels-idx1-ubyte.gz")
    scaled = (torch.from_numpy(pictures).float() / 255 - 0.2860) / 0.3530
    return Part(scaled, torch.from_numpy(labels).long())


def _idx(path: Path) -> np.ndarray:
    """The bytes of an idx file: a type, the number of dimensions, their sizes, the values."""
    data = gzip.decompress(path.read_bytes())
    header = 4 + 4 * data[3]
    return np.frombuffer(data, dtype=np.uint8, offset=header).copy()
