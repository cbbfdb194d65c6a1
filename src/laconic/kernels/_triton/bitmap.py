"""The bitmap coder on the GPU. The stream is described in `_reference/bitmap.py`.

A program holds a chunk as tensors of 256 words, one a lane of 32 values (`kernels/_coding.py`):
four bit planes of magnitudes, clipped to 15, and a sign plane. As in `_numba/bitmap.py`, counting
the planes down gives the unary planes, and all else is word logic. Bits under a mask are brought
together (Warren, Hacker's Delight, 7-4) in two steps that cost less than his five rounds: three
rounds within bytes, then each byte is shifted to where the ones below it end.

Where fields meet, several lanes share a word of the stream. A word is the sum of what lanes put
there, and every word is finished by one lane, the one whose field reaches its end; that lane
stores the sum of all words up to there, a prefix sum over lanes. The difference of neighbours
(`coding.py` takes it) is the word. So no lane waits for another, and nothing is set to zero first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels import _coding

ROW: tl.constexpr = tl.constexpr(_coding.CHUNK // 32)  # lanes a chunk
CLIP: tl.constexpr = tl.constexpr(_coding.CLIP)
TAIL_BITS: tl.constexpr = tl.constexpr(_coding.TAIL_BITS)
_SPARSE: tl.constexpr = tl.constexpr(8)  # ones a lane up to which one by one is faster
_TAILS: tl.constexpr = tl.constexpr(5)  # planes of tails made at once: registers


# --- word logic ----------------------------------------------------------------------------


@triton.jit
def zeros():
    """A word a lane."""
    return tl.zeros((ROW,), tl.uint32)


@triton.jit
def inverse(m):
    """All bits flipped. (The interpreter cannot do ~ of unsigned words.)"""
    return m ^ 0xFFFFFFFF


@triton.jit
def ones(m):
    """How many bits are set."""
    n = m - ((m >> 1) & 0x55555555)
    n = (n & 0x33333333) + ((n >> 2) & 0x33333333)
    return ((((n + (n >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def rotated(w, by):
    """Bits moved up (down, if `by` is negative), and around."""
    return (w << (by & 31)) | (w >> (-by & 31))


@triton.jit
def transposed(a, b, c, d):
    """Bit k of each group of four bits of word p, from bit p of word k."""
    a, b = (a & 0x55555555) | ((b & 0x55555555) << 1), ((a >> 1) & 0x55555555) | (b & 0xAAAAAAAA)
    c, d = (c & 0x55555555) | ((d & 0x55555555) << 1), ((c >> 1) & 0x55555555) | (d & 0xAAAAAAAA)
    a, c = (a & 0x33333333) | ((c & 0x33333333) << 2), ((a >> 2) & 0x33333333) | (c & 0xCCCCCCCC)
    b, d = (b & 0x33333333) | ((d & 0x33333333) << 2), ((b >> 2) & 0x33333333) | (d & 0xCCCCCCCC)
    return a, b, c, d


@triton.jit
def _odd_below(k):
    """Which bits have an odd number of bits of k at or below them in their byte."""
    k = k ^ ((k << 1) & 0xFEFEFEFE)
    k = k ^ ((k << 2) & 0xFCFCFCFC)
    return k ^ ((k << 4) & 0xF0F0F0F0)


@triton.jit
def moves(m):
    """What compressing and expanding under a mask need.

    The bits that move by 1, 2 and 4 within their bytes, and in byte i the ones of bytes 0 .. i.
    """
    n = m - ((m >> 1) & 0x55555555)
    n = (n & 0x33333333) + ((n >> 2) & 0x33333333)
    n = ((n + (n >> 4)) & 0x0F0F0F0F) * 0x01010101
    k = (inverse(m) << 1) & 0xFEFEFEFE
    odd = _odd_below(k)
    a = odd & m
    m = (m ^ a) | (a >> 1)
    k = k & inverse(odd)
    odd = _odd_below(k)
    b = odd & m
    m = (m ^ b) | (b >> 2)
    return a, b, _odd_below(k & inverse(odd)) & m, n


@triton.jit
def compress(x, a, b, c, n):
    """Bits of x (none outside the mask) brought together at the low end."""
    t = x & a
    x = (x ^ t) | (t >> 1)
    t = x & b
    x = (x ^ t) | (t >> 2)
    t = x & c
    x = (x ^ t) | (t >> 4)
    low = (x & 0xFF) | (((x >> 8) & 0xFF) << (n & 0xFF))
    return low | (((x >> 16) & 0xFF) << ((n >> 8) & 0xFF)) | ((x >> 24) << ((n >> 16) & 0xFF))


@triton.jit
def expand(x, mask, a, b, c, n):
    """The inverse: low bits of x back to where the mask is."""
    low = (x & 0xFF) | (((x >> (n & 0xFF)) & 0xFF) << 8)
    x = low | (((x >> ((n >> 8) & 0xFF)) & 0xFF) << 16) | ((x >> ((n >> 16) & 0xFF)) << 24)
    x = (x & inverse(c)) | ((x << 4) & c)
    x = (x & inverse(b)) | ((x << 2) & b)
    return ((x & inverse(a)) | ((x << 1) & a)) & mask


@triton.jit
def compressed(x, mask, most):
    """Compress under a mask used once, with up to `most` ones a lane."""
    if most > _SPARSE:
        a, b, c, n = moves(mask)
        field = compress(x, a, b, c, n)
    else:
        field = x * 0
        for r in range(most):
            low = mask & (0 - mask)
            field += tl.minimum(x & low, 1) << r
            mask = mask ^ low
    return field


@triton.jit
def expanded(x, mask, most):
    """Expand under a mask used once, with up to `most` ones a lane."""
    if most > _SPARSE:
        a, b, c, n = moves(mask)
        row = expand(x, mask, a, b, c, n)
    else:
        row = x * 0
        for r in range(most):
            low = mask & (0 - mask)
            row += low * ((x >> r) & 1)
            mask = mask ^ low
    return row


# --- access where each lane has its own place ----------------------------------------------
#
# Triton would first move lanes between threads, so that neighbours access neighbours. Splitting
# off lanes until a thread has every 32nd of those left keeps all where they are; NEAR is how many
# neighbours a thread starts with, which follows from how the values were loaded.


@triton.jit
def _halves(x):
    return tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))


@triton.jit
def scatter(ptr, at, value, mask, NEAR: tl.constexpr):
    """ptr[at] = value under a mask."""
    if NEAR == 1:
        tl.store(ptr + at, value, mask=mask)
    else:
        at, next_at = _halves(at)
        value, next_value = _halves(value)
        mask, next_mask = _halves(mask)
        scatter(ptr, at, value, mask, NEAR // 2)
        scatter(ptr, next_at, next_value, next_mask, NEAR // 2)


@triton.jit
def gather(ptr, at, end, NEAR: tl.constexpr):
    """ptr[at], and zero from `end` on."""
    if NEAR == 1:
        return tl.load(ptr + at, mask=at < end, other=0)
    else:
        at, next_at = _halves(at)
        value, next_value = gather(ptr, at, end, NEAR // 2), gather(ptr, next_at, end, NEAR // 2)
        return tl.reshape(tl.join(value, next_value), (2 * at.shape[0],))


# --- streams -------------------------------------------------------------------------------


@triton.jit
def _append(out, end, total, field, size, upto, NEAR: tl.constexpr):
    """Put the lanes' fields behind bit `end`; `upto` sums their sizes. Returns the words' sum."""
    at = end + upto - size
    wide = field.to(tl.uint64) << (at & 31).to(tl.uint64)
    low, high = wide.to(tl.uint32), (wide >> 32).to(tl.uint32)
    both = low + high
    sums = tl.cumsum(both, 0) + total - high
    scatter(out, at >> 5, sums.to(tl.int32), (at & 31) + size >= 32, NEAR)
    return total + tl.sum(both, 0)


@triton.jit
def stream_bits(b0, b1, b2, b3):
    """Length of a chunk's stream, but for its first bit a lane."""
    some, full = b0 | b1 | b2 | b3, b0 & b1 & b2 & b3
    levels = ones(b0) + 2 * ones(b1) + 4 * ones(b2) + 8 * ones(b3)
    bits = tl.where(some != 0, 32, 0) + ones(some) + levels + (TAIL_BITS - 1) * ones(full)
    return tl.sum(bits, 0)


@triton.jit
def put_stream(
    out, b0, b1, b2, b3, sign, tails, lanes, source, EXACT: tl.constexpr, NEAR: tl.constexpr
):
    """Write the stream of a chunk that is not all zeros: at out[j], the sum of words 0 .. j.

    `tails` holds what the first two values of a lane that exceed the planes have above 15, 15
    bits each. EXACT(source, lane, i, mask) gives value i of a lane, for when that is not enough.
    """
    lane = tl.arange(0, ROW)
    mask = b0 | b1 | b2 | b3
    used = (mask != 0).to(tl.int32)
    word = tl.sum(tl.reshape(used.to(tl.uint32) << (lane & 31), (ROW // 32, 32)), 1)
    w = tl.arange(0, ROW // 32)
    tl.store(out + w, tl.cumsum(word, 0).to(tl.int32), mask=32 * w + 32 <= lanes)
    total = tl.sum(word, 0)
    upto = 32 * tl.cumsum(used, 0)
    total = _append(out, lanes, total, mask, 32 * used, upto, NEAR)
    end = lanes + 32 * tl.sum(used, 0)
    size = ones(mask)
    upto, count = tl.cumsum(size, 0), tl.sum(size, 0)
    a, b, c, n = moves(mask)
    total = _append(out, end, total, compress(sign, a, b, c, n), size, upto, NEAR)
    end += count
    b0, b1, b2, b3 = count_down(mask, b0, b1, b2, b3)
    mask = b0 | b1 | b2 | b3
    total = _append(out, end, total, compress(mask, a, b, c, n), size, upto, NEAR)
    end += count
    size = ones(mask)
    most = tl.max(size, 0)
    level = 2
    while (most > 0) & (level < CLIP):
        b0, b1, b2, b3 = count_down(mask, b0, b1, b2, b3)
        deeper = b0 | b1 | b2 | b3
        field = compressed(deeper, mask, most)
        total = _append(out, end, total, field, size, tl.cumsum(size, 0), NEAR)
        end += tl.sum(size, 0)
        mask = deeper
        size = ones(mask)
        most = tl.max(size, 0)
        level += 1
    if most > 0:
        upto, count = tl.cumsum(size, 0), tl.sum(size, 0)
        bits = TAIL_BITS * count
        if (most <= 2) & (bits <= ROW):
            field = _few_tails(lane, tails, size, upto - size, count)
            real = (lane < bits).to(tl.int32)
            total = _append(out, end, total, field, real, tl.minimum(lane + 1, bits), NEAR)
            end += bits
        else:
            for first in range(0, TAIL_BITS, _TAILS):
                f0, f1, f2, f3, f4 = _many_tails(lane, mask, most, first, source, EXACT)
                for _ in range(_TAILS):
                    total = _append(out, end, total, f0, size, upto, NEAR)
                    end += count
                    f0, f1, f2, f3, f4 = f1, f2, f3, f4, f0
    tl.store(out + (end >> 5), total.to(tl.int32), mask=(end & 31) > 0)


@triton.jit
def count_down(mask, b0, b1, b2, b3):
    """Magnitudes under the mask, minus one."""
    b0, mask = b0 ^ mask, mask & inverse(b0)
    b1, mask = b1 ^ mask, mask & inverse(b1)
    b2, mask = b2 ^ mask, mask & inverse(b2)
    return b0, b1, b2, b3 ^ mask


@triton.jit
def count_up(mask, b0, b1, b2, b3):
    """Magnitudes under the mask, plus one."""
    b0, mask = b0 ^ mask, mask & b0
    b1, mask = b1 ^ mask, mask & b1
    b2, mask = b2 ^ mask, mask & b2
    return b0, b1, b2, b3 ^ mask


@triton.jit
def _few_tails(lane, tails, size, rank, count):
    """All tails of a chunk, a bit a lane: of plane lane // count, of value lane % count."""
    field = zeros()
    for r in range(count):
        rest = tl.where((size > 0) & (rank == r), tails & 0x7FFF, 0)
        rest = tl.sum(rest + tl.where((size > 1) & (rank + 1 == r), tails >> TAIL_BITS, 0), 0)
        bit = (rest >> tl.minimum(lane // count, 31).to(tl.uint32)) & 1
        field += tl.where(lane % count == r, bit, 0)
    return field


@triton.jit
def _many_tails(lane, mask, most, first, source, EXACT: tl.constexpr):
    """Fields of five planes, from `first` on, of what the values under the mask have above 15."""
    f0, f1, f2, f3, f4 = zeros(), zeros(), zeros(), zeros(), zeros()
    for r in range(most):
        low = mask & (0 - mask)
        q = EXACT(source, lane, ones(low - 1), low != 0)
        rest = (tl.maximum(tl.abs(q) - CLIP, 0) >> first).to(tl.uint32)
        f0 += (rest & 1) << r
        f1 += ((rest >> 1) & 1) << r
        f2 += ((rest >> 2) & 1) << r
        f3 += ((rest >> 3) & 1) << r
        f4 += ((rest >> 4) & 1) << r
        mask = mask ^ low
    return f0, f1, f2, f3, f4


@triton.jit
def _take(words, length, at, size, NEAR: tl.constexpr):
    """The fields of `size` bits at the lanes' places; zeros behind the stream's end."""
    w = at >> 5
    low = gather(words, tl.where(size > 0, w, length), length, NEAR)
    high = gather(words, tl.where((at & 31) + size > 32, w + 1, length), length, NEAR)
    both = low.to(tl.uint32).to(tl.uint64) | (high.to(tl.uint32).to(tl.uint64) << 32)
    field = (both >> (at & 31).to(tl.uint64)).to(tl.uint32)
    return tl.where(size < 32, field & ((1 << size).to(tl.uint32) - 1), field)


@triton.jit
def get_stream(words, length, lanes, NEAR: tl.constexpr):
    """Planes and signs of a stream of `length` words; 1 if an encoder could have written it.

    Then, of tails: the bit where they start, each lane's rank (how many precede its first), how
    many there are, and the most in a lane. Plane p of tail r is bit start + p·count + r.
    """
    lane = tl.arange(0, ROW)
    bits = 32 * length
    used = (gather(words, lane >> 5, length, NEAR) >> (lane & 31)) & 1
    used = tl.where(lane < lanes, used, 0)
    size = 32 * used
    b0 = _take(words, length, lanes + tl.cumsum(size, 0) - size, size, NEAR)
    broken = tl.max(tl.where(b0 == 0, used, 0), 0)
    end = lanes + tl.sum(size, 0)
    size = ones(b0)
    upto, count, most = tl.cumsum(size, 0), tl.sum(size, 0), tl.max(size, 0)
    a, b, c, n = moves(b0)
    sign = expand(_take(words, length, end + upto - size, size, NEAR), b0, a, b, c, n)
    end += count
    mask = expand(_take(words, length, end + upto - size, size, NEAR), b0, a, b, c, n)
    end += count
    broken = tl.where((most == 0) | (end > bits), 1, broken)
    b0, b1, b2, b3 = count_up(mask, b0, zeros(), zeros(), zeros())
    size = ones(mask)
    most = tl.max(size, 0)
    level = 2
    while (most > 0) & (level < CLIP):
        field = _take(words, length, end + tl.cumsum(size, 0) - size, size, NEAR)
        end += tl.sum(size, 0)
        mask = expanded(field, mask, most)
        b0, b1, b2, b3 = count_up(mask, b0, b1, b2, b3)
        size = ones(mask)
        most = tl.max(size, 0)
        level += 1
    rank, count = tl.cumsum(size, 0) - size, tl.sum(size, 0)
    tails = end
    end += TAIL_BITS * count
    last = tl.load(words + (end >> 5), mask=(end >> 5) < length, other=0).to(tl.uint32)
    over = last >> (end & 31).to(tl.uint32)
    good = (broken == 0) & ((end + 31) >> 5 == length) & (((end & 31) == 0) | (over == 0))
    return b0, b1, b2, b3, sign, good.to(tl.int32), tails, rank, count, most


@triton.jit
def few_tails(words, length, at, rank, count, size):
    """What the first two values of each lane with more than 15 have above, 15 bits each; the most.

    Scalar by scalar: there are few, and lanes without any need not look at all planes.
    """
    tails = zeros()
    top = 0
    p = tl.arange(0, 16)
    for r in range(count):
        place = at + r + p * count
        mask = (p < TAIL_BITS) & (place >> 5 < length)
        word = tl.load(words + (place >> 5), mask=mask, other=0)
        rest = tl.sum(((word >> (place & 31)) & 1) << p, 0)
        tails += tl.where((size > 0) & (rank == r), rest, 0).to(tl.uint32)
        tails += tl.where((size > 1) & (rank + 1 == r), rest << TAIL_BITS, 0).to(tl.uint32)
        top = tl.maximum(top, rest)
    return tails, top


@triton.jit
def tail(words, length, at, count):
    """What a value of each lane has above 15: bits at `at`, and each `count` further."""
    rest = at * 0
    for p in range(TAIL_BITS):
        word = tl.load(words + (at >> 5), mask=(at >> 5) < length, other=0)
        rest += ((word >> (at & 31)) & 1) << p
        at += count
    return rest
