"""Clusters and models on paper: predictions without measurements.

n ranks on K nodes of L; a node's NIC has β bytes/s (0.85 of its rate) for its L ranks together and
latency α; inside, each rank has β_in and α_in. k = K if K > 1 else 0 of a ring's n links leave a
node. Bytes are those that one rank sends; of an all-reduce's payload S a ring's rank sends
s = 2(n-1)/n·S.

    all-reduce   ring, in the order of nodes: one rank of a node sends by its NIC, one receives.
                 Parts travel around twice, waiting for their predecessors only:
                     start 2(n-1)/n·(k·α + (n-k)·α_in),  speed min(β, β_in)
                 tree (NCCL, n > 2): of two trees, every rank is inside one (S/2 up, S/2 to each of
                 two below) and a leaf of the other (S/2 up), so it sends 2·S = n/(n-1)·s:
                     start 2·⌈log2 K⌉·α + 2·⌈log2 L⌉·α_in,  speed min(β, β_in)·(n-1)/n
                 The faster counts. Gloo has the ring only.
    all-to-all   (n-L)/(n-1) of a rank's bytes leave the node, the rest stays inside:
                     start α + (n-2)·m,  speed min(β·(n-1)/(L·(n-L)), β_in·(n-1)/(L-1))
                 m is what one more message costs: 2 µs on NCCL (assumed), α on Gloo
    sendrecv     as if all ranks of a node sent elsewhere at once: start α, speed β/L. So they do in
                 a tree's rounds of L ranks and more; for a ring and shorter rounds it is too slow
    inside       the same with one node of L ranks
    between      K ranks, one on each node, while all L lanes are in use: β/L each, alone on a node

Codecs: an H200's times, longer by how much less memory bandwidth the device has; starts as
measured. On a CPU two cores' times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from laconic._cost import (
    FREE,
    Bucket,
    Cluster,
    CodecCost,
    Device,
    LinearCost,
    Links,
    Workload,
    check_workers,
    shared_levels,
)
from laconic.codecs import codec
from laconic.errors import ConfigError
from laconic.planner._machine_catalog import (
    CODECS,
    COPY_US,
    CPU_COPY_MS,
    CPU_NORM_PER_S,
    CPU_NORM_US,
    CPU_REDUCE_PER_S,
    CPU_REDUCE_US,
    GPU_COPY_MS,
    GPU_NORM_US,
    GPU_REDUCE_US,
    MEASURED_VALUES,
    MEMORY,
    REACHED,
    Figures,
    Machine,
)

_MESSAGE_S = 2e-6  # one more message of an all-to-all, on NCCL
_BUCKET_BYTES, _MOST_BUCKETS = 25 << 20, 32
_ENCODED = 0.995  # of values are worth it: matrices, not biases and norms
_FORWARD = 1 / 3  # of the computation
_LANES = {"nccl": 1, "gloo": 2}  # as the hook's
VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A cluster of `workers` workers, by the figures of its machines."""

    machine: Machine
    workers: int

    def __post_init__(self) -> None:
        figures = self.machine
        if figures.device not in MEMORY:
            raise ConfigError(f"devices are {', '.join(MEMORY)}, not {figures.device!r}")
        check_workers(self.workers)
        if figures.per_node < 1:
            raise ConfigError(f"a node holds 1 worker or more, not {figures.per_node}")
        speeds = figures.link_bit_s, figures.inside_byte_s
        times = figures.latency_s, figures.inside_latency_s
        if not all(0 < one < math.inf for one in speeds) or not all(
            0 <= one < math.inf for one in times
        ):
            raise ConfigError("links have rates above 0 and latencies of 0 or more")

    @property
    def link_bit_s(self) -> float:
        """A node's NIC, as its maker calls it."""
        return self.machine.link_bit_s

    def cluster(self, times: float = 1.0) -> Cluster:
        """By the equations above, with NICs `times` times as fast."""
        figures, n = self.machine, self.workers
        per_node = min(figures.per_node, n)
        backend = "gloo" if figures.device == "cpu" else "nccl"
        near = _Wire(speed=figures.inside_byte_s, latency_s=figures.inside_latency_s)
        far = _Wire(speed=REACHED * figures.link_bit_s * times / 8, latency_s=figures.latency_s)
        nodes = n // per_node
        several = per_node > 1 and nodes > 1
        lane = replace(far, speed=far.speed / per_node)
        return Cluster(
            workers=n,
            per_node=per_node,
            flat=_links(nodes, per_node, far, near, backend),
            inside=_links(1, per_node, far, near, backend) if several else None,
            between=_links(nodes, 1, lane, near, backend) if several else None,
            device=_device(figures.device),
            codecs=codec_costs(figures.device, n),
            lanes=_LANES[backend],
            backend=backend,
        )


@dataclass(frozen=True, kw_only=True)
class _Wire:
    speed: float  # bytes/s
    latency_s: float


def _links(nodes: int, per_node: int, far: _Wire, near: _Wire, backend: str) -> Links:
    n = nodes * per_node
    leaving, wire = (nodes, far) if nodes > 1 else (0, near)
    slowest = (
        far.speed if per_node == 1 else near.speed if nodes == 1 else min(far.speed, near.speed)
    )
    around = 2 * (n - 1) / n * (leaving * far.latency_s + (n - leaving) * near.latency_s)
    ways = [LinearCost(start_s=around, per_s=slowest)]
    if backend == "nccl" and n > 2:
        deep = _levels(nodes) * far.latency_s + _levels(per_node) * near.latency_s
        ways.append(LinearCost(start_s=2 * deep, per_s=slowest * (n - 1) / n))
    message = _MESSAGE_S if backend == "nccl" else wire.latency_s
    return Links(
        ranks=n,
        allreduce=tuple(ways),
        all_to_all=LinearCost(
            start_s=wire.latency_s + max(0, n - 2) * message,
            per_s=_all_to_all_speed(nodes, per_node, far, near),
        ),
        sendrecv=LinearCost(
            start_s=wire.latency_s,
            per_s=wire.speed / per_node if nodes > 1 else wire.speed,
        ),
    )


def _all_to_all_speed(nodes: int, per_node: int, far: _Wire, near: _Wire) -> float:
    n, speeds = nodes * per_node, []
    if nodes > 1:
        speeds.append(far.speed * (n - 1) / (per_node * (n - per_node)))
    if per_node > 1:
        speeds.append(near.speed * (n - 1) / (per_node - 1))
    return min(speeds)


def _levels(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


def _device(name: str) -> Device:
    """One task fills a GPU, and NCCL takes little of it; a CPU has a core for communication."""
    memory = MEMORY[name]
    if memory is None:
        return Device(slots=2.0, copy=_line(COPY_US, CPU_COPY_MS))
    return Device(copy=_line(COPY_US, GPU_COPY_MS * _slower(memory)))


def _slower(memory: float) -> float:
    """Than an H200, on which codecs were measured."""
    h200 = MEMORY["h200"]
    assert h200 is not None
    return h200 / memory


def _line(start_us: float, ms: float) -> LinearCost:
    return LinearCost(start_s=start_us * 1e-6, per_s=MEASURED_VALUES / (ms * 1e-3))


def codec_costs(device: str, workers: int) -> tuple[CodecCost, ...]:
    """Of all codecs that were measured on this kind of device."""
    memory = MEMORY[device]
    return tuple(
        _cost(one, memory, workers) for one in CODECS if memory is None or one.gpu_ms is not None
    )


def _cost(one: Figures, memory: float | None, workers: int) -> CodecCost:
    own = codec(one.spec)
    bits, error = one.bits, one.error
    if own.budget is not None:  # half of it for each way
        bits, error = _bits_at(one, own.budget / 2), one.error / 2
    if memory is None:
        encode, decode = (
            LinearCost(start_s=us * 1e-6, per_s=gb_s * 1e9 / 4)
            for us, gb_s in zip(one.cpu_us, one.cpu_gb_s, strict=True)
        )
        norm = LinearCost(start_s=CPU_NORM_US * 1e-6, per_s=CPU_NORM_PER_S)
        reduce = LinearCost(start_s=CPU_REDUCE_US * 1e-6, per_s=CPU_REDUCE_PER_S)
    else:
        assert one.gpu_ms is not None
        slower = _slower(memory)
        encode, decode = (
            _line(us, ms * slower) for us, ms in zip(one.gpu_us, one.gpu_ms, strict=True)
        )
        norm = _line(GPU_NORM_US, GPU_COPY_MS / 2 * slower)  # reads what a copy also writes
        reduce = _line(GPU_REDUCE_US, GPU_COPY_MS * 3 / 8 * slower)  # 3 bytes, not 8
    found = CodecCost(
        spec=str(own),
        bits_out=bits,
        bits_back=bits,
        bits_once=one.bits,
        error=error,
        error_back=error,
        encode=encode,
        decode=decode,
        norm=norm if own.shared_norm else FREE,
        reduce=reduce if own.pairwise else FREE,
    )
    if not (own.shared_norm and own.summable):
        return found
    return found.with_levels(shared_levels(own, 1) / shared_levels(own, workers))


def _bits_at(one: Figures, error: float) -> float:
    """Of ecdq at another error: linear in log(error) between the measured ones and beyond."""
    coder = one.spec.partition(",")[2]
    points = [
        (math.log2(budget), other.bits)
        for other in CODECS
        if (budget := codec(other.spec).budget) is not None
        and other.spec.partition(",")[2] == coder
    ]
    wanted = math.log2(error)
    for (x0, y0), (x1, y1) in pairwise(sorted(points)):
        last = y0 + (y1 - y0) * (wanted - x0) / (x1 - x0)
        if wanted <= x1:
            return last
    raise ConfigError(f"there are no figures for errors of {error}")


def paper_workload(params: int, compute_s: float, dtype: str = "fp32") -> Workload:
    """A model of `params` parameters whose step takes `compute_s` without communication.

    A third is forward, the rest backward, in which DDP's buckets of 25 MiB become ready evenly.
    There are 32 at most: larger models are assumed to have larger ones (DDP's `bucket_cap_mb`).
    """
    if dtype not in VALUE_BYTES:
        raise ConfigError(f"dtype is {', '.join(VALUE_BYTES)}, not {dtype!r}")
    if params < 1 or not 0 < compute_s < math.inf:
        raise ConfigError("a model has parameters, and its step takes time")
    width = VALUE_BYTES[dtype]
    count = min(_MOST_BUCKETS, math.ceil(params * width / _BUCKET_BYTES))
    backward = (1 - _FORWARD) * compute_s
    cuts = [params * i // count for i in range(count + 1)]
    buckets = []
    for i, values in enumerate(b - a for a, b in pairwise(cuts)):
        encoded = round(_ENCODED * values)
        ready = backward * (i + 1) / count
        buckets.append(Bucket(encoded=encoded, plain=values - encoded, ready_s=ready))
    return Workload(
        forward_s=_FORWARD * compute_s,
        backward_s=backward,
        rest_s=0.0,
        buckets=tuple(buckets),
        value_bytes=width,
    )
