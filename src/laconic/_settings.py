"""What the settings of a dataclass may be: declared with each field, for checks and for help.

bits: int = field(default=4, metadata=between(2, 8))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from laconic.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Values of a setting: a list, a range, or what only words describe."""

    words: str
    choices: tuple[object, ...] = ()
    least: float | None = None
    most: float = 0.0
    kind: Any = int

    def holds(self, value: Any) -> bool:
        """Whether the value is allowed; True for what only words describe."""
        if self.choices:
            return any(type(value) is type(one) and value == one for one in self.choices)
        if self.least is None:
            return True
        number = isinstance(value, self.kind) and not isinstance(value, bool)
        return number and self.least <= value <= self.most


def one_of(*choices: object) -> Mapping[str, Allowed]:
    """A field's metadata: one of these values."""
    words = [str(one).lower() if isinstance(one, bool) else str(one) for one in choices]
    return {"allowed": Allowed(choices=choices, words=f"one of {', '.join(words)}")}


def between(least: float, most: float = math.inf, *, integer: bool = True) -> Mapping[str, Allowed]:
    """A field's metadata: an integer, or a number, of this range."""
    what, kind = ("an integer", int) if integer else ("a number", int | float)
    limits = f"of {least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
    words = f"{what} {limits}"
    return {"allowed": Allowed(least=least, most=most, kind=kind, words=words)}


def described(words: str) -> Mapping[str, Allowed]:
    """A field's metadata: words, where __post_init__ checks the value itself."""
    return {"allowed": Allowed(words=words)}


def check_settings(owner: Any) -> None:
    """ConfigError for a value that is not allowed; None is allowed where it is the default."""
    for one in fields(owner):
        allowed, value = one.metadata.get("allowed"), getattr(owner, one.name)
        if allowed and not (value is None and one.default is None) and not allowed.holds(value):
            raise refused(owner, one.name)


def refused(owner: Any, name: str) -> ConfigError:
    """The error for a value that is not allowed."""
    allowed = next(one.metadata["allowed"] for one in fields(owner) if one.name == name)
    value = getattr(owner, name)
    close = get_close_matches(str(value), [str(one) for one in allowed.choices], n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return ConfigError(f"{owner.name}: {name} must be {allowed.words}, not {value!r}{hint}")


def whole(name: str, value: object, least: int, most: float = math.inf) -> int:
    """value, if it is an integer from `least` to `most`; else a ConfigError."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        limit = "" if most == math.inf else f" to {most}"
        raise ConfigError(f"{name} must be an integer from {least}{limit}, not {value!r}")
    return value


def settings_of(owner: Any) -> Iterator[tuple[str, object, str]]:
    """Name, value and allowed values of every setting of a codec or an exchange."""
    for one in fields(owner):
        if one.init and one.name != "inner":
            allowed = one.metadata.get("allowed")
            yield one.name, getattr(owner, one.name), allowed.words if allowed else ""
