"""The prediction of a strategy: time, bytes, error, memory, and the bottleneck."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from laconic._cost import (
    FREE,
    Cluster,
    CodecCost,
    Device,
    Mark,
    Move,
    Pause,
    Stage,
    Submit,
    Task,
    Wait,
    Work,
    Workload,
)
from laconic.planner._strategy import Strategy
from laconic.schedules._costs import Scenario, ScheduleCost


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A strategy's predicted costs, per step."""

    strategy: Strategy
    step_s: float
    sent_bytes: float  # by a rank, to ranks of other nodes
    error: float  # NMSE of the mean
    limit: str  # the bottleneck: compute, wire, latency or codec
    memory_bytes: float  # of a rank, beside plain DDP's


def step_seconds(strategy: Strategy, cluster: Cluster, workload: Workload) -> float:
    """A step's time, by simulating what a rank does: the schedule's program, on a timeline."""
    return simulated(strategy.timing, strategy.on(cluster, workload))


def simulated(timing: ScheduleCost, on: Scenario) -> float:
    """The time of a step of a schedule's program."""
    timeline = Timeline(lanes=timing.lanes(on.cluster), device=on.cluster.device)
    marks = timeline.run(timing.program(on))
    return (marks[-1] - marks[0]) / (len(marks) - 1)


def predict(strategy: Strategy, cluster: Cluster, workload: Workload) -> Prediction:
    """Time, bytes, error, memory, and what limits."""
    on, timing = strategy.on(cluster, workload), strategy.timing
    return Prediction(
        strategy=strategy,
        step_s=step_seconds(strategy, cluster, workload),
        sent_bytes=timing.sent_bytes(on),
        error=timing.mean_error(on),
        limit=_limit(strategy, cluster, workload),
        memory_bytes=timing.memory(on),
    )


def _limit(strategy: Strategy, cluster: Cluster, workload: Workload) -> str:
    """The bottleneck: the part without which a step is shortest."""
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


_NOW = 1e-12  # seconds: what is nearer than this has happened


@dataclass
class _Thread:
    """The current stage of a thread, and how much of it is left."""

    stage: Stage | None = None
    latency: float = 0.0
    left: float = 0.0


@dataclass
class Timeline:
    """Runs a program in a main thread, with lanes beside it: a simulation from event to event.

    A rank is a few threads. Each does one thing after another: `Work` on the device, `Move` over
    the wire, `Submit` a job to a lane, `Wait` for a job. Ranks are alike, so one stands for all.

    At any moment k works are running, s moves start and m have started. The device has r slots
    for works at full speed; a wire in use takes the part d of one, its CPU share. Beside works a
    wire has the part p of its speed alone, and a start the part q: TCP needs the CPU, and threads
    must be woken. Where a wire needs no device, d = 0 and p = q = 1.

        speed of a work  = min(1, (r - d·[m > 0])/k)
        speed of a move  = (p if k > 0 else 1)/m
        speed of a start = (q if k > 0 else 1)/s

    It is exact for these rules, and linear in the events.
    """

    lanes: int
    device: Device = field(default_factory=Device)
    now: float = 0.0
    marks: list[float] = field(default_factory=list)

    def run(self, program: Iterable[Stage]) -> list[float]:
        """The times of all marks, when the program has ended."""
        self._program = iter(program)
        self._queues: list[deque[tuple[int, deque[Task]]]] = [deque() for _ in range(self.lanes)]
        self._done: set[int] = set()
        self._tasks = [_Thread() for _ in range(1 + self.lanes)]
        self._ended = False
        while True:
            while self._advance():
                pass
            if self._ended:
                return self.marks
            self._flow()

    def _advance(self) -> bool:
        """Start whatever can start now; whether anything changed."""
        changed = self._advance_main()
        for thread, queue in zip(self._tasks[1:], self._queues, strict=True):
            changed |= self._advance_lane(thread, queue)
        return changed

    def _advance_main(self) -> bool:
        main = self._tasks[0]
        if isinstance(main.stage, Wait):
            if main.stage.name not in self._done:
                return False
        elif main.stage is not None and _unfinished(main):
            return False
        stage = next(self._program, None)
        main.stage = stage
        if stage is None:
            was, self._ended = self._ended, True
            return not was
        if isinstance(stage, Submit):
            self._queues[stage.lane].append((stage.name, deque(stage.stages)))
        elif isinstance(stage, Mark):
            self.marks.append(self.now)
        _begin(main, stage)
        return True

    def _advance_lane(self, thread: _Thread, queue: deque[tuple[int, deque[Task]]]) -> bool:
        if not queue or (thread.stage is not None and _unfinished(thread)):
            return False
        name, stages = queue[0]
        if stages:
            _begin(thread, stages.popleft())
        else:
            queue.popleft()
            thread.stage = None
            self._done.add(name)
        return True

    def _flow(self) -> None:
        """Advance time until something ends."""
        active = [one for one in self._tasks if one.stage is not None and _unfinished(one)]
        if not active:
            raise RuntimeError("a program waits for a job that was not submitted")
        works = sum(isinstance(one.stage, Work) for one in active)
        starts = sum(one.latency > _NOW for one in active)
        moves = sum(isinstance(one.stage, Move) for one in active) - starts
        device = self.device
        slots = device.slots - (device.wire_cpu_share if moves else 0.0)
        work_speed = min(1.0, slots / works) if works else 1.0
        bandwidth = device.overlap_bandwidth if works else 1.0
        starting = device.overlap_starts if works else 1.0
        speeds = []
        for one in active:
            if isinstance(one.stage, Work):
                speeds.append(work_speed)
            elif isinstance(one.stage, Pause):
                speeds.append(1.0)
            else:
                speeds.append(starting / starts if one.latency > _NOW else bandwidth / moves)
        rests = [one.latency if one.latency > _NOW else one.left for one in active]
        span = min(rest / speed for rest, speed in zip(rests, speeds, strict=True))
        self.now += span
        for one, speed in zip(active, speeds, strict=True):
            if one.latency > _NOW:
                one.latency -= span * speed
            else:
                one.left -= span * speed


def _begin(thread: _Thread, stage: Stage) -> None:
    thread.stage = stage
    thread.latency = stage.start_s if isinstance(stage, Move) else 0.0
    thread.left = stage.seconds if isinstance(stage, Task) else 0.0


def _unfinished(thread: _Thread) -> bool:
    return thread.latency > _NOW or thread.left > _NOW
