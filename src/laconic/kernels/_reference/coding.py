"""Coded sections in plain Python, chunk by chunk; the format is in `kernels/_coding.py`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic._key import Stream
from laconic.errors import WireError
from laconic.kernels._coding import (
    BLOCK,
    CHUNK,
    LANES,
    Kind,
    Section,
    Table,
    plane_words,
    table,
)
from laconic.kernels._protocol import Coding
from laconic.kernels._reference import bitmap, elias, rans
from laconic.kernels._reference.group import dither, draws

_CPU = torch.device("cpu")


def encode_integers(q: Tensor, section: Section, coding: Coding) -> None:
    """See `Kernels`."""
    chunks = [part.cpu().numpy().astype(np.int16) for part in q.split(CHUNK)]
    none = np.zeros(len(chunks), np.uint32)
    encode_section(chunks, [0] * len(chunks), none, coding, section)


def decode_integers(section: Section, q: Tensor, coding: Coding, *, limit: int) -> None:
    """See `Kernels`."""
    where = table((q.numel(),))
    none = np.zeros(where.chunks, np.uint32)
    chunks, marks = decode_section(section, where, none, coding, limit)
    if any(marks):
        raise WireError("the wire's chunks carry marks that its codec does not write")
    q.copy_(torch.from_numpy(np.concatenate(chunks)).to(q.dtype))


def encode_section(
    chunks: list[np.ndarray],
    marks: list[int],
    stamps: np.ndarray,
    coding: Coding,
    section: Section,
) -> None:
    """Code chunks; `stamps` are those of their segments."""
    salts = draws(coding.stream, len(chunks), _CPU).numpy() ^ stamps
    words: list[int] = []
    ends, checks = [], []
    for c, q in enumerate(chunks):
        width = int(np.abs(q.astype(np.int32)).max()).bit_length()
        kind, own = _streams(q, c, coding)
        if own is None or len(own) + 1 >= plane_words(len(q), width):
            kind, own = Kind.FIXED | width << 8, _planes(q, width)
        chunk = [kind | marks[c] << 16, *own]
        words += chunk
        ends.append(len(words))
        checks.append(_check(chunk, int(salts[c]) + len(q)))
    for part, values in ((section.ends, ends), (section.checks, checks), (section.payload, words)):
        part[: len(values)].copy_(_tensor(values))


def decode_section(
    section: Section, where: Table, stamps: np.ndarray, coding: Coding, limit: int
) -> tuple[list[np.ndarray], list[int]]:
    """Integers and marks of all chunks."""
    ends, checks, words = (
        part.cpu().numpy().view(np.uint32).tolist()
        for part in (section.ends, section.checks, section.payload)
    )
    salts = draws(coding.stream, where.chunks, _CPU).numpy() ^ stamps
    integers, marks = [], []
    for c in range(where.chunks):
        chunk, n = words[ends[c - 1] if c else 0 : ends[c]], int(where.count[c])
        if not chunk or _check(chunk, int(salts[c]) + n) != checks[c]:
            raise WireError(
                f"chunk {c} of the wire is damaged, or the key is not the one it was encoded with"
            )
        q = _decode(chunk, n, c, coding)
        if len(q) != n or np.abs(q.astype(np.int32)).max() > limit:
            raise WireError(f"chunk {c} of the wire is not what an encoder writes")
        integers.append(q)
        marks.append(chunk[0] >> 16)
    return integers, marks


def _streams(q: np.ndarray, c: int, coding: Coding) -> tuple[int, list[int] | None]:
    """The coder's own stream of a chunk and its kind."""
    kind, form = coding.kind, coding.form
    if kind == Kind.ELIAS_SPARSE:
        return elias.encode(q, form)
    if kind == Kind.RANS:
        return kind, rans.encode(q, None if form else _dither(c, len(q), coding.stream))
    return kind, bitmap.encode(q) if kind == Kind.BITMAP else None


def _decode(chunk: list[int], n: int, c: int, coding: Coding) -> np.ndarray:
    kind, width = chunk[0] & 0xFF, chunk[0] >> 8 & 0xFF
    if kind == Kind.FIXED:
        return _from_planes(chunk[1:], n, width)
    if kind == Kind.ELIAS_SPARSE or kind == Kind.ELIAS_DENSE:
        return elias.decode(chunk[1:], n, kind)
    if kind == Kind.RANS:
        return rans.decode(chunk[1:], n, _dither(c, n, coding.stream))
    return bitmap.decode(chunk[1:], n)


def _dither(c: int, n: int, stream: Stream) -> np.ndarray:
    """r of a chunk's values."""
    groups = CHUNK // 128
    return dither(stream, (c + 1) * groups, 16, _CPU)[c * groups :].reshape(-1)[:n].numpy()


def _planes(q: np.ndarray, width: int) -> list[int]:
    """The plane form of a chunk."""
    if not width:
        return []
    blocks = np.concatenate([q.astype(np.int32), np.zeros(-len(q) % BLOCK, np.int32)])
    lanes = blocks.reshape(-1, 1, BLOCK // LANES, LANES)
    planes = [lanes < 0, *((np.abs(lanes) >> p) & 1 for p in range(width))]
    bits = np.concatenate(planes, axis=1).astype(np.uint32)  # block, plane, bit, lane
    places = np.uint32(1) << np.arange(32, dtype=np.uint32)
    return (bits * places[None, None, :, None]).sum(2).reshape(-1).tolist()


def _from_planes(words: list[int], n: int, width: int) -> np.ndarray:
    if not width:
        return np.zeros(n, np.int16)
    planes = np.array(words, np.uint32).reshape(-1, 1 + width, 1, LANES)
    bits = (planes >> np.arange(32, dtype=np.uint32)[None, None, :, None]) & 1
    m = sum(bits[:, 1 + p].astype(np.int32) << p for p in range(width))
    return np.where(bits[:, 0], -m, m).reshape(-1)[:n].astype(np.int16)


def _check(words: list[int], salt: int) -> int:
    place = np.arange(len(words), dtype=np.uint32) * np.uint32(0x9E3779B1)
    h = np.array(words, np.uint32) ^ (np.uint32(salt & 0xFFFFFFFF) + place)
    h = (h ^ (h >> 16)) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * np.uint32(0x846CA68B)
    return int((h ^ (h >> 16)).sum(dtype=np.uint32))


def _tensor(words: list[int]) -> Tensor:
    return torch.from_numpy(np.array(words, np.uint32).view(np.int32))
