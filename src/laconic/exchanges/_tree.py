"""A tree for sums that must be rounded at every addition: global-exp's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic._wire import Wire
from laconic.codecs import Codec
from laconic.errors import ConfigError
from laconic.exchanges._base import Call, Exchange
from laconic.exchanges._frame import FRAME_BYTES
from laconic.exchanges._point_to_point import fly
from laconic.exchanges._transport import Message, gather_numbers, joined, no_values, padded, share
from laconic.exchanges._wires import Sizes, chunks_of, decode

_FIRST_SUM = 2  # phases 0 and 1 are encodings; additions draw with phases from here on


@dataclass(frozen=True, kw_only=True)
class Tree(Exchange):
    """`tree`: every chunk is added up along a balanced tree of its own, then sent to all.

    With v = (rank - j) mod n for chunk j, in round k = 0, 1, .. ceil(log2 n) - 1:

        v mod 2^(k+1) = 2^k      sends its sum of chunk j to v - 2^k
        v mod 2^(k+1) = 0        adds what comes from v + 2^k, if that is below n

    1. Whatever the chunk, a rank sends to rank - 2^k and receives from rank + 2^k: one message a
       round. After ceil(log2 n) rounds rank j holds the sum of chunk j, for any n.
    2. The re-rounding of global-exp climbs at most one exponent an addition: a tree needs
       ceil(log2 n) of headroom, a chain n - 1. Every addition has a key of its own.
    3. The owner's wire goes to all, who decode it, times 1/n.

    Bytes a rank sends: 2·(n-1)/n of the encoded tensor (n - 1 sends a chunk, and its copies).
    """

    name: ClassVar[str] = "tree"

    def check(self, codec: Codec) -> None:
        if not hasattr(codec, "reduce"):
            raise ConfigError(
                f"a tree adds wires in pairs, which {codec.name} cannot; use '{codec}@"
                f"{'allreduce' if codec.summable else 'scatter-reduce'}'"
            )

    def mean(self, x: Tensor, codec: Codec, call: Call, rest: Tensor | None = None) -> None:
        own: Any = codec  # with local_norm, global_norm and reduce
        n, rank = call.size, call.rank
        norm = own.global_norm(gather_numbers(own.local_norm(x), call, rest))
        chunks = chunks_of(x, n)
        wires = [
            codec.encode(chunk, call.key(rank, j), norm=norm, workers=n)
            for j, chunk in enumerate(chunks)
        ]
        stride, phase = 1, _FIRST_SUM
        while stride < n:
            self._round(wires, own, call, stride, phase)
            stride, phase = 2 * stride, phase + 1
        counts = [chunk.numel() for chunk in chunks]
        sizes = Sizes(tuple(wire.nbytes for wire in wires), known=True)
        mine = Message(wires[rank].data, no_values(x))
        for j, message in enumerate(share(mine, call, sizes, [0] * n)):
            if counts[j]:
                key = call.key(j, j, phase)
                decode(
                    codec, message.wire, chunks[j], key, (), x.dtype, call, weight=1 / n, workers=n
                )

    def _round(self, wires: list[Wire], codec: Any, call: Call, stride: int, phase: int) -> None:
        """Send half of what is left one way, add what comes the other way."""
        n, rank = call.size, call.rank
        place = [(rank - j) % n for j in range(n)]
        going = [j for j in range(n) if place[j] % (2 * stride) == stride]
        coming = [j for j in range(n) if place[j] % (2 * stride) == 0 and place[j] + stride < n]
        device = wires[0].buffer.device
        frame = call.scratch.take("tree frame", FRAME_BYTES if going else 0, device, torch.uint8)
        send = joined([frame, *(wires[j].data for j in going)], "tree send", call, device)
        room = [padded(wires[j].nbytes) for j in coming]
        total = FRAME_BYTES + sum(room) if coming else 0
        receive = call.scratch.take("tree receive", total, device, torch.uint8)
        flight = fly(
            send, (rank - stride) % n, receive, (rank + stride) % n, "tree", call, number=phase
        )
        for j, part in zip(coming, flight.wait(call).split(room), strict=True):
            mine = wires[j]
            theirs = Wire.parse(
                part[: mine.nbytes],
                key=call.key((rank + stride) % n, j, phase),
                shape=mine.shape,
                dtype=mine.dtype,
            )
            wires[j] = codec.reduce(mine, theirs, call.key(rank, j, phase))
