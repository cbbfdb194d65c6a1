"""What a step of a strategy takes and sends: a rank's program, run on the timeline."""

from __future__ import annotations

from collections.abc import Iterator

from laconic.errors import ConfigError
from laconic.planner._cluster import Bucket, Cluster, Workload
from laconic.planner._phases import Load, Phases, gather, phases, scatter
from laconic.planner._strategy import Strategy, codec_of, cost_of
from laconic.planner._timeline import Mark, Move, Pause, Stage, Submit, Timeline, Wait, Work

# copies of all values (read once, written once) that schedules make beside their exchanges
_SSD_COPIES = 14  # gradients taken, looked at and cleared, the local rule, weights written
_PULL_COPIES, _OWNER_COPIES = 2.5, 4  # a difference added to the last pull; of a chunk, made
_LOCAL_COPIES = 4


def step_seconds(strategy: Strategy, cluster: Cluster, workload: Workload) -> float:
    """A step's time, by simulating what a rank does.

    - every-step: forward, then backward, in which every bucket goes to a lane when it is ready; a
      step waits for all.
    - ssd: owners make the optimizer's step, ranks a local one. The push of step t runs behind step
      t + 1. Step t + 2 waits for it, or step t + 1 if a pull follows. Without anything shared:
      [(k-1)·max(C, P) + max(C, P + L)]/k.
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
    own = codec_of(strategy.codec)
    return Load(
        encoded=encoded,
        plain=plain,
        cost=cost_of(strategy, cluster),
        varies=own.varies,
        shared_norm=hasattr(own, "local_norm"),
        value_bytes=workload.value_bytes,
        levels=own.levels_for(1) if strategy.exchange == "ring" else 0,
    )


def sent_bytes(strategy: Strategy, cluster: Cluster, workload: Workload) -> float:
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
