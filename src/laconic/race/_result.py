"""The results of a race: all that the table, the verdict and the report show."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from laconic._files import Kind, read_json, write_made
from laconic._records import record
from laconic._settings import whole
from laconic._version import __version__
from laconic.errors import ConfigError
from laconic.lab._rates import parse_rates

PLAIN = "fp32"  # plain DDP, which the others are compared with
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What determines the results; a race can resume one with equal settings."""

    data: str  # digits, fashion-mnist or cifar10
    workers: int
    rate: str  # of every link, as typed: 100mbit
    steps: int
    batch: int  # of a worker
    lr: float
    seed: int
    target: float  # the accuracy to reach

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("workers", self.workers, 2, 64),
            ("steps", self.steps, 1, 1_000_000),
            ("batch", self.batch, 1, 65_536),
            ("seed", self.seed, 0, 2**31 - 1),
        ):
            whole(name, value, least, most)
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"lr must be above 0, not {self.lr}")
        if not 0 < self.target <= 1:
            raise ConfigError(f"target is an accuracy above 0 and up to 1, not {self.target}")
        parse_rates(self.rate, self.workers)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where it ran."""

    system: str
    processor: str
    cores: int
    python: str
    torch: str
    shaped: bool  # links had the rate; if not, times are predicted for it
    why_unshaped: str | None


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task."""

    network: str  # in words
    parameters: int
    training: int  # examples
    testing: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """A moment of training: work done so far, and the accuracy of the weights."""

    step: int
    seconds: float  # of training alone
    sent_bytes: float  # by a worker
    loss: float  # of the last mini-batch of the first worker
    accuracy: float  # on the test set


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of the mean step; they add up to it."""

    compute_s: float  # the same step without communication
    codec_s: float  # not overlapped with computation: encoding, decoding, copies
    wire_s: float  # not overlapped: on the wire, or waiting for other workers


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One strategy's race."""

    name: str  # as in --strategies
    strategy: str  # as laconic understands it: ecdq:error=0.08
    code: str  # the line that turns it on
    points: tuple[Point, ...]
    step_s: float  # mean, without the first steps
    parts: Parts
    sent_bytes: float  # by a worker per step, as laconic counts them
    link_bytes: float | None  # per step, through the first worker's link, as the kernel counts them
    predicted_step_s: float | None  # from a probe before the race; at the rate, shaped or not
    same_bits: bool  # all replicas ended equal
    choice: str | None = None  # what auto settled on
    error: float | None = None  # of the mean gradient: stats().error_mean
    error_budget: float | None = None  # error= of its codec

    @property
    def accuracy(self) -> float:
        """In the end."""
        return self.points[-1].accuracy

    def reached(self, target: float) -> Point | None:
        """The first point after the start that is at the target or above."""
        return next((point for point in self.points[1:] if point.accuracy >= target), None)


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """What one codec makes of this network's gradients."""

    codec: str  # its name: ecdq
    spec: str  # with settings: ecdq:error=0.08
    bits: float  # per value
    error: float  # NMSE: E|decoded - x|² / |x|²


@dataclass(frozen=True, kw_only=True)
class Race:
    """A race, finished or not."""

    settings: Settings
    machine: Machine
    task: Task
    lanes: tuple[Lane, ...] = ()
    codecs: tuple[Quantized, ...] = ()
    verdict: str = ""
    laconic: str = __version__
    format: int = _FORMAT

    def seconds(self, lane: Lane, point: Point) -> float | None:
        """Until that point; where links had no shape, predicted for links that have one."""
        if self.machine.shaped:
            return point.seconds
        return None if lane.predicted_step_s is None else point.step * lane.predicted_step_s

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write it, whole or not at all; `load` reads it again.

        With `force` it replaces a file that is no race.
        """
        write_made(path, json.dumps(asdict(self), indent=1) + "\n", Kind.RACE, force=force)

    @staticmethod
    def load(path: str | Path) -> Race:
        """ConfigError if the file is no race."""
        try:
            return Race.parse(read_json(path))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} is no race: {error}; laconic race --save makes one"
            ) from error

    @staticmethod
    def parse(found: dict[str, Any]) -> Race:
        """From JSON; ValueError names the value that is not allowed."""
        if isinstance(found, dict) and found.get("format", _FORMAT) != _FORMAT:
            other = shortened(found["format"])
            raise ConfigError(f"a race of format {other}, not {_FORMAT}: race anew")
        made: Race = record(Race, found)
        for lane in made.lanes:
            steps = [point.step for point in lane.points]
            if not steps or steps[0] < 0 or any(a >= b for a, b in pairwise(steps)):
                raise ValueError(f"the points of {lane.name!r} are not in the order of their steps")
        return made


_ALIKE = 1.03  # smaller ratios do not count as a difference


def seconds_to_target(race: Race, lane: Lane) -> float | None:
    """Until the target, if it was reached."""
    point = lane.reached(race.settings.target)
    return None if point is None else race.seconds(lane, point)


def verdict(race: Race) -> str:
    """The fastest strategy, compared with plain DDP."""
    if not race.lanes:
        return "No strategy has run yet."
    goal = f"{100 * race.settings.target:g}%"
    times = {lane.name: seconds_to_target(race, lane) for lane in race.lanes}
    arrived = {name: s for name, s in times.items() if s is not None}
    sentence = _sentence(race, arrived, goal)
    odd = [lane.name for lane in race.lanes if not lane.same_bits]
    if odd:
        sentence += f" But replicas of {', '.join(odd)} ended with different weights."
    return sentence


def _sentence(race: Race, arrived: dict[str, float], goal: str) -> str:
    lanes = {lane.name: lane for lane in race.lanes}
    if not arrived:
        best = max(race.lanes, key=lambda lane: lane.accuracy)
        return (
            f"No strategy reached {goal} in {race.settings.steps} steps; {best.name} came closest, "
            f"with {best.accuracy:.1%}: give more --steps or a lower --target."
        )
    first = min(arrived, key=lambda name: arrived[name])
    would = "reached" if race.machine.shaped else "would reach"
    if len(lanes) == 1 or PLAIN not in lanes:
        return f"{first} {would} {goal} first, after {arrived[first]:.1f} s{_where(race)}."
    if PLAIN not in arrived:
        return (
            f"{first} {would} {goal} after {arrived[first]:.1f} s{_where(race)}; "
            f"{PLAIN} did not in {race.settings.steps} steps."
        )
    speedup = arrived[PLAIN] / arrived[first]
    if first == PLAIN or speedup < _ALIKE:
        return _not_worth_it(race, arrived, goal)
    ends = [lanes[name].reached(race.settings.target) for name in (PLAIN, first)]
    sent = [point.sent_bytes if point else 0.0 for point in ends]
    fewer = f" and sent {_times(sent[0] / sent[1])} fewer bytes" if sent[1] else ""
    return f"{first} {would} {goal} {_times(speedup)} faster than {PLAIN}{_where(race)}{fewer}."


def _not_worth_it(race: Race, arrived: dict[str, float], goal: str) -> str:
    others = {name: s for name, s in arrived.items() if name != PLAIN}
    reached = f"{PLAIN} reached {goal} in {arrived[PLAIN]:.1f} s"
    sentence = f"Compression does not pay off on these links: {reached}"
    if not others:
        return f"{sentence}, and no other strategy did in {race.settings.steps} steps."
    nearest = min(others, key=lambda name: others[name])
    return f"{sentence}, {nearest} in {others[nearest]:.1f} s."


def _where(race: Race) -> str:
    rate = race.settings.rate
    return "" if race.machine.shaped else f" over links of {rate} (predicted)"


def _times(ratio: float) -> str:
    return f"{ratio:.0f}×" if ratio >= 20 else f"{ratio:.1f}×"
