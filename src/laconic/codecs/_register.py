"""The table of codecs and wrappers by name; specs such as "feedback(dqsg:bits=2)" to codecs.

spec = name [":" settings]  |  wrapper "(" spec ")" [":" settings]
settings = name "=" value {"," name "=" value}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from laconic._spec import check_kind, nearest, same_class, settings
from laconic.codecs._base import Codec
from laconic.codecs._cast import BF16, FP16, Uncompressed
from laconic.codecs._dqsg import DQSG, NDQSG
from laconic.codecs._ecdq import ECDQ
from laconic.codecs._feedback import Feedback
from laconic.codecs._global import Global, GlobalExp
from laconic.codecs._qsgd import QSGD, QSGDTopK
from laconic.codecs._rotate import Rotate
from laconic.codecs._wrapper import Wrapper
from laconic.errors import ConfigError

_FIRST_ID, _LAST_ID = 128, 255  # of wires of registered codecs; smaller numbers are laconic's own
_Kind = TypeVar("_Kind", bound=type[Codec])
Kinds = Mapping[str, type[Codec]]

_KINDS: dict[str, type[Codec]] = {
    kind.name: kind
    for kind in (
        *(Uncompressed, FP16, BF16, QSGD, DQSG, NDQSG, Global, GlobalExp, QSGDTopK, ECDQ),
        *(Feedback, Rotate),
    )
}


def codec(spec: str | Codec) -> Codec:
    """The codec that a spec such as "dqsg:bits=4,block=1024" names; a codec is returned as is.

    Wrappers take a codec in parentheses, and settings after: "rotate(dqsg:bits=4):block=2048".

    >>> codec("global-exp:bits=4")
    GlobalExp(bits=4)
    >>> codec("feedback(qsgd-topk)")
    Feedback(inner=QSGDTopK())
    """
    return spec if isinstance(spec, Codec) else build(spec, _KINDS)


def codecs() -> list[str]:
    """The names that `codec` accepts, without wrappers."""
    return _names(_KINDS, wrap=False)


def wrappers() -> list[str]:
    """The names that `codec` accepts in front of a codec in parentheses."""
    return _names(_KINDS, wrap=True)


def register_codec(kind: _Kind) -> _Kind:
    """Let `codec`, and so `lc.compress`, know a codec of your own by its name; a decorator.

    `kind` is a frozen dataclass and a subclass of `Codec`; its `id`, from 128 to 255, marks its
    wires. Register it on every rank, where the module that holds it is imported.
    `laconic.testing.check_codec` says whether it keeps the contract.
    """
    others = list(_KINDS.values())
    check_kind(kind, Codec, "register_codec", others)
    number = getattr(kind, "id", None)
    if not isinstance(number, int) or not _FIRST_ID <= number <= _LAST_ID:
        raise ConfigError(
            f"{kind.__name__}.id marks its wires: an integer from {_FIRST_ID} to {_LAST_ID}, not "
            f"{number!r}"
        )
    for other in others:
        if not same_class(other, kind) and other.id == number:
            raise ConfigError(f"{other.name} has id {number}: choose another one")
    _KINDS[kind.name] = kind
    return kind


def build(spec: str, kinds: Kinds) -> Codec:
    """Make the codec that `spec` names."""
    if not isinstance(spec, str):
        raise ConfigError(f"a codec is named by a spec such as 'dqsg:bits=4', not {spec!r}")
    name, inside, rest = _cut(spec)
    kind = kinds.get(name)
    if inside is None:
        if kind is None:
            known = [f"{one}(...)" if one in _names(kinds, wrap=True) else one for one in kinds]
            raise ConfigError(f"no codec is called {name!r}; {nearest(name, known)}")
        if issubclass(kind, Wrapper):
            raise ConfigError(f"{name} wraps another codec: write {name}(dqsg:bits=4), for example")
        return kind(**settings(kind, rest))
    others = _names(kinds, wrap=True)
    if kind is None:
        raise ConfigError(f"no wrapper is called {name!r}; {nearest(name, others)}")
    if not issubclass(kind, Wrapper):
        raise ConfigError(
            f"{name} is a codec and wraps no other: write {name} alone, or a wrapper in its place "
            f"({', '.join(others)})"
        )
    if not inside.strip():
        raise ConfigError(f"{name}() wraps nothing: write {name}(dqsg:bits=4), for example")
    hint = "; settings of the codec inside go inside the parentheses"
    return kind(inner=build(inside, kinds), **settings(kind, rest, without=("inner",), hint=hint))


def _names(kinds: Kinds, *, wrap: bool) -> list[str]:
    return [name for name, kind in kinds.items() if issubclass(kind, Wrapper) == wrap]


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
        raise ConfigError(f"{spec!r}: brackets follow a wrapper's name directly")
    name, _, _ = head.partition("(")
    inside, after = spec[len(name) + 1 : close], spec[close + 1 :].strip()
    name = name.strip()
    if after and not after.startswith(":"):
        raise ConfigError(
            f"{name}: settings follow the bracket and a colon, as in "
            f"{name}(...):setting=value, not {after!r}"
        )
    return _Parts(name, inside, after[1:])


def split(text: str) -> tuple[str, ...]:
    """Specs of codecs between commas, which codecs have inside, too; they are not checked.

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
