"""laconic: data-parallel PyTorch training over thin wires."""

from laconic._key import Key
from laconic._wire import Wire
from laconic.codecs import (
    BF16,
    DQSG,
    ECDQ,
    FP16,
    NDQSG,
    QSGD,
    Codec,
    Feedback,
    Global,
    GlobalExp,
    Place,
    QSGDTopK,
    Rotate,
    Uncompressed,
    codec,
    codecs,
    wrappers,
)
from laconic.errors import ConfigError, LaconicError, WireError

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "DQSG",
    "ECDQ",
    "FP16",
    "NDQSG",
    "QSGD",
    "Codec",
    "ConfigError",
    "Feedback",
    "Global",
    "GlobalExp",
    "Key",
    "LaconicError",
    "Place",
    "QSGDTopK",
    "Rotate",
    "Uncompressed",
    "Wire",
    "WireError",
    "codec",
    "codecs",
    "wrappers",
]
