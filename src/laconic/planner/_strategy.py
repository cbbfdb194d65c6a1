"""A strategy, codec × exchange × schedule, and the cost of its codec."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cache

from laconic._cost import Cluster, CodecCost, Workload
from laconic._spec import to_spec
from laconic.codecs import Codec, codec
from laconic.errors import ConfigError
from laconic.exchanges import Exchange, pair
from laconic.schedules._costs import (
    EVERY_STEP,
    NO_CODEC_COST,
    Scenario,
    ScheduleCost,
    schedule_cost,
)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How gradients are encoded, how they travel, and when.

    `schedule` may have settings, as in "ssd:period=4"; `period` (k of SSD, H of local steps) and
    `servers` (of the asynchronous schedule) are two of them.
    """

    codec: str = "none"
    exchange: str = ""  # the codec's own
    schedule: str = EVERY_STEP.name
    period: int = 1
    servers: int = 1

    def __post_init__(self) -> None:
        own, way = pair(self.codec, self.exchange or None)
        object.__setattr__(self, "codec", str(own))
        object.__setattr__(self, "exchange", str(way))
        timing = schedule_cost(self.schedule)
        for name in ("period", "servers"):
            if hasattr(timing, name) and getattr(self, name) == 1:
                object.__setattr__(self, name, getattr(timing, name))
                timing = replace(timing, **{name: type(timing).__dataclass_fields__[name].default})
        object.__setattr__(self, "schedule", to_spec(timing))

    @property
    def timing(self) -> ScheduleCost:
        """The schedule, with its settings."""
        return _timing(self.schedule, self.period, self.servers)

    @property
    def plain(self) -> bool:
        """Whether this is DDP as it is."""
        return self.codec == "none" and not self.timing.changes_training

    @property
    def spec(self) -> str:
        """For `lc.compress`; the exchange is named where it is not the codec's own."""
        usual = str(pair_of(self.codec)[1])
        return self.codec if self.exchange == usual else f"{self.codec}@{self.exchange}"

    @property
    def code(self) -> str:
        """The line to write."""
        return self.timing.code(self.codec, self.spec)

    def on(self, cluster: Cluster, workload: Workload) -> Scenario:
        """This strategy there; ConfigError if its codec was not measured, or cannot serve it."""
        own, way = pair_of(self.codec, self.exchange)
        return Scenario(
            codec=own,
            exchange=way,
            cost=self.cost(cluster),
            cluster=cluster,
            workload=workload,
        )

    def cost(self, cluster: Cluster) -> CodecCost:
        """The codec's figures as exchange and schedule use it; ConfigError if there are none.

        A cluster's are for two encodings that share an error budget, and for the levels that are
        left to one of n workers. Some exchanges and schedules encode once and spend all of the
        budget, or add the integers of fewer workers.
        """
        own, way = pair_of(self.codec, self.exchange)
        if own.lossless:
            return NO_CODEC_COST
        cost = next((cost for cost in cluster.codecs if cost.spec == self.codec), None)
        if cost is None:
            known = ", ".join(cost.spec for cost in cluster.codecs)
            raise ConfigError(f"{self.codec} was not measured here; there are {known}")
        found = cost.shared_by(own, way.workers_added(own, cluster), cluster.workers)
        budget = own.budget
        if budget is not None and (self.timing.encodes_once or not way.encodes_mean(own)):
            return found.spent_once(budget)
        return found

    def __str__(self) -> str:
        """Short, for tables."""
        return "plain DDP" if self.plain else f"{self.timing} {self.spec}".strip()


@cache
def _timing(spec: str, period: int, servers: int) -> ScheduleCost:
    timing = schedule_cost(spec)
    known = {one.name for one in fields(timing)}
    given = {"period": period, "servers": servers}
    return replace(timing, **{name: value for name, value in given.items() if name in known})


@cache
def pair_of(spec: str, way: str | None = None) -> tuple[Codec, Exchange]:
    """Cached: a plan needs them thousands of times."""
    return pair(spec, way)


_OPTION = re.compile(r"[,:](?!bits=|error=|step=)[a-z_]+=[^,:()]+")


@cache
def short(spec: str) -> str:
    """The shortest spec of the same codec: of default settings only bits, error or step.

    >>> short("dqsg:bits=4,levels=7,block=512,coder=fixed")
    'dqsg:bits=4'
    """
    meant = str(codec(spec))
    text = spec
    for option in reversed(_OPTION.findall(spec)):  # the last is seldom the one that matters
        start = text.rfind(option)
        rest = text[start + len(option) :]
        if option[0] == ":" and rest[:1] == ",":
            rest = ":" + rest[1:]
        less = text[:start] + rest
        if _means(less) == meant:
            text = less
    return text


def _means(text: str) -> str | None:
    try:
        return str(codec(text))
    except ValueError:  # a ConfigError is one
        return None
