"""What auto concludes from numbers: pure functions, the same answer on every rank."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from laconic.planner._mean_error import LEAST_KAPPA, mean_error

PLAIN = "none"  # plain DDP, by the name of its codec
MARGIN = 0.03  # of a step: less is no difference
MOST_TRIED = 4  # candidates beside plain
_DOUBT = 1.1  # a candidate is tried unless it is predicted to be slower than plain by this

Table = Sequence[Sequence[float]]  # every rank's numbers, in order of ranks


@dataclass(frozen=True, kw_only=True)
class Plain:
    """What plain steps have told; seconds."""

    step: float
    fastest: float  # of the measured steps
    exposed: float  # from the last bucket's hook call to the end of its exchange, mean over ranks
    most_exposed: float  # the same on the rank where it is longest
    hidden: float  # from the first bucket's hook call to the last one's


@dataclass(frozen=True, kw_only=True)
class Look:
    """One rank's look at a codec: an encoding and a decoding of values of its own."""

    error: float  # ‖decoded - x‖²/‖x‖²
    bytes_per_value: float
    seconds_per_value: float  # encoding, decoding and adding, as often as the exchange does


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What auto knows of a candidate."""

    spec: str
    error: float | None  # NMSE of the mean; None where it cannot be measured
    ratio: float = 1.0  # bytes, as a part of plain's
    codec_seconds: float = 0.0  # of a step, in the thread of communication
    predicted_seconds: float | None = None  # of a step
    seconds: float | None = None  # of a step, as tried
    slowest: float | None = None  # of the measured steps


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured, what was chosen, and why."""

    choice: str
    why: str
    step: int  # from which on the choice is used
    plain: Plain
    kappa: float | None  # ‖mean‖²/average ‖gradient‖², 1/n to 1; None if it was not looked at
    seen: tuple[Seen, ...] = ()

    @property
    def seconds(self) -> dict[str, float]:
        """Of a step, of all that were tried; plain among them."""
        tried = {one.spec: one.seconds for one in self.seen if one.seconds is not None}
        return {PLAIN: self.plain.step} | tried

    def __str__(self) -> str:
        """One line for the log.

        >>> plain = Plain(step=0.953, fastest=0.9, exposed=0.915, most_exposed=0.92, hidden=0.01)
        >>> fast = Seen(spec="ecdq:error=0.1", error=0.1, seconds=0.031)
        >>> report = Report(choice=fast.spec, why="", step=27, plain=plain, kappa=1, seen=(fast,))
        >>> print(report)
        auto: ecdq:error=0.1 (31 ms a step; plain 953): the wire was 96% of a plain step
        """
        took = self.seconds
        others = ", ".join(
            f"{_called(spec)} {_ms(seconds)}"
            for spec, seconds in took.items()
            if spec != self.choice
        )
        share = f"the wire was {self.plain.exposed / self.plain.step:.0%} of a plain step"
        why = f"{share}, {self.why}" if self.why else share
        step = f"{_ms(took[self.choice])} ms a step"
        return f"auto: {_called(self.choice)} ({'; '.join(filter(None, (step, others)))}): {why}"


def plain_of(table: Table) -> Plain:
    """From every rank's steps, exposed and hidden times, a third of its numbers each."""
    third = len(table[0]) // 3
    steps, exposed, hidden = (
        [rank[part * third : (part + 1) * third] for rank in table] for part in range(3)
    )
    waits = [statistics.median(rank) for rank in exposed]
    return Plain(
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


def exposed_enough(plain: Plain) -> bool:
    """Whether there is anything to win on any rank."""
    return plain.most_exposed >= MARGIN * plain.step


def kappa_of(squares: Table) -> float:
    """κ = ‖mean‖²/(average ‖x_i‖²) from every rank's (‖x_i‖², ‖mean‖²); else 1/n, independent."""
    own = statistics.mean(rank[0] for rank in squares)
    mean = statistics.mean(rank[1] for rank in squares)
    unknown = 1 / len(squares)
    kappa = mean / own if 0 < own < math.inf else unknown
    return min(max(kappa, LEAST_KAPPA), 1.0) if math.isfinite(kappa) else unknown


def error_of(
    looks: Sequence[Look], exchange: str, kappa: float, budget: float | None
) -> float | None:
    """NMSE of the mean, averaged over ranks; a codec that has a budget keeps it.

    The mean's own encoding is taken to have the error that a gradient's has.
    """
    if budget is not None:
        return budget
    one = statistics.mean(look.error for look in looks)
    if not math.isfinite(one):
        return None
    return mean_error(exchange, one, one, len(looks), kappa)


def within(seen: Seen, budget: float) -> bool:
    """Whether its error is known and fits, or no error was asked for."""
    return math.isinf(budget) or (seen.error is not None and seen.error <= budget)


def predicted(plain: Plain, ratio: float, codec_seconds: float, last_share: float) -> float:
    """Seconds of a step with so many times the bytes, and a codec; `last_share` of it ends last.

    A plain step's communication W is hidden behind backward as far as it can be, H seconds, but
    for the last bucket's share λ of it, and X is exposed: X = max(λ·W, W - H), so

        W = min(X/λ, X + H)     W' = ratio·W + codec     X' = max(λ·W', W' - H)
    """
    exposed, hidden = plain.exposed, plain.hidden
    wire = min(exposed / last_share, exposed + hidden)
    work = ratio * wire + codec_seconds
    return plain.step - exposed + max(last_share * work, work - hidden)


def to_try(
    candidates: Sequence[Seen], families: Sequence[Sequence[str]], budget: float, plain: Plain
) -> list[str]:
    """Of every family the first that fits the budget; of these, the four that promise most.

    Those that promise least come first: the best one is on when the trial ends.
    """
    known = {one.spec: one for one in candidates if within(one, budget)}
    fitting = (next((known[spec] for spec in family if spec in known), None) for family in families)
    promises = {
        one.spec: one.predicted_seconds or 0.0
        for one in fitting
        if one is not None and not (one.predicted_seconds or 0.0) > _DOUBT * plain.step
    }
    return sorted(promises, key=promises.__getitem__)[:MOST_TRIED][::-1]


def decide(plain: Plain, tried: Sequence[Seen]) -> str:
    """Of those within 3% of the fastest the one with the least error; plain has none."""
    errors: Mapping[str, float] = {PLAIN: 0.0} | {
        one.spec: math.inf if one.error is None else one.error for one in tried
    }
    seconds = {PLAIN: plain.step} | {
        one.spec: one.seconds for one in tried if one.seconds is not None
    }
    fastest = min(seconds.values())
    near = [spec for spec, took in seconds.items() if took <= fastest * (1 + MARGIN)]
    return min(near, key=lambda spec: (errors[spec], seconds[spec]))


def doubtful(plain: Plain, winner: Seen) -> bool:
    """Whether any step of the winner took as long as one of plain's: then noise may have won."""
    return winner.slowest is not None and winner.slowest >= plain.fastest


def _called(spec: str) -> str:
    return "plain" if spec == PLAIN else spec


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.0995 else f"{1e3 * seconds:.2g}"
