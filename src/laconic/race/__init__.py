"""Race: train the same network on the same data with several strategies, and compare.

laconic race --rate 100mbit --strategies fp32,ecdq
"""

from __future__ import annotations

from laconic.race._data import COURSES, Course
from laconic.race._race import Watcher, race
from laconic.race._result import (
    Lane,
    Machine,
    Parts,
    Point,
    Quantized,
    Race,
    Settings,
    Task,
    seconds_to_target,
    verdict,
)
from laconic.race._strategies import DEFAULT, PLAIN, Entry, entries

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
