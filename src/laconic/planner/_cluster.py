"""What a cluster and a model's step cost, as measured or as said on paper."""

from __future__ import annotations

from dataclasses import dataclass, replace

from laconic.errors import ConfigError
from laconic.planner._line import FREE, Line

MOST_WORKERS = 4096


@dataclass(frozen=True, kw_only=True)
class Links:
    """What it costs a group of ranks to talk; every line counts the bytes that one rank sends.

    - `allreduce`: the backend's; a payload of S bytes is 2·(n-1)/n·S sent. Several lines where
      the backend has several algorithms: the fastest counts.
    - `swap`: a message to each of the other ranks and one from each (all-to-all, all-gather).
    - `hop`: a message to one rank and one from another.
    """

    ranks: int
    allreduce: tuple[Line, ...]
    swap: Line
    hop: Line

    def faster(self, times: float) -> Links:
        """Over links of another rate."""
        return replace(
            self,
            allreduce=tuple(line.faster(times) for line in self.allreduce),
            swap=self.swap.faster(times),
            hop=self.hop.faster(times),
        )

    def without_starts(self) -> Links:
        """With no latency at all."""
        return replace(
            self,
            allreduce=tuple(replace(line, start_s=0.0) for line in self.allreduce),
            swap=replace(self.swap, start_s=0.0),
            hop=replace(self.hop, start_s=0.0),
        )


@dataclass(frozen=True, kw_only=True)
class CodecCost:
    """What a codec costs on this device, and what it makes of these gradients.

    `bits` of a value on the wire, scales and tables included: `bits_out` of a worker's gradient,
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
    encode: Line
    decode: Line
    norm: Line = FREE  # of codecs with one scale for all workers
    # adding two wires of global-exp; of codecs that sum, what adding takes longer in an all-reduce
    # than that of as many bytes of fp32, which stands for a ring's additions, too
    reduce: Line = FREE


@dataclass(frozen=True, kw_only=True)
class Device:
    """What computation and communication share.

    A device (a rank's share of the CPU, or a GPU) runs one task at full speed. `room` is how many
    it can run at full speed at once: 1 on a GPU, or where ranks fill all cores; 2 where a thread of
    communication finds a core of its own. `drain` is the part of the device that a wire takes while
    it is in use, `pace` the speed of a wire beside computation over its speed alone, `start_pace`
    the same of starts: TCP needs the CPU, and threads must be woken. RDMA has 0, 1 and 1.
    """

    room: float = 1.0
    drain: float = 0.0
    pace: float = 1.0
    start_pace: float = 1.0
    copy: Line = FREE  # of values: fp32 read once and written once

    def __post_init__(self) -> None:
        paces = min(self.pace, self.start_pace), max(self.pace, self.start_pace)
        if not (
            1 <= self.room <= 2 and 0 <= self.drain < self.room and 0 < paces[0] <= paces[1] <= 1
        ):
            raise ConfigError(
                "a device has room from 1 to 2, a drain from 0 up to that, and paces above 0 up "
                f"to 1, not {self.room}, {self.drain}, {self.pace} and {self.start_pace}"
            )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """n workers, L on each node, and what their links, their device and codecs on it cost.

    `flat` is all workers talking to each other; where nodes hold several, `inside` is the ranks of
    one node, `between` the owners of one part, one on each node, while those of all other parts
    talk, too. `lanes` is how many buckets travel at once.
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
        if not 2 <= self.workers <= MOST_WORKERS:
            raise ConfigError(f"a plan is for 2 to {MOST_WORKERS} workers, not {self.workers}")
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
    """A model's step without communication: forward, backward, and the rest (optimizer, data)."""

    forward_s: float
    backward_s: float
    rest_s: float
    buckets: tuple[Bucket, ...]
    value_bytes: int = 4  # of a gradient's value: 4 in fp32, 2 in bf16 and fp16
    kappa: float | None = None  # ‖mean‖²/average ‖gradient‖²; None: 1/n, independent
    skew_s: float = 0.0  # that the slowest rank is behind the mean when they meet, per step
    adaptive: bool = False  # whether the optimizer divides gradients by a second moment

    @property
    def compute_s(self) -> float:
        """A step on one worker alone."""
        return self.forward_s + self.backward_s + self.rest_s

    @property
    def values(self) -> int:
        """Of all gradients."""
        return sum(bucket.values for bucket in self.buckets)
