"""A start and a speed: what almost everything costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from laconic.errors import ConfigError

_NEVER = 1e18  # amounts a second: no cost but the start


@dataclass(frozen=True, kw_only=True)
class Line:
    """t(x) = start_s + x / per_s, for x bytes or values; α + S/β in papers.

    `spread` is how far it is off the measurements that it was made from, 0 for figures from paper.

    >>> Line(start_s=0.001, per_s=1e6).seconds(2e6)
    2.001
    """

    start_s: float
    per_s: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not self.start_s >= 0 or not self.per_s > 0:
            raise ConfigError(
                f"a line starts at 0 s or later and has a speed, not {self.start_s} s and "
                f"{self.per_s} a second"
            )

    def seconds(self, amount: float, starts: float = 1) -> float:
        """Of so much in so many operations."""
        return starts * self.start_s + amount / self.per_s

    def off(self, points: Sequence[tuple[float, float]]) -> float:
        """The median of |t(x) - measured| / measured."""
        return statistics.median(abs(self.seconds(x) - t) / t for x, t in points)

    def faster(self, times: float) -> Line:
        """At another speed, with the same start."""
        return replace(self, per_s=self.per_s * times)


FREE = Line(start_s=0.0, per_s=_NEVER)


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """The line of least relative squares through (amount, seconds), neither part below 0.

        min over a, b of Σ (a/t_i + b·x_i/t_i - 1)²

    Relative, because a slow link's largest message takes a thousand times as long as its smallest.

    >>> fit([(0, 1.0), (10, 2.0), (20, 3.0)]).seconds(30)
    4.0
    """
    if not points or any(t <= 0 for _, t in points):
        raise ConfigError("a line is fitted to amounts and seconds, and seconds are above 0")
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
    line = Line(start_s=start, per_s=1 / slope if slope > 1 / _NEVER else _NEVER)
    return replace(line, spread=line.off(points))
