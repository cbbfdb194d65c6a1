"""Chunks of a coded section on the GPU: bit planes, check sums, and what frames every stream.

The format is described in `kernels/_coding.py`. A program has a chunk, as bit planes of magnitudes
up to 15 and a plane of signs (tensors of 256 words, as in `bitmap.py`). Larger magnitudes are fast
where there are few, as in gradients with heavy tails: up to two a lane. Wide plane forms, many
tails and chunks that are not whole take a loop over single values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels import _coding
from laconic.kernels._coding import Kind
from laconic.kernels._triton.bitmap import (
    CLIP,
    ROW,
    TAIL_BITS,
    few_tails,
    get_stream,
    inverse,
    ones,
    put_stream,
    stream_bits,
    tail,
    zeros,
)
from laconic.kernels._triton.group import mix

CHUNK: tl.constexpr = tl.constexpr(_coding.CHUNK)
BLOCK: tl.constexpr = tl.constexpr(_coding.BLOCK)
LANES: tl.constexpr = tl.constexpr(_coding.LANES)
STREAM: tl.constexpr = tl.constexpr(_coding.CHUNK // 2)  # words of the longest stream
FIXED: tl.constexpr = tl.constexpr(int(Kind.FIXED))
BITMAP: tl.constexpr = tl.constexpr(int(Kind.BITMAP))
_MOST: tl.constexpr = tl.constexpr(_coding.MAX_MAGNITUDE)
_FEW: tl.constexpr = tl.constexpr(32)  # tails of a chunk that are read one by one


@triton.jit
def place_of(c, n, starts, counts, segments, SEGMENTS: tl.constexpr, NEAR: tl.constexpr):
    """Start (int64), count and segment of chunk c."""
    if SEGMENTS:
        start = tl.multiple_of(tl.load(starts + c), NEAR)
        return start, tl.load(counts + c), tl.load(segments + c)
    else:
        start = c.to(tl.int64) * CHUNK
        return start, tl.minimum(n - start, CHUNK).to(tl.int32), 0


@triton.jit
def lanes_of(count):
    """Lanes of a chunk of so many values."""
    return (count + (BLOCK - 1)) // BLOCK * LANES


@triton.jit
def first_values():
    """The place in a chunk of each lane's value 0; value i is 16·i further."""
    lane = tl.arange(0, ROW)
    return lane // LANES * BLOCK + lane % LANES


@triton.jit
def salt_of(c, stamp, count, k0, k1):
    """What the check of chunk c starts from."""
    draw = mix(c.to(tl.uint32), k0.to(tl.uint32), k1.to(tl.uint32))
    return (draw ^ stamp.to(tl.uint32)) + count.to(tl.uint32)


@triton.jit
def hashed(word, i, salt):
    """A word's share of the check."""
    h = word ^ (salt + i.to(tl.uint32) * 0x9E3779B1)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def plane_words(lanes, width):
    """Words of a chunk in plane form, without its first."""
    return tl.where(width > 0, lanes * (1 + width), 0)


# --- writing -------------------------------------------------------------------------------


@triton.jit
def with_pair(w0, w1, w2, w3, u, v, B: tl.constexpr):
    """Magnitudes, clipped, of values i and i + 4, into word i % 4 = B, eight bits up."""
    pair = tl.minimum(tl.abs(u), CLIP) | (tl.minimum(tl.abs(v), CLIP) << 4)
    if B == 0:
        w0 = (w0 << 8) | pair.to(tl.uint32)
    elif B == 1:
        w1 = (w1 << 8) | pair.to(tl.uint32)
    elif B == 2:
        w2 = (w2 << 8) | pair.to(tl.uint32)
    else:
        w3 = (w3 << 8) | pair.to(tl.uint32)
    return w0, w1, w2, w3


@triton.jit
def with_value(b0, b1, b2, b3, sign, v, i):
    """Value i of each lane, clipped, into the planes."""
    m = tl.minimum(tl.abs(v), CLIP).to(tl.uint32)
    sign = sign | ((v.to(tl.uint32) >> 31) << i)
    b0, b1 = b0 | ((m & 1) << i), b1 | (((m >> 1) & 1) << i)
    b2, b3 = b2 | (((m >> 2) & 1) << i), b3 | ((m >> 3) << i)
    return b0, b1, b2, b3, sign


@triton.jit
def write_chunk(
    c,
    planes,
    marks,
    lanes,
    staging,
    source,
    EXACT: tl.constexpr,
    CODER: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Stage chunk c, given planes clipped to 15 and signs: its stream, or planes if not longer.

    EXACT(source, lane, i, mask) gives value i of each lane as it is.
    """
    lane = tl.arange(0, ROW)
    b0, b1, b2, b3, sign = planes
    streams, heads, sizes = staging
    out = streams + c.to(tl.int64) * STREAM
    width = tl.where(b1 != 0, 2, tl.where(b0 != 0, 1, 0))
    width = tl.max(tl.where(b3 != 0, 4, tl.where(b2 != 0, 3, width)), 0)
    clipped, tails = b0 & b1 & b2 & b3, zeros()
    most = tl.max(ones(clipped), 0)
    if most > 0:
        top = lane * 0
        for r in range(most):
            low = clipped & (0 - clipped)
            q = EXACT(source, lane, ones(low - 1), low != 0)
            top = tl.maximum(top, tl.abs(q))
            rest = tl.where((low != 0) & (r < 2), tl.abs(q) - CLIP, 0).to(tl.uint32)
            tails += rest << (TAIL_BITS * r & 31)
            sign = (sign & inverse(low)) | tl.where(q < 0, low, 0)
            clipped = clipped ^ low
        width = _bit_length(tl.max(top, 0))
    right = plane_words(lanes, width)
    length = (lanes + stream_bits(b0, b1, b2, b3) + 31) >> 5
    head = marks << 16
    if (CODER == BITMAP) & (length < right):
        put_stream(out, b0, b1, b2, b3, sign, tails, lanes, source, EXACT, NEAR)
        head = head | BITMAP
    else:
        _put_planes(out, b0, b1, b2, b3, sign, lanes, width, source, EXACT)
        head = head | (width << 8)
        length = right
    tl.store(heads + c, head)
    tl.store(sizes + c, length + 1)


@triton.jit
def _bit_length(n):
    """Of a positive integer up to 2^24: the exponent of its float."""
    return (n.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126


@triton.jit
def _put_planes(out, b0, b1, b2, b3, sign, lanes, width, source, EXACT: tl.constexpr):
    """The plane form of a chunk."""
    lane = tl.arange(0, ROW)
    real = lane < lanes
    to = out + lane // LANES * (LANES * (1 + width)) + lane % LANES
    tl.store(to, sign.to(tl.int32), mask=real & (width > 0))
    to += LANES
    for first in range(0, width, 4):
        if width > 4:  # the planes at hand are clipped
            b0, b1, b2, b3 = zeros(), zeros(), zeros(), zeros()
            for i in range(32):
                m = tl.abs(EXACT(source, lane, lane * 0 + i, real)).to(tl.uint32) >> first
                b0 += (m & 1) << i
                b1 += ((m >> 1) & 1) << i
                b2 += ((m >> 2) & 1) << i
                b3 += ((m >> 3) & 1) << i
        tl.store(to, b0.to(tl.int32), mask=real)
        tl.store(to + LANES, b1.to(tl.int32), mask=real & (first + 1 < width))
        tl.store(to + 2 * LANES, b2.to(tl.int32), mask=real & (first + 2 < width))
        tl.store(to + 3 * LANES, b3.to(tl.int32), mask=real & (first + 3 < width))
        to += 4 * LANES


# --- reading -------------------------------------------------------------------------------


@triton.jit
def open_chunk(ends, checks, payload, room, c, lanes, salt):
    """Stream, its length, first word, and 1 if the chunk lies inside and its check agrees.

    The length of a bad one is 0, so that nothing of it is read.
    """
    end = tl.load(ends + c).to(tl.uint32).to(tl.int64)
    at = tl.load(ends + c - 1, mask=c > 0, other=0).to(tl.uint32).to(tl.int64)
    blocks = lanes // LANES
    good = (end > at) & (end - at <= 1 + blocks * (BLOCK // 2)) & (end <= room)
    length = tl.where(good, end - at, 0).to(tl.int32)
    chunk = payload + tl.where(good, at, 0)
    total = zeros()
    for first in range(0, length, ROW):
        i = first + tl.arange(0, ROW)
        word = tl.load(chunk + i, mask=i < length, other=0).to(tl.uint32)
        total += tl.where(i < length, hashed(word, i, salt), 0)
    head = tl.load(chunk, mask=length > 0, other=0).to(tl.uint32)
    good = good & (tl.sum(total, 0).to(tl.int32) == tl.load(checks + c))
    good = good & (((head >> 16) >> blocks.to(tl.uint32)) == 0)
    return chunk + 1, tl.where(good, length - 1, 0), head.to(tl.int32), good.to(tl.int32)


@triton.jit
def read_chunk(
    stream, length, head, good, count, lanes, limit, CODER: tl.constexpr, NEAR: tl.constexpr
):
    """Planes and signs of an opened chunk, 1 if an encoder could have written it, and the rest.

    The rest is what planes of four bits miss: the width, if it is more (else 0), and the tails,
    either as `few_tails` makes them (then `many` is 0) or, up to `many` a lane, still to be read.
    """
    lane = tl.arange(0, ROW)
    b0, b1, b2, b3, sign, tails = zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
    at, rank, apart, many = 0, lane * 0, 0, 0
    width = (head >> 8) & 0xFF
    wide = 0
    limit = tl.minimum(limit, _MOST)
    if good != 0:
        if (head & 0xFF) == FIXED:
            good = ((width <= 15) & (length == plane_words(lanes, width))).to(tl.int32)
            if (good != 0) & (width > 0):
                b0, b1, b2, b3, sign, good = _get_planes(stream, count, lanes, width, limit)
                wide = tl.where((width > 4) & (good != 0), width, 0)
        elif (CODER == BITMAP) & ((head & 0xFFFF) == BITMAP):
            b0, b1, b2, b3, sign, good, at, rank, apart, most = get_stream(
                stream, length, lanes, NEAR
            )
            good = good & _within(b0, b1, b2, b3, count, limit)
            if (good != 0) & (most > 0):
                clipped, top = b0 & b1 & b2 & b3, 0
                if (most <= 2) & (apart <= _FEW):
                    tails, top = few_tails(stream, length, at, rank, apart, ones(clipped))
                else:
                    many = most
                    above = lane * 0
                    for r in range(most):
                        place = tl.where(clipped != 0, at + rank + r, 32 * length)
                        above = tl.maximum(above, tail(stream, length, place, apart))
                        clipped = clipped & (clipped - 1)
                    top = tl.max(above, 0)
                good = (top + CLIP <= limit).to(tl.int32)
        else:
            good = 0
    if good == 0:
        b0, b1, b2, b3, sign = zeros(), zeros(), zeros(), zeros(), zeros()
        wide, many = 0, 0
    return (b0, b1, b2, b3, sign), good, (wide, tails, many, at, rank, apart)


@triton.jit
def _padding(count):
    """Bits of lanes that lie behind a chunk's last value."""
    values = tl.minimum(tl.maximum((count - first_values() + (LANES - 1)) // LANES, 0), 32)
    return tl.where(values < 32, (0 - (1 << values)).to(tl.uint32), 0)


@triton.jit
def _within(b0, b1, b2, b3, count, limit):
    """1 if no magnitude exceeds the limit, and nothing but zeros lies behind the last value."""
    top = 0
    left = inverse(zeros())
    good = 1
    if count < CHUNK:
        good = (tl.max(ones((b0 | b1 | b2 | b3) & _padding(count)), 0) == 0).to(tl.int32)
    if limit < CLIP:
        top, left = _highest(top, left, b3, 8)
        top, left = _highest(top, left, b2, 4)
        top, left = _highest(top, left, b1, 2)
        top, left = _highest(top, left, b0, 1)
    return good & (top <= limit).to(tl.int32)


@triton.jit
def _highest(top, left, plane, bit):
    """The largest magnitude, bit by bit from the top: which values are still candidates."""
    hits = left & plane
    some = tl.max(ones(hits), 0) > 0
    return tl.where(some, top + bit, top), tl.where(some, hits, left)


@triton.jit
def plane(stream, lanes, width, p):
    """Plane p of a chunk in plane form; the signs are plane -1."""
    lane = tl.arange(0, ROW)
    at = lane // LANES * (LANES * (1 + width)) + lane % LANES + LANES * (1 + p)
    return tl.load(stream + at, mask=(lane < lanes) & (p < width), other=0).to(tl.uint32)


@triton.jit
def _get_planes(stream, count, lanes, width, limit):
    """The first four planes, signs, and 1 if what `_within` says holds for all planes."""
    top = 0
    left, some = inverse(zeros()), zeros()
    for step in range(width):
        row = plane(stream, lanes, width, width - 1 - step)
        top, left = _highest(top, left, row, 1 << (width - 1 - step))
        some = some | row
    padded = tl.max(ones(some & _padding(count)), 0)
    b0, b1 = plane(stream, lanes, width, 0), plane(stream, lanes, width, 1)
    b2, b3 = plane(stream, lanes, width, 2), plane(stream, lanes, width, 3)
    good = (top <= limit) & (padded == 0)
    return b0, b1, b2, b3, plane(stream, lanes, width, -1) & some, good.to(tl.int32)


@triton.jit
def emit_slowly(planes, rest, stream, length, lanes, target, EMIT: tl.constexpr, ADD: tl.constexpr):
    """EMIT(target, lane, i, q, mask, ADD) for all values of a chunk.

    For those that are short, or wide, or have many tails.
    """
    lane = tl.arange(0, ROW)
    b0, b1, b2, b3, sign = planes
    wide, tails, many, at, rank, apart = rest
    clipped = tl.where(wide > 0, 0, b0 & b1 & b2 & b3)
    for i in range(32):
        m = lane * 0
        if wide > 0:
            for p in range(wide):
                m += ((plane(stream, lanes, wide, p) >> i) & 1).to(tl.int32) << p
        else:
            m = (((b0 >> i) & 1) | (((b1 >> i) & 1) << 1)).to(tl.int32)
            m += ((((b2 >> i) & 1) << 2) | (((b3 >> i) & 1) << 3)).to(tl.int32)
        q = tl.where(((sign >> i) & 1) != 0, -m, m)
        EMIT(target, lane, lane * 0 + i, q, ((clipped >> i) & 1) == 0, ADD)
    r = 0
    while tl.max(ones(clipped), 0) > 0:
        low = clipped & (0 - clipped)
        m = CLIP + (tails & 0x7FFF).to(tl.int32)
        if many > 0:
            place = tl.where(low != 0, at + rank + r, 32 * length)
            m = CLIP + tail(stream, length, place, apart)
        EMIT(target, lane, ones(low - 1), tl.where((sign & low) != 0, -m, m), low != 0, ADD)
        clipped = clipped ^ low
        tails = tails >> TAIL_BITS
        r += 1


@triton.jit
def tail_of(clipped, tails, sign):
    """Of each lane's first value with a tail: where in the chunk, q, and whether there is one."""
    low = clipped & (0 - clipped)
    m = CLIP + (tails & 0x7FFF).to(tl.int32)
    e = first_values() + LANES * ones(low - 1)
    return e, tl.where((sign & low) != 0, -m, m), low != 0
