"""What all coders agree on: chunks, their table, their check sums, and bit planes.

Integers are coded in chunks of 8192 (the last of a segment may be shorter; it is filled up with
zeros). A coded section is a row of 32-bit little-endian words:

    ends[C] | checks[C] | chunk 0 | chunk 1 | ... | chunk C-1

ends[c] is the number of words of chunks 0 .. c, so chunks are found, coded and decoded in any
order. A chunk is one word  kind | width << 8 | marks << 16  and then a stream of its kind; marks
are 16 bits that belong to the codec (one for each block of 512). A coder whose stream comes out
longer than bit planes sends bit planes instead, so that no chunk is longer than `plane_words`.

Every check is a sum over the chunk's words w_i, which any order of adding gives:

    check = Σ_i fmix(w_i ^ (salt + i·0x9E3779B1)) mod 2^32
    salt  = (draw c of the key's stream ^ stamp) + number of values

fmix is a bijection, so a change within one word is always seen, any other with probability
1 - 2^-32; the salt makes a wrong key, step (the stamp), place or length show, too.

Bits of a stream are counted from the low end of its first word.

A block of 512 values is seen as 16 lanes of 32: value 16·i + g is bit i of lane g, so that
vector registers and GPU lanes make the words of a bit plane without moving bits between lanes.
The plane form (kind FIXED) of a chunk with the largest magnitude M has width = bit_length(M);
each block is a sign plane (16 words) and `width` magnitude planes, low bits first; nothing at
all for width 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

CHUNK = 8192
BLOCK = 512
LANES = 16
BLOCKS = CHUNK // BLOCK  # blocks a chunk
MAX_MAGNITUDE = (1 << 15) - 1  # integers are coded from int16
CLIP = 15  # levels that the bitmap writes in unary
TAIL_BITS = 15  # and the bits of what lies above
LARGEST = 32000  # magnitude that ecdq's steps allow; one more after rounding
SQUARED_STEP = 12 << 16  # the units of a block's expected error
SAMPLE = 256  # blocks of a segment that ecdq looks at to find the step for an error
EVALUATIONS = 8  # steps that it tries on them
TOLERANCE = 1e-9  # of an error's limit: sums of floats are rounded
LEVELS = 64  # binary exponents of blocks' energies that it tells apart
SCALINGS = 4  # times that the step which is safe without looking is scaled up
UNIT = 1 << 24  # weight of a block that is just not sampled for sure
SCRATCH_WORDS = CHUNK + 64  # no coder writes more for a chunk before it gives up
WORK_WORDS = SCRATCH_WORDS + CHUNK  # scratch of a coder: the stream, and whatever else it needs


class Kind(IntEnum):
    """How a chunk is written."""

    FIXED = 0
    BITMAP = 1
    ELIAS_SPARSE = 2
    ELIAS_DENSE = 3
    RANS = 4


@dataclass(frozen=True, eq=False)
class Table:
    """Where the chunks of a tensor lie: chunks do not cross segments."""

    start: np.ndarray  # int64, first element
    count: np.ndarray  # int32, number of elements
    segment: np.ndarray  # int32

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self.start)


@lru_cache(maxsize=256)
def table(segments: tuple[int, ...]) -> Table:
    """The chunks of consecutive segments of these lengths."""
    start, count, segment = [], [], []
    first = 0
    for number, length in enumerate(segments):
        offset = np.arange(0, length, CHUNK, dtype=np.int64)
        start.append(first + offset)
        count.append(np.minimum(length - offset, CHUNK).astype(np.int32))
        segment.append(np.full(len(offset), number, dtype=np.int32))
        first += length
    if not start:
        return Table(*(np.empty(0, kind) for kind in (np.int64, np.int32, np.int32)))
    return Table(np.concatenate(start), np.concatenate(count), np.concatenate(segment))


def plane_words(count: int, width: int) -> int:
    """Words of a chunk in plane form, its first word included."""
    return 1 + (-(-count // BLOCK) * LANES * (1 + width) if width else 0)


def most_words(segments: tuple[int, ...], width: int) -> int:
    """Words of all chunks in plane form."""
    blocks = sum(-(-length // BLOCK) for length in segments)
    return table(segments).chunks + (blocks * LANES * (1 + width) if width else 0)


class Subtract(IntEnum):
    """Whether a block's dither is subtracted at decoding: the better way, always, or never."""

    AUTO = 0
    ALWAYS = 1
    NEVER = 2


@dataclass(frozen=True, eq=False)
class Budgets:
    """What ecdq's steps tell its encoding, a value per segment.

    Where the exact expected error of a segment is above its limit, its step is the safe one.
    """

    limit: Tensor  # float64, a squared error; infinite where nothing is checked
    safe: Tensor  # float32, a step
    costs: Tensor  # int64, two rows: scratch of kernels whose programs add up

    @staticmethod
    def of(segments: int, device: torch.device) -> Budgets:
        """Room for them."""
        return Budgets(
            torch.empty(segments, dtype=torch.float64, device=device),
            torch.empty(segments, dtype=torch.float32, device=device),
            torch.empty((2, segments), dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, eq=False)
class Section:
    """A coded section as int32 tensors; `payload` may be longer than its chunks."""

    ends: Tensor
    checks: Tensor
    payload: Tensor

    @staticmethod
    def of(body: Tensor, chunks: int) -> Section:
        """Views of bytes that start with the section."""
        words = body[: body.numel() // 4 * 4].view(torch.int32)
        return Section(words[:chunks], words[chunks : 2 * chunks], words[2 * chunks :])
