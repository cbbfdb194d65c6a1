"""How fast links are: in both directions alike or not, all hosts alike or not."""

from __future__ import annotations

import math
from dataclasses import dataclass

from laconic._units import parse_rate
from laconic.errors import ConfigError

_SLOWEST, _FASTEST = 0.1, 100_000.0  # Mbit/s


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A link's rates, seen from its host; None is no limit.

    >>> Rate(up_mbit=20, down_mbit=100)
    Rate(up_mbit=20, down_mbit=100)
    """

    up_mbit: float | None = None
    down_mbit: float | None = None

    def __post_init__(self) -> None:
        check_rate(self.up_mbit)
        check_rate(self.down_mbit)


Rates = float | Rate | None | list[float | Rate | None] | tuple[float | Rate | None, ...]


def check_rate(rate_mbit: float | None) -> None:
    """ConfigError unless this is a rate that a link can have."""
    if rate_mbit is None:
        return
    number = isinstance(rate_mbit, int | float) and not isinstance(rate_mbit, bool)
    if not number or not math.isfinite(rate_mbit) or not _SLOWEST <= rate_mbit <= _FASTEST:
        raise ConfigError(
            f"rate_mbit must be a number from {_SLOWEST:g} to {_FASTEST:g}, or None for links "
            f"without a limit, not {rate_mbit!r}"
        )


def rate_of(rate: float | Rate | None) -> Rate:
    """A number is both directions'."""
    return rate if isinstance(rate, Rate) else Rate(up_mbit=rate, down_mbit=rate)


def rates_of(rates: Rates, hosts: int) -> tuple[Rate, ...]:
    """Every host's; one for all, or a list with one for each."""
    if not isinstance(rates, list | tuple):
        return (rate_of(rates),) * hosts
    if len(rates) != hosts:
        raise ConfigError(f"give one rate, or {hosts}, one for each host, not {len(rates)}")
    return tuple(rate_of(rate) for rate in rates)


def parse_rates(text: str, hosts: int) -> tuple[Rate, ...]:
    """Parse rates: 100mbit, 1gbit, none; up/down; one for all, or a list with commas.

    >>> parse_rates("100mbit", 2) == rates_of(100.0, 2)
    True
    >>> parse_rates("1gbit,20mbit/100mbit", 2)[1]
    Rate(up_mbit=20.0, down_mbit=100.0)
    """
    found: list[float | Rate | None] = [_parse(part.strip()) for part in text.split(",")]
    return rates_of(found[0] if len(found) == 1 else found, hosts)


def _parse(text: str) -> Rate:
    both = [_number(half.strip()) for half in text.replace("bit/s", "bit").split("/")]
    if len(both) > 2:
        raise ConfigError(f"{text!r}: a link has two rates at most, up/down")
    return Rate(up_mbit=both[0], down_mbit=both[-1])


def _number(text: str) -> float | None:
    if text == "none":
        return None
    return parse_rate(text, "100mbit, 1.5gbit, 500kbit or none") / 1e6
