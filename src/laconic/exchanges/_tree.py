"""A tree for sums that must be rounded at every addition: global-exp's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic._cost import Cluster, EncodingError, Task, TensorLoad, Work
from laconic._wire import HEADER_BYTES, Wire
from laconic.codecs import Codec
from laconic.comm._context import ExchangeContext, Sizes, chunks_of, decode
from laconic.comm._frame import FRAME_BYTES
from laconic.comm._point_to_point import sendrecv
from laconic.comm._sums import gather_numbers
from laconic.comm._transport import (
    Message,
    all_gather,
    joined,
    no_values,
    padded,
)
from laconic.errors import ConfigError
from laconic.exchanges._base import MESSAGE_BYTES, Exchange, norm_and_plain

_FIRST_SUM = 2  # phases 0 and 1 are encodings; additions draw with phases from here on


@dataclass(frozen=True, kw_only=True)
class Tree(Exchange):
    """`tree`: every chunk is added up along a balanced tree of its own, then sent to all.

    With v = (rank - j) mod n for chunk j, in round k = 0, 1, .. ceil(log2 n) - 1:

        v mod 2^(k+1) = 2^k      sends its sum of chunk j to v - 2^k
        v mod 2^(k+1) = 0        adds what comes from v + 2^k, if that is below n

    1. Whatever the chunk, a rank sends to rank - 2^k and receives from rank + 2^k: one message per
       round. After ceil(log2 n) rounds rank j holds the sum of chunk j, for any n.
    2. The re-rounding of global-exp climbs at most one exponent an addition: a tree needs
       ceil(log2 n) of headroom, a chain n - 1. Every addition has a key of its own.
    3. The owner's wire goes to all, who decode it, times 1/n.

    Bytes per rank: 2·(n-1)/n of the encoded tensor (n - 1 sends per chunk, and its copies).
    """

    name: ClassVar[str] = "tree"

    def check(self, codec: Codec) -> None:
        if not codec.pairwise:
            raise ConfigError(
                f"a tree adds wires in pairs, which {codec.name} cannot; use '{codec}@"
                f"{'allreduce' if codec.summable else 'scatter-reduce'}'"
            )

    def mean(
        self, x: Tensor, codec: Codec, context: ExchangeContext, uncompressed: Tensor | None = None
    ) -> None:
        n, rank = context.size, context.rank
        norm = codec.global_norm(gather_numbers(codec.local_norm(x), context, uncompressed))
        chunks = chunks_of(x, n)
        wires = [
            codec.encode(chunk, context.key(rank, j), norm=norm, workers=n)
            for j, chunk in enumerate(chunks)
        ]
        stride, phase = 1, _FIRST_SUM
        while stride < n:
            self._round(wires, codec, context, stride, phase)
            stride, phase = 2 * stride, phase + 1
        counts = [chunk.numel() for chunk in chunks]
        sizes = Sizes(tuple(wire.nbytes for wire in wires), known=True)
        mine = Message(wires[rank].data, no_values(x))
        for j, message in enumerate(all_gather(mine, context, sizes, [0] * n)):
            if counts[j]:
                key = context.key(j, j, phase)
                decode(
                    codec,
                    message.wire,
                    chunks[j],
                    key,
                    (),
                    x.dtype,
                    context,
                    weight=1 / n,
                    workers=n,
                )

    def _round(
        self, wires: list[Wire], codec: Codec, context: ExchangeContext, stride: int, phase: int
    ) -> None:
        """Send half of the remaining chunks one way, add those that arrive the other way."""
        n, rank = context.size, context.rank
        place = [(rank - j) % n for j in range(n)]
        going = [j for j in range(n) if place[j] % (2 * stride) == stride]
        coming = [j for j in range(n) if place[j] % (2 * stride) == 0 and place[j] + stride < n]
        device = wires[0].buffer.device
        frame = context.scratch.take("tree frame", FRAME_BYTES if going else 0, device, torch.uint8)
        send = joined([frame, *(wires[j].data for j in going)], "tree send", context, device)
        room = [padded(wires[j].nbytes) for j in coming]
        total = FRAME_BYTES + sum(room) if coming else 0
        receive = context.scratch.take("tree receive", total, device, torch.uint8)
        flight = sendrecv(
            send, (rank - stride) % n, receive, (rank + stride) % n, "tree", context, number=phase
        )
        for j, part in zip(coming, flight.wait(context).split(room), strict=True):
            mine = wires[j]
            theirs = Wire.parse(
                part[: mine.nbytes],
                key=context.key((rank + stride) % n, j, phase),
                shape=mine.shape,
                dtype=mine.dtype,
            )
            wires[j] = codec.reduce(mine, theirs, context.key(rank, j, phase))

    def cost(self, load: TensorLoad, cluster: Cluster) -> list[Task]:
        """Tasks of a bucket: norm(d), S, E(d, n), rounds, X((n-1)(b·c/8 + h)), D(d, n).

        A round k = 0 .. ⌈log2 n⌉ - 1 with m_k chunks is H(m_k·(b·c/8 + 64) + f), reduce(m_k·c).
        """
        links, cost, d = cluster.flat, load.cost, load.encoded
        n = links.ranks
        c, bits = d / n, cost.bits_out / 8
        found = [*norm_and_plain(load, links), Work(cost.encode.seconds(d, n))]
        for stride in (1 << k for k in range(math.ceil(math.log2(n)))):
            chunks = len(range(stride, n, 2 * stride))
            sent = chunks * (bits * c + HEADER_BYTES) + FRAME_BYTES
            found += [links.sendrecv.move(sent), Work(cost.reduce.seconds(chunks * c, chunks))]
        last = links.all_to_all.move((n - 1) * (bits * c + MESSAGE_BYTES))
        return [*found, last, Work(cost.decode.seconds(d, n))]

    def mean_error(self, one: EncodingError, codec: Codec | None = None) -> float:
        """NMSE of the mean: ((1 + e)^(log2 n + 1) - 1) at κ = 1/n, e at κ = 1, linear between.

        Linear in 1/(n·κ). Every addition rounds again, but adding equal values is exact.
        """
        apart = (1 + one.error) ** (math.log2(one.workers) + 1) - 1
        return one.error + (apart - one.error) * (1 / one.agreement - 1) / (one.workers - 1)
