"""Entropy-coded dithered quantization on the GPU. The definitions are in `_reference/ecdq.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import _coding
from laconic.kernels._coding import Budgets, Section, Subtract
from laconic.kernels._protocol import Coding, Output
from laconic.kernels._triton.bitmap import (
    ROW,
    TAIL_BITS,
    gather,
    ones,
    rotated,
    scatter,
    transposed,
    zeros,
)
from laconic.kernels._triton.chunk import (
    BLOCK,
    CHUNK,
    LANES,
    emit_slowly,
    first_values,
    lanes_of,
    open_chunk,
    place_of,
    read_chunk,
    salt_of,
    tail_of,
    with_pair,
    with_value,
    write_chunk,
)
from laconic.kernels._triton.coding import (
    DECODE_OPTIONS,
    ENCODE_OPTIONS,
    Staging,
    check_coder,
    chunks,
    collect,
)
from laconic.kernels._triton.ecdq_steps import (
    ALWAYS,
    LARGEST,
    NEVER,
    SQUARED_STEP,
    block_cost,
    limited,
    nearest,
    spread,
)
from laconic.kernels._triton.group import (
    OPTIONS,
    TINY,
    clamped,
    lift_of,
    lower_of,
    mix,
    narrowed,
    usable,
    words,
)

_PLAIN: tl.constexpr = tl.constexpr(0)  # quantize with the steps as they are
_COUNTED: tl.constexpr = tl.constexpr(1)  # and add up what that costs
_AGAIN: tl.constexpr = tl.constexpr(2)  # only segments that cost too much, with their safe steps
_TOLERANCE: tl.constexpr = tl.constexpr(1 + _coding.TOLERANCE)


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
    """See `Kernels`.

    Nobody waits to learn whether a segment keeps to its limit: a second launch looks, and ends
    there for all chunks of those that do.
    """
    place, staging = chunks(parts, x), Staging.of(section, x.device)
    checked = budgets is not None
    if budgets is None:
        budgets = Budgets.of(len(parts), x.device)
        budgets.costs.zero_()
        budgets.limit.fill_(torch.inf)
    tried = torch.empty_like(budgets.safe)
    counted = checked or spent is not None
    for form_ in (_COUNTED, _AGAIN) if checked else (_COUNTED,) if counted else (_PLAIN,):
        _encode[place.grid](
            x,
            steps,
            tried,
            budgets.limit,
            budgets.safe,
            budgets.costs,
            *place.tensors,
            *staging.tensors,
            x.numel(),
            len(parts),
            *words(coding.stream),
            CODER=check_coder(coding.kind),
            SUBTRACT=int(subtract),
            PASS=form_.value,
            **place.options,
            **ENCODE_OPTIONS,
        )
    collect(section, staging, place, steps, coding.stream)
    if spent is not None:
        _report[(len(parts),)](
            spent, tried, steps, budgets.limit, budgets.safe, budgets.costs, len(parts), **OPTIONS
        )


def ecdq_decode(
    section: Section,
    steps: Tensor,
    output: Output,
    parts: tuple[int, ...],
    coding: Coding,
) -> None:
    """See `Kernels`. An error could only be raised after waiting for the device."""
    out, weight, add = output
    place = chunks(parts, out)
    _decode[place.grid](
        section.ends,
        section.checks,
        section.payload,
        section.payload.numel(),
        steps,
        out,
        *place.tensors,
        out.numel(),
        *words(coding.stream),
        weight,
        torch.finfo(out.dtype).max,
        CODER=check_coder(coding.kind),
        ADD=add,
        **place.options,
        **DECODE_OPTIONS,
    )


# --- quantization --------------------------------------------------------------------------


@triton.jit
def _draws(lane, i):
    """Which of a chunk's draws value i of a lane takes a half of."""
    return lane // LANES * (BLOCK // 2) + i // 8 * 64 + i % 4 * LANES + lane % LANES


@triton.jit
def _rounded(source, lane, i, mask):
    """t and q of value i of each lane."""
    x, count, lift, times, draw, k0, k1 = source
    e = lane // LANES * BLOCK + i * LANES + lane % LANES
    v = tl.load(x + e, mask=mask & (e < count), other=0.0).to(tl.float32)
    h = mix(draw + _draws(lane, i).to(tl.uint32), k0, k1)
    r = tl.where((i & 4) != 0, h >> 16, h & 0xFFFF).to(tl.int32)
    t = nearest(limited((v * lift) * times))
    return t, (t + r) >> 16


@triton.jit
def _exact(source, lane, i, mask):
    """q of value i of each lane."""
    _t, q = _rounded(source, lane, i, mask)
    return q


@triton.jit(do_not_specialize=["n", "parts", "k0", "k1"], do_not_specialize_on_alignment=["steps"])
def _encode(
    x,
    steps,
    tried,
    limits,
    safe,
    costs,
    starts,
    counts,
    segments,
    streams,
    heads,
    sizes,
    n,
    parts,
    k0,
    k1,
    CODER: tl.constexpr,
    SUBTRACT: tl.constexpr,
    PASS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Quantize a chunk and stage its code."""
    c = tl.program_id(0)
    start, count, segment = place_of(c, n, starts, counts, segments, SEGMENTS, NEAR)
    place = (x + start, count, c, streams, heads, sizes, k0.to(tl.uint32), k1.to(tl.uint32))
    first = c == 0
    if SEGMENTS:
        first = first | (tl.load(segments + c - 1, mask=c > 0, other=0) != segment)
    if PASS == _AGAIN:
        again, step = _settled(tried, limits, safe, costs, segment)
        tl.store(steps + segment, step, mask=first)
        if again:
            cost = _stage(place, step, CODER, SUBTRACT, PASS, NEAR)
            tl.atomic_add(costs + parts + segment, cost, sem="relaxed")
    else:
        step = tl.load(steps + segment)
        cost = _stage(place, step, CODER, SUBTRACT, PASS, NEAR)
        if PASS == _COUNTED:
            tl.store(tried + segment, step, mask=first)
            tl.atomic_add(costs + segment, cost, sem="relaxed")


@triton.jit
def _settled(tried, limits, safe, costs, segment):
    """Whether a segment must be quantized again, and its step in the end."""
    step, other = tl.load(tried + segment), tl.load(safe + segment)
    error = _squared_error(step, tl.load(costs + segment))
    again = (error > tl.load(limits + segment) * _TOLERANCE) & (other < step)
    return again, tl.where(again, other, step)


@triton.jit
def _squared_error(step, cost):
    """What so many units are."""
    return step.to(tl.float64) * step.to(tl.float64) * cost.to(tl.float64) / SQUARED_STEP


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["steps"])
def _report(spent, tried, steps, limits, safe, costs, parts):
    """The expected squared error of a segment."""
    s = tl.program_id(0)
    again, _step = _settled(tried, limits, safe, costs, s)
    cost = tl.load(costs + tl.where(again, parts, 0) + s)
    error = _squared_error(tl.load(steps + s), cost)
    tl.store(spent + s, error.to(spent.dtype.element_ty))


@triton.jit
def _stage(
    place,
    step,
    CODER: tl.constexpr,
    SUBTRACT: tl.constexpr,
    PASS: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Quantize a chunk with this step and stage its code; returns what that costs."""
    x, count, c, streams, heads, sizes, k0, k1 = place
    lift = lift_of(step)
    times = tl.div_rn(step * 0.0 + 65536.0, step * lift)
    draw = c.to(tl.uint32) * (CHUNK // 2)
    source = (x, count, lift, times, draw, k0, k1)
    b0, b1, b2, b3, sign = zeros(), zeros(), zeros(), zeros(), zeros()
    marks, total = 0, c.to(tl.int64) * 0
    if usable(step):
        cost = tl.zeros((ROW,), tl.int32)
        if (count == CHUNK) & (step >= TINY):
            b0, b1, b2, b3, sign, cost = _cut(source, SUBTRACT)
        else:
            lane = tl.arange(0, ROW)
            for i in range(32):
                t, q = _rounded(source, lane, lane * 0 + i, lane >= 0)
                cost += spread(t)
                b0, b1, b2, b3, sign = with_value(b0, b1, b2, b3, sign, q, i)
        block = tl.arange(0, ROW // LANES)
        size = tl.minimum(tl.maximum(count - block * BLOCK, 0), BLOCK)
        cost = tl.sum(tl.reshape(cost, (ROW // LANES, LANES)), 1)
        marked = size > 0
        if SUBTRACT == NEVER:
            marked = size < 0
        elif SUBTRACT != ALWAYS:
            marked = 12 * cost > size * 65536
        marks = tl.sum(marked.to(tl.int32) << block, 0)
        if PASS != _PLAIN:
            total = tl.sum(block_cost(cost, size, SUBTRACT).to(tl.int64), 0)
    planes, staging = (b0, b1, b2, b3, sign), (streams, heads, sizes)
    write_chunk(c, planes, marks, lanes_of(count), staging, source, _exact, CODER, NEAR)
    return total


@triton.jit
def _rows(x):
    """Values 0 .. 7 of each lane."""
    return (
        tl.load(x),
        tl.load(x + 16),
        tl.load(x + 32),
        tl.load(x + 48),
        tl.load(x + 64),
        tl.load(x + 80),
        tl.load(x + 96),
        tl.load(x + 112),
    )


@triton.jit
def _cut(source, SUBTRACT: tl.constexpr):
    """Planes, clipped to 15, signs, and what not subtracting costs, of a whole chunk.

    Nothing limits v here: where the conversion to an integer saturates, the magnitude is clipped
    anyway, and then looked at again. Nor is the step one that needs a lift.
    """
    x, _count, _lift, times, draw, k0, k1 = source
    first = _draws(tl.arange(0, ROW), 0)
    x += first_values()
    w0, w1, w2, w3, sign = zeros(), zeros(), zeros(), zeros(), zeros()
    cost = tl.zeros((ROW,), tl.int32)
    for step in range(4):
        a = 3 - step
        rows = _rows(x + a * 128)
        minus, other = zeros(), zeros()
        for b in tl.static_range(3, -1, -1):
            u = nearest(rows[b].to(tl.float32) * times)
            v = nearest(rows[b + 4].to(tl.float32) * times)
            if SUBTRACT != ALWAYS:
                cost += spread(u) + spread(v)
            h = mix(draw + (first + 64 * a + 16 * b).to(tl.uint32), k0, k1)
            u = (u + (h & 0xFFFF).to(tl.int32)) >> 16
            v = (v + (h >> 16).to(tl.int32)) >> 16
            w0, w1, w2, w3 = with_pair(w0, w1, w2, w3, u, v, b)
            minus = (minus << 1) | (u.to(tl.uint32) >> 31)
            other = (other << 1) | (v.to(tl.uint32) >> 31)
        sign = (sign << 8) | (other << 4) | minus
    b0, b1, b2, b3 = transposed(w0, w1, w2, w3)
    return b0, b1, b2, b3, sign, cost


# --- decoding ------------------------------------------------------------------------------


@triton.jit
def _value(q, r, unit, worth, lower):
    """What is decoded, before clamping; `unit` is 2^-16 where the dither is subtracted, else 0."""
    return ((q - (r.to(tl.float32) - 32767.5) * unit) * worth) * lower


@triton.jit
def _put_value(target, lane, i, q, mask, ADD: tl.constexpr):
    """out (+)= the value of q, value i of each lane."""
    out, count, unit, worth, lower, bound, draw, k0, k1 = target
    e = lane // LANES * BLOCK + i * LANES + lane % LANES
    h = mix(draw + _draws(lane, i).to(tl.uint32), k0, k1)
    r = tl.where((i & 4) != 0, h >> 16, h & 0xFFFF).to(tl.int32)
    v = clamped(_value(q.to(tl.float32), r, unit, worth, lower), bound)
    mask = mask & (e < count)
    if ADD:
        v = tl.load(out + e, mask=mask, other=0.0).to(tl.float32) + v
    tl.store(out + e, narrowed(v, out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["room", "n", "k0", "k1"],
    do_not_specialize_on_alignment=["ends", "checks", "payload", "steps"],
)
def _decode(
    ends,
    checks,
    payload,
    room,
    steps,
    out,
    starts,
    counts,
    segments,
    n,
    k0,
    k1,
    weight,
    bound,
    CODER: tl.constexpr,
    ADD: tl.constexpr,
    SEGMENTS: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Decode a chunk onto its values."""
    c = tl.program_id(0)
    start, count, segment = place_of(c, n, starts, counts, segments, SEGMENTS, NEAR)
    lanes = lanes_of(count)
    step = tl.load(steps + segment)
    bits = step.to(tl.int32, bitcast=True)
    salt = salt_of(c, bits, count, k0, k1)
    stream, length, head, good = open_chunk(ends, checks, payload, room, c, lanes, salt)
    planes, good, rest = read_chunk(
        stream, length, head, good, count, lanes, LARGEST + 1, CODER, NEAR
    )
    b0, b1, b2, b3, sign = planes
    wide, tails, many, _at, _rank, _apart = rest
    lane = tl.arange(0, ROW)
    unit = tl.where((head >> (16 + lane // LANES)) & 1 != 0, 2.0**-16, 0.0)
    lower = lower_of(step)
    fine = (bits >= 0) & (bits < 0x7F800000) & (good != 0)
    worth = tl.where(fine, (step * lift_of(step)) * weight, float("nan"))
    draw = c.to(tl.uint32) * (CHUNK // 2)
    k0, k1 = k0.to(tl.uint32), k1.to(tl.uint32)
    out += start
    target = (out, count, unit, worth, lower, bound, draw, k0, k1)
    small = tl.abs(worth) * (LARGEST + 2) <= bound  # then nothing needs clamping
    if (count == CHUNK) & (wide == 0) & (many == 0) & small:
        # values with tails are clipped at first; their places are stored again at the end
        clipped = b0 & b1 & b2 & b3
        tailed = tl.max(ones(clipped), 0) > 0
        first, second = zeros().to(tl.float32), zeros().to(tl.float32)
        if tailed:
            e, q, there = tail_of(clipped, tails, sign)
            first = _late_value(target, e, q, there, ADD, NEAR)
            e, q, there = tail_of(clipped & (clipped - 1), tails >> TAIL_BITS, sign)
            second = _late_value(target, e, q, there, ADD, NEAR)
            tl.debug_barrier()  # before other threads store there
        _values(planes, target, c & 3, ADD)
        if tailed:
            tl.debug_barrier()
            e, q, there = tail_of(clipped, tails, sign)
            scatter(out, e, narrowed(first, out.dtype.element_ty), there, NEAR)
            e, q, there = tail_of(clipped & (clipped - 1), tails >> TAIL_BITS, sign)
            scatter(out, e, narrowed(second, out.dtype.element_ty), there, NEAR)
    else:
        emit_slowly(planes, rest, stream, length, lanes, target, _put_value, ADD)


@triton.jit
def _late_value(target, e, q, there, ADD: tl.constexpr, NEAR: tl.constexpr):
    """What out will be at the places e of a chunk, before anything is stored."""
    out, _count, unit, worth, lower, _bound, draw, k0, k1 = target
    i = e % BLOCK // LANES
    h = mix(draw + _draws(tl.arange(0, ROW), i).to(tl.uint32), k0, k1)
    r = tl.where((i & 4) != 0, h >> 16, h & 0xFFFF).to(tl.int32)
    v = _value(q.to(tl.float32), r, unit, worth, lower)
    if ADD:
        v += gather(out, tl.where(there, e, CHUNK), CHUNK, NEAR).to(tl.float32)
    return v


@triton.jit
def _values(planes, target, turn, ADD: tl.constexpr):
    """out (+)= the values of a whole chunk, by quarters of its blocks, from quarter `turn` on.

    Chunks start with different quarters: programs that run in step would else all ask the same
    memory channels at a time, and wait half as long again.
    """
    b0, b1, b2, b3, sign = planes
    out, _count, unit, worth, lower, _bound, draw, k0, k1 = target
    first = _draws(tl.arange(0, ROW), 0)
    out += first_values()
    w0, w1, w2, w3 = transposed(b0, b1, b2, b3)
    w0, w1, w2 = rotated(w0, -8 * turn), rotated(w1, -8 * turn), rotated(w2, -8 * turn)
    w3, sign = rotated(w3, -8 * turn), rotated(sign, -8 * turn)
    if ADD:
        rows = _rows(out + turn * 128)
    for step in range(4):
        a = (turn + step) & 3
        if ADD:  # a quarter ahead, or each load would be waited for; the last ones are not used
            ahead = _rows(out + ((a + 1) & 3) * 128)
        for b in tl.static_range(4):
            pair = (w0, w1, w2, w3)[b]
            u, v = _signed(pair & 15, sign, b), _signed((pair >> 4) & 15, sign, b + 4)
            h = mix(draw + (first + 64 * a + 16 * b).to(tl.uint32), k0, k1)
            u = _value(u, h & 0xFFFF, unit, worth, lower)
            v = _value(v, h >> 16, unit, worth, lower)
            if ADD:
                u, v = rows[b].to(tl.float32) + u, rows[b + 4].to(tl.float32) + v
            to = out + (a * 128 + 16 * b)
            tl.store(to, narrowed(u, out.dtype.element_ty))
            tl.store(to + 64, narrowed(v, out.dtype.element_ty))
        w0, w1, w2, w3, sign = w0 >> 8, w1 >> 8, w2 >> 8, w3 >> 8, sign >> 8
        if ADD:
            rows = ahead


@triton.jit
def _signed(m, sign, i):
    """A magnitude as a float, with bit i of the signs."""
    bits = m.to(tl.float32).to(tl.uint32, bitcast=True)
    return (bits | ((sign << (31 - i)) & 0x80000000)).to(tl.float32, bitcast=True)
