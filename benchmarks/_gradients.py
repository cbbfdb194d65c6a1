"""Shapes of gradients, by name: every rank's tensor of a step, the same in every process.

They are what codecs meet, and what a sample of blocks can miss: energy in few rows, in one value,
or in many small values that add up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

ROWS, WIDTH, TOUCHED = 50_000, 32, 16  # an embedding, and the rows that a rank's batch touches
COUNT = 40_000


def gradients(kind: str, ranks: int, step: int, seed: int = 0) -> list[Tensor]:
    """One tensor per rank; equal arguments give equal bits."""
    number = KINDS.index(kind)
    rngs = [np.random.default_rng([seed, number, step, rank]) for rank in range(ranks)]
    shared = np.random.default_rng([seed, number, step, 1 << 20])
    return _KINDS[kind](rngs, shared, step)


Rngs = list[np.random.Generator]


def _dense(rngs: Rngs, shared: np.random.Generator, step: int) -> list[Tensor]:
    """Gaussian values: a part that all ranks agree on, and noise."""
    common = shared.standard_normal(COUNT)
    return [_tensor(common + rng.standard_normal(COUNT)) for rng in rngs]


def _heavy_tailed(rngs: Rngs, shared: np.random.Generator, step: int) -> list[Tensor]:
    """Student's t with 1.5 degrees of freedom: no variance, a few values have all the energy."""
    return [_tensor(rng.standard_t(1.5, 200_000)) for rng in rngs]


def _block_sparse(rngs: Rngs, shared: np.random.Generator, step: int) -> list[Tensor]:
    """Most blocks of 512 are zero; the places are each rank's own."""
    results = []
    for rng in rngs:
        x = np.zeros((390, 512))
        x[rng.choice(len(x), 5, replace=False)] = rng.standard_normal((5, 512))
        results.append(_tensor(x.reshape(-1)))
    return results


def _embedding(rngs: Rngs, shared: np.random.Generator, step: int) -> list[Tensor]:
    """Rows of the words in a rank's batch; the others are zero. Shape (ROWS, WIDTH)."""
    results = []
    for rng in rngs:
        x = torch.zeros(ROWS, WIDTH)
        x[torch.from_numpy(rng.choice(ROWS, TOUCHED, replace=False))] = _tensor(
            rng.standard_normal((TOUCHED, WIDTH))
        )
        results.append(x)
    return results


def _outlier(rngs: Rngs, shared: np.random.Generator, step: int) -> list[Tensor]:
    """Gaussian values and one that is larger than all of them together."""
    results = []
    for rng in rngs:
        x = rng.standard_normal(200_000)
        x[rng.integers(len(x))] = 2e4
        results.append(_tensor(x))
    return results


def _tiny_plus_large(rngs: Rngs, shared: np.random.Generator, step: int) -> list[Tensor]:
    """Many small values of one sign and a large one: the small ones' errors add up."""
    results = []
    for rng in rngs:
        x = 1 + 0.1 * rng.random(65_537)
        x[rng.integers(len(x))] = 2e4
        results.append(_tensor(x))
    return results


def _cancelling(rngs: Rngs, shared: np.random.Generator, step: int) -> list[Tensor]:
    """Large values that add up to nearly nothing: the mean is a hundredth of each."""
    noise = shared.standard_normal((len(rngs), COUNT))
    noise -= noise.mean(0)
    common = 0.01 * shared.standard_normal(COUNT)
    return [_tensor(common + own) for own in noise]


def _changing(rngs: Rngs, shared: np.random.Generator, step: int) -> list[Tensor]:
    """Another size and another shape at every step: dense, sparse, cancelling, equal."""
    size = (1.0, 1e3, 1e-3, 30.0, 1e-6)[step % 5]
    if step % 4 == 1:
        dense = [rng.standard_normal(COUNT) * (rng.random(COUNT) < 0.01) for rng in rngs]
        return [_tensor(size * x) for x in dense]
    if step % 4 == 2:
        return [size * x for x in _cancelling(rngs, shared, step)]
    if step % 4 == 3:
        return [_tensor(size * shared.standard_normal(COUNT))] * len(rngs)
    return [size * x for x in _dense(rngs, shared, step)]


def _bf16_wide(rngs: Rngs, shared: np.random.Generator, step: int) -> list[Tensor]:
    """bfloat16 values of all magnitudes from 1e-12 to 10."""
    results = []
    for rng in rngs:
        x = rng.standard_normal(COUNT) * 10.0 ** rng.uniform(-12, 1, COUNT)
        results.append(_tensor(x).bfloat16())
    return results


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


_KINDS: dict[str, Callable[[Rngs, np.random.Generator, int], list[Tensor]]] = {
    "dense": _dense,
    "heavy_tailed": _heavy_tailed,
    "block_sparse": _block_sparse,
    "embedding": _embedding,
    "outlier": _outlier,
    "tiny_plus_large": _tiny_plus_large,
    "cancelling": _cancelling,
    "changing": _changing,
    "bf16_wide": _bf16_wide,
}
KINDS: tuple[str, ...] = tuple(_KINDS)
