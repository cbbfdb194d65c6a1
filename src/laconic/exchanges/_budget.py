"""One exchange's error budget: shares of encodings, what they spent, and what was too much.

Budget E of a codec: the mean m of n gradients x_i may have E‖m̂ - m‖² ≤ E·‖m‖², for each parameter
and at every step. Encoders tell what they spend: given the values, the expected squared error of
an encoding is known exactly (`spent`).

    E1 = Σ_i spent_i / n²          E2: spent by owners, who encode the mean once more
    T = M - E1                     ‖m‖²: M is the decoded mean's square, E[M] = ‖m‖² + E1

These sums reach all ranks with the lengths of wires. A parameter with E1 + E2 > 1.1·E·T has broken
its budget: its values are added up once more, in fp32, and that mean replaces the decoded one.

Squares of fp32 values leave the range of fp32, so ranks send roots of what they spent, and squares
are fp64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from laconic.codecs import Codec, Place
from laconic.exchanges._base import Call
from laconic.exchanges._frame import Kind
from laconic.exchanges._ledger import LEAST, MOST, Ledger, Numbers, Spending, ledger_of
from laconic.exchanges._transport import (
    Message,
    checked_sizes,
    no_values,
    plain_mean,
    share,
)
from laconic.exchanges._wires import Sizes

LIMIT = 1.1  # of the budget, in expectation: more has broken it
FIRST, ALONE = 0.4, 0.9  # of the budget, for first encodings: with owners' after them, and without
_HALF = 0.5
_GRAIN = 64
_SAFE = 2.0**-30, 2.0**60  # norms between these have lost nothing that counts in fp32
_BACK_LEAST, _BACK_MOST = 0.125, 0.75  # of the budget, for owners


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
        call: Call,
        places: Sequence[Sequence[Place]],
        counts: Sequence[int],
        first: float,
        own_exact: bool,
    ) -> None:
        assert codec.budget is not None
        self.call, self.budget, self.first = call, codec.budget, first
        self._own_exact = own_exact
        self.parts = _Parts.of(places, counts, call.tensor)
        self._ledger: Ledger = ledger_of(call.memory)
        parameters, numels = self.parts.parameters, self.parts.numels
        self._factors = self._ledger.factors(parameters, numels, call.step)
        self._promised = codec.variance_bound(1) is not None  # not under a ceiling of bits
        self.broken = np.zeros(len(parameters), dtype=bool)

    @staticmethod
    def of(
        codec: Codec,
        call: Call,
        places: Sequence[Sequence[Place]],
        counts: Sequence[int],
        first: float,
        own_exact: bool = True,
    ) -> Account | None:
        """None for codecs without a budget, or that cannot tell what they spend; and if alone."""
        if codec.budget is None or not codec.knows_error or call.size == 1:
            return None
        return Account(codec, call, places, counts, first, own_exact)

    def shares(self, chunk: int) -> list[float]:
        """Of the budget, for a rank's encoding of a chunk."""
        return [self.first * float(self._factors[row]) for row in self.parts.rows[chunk]]

    def with_room(self, rest: Sequence[Tensor], chunks: Sequence[int]) -> list[Tensor]:
        """Plain values of each message, with room behind them for a number of each segment."""
        sizes = [
            part.numel() + len(self.parts.rows[chunk])
            for part, chunk in zip(rest, chunks, strict=True)
        ]
        device = rest[0].device
        after = list(self.call.scratch.take("plain and spent", sum(sizes), device).split(sizes))
        for part, target in zip(rest, after, strict=True):
            target[: part.numel()].copy_(part)
        return after

    def room(self, name: str, chunk: int, device: torch.device) -> Tensor:
        """A number of each segment of a chunk, in fp64."""
        return self.call.scratch.take(name, len(self.parts.rows[chunk]), device, torch.float64)

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
        spent, told = first + second, np.isfinite(squares)
        with np.errstate(all="ignore"):
            true = np.maximum(squares - first, 0)
            over = told & ~(spent <= LIMIT * self.budget * true)  # a root may have overflowed
            self.broken = over & self._promised
            demand = self.first * self.budget * self._factors * true / first
            error = np.where(self.broken, 0.0, spent / true)  # 0/0 tells nothing
        told &= np.isfinite(spent)
        demand = np.where(told & (first > 0), demand, np.nan)
        self._ledger.record(
            self.parts.parameters,
            self.call.step,
            Spending(
                budget=self.budget,
                demand=demand,
                kappa=np.minimum(demand * self._worth(), 1),
                error=np.where(told, error, np.nan),
                broken=self.broken,
            ),
        )

    def _worth(self) -> float:
        """κ of n·κ = 1 as observed; an owner's own values may lose nothing."""
        n = self.call.size
        return (n - self._own_exact) / n**2

    @contextmanager
    def exact(self, chunks: Sequence[Tensor], targets: Sequence[Tensor]) -> Iterator[None]:
        """Around what overwrites chunks: then targets get the mean of what has broken its budget.

        All ranks take part, with all the values: they know the same numbers. `targets` are the
        chunks, or those of them that are wanted, others being empty.
        """
        if not self.broken.any():
            yield
            return
        sources = self._views(chunks)
        sizes = [view.numel() for view in sources]
        kept = self.call.scratch.take("exact", sum(sizes), sources[0].device)
        copies = kept.split(sizes)
        for copy, view in zip(copies, sources, strict=True):
            copy.copy_(view)
        yield
        plain_mean(kept, self.call)  # not before: messages that arrived lie in transport's buffers
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

    def share(
        self,
        message: Message,
        sizes: Sizes,
        rest: Sequence[int],
        numbers: Sequence[Tensor],
    ) -> list[Message]:
        """`share`, and settle: owners' E1, E2 and M of their chunks travel with the lengths."""
        call = self.call
        every, found = self._every(message.wire, message.length, numbers, 3)
        lengths = checked_sizes(every, sizes, call)
        self.settle(*found)
        return share(message.cut(lengths[call.rank]), call, Sizes(lengths, known=True), rest)

    def settle_among(self, first: Tensor, mine: Tensor) -> None:
        """Settle, where owners encode no mean: E1 and M of their chunks in a message of its own."""
        numbers = [first, self.squares(self.call.rank, mine)] if mine.numel() else []
        spent, squares = self._every(mine[:0], None, numbers, 2)[1]
        self.settle(spent, np.zeros_like(spent), squares)

    def _every(
        self, wire: Tensor, length: Tensor | None, numbers: Sequence[Tensor], kinds: int
    ) -> tuple[list[int], list[Numbers]]:
        """Lengths of all ranks' wires, and sums over owners of their segments' numbers."""
        call, n, width = self.call, self.call.size, max(map(len, self.parts.rows))
        sent = torch.zeros(1 + kinds * width, dtype=torch.int64, device=wire.device)
        sent[:1].copy_(length) if length is not None else sent[:1].fill_(wire.numel())
        values = sent[1:].view(torch.float64).view(kinds, width)
        for row, found in zip(values, numbers, strict=False):  # none, of an empty chunk
            row[: found.numel()].copy_(found)
        message = Message(sent.view(torch.uint8), no_values(wire))
        sizes = Sizes((8 * sent.numel(),) * n, known=True)
        arrived = share(message, call, sizes, [0] * n, Kind.NUMBERS)
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
