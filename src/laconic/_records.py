"""Frozen dataclasses from JSON: every value is of the type that its field declares."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from reprlib import repr as shortened
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

_LARGEST_INT, _LARGEST = 2**63, 1e100  # products of them do not overflow

_hints = cache(get_type_hints)


def record(kind: type[Any], found: object, where: str = "") -> Any:
    """An object of the dataclass `kind`; ValueError names the field that does not fit.

    Fields with a default may be missing, and names that the class does not know are passed over:
    another version may have written them.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{where or 'it'} is {shortened(found)}, not an object")
    known = {one.name: one for one in fields(kind) if one.init}
    lacking = [
        name
        for name, one in known.items()
        if name not in found and one.default is MISSING and one.default_factory is MISSING
    ]
    if lacking:
        raise ValueError(f"{where or 'it'} has no {lacking[0]!r}")
    hints = _hints(kind)
    return kind(
        **{
            name: _value(hints[name], found[name], f"{where}.{name}".lstrip("."))
            for name in known
            if name in found
        }
    )


def _value(hint: Any, found: object, where: str) -> Any:
    choices = [one for one in get_args(hint) if one is not NoneType]
    if get_origin(hint) is tuple:
        if not isinstance(found, list | tuple):
            raise ValueError(f"{where} is {shortened(found)}, not a list")
        return tuple(_value(choices[0], one, f"{where}[{i}]") for i, one in enumerate(found))
    if get_origin(hint) is dict:
        if not isinstance(found, dict):
            raise ValueError(f"{where} is {shortened(found)}, not an object")
        return {name: _value(choices[1], one, f"{where}.{name}") for name, one in found.items()}
    if choices:  # X | None
        return None if found is None else _value(choices[0], found, where)
    if is_dataclass(hint):
        return record(hint, found, where)  # pyright: ignore[reportArgumentType]
    if hint in (int, float):
        return _number(hint, found, where)
    if not isinstance(found, hint):
        raise ValueError(f"{where} is {shortened(found)}, not {_WORDS[hint]}")
    return found


_WORDS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}


def _number(hint: Any, found: object, where: str) -> float:
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise ValueError(f"{where} is {shortened(found)}, not {_WORDS[hint]}")
    if hint is int and not (math.isfinite(found) and found == int(found)):
        raise ValueError(f"{where} is {found}, not {_WORDS[hint]}")
    size, whole = abs(found), hint is int or isinstance(found, int)
    if size >= _LARGEST_INT if whole else _LARGEST < size < math.inf:
        raise ValueError(f"{where} is {shortened(found)}, which is too large")
    if 0 < size < 1 / _LARGEST:
        raise ValueError(f"{where} is {found}, which is too small")
    return int(found) if hint is int else found


def numbers(made: object, where: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a dataclass, with their places."""
    if isinstance(made, int | float) and not isinstance(made, bool):
        yield where, made
    elif isinstance(made, tuple):
        for at, one in enumerate(made):
            yield from numbers(one, f"{where}[{at}]")
    elif is_dataclass(made):
        for one in fields(made):
            yield from numbers(getattr(made, one.name), f"{where}.{one.name}".lstrip("."))
