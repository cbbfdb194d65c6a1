"""CIFAR-10 from a file that is there: torchvision's folder, or an .npz of pictures or of JPEGs."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from laconic.race._data import cifar10

THREADS, AT_ONCE = 16, 500


@dataclass(frozen=True)
class Part:
    """Pictures (n, 32, 32, 3) in uint8, and their classes."""

    pictures: np.ndarray
    labels: np.ndarray


def load(path: Path) -> tuple[Part, Part]:
    """Training and test part.

    `path` is a folder cifar-10-batches-py, as torchvision unpacks it, or an .npz with
    train_x, train_y, test_x, test_y, or with JPEG files end to end: train_bytes, train_offsets
    (one more than files), train_labels, and the same for test.
    """
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise SystemExit(
            f"CIFAR-10 is not at {path}: give --data a folder cifar-10-batches-py or an .npz with "
            "train_x, train_y, test_x, test_y"
        )
    arrays = np.load(path)
    if "train_x" in arrays:
        return _raw(arrays, "train"), _raw(arrays, "test")
    return _jpegs(arrays, "train"), _jpegs(arrays, "test")


def _raw(arrays: Any, name: str) -> Part:
    return Part(arrays[f"{name}_x"], arrays[f"{name}_y"].astype(np.int64))


def _folder(folder: Path) -> tuple[Part, Part]:
    data = cifar10(folder)
    train, test = (
        Part(part.pictures.permute(0, 2, 3, 1).contiguous().numpy(), part.labels.numpy())
        for part in (data.training, data.testing)
    )
    return train, test


def _jpegs(arrays: Any, name: str) -> Part:
    data, offsets = arrays[f"{name}_bytes"], arrays[f"{name}_offsets"]
    decoded, count = _decoder(), len(offsets) - 1

    def some(first: int) -> np.ndarray:
        files = range(first, min(first + AT_ONCE, count))
        return np.stack([decoded(data[offsets[i] : offsets[i + 1]]) for i in files])

    with ThreadPoolExecutor(THREADS) as pool:
        pictures = np.concatenate(list(pool.map(some, range(0, count, AT_ONCE))))
    return Part(pictures, arrays[f"{name}_labels"].astype(np.int64))


def _decoder() -> Callable[[np.ndarray], np.ndarray]:
    """One JPEG file to (32, 32, 3)."""
    try:
        from PIL import Image  # pyright: ignore

        return lambda file: np.asarray(Image.open(io.BytesIO(file.tobytes())).convert("RGB"))
    except ImportError:
        pass
    try:
        import torch
        from torchvision.io import ImageReadMode, decode_jpeg  # pyright: ignore

        return lambda file: (
            decode_jpeg(torch.from_numpy(file), ImageReadMode.RGB).permute(1, 2, 0).numpy()
        )
    except ImportError:
        raise SystemExit(
            "this file has JPEGs: install pillow or torchvision, or give --data pictures"
        ) from None
