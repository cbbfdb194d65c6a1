"""Whom long work tells what it does: `watch(what, done)`, with the part that is done, 0 to 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Name = TypeVar("Name")
Watch = Callable[[str, float], None]


def unwatched(what: str, done: float) -> None:
    """Nobody looks."""


def part(watch: Watch, start: float, end: float) -> Watch:
    """For a part of the work: its 0 is the whole's `start`, its 1 the whole's `end`.

    >>> part(lambda what, done: print(what, done), 0.5, 1.0)("codecs", 0.5)
    codecs 0.75
    """
    return lambda what, done: watch(what, start + (end - start) * min(1.0, max(0.0, done)))


def announced(names: Sequence[Name], watch: Watch) -> Iterator[Name]:
    """Each in turn, told before it is worked on.

    >>> list(announced(["a", "b"], lambda what, done: print(what, done)))
    a 0.0
    b 0.5
    ['a', 'b']
    """
    for number, name in enumerate(names):
        watch(str(name), number / len(names))
        yield name
