"""A strategy, codec × exchange × schedule, and what a step of it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from laconic.codecs import codec
from laconic.errors import ConfigError
from laconic.exchanges import pair
from laconic.planner._cluster import Bucket, Cluster, CodecCost, Workload
from laconic.planner._levels import with_levels
from laconic.planner._line import FREE
from laconic.planner._mean_error import mean_error
from laconic.planner._phases import Load, Phases, gather, phases, scatter
from laconic.planner._timeline import Mark, Move, Pause, Stage, Submit, Timeline, Wait, Work

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
# copies of all values (read once, written once) that schedules make beside their exchanges
_SSD_COPIES = 14  # gradients taken, looked at and cleared, the local rule, weights written
_PULL_COPIES, _OWNER_COPIES = 2.5, 4  # a difference added to the last pull; of a chunk, made
_LOCAL_COPIES = 4
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


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a strategy is expected to take, a step."""

    strategy: Strategy
    step_s: float
    sent_bytes: float  # by a rank, to ranks of other nodes
    error: float  # NMSE of the mean
    limit: str  # compute, wire, latency or codec: what it gains most from being without
    memory_bytes: float  # of a rank, on top of plain DDP


def predict(strategy: Strategy, cluster: Cluster, workload: Workload) -> Prediction:
    """Time, bytes, error, memory, and what limits."""
    cost = cost_of(strategy, cluster)
    return Prediction(
        strategy=strategy,
        step_s=step_seconds(strategy, cluster, workload),
        sent_bytes=_sent(strategy, cluster, workload),
        error=_error(strategy, cost, cluster, workload),
        limit=_limit(strategy, cluster, workload),
        memory_bytes=_memory(strategy, cost, cluster, workload),
    )


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
    budget = _codec(strategy.codec).budget
    if budget is not None and (
        strategy.exchange == "allgather" or strategy.schedule in ("ssd", "async")
    ):
        return replace(found, bits_out=cost.bits_once, bits_back=cost.bits_once, error=budget)
    return found


@cache
def _codec(spec: str) -> Any:
    return codec(spec)


def step_seconds(strategy: Strategy, cluster: Cluster, workload: Workload) -> float:
    """A step's time, by simulating what a rank does.

    - every-step: forward, then backward, in which every bucket goes to a lane when it is ready; a
      step waits for all.
    - ssd: owners make the optimizer's step, ranks a local one. The push of step t runs behind step
      t + 1. Step t + 2 waits for it, or step t + 1 if a
      pull follows. Without anything shared: [(k-1)·max(C, P) + max(C, P + L)]/k.
    - local: H steps, then one exchange of all values; H·C + X, over H.
    - async: a worker pushes, waits for weights, and goes on: C + P + L, unless a server, which does
      that for n/S workers, takes longer.
    """
    if strategy.schedule == "async":
        return _async_seconds(strategy, cluster, workload)
    programs = {"every-step": _every_step, "ssd": _ssd, "local": _local}
    lanes = cluster.lanes if strategy.schedule == "every-step" else 1
    device = cluster.device
    timeline = Timeline(
        lanes=lanes,
        room=device.room,
        drain=device.drain,
        pace=device.pace,
        start_pace=device.start_pace,
    )
    marks = timeline.run(programs[strategy.schedule](strategy, cluster, workload))
    return (marks[-1] - marks[0]) / (len(marks) - 1)


def _every_step(strategy: Strategy, cluster: Cluster, workload: Workload) -> Iterator[Stage]:
    yield Mark()
    yield Work(workload.forward_s)
    at = 0.0
    for number, bucket in enumerate(workload.buckets):
        yield Work(max(0.0, bucket.ready_s - at))
        at = max(at, bucket.ready_s)
        stages = _bucket_phases(strategy, bucket, cluster, workload)
        meet = [_meeting(workload)] if number < cluster.lanes else []
        yield Submit(number % cluster.lanes, number, (*meet, *stages))
    yield Work(max(0.0, workload.backward_s - at))
    for number in range(len(workload.buckets)):
        yield Wait(number)
    yield Work(workload.rest_s)
    yield Mark()


def _ssd(strategy: Strategy, cluster: Cluster, workload: Workload) -> Iterator[Stage]:
    push, pull = _push_pull(strategy, cluster, workload)
    k, own = strategy.period, cluster.device.copy.seconds(_SSD_COPIES * workload.values)
    first = -(-4 // k) * k  # what has settled by then is timed, in whole periods
    for t in range(first + 3 * k + 1):
        if t >= first:
            yield Mark()
        yield Work(workload.forward_s + workload.backward_s + own)
        if t >= 2:
            yield Wait(t - 2)
        if t and t % k == 0:  # the push before this one had a pull
            yield Wait(t - 1)
        pulls = (t + 1) % k == 0
        yield Submit(0, t, tuple([*push, *pull] if pulls else push))


def _meeting(workload: Workload) -> Pause:
    """Until the slowest rank is there, too."""
    return Pause(workload.skew_s)


def _push_pull(strategy: Strategy, cluster: Cluster, workload: Workload) -> tuple[Phases, Phases]:
    load = _load(strategy, workload.values, 0, cluster, workload)
    chunk, copy = workload.values / cluster.workers, cluster.device.copy
    step = Work(workload.rest_s / cluster.workers)
    push: Phases = [_meeting(workload), *scatter(load, cluster.flat, cluster.device), step]
    pull = gather(load, cluster.flat)
    if strategy.codec != "none":
        made = copy.seconds(_OWNER_COPIES * chunk) + load.cost.decode.seconds(chunk)
        added = copy.seconds(_PULL_COPIES * workload.values)
        pull = [Work(made), *pull, Work(added)]
    return push, pull


def _local(strategy: Strategy, cluster: Cluster, workload: Workload) -> Iterator[Stage]:
    encoded = sum(bucket.encoded for bucket in workload.buckets)
    whole = Bucket(encoded=encoded, plain=workload.values - encoded, ready_s=0.0)
    stages = _bucket_phases(strategy, whole, cluster, workload)
    copies = Work(cluster.device.copy.seconds(_LOCAL_COPIES * workload.values))
    yield Mark()
    yield Work(strategy.period * workload.compute_s)
    yield Submit(0, 0, (copies, _meeting(workload), *stages))
    yield Wait(0)
    for _ in range(strategy.period):  # a mark a step, so that the mean is over steps
        yield Mark()


def _async_seconds(strategy: Strategy, cluster: Cluster, workload: Workload) -> float:
    """Servers' links are as workers': n/S pushes at once share one."""
    cost, d = cost_of(strategy, cluster), workload.values
    n, hop = cluster.workers - strategy.servers, cluster.flat.hop
    if n < 1:
        raise ConfigError("the asynchronous schedule needs workers beside its servers")
    out, back = cost.bits_out / 8 * d, 4.0 * d
    worker = (
        workload.compute_s
        + cost.encode.seconds(d)
        + hop.seconds(out)
        + cost.decode.seconds(d)
        + hop.seconds(back)
        + cluster.device.copy.seconds(d)
    )
    server = (n / strategy.servers) * (
        max(out, back) / hop.per_s + cost.decode.seconds(d) + cluster.device.copy.seconds(5 * d)
    )
    return max(worker, server)


def _bucket_phases(
    strategy: Strategy, bucket: Bucket, cluster: Cluster, workload: Workload
) -> Phases:
    if strategy.codec != "none" and not bucket.encoded:  # nothing worth encoding: a plain mean
        strategy = Strategy()
    load = _load(strategy, bucket.encoded, bucket.plain, cluster, workload)
    return phases(strategy.exchange, load, cluster)


def _load(
    strategy: Strategy, encoded: float, plain: float, cluster: Cluster, workload: Workload
) -> Load:
    own = _codec(strategy.codec)
    return Load(
        encoded=encoded,
        plain=plain,
        cost=cost_of(strategy, cluster),
        varies=own.varies,
        shared_norm=hasattr(own, "local_norm"),
        value_bytes=workload.value_bytes,
        levels=own.levels_for(1) if strategy.exchange == "ring" else 0,
    )


def _sent(strategy: Strategy, cluster: Cluster, workload: Workload) -> float:
    """Bytes that a rank sends to ranks elsewhere, a step."""
    if strategy.schedule == "async":
        return cost_of(strategy, cluster).bits_out / 8 * workload.values
    if strategy.schedule == "ssd":
        push, pull = _push_pull(strategy, cluster, workload)
        return _bytes(push) + _bytes(pull) / strategy.period
    every = sum(
        _bytes(_bucket_phases(strategy, bucket, cluster, workload)) for bucket in workload.buckets
    )
    return every / strategy.period


def _bytes(some: Phases) -> float:
    return sum(stage.nbytes for stage in some if isinstance(stage, Move))


def _error(strategy: Strategy, cost: CodecCost, cluster: Cluster, workload: Workload) -> float:
    """Of the mean gradient (of local schedules: of the mean progress)."""
    if strategy.schedule == "async":
        return cost.error
    if strategy.schedule == "ssd":  # owners step with what one encoding left
        kappa = workload.kappa or 1 / cluster.workers
        return cost.error / (cluster.workers * kappa)
    return mean_error(strategy.exchange, cost, cluster.workers, workload.kappa, cluster.per_node)


def _limit(strategy: Strategy, cluster: Cluster, workload: Workload) -> str:
    """What a step would gain most from being without."""
    quiet = replace(
        cluster,
        flat=cluster.flat.without_starts(),
        between=cluster.between.without_starts() if cluster.between else None,
    )
    light = replace(cluster, codecs=tuple(_free(cost) for cost in cluster.codecs))
    nothing = replace(
        workload,
        forward_s=0.0,
        backward_s=0.0,
        rest_s=0.0,
        buckets=tuple(replace(bucket, ready_s=0.0) for bucket in workload.buckets),
    )
    without = {
        "compute": step_seconds(strategy, cluster, nothing),
        "wire": step_seconds(strategy, cluster.faster(1e9), workload),
        "latency": step_seconds(strategy, quiet, workload),
        "codec": step_seconds(strategy, light, workload),
    }
    return min(without, key=lambda name: without[name])


def _free(cost: CodecCost) -> CodecCost:
    return replace(cost, encode=FREE, decode=FREE, norm=FREE, reduce=FREE)


def _memory(strategy: Strategy, cost: CodecCost, cluster: Cluster, workload: Workload) -> float:
    """Bytes a rank holds on top of plain DDP's.

    - every-step: for the largest bucket of each lane the wire twice (out, and what arrives) and the
      fp32 sum of a chunk.
    - ssd: two gradients, own, pulled and next weights, one copy of each (20 bytes a value), less
      what sharded owners save of DDP's buckets; the wire twice.
    - local: common weights, start and message (12 bytes a value); the wire twice.
    - async: a gradient and the weights (8 bytes a value); the wire once.
    """
    d, n = workload.values, cluster.workers
    wire = cost.bits_out / 8
    if strategy.plain:
        return 0.0
    if strategy.schedule == "ssd":
        return (20 + 2 * wire) * d + 4 * d / n
    if strategy.schedule == "local":
        return (12 + 2 * wire) * d
    if strategy.schedule == "async":
        return (8 + wire) * d
    largest = max(bucket.values for bucket in workload.buckets)
    arriving = n if strategy.exchange in ("allgather", "sparse") else 1
    return cluster.lanes * ((1 + arriving) * wire + 4 / n) * largest
