"""Who won, in a sentence."""

from __future__ import annotations

from laconic.race._result import Lane, Race
from laconic.race._strategies import PLAIN

_ALIKE = 1.03  # closer than that is no difference


def seconds_to_target(race: Race, lane: Lane) -> float | None:
    """Until the target, if it was reached."""
    point = lane.reached(race.settings.target)
    return None if point is None else race.seconds(lane, point)


def verdict(race: Race) -> str:
    """The strategy that was first, beside plain DDP."""
    if not race.lanes:
        return "No strategy has been raced yet."
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
    sooner = arrived[PLAIN] / arrived[first]
    if first == PLAIN or sooner < _ALIKE:
        return _nothing_paid(race, arrived, goal)
    ends = [lanes[name].reached(race.settings.target) for name in (PLAIN, first)]
    sent = [point.sent_bytes if point else 0.0 for point in ends]
    fewer = f" and sent {_times(sent[0] / sent[1])} fewer bytes" if sent[1] else ""
    return f"{first} {would} {goal} {_times(sooner)} sooner than {PLAIN}{_where(race)}{fewer}."


def _nothing_paid(race: Race, arrived: dict[str, float], goal: str) -> str:
    others = {name: s for name, s in arrived.items() if name != PLAIN}
    sentence = f"Nothing pays on these links: {PLAIN} reached {goal} in {arrived[PLAIN]:.1f} s"
    if not others:
        return f"{sentence}, and no other strategy did in {race.settings.steps} steps."
    nearest = min(others, key=lambda name: others[name])
    return f"{sentence}, {nearest} in {others[nearest]:.1f} s."


def _where(race: Race) -> str:
    rate = race.settings.rate
    return "" if race.machine.shaped else f" over links of {rate} (predicted)"


def _times(ratio: float) -> str:
    return f"{ratio:.0f}×" if ratio >= 20 else f"{ratio:.1f}×"
