"""Data sets, and the network and hyperparameters for each.

Images to train on: digits that ship with scikit-learn, or files of a local folder.

Pictures stay bytes, and become numbers batch by batch: CIFAR-10 is 0.6 GB as floats, on each rank.
"""

from __future__ import annotations

import gzip
import itertools
import math
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn

from laconic.errors import ConfigError

_MOST_TESTS = 2000  # images: a race tests twenty times, and training waits
_MOST_BYTES = 1 << 30  # of a file's values, unpacked: twenty times Fashion-MNIST's
_CLASSES = 10
_FASHION = Path("/usr/share/datasets/fashion-mnist")  # Debian's dataset-fashion-mnist


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Pictures (n, channels, height, width) as bytes, their classes, and how to scale them."""

    pictures: Tensor
    labels: Tensor
    mean: float
    deviation: float

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, index: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Some of them as numbers of mean 0 and deviation 1, and their classes."""
        values = self.pictures[index].float()
        return values.sub_(self.mean).div_(self.deviation), self.labels[index]

    def share(self, rank: int, size: int) -> Pictures:
        """Every size-th."""
        return self.some(slice(rank, None, size))

    def some(self, index: Tensor | slice) -> Pictures:
        """Those at the places that the index names."""
        return Pictures(
            pictures=self.pictures[index].contiguous(),
            labels=self.labels[index].contiguous(),
            mean=self.mean,
            deviation=self.deviation,
        )


@dataclass(frozen=True, kw_only=True)
class Data:
    """A training and a test set."""

    training: Pictures
    testing: Pictures


def load(name: str, folder: Path | None = None) -> Data:
    """A data set by its name, with the first 2,000 of its tests; ConfigError says where it is."""
    if name not in LOADERS:
        raise ConfigError(f"data sets are {', '.join(LOADERS)}, not {name!r}")
    data = LOADERS[name](folder)
    return Data(training=data.training, testing=data.testing.some(slice(_MOST_TESTS)))


def digits(folder: Path | None = None) -> Data:
    """scikit-learn's 1,797 handwritten digits of 8 × 8; every fifth is for testing."""
    if folder is not None:
        raise ConfigError("digits come with scikit-learn: leave out --folder, or give --data")
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError(
            "digits come with scikit-learn, which is not installed: pip install 'laconic[race]'"
        ) from None
    bunch: Any = load_digits()
    pictures = torch.from_numpy(bunch.images.astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    every = _scaled(pictures, labels)
    number = torch.arange(len(labels))
    return Data(training=every.some(number % 5 != 0), testing=every.some(number % 5 == 0))


def fashion_mnist(folder: Path | None = None) -> Data:
    """Four idx files, packed or not, in the folder or where torchvision puts them inside it."""
    given = folder or _FASHION
    for place in (given, given / "FashionMNIST" / "raw", given / "raw"):
        if _idx_file(place, "train-images-idx3-ubyte"):
            return _data(place, *(_idx_part(place, part) for part in ("train", "t10k")))
    raise ConfigError(
        f"Fashion-MNIST is not in {given}: give --folder with its four idx files (train-images-"
        "idx3-ubyte.gz, ..) or torchvision's folder; Debian has them: apt install "
        "dataset-fashion-mnist"
    )


def cifar10(folder: Path | None = None) -> Data:
    """The five batches and the test batch of the Python or the binary version."""
    given = folder or Path("cifar-10-batches-py")
    names = [f"data_batch_{i}" for i in range(1, 6)]
    for place in (given, given / "cifar-10-batches-py", given / "cifar-10-batches-bin"):
        for ending, read in (("", _pickled), (".bin", _records)):
            files = [place / f"{name}{ending}" for name in (*names, "test_batch")]
            if all(file.is_file() for file in files):
                parts = [read(file) for file in files]
                training = tuple(np.concatenate(arrays) for arrays in zip(*parts[:5], strict=True))
                return _data(place, (training[0], training[1]), parts[5])
    raise ConfigError(
        f"CIFAR-10 is not in {given}: give --folder with the batches of its Python or binary "
        "version (cifar-10-batches-py, as torchvision unpacks it)"
    )


LOADERS: dict[str, Callable[[Path | None], Data]] = {
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
}


def _data(
    place: Path, training: tuple[np.ndarray, np.ndarray], testing: tuple[np.ndarray, np.ndarray]
) -> Data:
    for pictures, labels in (training, testing):
        if not len(pictures) or len(pictures) != len(labels):
            raise ConfigError(
                f"the files in {place} hold {len(pictures)} images and {len(labels)} labels"
            )
        if labels.min() < 0 or labels.max() >= _CLASSES:
            raise ConfigError(
                f"the files in {place} have labels from {labels.min()} to {labels.max()}, not from "
                f"0 to {_CLASSES - 1}"
            )
    learnt = _scaled(*_tensors(*training))
    pictures, labels = _tensors(*testing)
    kept = Pictures(pictures=pictures, labels=labels, mean=learnt.mean, deviation=learnt.deviation)
    return Data(training=learnt, testing=kept)


def _tensors(pictures: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(pictures), torch.from_numpy(labels.astype(np.int64))


def _scaled(pictures: Tensor, labels: Tensor) -> Pictures:
    """By the mean and deviation of all values, from a histogram: no copy as floats."""
    counts = torch.bincount(pictures.flatten(), minlength=256).double()
    values = torch.arange(256).double()
    mean = float((counts * values).sum() / counts.sum())
    variance = float((counts * (values - mean).square()).sum() / counts.sum())
    return Pictures(pictures=pictures, labels=labels, mean=mean, deviation=variance**0.5 or 1.0)


def _idx_file(folder: Path, name: str) -> Path | None:
    return next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)


def _idx_part(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    pictures, labels = (
        _idx(folder, f"{name}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1")
    )
    if pictures.shape[1:] != (28, 28) or labels.ndim != 1:
        raise ConfigError(
            f"{name} in {folder} has images of {pictures.shape} and labels of {labels.shape}, "
            "not of (n, 28, 28) and (n,)"
        )
    return pictures[:, None], labels


def _idx(folder: Path, name: str) -> np.ndarray:
    """An idx file: 0, 0, the type (8: bytes), the number of sizes, the sizes, the values."""
    file = _idx_file(folder, name)
    if file is None:
        raise ConfigError(f"{folder} has no {name}.gz")
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            head = stream.read(4)
            count = head[3] if head[:3] == b"\0\0\x08" and len(head) == 4 else 0
            sizes = np.frombuffer(stream.read(4 * count).ljust(4 * count), ">u4").tolist()
            expected = math.prod(sizes)  # of Python's integers, which do not wrap around
            if not sizes or expected > _MOST_BYTES:
                raise ConfigError(
                    f"{file} is no idx file of bytes, or has too many: {shortened(sizes)}"
                )
            values = np.frombuffer(stream.read(expected + 1), np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if len(values) != expected:
        raise ConfigError(f"{file} is no idx file of bytes, or was cut")
    return values.reshape(sizes).copy()


def _records(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """The binary version: a class and 3,072 values each."""
    try:
        with file.open("rb") as stream:
            found = np.frombuffer(stream.read(_MOST_BYTES), np.uint8)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if len(found) % 3073:
        raise ConfigError(f"{file} was cut: its records have 3073 bytes")
    rows = found.reshape(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32).copy(), rows[:, 0].copy()


def _pickled(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """The Python version: a pickled dictionary of arrays, and nothing else is let in."""
    try:
        with file.open("rb") as stream:
            found = _ArraysOnly(stream, encoding="bytes").load()
        pictures, labels = found[b"data"], np.array(found[b"labels"])
        _check_batch(pictures, labels, file.stat().st_size)
    except Exception as error:  # a pickle's author chooses which
        why = "it wants more memory than there is" if isinstance(error, MemoryError) else error
        raise ConfigError(f"{file} is no batch of CIFAR-10: {why}") from error
    return pictures.reshape(-1, 3, 32, 32).copy(), labels


def _check_batch(pictures: Any, labels: np.ndarray, file_bytes: int) -> None:
    """Shapes are only claims: what is not in the file must not be copied."""
    if type(pictures) is not np.ndarray or pictures.dtype != np.uint8:
        raise ValueError("its data is no array of bytes")
    if pictures.ndim != 2 or pictures.shape[1] != 3072 or pictures.nbytes > file_bytes:
        raise ValueError(f"its data has the shape {pictures.shape}, in {file_bytes} bytes")
    if labels.dtype.kind not in "iu" or labels.shape != pictures.shape[:1]:
        raise ValueError(f"its labels are {labels.dtype} of {labels.shape}, not one for a picture")


class _ArraysOnly(pickle.Unpickler):
    """A pickle can run anything; this one can make NumPy arrays."""

    def __init__(self, stream: IO[bytes], **options: Any) -> None:
        super().__init__(stream, **options)

    def find_class(self, module: str, name: str) -> Any:
        if name in ("_reconstruct", "ndarray", "dtype") and module.split(".")[0] == "numpy":
            return getattr(np, name, None) or np.zeros(0).__reduce__()[0]
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants {module}.{name}")


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
