"""Race: the same network, the same data, one strategy after another, and a verdict.

laconic race --rate 100mbit --strategies fp32,ecdq
"""

from __future__ import annotations

from laconic.race._race import Watcher, race
from laconic.race._result import Lane, Machine, Parts, Point, Quantized, Race, Settings, Task
from laconic.race._strategies import DEFAULT, PLAIN, Entry, entries
from laconic.race._tasks import COURSES, Course
from laconic.race._verdict import seconds_to_target, verdict

__all__ = [
    "COURSES",
    "DEFAULT",
    "PLAIN",
    "Course",
    "Entry",
    "Lane",
    "Machine",
    "Parts",
    "Point",
    "Quantized",
    "Race",
    "Settings",
    "Task",
    "Watcher",
    "entries",
    "race",
    "seconds_to_target",
    "verdict",
]
