"""Codecs: how few bits can say this gradient."""

from __future__ import annotations

from laconic.codecs._base import Codec
from laconic.codecs._cast import BF16, FP16, Uncompressed
from laconic.codecs._dqsg import DQSG
from laconic.codecs._global import Global
from laconic.codecs._global_exp import GlobalExp
from laconic.codecs._ndqsg import NDQSG
from laconic.codecs._qsgd import QSGD
from laconic.codecs._spec import build
from laconic.codecs._topk import QSGDTopK

__all__ = [
    "BF16",
    "DQSG",
    "FP16",
    "NDQSG",
    "QSGD",
    "Codec",
    "Global",
    "GlobalExp",
    "QSGDTopK",
    "Uncompressed",
    "codec",
    "codecs",
]

_BY_NAME: dict[str, type[Codec]] = {
    kind.name: kind
    for kind in (Uncompressed, FP16, BF16, QSGD, DQSG, NDQSG, Global, GlobalExp, QSGDTopK)
}


def codec(spec: str | Codec) -> Codec:
    """The codec that a text such as "dqsg:bits=4,block=1024" names; a codec is returned as is.

    >>> codec("dqsg:bits=4,block=1024")
    DQSG(bits=4, levels=7, block=1024)
    """
    return spec if isinstance(spec, Codec) else build(spec, _BY_NAME)


def codecs() -> list[str]:
    """The names that `codec` accepts."""
    return list(_BY_NAME)
