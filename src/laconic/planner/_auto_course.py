"""What auto does at each step: the course of a run, as a generator that no clock drives."""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from laconic.planner._auto_decide import (
    MARGIN,
    PLAIN,
    Look,
    Plain,
    Report,
    Seen,
    Table,
    decide,
    doubtful,
    error_of,
    exposed_enough,
    kappa_of,
    plain_of,
    predicted,
    steps_of,
    to_try,
)

UNMEASURED = 2  # steps: DDP rebuilds its buckets after the first
MEASURED = 3  # steps of every candidate, behind one that is not
CHECK = 100  # steps between two looks at the step time
_LOOKS = 3  # at most, until gradients are finite
_DRIFT = 0.15  # of the step time: more is another network, or another model
_TRIAL = 2_000  # steps until all are tried again, the first time


@dataclass(frozen=True)
class Ask:
    """Numbers that all ranks share at a step's last bucket; they are there two steps later."""

    what: str  # "plain", "looks", "times" or "window"
    specs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Do:
    """A step: by which strategy, whether codecs are looked at, and what is shared."""

    spec: str
    look: bool = False
    ask: Ask | None = None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy beside plain, as far as it is known before anything was measured."""

    spec: str
    exchange: str
    budget: float | None = None  # its codec's own
    measurable: bool = True


@dataclass(frozen=True, kw_only=True)
class Field:
    """What takes part. Of every family of candidates the first within `error` is tried."""

    families: tuple[tuple[Candidate, ...], ...]
    error: float = math.inf

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All of them."""
        return tuple(one for family in self.families for one in family)

    @property
    def looked_at(self) -> tuple[Candidate, ...]:
        """Those whose codec can be measured alone."""
        return tuple(one for one in self.candidates if one.measurable)


Steps = Generator[Do, Table | None, Any]


class Course:
    """The steps of a run, one `Do` after another.

    1. Plain steps; the time of a step, and how much of it the wire is exposed (`Plain`).
    2. If it is: one step in which codecs are looked at, for errors, bytes and seconds.
    3. Those within the error that promise most are tried, one step unmeasured and three measured.
       If steps of the winner and of plain overlap, both are measured once more, and the winner's
       slower time must beat plain's faster one.
    4. The choice is kept. Every 100 steps ranks compare the time of a step; where it has moved by
       15%, or a compressed step takes longer than a plain one did, all begins again. So it does
       after 2,000 steps, then after 4,000 more, and so on. A trial that confirms the choice makes
       drift wait twice as long for the next one.

    `send` gives the table that was asked for two steps before. All ranks get the same tables and so
    take the same course.
    """

    def __init__(self, field: Field, warmup_steps: int = 0) -> None:
        self.field = field
        self.choice, self.report = PLAIN, None
        self.step = -1  # the one that is under way
        self._decided = False
        self._reference: float | None = None  # seconds of a step of the choice, from many steps
        self._rival = math.inf  # seconds of a plain step, where plain was not chosen
        self._last_trial, self._distance, self._patience = 0, _TRIAL, CHECK
        self.news: Report | None = None  # a decision that was not told yet
        self._steps = self._run(max(UNMEASURED, warmup_steps))

    choice: str
    report: Report | None

    def next(self, table: Table | None = None) -> Do:
        """What the next step does; `table` if one is due."""
        self.step += 1
        return self._steps.send(table)

    def state_dict(self) -> dict[str, Any]:
        """The choice and what it is watched by."""
        return {
            "step": self.step + 1,
            "choice": self.choice,
            "decided": self._decided,
            "reference": self._reference,
            "rival": self._rival,
            "last trial": self._last_trial,
            "distance": self._distance,
            "patience": self._patience,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the choice, without a new trial; with the first one if none was made."""
        self.step, self.choice = int(state["step"]) - 1, str(state["choice"])
        self._decided, self._reference = bool(state["decided"]), state["reference"]
        self._rival, self._last_trial = float(state["rival"]), int(state["last trial"])
        self._distance, self._patience = int(state["distance"]), int(state["patience"])
        self.report = self.news = None
        self._steps = self._run(UNMEASURED)

    def _run(self, unmeasured: int) -> Steps:
        for _ in range(unmeasured):
            yield Do(self.choice)
        while True:
            if not self._decided:
                yield from self._trial()
            self._decided = True
            yield from self._hold()
            self._decided = False

    def _trial(self) -> Steps:
        before = self.choice
        plain = plain_of((yield from self._asked(Ask("plain"), PLAIN, MEASURED)))
        kappa, seen, why = None, (), ""
        if not exposed_enough(plain):
            why = "nothing to win"
        elif self.field.candidates:
            kappa, seen = self._seen((yield from self._looks()), plain)
            families = [[one.spec for one in family] for family in self.field.families]
            tried = to_try(seen, families, self.field.error, plain)
            if tried:
                seen = yield from self._times(tried, seen)
            else:
                why = "and no candidate within the error promises to be faster"
        choice = decide(plain, [one for one in seen if one.seconds is not None])
        winner = next((one for one in seen if one.spec == choice), None)
        if winner is not None and doubtful(plain, winner):
            plain, seen = yield from self._once_more(plain, winner, seen)
            choice = decide(plain, [one for one in seen if one.spec == winner.spec])
        self.choice, self._reference = choice, None
        self._rival = math.inf if self.choice == PLAIN else plain.step
        self._last_trial = self.step
        self._patience = 2 * self._patience if self.choice == before else CHECK
        self.report = self.news = Report(
            choice=self.choice, why=why, step=self.step, plain=plain, kappa=kappa, seen=seen
        )

    def _looks(self) -> Generator[Do, Table | None, Table]:
        """A step whose gradients codecs are looked at with; another one if they were not finite."""
        table: Table = []
        for _ in range(_LOOKS):  # with a GradScaler, the first steps overflow
            yield Do(PLAIN, look=True)
            table = yield from self._asked(Ask("looks"), PLAIN)
            if not table[0][2] or all(0 < rank[0] < math.inf for rank in table):
                break
        return table

    def _seen(self, table: Table, plain: Plain) -> tuple[float, tuple[Seen, ...]]:
        """Numbers of every rank: ‖x‖², ‖mean‖², four of sizes, then three for each codec."""
        kappa = kappa_of([rank[:2] for rank in table])
        encoded, rest_bytes, plain_bytes, last_share = table[0][2:6]  # the same on all ranks
        if not encoded:
            return kappa, ()
        found = {}
        for number, one in enumerate(self.field.looked_at):
            start = 6 + 3 * number
            looks = [
                Look(
                    error=rank[start],
                    bytes_per_value=rank[start + 1],
                    seconds_per_value=rank[start + 2],
                )
                for rank in table
            ]
            size = statistics.mean(look.bytes_per_value for look in looks)
            ratio = (encoded * size + rest_bytes) / plain_bytes
            seconds = encoded * max(look.seconds_per_value for look in looks)
            found[one.spec] = Seen(
                spec=one.spec,
                error=error_of(looks, one.exchange, kappa, one.budget),
                ratio=ratio,
                codec_seconds=seconds,
                predicted_seconds=predicted(plain, ratio, seconds, last_share),
            )
        unknown = (Seen(spec=one.spec, error=one.budget) for one in self.field.candidates)
        return kappa, tuple(found.get(one.spec, one) for one in unknown)

    def _times(self, tried: Sequence[str], seen: Sequence[Seen]) -> Steps:
        """Every candidate for a few steps; the table comes two steps after the last."""
        for spec in tried[:-1]:
            for _ in range(1 + MEASURED):
                yield Do(spec)
        table = yield from self._asked(Ask("times", tuple(tried)), tried[-1], MEASURED)
        took = _split(tried, table)
        return tuple(_timed(one, took.get(one.spec)) for one in seen)

    def _once_more(self, plain: Plain, winner: Seen, seen: Sequence[Seen]) -> Steps:
        """Plain and the winner for a few more steps: plain's faster time counts, and its slower."""
        for _ in range(1 + MEASURED):
            yield Do(PLAIN)
        both = (PLAIN, winner.spec)
        took = _split(both, (yield from self._asked(Ask("times", both), winner.spec, MEASURED)))
        again = statistics.median(took[PLAIN])
        plain = replace(plain, step=min(plain.step, again), fastest=min(took[PLAIN]))
        slower = max(winner.seconds or 0.0, statistics.median(took[winner.spec]))
        winner = replace(winner, seconds=slower)
        return plain, tuple(winner if one.spec == winner.spec else one for one in seen)

    def _hold(self) -> Steps:
        """Until the choice is to be looked at again."""
        while True:
            table = yield from self._asked(Ask("window", (self.choice,)), self.choice, CHECK - 2)
            now = statistics.mean(rank[0] for rank in table)
            since = self.step - self._last_trial
            if since >= self._distance:
                self._distance *= 2
                return
            if self._moved(now) and since >= self._patience:
                return

    def _moved(self, now: float) -> bool:
        """Whether this step time asks for a new trial. The first one becomes the reference."""
        if not math.isfinite(now):
            return False
        if self._reference is None:
            self._reference = now
        drift = abs(now - self._reference)
        return drift > _DRIFT * self._reference or now > self._rival * (1 + MARGIN)

    def _asked(self, ask: Ask, spec: str, before: int = 0) -> Generator[Do, Table | None, Table]:
        """So many steps, one at whose end numbers are shared, and one more: then they are there."""
        for _ in range(before):
            yield Do(spec)
        yield Do(spec, ask=ask)
        table = yield Do(spec)
        assert table is not None
        return table


def _split(specs: Sequence[str], table: Table) -> dict[str, list[float]]:
    """Steps of every candidate, from numbers that ranks have shared."""
    return {
        spec: steps_of([rank[i * MEASURED : (i + 1) * MEASURED] for rank in table])
        for i, spec in enumerate(specs)
    }


def _timed(one: Seen, steps: Sequence[float] | None) -> Seen:
    if steps is None:
        return one
    return replace(one, seconds=statistics.median(steps), slowest=max(steps))
