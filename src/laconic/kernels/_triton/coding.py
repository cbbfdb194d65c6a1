"""Coded sections on the GPU. The format is described in `kernels/_coding.py`.

Encoding takes two kernels. The first has a program a chunk, which writes its stream into a
staging area that has room for the longest; the second, once the ends are known, moves each chunk
to its place and makes the check sums. Decoding is one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic._key import Stream
from laconic.errors import ConfigError
from laconic.kernels._coding import Kind, Section, table
from laconic.kernels._protocol import Coding
from laconic.kernels._triton.bitmap import ROW, TAIL_BITS, scatter, transposed, zeros
from laconic.kernels._triton.chunk import (
    BITMAP,
    BLOCK,
    CHUNK,
    LANES,
    STREAM,
    emit_slowly,
    first_values,
    hashed,
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
from laconic.kernels._triton.group import OPTIONS, words

_SPAN = 256  # words of a chunk that are moved at once
WARPS = 2  # a chunk's: with one, code outgrows the instruction cache; four wait for each other
DECODE_OPTIONS = {**OPTIONS, "num_warps": WARPS}
# branches that hardly ever run would take registers, and so warps, from those that do
ENCODE_OPTIONS = {**DECODE_OPTIONS, "maxnreg": 80}
_KINDS = (Kind.FIXED, Kind.BITMAP)


def encode_integers(q: Tensor, section: Section, coding: Coding) -> None:
    """See `Kernels`."""
    place, staging = chunks((q.numel(),), q), Staging.of(section, q.device)
    _encode[place.grid](
        q,
        *place.tensors,
        *staging.tensors,
        q.numel(),
        CODER=check_coder(coding.kind),
        **place.options,
        **ENCODE_OPTIONS,
    )
    collect(section, staging, place, None, coding.stream)


def decode_integers(section: Section, q: Tensor, coding: Coding, *, limit: int) -> Tensor:
    """See `Kernels`. Nothing waits for the device, so nothing is raised."""
    place = chunks((q.numel(),), q)
    verdict = torch.ones((), device=q.device)
    _decode[place.grid](
        section.ends,
        section.checks,
        section.payload,
        section.payload.numel(),
        q,
        verdict,
        *place.tensors,
        q.numel(),
        *words(coding.stream),
        limit,
        CODER=check_coder(coding.kind),
        **place.options,
        **DECODE_OPTIONS,
    )
    return verdict


def check_coder(kind: Kind) -> int:
    """The coder's number; ConfigError if it has no kernels here."""
    if kind not in _KINDS:
        name = Kind(kind).name.lower().replace("_sparse", "")
        raise ConfigError(f"{name} runs on the CPU; on CUDA use coder=bitmap")
    return int(kind)


@dataclass(frozen=True, eq=False)
class Chunks:
    """Where chunks lie, as launches need it."""

    numel: int
    tensors: tuple[Tensor, Tensor, Tensor]  # start, count, segment
    options: dict[str, int]

    @property
    def grid(self) -> tuple[int]:
        """A program a chunk."""
        return (self.tensors[0].numel(),)


def chunks(parts: tuple[int, ...], x: Tensor) -> Chunks:
    """The chunks of a tensor of these segments."""
    place = _chunks(parts, x.device)
    # a thread loads 16 bytes, of neighbouring lanes, where every chunk starts on such a boundary
    near = 16 // x.element_size() if x.data_ptr() % 16 == 0 else 1
    if len(parts) > 1 and any(start % near for start in parts[:-1]):
        near = 1
    near = min(near, ROW.value // (32 * WARPS))
    return Chunks(x.numel(), place, {"SEGMENTS": int(len(parts) > 1), "NEAR": near})


@lru_cache(maxsize=256)
def _chunks(parts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    place = table(parts)
    start, count, segment = (
        torch.from_numpy(column).to(device) for column in (place.start, place.count, place.segment)
    )
    return start, count, segment


@dataclass(frozen=True, eq=False)
class Staging:
    """Streams before their places are known, with first words and lengths."""

    streams: Tensor
    heads: Tensor
    sizes: Tensor

    @staticmethod
    def of(section: Section, device: torch.device) -> Staging:
        """Room for a section."""
        count = section.ends.numel()
        streams = torch.empty(count * STREAM.value, dtype=torch.int32, device=device)
        heads, sizes = torch.empty((2, count), dtype=torch.int32, device=device)
        return Staging(streams, heads, sizes)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """As launches take them."""
        return self.streams, self.heads, self.sizes


def collect(
    section: Section, staging: Staging, place: Chunks, steps: Tensor | None, stream: Stream
) -> None:
    """Ends, check sums and payload of a section whose streams are staged."""
    torch.cumsum(staging.sizes, 0, dtype=torch.int32, out=section.ends)
    _collect[place.grid](
        *staging.tensors,
        section.ends,
        section.checks,
        section.payload,
        section.payload.numel(),
        staging.heads if steps is None else steps.view(torch.int32),
        *place.tensors,
        place.numel,
        *words(stream),
        STAMPED=steps is not None,
        SEGMENTS=place.options["SEGMENTS"],
        SPAN=_SPAN,
        **OPTIONS,
    )


# --- kernels -------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=["room", "n", "k0", "k1"],
    do_not_specialize_on_alignment=["ends", "checks", "payload", "stamps"],
)
def _collect(
    streams,
    heads,
    sizes,
    ends,
    checks,
    payload,
    room,
    stamps,
    starts,
    counts,
    segments,
    n,
    k0,
    k1,
    STAMPED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Move a chunk to its place; a stream's words are differences of neighbours in staging."""
    c = tl.program_id(0)
    length, head = tl.load(sizes + c), tl.load(heads + c)
    start = tl.load(ends + c).to(tl.uint32).to(tl.int64) - length
    summed = (head & 0xFF) == BITMAP
    _, count, segment = place_of(c, n, starts, counts, segments, SEGMENTS, 1)
    stamp = tl.load(stamps + segment) if STAMPED else 0 * c
    salt = salt_of(c, stamp, count, k0, k1)
    streams += c.to(tl.int64) * STREAM
    total = tl.zeros((SPAN,), tl.uint32)
    for first in range(0, length, SPAN):
        i = first + tl.arange(0, SPAN)
        word = tl.load(streams + i - 1, mask=(i > 0) & (i < length), other=0)
        word -= tl.load(streams + i - 2, mask=(i > 1) & (i < length) & summed, other=0)
        word = tl.where(i == 0, head, word)
        total += tl.where(i < length, hashed(word.to(tl.uint32), i, salt), 0)
        tl.store(payload + start + i, word, mask=(i < length) & (start + i < room))
    tl.store(checks + c, tl.sum(total, 0).to(tl.int32))


@triton.jit
def _integer(source, lane, i, mask):
    """Value i of each lane."""
    q, count = source
    e = lane // LANES * BLOCK + i * LANES + lane % LANES
    return tl.load(q + e, mask=mask & (e < count), other=0).to(tl.int32)


@triton.jit(do_not_specialize=["n"])
def _encode(
    q,
    starts,
    counts,
    segments,
    streams,
    heads,
    sizes,
    n,
    CODER: tl.constexpr,
    SEGMENTS: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Stage the code of a chunk of integers."""
    c = tl.program_id(0)
    start, count, _ = place_of(c, n, starts, counts, segments, SEGMENTS, NEAR)
    q += start
    b0, b1, b2, b3, sign = zeros(), zeros(), zeros(), zeros(), zeros()
    if count == CHUNK:
        b0, b1, b2, b3, sign = _cut(q)
    else:
        lane = tl.arange(0, ROW)
        for i in range(32):
            v = _integer((q, count), lane, lane * 0 + i, lane >= 0)
            b0, b1, b2, b3, sign = with_value(b0, b1, b2, b3, sign, v, i)
    planes, staging = (b0, b1, b2, b3, sign), (streams, heads, sizes)
    write_chunk(c, planes, 0, lanes_of(count), staging, (q, count), _integer, CODER, NEAR)


@triton.jit
def _cut(q):
    """Planes, clipped to 15, and signs of a whole chunk."""
    e = first_values()
    w0, w1, w2, w3, sign = zeros(), zeros(), zeros(), zeros(), zeros()
    for step in range(4):
        at = e + (3 - step) * 128
        minus, other = zeros(), zeros()
        for b in tl.static_range(3, -1, -1):
            u = tl.load(q + at + 16 * b).to(tl.int32)
            v = tl.load(q + at + 16 * b + 64).to(tl.int32)
            w0, w1, w2, w3 = with_pair(w0, w1, w2, w3, u, v, b)
            minus = (minus << 1) | (u.to(tl.uint32) >> 31)
            other = (other << 1) | (v.to(tl.uint32) >> 31)
        sign = (sign << 8) | (other << 4) | minus
    b0, b1, b2, b3 = transposed(w0, w1, w2, w3)
    return b0, b1, b2, b3, sign


@triton.jit
def _put_integer(target, lane, i, q, mask, ADD: tl.constexpr):
    """Value i of each lane."""
    out, count = target
    e = lane // LANES * BLOCK + i * LANES + lane % LANES
    tl.store(out + e, q.to(out.dtype.element_ty), mask=mask & (e < count))


@triton.jit(
    do_not_specialize=["room", "n", "k0", "k1", "limit"],
    do_not_specialize_on_alignment=["ends", "checks", "payload"],
)
def _decode(
    ends,
    checks,
    payload,
    room,
    out,
    verdict,
    starts,
    counts,
    segments,
    n,
    k0,
    k1,
    limit,
    CODER: tl.constexpr,
    SEGMENTS: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Decode a chunk of integers; the verdict on a bad one is NaN."""
    c = tl.program_id(0)
    start, count, _ = place_of(c, n, starts, counts, segments, SEGMENTS, NEAR)
    lanes = lanes_of(count)
    salt = salt_of(c, 0 * c, count, k0, k1)
    stream, length, head, good = open_chunk(ends, checks, payload, room, c, lanes, salt)
    good = good & ((head >> 16) == 0).to(tl.int32)
    planes, good, rest = read_chunk(stream, length, head, good, count, lanes, limit, CODER, NEAR)
    tl.store(verdict, float("nan"), mask=good == 0)
    out += start
    b0, b1, b2, b3, sign = planes
    wide, tails, many, _at, _rank, _apart = rest
    if (count == CHUNK) & (wide == 0) & (many == 0):
        e = first_values()
        clipped = b0 & b1 & b2 & b3
        first, q, there = tail_of(clipped, tails, sign)
        second, r, also = tail_of(clipped & (clipped - 1), tails >> TAIL_BITS, sign)
        w0, w1, w2, w3 = transposed(b0, b1, b2, b3)
        for a in range(4):
            for b in tl.static_range(4):
                pair = (w0, w1, w2, w3)[b]
                u, v = (pair & 15).to(tl.int32), ((pair >> 4) & 15).to(tl.int32)
                u = tl.where(((sign >> b) & 1) != 0, -u, u)
                v = tl.where(((sign >> (b + 4)) & 1) != 0, -v, v)
                to = out + e + a * 128 + 16 * b
                tl.store(to, u.to(out.dtype.element_ty))
                tl.store(to + 64, v.to(out.dtype.element_ty))
            w0, w1, w2, w3, sign = w0 >> 8, w1 >> 8, w2 >> 8, w3 >> 8, sign >> 8
        if tl.max(clipped, 0) > 0:  # stored clipped until here
            tl.debug_barrier()
            scatter(out, first, q.to(out.dtype.element_ty), there, NEAR)
            scatter(out, second, r.to(out.dtype.element_ty), also, NEAR)
    else:
        emit_slowly(planes, rest, stream, length, lanes, (out, count), _put_integer, False)
