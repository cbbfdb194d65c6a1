"""Entropy-coded dithered quantization: one step a segment, integers of any size.

With Δ the segment's step (`ecdq_steps.py`) and r of 16 bits:

    t = floor(x·2^16/Δ + ½),   q = (t + r) >> 16          (|q| ≤ 32001, because Δ ≥ max|x|/32000)

A block of 512 subtracts the dither at decoding or does not, whichever costs less. With φ the
fractional part of x/Δ, not subtracting costs Δ²·φ(1-φ) per value, subtracting Δ²/12:

    mark = 12·Σ (p - floor(p²/2^16)) > 65536·n,   p = t mod 2^16

This looks at x and Δ, never at r, so either way stays unbiased.

    x̂ = Δ·(q - u·mark),   u = (2r + 1 - 2^16)/2^17

p - floor(p²/2^16) is 2^16·φ(1-φ) of t/2^16, rounded up: by less than 2^-16 of a squared step, and
by at most 1/250 of its own. In these integers the expected squared error of a segment is exact:

    E‖x̂-x‖² = Δ²/(12·2^16)·Σ_blocks (65536·n where marked, else 12·Σ (p - floor(p²/2^16)))

Where that is above the segment's limit, everything is quantized with its safe step instead, and
its step is overwritten. That choice looks at x and Δ only, too.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic.kernels._coding import (
    BLOCK,
    BLOCKS,
    CHUNK,
    LARGEST,
    SQUARED_STEP,
    TOLERANCE,
    Budgets,
    Section,
    Subtract,
    Table,
    table,
)
from laconic.kernels._layout import LIFT, TINY
from laconic.kernels._protocol import Coding, Output
from laconic.kernels._reference.coding import decode_section, encode_section
from laconic.kernels._reference.ecdq_steps import block_cost, fixed_point, kept_cost, usable
from laconic.kernels._reference.group import dither, put


def ecdq_encode(
    x: Tensor,
    steps: Tensor,
    section: Section,
    parts: tuple[int, ...],
    coding: Coding,
    *,
    subtract: Subtract,
    budgets: Budgets | None = None,
    spent: Tensor | None = None,
) -> None:
    """See `Kernels`."""
    where = table(parts)
    r = dither(coding.stream, where.chunks * CHUNK // 128, 16, x.device).view(-1, CHUNK)
    chunks, marks, costs = _quantized(x, steps, where, r, subtract)
    if budgets is not None:
        above = _squared_error(steps, costs) > budgets.limit * (1 + TOLERANCE)
        if (above := above & (budgets.safe < steps)).any():
            steps.copy_(torch.where(above, budgets.safe, steps))
            chunks, marks, costs = _quantized(x, steps, where, r, subtract)
    if spent is not None:
        spent.copy_(_squared_error(steps, costs))
    stamps = steps.cpu().numpy().view(np.uint32)[where.segment]
    encode_section(chunks, marks, stamps, coding, section)


def ecdq_decode(
    section: Section,
    steps: Tensor,
    output: Output,
    parts: tuple[int, ...],
    coding: Coding,
) -> None:
    """See `Kernels`."""
    out = output.tensor
    where = table(parts)
    r = dither(coding.stream, where.chunks * CHUNK // 128, 16, out.device).view(-1, CHUNK)
    stamps = steps.cpu().numpy().view(np.uint32)[where.segment]
    chunks, marks = decode_section(section, where, stamps, coding, LARGEST + 1)
    bound = torch.finfo(out.dtype).max
    for c in range(where.chunks):
        start, n = int(where.start[c]), int(where.count[c])
        step = steps[int(where.segment[c])]
        q = torch.from_numpy(chunks[c]).to(out.device, torch.float32)
        block = torch.arange(n, device=out.device) // BLOCK
        unit = torch.where((marks[c] >> block) & 1 == 1, 2.0**-17, 0.0).to(torch.float32)
        u = (2 * r[c, :n] + 1 - (1 << 16)).to(torch.float32) * unit
        lift = torch.where(step < TINY, LIFT, 1.0).to(torch.float32)
        worth = (step * lift) * torch.tensor(output.weight, dtype=torch.float32, device=out.device)
        worth = torch.where(torch.isfinite(step) & (step >= 0), worth, torch.nan)
        value = (((q - u) * worth) * (1 / lift)).clamp(-bound, bound)
        put(value, output._replace(tensor=out[start : start + n]))


def _quantized(
    x: Tensor, steps: Tensor, where: Table, r: Tensor, subtract: Subtract
) -> tuple[list[np.ndarray], list[int], list[int]]:
    """Integers and marks of every chunk, and what each segment costs."""
    chunks, marks, costs = [], [], [0] * len(steps)
    for c in range(where.chunks):
        start, n, s = int(where.start[c]), int(where.count[c]), int(where.segment[c])
        t = fixed_point(x[start : start + n], steps[s])
        chunks.append(((t + r[c, :n]) >> 16).to(torch.int16).cpu().numpy())
        marks.append(_marks(t, subtract) if usable(steps[s]) else 0)
        if usable(steps[s]):
            costs[s] += sum(block_cost(block, subtract) for block in t.split(BLOCK))
    return chunks, marks, costs


def _marks(t: Tensor, subtract: Subtract) -> int:
    """Which blocks of a chunk subtract, as bits."""
    mark = 0
    for b, block in enumerate(t.split(BLOCK)):
        cheaper = 12 * kept_cost(block) > 65536 * len(block)
        if subtract is Subtract.ALWAYS or (subtract is Subtract.AUTO and cheaper):
            mark |= 1 << b
    assert len(t) <= BLOCKS * BLOCK
    return mark


def _squared_error(steps: Tensor, costs: list[int]) -> Tensor:
    """Expected squared error of every segment, NaN where the step is."""
    return steps.double() ** 2 * torch.tensor(costs, device=steps.device) / SQUARED_STEP
