"""What ecdq's steps rest on: a bound on every block's error, and a sample that no energy escapes.

At step Δ a block of n ≤ 512 values and of energy E_b = Σ v² costs, on average over the dither,

    C_b(Δ) = Δ²·min(n/12, Σ φ(1-φ)),          without the first choice under subtract=never.

1. A bound that needs no second look at the values. φ(1-φ) ≤ min(1/4, |v|/Δ), and Σ|v| ≤ √(n·E_b):

       C_b(Δ) ≤ U_b(Δ) = 512·Δ·min(Δ/c, ρ_b),    ρ_b = √(E_b/512),   c = 12; 4 under never

   Blocks are counted by level, the binary exponent of E_b: level k has ρ_b < ρ_k = √(2^(k+1)/512).
   The 63 highest levels have a count each, lower ones share the last. With U = Σ U_b over them:

2. A safe step. Δ = √(c·error)·rms keeps to the budget T = error·Σ v², because no value costs more
   than Δ²/c. U(s·Δ) ≤ s²·U(Δ) for s ≥ 1, so Δ·√(T/U(Δ)) keeps to it as well, where U(Δ) ≤ T;
   four times, until little changes. It already is the right one for energy in few blocks.

3. A sample of at most 256 blocks that no energy can hide from. Block b, of level k, is worth
   g_b = min(Δ/c, ρ_k), its share of U at the safe step. Blocks with g_b ≥ τ are taken for sure,
   m' of the others with weights w_b = round(2^24·g_b/τ), W = Σ w_b:

       τ = Σ_others g_b / m',   point j = (j + h_j)·W/m', j < m', h_j a hash of j on [0, 1),

   and a point takes the block in whose part of [0, W) it lies. All blocks that are not zero are
   sure, if they are 256 or fewer. The estimate (Hansen and Hurwitz 1943) is

       Ĉ(Δ) = Σ_sure C_b + Σ_j C_j·W/(m'·w_j),        S² = Σ_j z_j² - (Σ_j z_j)²/m',

   z_j the terms of the second sum and S about its standard error. At the safe step no z_j is more
   than U/m'; blocks that are alike, as in dense gradients, have equal z_j, and S is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from laconic.kernels._coding import BLOCK, LEVELS, SAMPLE, SCALINGS, UNIT


def _levels(energies: np.ndarray) -> np.ndarray:
    """Binary exponents as a double stores them: 0 for zero, and for nothing else here."""
    return energies.view(np.int64) >> 52


def count_levels(energies: np.ndarray) -> tuple[np.ndarray, int]:
    """Blocks of every level, from the highest down, and which one that is."""
    levels = _levels(energies)
    highest = int(levels.max())
    places = np.minimum(highest - levels[levels > 0], LEVELS - 1)
    return np.bincount(places, minlength=LEVELS), highest


def radii(highest: int) -> np.ndarray:
    """ρ_k of every level."""
    return np.sqrt(np.ldexp(1.0, highest - np.arange(LEVELS) - 1022) / BLOCK)


def safe_step(counts: np.ndarray, radii: np.ndarray, budget: float, low: float, most: int) -> float:
    """A step that keeps to the budget whatever the blocks hold."""
    for _ in range(SCALINGS):
        bound = float((counts * np.minimum(low / most, radii)).sum()) * BLOCK * low
        low *= max(1.0, math.sqrt(budget / bound))
    return low


@dataclass(frozen=True)
class Sample:
    """Blocks, what each stands for, and how many of the last ones are points'."""

    blocks: np.ndarray
    weights: np.ndarray
    points: int


def sample_blocks(energies: np.ndarray, counts: np.ndarray, highest: int, cap: float) -> Sample:
    worth = np.minimum(cap, radii(highest))
    sure, tau = _threshold(counts, worth)
    levels = _levels(energies)
    place = np.minimum(highest - levels, LEVELS - 1)
    own = np.maximum(np.floor(worth / tau * UNIT + 0.5), 1).astype(np.int64)
    taken = (levels > 0) & (place < sure)
    weights = np.where((levels > 0) & ~taken, own[place], 0)
    points = SAMPLE - int(counts[:sure].sum())
    if not weights.any():
        points = 0
    total, ends = int(weights.sum()), np.cumsum(weights)
    j = np.arange(points, dtype=np.uint64)
    place = ((j * 0x9E3779B1 & 0xFFFFFFFF) >> 16).astype(np.float64) / 65536 + j
    found = np.searchsorted(ends, place * (total / max(points, 1)), side="right")
    stands = total / (points * weights[found].astype(np.float64))
    blocks = np.concatenate([np.flatnonzero(taken), found])
    return Sample(blocks, np.concatenate([np.ones(int(taken.sum())), stands]), points)


def _threshold(counts: np.ndarray, worth: np.ndarray) -> tuple[int, float]:
    """How many levels, from the highest down, are taken for sure; and τ of the others."""
    if counts.sum() <= SAMPLE:
        return LEVELS, 1.0
    sure = 0
    while True:
        rest = float((counts[sure:] * worth[sure:]).sum())
        tau = rest / (SAMPLE - int(counts[:sure].sum()))
        more = sure + int((worth[sure:] >= tau).sum())
        if more == sure:
            return sure, tau
        sure = more
