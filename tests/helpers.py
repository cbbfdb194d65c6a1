"""What the tests share: inputs with fixed seeds, bitwise comparison, which kernels are there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import combinations, product
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic as lc

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PATIENCE_S = 600.0  # against hangs, not slowness: how long tests wait for what must come
FLT_MAX = torch.finfo(torch.float32).max


def gaussian(count: int, seed: int = 0) -> Tensor:
    return _tensor(np.random.default_rng(seed).standard_normal(count))


def student_t3(count: int, seed: int = 1) -> Tensor:
    """Heavy tails: no fourth moment."""
    return _tensor(np.random.default_rng(seed).standard_t(3, count))


def mostly_zero(count: int, seed: int = 2) -> Tensor:
    """Nine of ten values are exactly zero, as behind a ReLU."""
    rng = np.random.default_rng(seed)
    return _tensor(rng.standard_normal(count) * (rng.random(count) < 0.1))


def constant(count: int, seed: int = 3) -> Tensor:
    del seed
    return torch.full((count,), 0.37)


INPUTS: dict[str, Callable[..., Tensor]] = {
    "gaussian": gaussian,
    "student-t3": student_t3,
    "90%-zero": mostly_zero,
    "constant": constant,
}


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


def kernels(name: str) -> ModuleType | None:
    """The module of kernels called `name`, or None where something it needs is missing.

    Only a missing module counts: kernels that fail to import for another reason must fail tests.
    """
    try:
        module = import_module(f"laconic.kernels._{name}")
    except ModuleNotFoundError:
        return None
    return module if hasattr(module, "quantize") else None


def device_of(name: str) -> torch.device:
    """Where a backend is tested: Triton on a GPU if there is one, else in its interpreter."""
    return torch.device("cuda" if name == "triton" and torch.cuda.is_available() else "cpu")


def decode(codec: lc.Codec, wire: lc.Wire, x: Tensor, **options) -> Tensor:
    """Decode any codec; ndqsg gets x itself as side information, so that no cell is wrong."""
    if "ndqsg" in str(codec):
        options.setdefault("side", torch.zeros_like(x) if not x.isfinite().all() else x)
    return codec.decode(wire, **options)


def assert_same_bits(got: Tensor, want: Tensor, what: object = "") -> None:
    """Equal shape, dtype and bits; all NaNs count as one."""
    assert got.shape == want.shape and got.dtype == want.dtype, what
    got, want = got.cpu(), want.cpu()
    if not got.dtype.is_floating_point:
        wrong = got != want
    else:
        integer = torch.int32 if got.dtype == torch.float32 else torch.int16
        nan = got.isnan() & want.isnan()
        wrong = (got.view(integer) != want.view(integer)) & ~nan
    where = wrong.nonzero().flatten()[:5].tolist()
    assert not where, f"{what}: at {where} got {got[wrong][:5]}, want {want[wrong][:5]}"


def difference(got: Tensor, want: Tensor) -> str:
    """Nothing, or where bits differ; tensors would outlive their process in a queue."""
    try:
        assert_same_bits(got, want)
    except AssertionError as error:
        return str(error)
    return ""


def refusal(work: Callable[[], object]) -> str:
    """What a ConfigError says of it; nothing if there is none."""
    try:
        work()
    except lc.ConfigError as error:
        return str(error)
    return ""


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """As a graph, after a first run: capturing what waits for the device raises."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def equal(a: Any, b: Any) -> bool:
    """Values, or dictionaries and lists of them, that may be tensors."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def equal_everywhere(given: nn.Module | dict[str, Tensor]) -> bool:
    """Whether all ranks hold the same bits of parameters, or of these values."""
    values = given.values() if isinstance(given, dict) else given.parameters()
    mine = torch.cat([value.detach().flatten() for value in values])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(mine, other) for other in every)


@contextmanager
def warnings_told() -> Iterator[list[str]]:
    """What laconic's logger says meanwhile."""
    logger, told = logging.getLogger("laconic"), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


@contextmanager
def kernel_threads(count: int) -> Iterator[None]:
    """So many for the CPU's kernels meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def covering(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows in which every two values of different columns meet: few of all that there are.

    For cells that take seconds each, and differ in no more than two of their values at a time.
    """
    rows, every = list[tuple[Any, ...]](), list(product(*values))
    pairs = {
        row: {(i, a, j, b) for (i, a), (j, b) in combinations(enumerate(row), 2)} for row in every
    }
    missing = set[tuple[Any, ...]]().union(*pairs.values())
    while missing:
        rows.append(max(every, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[rows[-1]]
    return rows
