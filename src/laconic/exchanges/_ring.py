"""A ring of our own: the width of integer sums grows from hop to hop."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._cost import Cluster, Task, TensorLoad, Work
from laconic._settings import between, check_settings
from laconic.codecs import Codec
from laconic.comm._context import ExchangeContext, chunks_of
from laconic.comm._frame import FRAME_BYTES
from laconic.comm._point_to_point import SendRecvWork, sendrecv
from laconic.comm._sums import gather_numbers
from laconic.errors import ConfigError
from laconic.exchanges._base import Exchange, norm_and_plain
from laconic.kernels import Lattice, Output, backend
from laconic.kernels._layout import packed_bytes

PIECE_VALUES = 1 << 14  # values: messages of shorter pieces would cost more than they hide
_MOST_PIECES = 64
_MOST_BITS = 31  # of a sum


@dataclass(frozen=True, kw_only=True)
class Ring(Exchange):
    """`ring`: `global` with all the levels of one gradient, whatever the number of ranks.

        q_i = floor(x_i/Δ + r_i),  Δ = N/s,  s = 2^(b-1) - 1 or levels=      mean = Δ·Σ_i q_i / n

    1. Local norms to all, as plain numbers with the values that are not encoded: the shared N.
    2. Chunk j starts at rank j + 1 and goes around. Each rank adds its own integers; the sum of
       k ranks lies in -k·s .. k·s and travels at w_k = bit_length(2·k·s) bits. Rank j ends the sum.
    3. The sum of n goes around once more, at w_n bits, and all ranks decode the same integers.

    Bytes per rank, without frames: (d/n)·(w_1 + .. + w_{n-1} + (n-1)·w_n)/8. At n = 4 and 4
    bits that is 4 + 5 + 6 out and 3·6 back: 8.25 bits per value with s = 7; allreduce sends 6
    with s = 1 and at 8 bits 12 with s = 31. With the same levels a ring never sends more than
    allreduce.
    The error is that of `global` with s = levels_for(1): E‖mean^ - mean‖² ≤ (θ/n)·Σ‖x_i‖².

    A chunk travels in up to `pieces` messages. While some are on the wire, the one that arrived
    last is quantized, added and packed, or decoded. All sizes are known: nothing waits for a
    length.

    Xin et al., Global-QSGD, 2025, arXiv 2305.18627, section 4; the widening sums are ours.
    """

    name: ClassVar[str] = "ring"

    pieces: int = field(default=4, metadata=between(1, _MOST_PIECES))

    def __post_init__(self) -> None:
        check_settings(self)

    def check(self, codec: Codec) -> None:
        if not codec.integer_sum:
            raise ConfigError(
                f"a ring adds plain integers under one scale, which {codec} does not make; use "
                f"'{codec}@{'allreduce' if codec.summable else 'scatter-reduce'}', or "
                "'global:bits=4@ring' (bits 4, 8 or 32, without coder= and subtract=)"
            )

    def check_group(self, codec: Codec, group: dist.ProcessGroup) -> None:
        _check_sum(codec.levels_for(1), group.size())

    def mean(
        self, x: Tensor, codec: Codec, context: ExchangeContext, uncompressed: Tensor | None = None
    ) -> None:
        norm = codec.global_norm(gather_numbers(codec.local_norm(x), context, uncompressed))
        _Round(x, codec, norm, context, self.pieces).run()

    def cost(self, load: TensorLoad, cluster: Cluster) -> list[Task]:
        """Tasks of a bucket: norm(d), S, E(c, m), hops; m is `pieces`.

        A hop k = 1 .. 2(n-1) of up to m pieces is H(w_k·c/8 + f each), then E(c, m) + reduce(c, m)
        while k < n, D(c, m) later. In reality pieces overlap; here a hop is its wire, then its
        work.
        """
        links, cost, pieces = cluster.flat, load.cost, self.pieces
        n = links.ranks
        c, levels = load.encoded / n, load.codec.levels_for(1)
        adding = cost.encode.seconds(c, pieces) + cost.reduce.seconds(c, pieces)
        found = [*norm_and_plain(load, links), Work(cost.encode.seconds(c, pieces))]
        frames = FRAME_BYTES * min(pieces, math.ceil(c / PIECE_VALUES))
        for hop in range(1, 2 * n - 1):
            work = adding if hop < n else cost.decode.seconds(c, pieces)
            sent = sum_bits(levels, min(hop, n)) / 8 * c + frames
            found += [links.sendrecv.move(sent), Work(work)]
        return found

    def planned(self, codec: Codec, cluster: Cluster) -> bool:
        """With more ranks, sums that widen are wider than what they save."""
        return cluster.workers <= 16 and codec.integer_sum

    def workers_added(self, codec: Codec, cluster: Cluster) -> int:
        return 1  # sums widen instead


def sum_bits(levels: int, workers: int) -> int:
    """w_k: the width of a sum of `workers` integers from -levels to levels."""
    return (2 * workers * levels).bit_length()


def _check_sum(levels: int, workers: int) -> None:
    bits = sum_bits(levels, workers)
    if bits > _MOST_BITS:
        raise ConfigError(
            f"a sum of {workers} workers at {levels} levels takes {bits} bits, and a ring has "
            f"{_MOST_BITS}: give global fewer levels="
        )


class _Round:
    """One exchange. In hop h = 0 .. 2n-3 this rank sends chunk rank-1-h and receives rank-2-h."""

    def __init__(
        self, x: Tensor, codec: Codec, norm: Tensor, context: ExchangeContext, pieces: int
    ) -> None:
        self.codec, self.norm, self.context, self.pieces = codec, norm, context, pieces
        self.levels = codec.levels_for(1)
        self.widths = [sum_bits(self.levels, k) for k in range(context.size + 1)]
        _check_sum(self.levels, context.size)
        self.parts = [
            chunks_of(chunk, pieces, PIECE_VALUES) for chunk in chunks_of(x, context.size)
        ]
        self.longest = max(part.numel() for part in self.parts[0])  # no chunk exceeds the first
        self.device = x.device
        self.kernels = backend(x.device)

    def run(self) -> None:
        """Work on piece p of a hop while the pieces after it travel."""
        n, rank, pieces = self.context.size, self.context.rank, range(self.pieces)
        first = (self._added((rank - 1) % n, p, None, 1) for p in pieces)
        if n == 1:
            for p, sums in enumerate(first):
                self._decode(0, p, sums[FRAME_BYTES:])
            return
        flying = [self._start(0, p, sums) for p, sums in enumerate(first)]
        last = 2 * n - 3
        for hop in range(last + 1):
            chunk, workers = (rank - 2 - hop) % n, hop + 2
            for p in pieces:
                came, sums = flying[p].wait(self.context), flying[p].arriving
                if workers <= n:
                    sums = self._added(chunk, p, came, workers)
                if hop < last:
                    flying[p] = self._start(hop + 1, p, sums)
                if workers >= n:
                    self._decode(chunk, p, sums[FRAME_BYTES:])

    def _added(self, chunk: int, p: int, sums: Tensor | None, workers: int) -> Tensor:
        """The sum of `workers` workers: own integers added to what arrived, packed after a frame.

        Its buffer is free: waiting for a piece also waits for what was sent from there.
        """
        part = self.parts[chunk][p]
        out = self._buffer(f"sum {p}", part.numel(), workers)
        if part.numel():
            size = self.codec.nbytes(self.longest, part.dtype)
            room = self.context.scratch.take("ring codes", size, self.device, torch.uint8)
            key = self.context.key(self.context.rank, chunk * self.pieces + p)
            own = self.codec.encode(part, key, norm=self.norm, workers=1, out=room)
            self.kernels.add_codes(
                own.payload,
                sums,
                out[FRAME_BYTES:],
                Lattice(0, self.levels, own.header.bits),
                numel=part.numel(),
                width=self.widths[workers - 1],
                wider=self.widths[workers],
            )
        return out

    def _decode(self, chunk: int, p: int, sums: Tensor) -> None:
        """x = Δ·Σq/n."""
        part, n = self.parts[chunk][p], self.context.size
        if not part.numel():
            return
        q = self.context.scratch.take("ring integers", self.longest, self.device, torch.int32)
        q = q[: part.numel()]
        self.kernels.read_sums(sums, q, width=self.widths[n], offset=n * self.levels)
        lattice = Lattice(0, self.levels, 32)
        self.kernels.dequantize(q, self.norm, Output(part, 1 / n), lattice, dither=None, offset=0)

    def _start(self, hop: int, p: int, sums: Tensor) -> SendRecvWork:
        """Send a piece on, and wait for nothing."""
        n, rank = self.context.size, self.context.rank
        coming = self.parts[(rank - 2 - hop) % n][p].numel()
        # what arrived in the hop before may still be on its way from the other buffer
        room = self._buffer(f"arriving {hop % 2} {p}", coming, min(hop + 1, n))
        name, number = f"ring {hop % 2} {p}", hop * self.pieces + p
        return sendrecv(
            sums, (rank + 1) % n, room, (rank - 1) % n, name, self.context, number=number
        )

    def _buffer(self, name: str, numel: int, workers: int) -> Tensor:
        """Room for a frame and a sum of `workers` workers; none for no values.

        Taken at its largest, so that it is made once.
        """
        most = FRAME_BYTES + packed_bytes(self.longest, self.widths[-1])
        room = self.context.scratch.take(f"ring {name}", most, self.device, torch.uint8)
        return room[: FRAME_BYTES + packed_bytes(numel, self.widths[workers]) if numel else 0]
