"""Everything that is predicted of a strategy: time, bytes, error, memory, and what limits it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from laconic.planner._cluster import Cluster, CodecCost, Workload
from laconic.planner._line import FREE
from laconic.planner._mean_error import mean_error
from laconic.planner._phases import default_exchange_name
from laconic.planner._step_time import sent_bytes, step_seconds
from laconic.planner._strategy import Strategy, cost_of


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
        sent_bytes=sent_bytes(strategy, cluster, workload),
        error=_error(strategy, cost, cluster, workload),
        limit=_limit(strategy, cluster, workload),
        memory_bytes=_memory(strategy, cost, cluster, workload),
    )


def _error(strategy: Strategy, cost: CodecCost, cluster: Cluster, workload: Workload) -> float:
    """Of the mean gradient (of local schedules: of the mean progress)."""
    if strategy.schedule == "async":
        return cost.error
    if strategy.schedule == "ssd":  # owners step with what one encoding left
        kappa = workload.kappa or 1 / cluster.workers
        return cost.error / (cluster.workers * kappa)
    return mean_error(
        strategy.exchange,
        cost.error,
        cost.error_back,
        cluster.workers,
        workload.kappa,
        per_node=cluster.per_node,
        inner=default_exchange_name(cost.spec),
    )


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
