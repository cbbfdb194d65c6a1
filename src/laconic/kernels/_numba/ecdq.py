"""Entropy-coded dithered quantization on the CPU. The definitions are in `_reference/ecdq.py`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic._key import Stream
from laconic.kernels._coding import (
    BLOCK,
    CHUNK,
    EVALUATIONS,
    LARGEST,
    SAMPLE,
    Section,
    Subtract,
    sample_blocks,
    table,
)
from laconic.kernels._layout import GROUP
from laconic.kernels._numba.coding import decode_chunks, encode_chunks, encoded_marks
from laconic.kernels._numba.group import clamped
from laconic.kernels._numba.memory import (
    Pointer,
    array,
    bits_of,
    f32,
    float_of,
    float_scratch,
    get,
    i16,
    i32,
    kernel,
    load,
    nearest,
    pointer,
    put,
    sar,
    shr,
    store,
    u32,
)
from laconic.kernels._numba.random import mix
from laconic.kernels._numba.scale import INFINITY, largest, lift_of, square_sum, usable
from laconic.kernels._pool import split

_LIMIT = f32(LARGEST * 65536.0)


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
    """See the reference."""
    where = table(parts)
    data, chunks = array(x), where.chunks
    most, squares = np.empty(chunks, np.int32), np.empty(chunks, np.float64)
    split(lambda a, b: _measure(data, where.start, where.count, most, squares, a, b), chunks, CHUNK)
    sample, size = sample_blocks(parts)
    wish = (float(error), float(step), float(max_bits), int(subtract))
    _choose(data, np.array(parts), where.count, most, squares, sample, size, *wish, array(out))


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
    """See the reference."""
    where, data, delta = table(parts), array(x), array(steps)
    marks = np.empty(where.chunks, np.uint16)
    key = (u32(stream.k0), u32(stream.k1))
    place = (where.start, where.count, where.segment)

    def fill(q: np.ndarray, first: int, last: int) -> None:
        _quantize(data, *place, delta, int(subtract), *key, first, last, marks, q)

    encode_chunks(fill, where, marks, delta.view(np.uint32), stream, coder, form, section)


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
    """See the reference."""
    where, target, delta = table(parts), array(out), array(steps)
    marks = encoded_marks(section, where, delta.view(np.uint32), stream)
    worth = (f32(weight), f32(torch.finfo(out.dtype).max), add)
    key = (u32(stream.k0), u32(stream.k1))
    place = (where.start, where.count, where.segment)

    def use(q: np.ndarray, first: int, last: int) -> None:
        _dequantize(q, *place, delta, marks, *worth, *key, first, last, target)

    decode_chunks(use, where, stream, coder, LARGEST + 1, section)


@kernel
def _measure(
    x: np.ndarray,
    start: np.ndarray,
    count: np.ndarray,
    most: np.ndarray,
    squares: np.ndarray,
    first: int,
    last: int,
) -> None:
    """Bits of the largest magnitude, and the sum of squares, of each chunk."""
    x = pointer(x)
    for c in range(first, last):
        a, b = int(start[c]), int(start[c]) + int(count[c])
        most[c] = largest(x, a, b)
        squares[c] = square_sum(x, a, b)


@kernel
def _choose(
    x: np.ndarray,
    parts: np.ndarray,
    count: np.ndarray,
    most: np.ndarray,
    squares: np.ndarray,
    sample: np.ndarray,
    size: np.ndarray,
    error: float,
    step: float,
    max_bits: float,
    subtract: int,
    out: np.ndarray,
) -> None:
    """The step of every segment."""
    x = pointer(x)
    c = k = 0
    for s in range(len(parts)):
        chunks = (int(parts[s]) + CHUNK - 1) // CHUNK
        top, total = i32(0), 0.0
        for i in range(c, c + chunks):
            top = max(top, most[i])
            total += squares[i]
        samples = min(SAMPLE, (int(parts[s]) + BLOCK - 1) // BLOCK)
        if top >= INFINITY:
            out[s] = f32(np.nan)
        elif top == 0:
            out[s] = f32(0)
        else:
            rms = np.sqrt(total / parts[s])
            delta = step * rms
            if step == 0:
                own, sizes = sample[k : k + samples], size[k : k + samples]
                delta = _for_error(x, own, sizes, error, rms, subtract)
            delta = max(delta, np.float64(float_of(top)) / LARGEST)
            if max_bits:
                delta = _for_bits(count[c : c + chunks], most[c : c + chunks], max_bits, delta)
            # the float just above, and never below the smallest positive one
            out[s] = float_of(i32(bits_of(f32(min(delta, 3.4e38))) + i32(1)))
        c += chunks
        k += samples


@kernel
def _for_error(
    x: Pointer, sample: np.ndarray, size: np.ndarray, error: float, rms: float, subtract: int
) -> float:
    """The largest step found at which the sample's error is no more than wished."""
    # the error is at most Δ²/12 where blocks may subtract, Δ²/4 where they may not
    low = rms * np.sqrt((4 if subtract == 2 else 12) * error)
    high = np.inf
    if subtract == 1:
        return low
    share = _share(x, sample, size, low, subtract)
    for _ in range(EVALUATIONS):
        if high < np.inf:
            trial = np.sqrt(low * high)
        else:
            trial = min(2 * low, rms * np.sqrt(error / max(share, 1e-12)))
        if trial < low * 1.01:
            break
        there = _share(x, sample, size, trial, subtract)
        if trial * trial * there <= error * rms * rms:
            low, share = trial, there
        else:
            high = trial
    return low


@kernel
def _share(x: Pointer, sample: np.ndarray, size: np.ndarray, delta: float, subtract: int) -> float:
    """Error of a value, in squared steps, over sampled blocks."""
    step = f32(delta)
    lift = lift_of(step)
    times = f32(f32(65536.0) / f32(step * lift))
    total, values = 0.0, 0
    for k in range(len(sample)):
        cost = i32(0)
        e = int(sample[k])
        for j in range(int(size[k])):
            v = f32(f32(get(x, e + j) * lift) * times)
            cost += _spread(nearest(max(min(v, _LIMIT), -_LIMIT)))
        own = np.float64(cost) / 65536.0
        total += own if subtract == 2 else min(own, size[k] / 12.0)
        values += int(size[k])
    return total / values


@kernel
def _spread(t: np.int32) -> np.int32:
    """2^16·φ(1-φ), φ the fraction of a fixed-point number, to 8 bits."""
    part = i32(sar(t, i32(8)) & i32(0xFF))
    return i32(part * i32(i32(256) - part))


@kernel
def _for_bits(count: np.ndarray, most: np.ndarray, max_bits: float, delta: float) -> float:
    """The smallest step found, from delta on, whose bit planes keep to max_bits a value."""
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


@kernel
def _quantize(
    x: np.ndarray,
    start: np.ndarray,
    count: np.ndarray,
    segment: np.ndarray,
    steps: np.ndarray,
    subtract: int,
    k0: np.uint32,
    k1: np.uint32,
    first: int,
    last: int,
    marks: np.ndarray,
    q: np.ndarray,
) -> None:
    """Integers of some chunks, from q[0] on, and which of their blocks subtract the dither."""
    x, q = pointer(x), pointer(q)
    y = float_scratch()
    for c in range(first, last):
        step = steps[segment[c]]
        n, to = int(count[c]), (c - first) * CHUNK
        if not usable(step):
            for j in range((n + BLOCK - 1) // BLOCK * BLOCK):
                store(q, to + j, i16(0))
            marks[c] = 0
            continue
        lift = lift_of(step)
        times = f32(f32(65536.0) / f32(step * lift))
        mark = 0
        for b in range((n + BLOCK - 1) // BLOCK):
            cost = i32(0)
            for g in range(b * BLOCK, (b + 1) * BLOCK, GROUP):
                e, p0 = int(start[c]) + g, u32(c * (CHUNK // 2) + g // 2)
                if g + GROUP <= n:
                    cost += _group(x, e, lift, times, p0, k0, k1, q, to + g)
                else:
                    for j in range(GROUP):
                        store(y, j, get(x, e + j) if g + j < n else f32(0))
                    cost += _group(y, 0, lift, times, p0, k0, k1, q, to + g)
            size = min(BLOCK, n - b * BLOCK)
            if subtract == 1 or (subtract == 0 and 12 * int(cost) > size * 65536):
                mark |= 1 << b
        marks[c] = mark


@kernel
def _group(
    x: Pointer,
    e: int,
    lift: np.float32,
    times: np.float32,
    p0: np.uint32,
    k0: np.uint32,
    k1: np.uint32,
    q: Pointer,
    to: int,
) -> np.int32:
    """q = (t + r) >> 16 of 128 values; returns what not subtracting costs, in 2^-16 steps²."""
    cost = i32(0)
    for j in range(64):
        h = mix(u32(p0 + u32(j)), k0, k1)
        v = f32(f32(get(x, e + j) * lift) * times)
        w = f32(f32(get(x, e + j + 64) * lift) * times)
        a, b = nearest(max(min(v, _LIMIT), -_LIMIT)), nearest(max(min(w, _LIMIT), -_LIMIT))
        cost += i32(_spread(a) + _spread(b))
        store(q, to + j, i16(sar(i32(a + i32(h & u32(0xFFFF))), i32(16))))
        store(q, to + j + 64, i16(sar(i32(b + i32(shr(h, u32(16)))), i32(16))))
    return cost


@kernel
def _dequantize(
    q: np.ndarray,
    start: np.ndarray,
    count: np.ndarray,
    segment: np.ndarray,
    steps: np.ndarray,
    marks: np.ndarray,
    weight: np.float32,
    bound: np.float32,
    add: bool,
    k0: np.uint32,
    k1: np.uint32,
    first: int,
    last: int,
    out: np.ndarray,
) -> None:
    """out (+)= weight·step·(q - u) of some chunks, u only where the block subtracts."""
    q, out = pointer(q), pointer(out)
    y = float_scratch()
    for c in range(first, last):
        step = steps[segment[c]]
        n, at = int(count[c]), (c - first) * CHUNK
        lift = lift_of(step)
        lower = f32(f32(1) / lift)
        worth = f32(f32(step * lift) * weight)
        if bits_of(step) >= INFINITY or bits_of(step) < i32(0):
            worth = f32(np.nan)
        for g in range(0, n, GROUP):
            e, p0 = int(start[c]) + g, u32(c * (CHUNK // 2) + g // 2)
            # u in units of 2^-17 is 2r + 1 - 2^16; where nothing is subtracted it counts nothing
            unit = f32(2.0**-17 if int(marks[c]) >> (g // BLOCK) & 1 else 0.0)
            args = (q, at + g, unit, worth, lower, bound, p0, k0, k1)
            if g + GROUP <= n:
                _values(*args, out, e, add)
            else:
                _values(*args, y, 0, False)
                for j in range(n - g):
                    put(out, e + j, f32(get(out, e + j) + load(y, j)) if add else load(y, j))


@kernel
def _values(
    q: Pointer,
    at: int,
    unit: np.float32,
    worth: np.float32,
    lower: np.float32,
    bound: np.float32,
    p0: np.uint32,
    k0: np.uint32,
    k1: np.uint32,
    out: Pointer,
    e: int,
    add: bool,
) -> None:
    """out[e : e + 128] (+)= (q - u)·worth, lowered and clamped."""
    for j in range(64):
        h = mix(u32(p0 + u32(j)), k0, k1)
        u = f32(f32(i32(i32(u32(h & u32(0xFFFF)) << u32(1)) - i32(0xFFFF))) * unit)
        w = f32(f32(i32(i32(u32(shr(h, u32(16)) << u32(1))) - i32(0xFFFF))) * unit)
        a = f32(f32(f32(f32(i32(load(q, at + j))) - u) * worth) * lower)
        b = f32(f32(f32(f32(i32(load(q, at + j + 64))) - w) * worth) * lower)
        a, b = clamped(a, bound), clamped(b, bound)
        put(out, e + j, f32(get(out, e + j) + a) if add else a)
        put(out, e + j + 64, f32(get(out, e + j + 64) + b) if add else b)
