"""The bitmap coder, in NumPy: which values are not zero, then signs, then levels, plane by plane.

A chunk of `count` values has L = 16·ceil(count/512) lanes of 32 (`kernels/_coding.py`). With m the
magnitudes, fields follow each other without gaps, for lane 0, 1, .. L-1 in turn:

    1. one bit a lane: has it a value that is not zero?
    2. for lanes that have: 32 bits, m ≥ 1
    3. signs (1 = negative) of the values with m ≥ 1, in order
    4. for k = 2, 3, .. 15: m ≥ k, one bit for each value with m ≥ k - 1; ends after a plane
       without ones
    5. if there are values with m ≥ 15: 15 planes of the bits of m - 15, one bit for each of them

So a value costs 1/32 + [lane is used] + [m ≥ 1]·(1 + m) bits up to m = 14, and 30 bits more than a
zero above. Every step is word logic, population counts and prefix sums.

>>> words = encode(np.array([0, -1, 2], dtype=np.int16))
>>> [bin(word) for word in words]
['0b110000000000000110', '0b10000000000000000', '0b1010000000000000000']
"""

from __future__ import annotations

import numpy as np

from laconic.kernels._coding import BLOCK, CLIP, LANES, TAIL_BITS


def encode(q: np.ndarray) -> list[int]:
    """The stream of a chunk, in words."""
    lanes = _lanes(q)
    m, fields = np.abs(lanes), []
    used = (m > 0).any(1)
    fields.append(used)
    fields.append((m > 0)[used].ravel())
    fields.append((lanes < 0)[m > 0])
    for k in range(2, CLIP + 1):
        if not (m >= k - 1).any():
            break
        fields.append((m >= k)[m >= k - 1])
    if (m >= CLIP).any():
        for plane in range(TAIL_BITS):
            fields.append(((m - CLIP) >> plane & 1)[m >= CLIP])
    return words_of(np.concatenate(fields).astype(np.uint8))


def decode(words: list[int], count: int) -> np.ndarray:
    """The integers of a chunk (of a stream that an encoder wrote)."""
    bits = _Bits(words)
    rows = -(-count // BLOCK) * LANES
    used = bits.take(rows).astype(bool)
    mask = np.zeros((rows, 32), bool)
    mask[used] = bits.take(32 * int(used.sum())).reshape(-1, 32)
    minus = np.zeros(mask.shape, bool)
    minus[mask] = bits.take(int(mask.sum()))
    m = mask.astype(np.int32)
    for _ in range(2, CLIP + 1):
        if not mask.any():
            break
        deeper = np.zeros_like(mask)
        deeper[mask] = bits.take(int(mask.sum()))
        m += deeper
        mask = deeper
    if mask.any():
        for plane in range(TAIL_BITS):
            m[mask] += bits.take(int(mask.sum())).astype(np.int32) << plane
    q = np.where(minus, -m, m).reshape(-1, LANES, 32).transpose(0, 2, 1).reshape(-1)
    return q[:count].astype(np.int16)


def words_of(bits: np.ndarray) -> list[int]:
    """Bits, low end first, as 32-bit words."""
    padded = np.concatenate([bits, np.zeros(-len(bits) % 32, np.uint8)])
    return np.packbits(padded, bitorder="little").view("<u4").tolist()


def _lanes(q: np.ndarray) -> np.ndarray:
    """(lanes, 32) values of a chunk, filled up with zeros."""
    padded = np.concatenate([q.astype(np.int32), np.zeros(-len(q) % BLOCK, np.int32)])
    return padded.reshape(-1, BLOCK // LANES, LANES).transpose(0, 2, 1).reshape(-1, 32)


class _Bits:
    def __init__(self, words: list[int]) -> None:
        self.bits = np.unpackbits(np.array(words, "<u4").view(np.uint8), bitorder="little")
        self.at = 0

    def take(self, count: int) -> np.ndarray:
        self.at += count
        return self.bits[self.at - count : self.at]
