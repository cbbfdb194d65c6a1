"""What happens when: computation, codecs and wires that share a device and a link.

A rank is a few threads. Each does one thing after another: `Work` on the device, `Move` over the
wire, `Submit` a job to a lane, `Wait` for a job. Ranks are alike, so one stands for all.

At any moment k works are under way, s moves start and m have started. The device has room for r
works at full speed; a wire in use takes the part d of one, its drain. Beside works a wire has the
pace p of its speed alone, and a start the pace q: TCP needs the CPU, and threads must be woken.
Where a wire needs no device, d = 0 and p = q = 1.

    speed of a work  = min(1, (r - d·[m > 0])/k)
    speed of a move  = (p if k > 0 else 1)/m
    speed of a start = (q if k > 0 else 1)/s

A simulation goes from event to event; it is exact for these rules, and linear in the events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

_NOW = 1e-12  # seconds: what is nearer than this has happened


@dataclass(frozen=True)
class Work:
    """So many seconds of the device, alone."""

    seconds: float


@dataclass(frozen=True)
class Move:
    """A latency, then bytes: so many seconds of the wire, alone.

    `nbytes` is what a rank sends to other nodes by it; nothing here depends on that.
    """

    start_s: float
    seconds: float
    nbytes: float = 0.0


@dataclass(frozen=True)
class Pause:
    """Time that passes whatever else happens: other ranks are awaited."""

    seconds: float


@dataclass(frozen=True)
class Submit:
    """A job for a lane, which takes jobs in order; `name` is for those who wait."""

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


@dataclass
class _Thread:
    """What is under way in a thread, and how much of it is left."""

    stage: Stage | None = None
    latency: float = 0.0
    left: float = 0.0


@dataclass
class Timeline:
    """Runs a program in a main thread, with lanes beside it."""

    lanes: int
    room: float = 1.0
    drain: float = 0.0
    pace: float = 1.0
    start_pace: float = 1.0
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
        """Let time pass until something ends."""
        active = [one for one in self._tasks if one.stage is not None and _unfinished(one)]
        if not active:
            raise RuntimeError("a program waits for a job that nobody has")
        works = sum(isinstance(one.stage, Work) for one in active)
        starts = sum(one.latency > _NOW for one in active)
        moves = sum(isinstance(one.stage, Move) for one in active) - starts
        room = self.room - (self.drain if moves else 0.0)
        work_speed = min(1.0, room / works) if works else 1.0
        pace, start_pace = (self.pace, self.start_pace) if works else (1.0, 1.0)
        speeds = []
        for one in active:
            if isinstance(one.stage, Work):
                speeds.append(work_speed)
            elif isinstance(one.stage, Pause):
                speeds.append(1.0)
            else:
                speeds.append(start_pace / starts if one.latency > _NOW else pace / moves)
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
