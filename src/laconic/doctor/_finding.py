"""What a check found, and how ranks are named in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line: what was checked, whether it is in order, and if it is not, what to do.

    `ranks` are those that it is about; none are all.
    """

    check: str
    ok: bool
    text: str
    advice: str = ""
    ranks: tuple[int, ...] = ()


def fine(check: str, text: str, advice: str = "") -> Finding:
    """All is in order."""
    return Finding(check=check, ok=True, text=text, advice=advice)


def problem(check: str, text: str, advice: str, ranks: Sequence[int] = ()) -> Finding:
    """Training would fail, or be slower than it need be."""
    return Finding(check=check, ok=False, text=text, advice=advice, ranks=tuple(ranks))


def named(ranks: Sequence[int]) -> str:
    """

    >>> named([1]), named([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def odd_ones(values: Mapping[int, str]) -> tuple[str, dict[str, list[int]]]:
    """What most ranks have, and the ranks that have something else, by what they have.

    >>> odd_ones({0: "a", 1: "b", 3: "a"})
    ('a', {'b': [1]})
    """
    usual = Counter(values.values()).most_common(1)[0][0] if values else ""
    odd: dict[str, list[int]] = {}
    for rank, value in values.items():
        if value != usual:
            odd.setdefault(value, []).append(rank)
    return usual, odd
