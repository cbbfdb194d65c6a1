"""Texts such as "qsgd:bits=4" and "feedback(dqsg:bits=2)" to codecs; errors say what is allowed.

spec = name [":" settings]  |  wrapper "(" spec ")" [":" settings]
settings = name "=" value {"," name "=" value}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NamedTuple

from laconic.codecs._base import Codec
from laconic.errors import ConfigError

Kinds = Mapping[str, type[Codec]]


def build(spec: str, kinds: Kinds, wrappers: Kinds) -> Codec:
    """Make the codec that `spec` names."""
    if not isinstance(spec, str):
        raise ConfigError(f"a codec is named by a text such as 'dqsg:bits=4', not {spec!r}")
    name, inside, rest = _cut(spec)
    if inside is None:
        kind = _plain(name, kinds, wrappers)
        return kind(**_settings(kind, rest))
    kind = _wrapper(name, inside, kinds, wrappers)
    inner = build(inside, kinds, wrappers)
    check_inner(name, inner)
    return kind(**{"inner": inner, **_settings(kind, rest)})


def check_inner(name: str, inner: object) -> None:
    """A wrapper wraps a codec without memory: what is remembered must not be wrapped anew."""
    if not isinstance(inner, Codec):
        raise ConfigError(f"{name} wraps a codec, not {inner!r}: give inner=lc.codec(...)")
    if inner.name == "feedback":
        raise ConfigError(f"{name} cannot wrap feedback, which stands outside and once only")


class _Parts(NamedTuple):
    name: str
    inside: str | None  # of the brackets
    rest: str  # settings


def _cut(spec: str) -> _Parts:
    """Name, what is in brackets, settings."""
    depth, close = 0, None
    for place, letter in enumerate(spec):
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            raise ConfigError(f"{spec!r} closes a bracket that it did not open")
        if letter == ")" and depth == 0 and close is None:
            close = place
    if depth:
        raise ConfigError(f"{spec!r} does not close its brackets: {depth} ')' missing at the end")
    head, _, rest = spec.partition(":")
    if close is None:
        return _Parts(head.strip(), None, rest)
    if "(" not in head:
        raise ConfigError(f"{spec!r}: brackets stand right behind a wrapper's name")
    name, _, _ = head.partition("(")
    inside, behind = spec[len(name) + 1 : close], spec[close + 1 :].strip()
    name = name.strip()
    if behind and not behind.startswith(":"):
        raise ConfigError(
            f"{name}: settings stand behind the bracket and a colon, as in "
            f"{name}(...):setting=value, not {behind!r}"
        )
    return _Parts(name, inside, behind[1:])


def _plain(name: str, kinds: Kinds, wrappers: Kinds) -> type[Codec]:
    """The codec of that name, which needs no brackets."""
    if name in wrappers:
        raise ConfigError(f"{name} wraps another codec: write {name}(dqsg:bits=4), for instance")
    if name not in kinds:
        known = [*kinds, *(f"{wrapper}(...)" for wrapper in wrappers)]
        raise ConfigError(f"no codec is called {name!r}; {_nearest(name, known)}")
    return kinds[name]


def _wrapper(name: str, inside: str, kinds: Kinds, wrappers: Kinds) -> type[Codec]:
    """The wrapper of that name."""
    if name in kinds:
        raise ConfigError(
            f"{name} is a codec and wraps no other: write {name} alone, or a wrapper in its place "
            f"({', '.join(wrappers)})"
        )
    if name not in wrappers:
        raise ConfigError(f"no wrapper is called {name!r}; {_nearest(name, list(wrappers))}")
    if not inside.strip():
        raise ConfigError(f"{name}() wraps nothing: write {name}(dqsg:bits=4), for instance")
    return wrappers[name]


def _settings(kind: type[Codec], rest: str) -> dict[str, Any]:
    """The settings that `rest` gives, checked by name."""
    own = fields(kind)  # pyright: ignore[reportArgumentType] (codecs are dataclasses)
    known = [field.name for field in own if field.init]
    hint = ""
    if "inner" in known:
        known.remove("inner")
        hint = "; settings of the codec inside stand inside the brackets"
    given: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if not equals or not text:
            raise ConfigError(f"{kind.name}: settings look like bits=4, not {part!r}")
        if key not in known:
            raise ConfigError(f"{kind.name} has no setting {key!r}; {_nearest(key, known)}{hint}")
        if key in given:
            raise ConfigError(f"{kind.name}: {key} is given twice")
        given[key] = _value(text)
    return given


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
    return text


def _nearest(word: str, known: list[str]) -> str:
    if not known:
        return "it has no settings"
    close = get_close_matches(word, known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}? (there are {', '.join(known)})"
    return f"there are {', '.join(known)}"


def split(text: str) -> tuple[str, ...]:
    """Texts of codecs between commas, which codecs have inside, too; they are not checked.

    >>> split("dqsg:bits=4,ecdq:error=0.08,coder=rans")
    ('dqsg:bits=4', 'ecdq:error=0.08,coder=rans')
    """
    found: list[str] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        inside = found and found[-1].count("(") > found[-1].count(")")
        setting = ":" not in part and "=" in part
        if inside or (found and setting):
            found[-1] += f",{part}"
        else:
            found.append(part)
    return tuple(found)
