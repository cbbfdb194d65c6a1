"""The model of the rANS coder: classes of groups, and how probable which value is in each.

Coded are integers q = floor(x + r), r uniform in [0, 1) and known to both sides. Each group of 128
has a class, 0 if all are zero, else c ≥ 1: a logistic x of standard deviation σ_c = 2^((c-12)/2).
The class is found from the sum S of the magnitudes, because E|q| = E|x| over the dither:

    c = 1 + number of c' ≥ 2 with S·128/n ≥ 96·2^((2c'-25)/4)       n values, 128 but for the last

Classes 1 to 15 (σ up to 2.8) code q given the bin b = floor(8r), with s = σ·√3/π:

    P(q = k | b) = E[F((k+1-r)/s) - F((k-r)/s) | b],  F(y) = 1/(1 + e^-y)

Bins 4 to 7 mirror bins 3 to 0: -q is coded there (P(k | r) = P(-k | 1-r)), which halves the tables.
Magnitudes above ⌊6σ⌋ + 2 or 15 escape. Without a dither that says something (form 1), P is the
mean over all bins. Classes 16 to 39 code q >> shift, as class 14 or 15 codes in bin 0, and `shift`
low bits as they are: σ·2^-shift is 2 or 2.8.

The class itself is coded given the one before: after class 0, 0 has 7/8 and all others the same;
after p ≥ 1, 0 has 1/32 and c a share in proportion to 0.4^|c-p|.

Probabilities are counts of 2^11 slots. They are computed in decimal arithmetic, whose exp, ln and
sqrt are correctly rounded, so that every machine has the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from functools import lru_cache
from itertools import pairwise

import numpy as np

PRECISION = 11
SLOTS = 1 << PRECISION
STATES = 4
LOWEST = 1 << 15  # states are kept in 2^15 .. 2^31 - 1
FOLDS = 4  # bins of the dither, without their mirror images
LARGEST = 15  # magnitude that is a symbol, symbol k + 15
ESCAPE = 31
NARROW = 15  # classes without a shift
CLASSES = 40
UNIT = 12  # the class of σ = 1; also what the first group's class is coded after
FREE = NARROW * FOLDS  # tables from here on do not know the bin
ROWS = FREE + NARROW  # and from here on are of classes
RECIPROCAL = 43  # bits of a reciprocal's fraction
_PI = Decimal("3.14159265358979323846264338327950288")


@dataclass(frozen=True, eq=False)
class Model:
    """Tables of NARROW·FOLDS (class, bin) pairs, NARROW classes, and CLASSES classes before."""

    counts: np.ndarray  # int64 (tables, CLASSES): slots of each symbol
    classes: np.ndarray  # int32 (2 forms, CLASSES, 4): table, whether bins count, span, shift
    bounds: np.ndarray  # int32: S·128/n from which on class 2, 3, ... is taken
    slots: np.ndarray  # uint32 (tables, SLOTS): symbol | slot - start << 8 | count << 20
    records: np.ndarray  # uint64 (tables, CLASSES, 2): see `_records`


@lru_cache(maxsize=1)
def model() -> Model:
    """All tables, computed once."""
    with localcontext(Context(prec=30, rounding=ROUND_HALF_EVEN, traps=[])):
        narrow = [_narrow(c) for c in range(1, NARROW + 1)]
        rows = [row for group in narrow for row in group[:FOLDS]]
        rows += [group[FOLDS] for group in narrow]
        rows += [_followers(p) for p in range(CLASSES)]
        bounds = [_bound(c) for c in range(2, CLASSES)]
        classes = [[_settings(c, form) for c in range(CLASSES)] for form in (0, 1)]
    counts = np.array(rows)
    starts = counts.cumsum(1) - counts
    slots = np.empty((len(counts), SLOTS), np.uint32)
    for table, row in enumerate(counts):
        symbol = np.repeat(np.arange(CLASSES), row)
        offset = np.arange(SLOTS) - starts[table, symbol]
        slots[table] = symbol | offset << 8 | row[symbol] << 20
    records = _records(counts, starts)
    return Model(counts, np.array(classes, np.int32), np.array(bounds, np.int32), slots, records)


def _deviation(c: int) -> Decimal:
    """σ_c."""
    return (Decimal(4) ** (c - UNIT)).sqrt().sqrt()


def _span(c: int) -> int:
    """The largest magnitude that does not escape in a narrow class."""
    return min(LARGEST, int(6 * _deviation(c)) + 2)


def _settings(c: int, form: int) -> tuple[int, int, int, int]:
    """Table, whether bins count, span and shift of a class."""
    if c == 0:
        return 0, 0, 0, 0  # nothing is coded
    if c > NARROW:
        like = NARROW - 1 + c % 2
        return FOLDS * (like - 1), 0, _span(like), (c - NARROW + 1) // 2
    return (FREE + c - 1 if form else FOLDS * (c - 1)), 1 - form, _span(c), 0


def _bound(c: int) -> int:
    """The least S·128/n of class c: 96·2^((2c-25)/4), never whole, rounded up."""
    return int((Decimal(96) ** 4 * Decimal(2) ** (2 * c - 25)).sqrt().sqrt()) + 1


def _narrow(c: int) -> list[list[int]]:
    """Counts of the symbols of class c: in each of the bins, and without them."""
    scale = _deviation(c) * Decimal(3).sqrt() / _PI
    span = _span(c)
    # ∫F = ln(1 + e^y): soft[k][i] belongs to k - i/8, and to k - 1 at the end
    steps = [Decimal(i) / 8 for i in (*range(FOLDS + 1), 8)]
    soft = [[_soft((k - i) / scale) for i in steps] for k in range(-span, span + 2)]
    bins = [(i, i + 1) for i in range(FOLDS)] + [(0, FOLDS + 1)]
    result = []
    for a, b in bins:
        below = [scale / (steps[b] - steps[a]) * (row[a] - row[b]) for row in soft]
        weights = [high - low for low, high in pairwise(below)]
        inside = _counts([*weights, 1 - sum(weights, Decimal(0))])
        blank = [0] * (LARGEST - span)
        row = [*blank, *inside[:-1], *blank, inside[-1]]
        result.append(row + [0] * (CLASSES - len(row)))
    return result


def _soft(y: Decimal) -> Decimal:
    """ln(1 + e^y)."""
    return (1 + y.exp()).ln()


def _followers(p: int) -> list[int]:
    """Counts of the classes after class p."""
    near = [Decimal("0.4") ** abs(c - p) if p else Decimal(1) for c in range(1, CLASSES)]
    zero = Decimal(1) / 32 if p else Decimal(7) / 8
    return _counts([zero, *((1 - zero) * w / sum(near) for w in near)])


def _counts(weights: list[Decimal]) -> list[int]:
    """Slots in proportion to weights of sum 1: at least one each, the largest takes the rest."""
    counts = [max(1, int(w * SLOTS + Decimal("0.5"))) for w in weights]
    largest = counts.index(max(counts))
    counts[largest] += SLOTS - sum(counts)
    return counts


def _records(counts: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """What an encoder needs of a symbol with f slots.

        ⌈2^43 / f⌉,   f·2^20 | start << 32 | 2^11 - f << 48

    A state x < f·2^20 times the first stays below 2^64, and the product's bits from 43 on are
    x // f exactly: the error x·(⌈2^43/f⌉·f - 2^43) is below f²·2^20 < 2^43.
    """
    f, start = np.maximum(counts, 1).astype(np.uint64), starts.astype(np.uint64)
    reciprocal = ((1 << RECIPROCAL) + f - 1) // f
    return np.stack([reciprocal, f << 20 | start << 32 | (SLOTS - f) << 48], axis=-1)
