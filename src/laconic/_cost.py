"""The cost model's terms: what things cost on a cluster, and what a rank does one after another.

Exchanges and schedules declare their costs in these terms, each beside its own code; the planner
measures a `Cluster` and a `Workload`, and combines.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from laconic.errors import ConfigError

if TYPE_CHECKING:
    from laconic.codecs import Codec

MAX_WORKERS = 4096
MIN_KAPPA = 2.0**-20  # an error that is a million times too large is large enough
_NEVER = 1e18  # amounts per second: no cost but the start
_COARSE = 2.2


@dataclass(frozen=True, kw_only=True)
class LinearCost:
    """t(x) = start_s + x / per_s, for x bytes or values: the α-β model, α + S/β.

    `spread` is its median relative error on the measurements that it was fitted to, 0 for figures
    from a data sheet.

    >>> LinearCost(start_s=0.001, per_s=1e6).seconds(2e6)
    2.001
    """

    start_s: float
    per_s: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not self.start_s >= 0 or not self.per_s > 0:
            raise ConfigError(
                "a linear cost has a start of 0 s or more and a speed above 0, not "
                f"{self.start_s} s and {self.per_s} per second"
            )

    def seconds(self, amount: float, starts: float = 1) -> float:
        """The time of an amount of work in `starts` operations."""
        return starts * self.start_s + amount / self.per_s

    def off(self, points: Sequence[tuple[float, float]]) -> float:
        """The median of |t(x) - measured| / measured."""
        return statistics.median(abs(self.seconds(x) - t) / t for x, t in points)

    def faster(self, times: float) -> LinearCost:
        """At another speed, with the same start."""
        return replace(self, per_s=self.per_s * times)

    def move(self, nbytes: float) -> Move:
        """A message of `nbytes`, where this is the cost of a link."""
        return Move(self.start_s, nbytes / self.per_s, nbytes)


FREE = LinearCost(start_s=0.0, per_s=_NEVER)


def fit(points: Sequence[tuple[float, float]]) -> LinearCost:
    """The linear cost of least relative squares through (amount, seconds), no part below 0.

        min over a, b of Σ (a/t_i + b·x_i/t_i - 1)²

    Relative, because a slow link's largest message takes a thousand times as long as its smallest.

    >>> fit([(0, 1.0), (10, 2.0), (20, 3.0)]).seconds(30)
    4.0
    """
    if not points or any(t <= 0 for _, t in points):
        raise ConfigError("fit takes points (amount, seconds), at least one, with seconds above 0")
    rows = [(1 / t, x / t) for x, t in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    start, slope = a1 / aa, 0.0
    if determinant > 1e-12 * aa * bb:  # more than one amount
        start = (a1 * bb - b1 * ab) / determinant
        slope = (b1 * aa - a1 * ab) / determinant
        if start < 0:
            start, slope = 0.0, b1 / bb
        elif slope < 0:
            start, slope = a1 / aa, 0.0
    line = LinearCost(start_s=start, per_s=1 / slope if slope > 1 / _NEVER else _NEVER)
    return replace(line, spread=line.off(points))


# What a rank does: tasks of its threads


@dataclass(frozen=True)
class Work:
    """Seconds of the device, if nothing else uses it."""

    seconds: float


@dataclass(frozen=True)
class Move:
    """A latency, then bytes: seconds of the wire, if nothing else uses it.

    `nbytes` is what a rank sends to other nodes; times do not depend on it.
    """

    start_s: float
    seconds: float
    nbytes: float = 0.0


@dataclass(frozen=True)
class Pause:
    """Waiting for other ranks: time that passes whatever else happens."""

    seconds: float


@dataclass(frozen=True)
class Submit:
    """A job for a communication thread, which takes jobs in order; `Wait` names it."""

    lane: int
    name: int
    stages: tuple[Task, ...]


@dataclass(frozen=True)
class Wait:
    """Until a job is done."""

    name: int


@dataclass(frozen=True)
class Mark:
    """Remember the time."""


Task = Work | Move | Pause
Stage = Task | Submit | Wait | Mark


def sent_bytes(tasks: Sequence[Task]) -> float:
    """Bytes that a rank sends to other nodes by these tasks."""
    return sum(task.nbytes for task in tasks if isinstance(task, Move))


# What it is done on


@dataclass(frozen=True, kw_only=True)
class Links:
    """What messages among a group of ranks cost; every line counts the bytes that one rank sends.

    - `allreduce`: the backend's; a payload of S bytes is 2·(n-1)/n·S sent. Several lines where
      the backend has several algorithms: the fastest counts.
    - `all_to_all`: a message to each of the other ranks and one from each (all-gather, too).
    - `sendrecv`: a message to one rank and one from another.
    """

    ranks: int
    allreduce: tuple[LinearCost, ...]
    all_to_all: LinearCost
    sendrecv: LinearCost

    def sum(self, payload: float) -> Move:
        """The backend's all-reduce of a payload in bytes, by its fastest algorithm."""
        sent = ring_bytes(payload, self.ranks)
        return min(self.allreduce, key=lambda line: line.seconds(sent)).move(sent)

    def faster(self, times: float) -> Links:
        """Over links of another rate."""
        return self._changed(lambda line: line.faster(times))

    def without_starts(self) -> Links:
        """With no latency at all."""
        return self._changed(lambda line: replace(line, start_s=0.0))

    def _changed(self, change: Callable[[LinearCost], LinearCost]) -> Links:
        return replace(
            self,
            allreduce=tuple(map(change, self.allreduce)),
            all_to_all=change(self.all_to_all),
            sendrecv=change(self.sendrecv),
        )


def ring_bytes(payload: float, ranks: int) -> float:
    """What a rank sends in a ring's all-reduce."""
    return 2 * (ranks - 1) / ranks * payload


@dataclass(frozen=True, kw_only=True)
class CodecCost:
    """What a codec costs on this device, and what it makes of these gradients.

    `bits` per value on the wire, scales and tables included: `bits_out` of a worker's gradient,
    `bits_back` of the mean, `bits_once` of one encoding that spends all of an error budget (which
    the other two share). `error` is E‖Q(x) - x‖²/‖x‖² of the first encoding (for `global`, with
    the levels that are left to one of n workers), `error_back` that of the mean's. Lines count
    values; a decode is one that adds.
    """

    spec: str
    bits_out: float
    bits_back: float
    bits_once: float
    error: float
    error_back: float
    encode: LinearCost
    decode: LinearCost
    norm: LinearCost = FREE  # of codecs with one scale for all workers
    # adding two wires of a pairwise codec; for codecs that sum, the extra time of an all-reduce
    # over one of as many bytes of fp32, also used for a ring's additions
    reduce: LinearCost = FREE

    def spent_once(self, budget: float) -> CodecCost:
        """With all of an error budget for a single encoding."""
        return replace(self, bits_out=self.bits_once, bits_back=self.bits_once, error=budget)

    def shared_by(self, codec: Codec, workers: int, measured: int) -> CodecCost:
        """The cost where `workers` share the codec's levels; it was measured with `measured`.

        n workers have s(n) = ⌊127/n⌋ levels each (8 bits), Δ = N/s apart. ConfigError where the
        integers hold no such sum; codecs whose integers are not added stay as they are.
        """
        if not (codec.shared_norm and codec.summable):
            return self
        levels = codec.levels_for(workers)
        if levels == (known := shared_levels(codec, measured)):
            return self
        return self.with_levels(known / levels)

    def with_levels(self, coarser: float) -> CodecCost:
        """With the distance of levels multiplied by `coarser`."""
        error = rounding_error(level_distance(self.error) * coarser)
        return replace(self, error=error, error_back=error)


def rounding_error(y: float) -> float:
    """E‖Q(x) - x‖²/‖x‖² of Gaussian values rounded at random to levels y = Δ/σ apart.

    y²/6          while Δ is small:  E[f·(1 - f)]·Δ², f uniform
    0.8·y - 1     from y = 2.2 on:   almost all lie below the first level, E|x|·Δ - E x²
    """
    return y * y / 6 if y < _COARSE else 0.8 * y - 1


def level_distance(error: float) -> float:
    """y that has this error: the reverse."""
    fine = (6 * error) ** 0.5
    return fine if fine < _COARSE else max(_COARSE, (error + 1) / 0.8)


def shared_levels(codec: Codec, workers: int) -> float:
    """s(n); below one where not even one is left: a figure to start from."""
    try:
        return codec.levels_for(workers)
    except ConfigError:
        return codec.levels_for(1) / workers


@dataclass(frozen=True, kw_only=True)
class Device:
    """What computation and communication share.

    A device (a rank's share of the CPU, or a GPU) runs one task at full speed. `slots` is how many
    it can run at full speed at once: 1 on a GPU, or where ranks fill all cores; 2 where a thread of
    communication finds a core of its own. `wire_cpu_share` is the part of the device that a wire
    takes while it is in use, `overlap_bandwidth` the speed of a wire beside computation over its
    speed alone, `overlap_starts` the same of starts: TCP needs the CPU, and threads must be woken.
    RDMA has 0, 1 and 1.
    """

    slots: float = 1.0
    wire_cpu_share: float = 0.0
    overlap_bandwidth: float = 1.0
    overlap_starts: float = 1.0
    copy: LinearCost = FREE  # of values: fp32 read once and written once

    def __post_init__(self) -> None:
        speeds = self.overlap_bandwidth, self.overlap_starts
        if not (
            1 <= self.slots <= 2
            and 0 <= self.wire_cpu_share < self.slots
            and all(0 < speed <= 1 for speed in speeds)
        ):
            raise ConfigError(
                "a device has slots from 1 to 2, a wire_cpu_share from 0 up to that, and "
                "overlap_bandwidth and overlap_starts above 0 up to 1, not "
                f"{self.slots}, {self.wire_cpu_share}, {speeds[0]} and {speeds[1]}"
            )


def check_workers(workers: int) -> None:
    """ConfigError unless the planner takes this number."""
    if not 2 <= workers <= MAX_WORKERS:
        raise ConfigError(f"a plan is for 2 to {MAX_WORKERS} workers, not {workers}")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """n workers, L on each node, and what their links, their device and codecs on it cost.

    `flat` is all workers communicating; where nodes hold several, `inside` is the ranks of
    one node, `between` the owners of one part, one on each node, while the owners of all other
    parts communicate, too. `lanes` is how many buckets travel at once.
    """

    workers: int
    per_node: int = 1
    flat: Links
    inside: Links | None = None
    between: Links | None = None
    device: Device = Device()
    codecs: tuple[CodecCost, ...] = ()
    lanes: int = 1
    backend: str = "nccl"

    def __post_init__(self) -> None:
        check_workers(self.workers)
        if self.per_node < 1 or self.workers % self.per_node:
            raise ConfigError(
                f"{self.workers} workers do not fill nodes of {self.per_node}: give a multiple"
            )

    @property
    def nodes(self) -> int:
        """How many."""
        return self.workers // self.per_node

    def faster(self, times: float) -> Cluster:
        """With links between nodes (or between all ranks, where nodes hold one) of another rate."""
        between = self.between.faster(times) if self.between else None
        return replace(self, flat=self.flat.faster(times), between=between)


# What is done


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """What DDP hands over at once: values worth encoding, others, and when backward has them."""

    encoded: int
    plain: int
    ready_s: float  # after the start of backward

    @property
    def values(self) -> int:
        """All."""
        return self.encoded + self.plain


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model's step without communication: forward, backward, and the rest (optimizer, data).

    `kappa` is κ, the gradient agreement: ‖mean‖²/average ‖gradient‖² over ranks, 1 for equal
    gradients, 1/n for independent ones, less where they cancel.
    """

    forward_s: float
    backward_s: float
    rest_s: float
    buckets: tuple[Bucket, ...]
    value_bytes: int = 4  # of a gradient's value: 4 in fp32, 2 in bf16 and fp16
    kappa: float | None = None  # None: 1/n, independent
    skew_s: float = 0.0  # delay of the slowest rank over the mean, per step
    adaptive: bool = False  # whether the optimizer divides gradients by a second moment

    @property
    def compute_s(self) -> float:
        """A step on one worker alone."""
        return self.forward_s + self.backward_s + self.rest_s

    @property
    def values(self) -> int:
        """Of all gradients."""
        return sum(bucket.values for bucket in self.buckets)


@dataclass(frozen=True, kw_only=True)
class TensorLoad:
    """What is exchanged at once: values that travel under one codec, and plain ones beside them."""

    encoded: float
    plain: float
    codec: Codec
    cost: CodecCost
    value_bytes: int = 4

    @property
    def values(self) -> float:
        """All."""
        return self.encoded + self.plain


@dataclass(frozen=True, kw_only=True)
class EncodingError:
    """What the error of a mean is made of.

    e and e' are E‖Q(x) - x‖²/‖x‖² of one encoding of a worker's gradient, and of the mean;
    κ = ‖mean‖²/(average ‖x_i‖²) is the gradient agreement of n workers, 1/n where it is not known.
    """

    error: float
    error_back: float
    workers: int
    kappa: float | None = None
    per_node: int = 1

    @property
    def agreement(self) -> float:
        """κ, within bounds."""
        if self.kappa is None:
            return 1 / self.workers
        return min(max(self.kappa, MIN_KAPPA), 1.0)

    @property
    def averaged(self) -> float:
        """e/(n·κ): what is left of e in the mean."""
        return self.error / (self.workers * self.agreement)
