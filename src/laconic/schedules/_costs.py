"""Costs of schedules: a rank's program for the planner's simulation, bytes, error and memory.

A schedule's class names its cost in an attribute, `cost`, and `register_schedule` lets the planner
know both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from laconic._cost import (
    FREE,
    Bucket,
    Cluster,
    CodecCost,
    EncodingError,
    Mark,
    Pause,
    Stage,
    Submit,
    Task,
    TensorLoad,
    Wait,
    Work,
    Workload,
    sent_bytes,
)
from laconic._spec import check_kind, from_spec, to_spec
from laconic.codecs import Codec, codec
from laconic.errors import ConfigError
from laconic.exchanges import AllReduce, Exchange
from laconic.exchanges._scatter_reduce import gather_cost, scatter_cost

NO_CODEC_COST = CodecCost(
    spec="none",
    bits_out=32,
    bits_back=32,
    bits_once=32,
    error=0,
    error_back=0,
    encode=FREE,
    decode=FREE,
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is predicted: a codec on an exchange, on a cluster, with a model.

    `cost` is the codec's there, as the exchange and the schedule use it.
    """

    codec: Codec
    exchange: Exchange
    cost: CodecCost
    cluster: Cluster
    workload: Workload

    @property
    def plain(self) -> bool:
        """Whether gradients travel as they are."""
        return self.codec.lossless

    def load(self, encoded: float, plain: float = 0) -> TensorLoad:
        """Values that are exchanged together."""
        return TensorLoad(
            encoded=encoded,
            plain=plain,
            codec=self.codec,
            cost=self.cost,
            value_bytes=self.workload.value_bytes,
        )

    def exchanged(self, bucket: Bucket) -> list[Task]:
        """What a rank does with a bucket; a plain mean where nothing is worth encoding."""
        if bucket.encoded or self.plain:
            return self.exchange.cost(self.load(bucket.encoded, bucket.plain), self.cluster)
        plain = replace(self, codec=codec("none"), cost=NO_CODEC_COST)
        return AllReduce().cost(plain.load(0, bucket.plain), self.cluster)

    @property
    def mean_error(self) -> float:
        """NMSE of the exchange's mean."""
        errors = EncodingError(
            error=self.cost.error,
            error_back=self.cost.error_back,
            workers=self.cluster.workers,
            kappa=self.workload.kappa,
            per_node=self.cluster.per_node,
        )
        return self.exchange.mean_error(errors, self.codec)

    @property
    def meeting(self) -> Pause:
        """The wait for the slowest rank."""
        return Pause(self.workload.skew_s)


@dataclass(frozen=True, kw_only=True)
class ScheduleCost(ABC):
    """The cost of a schedule, for the planner. Subclasses are frozen dataclasses: settings only.

    `name` is the word that a strategy names the schedule by. A schedule that `changes_training`
    makes other steps than plain DDP, whose accuracy is not predicted. `encodes_once` says that
    gradients are encoded a single time whatever the exchange is, with all of an error budget.
    `planned_with` are prefixes of the codec specs that a plan combines the schedule with.
    """

    name: ClassVar[str]
    changes_training: ClassVar[bool] = True
    encodes_once: ClassVar[bool] = False
    planned_with: ClassVar[tuple[str, ...]] = ("",)

    @classmethod
    def planned(cls) -> tuple[ScheduleCost, ...]:
        """The settings that a plan tries; empty for a schedule that is planned on request only."""
        return (cls(),)

    def lanes(self, cluster: Cluster) -> int:
        """Threads of communication."""
        return 1

    @abstractmethod
    def program(self, on: Scenario) -> Iterator[Stage]:
        """What a rank does; a `Mark` before the first step that counts, and after each."""

    def sent_bytes(self, on: Scenario) -> float:
        """Bytes that a rank sends to ranks of other nodes, per step."""
        return sum(sent_bytes(on.exchanged(bucket)) for bucket in on.workload.buckets)

    def mean_error(self, on: Scenario) -> float:
        """NMSE of the mean gradient."""
        return on.mean_error

    @abstractmethod
    def memory(self, on: Scenario) -> float:
        """Bytes that a rank holds beside those of plain DDP."""

    @abstractmethod
    def code(self, codec: str, spec: str) -> str:
        """The line to write; `spec` is the codec's, with its exchange where that is not its own."""

    def __str__(self) -> str:
        """In front of a codec's name, for tables."""
        return to_spec(self)


@dataclass(frozen=True, kw_only=True)
class EveryStepCost(ScheduleCost):
    """`every-step`: forward, then backward, in which every bucket is exchanged when it is ready.

    Buckets go to lanes in turn; a step waits for all of them. Memory: for the largest bucket of
    each lane what its exchange holds.
    """

    name: ClassVar[str] = "every-step"
    changes_training: ClassVar[bool] = False

    @classmethod
    def planned(cls) -> tuple[ScheduleCost, ...]:
        return ()  # a plan combines it with exchanges

    def lanes(self, cluster: Cluster) -> int:
        return cluster.lanes

    def program(self, on: Scenario) -> Iterator[Stage]:
        workload, lanes = on.workload, on.cluster.lanes
        yield Mark()
        yield Work(workload.forward_s)
        at = 0.0
        for number, bucket in enumerate(workload.buckets):
            yield Work(max(0.0, bucket.ready_s - at))
            at = max(at, bucket.ready_s)
            meet = [on.meeting] if number < lanes else []
            yield Submit(number % lanes, number, (*meet, *on.exchanged(bucket)))
        yield Work(max(0.0, workload.backward_s - at))
        for number in range(len(workload.buckets)):
            yield Wait(number)
        yield Work(workload.rest_s)
        yield Mark()

    def memory(self, on: Scenario) -> float:
        if on.plain:
            return 0.0
        loads = (on.load(bucket.encoded, bucket.plain) for bucket in on.workload.buckets)
        return on.cluster.lanes * max(on.exchange.memory(load, on.cluster) for load in loads)

    def code(self, codec: str, spec: str) -> str:
        return "DDP(model)" if codec == "none" else f'lc.compress(model, "{spec}")'

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True, kw_only=True)
class SSDCost(ScheduleCost):
    """`ssd`: owners make the optimizer's step, ranks a local one.

    The push of step t overlaps with step t + 1. Step t + 2 waits for it, or step t + 1 if a pull
    follows. C computation, P push, L pull; without anything shared a step takes

        [(k-1)·max(C, P) + max(C, P + L)]/k

    Memory: two gradients, own, pulled and next weights, one copy of each (20 bytes per value), less
    what sharded owners save of DDP's buckets; the wire twice. Error: owners step with what one
    encoding left, e/(n·κ).
    """

    name: ClassVar[str] = "ssd"
    encodes_once: ClassVar[bool] = True
    planned_with: ClassVar[tuple[str, ...]] = ("dqsg", "ecdq")

    period: int = 1

    @classmethod
    def planned(cls) -> tuple[ScheduleCost, ...]:
        return (cls(period=4),)

    def program(self, on: Scenario) -> Iterator[Stage]:
        workload, k = on.workload, self.period
        push, pull = _push_pull(on)
        # copies of all values: gradients taken, looked at and cleared, the local rule, weights
        own = on.cluster.device.copy.seconds(14 * workload.values)
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

    def sent_bytes(self, on: Scenario) -> float:
        push, pull = _push_pull(on)
        return sent_bytes(push) + sent_bytes(pull) / self.period

    def mean_error(self, on: Scenario) -> float:
        workers = on.cluster.workers
        return on.cost.error / (workers * (on.workload.kappa or 1 / workers))

    def memory(self, on: Scenario) -> float:
        d = on.workload.values
        return (20 + 2 * on.cost.bits_out / 8) * d + 4 * d / on.cluster.workers

    def code(self, codec: str, spec: str) -> str:
        pulls = "" if codec == "none" else f', pull_codec="{codec}"'
        return f'lc.SSD(optimizer, model, period={self.period}, codec="{codec}"{pulls})'

    def __str__(self) -> str:
        return f"ssd k={self.period}"


def _push_pull(on: Scenario) -> tuple[list[Task], list[Task]]:
    cluster, values = on.cluster, on.workload.values
    load = on.load(values)
    chunk, copy = values / cluster.workers, cluster.device.copy
    step = Work(on.workload.rest_s / cluster.workers)
    push: list[Task] = [on.meeting, *scatter_cost(load, cluster), step]
    pull = gather_cost(load, cluster)
    if not on.plain:
        # of a chunk the difference is made, of all values it is added to the last pull
        made = copy.seconds(4 * chunk) + on.cost.decode.seconds(chunk)
        pull = [Work(made), *pull, Work(copy.seconds(2.5 * values))]
    return push, pull


@dataclass(frozen=True, kw_only=True)
class LocalCost(ScheduleCost):
    """`local`: H steps C, then one exchange X of all values: (H·C + X)/H.

    Memory: common weights, start and message (12 bytes per value); the wire twice. Error: of the
    mean progress.
    """

    name: ClassVar[str] = "local"
    planned_with: ClassVar[tuple[str, ...]] = ("dqsg", "ecdq")

    period: int = 1

    @classmethod
    def planned(cls) -> tuple[ScheduleCost, ...]:
        return (cls(period=8),)

    def program(self, on: Scenario) -> Iterator[Stage]:
        workload = on.workload
        encoded = sum(bucket.encoded for bucket in workload.buckets)
        whole = Bucket(encoded=encoded, plain=workload.values - encoded, ready_s=0.0)
        copies = Work(on.cluster.device.copy.seconds(4 * workload.values))
        yield Mark()
        yield Work(self.period * workload.compute_s)
        yield Submit(0, 0, (copies, on.meeting, *on.exchanged(whole)))
        yield Wait(0)
        for _ in range(self.period):  # a mark per step, so that the mean is over steps
            yield Mark()

    def sent_bytes(self, on: Scenario) -> float:
        return super().sent_bytes(on) / self.period

    def memory(self, on: Scenario) -> float:
        return (12 + 2 * on.cost.bits_out / 8) * on.workload.values

    def code(self, codec: str, spec: str) -> str:
        return f'lc.LocalSGD(optimizer, model, period={self.period}, codec="{spec}")'

    def __str__(self) -> str:
        return f"local k={self.period}"


@dataclass(frozen=True, kw_only=True)
class AsyncCost(ScheduleCost):
    """`async`: a worker pushes P, waits for weights L, and continues: C + P + L.

    Unless a server takes longer, which does that for n/S workers. Servers' links are as workers':
    n/S pushes at once share one. Memory: a gradient and the weights (8 bytes per value); the wire.
    """

    name: ClassVar[str] = "async"
    encodes_once: ClassVar[bool] = True

    servers: int = 1

    @classmethod
    def planned(cls) -> tuple[ScheduleCost, ...]:
        return ()  # it needs ranks that do nothing else

    def program(self, on: Scenario) -> Iterator[Stage]:
        cost, d, copy = on.cost, on.workload.values, on.cluster.device.copy
        n, link = on.cluster.workers - self.servers, on.cluster.flat.sendrecv
        if n < 1:
            raise ConfigError("the asynchronous schedule needs workers beside its servers")
        out, back = self.sent_bytes(on), 4.0 * d
        worker = (
            on.workload.compute_s
            + cost.encode.seconds(d)
            + link.seconds(out)
            + cost.decode.seconds(d)
            + link.seconds(back)
            + copy.seconds(d)
        )
        each = max(out, back) / link.per_s + cost.decode.seconds(d) + copy.seconds(5 * d)
        yield Mark()
        yield Pause(max(worker, n / self.servers * each))
        yield Mark()

    def sent_bytes(self, on: Scenario) -> float:
        return on.cost.bits_out / 8 * on.workload.values

    def mean_error(self, on: Scenario) -> float:
        return on.cost.error

    def memory(self, on: Scenario) -> float:
        return (8 + on.cost.bits_out / 8) * on.workload.values

    def code(self, codec: str, spec: str) -> str:
        return f'lc.AsyncSGD(optimizer, model, servers={self.servers}, codec="{codec}")'

    def __str__(self) -> str:
        return "async"


EVERY_STEP = EveryStepCost()
_BY_NAME: dict[str, Any] = {}  # classes of schedules, by the names of their costs
_Schedule = TypeVar("_Schedule", bound=type)


def register_schedule(kind: _Schedule) -> _Schedule:
    """Let the planner know a schedule of your own; a decorator.

    Its attribute `cost` is a subclass of `laconic.schedules.ScheduleCost`, with the `name` that
    strategies and plans call the schedule by. `laconic.testing.check_schedule` says whether it
    keeps what users rely on.
    """
    cost = getattr(kind, "cost", None)
    if cost is None:
        raise ConfigError(
            f"register_schedule: {kind!r} has no attribute cost; give it a subclass of "
            "laconic.schedules.ScheduleCost"
        )
    check_kind(cost, ScheduleCost, "register_schedule: cost", schedule_costs())
    _BY_NAME[cost.name] = kind
    return kind


def registered() -> dict[str, Any]:
    """The classes of the schedules that `register_schedule` was given, by name."""
    return dict(_BY_NAME)


def schedule_costs() -> tuple[type[ScheduleCost], ...]:
    """Of all schedules that the planner knows."""
    return (EveryStepCost, *(kind.cost for kind in _BY_NAME.values()))


def schedule_cost(spec: str | ScheduleCost) -> ScheduleCost:
    """By a spec such as "ssd:period=4".

    >>> str(schedule_cost("ssd:period=4"))
    'ssd k=4'
    """
    if isinstance(spec, ScheduleCost):
        return spec
    return from_spec("schedule", spec, {cost.name: cost for cost in schedule_costs()})
