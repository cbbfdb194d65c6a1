"""Entropy-coded dithered quantization on the CPU. The definitions are in `_reference/ecdq.py`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic.kernels._coding import (
    BLOCK,
    CHUNK,
    LARGEST,
    SQUARED_STEP,
    TOLERANCE,
    Budgets,
    Section,
    Subtract,
    table,
)
from laconic.kernels._layout import GROUP
from laconic.kernels._numba.coding import decode_chunks, encode_chunks, encoded_marks
from laconic.kernels._numba.ecdq_steps import LIMIT, block_cost, spread
from laconic.kernels._numba.group import (
    INFINITY,
    Words,
    Worth,
    clamped,
    lift_of,
    mix,
    usable,
    words,
    worth_of,
)
from laconic.kernels._numba.intrinsics import (
    Pointer,
    array,
    bits_of,
    f32,
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
from laconic.kernels._protocol import Coding, Output


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
    where, delta = table(parts), array(steps)
    marks, costs = np.empty(where.chunks, np.uint16), np.empty(where.chunks, np.int64)
    place = (where.start, where.count, where.segment, delta)
    args = (array(x), place, int(subtract), words(coding.stream), marks, costs)

    def fill(q: np.ndarray, first: int, last: int) -> None:
        _quantize(*args, first, last, q)

    error = np.empty(len(parts))

    def encode() -> None:
        encode_chunks(fill, where, marks, delta.view(np.uint32), coding, section)
        _squared_errors(costs, where.segment, delta, error)

    encode()
    if budgets is not None and _fall_back(
        error, budgets.limit.numpy(), budgets.safe.numpy(), delta
    ):
        encode()
    if spent is not None:
        spent.copy_(torch.from_numpy(error))


def ecdq_decode(
    section: Section,
    steps: Tensor,
    output: Output,
    parts: tuple[int, ...],
    coding: Coding,
) -> None:
    """See `Kernels`."""
    where, delta = table(parts), array(steps)
    marks = encoded_marks(section, where, delta.view(np.uint32), coding.stream)
    place = (where.start, where.count, where.segment, delta)
    args = (place, marks, worth_of(output), words(coding.stream), array(output.tensor))

    def use(q: np.ndarray, first: int, last: int) -> None:
        _dequantize(q, *args, first, last)

    decode_chunks(use, where, coding, LARGEST + 1, section)


@kernel
def _squared_errors(
    costs: np.ndarray, segment: np.ndarray, steps: np.ndarray, error: np.ndarray
) -> None:
    """Expected squared error of every segment, NaN where the step is."""
    error[:] = 0
    for c in range(len(costs)):
        error[segment[c]] += costs[c]
    for s in range(len(steps)):
        step = np.float64(steps[s])
        error[s] = step * step * error[s] / SQUARED_STEP


@kernel
def _fall_back(error: np.ndarray, limit: np.ndarray, safe: np.ndarray, steps: np.ndarray) -> bool:
    """Give segments that cost too much their safe steps; whether there are any."""
    found = False
    for s in range(len(steps)):
        if error[s] > limit[s] * (1 + TOLERANCE) and safe[s] < steps[s]:
            steps[s] = safe[s]
            found = True
    return found


@kernel
def _quantize(
    x: np.ndarray,
    place: tuple[np.ndarray, ...],
    subtract: int,
    key: Words,
    marks: np.ndarray,
    costs: np.ndarray,
    first: int,
    last: int,
    q: np.ndarray,
) -> None:
    """Integers of some chunks, from q[0] on, which of their blocks subtract, and what they cost.

    Place: the chunks' starts, counts and segments, the segments' steps.
    """
    start, count, segment, steps = place
    x, q = pointer(x), pointer(q)
    y = float_scratch()
    for c in range(first, last):
        step = steps[segment[c]]
        n, to = int(count[c]), (c - first) * CHUNK
        if not usable(step):
            for j in range((n + BLOCK - 1) // BLOCK * BLOCK):
                store(q, to + j, i16(0))
            marks[c] = costs[c] = 0
            continue
        lift = lift_of(step)
        times = f32(f32(65536.0) / f32(step * lift))
        mark = total = 0
        for b in range((n + BLOCK - 1) // BLOCK):
            cost = i32(0)
            for g in range(b * BLOCK, (b + 1) * BLOCK, GROUP):
                e, p0 = int(start[c]) + g, u32(c * (CHUNK // 2) + g // 2)
                if g + GROUP <= n:
                    cost += _group(x, e, lift, times, p0, key, q, to + g)
                else:
                    for j in range(GROUP):
                        store(y, j, get(x, e + j) if g + j < n else f32(0))
                    cost += _group(y, 0, lift, times, p0, key, q, to + g)
            size = min(BLOCK, n - b * BLOCK)
            if subtract == 1 or (subtract == 0 and 12 * int(cost) > size * 65536):
                mark |= 1 << b
            total += block_cost(cost, size, subtract)
        marks[c], costs[c] = mark, total


@kernel
def _group(
    x: Pointer,
    e: int,
    lift: np.float32,
    times: np.float32,
    p0: np.uint32,
    key: Words,
    q: Pointer,
    to: int,
) -> np.int32:
    """q = (t + r) >> 16 of 128 values; returns what not subtracting costs, in 2^-16 steps²."""
    cost = i32(0)
    for j in range(64):
        h = mix(u32(p0 + u32(j)), key[0], key[1])
        v = f32(f32(get(x, e + j) * lift) * times)
        w = f32(f32(get(x, e + j + 64) * lift) * times)
        a, b = nearest(max(min(v, LIMIT), -LIMIT)), nearest(max(min(w, LIMIT), -LIMIT))
        cost += i32(spread(a) + spread(b))
        store(q, to + j, i16(sar(i32(a + i32(h & u32(0xFFFF))), i32(16))))
        store(q, to + j + 64, i16(sar(i32(b + i32(shr(h, u32(16)))), i32(16))))
    return cost


@kernel
def _dequantize(
    q: np.ndarray,
    place: tuple[np.ndarray, ...],
    marks: np.ndarray,
    worth: tuple,
    key: Words,
    out: np.ndarray,
    first: int,
    last: int,
) -> None:
    """Output of step·(q - u) of some chunks, u only where the block subtracts."""
    start, count, segment, steps = place
    worth = Worth(*worth)
    bound, add = worth.bound, worth.add
    q, out = pointer(q), pointer(out)
    y = float_scratch()
    for c in range(first, last):
        step = steps[segment[c]]
        n, at = int(count[c]), (c - first) * CHUNK
        lift = lift_of(step)
        lower = f32(f32(1) / lift)
        times = f32(f32(step * lift) * worth.weight)
        if bits_of(step) >= INFINITY or bits_of(step) < i32(0):
            times = f32(np.nan)
        for g in range(0, n, GROUP):
            e, p0 = int(start[c]) + g, u32(c * (CHUNK // 2) + g // 2)
            # u in units of 2^-17 is 2r + 1 - 2^16; where nothing is subtracted it counts nothing
            unit = f32(2.0**-17 if int(marks[c]) >> (g // BLOCK) & 1 else 0.0)
            args = (q, at + g, unit, times, lower, bound, p0, key)
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
    key: Words,
    out: Pointer,
    e: int,
    add: bool,
) -> None:
    """out[e : e + 128] (+)= (q - u)·worth, lowered and clamped."""
    for j in range(64):
        h = mix(u32(p0 + u32(j)), key[0], key[1])
        u = f32(f32(i32(i32(u32(h & u32(0xFFFF)) << u32(1)) - i32(0xFFFF))) * unit)
        w = f32(f32(i32(i32(u32(shr(h, u32(16)) << u32(1))) - i32(0xFFFF))) * unit)
        a = f32(f32(f32(f32(i32(load(q, at + j))) - u) * worth) * lower)
        b = f32(f32(f32(f32(i32(load(q, at + j + 64))) - w) * worth) * lower)
        a, b = clamped(a, bound), clamped(b, bound)
        put(out, e + j, f32(get(out, e + j) + a) if add else a)
        put(out, e + j + 64, f32(get(out, e + j + 64) + b) if add else b)
