"""Rates, times and counts as people write them, and back."""

from __future__ import annotations

import math
import re

from laconic.errors import ConfigError

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zµ]*)")


def parse_rate(text: str, like: str = "100mbit or 25gbit") -> float:
    """Bits per second; `like` gives examples for the error.

    >>> parse_rate("25gbit")
    25000000000.0
    """
    return _parse(text.removesuffix("/s"), _RATES, f"a rate is like {like}")


def parse_seconds(text: str) -> float:
    """Of a latency or a step.

    >>> parse_seconds("400ms")
    0.4
    """
    return _parse(text, _TIMES, "a time is like 30us, 400ms or 1.5s")


def parse_count(text: str) -> int:
    """Of parameters.

    >>> parse_count("7b")
    7000000000
    """
    found = round(_parse(text, _COUNTS, "a number is like 125m, 7b or 1860000"))
    if found < 1:
        raise ConfigError(f"a number is like 125m, 7b or 1860000, and 1 or more, not {text!r}")
    return found


def _parse(text: str, units: dict[str, float], like: str) -> float:
    match = _FORM.fullmatch(text.strip().lower())
    number = float(match[1]) * units[match[2]] if match and match[2] in units else 0.0
    if not 0 < number < math.inf:
        raise ConfigError(f"{like}, not {text!r}")
    return number


def rate(bit_s: float) -> str:
    """

    >>> rate(41.2e9)
    '41 Gbit/s'
    """
    return _in_units(
        bit_s, {f"{name[:-3].capitalize()}bit/s": size for name, size in _RATES.items()}
    )


def seconds(span_s: float) -> str:
    """

    >>> seconds(0.0004)
    '400 µs'
    """
    return _in_units(span_s, {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0})


def size(nbytes: float) -> str:
    """

    >>> size(14e9)
    '14 GB'
    """
    return _in_units(nbytes, _BYTES)


def _in_units(amount: float, units: dict[str, float]) -> str:
    """With two digits or more, in the largest unit that leaves 1 or more before the point."""
    if not amount:
        return "0"
    fitting = [name for name, one in units.items() if amount >= 0.9995 * one]
    name = fitting[-1] if fitting else next(iter(units))
    number = amount / units[name]
    digits = 0 if number >= 9.95 else 1
    return f"{number:.{digits}f} {name}"
