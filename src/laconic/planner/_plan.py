"""Plan: what strategies are predicted to take on a cluster, and which of them pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from laconic._cost import Cluster, CodecCost, Workload
from laconic._progress import Watch, announced, unwatched
from laconic._spec import to_spec
from laconic._units import rate
from laconic.codecs import codec
from laconic.errors import ConfigError
from laconic.exchanges import exchange, exchanges
from laconic.planner._predict import Prediction, predict, step_seconds
from laconic.planner._strategy import Strategy, short
from laconic.schedules._costs import schedule_costs

PLAIN_DDP = Strategy()
SLOWEST_BIT_S, FASTEST_BIT_S = 1e3, 100e12
_NEAR = 1.03  # times faster: less is not worth it, nor beyond this model's precision
_PRECISION = 0.01  # of a break-even rate

At = Callable[[float], Cluster]


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """The link rates at which a strategy beats plain DDP.

    Below `bit_s`, above it (a strategy that sends more but waits less), always, or never, looked at
    from 1 kbit/s to 100 Tbit/s.
    """

    when: Literal["below", "above", "always", "never"]
    bit_s: float | None = None

    def __str__(self) -> str:
        """Short, for tables."""
        return self.when if self.bit_s is None else f"{self.when} {rate(self.bit_s)}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A strategy in a plan.

    `changes_training`: steps are not those of plain DDP with a less precise gradient, but others
    (delayed, or averaged weights); accuracy per step may differ, and is not predicted.
    """

    name: str
    code: str
    prediction: Prediction
    speedup: float  # over plain DDP
    changes_training: bool
    break_even: BreakEven | None  # None: this is plain DDP, or above the error budget


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Strategies, fastest first; plain DDP is among them."""

    choices: tuple[Choice, ...]
    above_error: tuple[Choice, ...]  # more error than was allowed
    error: float
    workers: int
    link_bit_s: float
    compute_s: float

    @property
    def plain(self) -> Choice:
        """DDP as it is."""
        return next(one for one in self.choices if one.prediction.strategy.plain)

    @property
    def best(self) -> Choice:
        """The fastest of those that keep training as it is; plain DDP unless it gains 3%."""
        first = next(one for one in self.choices if not one.changes_training)
        return first if first.speedup >= _NEAR else self.plain

    @property
    def verdict(self) -> str:
        """In a sentence or two."""
        best, first = self.best, self.choices[0]
        sentence = _verdict_plain(self) if best.prediction.strategy.plain else _verdict(best)
        if first.changes_training and first.speedup >= _NEAR * best.speedup:
            sentence += (
                f" {first.name} is predicted {first.speedup:.1f} x faster than plain DDP, but it "
                "changes training: check its accuracy."
            )
        return sentence


def _verdict_plain(plan: Plan) -> str:
    others = [one.speedup for one in plan.choices if not one.changes_training]
    gain = max(others) - 1
    why = f"; computation alone is {plan.compute_s / plan.plain.prediction.step_s:.0%} of its step"
    if gain <= 0:
        return f"Plain DDP is predicted to be the fastest{why}."
    return f"Plain DDP is best: nothing is predicted to gain more than {gain:.1%}{why}."


def _verdict(best: Choice) -> str:
    limits = {
        "compute": "computation limits it",
        "wire": "the wire limits it",
        "latency": "latency limits it",
        "codec": "the codec limits it",
    }
    sentence = (
        f"{best.name} is predicted {best.speedup:.1f} x faster than plain DDP; "
        f"{limits[best.prediction.limit]}"
    )
    where = best.break_even
    if where is None or where.bit_s is None:
        return f"{sentence}."
    other = "above" if where.when == "below" else "below"
    return f"{sentence}; {other} {rate(where.bit_s)} plain DDP is as fast."


def plan(
    cluster: Cluster,
    workload: Workload,
    *,
    error: float = 0.1,
    strategies: Iterable[Strategy] | None = None,
    link_bit_s: float | None = None,
    at: At | None = None,
    watch: Watch = unwatched,
) -> Plan:
    """Predict strategies (by default all that are sensible), and rank them.

    1. Predict each.
    2. Set those apart whose mean would have more NMSE than `error`.
    3. For the others look for the link rate f·`link_bit_s` at which they and plain DDP are equally
       fast, by bisection of log f; `at(f)` is the cluster with links f times as fast.

    Without `link_bit_s` the rate is that of the all-reduce's line; `at` is `cluster.faster`.
    """
    if not 0 < error < math.inf:
        raise ConfigError(f"error is the NMSE that you allow, above 0 (0.1, say), not {error!r}")
    given = sensible(cluster) if strategies is None else strategies
    usable = dict.fromkeys([PLAIN_DDP, *given])
    link = link_bit_s or 8 * max(line.per_s for line in cluster.flat.allreduce)
    curves = Curves(workload, at or cluster.faster)
    plain_s = curves.seconds(PLAIN_DDP, 1.0)
    choices, above = [], []
    for strategy in announced(list(usable), watch):
        found = predict(strategy, cluster, workload)
        within = found.error <= error
        searched = within and not strategy.plain
        choice = Choice(
            name=named(strategy, str(strategy)),
            code=_code(strategy, workload),
            prediction=found,
            speedup=plain_s / found.step_s,
            changes_training=strategy.timing.changes_training,
            break_even=break_even(strategy, curves, link) if searched else None,
        )
        (choices if within else above).append(choice)
    order = lambda one: one.prediction.step_s  # noqa: E731
    return Plan(
        choices=tuple(sorted(choices, key=order)),
        above_error=tuple(sorted(above, key=order)),
        error=error,
        workers=cluster.workers,
        link_bit_s=link,
        compute_s=workload.compute_s,
    )


def _code(strategy: Strategy, workload: Workload) -> str:
    """The line to write; with optimizer= where it divides by a second moment."""
    code = named(strategy, strategy.code)
    over = workload.adaptive and not (strategy.plain or strategy.timing.changes_training)
    return f"{code[:-1]}, optimizer=optimizer)" if over else code


def named(strategy: Strategy, text: str) -> str:
    """With the codec's shortest name."""
    return text.replace(strategy.codec, short(strategy.codec))


def sensible(cluster: Cluster) -> list[Strategy]:
    """Codec × exchange × schedule of all codecs that the cluster has figures for."""
    found = []
    for cost in cluster.codecs:
        found += _every_step(cost, cluster)
        for timing in (one for kind in schedule_costs() for one in kind.planned()):
            if cost.spec.startswith(timing.planned_with):
                found.append(Strategy(codec=cost.spec, schedule=to_spec(timing)))
    return [strategy for strategy in found if _possible(strategy, cluster)]


def _every_step(cost: CodecCost, cluster: Cluster) -> Iterator[Strategy]:
    yield Strategy(codec=cost.spec)
    own = codec(cost.spec)
    for name in exchanges():
        if exchange(name).planned(own, cluster):
            yield Strategy(codec=cost.spec, exchange=name)


def _possible(strategy: Strategy, cluster: Cluster) -> bool:
    """Whether the integers of its codec hold the sum of all workers."""
    try:
        strategy.cost(cluster)
    except ConfigError:
        return False
    return True


class Curves:
    """Step times over links of other rates, remembered."""

    def __init__(self, workload: Workload, at: At) -> None:
        self._workload = workload
        self._at = cache(at)
        self.seconds: Callable[[Strategy, float], float] = cache(self._seconds)

    def _seconds(self, strategy: Strategy, times: float) -> float:
        return step_seconds(strategy, self._at(times), self._workload)


def break_even(strategy: Strategy, curves: Curves, link_bit_s: float) -> BreakEven:
    """Where the two times cross, to 1%; if they do so more than once, one of those places."""

    def beats(bit_s: float) -> bool:
        times = bit_s / link_bit_s
        return curves.seconds(strategy, times) < curves.seconds(PLAIN_DDP, times) * (1 - 1e-9)

    low, high = SLOWEST_BIT_S, FASTEST_BIT_S
    slow, fast = beats(low), beats(high)
    if slow == fast:
        return BreakEven(when="always" if slow else "never")
    while high > low * (1 + _PRECISION):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if beats(middle) == slow else (low, middle)
    return BreakEven(when="below" if slow else "above", bit_s=math.sqrt(low * high))


def rates(link_bit_s: float, decades: float = 2.0, points: int = 41) -> Sequence[float]:
    """Around a rate, evenly in the logarithm; for plots."""
    return [link_bit_s * 10 ** (decades * (2 * i / (points - 1) - 1)) for i in range(points)]
