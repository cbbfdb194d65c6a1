"""All-gather: every rank sends its whole tensor to all, as QSGD is printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.errors import ConfigError
from laconic.exchanges._base import Call, Exchange
from laconic.exchanges._transport import Message, no_values, share
from laconic.exchanges._wires import Sizes, decode, encode


@dataclass(frozen=True, kw_only=True)
class AllGather(Exchange):
    """`allgather`: every wire goes to all ranks, which decode and add up: for few ranks.

        x = Σ_i decode(wire of rank i)/n, in order of ranks

    One encoding only, so the error is e1/(n·κ) of the mean; but a rank sends its wire n - 1 times,
    and decodes n: for few ranks, or small messages. All ranks, the sender too, decode the same
    wires in the same order, so all end with the same bits.

    Alistarh et al., QSGD, NIPS 2017, algorithm 1.
    """

    name: ClassVar[str] = "allgather"

    def check(self, codec: Codec) -> None:
        if codec.name == "ndqsg":
            raise ConfigError(
                "ndqsg decodes with side information, which allgather does not have; use dqsg"
            )

    def mean(self, x: Tensor, codec: Codec, call: Call, rest: Tensor | None = None) -> None:
        n, places = call.size, call.inside(0, x.numel())
        mine = encode(codec, x, call.key(call.rank), places, call)
        plain = no_values(x) if rest is None else rest
        sizes = Sizes.of(codec, [x.numel()] * n, [places] * n, x.dtype)
        arrived = share(Message.of(mine, plain), call, sizes, [plain.numel()] * n)
        for i, message in enumerate(arrived):
            key = call.key(i)
            decode(codec, message.wire, x, key, places, x.dtype, call, add=i > 0, weight=1 / n)
            if i == 0:
                torch.mul(message.rest, 1 / n, out=plain)
            else:
                plain.add_(message.rest, alpha=1 / n)
