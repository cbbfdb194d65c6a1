"""Elias omega codes of a chunk's integers (Elias 1975; QSGD: Alistarh et al. 2017).

omega(k) of k ≥ 1:  1. start with "0";  2. while k > 1 put binary(k) in front, k ← its length - 1.
Read: N = 1; while the next bit is 1, that bit and N more are the new N; drop the 0.

    >>> omega(1), omega(2), omega(10)
    ('0', '100', '1110100')

A stream is one of two codes, filled up with zeros to whole words; first bit lowest:

    sparse   number of non-zeros (14 bits, low first), then for each of them
             omega(gap to the non-zero before, or to position -1) | sign | omega(|value|)
    dense    for each value omega(|value| + 1) | sign, unless it is zero

    >>> sparse(np.array([0, -2]))[14:], dense(np.array([0, -2]))
    ('1001100', '01101')

Differs from the paper: the number of non-zeros is sent, because padding would decode to more of
them; the scale is not part of the stream.
"""

from __future__ import annotations

import numpy as np

from laconic.errors import WireError
from laconic.kernels._coding import MAX_MAGNITUDE, Kind

HEADER = 14


def omega(k: int) -> str:
    """The code word of k ≥ 1, in the order of reading."""
    code = "0"
    while k > 1:
        code = f"{k:b}{code}"
        k = k.bit_length() - 1
    return code


def sparse(q: np.ndarray) -> str:
    """The sparse code."""
    places = np.flatnonzero(q)
    bits = [f"{len(places):0{HEADER}b}"[::-1]]
    for gap, v in zip(np.diff(places, prepend=-1), q[places], strict=True):
        bits += omega(int(gap)), "01"[int(v < 0)], omega(abs(int(v)))
    return "".join(bits)


def dense(q: np.ndarray) -> str:
    """The dense code."""
    return "".join(omega(abs(v) + 1) + ("01"[v < 0] if v else "") for v in q.tolist())


def encode(q: np.ndarray, form: int = 0) -> tuple[Kind, list[int]]:
    """Kind and words of a stream. Form 0: the shorter code (or sparse), 1: sparse, 2: dense."""
    kind, bits = Kind.ELIAS_SPARSE, sparse(q)
    if form == 2 or (form == 0 and len(dense(q)) < len(bits)):
        kind, bits = Kind.ELIAS_DENSE, dense(q)
    return kind, [int(bits[i : i + 32][::-1], 2) for i in range(0, len(bits), 32)]


def decode(words: list[int], count: int, kind: int) -> np.ndarray:
    """The integers of a stream; WireError if no encoder writes it."""
    stream = _Bits("".join(f"{word:032b}"[::-1] for word in words))
    q = np.zeros(count, np.int16)
    if kind == Kind.ELIAS_SPARSE:
        place = -1
        for _ in range(int(stream.take(HEADER)[::-1], 2)):
            place += stream.omega()
            if place >= count:
                raise WireError("an Elias code has a value behind the end of its chunk")
            minus = stream.take(1) == "1"
            q[place] = _value(stream.omega(), minus)
    else:
        for place in range(count):
            level = stream.omega() - 1
            q[place] = _value(level, level > 0 and stream.take(1) == "1")
    stream.finish()
    return q


def lengths(q: np.ndarray) -> dict[str, int]:
    """Bits of the code words alone, as the paper counts them: any number of integers."""
    size = np.array([0, *(len(omega(k)) for k in range(1, max(len(q), MAX_MAGNITUDE) + 2))])
    places, level = np.flatnonzero(q), np.abs(q.astype(np.int64))
    every = int(size[level + 1].sum())
    gaps = int(size[np.diff(places, prepend=-1)].sum())
    return {
        "dense, all signs": every + len(q),
        "dense": every + len(places),
        "sparse": gaps + len(places) + int(size[level[places]].sum()),
    }


def _value(level: int, minus: bool) -> int:
    if level > MAX_MAGNITUDE:
        raise WireError(f"an Elias code has a level of {level}, above {MAX_MAGNITUDE}")
    return -level if minus else level


class _Bits:
    """Bits of a stream, taken one after another."""

    def __init__(self, bits: str) -> None:
        self.bits, self.place = bits, 0

    def take(self, count: int) -> str:
        """The next bits."""
        taken = self.bits[self.place : self.place + count]
        if len(taken) < count:
            raise WireError("an Elias code ends in the middle")
        self.place += count
        return taken

    def omega(self) -> int:
        """The number of the next code word."""
        k = 1
        while self.take(1) == "1":
            k = int("1" + self.take(k), 2)
        return k

    def finish(self) -> None:
        """What is left must be padding: less than a word of zeros."""
        rest = self.bits[self.place :]
        if len(rest) >= 32 or "1" in rest:
            raise WireError("an Elias code has bits behind its end")
