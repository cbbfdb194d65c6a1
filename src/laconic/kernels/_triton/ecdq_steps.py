"""The steps of ecdq on the GPU. The definitions are in `_reference/ecdq_steps.py`.

One kernel reads the tensor once, a program per chunk; the second has a program per segment, which
finds the safe step and the sample; the third searches. There a segment's sampled blocks are spread
over a team of programs, which keep them in registers, try the same steps, and add up what they find
in three 64-bit words per trial.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import _coding
from laconic.kernels._coding import Budgets, Subtract
from laconic.kernels._protocol import StepRule
from laconic.kernels._triton.chunk import BLOCK, CHUNK, place_of
from laconic.kernels._triton.coding import chunks
from laconic.kernels._triton.ecdq_sample import (
    BINS,
    LEVELS,
    SAMPLE,
    WIDE,
    radius,
    sample_alike,
    sample_blocks,
)
from laconic.kernels._triton.group import INTERPRETED, OPTIONS, lift_of, magnitude, square

ALWAYS: tl.constexpr = tl.constexpr(int(Subtract.ALWAYS))
NEVER: tl.constexpr = tl.constexpr(int(Subtract.NEVER))
LARGEST: tl.constexpr = tl.constexpr(float(_coding.LARGEST))
SQUARED_STEP: tl.constexpr = tl.constexpr(float(_coding.SQUARED_STEP))
_BLOCKS: tl.constexpr = tl.constexpr(_coding.BLOCKS)
_EVALUATIONS: tl.constexpr = tl.constexpr(_coding.EVALUATIONS)
_BISECTIONS: tl.constexpr = tl.constexpr(24)
_LIMIT: tl.constexpr = tl.constexpr(_coding.LARGEST * 65536.0)
_SLOTS: tl.constexpr = tl.constexpr(32)  # words of a team, three per trial
_MEMBER: tl.constexpr = tl.constexpr(1 << 56)  # in such a word: members counted, above their sum
_PART: tl.constexpr = tl.constexpr(float(1 << 43))  # in such a sum: the budget, or its square
_FACTS: tl.constexpr = tl.constexpr(8)  # search's start, budget, sampled blocks, points, weights
_SPAN: tl.constexpr = tl.constexpr(1024)  # chunks or blocks looked at at once
# sampled blocks of a member; the interpreter runs programs in turn, so none may wait for another
_SHARE = _coding.SAMPLE if INTERPRETED.value else 8
_WARPS = {**OPTIONS, "num_warps": 8}


def ecdq_steps(
    x: Tensor,
    steps: Tensor,
    parts: tuple[int, ...],
    rule: StepRule,
    budgets: Budgets | None = None,
) -> None:
    """See `Kernels`."""
    errors, step, max_bits, subtract = rule
    place, device, count = chunks(parts, x), x.device, len(parts)
    programs = place.grid[0]
    budgets = budgets or Budgets.of(count, device)
    squares = torch.empty(programs, dtype=torch.float64, device=device)
    most, high, low = torch.empty((3, programs), dtype=torch.int32, device=device)
    levels = torch.empty(programs * _BLOCKS.value, dtype=torch.int16, device=device)
    slots = torch.empty(count * _SLOTS.value + 1, dtype=torch.int64, device=device)
    _measure[place.grid](
        x,
        *place.tensors,
        most,
        squares,
        high,
        low,
        levels,
        slots,
        x.numel(),
        count,
        **place.options,
        **_WARPS,
    )
    search = step == 0 and subtract is not Subtract.ALWAYS
    members, segments = _teams(parts, device)
    sampled = torch.empty((2, count, SAMPLE.value), dtype=torch.int32, device=device)
    facts = torch.empty((count, _FACTS.value), dtype=torch.float64, device=device)
    owns = torch.empty((count, BINS.value), dtype=torch.int32, device=device)
    _prepare[(count,)](
        steps,
        segments,
        errors if isinstance(errors, Tensor) else _errors(tuple(errors), device),
        most,
        squares,
        high,
        low,
        levels,
        owns,
        sampled,
        facts,
        budgets.limit,
        budgets.safe,
        budgets.costs,
        count,
        float(step),
        float(max_bits),
        SUBTRACT=int(subtract),
        SEARCH=search,
        **_WARPS,
    )
    if search:
        _choose[(members.numel() // 2,)](
            x,
            steps,
            members,
            segments,
            sampled,
            facts,
            most,
            slots,
            budgets.limit,
            budgets.safe,
            count,
            float(max_bits),
            SUBTRACT=int(subtract),
            SHARE=_SHARE,
            **_WARPS,
        )


@lru_cache(maxsize=256)
def _teams(parts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Members: a segment and a number in its team. Segments: first chunk, chunks, values, first."""
    segments = np.zeros((len(parts), 4), np.int64)
    members = []
    for number, length in enumerate(parts):
        segments[number, 1:3] = -(-length // _coding.CHUNK), length
        sampled = min(-(-length // _coding.BLOCK), _coding.SAMPLE)
        members += [(number, member) for member in range(-(-sampled // _SHARE))]
    segments[1:, 0] = np.cumsum(segments[:-1, 1])
    segments[1:, 3] = np.cumsum(segments[:-1, 2])
    a, b = torch.from_numpy(np.array(members, np.int32)), torch.from_numpy(segments)
    return a.view(-1).to(device), b.to(device)


@lru_cache(maxsize=256)
def _errors(errors: tuple[float, ...], device: torch.device) -> Tensor:
    """Errors on the device; from pinned memory, or the copy would wait."""
    host = torch.tensor(errors, dtype=torch.float64)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


# --- one look at all values ----------------------------------------------------------------


@triton.jit(do_not_specialize=["n", "teams"])
def _measure(
    x,
    starts,
    counts,
    segments,
    most,
    squares,
    high,
    low,
    levels,
    slots,
    n,
    teams,
    SEGMENTS: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Of a chunk: bits of the largest magnitude, sum of squares, and its blocks' levels.

    Clears the slots.
    """
    c = tl.program_id(0)
    start, count, _ = place_of(c, n, starts, counts, segments, SEGMENTS, NEAR)
    block = tl.arange(0, _BLOCKS)
    i = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if count == CHUNK:
        v = tl.load(x + start + i).to(tl.float32)
    else:
        v = tl.load(x + start + i, mask=i < count, other=0.0).to(tl.float32)
    energy = tl.sum(square(v), 1)
    level = (energy.to(tl.int64, bitcast=True) >> 52).to(tl.int32)
    tl.store(most + c, tl.max(tl.max(magnitude(v), 1), 0))
    tl.store(squares + c, tl.sum(energy, 0))
    tl.store(high + c, tl.max(level, 0))
    tl.store(low + c, tl.min(tl.where(block * BLOCK < count, level, 0x7FFF), 0))
    tl.store(levels + c.to(tl.int64) * _BLOCKS + block, level.to(tl.int16))
    slot = tl.arange(0, _SLOTS)
    tl.store(slots + c.to(tl.int64) * _SLOTS + slot, slot.to(tl.int64) * 0, mask=c < teams)
    tl.store(slots + teams * _SLOTS + c, c.to(tl.int64), mask=c == 0)


# --- the bound and the sample --------------------------------------------------------------


@triton.jit(do_not_specialize=["teams"], do_not_specialize_on_alignment=["out"])
def _prepare(
    out,
    segments,
    errors,
    most,
    squares,
    high,
    low,
    levels,
    owns,
    sampled,
    facts,
    limit,
    safe,
    costs,
    teams,
    step: tl.float64,
    max_bits: tl.float64,
    SUBTRACT: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """The step of a segment, or where its search starts and what it looks at."""
    s = tl.program_id(0).to(tl.int64)
    first, chunks = tl.load(segments + s * 4), tl.load(segments + s * 4 + 1)
    length, error = tl.load(segments + s * 4 + 2), tl.load(errors + s)
    most, squares, levels = most + first, squares + first, levels + first * _BLOCKS
    top, total, highest, lowest = _totals(most, squares, high + first, low + first, chunks)
    per_value: tl.constexpr = 4.0 if SUBTRACT == NEVER else 12.0
    usual = (top > 0) & (top < 0x7F800000)
    result = tl.where(top == 0, 0, 0x7FC00000).to(tl.float32, bitcast=True)
    start = total * 0.0
    if usual:
        largest = top.to(tl.float32, bitcast=True).to(tl.float64) / LARGEST
        budget = error * total
        delta = tl.sqrt(per_value * budget / length)
        if SEARCH:
            blocks = ((length + (BLOCK - 1)) // BLOCK).to(tl.int32)
            own, picked, fact = owns + s * BINS, sampled + s * SAMPLE, facts + s * _FACTS
            cap = delta / per_value
            weakest = radius(tl.maximum(lowest, highest - (LEVELS - 1)))
            if (lowest > 0) & (weakest >= cap):  # any block may cost all that a block can
                taken, points, weight = sample_alike(picked, teams, cap, blocks)
            else:
                delta, taken, points, weight = sample_blocks(
                    levels, own, picked, teams, highest, blocks, budget, delta, per_value
                )
            start = tl.maximum(_below(delta), _above(largest)).to(tl.float64)
            tl.store(fact + 1, budget)
            tl.store(fact + 2, taken.to(tl.float64))
            tl.store(fact + 3, points.to(tl.float64))
            tl.store(fact + 4, weight.to(tl.float64))
        elif step > 0:
            delta = tl.maximum(step * tl.sqrt(total / length), largest)
            result = _above(_for_bits(most, chunks, length, top, max_bits, delta))
        else:
            delta = tl.maximum(_below(delta), _above(largest)).to(tl.float64)
            result = _bounded(most, chunks, length, top, max_bits, delta)
    tl.store(facts + s * _FACTS, start)
    tl.store(out + s, result)
    tl.store(limit + s, float("inf"))
    tl.store(safe + s, 0.0)
    tl.store(costs + s, s * 0)
    tl.store(costs + teams + s, s * 0)


@triton.jit
def _totals(most, squares, high, low, chunks):
    """Largest magnitude's bits, sum of squares, and highest and lowest level of a segment."""
    top, highest = tl.zeros((WIDE,), tl.int32), tl.zeros((WIDE,), tl.int32)
    lowest = tl.full((WIDE,), 0x7FFF, tl.int32)
    total = tl.zeros((WIDE,), tl.float64)
    for at in range(0, chunks, WIDE):
        i = at + tl.arange(0, WIDE)
        top = tl.maximum(top, tl.load(most + i, mask=i < chunks, other=0))
        total += tl.load(squares + i, mask=i < chunks, other=0.0)
        highest = tl.maximum(highest, tl.load(high + i, mask=i < chunks, other=0))
        lowest = tl.minimum(lowest, tl.load(low + i, mask=i < chunks, other=0x7FFF))
    return tl.max(top, 0), tl.sum(total, 0), tl.max(highest, 0), tl.min(lowest, 0)


# --- the search ----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["teams"], do_not_specialize_on_alignment=["out"])
def _choose(
    x,
    out,
    members,
    segments,
    sampled,
    facts,
    most,
    slots,
    limit,
    safe,
    teams,
    max_bits: tl.float64,
    SUBTRACT: tl.constexpr,
    SHARE: tl.constexpr,
):
    """The step of a segment, by a team of programs.

    Members wait for each other, which must not depend on the order in which programs start:
    each draws a ticket, so that all teams but the last one drawn from are complete.
    """
    ticket = tl.atomic_add(slots + teams * _SLOTS, 1)
    s, member = tl.load(members + 2 * ticket).to(tl.int64), tl.load(members + 2 * ticket + 1)
    chunks, length = tl.load(segments + s * 4 + 1), tl.load(segments + s * 4 + 2)
    fact = facts + s * _FACTS
    start = tl.load(fact)
    if start > 0:
        row = member * SHARE + tl.arange(0, SHARE)
        there = row < tl.load(fact + 2).to(tl.int32)
        at = s * SAMPLE + row
        block = tl.load(sampled + at, mask=there, other=0)
        own = tl.load(sampled + teams * SAMPLE + at, mask=there, other=0)
        points = tl.load(fact + 3)
        one = points * tl.maximum(own, 1).to(tl.float64)
        weight = tl.where(own > 0, tl.load(fact + 4) / tl.where(own > 0, one, 1.0), 1.0)
        first = block.to(tl.int64) * BLOCK
        size = tl.where(there, tl.minimum(length - first, BLOCK), 0).to(tl.int32)
        i = tl.arange(0, BLOCK)[None, :]
        place = (tl.load(segments + s * 4 + 3) + first)[:, None] + i
        v = tl.load(x + place, mask=i < size[:, None], other=0.0).to(tl.float32)
        held = (v, size, weight, own > 0, points)
        team = (tl.minimum((length + (BLOCK - 1)) // BLOCK, SAMPLE) + SHARE - 1) // SHARE
        found = _search(held, start, tl.load(fact + 1), slots + s * _SLOTS, team, SUBTRACT)
        most += tl.load(segments + s * 4)
        top = _top(most, chunks)
        step = _bounded(most, chunks, length, top, max_bits, found)
        sure = _bounded(most, chunks, length, top, max_bits, start)
        # a ceiling on the bits goes before the error
        kept = tl.where(step.to(tl.float64) == found, tl.load(fact + 1), float("inf"))
        tl.store(out + s, step, mask=member == 0)
        tl.store(safe + s, sure, mask=member == 0)
        tl.store(limit + s, kept, mask=member == 0)


@triton.jit
def _search(held, start, budget, slots, team, SUBTRACT: tl.constexpr):
    """The largest step found, from a safe one on, whose estimated error keeps to the budget."""
    low, high = start, start * 0.0  # none yet
    there = _used(held, low, budget, slots, team, SUBTRACT)
    round = 1
    while round <= _EVALUATIONS:
        trial = low * tl.minimum(2.0, tl.sqrt(1 / tl.maximum(there, 1e-12)))
        trial = tl.where(high > 0, tl.sqrt(low * high), trial)
        trial = tl.minimum(trial, 3.4e38).to(tl.float32).to(tl.float64)
        if trial < low * 1.01:
            round = _EVALUATIONS + 1
        else:
            found = _used(held, trial, budget, slots + 3 * round, team, SUBTRACT)
            low, high = tl.where(found <= 1, trial, low), tl.where(found <= 1, high, trial)
            there = tl.where(found <= 1, found, there)
            round += 1
    return low


@triton.jit
def _used(held, delta, budget, slot, team, SUBTRACT: tl.constexpr):
    """The part of the budget that a step uses: the team's members add up what they found.

    In integers, which any order gives. A term of four budgets says as much as a larger one.
    """
    v, size, weight, is_point, points = held
    step = delta.to(tl.float32)
    lift = lift_of(step)
    times = tl.div_rn(step * 0.0 + 65536.0, step * lift)
    cost = block_cost(tl.sum(spread(nearest(limited((v * lift) * times))), 1), size, SUBTRACT)
    term = cost.to(tl.float64) * (delta * delta / (SQUARED_STEP * budget)) * weight
    term = tl.minimum(term, 4.0)
    z = tl.where(is_point, term, 0.0)
    _add(slot, term)
    _add(slot + 1, z)
    _add(slot + 2, z * z)
    total, sum_z, sum_zz = _sum(slot, team), _sum(slot + 1, team), _sum(slot + 2, team)
    spread_z = sum_zz - sum_z * sum_z / tl.maximum(points, 1.0)
    return total + 3 * tl.sqrt(tl.maximum(spread_z, 0.0))


@triton.jit
def _add(slot, terms):
    """A member's sum, and that it is there."""
    own = tl.sum(tl.floor(terms * _PART).to(tl.int64), 0)
    tl.atomic_add(slot, own + _MEMBER, sem="relaxed")


@triton.jit
def _sum(slot, team):
    """The sum of all members, once they are there."""
    found = tl.atomic_add(slot, 0, sem="relaxed")
    while found // _MEMBER < team:
        found = tl.atomic_add(slot, 0, sem="relaxed")
    return (found % _MEMBER).to(tl.float64) / _PART


# --- the ceiling on bits -------------------------------------------------------------------


@triton.jit
def _top(most, chunks):
    """Bits of a segment's largest magnitude."""
    top = tl.zeros((_SPAN,), tl.int32)
    for at in range(0, chunks, _SPAN):
        i = at + tl.arange(0, _SPAN)
        top = tl.maximum(top, tl.load(most + i, mask=i < chunks, other=0))
    return tl.max(top, 0)


@triton.jit
def _bounded(most, chunks, length, top, max_bits, delta):
    """Delta, or the larger step that max_bits asks for."""
    wanted = _for_bits(most, chunks, length, top, max_bits, delta)
    return tl.where(wanted == delta, delta.to(tl.float32), _above(wanted))


@triton.jit
def _for_bits(most, chunks, length, top, max_bits, delta):
    """The smallest step found, from delta on, whose bit planes keep to max_bits per value."""
    if max_bits > 0:
        delta = _fitting(most, chunks, length, top, max_bits, delta)
    return delta


@triton.jit
def _fitting(most, chunks, length, top, max_bits, delta):
    """The same, where there is a ceiling."""
    blocks = (length + (BLOCK - 1)) // BLOCK
    room = max_bits * blocks.to(tl.float64)
    if _planes(most, chunks, length, delta) > room:
        low, high = delta, top.to(tl.float32, bitcast=True).to(tl.float64) * 1.0001
        for _ in range(_BISECTIONS):
            middle = tl.sqrt(low * high)
            fits = _planes(most, chunks, length, middle) <= room
            low, high = tl.where(fits, low, middle), tl.where(fits, middle, high)
        delta = high
    return delta


@triton.jit
def _planes(most, chunks, length, delta):
    """Bit planes of all blocks that no dither can exceed."""
    total = tl.zeros((_SPAN,), tl.int64)
    per_step = 1.0 / delta
    for at in range(0, chunks, _SPAN):
        i = at + tl.arange(0, _SPAN)
        bits = tl.load(most + i, mask=i < chunks, other=0)
        level = bits.to(tl.float32, bitcast=True).to(tl.float64) * per_step
        level = level * (1 + 2.0**-18) + 2.0**-15
        bound = tl.minimum(level, 65536.0).to(tl.int32) + 1
        width = (bound.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 125
        values = tl.minimum(length - i.to(tl.int64) * CHUNK, CHUNK)
        total += (values + (BLOCK - 1)) // BLOCK * tl.where(bits > 0, width, 0)
    return tl.sum(total, 0).to(tl.float64)


# --- fixed point ---------------------------------------------------------------------------


@triton.jit
def limited(v):
    """Within the range of fixed point."""
    return tl.minimum(tl.maximum(v, -_LIMIT), _LIMIT)


@triton.jit
def nearest(v):
    """floor(v + ½)."""
    return tl.floor(v + 0.5).to(tl.int32)


@triton.jit
def spread(t):
    """2^16·φ(1-φ), rounded up, φ the fraction of a fixed-point number."""
    part = t.to(tl.uint32) & 0xFFFF
    return (part - ((part * part) >> 16)).to(tl.int32)


@triton.jit
def block_cost(kept, size, SUBTRACT: tl.constexpr):
    """Expected squared error of blocks, given the sums of what their values cost if kept."""
    if SUBTRACT == ALWAYS:
        return 65536 * size
    elif SUBTRACT == NEVER:
        return 12 * kept
    else:
        return tl.minimum(12 * kept, 65536 * size)


@triton.jit
def _above(value):
    """The float32 just above the nearest one, so that it is larger and never 0."""
    bits = tl.minimum(value, 3.4e38).to(tl.float32).to(tl.int32, bitcast=True) + 1
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _below(value):
    """The largest float32 that is no larger."""
    near = tl.minimum(value, 3.4e38).to(tl.float32)
    less = (near.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    return tl.where(near.to(tl.float64) > value, less, near)
