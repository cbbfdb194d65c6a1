"""What a race found: everything the table, the verdict and the report are made from."""

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
from laconic._version import __version__
from laconic.errors import ConfigError
from laconic.lab._rates import parse_rates

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the numbers; two races with equal settings can be continued by one another."""

    data: str  # digits, fashion-mnist or cifar10
    workers: int
    rate: str  # of every link, as typed: 100mbit
    steps: int
    batch: int  # of a worker
    lr: float
    seed: int
    target: float  # the accuracy that strategies race to

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("workers", self.workers, 2, 64),
            ("steps", self.steps, 1, 1_000_000),
            ("batch", self.batch, 1, 65_536),
            ("seed", self.seed, 0, 2**31 - 1),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{name} must be from {least} to {most}, not {value}")
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
    shaped: bool  # links had the rate; if not, predictions are for the rate, times are not
    why_unshaped: str | None


@dataclass(frozen=True, kw_only=True)
class Task:
    """What was learnt."""

    network: str  # in words
    parameters: int
    training: int  # examples
    testing: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """A moment of training: what a worker had done, and what its weights were worth."""

    step: int
    seconds: float  # of training alone
    sent_bytes: float  # by a worker
    loss: float  # of the last mini-batch of the first worker
    accuracy: float  # on the test set


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Where a step's time goes; they add up to the mean step."""

    compute_s: float  # the same step without communication
    codec_s: float  # not hidden behind computation: encoding, decoding, copies
    wire_s: float  # not hidden: on the wire, or waiting for other workers


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One strategy's race."""

    name: str  # as in --strategies
    strategy: str  # as laconic understands it: ecdq:error=0.08
    code: str  # the line that turns it on
    points: tuple[Point, ...]
    step_s: float  # mean, without the first steps
    parts: Parts
    sent_bytes: float  # by a worker, a step, as laconic counts them
    link_bytes: float | None  # a step, through the first worker's link, as the kernel counts them
    predicted_step_s: float | None  # from a probe before the race; at the rate, shaped or not
    same_bits: bool  # all replicas ended equal
    choice: str | None = None  # what auto settled on
    error: float | None = None  # of the mean gradient: stats().error_mean
    error_budget: float | None = None  # what error= asked for

    @property
    def accuracy(self) -> float:
        """In the end."""
        return self.points[-1].accuracy

    def reached(self, target: float) -> Point | None:
        """The first point behind the start that is at the target or above."""
        return next((point for point in self.points[1:] if point.accuracy >= target), None)


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """What one codec makes of this network's gradients."""

    codec: str  # its name: ecdq
    spec: str  # with settings: ecdq:error=0.08
    bits: float  # a value
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
        """ConfigError if the file is none of ours."""
        try:
            return Race.parse(read_json(path))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} is no race: {error}; laconic race --save makes one"
            ) from error

    @staticmethod
    def parse(found: dict[str, Any]) -> Race:
        """From what JSON holds; ValueError says which value cannot be."""
        if isinstance(found, dict) and found.get("format", _FORMAT) != _FORMAT:
            other = shortened(found["format"])
            raise ConfigError(f"a race of format {other}, not {_FORMAT}: race anew")
        made: Race = record(Race, found)
        for lane in made.lanes:
            steps = [point.step for point in lane.points]
            if not steps or steps[0] < 0 or any(a >= b for a, b in pairwise(steps)):
                raise ValueError(f"the points of {lane.name!r} are not in the order of their steps")
        return made
