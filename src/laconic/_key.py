"""Randomness as a function: every draw is a hash of where it is used.

    stream(key) = 64 bits of mix64 over (seed, step, tensor, rank, phase)
    draw(key, p) = mix32(stream(key), p)            p = counter of the draw

Nothing is stateful, so a receiver can regenerate a sender's dither, and a run that resumes at
step t draws what it would have drawn. The 64-bit part runs once per encode, on the host. The
32-bit part runs per element, in every kernel:

    h = p·0x9e3779b1 + k0;  h ^= h >> 16;  h *= 0x7feb352d;  h ^= h >> 15
    h ^= k1;                h *= 0x846ca68b;  h ^= h >> 16

(k0, k1) are the halves of the stream. The rounds are the two-round mix that C. Wellons found by
search (public domain, "hash prospector"); k1 enters between them so that two streams are not
shifted copies of each other. On the plain counter the two rounds are not enough: draws 128 or
1024 apart are visibly dependent in 2^20 pairs (`tests/kernels/test_random.py` shows both).
Stepping by the golden ratio (a Weyl sequence) fixes that at the price of a multiply-add in
place of the add.

One 32-bit draw serves two elements, 16 bits each: element j of a group of 128 takes the low
half of draw j, element j + 64 the high half (see `kernels/_layout.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import NamedTuple

from laconic.errors import ConfigError

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Stream(NamedTuple):
    """The two 32-bit words from which a kernel draws."""

    k0: int
    k1: int


@dataclass(frozen=True, kw_only=True)
class Key:
    """Names one encoding: who encodes what, when, and for which purpose.

    Two encodings that must be independent differ in at least one field. `phase` distinguishes a
    first encoding (0) from an owner's re-encoding or the rounding of a partial sum: reusing a draw
    there would bias the sum.

    >>> Key(seed=0, step=7, tensor=3, rank=1).stream()
    Stream(k0=2935712569, k1=2360678965)
    """

    seed: int = 0
    step: int = 0
    tensor: int = 0
    rank: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MASK64:
                raise ConfigError(
                    f"Key.{field.name} must be an integer from 0 to 2**64 - 1, not {value!r}"
                )

    def stream(self) -> Stream:
        """Hash the five fields into the words a kernel needs."""
        state = 0
        for part in (self.seed, self.step, self.tensor, self.rank, self.phase):
            state = _mix64((state + _GOLDEN) & _MASK64 ^ part)
        return Stream(state & 0xFFFFFFFF, state >> 32)


def seed_of(seed: int, names: str) -> int:
    """A seed for the draws of what has these names: two models with one seed do not draw alike.

    >>> seed_of(0, "generator.weight") != seed_of(0, "critic.weight")
    True
    """
    digest = blake2b(names.encode(), digest_size=8).digest()
    return _mix64((seed + _GOLDEN) & _MASK64 ^ int.from_bytes(digest, "little"))


def _mix64(z: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK64
    return z ^ (z >> 31)
