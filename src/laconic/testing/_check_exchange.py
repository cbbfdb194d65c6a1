"""Check any exchange for what users rely on."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._cost import FREE, Cluster, Links, TensorLoad
from laconic.codecs import Codec, codec
from laconic.comm._context import ExchangeContext, ExchangeMemory
from laconic.errors import ConfigError
from laconic.exchanges import Exchange, exchange, exchanges
from laconic.schedules._costs import NO_CODEC_COST
from laconic.testing._processes import on_ranks
from laconic.testing._subject import broken, same_bits

CODECS = (
    "none",
    "dqsg:bits=4",
    "global:bits=8",
    "global:bits=4",
    "global-exp:bits=8",
    "ecdq:error=0.05",
    "ndqsg",
    "global:norm=l2,coder=elias",
)
_VALUES, _PLAIN, _STEPS = 3001, 300, 8
_SIZES = (0, 1, 2, 7, 1000)
_NEAR = 1e-5  # of what fp32 sums of few ranks round


def check_exchange(
    given: str | Exchange, *, codecs: Sequence[str] = CODECS, ranks: Sequence[int] = (1, 2, 3, 5)
) -> None:
    """AssertionError, saying which rule was broken, by what, and how to fix it; else nothing.

    Takes an exchange or its spec. On groups of each of `ranks`, with those of `codecs` that it
    carries: the same bits on all ranks; the mean, within an error that averages out; plain values'
    mean as it is; tensors of no value, one and few; NaN and infinities; bytes counted, and as many
    as `cost` predicts. Codecs that it does not carry are refused with a ConfigError.

    Starts processes over Gloo, and so needs an exchange that can be imported. Where there is a
    process group, call it on all of its ranks; it then takes groups of up to its size.
    """
    way = exchange(given)
    _declares(way)
    carried = [spec for spec in codecs if _carries(way, codec(spec))]
    if not carried:
        broken(
            way, "an exchange carries a codec", f"it refuses {', '.join(codecs)}", "Look at check"
        )
    on_ranks(partial(_on_groups, way, carried, tuple(ranks)), max(ranks))


def _declares(way: Exchange) -> None:
    """Settings that compare, and a spec that names them."""
    try:
        alike = hash(way) == hash(way)
    except TypeError:
        alike = False
    if not alike or (way.name in exchanges() and exchange(str(way)) != way):
        broken(
            way,
            "an exchange is its settings, and its spec names it",
            "it has no hash, or laconic.exchanges.exchange(str(way)) is another one",
            "Make the class a dataclass with frozen=True, kw_only=True, and let every setting be "
            "a field",
        )


def _carries(way: Exchange, own: Codec) -> bool:
    """Whether it takes the codec; the error for others names them."""
    try:
        way.check(own)
    except ConfigError as error:
        text = str(error)
        if not re.search(rf"\b{re.escape(own.name)}\b", text):
            broken(
                way,
                "the error for a codec that is refused names it",
                f"the error for {own} is {text!r}",
                "Name the codec, and one that works",
            )
        return False
    return True


def _on_groups(way: Exchange, carried: Sequence[str], ranks: Sequence[int]) -> None:
    world = dist.get_world_size()
    for size in sorted({min(size, world) for size in ranks}):
        group = dist.new_group(list(range(size)))
        if isinstance(group, dist.ProcessGroup) and dist.get_rank() < size:
            way.prepare(group)
            for spec in carried:
                _Check(way, codec(spec), group).run()
        dist.barrier()


class _Check:
    """One exchange with one codec on the ranks of one group."""

    def __init__(self, way: Exchange, own: Codec, group: dist.ProcessGroup) -> None:
        self.way, self.codec, self.group = way, own, group
        self.size, self.rank, self.memory = group.size(), group.rank(), ExchangeMemory()

    def run(self) -> None:
        try:
            self.codec.check_workers(self.size)
        except ConfigError:
            return  # its integers hold no such sum
        self._means()
        self._sizes()
        self._not_finite()

    def _broken(self, rule: str, what: str, fix: str) -> None:
        broken(self.way, rule, f"with {self.codec} on {self.size} ranks {what}", fix)

    def _mine(self, count: int) -> Tensor:
        """Half of a value is common to all ranks."""
        generator = torch.Generator().manual_seed(count)
        common = torch.randn(count, generator=generator)
        generator.manual_seed(1 + self.rank)
        return common + torch.randn(count, generator=generator)

    def _mean_of(self, x: Tensor) -> Tensor:
        mean = x.double()
        dist.all_reduce(mean, group=self.group)
        return mean / self.size

    def _exchanged(self, x: Tensor, step: int, plain: Tensor | None = None) -> ExchangeContext:
        context = ExchangeContext(group=self.group, step=step, memory=self.memory)
        self.way.mean(x, self.codec, context, plain)
        every = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(every, x, group=self.group)
        if not all(same_bits(one, every[0]) for one in every):
            self._broken(
                "all ranks end with the same bits",
                f"they do not, for {x.numel()} {x.dtype} values at step {step}",
                "Let all decode the same wires, and add in the same order",
            )
        return context

    def _means(self) -> None:
        x, plain = self._mine(_VALUES), self._mine(_PLAIN)
        want, plain_want = self._mean_of(x), self._mean_of(plain)
        power, total, first = float(want.square().sum()), torch.zeros_like(want), 0.0
        for step in range(_STEPS):
            y, rest = x.clone(), plain.clone()
            context = self._exchanged(y, step, rest)
            if step == 0:
                first = float((y - want).square().sum()) / power
                self._counted(context)
            if float((rest - plain_want).abs().max()) > _NEAR * float(plain_want.abs().max()):
                self._broken(
                    "plain values become their mean, exact but for fp32 rounding",
                    "they do not",
                    "Average `uncompressed`, in place; laconic.comm has plain_mean",
                )
            total += y
        left = float((total / _STEPS - want).square().sum()) / power
        if self.codec.lossless:
            allowed = _NEAR**2
        else:  # what is biased by itself need not average out
            averages = self.codec.unbiased or self.codec.side_information
            allowed = max(first / 3, _NEAR**2) if averages else math.inf
        if left > allowed:
            self._broken(
                "x becomes the mean over ranks, and errors average out",
                f"the mean of {_STEPS} steps is off by {math.sqrt(left):.2%}, a single one by "
                f"{math.sqrt(first):.2%}",
                "Divide by the number of ranks once, leave no rank out, and draw from "
                "context.key(rank, chunk, phase), another one for every encoding",
            )

    def _counted(self, context: ExchangeContext) -> None:
        sent = torch.tensor([float(context.traffic.sent_bytes)])
        dist.all_reduce(sent, group=self.group)
        counted = float(sent) / self.size
        if self.size > 1 and not counted:
            self._broken(
                "bytes are counted",
                "context.traffic.sent_bytes is 0 after an exchange",
                "Send by laconic.comm, or within context.traffic.sending(nbytes)",
            )
        predicts = type(self.way).cost is not Exchange.cost
        if not predicts or self.size < 2 or self.codec.varies or self.codec.side_information:
            return
        bits = 8 * self.codec.nbytes(_VALUES) / _VALUES
        cost = replace(NO_CODEC_COST, bits_out=bits, bits_back=bits, bits_once=bits)
        load = TensorLoad(encoded=_VALUES, plain=_PLAIN, codec=self.codec, cost=cost)
        links = Links(ranks=self.size, allreduce=(FREE,), all_to_all=FREE, sendrecv=FREE)
        pair = Links(ranks=1, allreduce=(FREE,), all_to_all=FREE, sendrecv=FREE)
        cluster = Cluster(workers=self.size, flat=links, inside=pair, between=links)
        predicted = self.way.sent_bytes(load, cluster)
        if abs(predicted - counted) > 0.15 * counted + 200:
            self._broken(
                "cost predicts the bytes that are sent",
                f"it says {predicted:.0f} per rank, and {counted:.0f} were counted",
                "A Move's nbytes are what one rank sends, headers and frames included",
            )

    def _sizes(self) -> None:
        for count in _SIZES:
            for dtype in (torch.float32, torch.bfloat16):
                x = self._mine(count).to(dtype)
                self._exchanged(x, 100)
                if not x.isfinite().all():
                    self._broken(
                        "finite values stay finite", f"{count} {dtype} values do not", "Mind chunks"
                    )

    def _not_finite(self) -> None:
        for value in (math.nan, math.inf):
            for place in (0, _VALUES - 1):
                x = self._mine(_VALUES)
                if self.rank == self.size - 1:
                    x[place] = value
                self._exchanged(x, 200)
                if x.isfinite().all():
                    self._broken(
                        "values that are not finite arrive as such",
                        f"{value} at {place} of {_VALUES} values became finite",
                        "GradScaler must see it: collectives that take a maximum lose NaN",
                    )
