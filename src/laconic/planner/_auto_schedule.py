"""The schedule of auto's trials, step by step, as a generator without a clock."""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from laconic.planner._auto_decide import (
    MARGIN,
    PLAIN_DDP,
    Candidate,
    CandidateReport,
    GradientProfile,
    PlainStep,
    Report,
    Table,
    decide,
    doubtful,
    exposed_enough,
    judge,
    kappa_of,
    plain_step_of,
    steps_of,
    to_try,
)

UNMEASURED = 2  # steps: DDP rebuilds its buckets after the first
MEASURED = 3  # steps of every candidate, after one that is not
CHECK = 100  # steps between two looks at the step time
_MAX_PROFILED = 3  # steps, until gradients are finite
_DRIFT = 0.15  # of the step time: more means a changed network or model
_TRIAL = 2_000  # steps until all are tried again, the first time


@dataclass(frozen=True)
class Gather:
    """Numbers that all ranks share at a step's last bucket; they are there two steps later."""

    what: str  # "plain", "profiles", "times" or "window"
    specs: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepAction:
    """A step: by which strategy, whether codecs are profiled, and which numbers are gathered."""

    spec: str
    profile: bool = False
    gather: Gather | None = None


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The candidates. Of every family the first within `error` is tried."""

    families: tuple[tuple[Candidate, ...], ...]
    error: float = math.inf

    @property
    def every(self) -> tuple[Candidate, ...]:
        """All of them."""
        return tuple(one for family in self.families for one in family)

    @property
    def measurable(self) -> tuple[Candidate, ...]:
        """Those whose codec can be profiled alone."""
        return tuple(one for one in self.every if one.measurable)


Steps = Generator[StepAction, Table | None, Any]


class TrialSchedule:
    """The steps of a run, one `StepAction` after another.

    1. Plain steps; the time of a step, and how much of it the wire is exposed (`PlainStep`).
    2. If it is: one step in which codecs are profiled, for errors, bytes and seconds.
    3. Those within the error that promise most are tried, one step unmeasured and three measured.
       If steps of the winner and of plain DDP overlap, both are measured once more, and the
       winner's slower time must beat plain DDP's faster one.
    4. The choice is kept. Every 100 steps ranks compare the time of a step; where it has moved by
       15%, or a compressed step takes longer than a plain one did, a new trial begins. So it does
       after 2,000 steps, then after 4,000 more, and so on. A trial that confirms the choice doubles
       the time before drift can start the next one.

    `next` takes the table whose `Gather` was two steps before. All ranks get the same tables and
    so act alike.
    """

    choice: str
    report: Report | None

    def __init__(self, candidates: Candidates, warmup_steps: int = 0) -> None:
        self.candidates = candidates
        self.choice, self.report = PLAIN_DDP, None
        self.step = -1  # the current one
        self.news: Report | None = None  # a decision that was not reported yet
        self._decided = False
        self._reference: float | None = None  # seconds of a step of the choice, from many steps
        self._rival = math.inf  # seconds of a plain step, where plain DDP was not chosen
        self._last_trial, self._distance, self._patience = 0, _TRIAL, CHECK
        self._steps = self._run(max(UNMEASURED, warmup_steps))

    def next(self, table: Table | None = None) -> StepAction:
        """The next step's action; `table` if one is due."""
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
        """Continue with the choice, without a new trial; with the first one if none was made."""
        self.step, self.choice = int(state["step"]) - 1, str(state["choice"])
        self._decided, self._reference = bool(state["decided"]), state["reference"]
        self._rival, self._last_trial = float(state["rival"]), int(state["last trial"])
        self._distance, self._patience = int(state["distance"]), int(state["patience"])
        self.report = self.news = None
        self._steps = self._run(UNMEASURED)

    def _run(self, unmeasured: int) -> Steps:
        for _ in range(unmeasured):
            yield StepAction(self.choice)
        while True:
            if not self._decided:
                yield from self._trial()
            self._decided = True
            yield from self._hold()
            self._decided = False

    def _trial(self) -> Steps:
        before = self.choice
        plain = plain_step_of((yield from self._gathered(Gather("plain"), PLAIN_DDP, MEASURED)))
        kappa, seen, why = None, (), ""
        if not exposed_enough(plain):
            why = "nothing to win"
        elif self.candidates.every:
            kappa, seen = self._judged((yield from self._profiles()), plain)
            families = [[one.spec for one in family] for family in self.candidates.families]
            tried = to_try(seen, families, self.candidates.error, plain)
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
        self._rival = math.inf if self.choice == PLAIN_DDP else plain.step
        self._last_trial = self.step
        self._patience = 2 * self._patience if self.choice == before else CHECK
        self.report = self.news = Report(
            choice=self.choice, why=why, step=self.step, plain=plain, kappa=kappa, seen=seen
        )

    def _profiles(self) -> Generator[StepAction, Table | None, list[GradientProfile]]:
        """A step whose gradients codecs encode; another one if they were not finite."""
        ranks: list[GradientProfile] = []
        for _ in range(_MAX_PROFILED):  # with a GradScaler, the first steps overflow
            yield StepAction(PLAIN_DDP, profile=True)
            table = yield from self._gathered(Gather("profiles"), PLAIN_DDP)
            ranks = [GradientProfile.unpack(numbers) for numbers in table]
            if not ranks[0].encoded or all(one.finite for one in ranks):
                break
        return ranks

    def _judged(
        self, ranks: Sequence[GradientProfile], plain: PlainStep
    ) -> tuple[float, tuple[CandidateReport, ...]]:
        """κ, and the prediction for every candidate."""
        kappa = kappa_of([(one.square, one.mean_square) for one in ranks])
        if not ranks[0].encoded:
            return kappa, ()
        found = {
            one.spec: judge(one, [rank.codecs[i] for rank in ranks], ranks[0], plain, kappa)
            for i, one in enumerate(self.candidates.measurable)
        }
        unknown = (
            CandidateReport(spec=one.spec, error=one.codec.budget) for one in self.candidates.every
        )
        return kappa, tuple(found.get(one.spec, one) for one in unknown)

    def _times(self, tried: Sequence[str], seen: Sequence[CandidateReport]) -> Steps:
        """Every candidate for a few steps; the table comes two steps after the last."""
        for spec in tried[:-1]:
            for _ in range(1 + MEASURED):
                yield StepAction(spec)
        took = yield from self._timed(tried)
        return tuple(
            replace(one, seconds=statistics.median(steps), slowest=max(steps))
            if (steps := took.get(one.spec))
            else one
            for one in seen
        )

    def _once_more(
        self, plain: PlainStep, winner: CandidateReport, seen: Sequence[CandidateReport]
    ) -> Steps:
        """Both for a few more steps: plain DDP's faster time counts, and the winner's slower."""
        for _ in range(1 + MEASURED):
            yield StepAction(PLAIN_DDP)
        took = yield from self._timed((PLAIN_DDP, winner.spec))
        again = statistics.median(took[PLAIN_DDP])
        plain = replace(plain, step=min(plain.step, again), fastest=min(took[PLAIN_DDP]))
        slower = max(winner.seconds or 0.0, statistics.median(took[winner.spec]))
        winner = replace(winner, seconds=slower)
        return plain, tuple(winner if one.spec == winner.spec else one for one in seen)

    def _timed(
        self, specs: Sequence[str]
    ) -> Generator[StepAction, Table | None, dict[str, list[float]]]:
        """Seconds of the steps of these, of which the last is still to be tried."""
        gather = Gather("times", tuple(specs))
        table = yield from self._gathered(gather, specs[-1], MEASURED)
        return {
            spec: steps_of([rank[i * MEASURED : (i + 1) * MEASURED] for rank in table])
            for i, spec in enumerate(specs)
        }

    def _hold(self) -> Steps:
        """Until another trial is due."""
        while True:
            gather = Gather("window", (self.choice,))
            table = yield from self._gathered(gather, self.choice, CHECK - 2)
            now = statistics.mean(rank[0] for rank in table)
            since = self.step - self._last_trial
            if since >= self._distance:
                self._distance *= 2
                return
            if self._moved(now) and since >= self._patience:
                return

    def _moved(self, now: float) -> bool:
        """Whether this step time requires a new trial. The first one becomes the reference."""
        if not math.isfinite(now):
            return False
        if self._reference is None:
            self._reference = now
        drift = abs(now - self._reference)
        return drift > _DRIFT * self._reference or now > self._rival * (1 + MARGIN)

    def _gathered(
        self, gather: Gather, spec: str, before: int = 0
    ) -> Generator[StepAction, Table | None, Table]:
        """`before` steps, one at whose end numbers are shared, and one more: then they arrive."""
        for _ in range(before):
            yield StepAction(spec)
        yield StepAction(spec, gather=gather)
        table = yield StepAction(spec)
        assert table is not None
        return table
