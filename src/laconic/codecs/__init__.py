"""Codecs: how few bits represent this gradient."""

from __future__ import annotations

import warnings
from typing import Any

from laconic._wire import Header
from laconic.codecs._base import Codec, DecodeTarget, Place
from laconic.codecs._cast import BF16, FP16, Uncompressed
from laconic.codecs._dqsg import DQSG, NDQSG
from laconic.codecs._ecdq import ECDQ
from laconic.codecs._feedback import Feedback
from laconic.codecs._global import Global, GlobalExp
from laconic.codecs._linear import uniform
from laconic.codecs._qsgd import QSGD, QSGDTopK
from laconic.codecs._register import codec, codecs, register_codec, wrappers
from laconic.codecs._residuals import Residuals
from laconic.codecs._rotate import Rotate

__all__ = [
    "BF16",
    "DQSG",
    "ECDQ",
    "FP16",
    "NDQSG",
    "QSGD",
    "Codec",
    "DecodeTarget",
    "Feedback",
    "Global",
    "GlobalExp",
    "Header",
    "Place",
    "QSGDTopK",
    "Residuals",
    "Rotate",
    "Uncompressed",
    "codec",
    "codecs",
    "register_codec",
    "uniform",
    "wrappers",
]


def __getattr__(name: str) -> Any:
    if name == "Into":
        text = "laconic.codecs.Into is now called DecodeTarget: use that name"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return DecodeTarget
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
