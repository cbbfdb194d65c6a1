"""The steps of ecdq: as large as the error allows, and no larger on any input.

The safe step, and the estimate Ĉ of the expected error with its standard error S, are 1 to 3 in
`sample.py`; T = error·Σ v² is what a segment may spend.

4. The search starts at the safe step and tries larger ones: Ĉ + 3·S ≤ T. Trials are float32, as
   steps are, so that a sample of all blocks is exact.

5. Encoding adds up the exact ΣC_b. Where it is more than T, the segment takes the safe step
   instead. All of this looks at x and Δ, never at the dither: whatever is chosen is unbiased.

Δ is at least max|x|/32000, whatever the error. Sums of squares depend on the order of adding, and
so may a step in its last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laconic.kernels._coding import (
    BLOCK,
    CHUNK,
    EVALUATIONS,
    LARGEST,
    SQUARED_STEP,
    Budgets,
    Subtract,
)
from laconic.kernels._layout import LIFT, TINY
from laconic.kernels._reference.sample import (
    Sample,
    count_levels,
    radii,
    safe_step,
    sample_blocks,
)

_HUGE = 3.4e38


def ecdq_steps(
    x: Tensor,
    out: Tensor,
    parts: tuple[int, ...],
    *,
    errors: Sequence[float] | Tensor,
    step: float,
    max_bits: float,
    subtract: Subtract,
    budgets: Budgets | None = None,
) -> None:
    """The step of every segment: `step` times its rms or, if that is 0, the one for its error.

    With max_bits, the step grows until bit planes of floor(max|x|/Δ) + 1 take no more bits per
    value: a bound on every coder's length that holds whatever the dither will be. `budgets` gets
    what encoding checks: T, infinite where there is no check, and the safe step.
    """
    first = 0
    for number, length in enumerate(parts):
        v = x[first : first + length].to(torch.float32).cpu()
        first += length
        chosen = _choose(v, float(errors[number]), step, max_bits, subtract)
        out[number] = chosen.step
        if budgets is not None:
            budgets.limit[number] = chosen.limit
            budgets.safe[number] = chosen.safe


@dataclass(frozen=True, kw_only=True)
class _Choice:
    step: float
    limit: float = math.inf
    safe: float = 0.0


def _choose(v: Tensor, error: float, step: float, max_bits: float, subtract: Subtract) -> _Choice:
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
