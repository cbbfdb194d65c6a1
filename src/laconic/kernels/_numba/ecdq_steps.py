"""The steps of ecdq on the CPU. The definitions are in `_reference/ecdq_steps.py`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from laconic.kernels._coding import (
    BLOCK,
    BLOCKS,
    CHUNK,
    EVALUATIONS,
    LARGEST,
    LEVELS,
    SAMPLE,
    SCALINGS,
    SQUARED_STEP,
    UNIT,
    Budgets,
    table,
)
from laconic.kernels._numba.group import INFINITY, largest, lift_of, square_sum
from laconic.kernels._numba.intrinsics import (
    Pointer,
    array,
    bits_of,
    f32,
    float_of,
    get,
    i32,
    kernel,
    nearest,
    pointer,
    shr,
    u32,
)
from laconic.kernels._pool import split
from laconic.kernels._protocol import StepRule

LIMIT = f32(LARGEST * 65536.0)
_HUGE = 3.4e38


def ecdq_steps(
    x: Tensor,
    steps: Tensor,
    parts: tuple[int, ...],
    rule: StepRule,
    budgets: Budgets | None = None,
) -> None:
    """See `Kernels`."""
    where = table(parts)
    data, chunks = array(x), where.chunks
    most, energies = np.empty(chunks, np.int32), np.empty(chunks * BLOCKS)
    split(
        lambda a, b: _measure(data, where.start, where.count, most, energies, a, b), chunks, CHUNK
    )
    budgets = budgets or Budgets.of(len(parts), x.device)
    errors = np.array(rule.errors, np.float64)
    wish = (errors, float(rule.step), float(rule.max_bits), int(rule.subtract))
    result = (steps.numpy(), budgets.limit.numpy(), budgets.safe.numpy())
    _choose(data, np.array(parts), where.count, most, energies, *wish, *result)


@kernel
def _measure(
    x: np.ndarray,
    start: np.ndarray,
    count: np.ndarray,
    most: np.ndarray,
    energies: np.ndarray,
    first: int,
    last: int,
) -> None:
    """Bits of the largest magnitude of each chunk, and the sum of squares of each block."""
    x = pointer(x)
    for c in range(first, last):
        a, b = int(start[c]), int(start[c]) + int(count[c])
        top = i32(0)
        for k in range(BLOCKS):
            e = min(a + k * BLOCK, b)
            f = min(e + BLOCK, b)
            top = max(top, largest(x, e, f))
            energies[c * BLOCKS + k] = square_sum(x, e, f)
        most[c] = top


@kernel
def _choose(
    x: np.ndarray,
    parts: np.ndarray,
    count: np.ndarray,
    most: np.ndarray,
    energies: np.ndarray,
    errors: np.ndarray,
    step: float,
    max_bits: float,
    subtract: int,
    out: np.ndarray,
    limit: np.ndarray,
    safe: np.ndarray,
) -> None:
    """The step of every segment."""
    x = pointer(x)
    c = first = 0
    for s in range(len(parts)):
        length = int(parts[s])
        chunks, blocks = (length + CHUNK - 1) // CHUNK, (length + BLOCK - 1) // BLOCK
        own = energies[c * BLOCKS : c * BLOCKS + blocks]
        counts, tops = count[c : c + chunks], most[c : c + chunks]
        top, total = i32(0), 0.0
        for i in range(chunks):
            top = max(top, tops[i])
        for i in range(blocks):
            total += own[i]
        limit[s], safe[s] = np.inf, f32(0)
        if top >= INFINITY:
            out[s] = f32(np.nan)
        elif top == 0:
            out[s] = f32(0)
        elif step > 0:
            delta = max(step * np.sqrt(total / length), np.float64(float_of(top)) / LARGEST)
            out[s] = _above(_for_bits(counts, tops, max_bits, delta))
        else:
            budget, per_value = errors[s] * total, 4.0 if subtract == 2 else 12.0
            floor = np.float64(_above(np.float64(float_of(top)) / LARGEST))
            low = np.sqrt(per_value * budget / length)
            if subtract == 1:
                start = max(np.float64(_below(low)), floor)
                out[s] = _bounded(counts, tops, max_bits, start)
            else:
                wish = (budget, low, floor, per_value, subtract)
                found, start = _searched(x, first, length, own, wish)
                out[s] = _bounded(counts, tops, max_bits, found)
                if np.float64(out[s]) == found:  # else a ceiling on the bits goes before the error
                    limit[s] = budget
                safe[s] = _bounded(counts, tops, max_bits, start)
        c += chunks
        first += length


# --- fixed point ---------------------------------------------------------------------------


@kernel
def spread(t: np.int32) -> np.int32:
    """2^16·φ(1-φ), rounded up, φ the fraction of a fixed-point number."""
    part = u32(u32(t) & u32(0xFFFF))
    return i32(u32(part - shr(u32(part * part), u32(16))))


@kernel
def block_cost(kept: np.int32, size: int, subtract: int) -> int:
    """Expected squared error of a block, given the sum of what its values cost if kept."""
    if subtract == 1:
        return 65536 * size
    if subtract == 2:
        return 12 * int(kept)
    return min(12 * int(kept), 65536 * size)


# --- floats --------------------------------------------------------------------------------


@kernel
def _above(value: float) -> np.float32:
    """The float32 just above the nearest one, so that it is larger and never 0."""
    return float_of(i32(bits_of(f32(min(value, _HUGE))) + i32(1)))


@kernel
def _below(value: float) -> np.float32:
    """The largest float32 that is no larger."""
    near = f32(min(value, _HUGE))
    return float_of(i32(bits_of(near) - i32(1))) if np.float64(near) > value else near


@kernel
def _bounded(count: np.ndarray, most: np.ndarray, max_bits: float, delta: float) -> np.float32:
    """Delta, or the larger step that max_bits asks for."""
    wanted = _for_bits(count, most, max_bits, delta)
    return f32(delta) if wanted == delta else _above(wanted)


# --- the search ----------------------------------------------------------------------------


class _Sample(NamedTuple):
    """Blocks of a segment that the search looks at, and what each stands for."""

    first: int  # value of the segment
    length: int
    places: np.ndarray
    weights: np.ndarray
    points: int  # among the last of them


@kernel
def _searched(
    x: Pointer,
    first: int,
    length: int,
    energies: np.ndarray,
    wish: tuple[float, float, float, float, int],
) -> tuple[float, float]:
    """The step of a segment, and the safe one that its search starts from."""
    budget, low, floor, per_value, subtract = wish
    counts = np.zeros(LEVELS, np.int64)
    highest = count_levels(energies, counts)
    counts = counts[: np.flatnonzero(counts)[-1] + 1]
    radii = radii_of(highest, len(counts))
    low = safe_step(counts, radii, budget, low, per_value)
    start = max(np.float64(_below(low)), floor)
    places, weights = np.empty(SAMPLE, np.int64), np.empty(SAMPLE)
    worth = np.minimum(low / per_value, radii)
    taken, points = sample_blocks(energies, counts, highest, worth, places, weights)
    sample = _Sample(first, length, places[:taken], weights[:taken], points)
    return _search(x, sample, start, budget, subtract), start


@kernel
def _search(x: Pointer, sample: _Sample, start: float, budget: float, subtract: int) -> float:
    """The largest step found, from a safe one on, whose estimated error keeps to the budget."""
    low, high = start, np.inf
    there = _used(x, sample, low, budget, subtract)
    for _ in range(EVALUATIONS):
        trial = np.sqrt(low * high)
        if high == np.inf:
            trial = low * min(2.0, np.sqrt(1 / max(there, 1e-12)))
        trial = np.float64(f32(min(trial, _HUGE)))
        if trial < low * 1.01:
            break
        found = _used(x, sample, trial, budget, subtract)
        if found <= 1:
            low, there = trial, found
        else:
            high = trial
    return low


@kernel
def _used(x: Pointer, sample: _Sample, delta: float, budget: float, subtract: int) -> float:
    """The part of the budget that a step uses, as far as the sample tells."""
    first, length, places, weights, points = sample
    step = f32(delta)
    lift = lift_of(step)
    times = f32(f32(65536.0) / f32(step * lift))
    total = sum_z = sum_zz = 0.0
    for k in range(len(places)):
        kept = i32(0)
        e = first + places[k] * BLOCK
        size = min(BLOCK, length - places[k] * BLOCK)
        for j in range(size):
            v = f32(f32(get(x, e + j) * lift) * times)
            kept += spread(nearest(max(min(v, LIMIT), -LIMIT)))
        cost = block_cost(kept, size, subtract)
        term = cost * (delta * delta / (SQUARED_STEP * budget)) * weights[k]
        total += term
        if k >= len(places) - points:
            sum_z += term
            sum_zz += term * term
    spread_ = sum_zz - sum_z * sum_z / max(points, 1)
    return total + 3 * np.sqrt(max(spread_, 0.0))


# --- the ceiling on bits -------------------------------------------------------------------


@kernel
def _for_bits(count: np.ndarray, most: np.ndarray, max_bits: float, delta: float) -> float:
    """The smallest step found, from delta on, whose bit planes keep to max_bits per value."""
    if max_bits == 0:
        return delta
    blocks = 0
    top = 0.0
    for i in range(len(count)):
        blocks += (count[i] + BLOCK - 1) // BLOCK
        top = max(top, np.float64(float_of(most[i])))
    if _planes(count, most, delta) <= max_bits * blocks:
        return delta
    low, high = delta, top * 1.0001
    for _ in range(24):
        middle = np.sqrt(low * high)
        if _planes(count, most, middle) <= max_bits * blocks:
            high = middle
        else:
            low = middle
    return high


@kernel
def _planes(count: np.ndarray, most: np.ndarray, delta: float) -> int:
    """Bit planes of all blocks that no dither can exceed."""
    total = 0
    for i in range(len(count)):
        level = np.float64(float_of(most[i])) / delta * (1 + 2.0**-18) + 2.0**-15
        width, bound = 1, int(level) + 1
        while bound:
            width += 1
            bound >>= 1
        total += (count[i] + BLOCK - 1) // BLOCK * (width if most[i] else 0)
    return total


# --- the bound and the sample -------------------------------------------------------------


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
