"""The steps of ecdq: as large as the error allows, and no larger on any input.

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

4. The search starts at the safe step and tries larger ones: Ĉ + 3·S ≤ T. Trials are float32, as
   steps are, so that a sample of all blocks is exact.

5. Encoding adds up the exact ΣC_b. Where it is more than T, the segment takes the safe step
   instead. All of this looks at x and Δ, never at the dither: whatever is chosen is unbiased.

Δ is at least max|x|/32000, whatever the error. Sums of squares depend on the order of adding, and
so may a step in its last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laconic.kernels._coding import (
    BLOCK,
    CHUNK,
    EVALUATIONS,
    LARGEST,
    LEVELS,
    SAMPLE,
    SCALINGS,
    SQUARED_STEP,
    UNIT,
    Budgets,
    Subtract,
)
from laconic.kernels._layout import LIFT, TINY
from laconic.kernels._protocol import StepRule

_HUGE = 3.4e38


def ecdq_steps(
    x: Tensor,
    steps: Tensor,
    parts: tuple[int, ...],
    rule: StepRule,
    budgets: Budgets | None = None,
) -> None:
    """See `Kernels`."""
    first = 0
    for number, length in enumerate(parts):
        v = x[first : first + length].to(torch.float32).cpu()
        first += length
        chosen = _choose(v, float(rule.errors[number]), rule)
        steps[number] = chosen.step
        if budgets is not None:
            budgets.limit[number] = chosen.limit
            budgets.safe[number] = chosen.safe


@dataclass(frozen=True, kw_only=True)
class _Choice:
    step: float
    limit: float = math.inf
    safe: float = 0.0


def _choose(v: Tensor, error: float, rule: StepRule) -> _Choice:
    step, max_bits, subtract = rule.step, rule.max_bits, rule.subtract
    top = float(v.abs().max())
    if not math.isfinite(top) or top == 0:
        return _Choice(step=math.nan if top else 0.0)
    energies = np.array([float(block.double().square().sum()) for block in v.split(BLOCK)])
    floor, total = _above(top / LARGEST), float(energies.sum())
    if step:
        delta = max(step * math.sqrt(total / len(v)), top / LARGEST)
        return _Choice(step=_above(_for_bits(v, max_bits, delta)))
    budget, most = error * total, 4 if subtract is Subtract.NEVER else 12
    low = math.sqrt(most * budget / len(v))
    if subtract is Subtract.ALWAYS:
        return _Choice(step=_bounded(v, max_bits, max(_below(low), floor)))
    counts, highest = count_levels(energies)
    safe = safe_step(counts, radii(highest), budget, low, most)
    start = max(_below(safe), floor)
    sample = sample_blocks(energies, counts, highest, safe / most)
    found = _search(v, sample, start, budget, subtract)
    delta = _bounded(v, max_bits, found)
    limit = budget if delta == found else math.inf  # a ceiling on the bits goes before the error
    return _Choice(step=delta, limit=limit, safe=_bounded(v, max_bits, start))


# --- fixed point ---------------------------------------------------------------------------


def usable(step: Tensor) -> bool:
    """A step that can be divided by."""
    return bool(torch.isfinite(step)) and float(step) > 0


def fixed_point(x: Tensor, step: Tensor) -> Tensor:
    """t, as int64; zeros under a step that is zero or not finite."""
    if not usable(step):
        return torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    lift = LIFT if float(step) < TINY else 1.0
    times = torch.tensor(65536.0, device=x.device) / (step * lift)
    v = ((x.to(torch.float32) * lift) * times).clamp(-LARGEST * 65536.0, LARGEST * 65536.0)
    return torch.floor(v + 0.5).to(torch.int64)


def kept_cost(t: Tensor) -> int:
    """Σ 2^16·φ(1-φ) of a block, each rounded up, φ the fraction of t."""
    part = t & 0xFFFF
    return int((part - (part * part >> 16)).sum())


def block_cost(t: Tensor, subtract: Subtract) -> int:
    """Expected squared error of a block; SQUARED_STEP of them are Δ²."""
    kept, subtracted = 12 * kept_cost(t), 65536 * len(t)
    if subtract is Subtract.AUTO:
        return min(kept, subtracted)
    return kept if subtract is Subtract.NEVER else subtracted


# --- floats --------------------------------------------------------------------------------


def _above(value: float) -> float:
    """The float32 just above the nearest one, so that it is larger and never 0."""
    bits = np.float32(min(value, _HUGE)).view(np.int32) + np.int32(1)
    return float(bits.view(np.float32))


def _below(value: float) -> float:
    """The largest float32 that is no larger."""
    near = np.float32(min(value, _HUGE))
    return float((near.view(np.int32) - np.int32(float(near) > value)).view(np.float32))


def _bounded(v: Tensor, max_bits: float, delta: float) -> float:
    """Delta, or the larger step that max_bits asks for."""
    wanted = _for_bits(v, max_bits, delta)
    return delta if wanted == delta else _above(wanted)


# --- the search ----------------------------------------------------------------------------


def _search(v: Tensor, sample: Sample, start: float, budget: float, subtract: Subtract) -> float:
    """The largest step found, from a safe one on, whose estimated error keeps to the budget."""
    blocks = [v[b * BLOCK : (b + 1) * BLOCK] for b in sample.blocks.tolist()]

    def used(delta: float) -> float:
        """The part of the budget that a step uses, as far as the sample tells."""
        step = torch.tensor(delta, dtype=torch.float32)
        costs = np.array([block_cost(fixed_point(block, step), subtract) for block in blocks])
        terms = costs * (delta * delta / (SQUARED_STEP * budget)) * sample.weights
        z, m = terms[len(terms) - sample.points :], max(sample.points, 1)
        spread = float((z * z).sum()) - float(z.sum()) ** 2 / m
        return float(terms.sum()) + 3 * math.sqrt(max(spread, 0.0))

    low, high, there = start, math.inf, used(start)
    for _ in range(EVALUATIONS):
        trial = math.sqrt(low * high)
        if high == math.inf:
            trial = low * min(2.0, math.sqrt(1 / max(there, 1e-12)))
        trial = float(np.float32(min(trial, _HUGE)))
        if trial < low * 1.01:
            break
        found = used(trial)
        if found <= 1:
            low, there = trial, found
        else:
            high = trial
    return low


# --- the ceiling on bits -------------------------------------------------------------------


def _for_bits(v: Tensor, max_bits: float, delta: float) -> float:
    """The smallest step found, from delta on, whose bit planes keep to max_bits per value."""
    if not max_bits:
        return delta
    most = [float(chunk.abs().max()) for chunk in v.split(CHUNK)]
    blocks = [-(-len(chunk) // BLOCK) for chunk in v.split(CHUNK)]

    def fits(step: float) -> bool:
        planes = 0
        for top, count in zip(most, blocks, strict=True):
            bound = int(top / step * (1 + 2.0**-18) + 2.0**-15) + 1
            planes += count * (1 + bound.bit_length()) if top else 0
        return planes <= max_bits * sum(blocks)

    if fits(delta):
        return delta
    low, high = delta, max(most) * 1.0001
    for _ in range(24):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


# --- the bound and the sample -------------------------------------------------------------


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
