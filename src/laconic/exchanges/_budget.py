"""Error budgets: shares of encodings, what they spent, what was too much, what to count on next.

Budget E of a codec: the mean m of n gradients x_i may have E‖m̂ - m‖² ≤ E·‖m‖², for each parameter
and at every step. Encoders report what they spend: given the values, the expected squared error
of an encoding is known exactly (`spent`).

    E1 = Σ_i spent_i / n²          E2: spent by owners, who encode the mean once more
    T = M - E1                     ‖m‖²: M is the decoded mean's square, E[M] = ‖m‖² + E1

These sums reach all ranks with the lengths of wires. A parameter with E1 + E2 > 1.1·E·T has broken
its budget: its values are added up once more, in fp32, and that mean replaces the decoded one.

Squares of fp32 values leave the range of fp32, so ranks send roots of what they spent, and squares
are fp64.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.codecs import Codec, Place
from laconic.comm._context import ExchangeContext, ExchangeMemory, Sizes
from laconic.comm._frame import Kind
from laconic.comm._sums import plain_mean
from laconic.comm._transport import (
    Message,
    all_gather,
    checked_sizes,
    no_values,
)

LIMIT = 1.1  # of the budget, in expectation: more has broken it
FIRST, ALONE = 0.4, 0.9  # of the budget, for first encodings: with owners' after them, and without
_HALF = 0.5
_GRAIN = 64
_SAFE = 2.0**-30, 2.0**60  # norms between these have lost nothing that counts in fp32
_BACK_LEAST, _BACK_MOST = 0.125, 0.75  # of the budget, for owners
MOST = 16.0  # n·κ above this would save little more
LEAST = 2.0**-12  # steps 64 times as fine: six bits more per value
_DEVIATIONS = 1.5  # of ln(n·κ), below its mean
_FIRST_VARIANCE = 0.25  # of ln(n·κ), after one observation
_WEIGHT = 0.25  # of the newest observation
_SMALL = 1024  # values: fewer have a κ that varies more, and bits of few values cost little
_FIELDS = (
    "seen", "step", "log", "variance", "kappa",
    "steps", "total", "largest", "fallbacks", "budget", "last",
)  # fmt: skip
_SEEN, _STEP, _LOG, _VARIANCE, _KAPPA = range(5)
_STEPS, _TOTAL, _LARGEST, _FALLBACKS, _BUDGET, _LAST = range(5, 11)
_TAKING = threading.Lock()

Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What one exchange observed of some parameters, an entry for each."""

    budget: float
    demand: Numbers  # n·κ as observed; NaN where nothing was lost, or a value is not finite
    kappa: Numbers
    error: Numbers  # expected relative squared error of the mean; 0 where it is exact
    broken: NDArray[np.bool_]  # more than the budget: the exact mean was sent


class Ledger:
    """A row for each parameter: n·κ lately, and the errors made so far.

    With ln(n·κ) of mean μ and variance σ² over the last steps (exponentially weighted), the next
    step expects

        n·κ = exp(μ - 1.5·σ)/(1 + 1024/d)        from 2^-12 to 16

    for a parameter of d values. κ of the last step counts as evidence, that of an earlier one, or
    one before a fallback or values that are not finite, may only make it less than 1/(1 + 1024/d).
    Lanes of communication use it at the same time, for different parameters.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[int, int] = {}
        self._table = np.zeros((0, len(_FIELDS)))

    def factors(self, parameters: Sequence[int], numels: Sequence[int], step: int) -> Numbers:
        """The expected n·κ of each parameter."""
        with self._lock:
            places = self._rows(parameters)
            rows = self._table[places]
        small = 1 + _SMALL / np.asarray(numels, dtype=np.float64)
        known = np.exp(rows[:, _LOG] - _DEVIATIONS * np.sqrt(rows[:, _VARIANCE]))
        known[rows[:, _SEEN] == 0] = 1
        fresh = (rows[:, _SEEN] > 0) & (rows[:, _STEP] == step - 1)
        return np.clip(np.where(fresh, known, np.minimum(known, 1)) / small, LEAST, MOST)

    def record(self, parameters: Sequence[int], step: int, found: Spending) -> None:
        """Remember an exchange."""
        with self._lock:
            places = self._rows(parameters)
            rows = self._table[places]
            _observe(rows, step, found)
            _count(rows, found)
            self._table[places] = rows

    def latest(self, parameters: Sequence[int]) -> tuple[Numbers, Numbers]:
        """The errors of these parameters' last means, and κ."""
        with self._lock:
            places = self._rows(parameters)  # makes a larger table for new ones
            rows = self._table[places]
        return rows[:, _LAST], rows[:, _KAPPA]

    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """All that is known: parameters, and their fields by name."""
        with self._lock:
            items, table = sorted(self._places.items()), self._table.tolist()
        return [(number, dict(zip(_FIELDS, table[i], strict=True))) for number, i in items]

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to resume bit for bit."""
        with self._lock:
            return {
                "parameters": list(self._places),
                "fields": list(_FIELDS),
                "rows": torch.from_numpy(self._table.copy()),
            }

    @staticmethod
    def of(state: Mapping[str, Any]) -> Ledger:
        """From a state_dict."""
        made = Ledger()
        made._places = {int(number): i for i, number in enumerate(state["parameters"])}
        rows = state["rows"].numpy()
        made._table = np.zeros((len(rows), len(_FIELDS)))
        made._table[:, : rows.shape[1]] = rows  # older states have fewer fields
        return made

    def _rows(self, parameters: Sequence[int]) -> list[int]:
        """Their places in the table, which grows."""
        for parameter in parameters:
            self._places.setdefault(parameter, len(self._places))
        missing = len(self._places) - len(self._table)
        if missing:
            self._table = np.concatenate([self._table, np.zeros((missing, len(_FIELDS)))])
        return [self._places[parameter] for parameter in parameters]


def ledger_of(memory: ExchangeMemory) -> Ledger:
    """The ledger in a memory of exchanges; made if need be."""
    with _TAKING:
        found = memory.kept.get(ExchangeMemory.BUDGET)
        if isinstance(found, Mapping):  # of a state_dict
            found = Ledger.of(found)
        memory.kept[ExchangeMemory.BUDGET] = found = found or Ledger()
        return found


def _observe(rows: Numbers, step: int, found: Spending) -> None:
    """Update mean and variance of ln(n·κ); restart where the last evidence is gone."""
    seen = found.demand == found.demand
    log = np.log(np.clip(np.where(seen, found.demand, 1), LEAST / 2, 2 * MOST))
    fresh = seen & ((rows[:, _SEEN] == 0) | (rows[:, _STEP] != step - 1) | found.broken)
    log = np.where(found.broken, np.minimum(log, 0), log)
    weight = np.maximum(_WEIGHT, 1 / (rows[:, _SEEN] + 1))
    off = log - rows[:, _LOG]
    mean = np.where(fresh, log, rows[:, _LOG] + weight * off)
    moved = (1 - weight) * (rows[:, _VARIANCE] + weight * off * off)
    variance = np.where(fresh, _FIRST_VARIANCE, moved)
    rows[:, _LOG] = np.where(seen, mean, rows[:, _LOG])
    rows[:, _VARIANCE] = np.where(seen, variance, rows[:, _VARIANCE])
    rows[:, _SEEN] = np.where(fresh, 1, rows[:, _SEEN] + seen)
    rows[:, _STEP] = np.where(seen, step, rows[:, _STEP])
    rows[:, _KAPPA] = np.where(seen, found.kappa, rows[:, _KAPPA])


def _count(rows: Numbers, found: Spending) -> None:
    """Statistics of errors made."""
    known = np.isfinite(found.error)
    error = np.where(known, found.error, 0)
    rows[:, _STEPS] += known
    rows[:, _TOTAL] += error
    rows[:, _LARGEST] = np.maximum(rows[:, _LARGEST], error)
    rows[:, _LAST] = found.error
    rows[:, _FALLBACKS] += found.broken
    rows[:, _BUDGET] = found.budget


@dataclass(frozen=True)
class _Parts:
    """Which parameters are in which chunk: a segment for each."""

    parameters: tuple[int, ...]
    numels: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]  # of each chunk's segments, among the parameters
    sizes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(places: Sequence[Sequence[Place]], counts: Sequence[int], tensor: int) -> _Parts:
        """Chunks without places hold one parameter, which no place can name."""
        row: dict[int, int] = {}
        numels: list[int] = []
        rows, sizes = [], []
        for own, count in zip(places, counts, strict=True):
            said = [(place.parameter, place.numel) for place in own]
            said = said or [(-1 - tensor, count)] * bool(count)
            for parameter, size in said:
                if row.setdefault(parameter, len(row)) == len(numels):
                    numels.append(0)
                numels[row[parameter]] += size
            rows.append(tuple(row[parameter] for parameter, _ in said))
            sizes.append(tuple(size for _, size in said))
        return _Parts(tuple(row), tuple(numels), tuple(rows), tuple(sizes))

    def split(self, chunk: int, x: Tensor) -> list[Tensor]:
        """A chunk's segments, as views."""
        return list(x.split(list(self.sizes[chunk])))

    def summed(self, chunks: Sequence[int], values: Numbers) -> Numbers:
        """Sums over segments, one after another, for each parameter."""
        rows = np.array([row for chunk in chunks for row in self.rows[chunk]], np.int64)
        total = np.bincount(rows, weights=values, minlength=len(self.parameters))
        return total.astype(np.float64)  # of nothing they are integers


class Account:
    """The budget of one exchange; `first` is the share of encodings by ranks, for n·κ = 1.

    `own_exact` says that owners of chunks take their own values as they are.
    """

    def __init__(
        self,
        codec: Codec,
        context: ExchangeContext,
        places: Sequence[Sequence[Place]],
        counts: Sequence[int],
        first: float,
        own_exact: bool,
    ) -> None:
        assert codec.budget is not None
        self.context, self.budget, self.first = context, codec.budget, first
        self._own_exact = own_exact
        self.parts = _Parts.of(places, counts, context.tensor)
        self._ledger: Ledger = ledger_of(context.memory)
        parameters, numels = self.parts.parameters, self.parts.numels
        self._factors = self._ledger.factors(parameters, numels, context.step)
        self._promised = codec.variance_bound(1) is not None  # not under a ceiling of bits
        self.broken = np.zeros(len(parameters), dtype=bool)

    @staticmethod
    def of(
        codec: Codec,
        context: ExchangeContext,
        places: Sequence[Sequence[Place]],
        counts: Sequence[int],
        first: float,
        own_exact: bool = True,
    ) -> Account | None:
        """None for a single rank, and for codecs that have no budget or do not know their error."""
        if codec.budget is None or not codec.knows_error or context.size == 1:
            return None
        return Account(codec, context, places, counts, first, own_exact)

    def shares(self, chunk: int) -> list[float]:
        """Of the budget, for a rank's encoding of a chunk."""
        return [self.first * float(self._factors[row]) for row in self.parts.rows[chunk]]

    def with_room(self, uncompressed: Sequence[Tensor], chunks: Sequence[int]) -> list[Tensor]:
        """Plain values of each message, with room after them for a number per segment."""
        sizes = [
            part.numel() + len(self.parts.rows[chunk])
            for part, chunk in zip(uncompressed, chunks, strict=True)
        ]
        device = uncompressed[0].device
        after = list(self.context.scratch.take("plain and spent", sum(sizes), device).split(sizes))
        for part, target in zip(uncompressed, after, strict=True):
            target[: part.numel()].copy_(part)
        return after

    def room(self, name: str, chunk: int, device: torch.device) -> Tensor:
        """A number per segment of a chunk, in fp64."""
        return self.context.scratch.take(name, len(self.parts.rows[chunk]), device, torch.float64)

    def squares(self, chunk: int, x: Tensor) -> Tensor:
        """‖x‖² of each segment, in fp64."""
        return squares_of(self.parts.split(chunk, x))

    def back(self, first: Tensor, squares: Tensor) -> Tensor:
        """Shares of the budget for an owner's encoding: what the first ones have left of it.

        E2 = E·T - E1, from an eighth to three quarters of E·M; in steps of 1/64, so that devices,
        which add squares in another order, agree.
        """
        left = 1 - first.double() / squares.double() * (1 + 1 / self.budget)
        left = (left.nan_to_num(_HALF) * _GRAIN).floor() / _GRAIN
        return left.clamp(_BACK_LEAST, _BACK_MOST)

    def settle_alone(self, first: Tensor, x: Tensor) -> None:
        """`settle`, where all ranks have decoded all of x: E1 of its segments.

        Every rank adds up squares by itself: in fp64, because ranks with other processors add in
        another order, and must not come to another decision.
        """
        exact = torch.float64
        parts = [torch.linalg.vector_norm(part, dtype=exact) for part in self.parts.split(0, x)]
        squares = torch.stack(parts).square() if parts else first
        host = torch.stack([first.double(), squares]).cpu().numpy()  # a wait for a device
        spent, power = (self.parts.summed([0], row) for row in host)
        self.settle(spent, np.zeros_like(spent), power)

    def settle(self, first: Numbers, second: Numbers, squares: Numbers) -> None:
        """E1, E2 and M of every parameter, the same on all ranks: remember, and judge."""
        spent, known = first + second, np.isfinite(squares)
        with np.errstate(all="ignore"):
            true = np.maximum(squares - first, 0)
            over = known & ~(spent <= LIMIT * self.budget * true)  # a root may have overflowed
            self.broken = over & self._promised
            demand = self.first * self.budget * self._factors * true / first
            error = np.where(self.broken, 0.0, spent / true)  # 0/0 is unknown
        known &= np.isfinite(spent)
        demand = np.where(known & (first > 0), demand, np.nan)
        self._ledger.record(
            self.parts.parameters,
            self.context.step,
            Spending(
                budget=self.budget,
                demand=demand,
                kappa=np.minimum(demand * self._worth(), 1),
                error=np.where(known, error, np.nan),
                broken=self.broken,
            ),
        )

    def _worth(self) -> float:
        """κ of n·κ = 1 as observed; an owner's own values may lose nothing."""
        n = self.context.size
        return (n - self._own_exact) / n**2

    @contextmanager
    def exact(self, chunks: Sequence[Tensor], targets: Sequence[Tensor]) -> Iterator[None]:
        """Around what overwrites chunks: afterwards targets get the mean of what broke its budget.

        All ranks take part, with all values: they know the same numbers. `targets` are the chunks;
        those that are not needed are empty.
        """
        if not self.broken.any():
            yield
            return
        sources = self._views(chunks)
        sizes = [view.numel() for view in sources]
        kept = self.context.scratch.take("exact", sum(sizes), sources[0].device)
        copies = kept.split(sizes)
        for copy, view in zip(copies, sources, strict=True):
            copy.copy_(view)
        yield
        plain_mean(
            kept, self.context
        )  # not before: messages that arrived lie in transport's buffers
        for copy, view in zip(copies, self._views(targets), strict=True):
            if view.numel():
                view.copy_(copy)

    def _views(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """What the chunks hold of parameters that have broken their budget."""
        found = []
        for j, chunk in enumerate(chunks):
            starts = accumulate(self.parts.sizes[j], initial=0)
            ends = accumulate(self.parts.sizes[j])
            for row, start, end in zip(self.parts.rows[j], starts, ends, strict=False):
                if self.broken[row]:
                    found.append(chunk[start:end])
        return found

    def all_gather(
        self,
        message: Message,
        sizes: Sizes,
        uncompressed: Sequence[int],
        numbers: Sequence[Tensor],
    ) -> list[Message]:
        """`transport.all_gather`, and settle: owners' E1, E2 and M travel with the lengths."""
        context = self.context
        every, found = self._every(message.wire, message.length, numbers, 3)
        lengths = checked_sizes(every, sizes, context)
        self.settle(*found)
        return all_gather(
            message.cut(lengths[context.rank]), context, Sizes(lengths, known=True), uncompressed
        )

    def settle_among(self, first: Tensor, mine: Tensor) -> None:
        """Settle, where owners encode no mean: E1 and M of their chunks in a message of its own."""
        numbers = [first, self.squares(self.context.rank, mine)] if mine.numel() else []
        spent, squares = self._every(mine[:0], None, numbers, 2)[1]
        self.settle(spent, np.zeros_like(spent), squares)

    def _every(
        self, wire: Tensor, length: Tensor | None, numbers: Sequence[Tensor], kinds: int
    ) -> tuple[list[int], list[Numbers]]:
        """Lengths of all ranks' wires, and sums over owners of their segments' numbers."""
        context, n, width = self.context, self.context.size, max(map(len, self.parts.rows))
        sent = torch.zeros(1 + kinds * width, dtype=torch.int64, device=wire.device)
        sent[:1].copy_(length) if length is not None else sent[:1].fill_(wire.numel())
        values = sent[1:].view(torch.float64).view(kinds, width)
        for row, found in zip(values, numbers, strict=False):  # none, of an empty chunk
            row[: found.numel()].copy_(found)
        message = Message(sent.view(torch.uint8), no_values(wire))
        sizes = Sizes((8 * sent.numel(),) * n, known=True)
        arrived = all_gather(message, context, sizes, [0] * n, Kind.NUMBERS)
        every = torch.stack([one.wire for one in arrived]).cpu().view(torch.int64)  # a wait
        found = every[:, 1:].contiguous().view(torch.float64).view(n, kinds, width)
        return every[:, 0].tolist(), [self._of_all(found[:, i].numpy()) for i in range(kinds)]

    def _of_all(self, found: Numbers) -> Numbers:
        """Sums over chunks, from owners' numbers of each of their segments."""
        values = [own[: len(rows)] for own, rows in zip(found, self.parts.rows, strict=True)]
        return self.parts.summed(range(len(values)), np.concatenate(values))


def squares_of(parts: Sequence[Tensor]) -> Tensor:
    """‖x‖² of each part, in fp64.

    On the CPU a pass in fp64 takes many times as long as one in fp32, which only values too small
    or too large for their squares need.
    """
    on_host, wide = parts[0].device.type == "cpu", {"dtype": torch.float64}
    norms = torch._foreach_norm(  # pyright: ignore[reportPrivateImportUsage]
        list(parts), 2, **({} if on_host else wide)
    )
    found = torch.stack(list(norms)).double()
    if on_host:
        for row, norm in enumerate(found.tolist()):
            if not _SAFE[0] < norm < _SAFE[1] and torch.linalg.vector_norm(parts[row], torch.inf):
                found[row] = torch.linalg.vector_norm(parts[row], **wide)
    return found.square()


def typical_shares(ranks: int, kappa: float) -> tuple[float, float]:
    """Shares of the budget that the two encodings of scatter-reduce settle at, for a steady κ."""
    known = ranks * kappa * ranks / max(1, ranks - 1)  # an owner's own values lose nothing
    return FIRST * min(max(known, LEAST), MOST), 1 - FIRST
