"""Numbers and lists as people write them."""

from __future__ import annotations

import math
from collections.abc import Iterable

NONE = "–"  # what a cell without a number shows


def against(value: float | None, budget: float | None) -> str:
    """What was spent of a budget: 0.0712 (0.08)."""
    return NONE if value is None else f"{number(value)} ({number(budget)})"


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, no exponent where plain digits are short: 0.0213, 4.12, 1,240."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if not -5 < size < 9:
        return f"{value:.{digits - 1}e}"
    # 9.996 becomes 10.0, one digit more before the point
    rounded = round(value, digits - 1 - size)
    size = math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(0, digits - 1 - size)}f}"


def percent(share: float | None) -> str:
    """93.3%."""
    if share is None or not math.isfinite(share):
        return number(share)
    return f"{100 * share:.1f}%"


def goal(share: float) -> str:
    """97%: as few digits as it was typed with."""
    return f"{100 * share:.6g}%"


def seconds(value: float | None) -> str:
    """4.12 s; a line does not end before the unit."""
    return NONE if value is None else f"{number(value)}\u00a0s"


def milliseconds(value: float | None) -> str:
    """21.5: the column says what it is."""
    return number(None if value is None else 1e3 * value)


def megabytes(value: float | None) -> str:
    """Of a million bytes."""
    return number(None if value is None else value / 1e6)


def times(value: float | None) -> str:
    """5.2×."""
    return NONE if value is None else f"{number(value, 2)}×"


def listed(names: Iterable[str]) -> str:
    """a, b and c."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
