"""Texts such as "qsgd:bits=4,norm=l2" to codecs, with errors that say what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from laconic.codecs._base import Codec
from laconic.errors import ConfigError


def build(spec: str, kinds: Mapping[str, type[Codec]]) -> Codec:
    """Make the codec that `spec` names."""
    if not isinstance(spec, str):
        raise ConfigError(f"a codec is named by a text such as 'dqsg:bits=4', not {spec!r}")
    name, _, rest = spec.partition(":")
    kind = kinds.get(name.strip())
    if kind is None:
        raise ConfigError(f"no codec is called {name!r}; {_nearest(name, list(kinds))}")
    settings = [field.name for field in fields(kind)]  # pyright: ignore[reportArgumentType]
    given: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if not equals or not text:
            raise ConfigError(f"{name}: settings look like bits=4, not {part!r}")
        if key not in settings:
            raise ConfigError(f"{name} has no setting {key!r}; {_nearest(key, settings)}")
        if key in given:
            raise ConfigError(f"{name}: {key} is given twice")
        given[key] = _value(text)
    return kind(**given)


def _value(text: str) -> int | float | str | None:
    if text == "tensor":
        return None
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
