"""All-gather: every rank sends its whole tensor to all, as QSGD is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic._cost import Cluster, Task, TensorLoad, Work
from laconic.codecs import Codec, Place
from laconic.comm._context import ExchangeContext, Sizes, decode, encode
from laconic.comm._transport import Message, all_gather, no_values
from laconic.errors import ConfigError
from laconic.exchanges._base import MESSAGE_BYTES, Exchange, buffers, lengths
from laconic.exchanges._budget import ALONE, Account


@dataclass(frozen=True, kw_only=True)
class AllGather(Exchange):
    """`allgather`: every wire goes to all ranks, which decode and add up: for few ranks.

        x = Σ_i decode(wire of rank i)/n, in order of ranks

    One encoding only, so the error is e/(n·κ) of the mean, κ = ‖mean‖²/(average ‖x_i‖²); but a rank
    sends its wire n - 1 times, and decodes n: for few ranks, or small messages. All ranks, the
    sender too, decode the same wires in the same order, so all end with the same bits.

    A codec's `error=` E is the budget of the mean, of each parameter, at every step. Encodings get
    0.9·f·E, f being the expected n·κ (1 without an estimate); what they spend travels with them. A
    parameter with E1 = Σ_i spent_i/n² > 1.1·E·(‖x‖² - E1) is added up once more, in fp32. On CUDA
    this is one more wait for the device, after decoding.

    Alistarh et al., QSGD, NIPS 2017, algorithm 1.
    """

    name: ClassVar[str] = "allgather"

    def check(self, codec: Codec) -> None:
        if codec.side_information:
            raise ConfigError(
                "ndqsg decodes with side information, which allgather does not have; use dqsg"
            )

    def mean(
        self, x: Tensor, codec: Codec, context: ExchangeContext, uncompressed: Tensor | None = None
    ) -> None:
        places = context.inside(0, x.numel())
        plain = no_values(x) if uncompressed is None else uncompressed
        account = Account.of(codec, context, [places], [x.numel()], ALONE, own_exact=False)
        if account is None:
            self._mean(x, codec, context, places, plain)
            return
        (sent,) = account.with_room([plain], [0])
        spending = {"shares": account.shares(0), "spent": account.room("spent", 0, x.device)}
        total = context.scratch.take("sum", x.numel(), x.device, torch.float32)
        first = self._mean(x, codec, context, places, plain, sent=sent, out=total, **spending)
        account.settle_alone(first, total)
        most = torch.finfo(x.dtype).max  # no mean is larger, its error may be; NaN stays
        with account.exact([x], [x]):
            x.copy_(total.clamp_(-most, most))

    def _mean(
        self,
        x: Tensor,
        codec: Codec,
        context: ExchangeContext,
        places: Sequence[Place],
        plain: Tensor,
        sent: Tensor | None = None,
        out: Tensor | None = None,
        **spending: Any,
    ) -> Tensor:
        """The mean, in `out` or in place; that of plain values in place.

        `sent` has the plain values, and room after them for what was spent: E1 of all ranks is
        the result.
        """
        n, out, dtype, count = context.size, x if out is None else out, x.dtype, plain.numel()
        key = context.key(context.rank)
        mine = encode(codec, x, key, places, context, **spending) if x.numel() else None
        sent = plain if sent is None else sent
        if "spent" in spending:
            sent[count:].copy_(spending["spent"].sqrt())
        spent = torch.zeros(sent.numel() - count, dtype=torch.float64, device=x.device)
        sizes = Sizes.of(codec, [x.numel()] * n, [places] * n, dtype)
        arrived = all_gather(Message.of(mine, sent), context, sizes, [sent.numel()] * n)
        for i, message in enumerate(arrived):
            if x.numel():
                key, more = context.key(i), i > 0
                decode(
                    codec, message.wire, out, key, places, dtype, context, add=more, weight=1 / n
                )
            if i == 0:
                torch.mul(message.uncompressed[:count], 1 / n, out=plain)
            else:
                plain.add_(message.uncompressed[:count], alpha=1 / n)
            spent.add_(message.uncompressed[count:].double().square(), alpha=1 / n**2)
        return spent

    def cost(self, load: TensorLoad, cluster: Cluster) -> list[Task]:
        """Tasks of a bucket: E(d, 1), [X(f(n-1)),] X((n-1)(b·d/8 + h + 4p)), D(n·d, n)."""
        links, cost, d = cluster.flat, load.cost, load.encoded
        n, message = links.ranks, cost.bits_out / 8 * d + MESSAGE_BYTES + 4 * load.plain
        return [
            Work(cost.encode.seconds(d)),
            *lengths(load, links),
            links.all_to_all.move((n - 1) * message),
            Work(cost.decode.seconds(n * d, n)),
        ]

    def planned(self, codec: Codec, cluster: Cluster) -> bool:
        """With more ranks, sending everything to everyone never pays."""
        return cluster.workers <= 8 and not (codec.summable or codec.side_information)

    def memory(self, load: TensorLoad, cluster: Cluster) -> float:
        """Bytes that a rank holds while it exchanges: its wire, and those of all ranks."""
        return buffers(load, cluster.workers, cluster.workers)
