"""Entropy-coded dithered quantization: one step a segment, integers of any size.

With Δ the segment's step and r of 16 bits:

    t = floor(x·2^16/Δ + ½),   q = (t + r) >> 16          (|q| ≤ 32001, because Δ ≥ max|x|/32000)

A block of 512 subtracts the dither at decoding or does not, whichever costs less. With φ the
fractional part of x/Δ, not subtracting costs Δ²·φ(1-φ) a value, subtracting Δ²/12:

    mark = 12·Σ φ₈(256 - φ₈) > 65536·n,   φ₈ = the top 8 bits of t mod 2^16

This looks at x and Δ, never at r, so either way stays unbiased.

    x̂ = Δ·(q - u·mark),   u = (2r + 1 - 2^16)/2^17
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._coding import (
    BLOCK,
    BLOCKS,
    CHUNK,
    EVALUATIONS,
    LARGEST,
    Section,
    Subtract,
    sample_blocks,
    table,
)
from laconic.kernels._layout import LIFT, TINY
from laconic.kernels._reference.coding import decode_section, encode_section
from laconic.kernels._reference.random import dither


def ecdq_steps(
    x: Tensor,
    out: Tensor,
    parts: tuple[int, ...],
    *,
    error: float,
    step: float,
    max_bits: float,
    subtract: Subtract,
) -> None:
    """The step of every segment: `step` times its rms or, if that is 0, the one for `error`.

    `error` is E‖x̂-x‖²/‖x‖² after the blocks' choice, as far as a sample of blocks tells. With
    max_bits, the step grows until bit planes of floor(max|x|/Δ) + 1 take no more bits a value:
    a bound on every coder's length that holds whatever the dither will be.
    """
    first = 0
    samples = _samples(x, parts)
    for number, length in enumerate(parts):
        v = x[first : first + length].to(torch.float32)
        first += length
        top = float(v.abs().max())
        if not math.isfinite(top) or top == 0:
            out[number] = torch.nan if top else 0.0
            continue
        rms = math.sqrt(float(v.double().square().sum()) / length)
        delta = step * rms or _for_error(samples[number], error, rms, subtract)
        delta = max(delta, top / LARGEST)
        if max_bits:
            delta = _for_bits(v, max_bits, delta)
        bits = np.float32(min(delta, 3.4e38)).view(np.int32) + np.int32(1)  # the float just above
        out[number] = float(bits.view(np.float32))


def ecdq_encode(
    x: Tensor,
    steps: Tensor,
    section: Section,
    parts: tuple[int, ...],
    *,
    stream: Stream,
    coder: int,
    form: int,
    subtract: Subtract,
) -> None:
    """Quantize every segment with its step and code the integers."""
    where = table(parts)
    r = dither(stream, where.chunks * CHUNK // 128, 16, x.device).view(-1, CHUNK)
    chunks, marks = [], []
    for c in range(where.chunks):
        start, n = int(where.start[c]), int(where.count[c])
        t = fixed_point(x[start : start + n], steps[int(where.segment[c])])
        q = ((t + r[c, :n]) >> 16).to(torch.int16)
        chunks.append(q.cpu().numpy())
        marks.append(_marks(t, subtract) if usable(steps[int(where.segment[c])]) else 0)
    stamps = steps.cpu().numpy().view(np.uint32)[where.segment]
    encode_section(chunks, marks, stamps, stream, coder, form, section)


def ecdq_decode(
    section: Section,
    steps: Tensor,
    out: Tensor,
    parts: tuple[int, ...],
    *,
    stream: Stream,
    coder: int,
    weight: float,
    add: bool,
) -> None:
    """out (+)= weight · x̂; WireError if a chunk is damaged or malformed."""
    where = table(parts)
    r = dither(stream, where.chunks * CHUNK // 128, 16, out.device).view(-1, CHUNK)
    stamps = steps.cpu().numpy().view(np.uint32)[where.segment]
    chunks, marks = decode_section(section, where, stamps, stream, coder, LARGEST + 1)
    bound = torch.finfo(out.dtype).max
    for c in range(where.chunks):
        start, n = int(where.start[c]), int(where.count[c])
        step = steps[int(where.segment[c])]
        q = torch.from_numpy(chunks[c]).to(out.device, torch.float32)
        block = torch.arange(n, device=out.device) // BLOCK
        unit = torch.where((marks[c] >> block) & 1 == 1, 2.0**-17, 0.0).to(torch.float32)
        u = (2 * r[c, :n] + 1 - (1 << 16)).to(torch.float32) * unit
        lift = torch.where(step < TINY, LIFT, 1.0).to(torch.float32)
        worth = (step * lift) * torch.tensor(weight, dtype=torch.float32, device=out.device)
        worth = torch.where(torch.isfinite(step) & (step >= 0), worth, torch.nan)
        value = (((q - u) * worth) * (1 / lift)).clamp(-bound, bound)
        part = out[start : start + n]
        part.copy_(part.to(torch.float32) + value if add else value)


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


def _cost(t: Tensor) -> Tensor:
    part = (t >> 8) & 0xFF
    return part * (256 - part)


def _marks(t: Tensor, subtract: Subtract) -> int:
    """Which blocks of a chunk subtract, as bits."""
    mark = 0
    for b, block in enumerate(t.split(BLOCK)):
        cheaper = 12 * int(_cost(block).sum()) > 65536 * len(block)
        if subtract is Subtract.ALWAYS or (subtract is Subtract.AUTO and cheaper):
            mark |= 1 << b
    assert len(t) <= BLOCKS * BLOCK
    return mark


def _samples(x: Tensor, parts: tuple[int, ...]) -> list[list[Tensor]]:
    """The sampled blocks of every segment."""
    ends = np.cumsum(parts)
    samples: list[list[Tensor]] = [[] for _ in parts]
    for start, size in zip(*sample_blocks(parts), strict=True):
        segment = int(np.searchsorted(ends, start, side="right"))
        samples[segment].append(x[int(start) : int(start) + int(size)].to(torch.float32))
    return samples


def _for_error(blocks: list[Tensor], error: float, rms: float, subtract: Subtract) -> float:
    """The largest step found at which the sample's error is no more than wished."""
    # the error is at most Δ²/12 where blocks may subtract, Δ²/4 where they may not
    low, high = rms * math.sqrt((4 if subtract is Subtract.NEVER else 12) * error), math.inf
    if subtract is Subtract.ALWAYS:
        return low
    share = _share(blocks, low, subtract)
    for _ in range(EVALUATIONS):
        trial = math.sqrt(low * high)
        if high == math.inf:
            trial = min(2 * low, rms * math.sqrt(error / max(share, 1e-12)))
        if trial < low * 1.01:
            break
        there = _share(blocks, trial, subtract)
        if trial * trial * there <= error * rms * rms:
            low, share = trial, there
        else:
            high = trial
    return low


def _share(blocks: list[Tensor], delta: float, subtract: Subtract) -> float:
    """Error of a value, in squared steps, over sampled blocks."""
    step = torch.tensor(delta, dtype=torch.float32)
    total = 0.0
    for block in blocks:
        own = int(_cost(fixed_point(block, step)).sum()) / 65536.0
        total += own if subtract is Subtract.NEVER else min(own, len(block) / 12.0)
    return total / sum(len(block) for block in blocks)


def _for_bits(v: Tensor, max_bits: float, delta: float) -> float:
    """The smallest step found, from delta on, whose bit planes keep to max_bits a value."""
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
