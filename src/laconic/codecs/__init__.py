"""Codecs: how few bits can say this gradient."""

from __future__ import annotations

from typing import TypeVar

from laconic._wire import Header
from laconic.codecs._base import Codec, Into
from laconic.codecs._cast import BF16, FP16, Uncompressed
from laconic.codecs._dqsg import DQSG
from laconic.codecs._ecdq import ECDQ
from laconic.codecs._feedback import Feedback
from laconic.codecs._global import Global
from laconic.codecs._global_exp import GlobalExp
from laconic.codecs._memory import Place
from laconic.codecs._ndqsg import NDQSG
from laconic.codecs._own import check_kind, uniform
from laconic.codecs._qsgd import QSGD
from laconic.codecs._rotate import Rotate
from laconic.codecs._spec import build
from laconic.codecs._topk import QSGDTopK

__all__ = [
    "BF16",
    "DQSG",
    "ECDQ",
    "FP16",
    "NDQSG",
    "QSGD",
    "Codec",
    "Feedback",
    "Global",
    "GlobalExp",
    "Header",
    "Into",
    "Place",
    "QSGDTopK",
    "Rotate",
    "Uncompressed",
    "codec",
    "codecs",
    "register_codec",
    "uniform",
    "wrappers",
]

_Kind = TypeVar("_Kind", bound=type[Codec])

_BY_NAME: dict[str, type[Codec]] = {
    kind.name: kind
    for kind in (Uncompressed, FP16, BF16, QSGD, DQSG, NDQSG, Global, GlobalExp, QSGDTopK, ECDQ)
}

_WRAPPERS: dict[str, type[Codec]] = {kind.name: kind for kind in (Feedback, Rotate)}


def codec(spec: str | Codec) -> Codec:
    """The codec that a text such as "dqsg:bits=4,block=1024" names; a codec is returned as is.

    Wrappers take a codec in brackets, and settings behind them: "rotate(dqsg:bits=4):block=2048".

    >>> codec("global-exp:bits=4")
    GlobalExp(bits=4)
    >>> codec("feedback(qsgd-topk)")
    Feedback(inner=QSGDTopK())
    """
    return spec if isinstance(spec, Codec) else build(spec, _BY_NAME, _WRAPPERS)


def codecs() -> list[str]:
    """The names that `codec` accepts, without wrappers."""
    return list(_BY_NAME)


def wrappers() -> list[str]:
    """The names that `codec` accepts in front of a codec in brackets."""
    return list(_WRAPPERS)


def register_codec(kind: _Kind) -> _Kind:
    """Let `codec`, and so `lc.compress`, know a codec of your own by its name; a decorator.

    `kind` is a frozen dataclass and a subclass of `Codec`; its `id`, from 128 to 255, marks its
    wires. Register it on every rank, where the module that holds it is imported.
    `laconic.testing.check_codec` says whether it keeps the contract.
    """
    check_kind(kind, (*_BY_NAME.values(), *_WRAPPERS.values()))
    _BY_NAME[kind.name] = kind
    return kind
