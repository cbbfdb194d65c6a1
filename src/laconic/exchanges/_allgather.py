"""All-gather: every rank sends its whole tensor to all, as QSGD is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic.codecs import Codec, Place
from laconic.errors import ConfigError
from laconic.exchanges._base import Call, Exchange
from laconic.exchanges._budget import ALONE, Account
from laconic.exchanges._transport import Message, no_values, share
from laconic.exchanges._wires import Sizes, decode, encode


@dataclass(frozen=True, kw_only=True)
class AllGather(Exchange):
    """`allgather`: every wire goes to all ranks, which decode and add up: for few ranks.

        x = Σ_i decode(wire of rank i)/n, in order of ranks

    One encoding only, so the error is e/(n·κ) of the mean, κ = ‖mean‖²/(average ‖x_i‖²); but a rank
    sends its wire n - 1 times, and decodes n: for few ranks, or small messages. All ranks, the
    sender too, decode the same wires in the same order, so all end with the same bits.

    A codec's `error=` E is the budget of the mean, of each parameter, at every step. Encodings get
    0.9·f·E, f being the n·κ to count on (1 as long as nothing is known); what they spend travels
    with them. A parameter with E1 = Σ_i spent_i/n² > 1.1·E·(‖x‖² - E1) is added up once more, in
    fp32. On CUDA this is one more wait for the device, after decoding.

    Alistarh et al., QSGD, NIPS 2017, algorithm 1.
    """

    name: ClassVar[str] = "allgather"

    def check(self, codec: Codec) -> None:
        if codec.needs_side:
            raise ConfigError(
                "ndqsg decodes with side information, which allgather does not have; use dqsg"
            )

    def mean(self, x: Tensor, codec: Codec, call: Call, rest: Tensor | None = None) -> None:
        places = call.inside(0, x.numel())
        plain = no_values(x) if rest is None else rest
        account = Account.of(codec, call, [places], [x.numel()], ALONE, own_exact=False)
        if account is None:
            self._mean(x, codec, call, places, plain)
            return
        (sent,) = account.with_room([plain], [0])
        spending = {"shares": account.shares(0), "spent": account.room("spent", 0, x.device)}
        total = call.scratch.take("sum", x.numel(), x.device, torch.float32)
        first = self._mean(x, codec, call, places, plain, sent=sent, out=total, **spending)
        account.settle_alone(first, total)
        most = torch.finfo(x.dtype).max  # no mean is larger, its error may be; NaN stays
        with account.exact([x], [x]):
            x.copy_(total.clamp_(-most, most))

    def _mean(
        self,
        x: Tensor,
        codec: Codec,
        call: Call,
        places: Sequence[Place],
        plain: Tensor,
        sent: Tensor | None = None,
        out: Tensor | None = None,
        **spending: Any,
    ) -> Tensor:
        """The mean, in `out` or in place; that of plain values in place.

        `sent` has the plain values, and room behind them for what was spent: E1 of all ranks is
        the result.
        """
        n, out, dtype, count = call.size, x if out is None else out, x.dtype, plain.numel()
        mine = encode(codec, x, call.key(call.rank), places, call, **spending)
        sent = plain if sent is None else sent
        if "spent" in spending:
            sent[count:].copy_(spending["spent"].sqrt())
        spent = torch.zeros(sent.numel() - count, dtype=torch.float64, device=x.device)
        sizes = Sizes.of(codec, [x.numel()] * n, [places] * n, dtype)
        arrived = share(Message.of(mine, sent), call, sizes, [sent.numel()] * n)
        for i, message in enumerate(arrived):
            key = call.key(i)
            decode(codec, message.wire, out, key, places, dtype, call, add=i > 0, weight=1 / n)
            if i == 0:
                torch.mul(message.rest[:count], 1 / n, out=plain)
            else:
                plain.add_(message.rest[:count], alpha=1 / n)
            spent.add_(message.rest[count:].double().square(), alpha=1 / n**2)
        return spent
