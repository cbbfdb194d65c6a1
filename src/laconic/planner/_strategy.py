"""A strategy, codec × exchange × schedule, and what its codec costs there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from laconic.codecs import codec
from laconic.errors import ConfigError
from laconic.exchanges import pair
from laconic.planner._cluster import Cluster, CodecCost
from laconic.planner._levels import with_levels
from laconic.planner._line import FREE

PLAIN = CodecCost(
    spec="none",
    bits_out=32,
    bits_back=32,
    bits_once=32,
    error=0,
    error_back=0,
    encode=FREE,
    decode=FREE,
)
SCHEDULES = ("every-step", "ssd", "local", "async")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How gradients are said, carried, and when.

    `period` is k of SSD and H of local steps; `servers` of the asynchronous schedule.
    """

    codec: str = "none"
    exchange: str = ""  # the codec's own
    schedule: str = "every-step"
    period: int = 1
    servers: int = 1

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedules are {', '.join(SCHEDULES)}, not {self.schedule!r}")
        own, way = pair(self.codec, self.exchange or None)
        object.__setattr__(self, "codec", str(own) if own.name != "none" else "none")
        object.__setattr__(self, "exchange", way.name)

    @property
    def plain(self) -> bool:
        """Whether this is DDP as it is."""
        return self.codec == "none" and self.schedule == "every-step"

    @property
    def spec(self) -> str:
        """For `lc.compress`; the exchange is named where it is not the codec's own."""
        usual = pair(self.codec)[1].name
        return self.codec if self.exchange == usual else f"{self.codec}@{self.exchange}"

    @property
    def code(self) -> str:
        """The line to write."""
        if self.schedule == "ssd":
            pulls = "" if self.codec == "none" else f', pull_codec="{self.codec}"'
            return f'lc.SSD(optimizer, model, period={self.period}, codec="{self.codec}"{pulls})'
        if self.schedule == "local":
            return f'lc.LocalSGD(optimizer, model, period={self.period}, codec="{self.spec}")'
        if self.schedule == "async":
            return f'lc.AsyncSGD(optimizer, model, servers={self.servers}, codec="{self.codec}")'
        return "DDP(model)" if self.plain else f'lc.compress(model, "{self.spec}")'

    def __str__(self) -> str:
        """Short, for tables."""
        extra = f"{self.schedule} k={self.period} " if self.schedule in ("ssd", "local") else ""
        extra = "async " if self.schedule == "async" else extra
        return "plain DDP" if self.plain else f"{extra}{self.spec}"


def cost_of(strategy: Strategy, cluster: Cluster) -> CodecCost:
    """The codec's figures as this strategy has them; ConfigError if there are none.

    A cluster's are for two encodings that share an error budget, and for the levels that are left
    to one of n workers. allgather, ssd and async encode once and spend all of the budget. Of
    `global`, those workers share levels whose integers are added: the K nodes of hierarchical, and
    only one on a ring, whose sums widen.
    """
    if strategy.codec == "none":
        return PLAIN
    cost = next((cost for cost in cluster.codecs if cost.spec == strategy.codec), None)
    if cost is None:
        known = ", ".join(cost.spec for cost in cluster.codecs)
        raise ConfigError(f"{strategy.codec} was not measured here; there are {known}")
    adding = {"hierarchical": cluster.nodes, "ring": 1}.get(strategy.exchange, cluster.workers)
    found = with_levels(cost, cluster.workers, adding)
    budget = codec_of(strategy.codec).budget
    if budget is not None and (
        strategy.exchange == "allgather" or strategy.schedule in ("ssd", "async")
    ):
        return replace(found, bits_out=cost.bits_once, bits_back=cost.bits_once, error=budget)
    return found


@cache
def codec_of(spec: str) -> Any:
    """Made once: a plan asks for it thousands of times."""
    return codec(spec)
