"""The README's table and picture, from recorded races.

laconic race --no-report --save benchmarks/results/race-100mbit.json
laconic race --no-report --rate 1gbit --save benchmarks/results/race-1gbit.json
"""

from __future__ import annotations

from benchmarks._line_plot import Axis, Series, line_plot
from benchmarks._rows import RESULTS, markdown
from laconic.race import Race, seconds_to_target, verdict

RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
_SLOW = "100mbit"
_DIFFERENT = 1.05
_DASHES = ("", "7 4", "2 3", "10 3 2 3", "", "7 4", "", "2 3")


def kept(rate: str) -> Race:
    """A race at that rate."""
    return Race.load(RESULTS / f"race-{rate}.json")


def race_table() -> str:
    """Strategies: the line, accuracy, bytes, and seconds to the target at both rates."""
    races = [kept(rate) for rate in RATES]
    plain = {lane.name: lane for lane in races[0].lanes}["fp32"]
    goal = f"{100 * races[0].settings.target:g}%"
    lines = []
    for lane in races[0].lanes:
        fewer = plain.sent_bytes / lane.sent_bytes
        cells = [
            f"`{lane.code}`",
            f"{lane.accuracy:.1%}",
            f"{fewer:.1f}× fewer" if lane is not plain else "",
        ]
        cells += [_reached(race, lane.name) for race in races]
        lines.append(cells)
    times = " | ".join(f"s to {goal} at {words}" for words in RATES.values())
    return markdown(f"| strategy | accuracy | bytes per step | {times} |", lines)


def _reached(race: Race, name: str) -> str:
    seconds = {lane.name: seconds_to_target(race, lane) for lane in race.lanes}
    mine, base = seconds[name], seconds["fp32"]
    if mine is None or base is None:
        return "not reached" if mine is None else f"{mine:.1f}"
    if name == "fp32":
        return f"{mine:.1f}"
    ratio, word = (base / mine, "faster") if mine <= base else (mine / base, "slower")
    return f"{mine:.1f}, {ratio:.1f}× {word}" if ratio >= _DIFFERENT else f"{mine:.1f}, the same"


def race_verdicts() -> str:
    """The verdicts of both races."""
    return "\n".join(f"> {RATES[rate]}: {verdict(kept(rate))}" for rate in RATES)


def race_picture() -> str:
    """Accuracy against time."""
    race = kept(_SLOW)
    longest = max(lane.points[-1].seconds for lane in race.lanes)
    series = [
        Series(
            name=lane.name,
            points=[(p.seconds, 100 * p.accuracy) for p in lane.points if p.step],
            dash=dash,
            marks=False,
        )
        for lane, dash in zip(race.lanes, _DASHES, strict=False)
    ]
    ticks = [(s, f"{s:g}") for s in (0.2, 0.5, 1, 2, 5, 10, 20, 50) if s <= 1.2 * longest]
    return line_plot(
        title="The same accuracy in less time",
        description=f"Test accuracy over seconds of training, logarithmic, of {len(race.lanes)} "
        f"strategies on {race.settings.workers} hosts with links of {RATES[_SLOW]}.",
        x=Axis(label="seconds of training", low=0.15, high=1.2 * longest, ticks=ticks, log=True),
        y=Axis(
            label="test accuracy",
            low=70,
            high=100,
            ticks=[(value, f"{value}%") for value in (70, 80, 90, 100)],
        ),
        series=series,
        note=f"Handwritten digits, {race.task.parameters:,} parameters, {race.settings.workers} "
        f"hosts, links of {RATES[_SLOW]}: laconic race.",
    )
