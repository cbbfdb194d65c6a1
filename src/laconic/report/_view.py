"""What the page says of every strategy, worked out once from the race."""

from __future__ import annotations

import math
from dataclasses import dataclass

from laconic.race._quantize import family
from laconic.race._result import Lane, Point, Race
from laconic.race._strategies import PLAIN
from laconic.race._verdict import seconds_to_target
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
    sooner: float | None  # than the baseline, times
    fewer: float | None  # bytes a step than the baseline, times
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As typed."""
        return self.lane.name

    @property
    def last(self) -> Point | None:
        """Where it ended, if it began."""
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
        """The accuracy that they race to."""
        return self.race.settings.target

    @property
    def finished(self) -> bool:
        """Every strategy that began made its steps."""
        steps = self.race.settings.steps
        return bool(self.rows) and all(row.last and row.last.step >= steps for row in self.rows)


def view(race: Race) -> View:
    """Work it out."""
    base = next((lane for lane in race.lanes if lane.name == PLAIN), None)
    base_s = _reached_s(race, base) if base else None
    reached = [found for lane in race.lanes if (found := _reached_s(race, lane)) is not None]
    soonest = min(reached) if len(race.lanes) > 1 and reached else None
    # ink is kept for the baseline
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
                sooner=_ratio(base_s, own_s),
                fewer=_ratio(base.sent_bytes if base else None, lane.sent_bytes),
                notes=_notes(race, lane, soonest=own_s is not None and own_s == soonest),
            )
        )
    baseline = next((row for row in rows if row.lane is base), None)
    return View(race=race, rows=tuple(rows), baseline=baseline)


def finite(value: float | None) -> float | None:
    """Nothing for NaN and infinity, which neither JSON nor an axis can hold."""
    return value if value is not None and math.isfinite(value) else None


def _reached_s(race: Race, lane: Lane) -> float | None:
    return finite(seconds_to_target(race, lane))


def _ratio(above: float | None, below: float | None) -> float | None:
    return finite(above / below) if above and below else None


def _notes(race: Race, lane: Lane, *, soonest: bool) -> tuple[str, ...]:
    notes = []
    if lane.choice:
        notes.append(f"chose {lane.choice}")
    if soonest:
        notes.append("soonest")
    if not all(math.isfinite(point.loss) for point in lane.points):
        notes.append("diverged: the loss is no number")
    if not lane.points:
        notes.append("not started")
    elif lane.points[-1].step < race.settings.steps:
        notes.append(f"at step {lane.points[-1].step:,} of {race.settings.steps:,}")
    elif not lane.reached(race.settings.target):
        notes.append(f"did not reach {words.goal(race.settings.target)}")
    if not lane.same_bits:
        notes.append("workers ended with different weights")
    return tuple(notes)
