"""The numbers that the page shows of every strategy, computed once from the race."""

from __future__ import annotations

import math
from dataclasses import dataclass

from laconic.race._quantize import family
from laconic.race._result import Lane, Point, Race, seconds_to_target
from laconic.race._strategies import PLAIN
from laconic.report import _words as words
from laconic.report._palette import Look, look


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One strategy."""

    index: int
    lane: Lane
    look: Look
    seconds: tuple[float | None, ...]  # at each point; predicted where links had no rate
    reached: Point | None  # the target
    reached_s: float | None
    speedup: float | None  # time to the target, relative to the baseline
    reduction: float | None  # bytes per step, relative to the baseline
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As typed."""
        return self.lane.name

    @property
    def last(self) -> Point | None:
        """The last one, if it started."""
        return self.lane.points[-1] if self.lane.points else None

    @property
    def codec(self) -> str:
        """The line in the figure of codecs: that of ecdq, of ecdq+rans, of rotate(qsgd)."""
        text = (self.lane.choice or self.lane.strategy).split("@")[0]
        return family(text.split(" ")[-1])  # a schedule comes first: ssd k=4 ecdq:error=0.08


@dataclass(frozen=True, kw_only=True)
class View:
    """All of them."""

    race: Race
    rows: tuple[Row, ...]
    baseline: Row | None

    @property
    def shaped(self) -> bool:
        """Times are measured, not predicted."""
        return self.race.machine.shaped

    @property
    def target(self) -> float:
        """The accuracy to reach."""
        return self.race.settings.target

    @property
    def finished(self) -> bool:
        """All strategies that started have completed their steps."""
        steps = self.race.settings.steps
        return bool(self.rows) and all(row.last and row.last.step >= steps for row in self.rows)


def view(race: Race) -> View:
    """Compute it."""
    base = next((lane for lane in race.lanes if lane.name == PLAIN), None)
    base_s = _reached_s(race, base) if base else None
    reached = [found for lane in race.lanes if (found := _reached_s(race, lane)) is not None]
    fastest = min(reached) if len(race.lanes) > 1 and reached else None
    # ink is reserved for the baseline
    slots = iter(range(1, len(race.lanes) + 1))
    rows = []
    for index, lane in enumerate(race.lanes):
        own_s = _reached_s(race, lane)
        rows.append(
            Row(
                index=index,
                lane=lane,
                look=look(0 if lane is base else next(slots)),
                seconds=tuple(finite(race.seconds(lane, point)) for point in lane.points),
                reached=lane.reached(race.settings.target),
                reached_s=own_s,
                speedup=_ratio(base_s, own_s),
                reduction=_ratio(base.sent_bytes if base else None, lane.sent_bytes),
                notes=_notes(race, lane, fastest=own_s is not None and own_s == fastest),
            )
        )
    baseline = next((row for row in rows if row.lane is base), None)
    return View(race=race, rows=tuple(rows), baseline=baseline)


def finite(value: float | None) -> float | None:
    """None for NaN and infinity, which neither JSON nor an axis can represent."""
    return value if value is not None and math.isfinite(value) else None


def _reached_s(race: Race, lane: Lane) -> float | None:
    return finite(seconds_to_target(race, lane))


def _ratio(above: float | None, below: float | None) -> float | None:
    return finite(above / below) if above and below else None


def _notes(race: Race, lane: Lane, *, fastest: bool) -> tuple[str, ...]:
    notes = []
    if lane.choice:
        notes.append(f"chose {lane.choice}")
    if fastest:
        notes.append("fastest")
    if not all(math.isfinite(point.loss) for point in lane.points):
        notes.append("diverged: the loss is not a number")
    if not lane.points:
        notes.append("not started")
    elif lane.points[-1].step < race.settings.steps:
        notes.append(f"at step {lane.points[-1].step:,} of {race.settings.steps:,}")
    elif not lane.reached(race.settings.target):
        notes.append(f"did not reach {words.goal(race.settings.target)}")
    if not lane.same_bits:
        notes.append("workers ended with different weights")
    return tuple(notes)
