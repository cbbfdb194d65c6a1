"""Auto's decisions from measurements: pure functions, with the same result on every rank."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from laconic._cost import (
    FREE,
    MIN_KAPPA,
    Bucket,
    Cluster,
    CodecCost,
    Device,
    LinearCost,
    Links,
    Work,
    Workload,
    ring_bytes,
    sent_bytes,
)
from laconic.codecs import Codec
from laconic.errors import ConfigError
from laconic.exchanges import Exchange, pair
from laconic.planner._predict import simulated
from laconic.schedules._costs import EVERY_STEP, Scenario

PLAIN_DDP = "none"  # by the spec of its codec
MARGIN = 0.03  # of a step: less is no difference
MAX_TRIED = 4  # candidates beside plain DDP
_DOUBT = 1.1  # a candidate is tried unless predicted to be slower than plain DDP by this factor

Table = Sequence[Sequence[float]]  # every rank's numbers, in order of ranks


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy beside plain DDP."""

    spec: str
    codec: Codec
    exchange: Exchange

    @staticmethod
    def of(spec: str) -> Candidate:
        """By its spec."""
        codec, exchange = pair(spec)
        return Candidate(spec=spec, codec=codec, exchange=exchange)

    @property
    def measurable(self) -> bool:
        """Whether a single encoding shows its error: not with residuals or side information."""
        return not (self.codec.residuals or self.codec.side_information)


@dataclass(frozen=True, kw_only=True)
class PlainStep:
    """Times of plain DDP's steps, in seconds."""

    step: float
    fastest: float  # of the measured steps
    exposed: float  # from the last bucket's hook call to the end of its exchange, mean over ranks
    most_exposed: float  # the same on the rank where it is longest
    hidden: float  # from the first bucket's hook call to the last one's


@dataclass(frozen=True)
class CodecProfile:
    """What a codec takes on one rank's gradients; bits and seconds per value."""

    error: float  # ‖decoded - x‖²/‖x‖²
    bits_out: float  # of a worker's gradient
    bits_back: float  # of the mean, where an exchange encodes that, too
    encode_s: float
    decode_s: float


@dataclass(frozen=True)
class GradientProfile:
    """What one rank found in a step's gradients; sizes are the same on all ranks."""

    square: float  # ‖x‖²
    mean_square: float  # ‖mean over ranks‖²
    encoded: float  # values that are worth encoding
    uncompressed_bytes: float  # of all others
    plain_bytes: float  # of all, as they are
    last_share: float  # the last bucket's part of these
    codecs: tuple[CodecProfile, ...]

    def pack(self) -> list[float]:
        """As numbers that ranks can share."""
        *own, codecs = astuple(self)
        return [*own, *(number for profile in codecs for number in profile)]

    @staticmethod
    def unpack(numbers: Sequence[float]) -> GradientProfile:
        """The reverse."""
        profiles = zip(*[iter(numbers[6:])] * 5, strict=True)
        return GradientProfile(*numbers[:6], codecs=tuple(CodecProfile(*one) for one in profiles))

    @property
    def finite(self) -> bool:
        """Whether its gradients are numbers to judge codecs by."""
        return 0 < self.square < math.inf


@dataclass(frozen=True, kw_only=True)
class CandidateReport:
    """A candidate's predictions and measurements."""

    spec: str
    error: float | None  # NMSE of the mean; None where it cannot be measured
    ratio: float = 1.0  # bytes, relative to those of plain DDP
    codec_seconds: float = 0.0  # per step, in the communication threads
    predicted_seconds: float | None = None  # per step; None where it cannot be predicted
    seconds: float | None = None  # per step, as tried
    slowest: float | None = None  # of the measured steps


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured, what was chosen, and why."""

    choice: str
    why: str
    step: int  # from which on the choice is used
    plain: PlainStep
    kappa: float | None  # gradient agreement, 1/n to 1; None if codecs were not profiled
    seen: tuple[CandidateReport, ...] = ()

    @property
    def seconds(self) -> dict[str, float]:
        """Per step, of all that were tried, plain DDP among them."""
        tried = {one.spec: one.seconds for one in self.seen if one.seconds is not None}
        return {PLAIN_DDP: self.plain.step} | tried

    def __str__(self) -> str:
        """One line for the log.

        >>> plain = PlainStep(
        ...     step=0.953, fastest=0.9, exposed=0.915, most_exposed=0.92, hidden=0.01
        ... )
        >>> fast = CandidateReport(spec="ecdq:error=0.1", error=0.1, seconds=0.031)
        >>> report = Report(choice=fast.spec, why="", step=27, plain=plain, kappa=1, seen=(fast,))
        >>> print(report)
        auto: ecdq:error=0.1 (31 ms per step; plain 953): the wire was 96% of a plain step
        """
        took = self.seconds
        others = ", ".join(
            f"{_called(spec)} {_ms(seconds)}"
            for spec, seconds in took.items()
            if spec != self.choice
        )
        share = f"the wire was {self.plain.exposed / self.plain.step:.0%} of a plain step"
        why = f"{share}, {self.why}" if self.why else share
        step = f"{_ms(took[self.choice])} ms per step"
        return f"auto: {_called(self.choice)} ({'; '.join(filter(None, (step, others)))}): {why}"


def plain_step_of(table: Table) -> PlainStep:
    """From every rank's steps, exposed and hidden times, a third of its numbers each."""
    third = len(table[0]) // 3
    steps, exposed, hidden = (
        [rank[part * third : (part + 1) * third] for rank in table] for part in range(3)
    )
    waits = [statistics.median(rank) for rank in exposed]
    return PlainStep(
        step=statistics.median(steps_of(steps)),
        fastest=min(steps_of(steps)),
        exposed=statistics.mean(waits),
        most_exposed=max(waits),
        hidden=statistics.mean(statistics.median(rank) for rank in hidden),
    )


def steps_of(table: Table) -> list[float]:
    """Seconds of steps, as their mean over ranks.

    Ranks wait for each other in every step, so all take as long as the slowest; what one rank calls
    late in a step it has less in the next, and the mean over ranks takes that out.
    """
    return [statistics.mean(step) for step in zip(*table, strict=True)]


def exposed_enough(plain: PlainStep) -> bool:
    """Whether communication is exposed enough on any rank to gain anything."""
    return plain.most_exposed >= MARGIN * plain.step


def kappa_of(squares: Table) -> float:
    """κ = ‖mean‖²/(average ‖x_i‖²) from every rank's (‖x_i‖², ‖mean‖²); else 1/n, independent."""
    own = statistics.mean(rank[0] for rank in squares)
    mean = statistics.mean(rank[1] for rank in squares)
    unknown = 1 / len(squares)
    kappa = mean / own if 0 < own < math.inf else unknown
    return min(max(kappa, MIN_KAPPA), 1.0) if math.isfinite(kappa) else unknown


def scenario_of(
    one: Candidate,
    profiles: Sequence[CodecProfile],
    sizes: GradientProfile,
    plain: PlainStep,
    kappa: float,
) -> Scenario:
    """The measurements of all ranks, in the terms of the planner's model.

    A plain step's communication W overlaps with backward as far as possible, H seconds, except
    the last bucket's share λ of it, and X is exposed: X = max(λ·W, W - H). So

        W = min(X/λ, X + H)

    and the bytes of a plain all-reduce over W are the speed of links, starts included: two buckets,
    λ of the gradients in the last one. Codecs run in the communication thread, beside backward;
    their bits and errors are those of the mean rank, their seconds those of the slowest.
    """
    n, exposed, share = len(profiles), plain.exposed, sizes.last_share
    wire = max(min(exposed / share, exposed + plain.hidden), 1e-9)
    line = LinearCost(start_s=0.0, per_s=max(ring_bytes(sizes.plain_bytes, n), 1.0) / wire)
    links = Links(ranks=n, allreduce=(line,), all_to_all=line, sendrecv=line)
    alone = Links(ranks=1, allreduce=(FREE,), all_to_all=FREE, sendrecv=FREE)
    columns = [*zip(*map(astuple, profiles), strict=True)]
    error, out, back = map(statistics.mean, columns[:3])
    encode, decode = (_per_value(max(column)) for column in columns[3:])
    parts = (1 - share, 0.0), (share, plain.hidden)
    return Scenario(
        codec=one.codec,
        exchange=one.exchange,
        cost=CodecCost(
            spec=str(one.codec),
            bits_out=out,
            bits_back=back,
            bits_once=out,
            error=error,
            error_back=error,
            encode=encode,
            decode=decode,
        ),
        cluster=Cluster(
            workers=max(n, 2), flat=links, inside=alone, between=links, device=Device(slots=2.0)
        ),
        workload=Workload(
            forward_s=0.0,
            backward_s=plain.hidden,
            rest_s=0.0,
            buckets=tuple(
                Bucket(
                    encoded=round(part * sizes.encoded),
                    plain=round(part * sizes.uncompressed_bytes / 4),
                    ready_s=ready_s,
                )
                for part, ready_s in parts
            ),
            kappa=kappa,
        ),
    )


def _per_value(seconds: float) -> LinearCost:
    return LinearCost(start_s=0.0, per_s=1 / seconds) if seconds > 0 else FREE


def judge(
    one: Candidate,
    profiles: Sequence[CodecProfile],
    sizes: GradientProfile,
    plain: PlainStep,
    kappa: float,
) -> CandidateReport:
    """The prediction for a candidate; its error alone if its exchange has no cost.

    A codec that has an error budget keeps it. The mean's own encoding is taken to have the error
    that a gradient's has.
    """
    on = scenario_of(one, profiles, sizes, plain, kappa)
    error = one.codec.budget
    if error is None and math.isfinite(on.cost.error):
        error = on.mean_error
    try:
        tasks = [task for bucket in on.workload.buckets for task in on.exchanged(bucket)]
        took = simulated(EVERY_STEP, on)
    except ConfigError:
        return CandidateReport(spec=one.spec, error=error)
    return CandidateReport(
        spec=one.spec,
        error=error,
        ratio=sent_bytes(tasks) / max(1.0, ring_bytes(sizes.plain_bytes, len(profiles))),
        codec_seconds=sum(task.seconds for task in tasks if isinstance(task, Work)),
        predicted_seconds=plain.step - plain.exposed - plain.hidden + took,
    )


def within(one: CandidateReport, budget: float) -> bool:
    """Whether its error is known and within the budget, or the budget is infinite."""
    return math.isinf(budget) or (one.error is not None and one.error <= budget)


def to_try(
    candidates: Sequence[CandidateReport],
    families: Sequence[Sequence[str]],
    budget: float,
    plain: PlainStep,
) -> list[str]:
    """Of every family the first within the budget; of these, the four with the best predictions.

    The worst prediction comes first: the best one is in use when the trial ends.
    """
    known = {one.spec: one for one in candidates if within(one, budget)}
    fitting = (next((known[spec] for spec in family if spec in known), None) for family in families)
    promises = {
        one.spec: one.predicted_seconds or 0.0
        for one in fitting
        if one is not None and not (one.predicted_seconds or 0.0) > _DOUBT * plain.step
    }
    return sorted(promises, key=promises.__getitem__)[:MAX_TRIED][::-1]


def decide(plain: PlainStep, tried: Sequence[CandidateReport]) -> str:
    """Of those within 3% of the fastest, the one with the least error; plain DDP has none."""
    errors: Mapping[str, float] = {PLAIN_DDP: 0.0} | {
        one.spec: math.inf if one.error is None else one.error for one in tried
    }
    seconds = {PLAIN_DDP: plain.step} | {
        one.spec: one.seconds for one in tried if one.seconds is not None
    }
    fastest = min(seconds.values())
    near = [spec for spec, took in seconds.items() if took <= fastest * (1 + MARGIN)]
    return min(near, key=lambda spec: (errors[spec], seconds[spec]))


def doubtful(plain: PlainStep, winner: CandidateReport) -> bool:
    """Whether any step of the winner took as long as one of plain DDP's: it may be noise."""
    return winner.slowest is not None and winner.slowest >= plain.fastest


def _called(spec: str) -> str:
    return "plain" if spec == PLAIN_DDP else spec


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.0995 else f"{1e3 * seconds:.2g}"
