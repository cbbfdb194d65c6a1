"""Spec strings such as "ring:pieces=8": a name, and settings of the dataclass that it names.

spec = name [":" settings]
settings = name "=" value {"," name "=" value}

A value that has commas stands in parentheses: "hierarchical:inner=(nested:side=own,every=8)".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from laconic.errors import ConfigError

_RESERVED = set(":,=()@ ")  # mean something in specs such as "rotate(dqsg:bits=4)@allgather"
_Made = TypeVar("_Made")


def from_spec(what: str, spec: str, kinds: Mapping[str, type[_Made]]) -> _Made:
    """Make the object that `spec` names among `kinds`; `what` they are is for errors."""
    if not isinstance(spec, str):
        raise ConfigError(
            f"a spec string such as {next(iter(kinds))!r} names the {what}, not {spec!r}"
        )
    name, _, rest = spec.strip().partition(":")
    if name.endswith(")") and not rest:  # name(settings): as they were printed before
        name, _, rest = name[:-1].partition("(")
    kind = kinds.get(name.strip())
    if kind is None:
        raise ConfigError(f"no {what} is called {name.strip()!r}; {nearest(name, list(kinds))}")
    return kind(**settings(kind, rest))


def to_spec(made: Any) -> str:
    """The spec that names an object: settings that differ from their defaults.

    A field that takes no part in comparisons (`compare=False`) is not a setting.
    """
    given = []
    for one in fields(made):
        value = getattr(made, one.name)
        if one.compare and value != one.default:
            given.append(f"{one.name}={_as_text(value)}")
    return f"{made.name}:{','.join(given)}" if given else made.name


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value).replace(" ", "") if isinstance(value, float | tuple) else str(value)
    return f"({text})" if "," in text and not text.startswith("(") else text


def settings(
    kind: type[Any], text: str, *, without: Iterable[str] = (), hint: str = ""
) -> dict[str, Any]:
    """The settings of a dataclass that a text gives, checked by name.

    None of `without`; `hint` follows the error about a name that is not known.
    """
    known = [one.name for one in fields(kind) if one.init and one.name not in without]
    given: dict[str, Any] = {}
    for part in filter(None, map(str.strip, _parts(text))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ConfigError(f"{kind.name}: settings look like bits=4, not {part!r}")
        if key not in known:
            raise ConfigError(f"{kind.name} has no setting {key!r}; {nearest(key, known)}{hint}")
        if key in given:
            raise ConfigError(f"{kind.name}: {key} is given twice")
        given[key] = _value(value)
    return given


def _parts(text: str) -> Iterator[str]:
    """What stands between commas, those in parentheses left alone."""
    depth, start = 0, 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            yield text[start:place]
            start = place + 1
    yield text[start:]


def _value(text: str) -> int | float | str | None:
    if text == "tensor":
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def nearest(word: str, known: list[str]) -> str:
    """What may have been meant, and what there is."""
    if not known:
        return "it has no settings"
    close = get_close_matches(word, known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}? (there are {', '.join(known)})"
    return f"there are {', '.join(known)}"


def check_kind(kind: Any, base: type[Any], register: str, others: Iterable[Any]) -> None:
    """ConfigError unless specs can name objects of a class, and of no other one, by its `name`."""
    if not (isinstance(kind, type) and issubclass(kind, base) and is_dataclass(kind)):
        raise ConfigError(
            f"{register} takes a dataclass that is a subclass of laconic.{base.__name__}, not "
            f"{kind!r}"
        )
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name or _RESERVED & set(name) or name == "auto":
        raise ConfigError(
            f"{kind.__name__}.name is the word that specs name it by, without any of "
            f"': , = ( ) @' and spaces; not {name!r}"
        )
    for other in others:
        if not same_class(other, kind) and other.name == name:
            raise ConfigError(f"{name} is {other.__name__}'s name: choose another one")


def same_class(other: type[Any], kind: type[Any]) -> bool:
    """Whether a class is one that was imported again, as in a notebook: it replaces the first."""
    return (other.__module__, other.__qualname__) == (kind.__module__, kind.__qualname__)
