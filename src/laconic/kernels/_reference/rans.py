"""The rANS coder: a state is a number, and a symbol of probability p makes it 1/p times larger.

A stream is a row of 16-bit words, two in each 32-bit word, low half first. Reading a symbol with
state x, where f of 2^11 slots from `start` on belong to it (the model is below):

    slot = x mod 2^11;   x ← f·(x >> 11) + slot - start;   x ← x·2^16 + next word  if x < 2^15

1. Four states, two words each, low word first. The top bit of state 0 is the form (1: the dither
   is not used), that of state 1 says that the stream is filled up with a zero word.
2. For each group of 128 values, the last may be shorter: its class, by state 0. If that is not 0:
   a symbol for each value, value j by state j mod 4; then a word for each value that escaped,
   q >> shift; then `shift` low bits of each value, first value in the lowest bits, filled up to
   whole words with zeros.
3. State 0 alone reads the last group, class included. Before it, states 1 to 3 give back a word
   each, to be read next and in this order: they are 2^16 + word; or 2^15 if no word was left.

State 0 ends at 2^15, where the encoder started, with all words read. The encoder goes backwards:
if x ≥ f·2^20 it writes the word x mod 2^16 and keeps x >> 16; x ← (x // f)·2^11 + start + x mod f.
Every chunk has one stream only: what is read, written again, gives the same words.

Duda (2013, arXiv:1311.2540) invented the coder, Giesen (2014, arXiv:1402.3392) interleaved it. Step
3 is ours: states would otherwise begin with 15 bits that say nothing.

Example: q = [1], form 1. S·128/n = 128 is class 13 (from 115 to 161). Symbol 16 has 443 slots from
1329 on: x = 2^15 = 73·443 + 429 becomes 73·2^11 + 1329 + 429 = 151262. After class 12, with which
all streams start, class 13 has 340 slots from 1463 on: x = 444·340 + 302 becomes 911077 = 0xDE6E5.
No word was written. The stream is 0x800DE6E5, 0x8000, 0x8000, 0x8000.

The model. Coded are integers q = floor(x + r), r uniform in [0, 1) and known to both sides. Each
group of 128 has a class, 0 if all are zero, else c ≥ 1: a logistic x of standard deviation
σ_c = 2^((c-12)/2). The class is found from the sum S of the magnitudes, because E|q| = E|x| over
the dither:

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

from laconic.errors import WireError
from laconic.kernels._layout import GROUP

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


# --- the coder ------------------------------------------------------------------------------


def encode(q: np.ndarray, dither: np.ndarray | None) -> list[int]:
    """The stream of a chunk of integers, given the 16-bit dither of each; None means form 1."""
    form = int(dither is None)
    states, words = [LOWEST] * STATES, []  # the last word is read first
    groups = _groups(q)
    classes = [class_of(group) for group in groups]
    for g in reversed(range(len(groups))):
        last = g == len(groups) - 1
        group, lanes = groups[g], 1 if last else STATES
        if classes[g]:
            tables, symbols, escaped, low = symbols_of(group, classes[g], form, _part(dither, g))
            words += reversed(escaped + low)
            for j in reversed(range(len(group))):
                states[j % lanes] = _push(states[j % lanes], tables[j], symbols[j], words)
        before = classes[g - 1] if g else UNIT
        states[0] = _push(states[0], ROWS + before, classes[g], words)
        if last:
            for k in range(1, STATES):
                states[k] = 1 << 16 | words.pop() if words else LOWEST
    odd = len(words) % 2
    flags = [form, odd] + [0] * (STATES - 2)
    head = [x | flag << 31 for x, flag in zip(states, flags, strict=True)]
    words = [0] * odd + words
    pairs = zip(words[::-2], words[-2::-2], strict=True)
    return head + [low | high << 16 for low, high in pairs]


def decode(words: list[int], count: int, dither: np.ndarray) -> np.ndarray:
    """The integers of a chunk; WireError if no encoder wrote the stream."""
    if len(words) < STATES:
        raise WireError("the stream ends before its states")
    states = [word & (1 << 31) - 1 for word in words[:STATES]]
    form, odd, *zero = (word >> 31 for word in words[:STATES])
    rest = [half for word in words[STATES:] for half in (word & 0xFFFF, word >> 16)][::-1]
    if min(states) < LOWEST or any(zero) or (odd and (not rest or rest.pop(0))):
        raise WireError("the stream's states are not what an encoder writes")
    result, before = [], UNIT
    groups = -(-count // GROUP)
    for g in range(groups):
        n, lanes = min(GROUP, count - g * GROUP), STATES
        if g == groups - 1:
            lanes = 1
            _give_back(states, rest)
        states[0], c = _pull(states[0], ROWS + before, rest)
        q = np.zeros(n, np.int32)
        if c:
            q = _values(states, lanes, n, c, form, dither[g * GROUP :][:n], rest)
        if class_of(q) != c:
            raise WireError("a group has not the class that an encoder gives it")
        result.append(q)
        before = c
    if rest or states[0] != LOWEST:
        raise WireError("the stream does not end where an encoder starts")
    return np.concatenate(result).astype(np.int16)


def class_of(q: np.ndarray) -> int:
    """The class of a group."""
    total = int(np.abs(q.astype(np.int64)).sum()) * GROUP // len(q)
    return 1 + int((model().bounds <= total).sum()) if total else 0


def _groups(values: np.ndarray) -> list[np.ndarray]:
    return [values[at : at + GROUP] for at in range(0, len(values), GROUP)]


def _part(dither: np.ndarray | None, g: int) -> np.ndarray:
    return np.zeros(GROUP, int) if dither is None else dither[g * GROUP :][:GROUP]


def _contexts(dither: np.ndarray, c: int, form: int) -> tuple[np.ndarray, np.ndarray]:
    """The table of each value, and whether it is mirrored."""
    table, conditioned, *_ = model().classes[form, c].tolist()
    bins = dither >> 13
    mirrored = (bins >= FOLDS) & bool(conditioned)
    return table + conditioned * np.where(mirrored, 2 * FOLDS - 1 - bins, bins), mirrored


def symbols_of(
    q: np.ndarray, c: int, form: int, dither: np.ndarray
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Tables and symbols of a group's values, and the words that follow them."""
    *_, span, shift = model().classes[form, c].tolist()
    tables, mirrored = _contexts(dither[: len(q)], c, form)
    v = q.astype(np.int32) >> shift
    beyond = np.abs(v) > span
    symbols = np.where(beyond, ESCAPE, np.where(mirrored, -v, v) + LARGEST)
    bits = sum((int(x) & (1 << shift) - 1) << j * shift for j, x in enumerate(q))
    low = [bits >> 16 * i & 0xFFFF for i in range(-(-len(q) * shift // 16))]
    return tables.tolist(), symbols.tolist(), (v[beyond] & 0xFFFF).tolist(), low


def _values(
    states: list[int], lanes: int, n: int, c: int, form: int, dither: np.ndarray, rest: list[int]
) -> np.ndarray:
    """The inverse of `symbols_of`."""
    *_, span, shift = model().classes[form, c].tolist()
    tables, mirrored = _contexts(dither, c, form)
    symbols = np.zeros(n, np.int32)
    for j in range(n):
        states[j % lanes], symbols[j] = _pull(states[j % lanes], int(tables[j]), rest)
    v = np.where(mirrored, LARGEST - symbols, symbols - LARGEST)
    beyond = symbols == ESCAPE
    v[beyond] = np.array([_next(rest) for _ in range(beyond.sum())], np.uint16).view(np.int16)
    bits = sum(_next(rest) << 16 * i for i in range(-(-n * shift // 16)))
    q = [(int(x) << shift) + (bits >> j * shift & (1 << shift) - 1) for j, x in enumerate(v)]
    if (np.abs(v[beyond]) <= span).any() or bits >> n * shift or max(map(abs, q)) >= 1 << 15:
        raise WireError("the stream escapes or fills up otherwise than an encoder does")
    return np.array(q, np.int32)


def _push(x: int, table: int, symbol: int, words: list[int]) -> int:
    """The state with a symbol more."""
    row = model().counts[table]
    f, start = int(row[symbol]), int(row[:symbol].sum())
    if x >= f * LOWEST * (1 << 16) // SLOTS:
        words.append(x & 0xFFFF)
        x >>= 16
    return (x // f << PRECISION) + start + x % f


def _pull(x: int, table: int, rest: list[int]) -> tuple[int, int]:
    """The state with a symbol less, and the symbol."""
    slot = x % SLOTS
    ends = model().counts[table].cumsum()
    symbol = int((ends <= slot).sum())
    f = int(model().counts[table, symbol])
    x = f * (x >> PRECISION) + slot - int(ends[symbol]) + f
    return x if x >= LOWEST else x << 16 | _next(rest), symbol


def _give_back(states: list[int], rest: list[int]) -> None:
    """States 1 to 3 return the words they began with."""
    for x in reversed(states[1:]):
        if x >> 16 == 1:
            rest.append(x & 0xFFFF)
        elif x != LOWEST or rest:
            raise WireError("a state does not end where an encoder starts it")


def _next(rest: list[int]) -> int:
    if not rest:
        raise WireError("the stream is too short")
    return rest.pop()
