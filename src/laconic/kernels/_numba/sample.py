"""The bound and the sample of ecdq's steps. The definitions are in `_reference/sample.py`."""

from __future__ import annotations

import numpy as np

from laconic.kernels._coding import BLOCK, LEVELS, SAMPLE, SCALINGS, UNIT
from laconic.kernels._numba.memory import kernel


@kernel
def _level(energy: float) -> int:
    """The binary exponent as a double stores it; 0 for zero."""
    return np.float64(energy).view(np.int64) >> 52


@kernel
def count_levels(energies: np.ndarray, counts: np.ndarray) -> int:
    """Count the blocks of every level, from the highest down; returns which one that is."""
    highest = 0
    for b in range(len(energies)):
        highest = max(highest, _level(energies[b]))
    for b in range(len(energies)):
        level = _level(energies[b])
        if level > 0:
            counts[min(highest - level, LEVELS - 1)] += 1
    return highest


@kernel
def radii_of(highest: int, count: int) -> np.ndarray:
    """What the root mean squares of blocks stay below, from the highest level down."""
    radii = np.empty(count)
    square = np.ldexp(1.0, highest - 1022) / BLOCK
    for i in range(count):
        radii[i] = np.sqrt(square)
        square *= 0.5
    return radii


@kernel
def safe_step(
    counts: np.ndarray, radii: np.ndarray, budget: float, low: float, per_value: float
) -> float:
    """A step that keeps to the budget whatever the blocks hold."""
    for _ in range(SCALINGS):
        bound = 0.0
        for i in range(len(counts)):
            bound += counts[i] * min(low / per_value, radii[i])
        low *= max(1.0, np.sqrt(budget / (bound * BLOCK * low)))
    return low


@kernel
def sample_blocks(
    energies: np.ndarray,
    counts: np.ndarray,
    highest: int,
    worth: np.ndarray,
    places: np.ndarray,
    weights: np.ndarray,
) -> tuple[int, int]:
    """Blocks and what each stands for; returns how many there are, and how many points among them.

    Blocks that are taken for sure come first. Levels are worth `worth` each.
    """
    sure, tau = _threshold(counts, worth)
    own = np.zeros(len(counts), np.int64)
    total = taken = 0
    for i in range(sure, len(counts)):
        own[i] = max(int(np.floor(worth[i] / tau * UNIT + 0.5)), 1)
        total += own[i] * counts[i]
    for i in range(sure):
        taken += counts[i]
    points = SAMPLE - taken if total else 0
    # a point's place in units of the weights; no block holds more than a few
    share = total / max(points, 1)
    at = end = j = 0
    for b in range(len(energies)):
        level = _level(energies[b])
        place = min(highest - level, LEVELS - 1)
        if level > 0 and place < sure:
            places[at], weights[at] = b, 1.0
            at += 1
        elif level > 0:
            end += own[place]
            while j < points and _point(j) * share < end:
                places[taken + j] = b
                weights[taken + j] = total / (points * np.float64(own[place]))
                j += 1
    return taken + points, points


@kernel
def _point(j: int) -> float:
    """Where the j-th point lies, in shares of the weights."""
    return j + ((j * 0x9E3779B1 & 0xFFFFFFFF) >> 16) / 65536.0


@kernel
def _threshold(counts: np.ndarray, worth: np.ndarray) -> tuple[int, float]:
    """How many levels, from the highest down, are taken for sure; and tau of the others."""
    if counts.sum() <= SAMPLE:
        return len(counts), 1.0
    sure = 0
    while True:
        rest, left = 0.0, SAMPLE
        for i in range(sure):
            left -= counts[i]
        for i in range(sure, len(counts)):
            rest += counts[i] * worth[i]
        tau, more = rest / left, sure
        while more < len(counts) and worth[more] >= tau:
            more += 1
        if more == sure:
            return sure, tau
        sure = more
